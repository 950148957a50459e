"""The engine's own softmax over fewer columns, for routers that take it over the selected experts (gpt-oss).

In: scores of the experts kept, (n, n_kept) float32.  Out: their softmax, as the engine computes it for so many experts.

Silencing a column with -inf gives the right softmax, but not always the engine's to the last bit: its processor code
(`ggml_vec_soft_max_f32`) takes the exponentials of 4, 8 or 16 columns at a time with one function and those of the rest
with another, so 6 columns beside 2 silent ones may round differently than 6 alone.  The engine's operator over the
columns that are left rounds as they do.  It is reached through functions that `ggml` exports.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from agreement.engine.tensors import Tensors, exported
from agreement.errors import EngineError
from agreement.records import Float32Array

RowSoftmax = Callable[[Float32Array], Float32Array]

_F32 = 0  # GGML_TYPE_F32
_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_CONTEXT_BYTES = 1 << 20  # two tensors and a graph, without their data


class _InitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def engine_softmax(llama: Any) -> RowSoftmax | None:
    """Return a function that takes the engine's softmax of each row, None if this build does not offer what it takes.

    Without it, dropped columns stay silenced: the same softmax within rounding.
    """
    try:
        return _EngineSoftmax(llama)
    except EngineError:
        return None


class _EngineSoftmax:
    """Softmax of rows by `ggml` on the processor, on one thread; not to be called by several at a time."""

    def __init__(self, llama: Any) -> None:
        pointer = ctypes.c_void_p
        self._tensors = Tensors(llama)
        self._init = exported(llama, "ggml_init", pointer, _InitParams)
        self._free = exported(llama, "ggml_free", None, pointer)
        self._new_tensor = exported(
            llama, "ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
        )
        self._soft_max = exported(llama, "ggml_soft_max", pointer, pointer, pointer)
        self._new_graph = exported(llama, "ggml_new_graph", pointer, pointer)
        self._expand = exported(llama, "ggml_build_forward_expand", None, pointer, pointer)
        self._allocate = exported(llama, "ggml_backend_alloc_ctx_tensors", pointer, pointer, pointer)
        self._buffer_free = exported(llama, "ggml_backend_buffer_free", None, pointer)
        self._compute = exported(llama, "ggml_backend_graph_compute", ctypes.c_int, pointer, pointer)
        self._backend = exported(llama, "ggml_backend_init_by_type", pointer, ctypes.c_int, ctypes.c_char_p)(_CPU, None)
        if not self._backend:
            raise EngineError("the engine offers no processor backend")
        weakref.finalize(self, exported(llama, "ggml_backend_free", None, pointer), self._backend)
        _use_one_thread(llama, self._backend)

    def __call__(self, scores: Float32Array) -> Float32Array:
        """Return the softmax of each row.

        Args:
            scores: (n, k) float32.

        Returns:
            (n, k) float32.

        Raises:
            EngineError: The engine could not compute it.
        """
        scores = np.ascontiguousarray(scores, np.float32)
        n, k = scores.shape
        if not scores.size:
            return scores
        context = self._init(_InitParams(_CONTEXT_BYTES, None, True))
        buffer = None
        try:
            given = self._new_tensor(context, _F32, k, n)
            taken = self._soft_max(context, given)
            graph = self._new_graph(context)
            self._expand(graph, taken)
            buffer = self._allocate(context, self._backend)
            if not buffer:
                raise EngineError("no memory for the softmax of the router hook")
            self._tensors.write(given, scores.view(np.uint8))
            status = self._compute(self._backend, graph)
            if status:
                raise EngineError(f"the softmax of the router hook failed with status {status}")
            return self._tensors.read(taken, scores.nbytes).view(np.float32).reshape(n, k)
        finally:
            if buffer:
                self._buffer_free(buffer)
            self._free(context)


def _use_one_thread(llama: Any, backend: int) -> None:
    """Ask for one thread: rows are few, and the engine's own threads wait beside."""
    pointer = ctypes.c_void_p
    device = exported(llama, "ggml_backend_get_device", pointer, pointer)(backend)
    registry = exported(llama, "ggml_backend_dev_backend_reg", pointer, pointer)(device)
    find = exported(llama, "ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)
    found = find(registry, b"ggml_backend_set_n_threads")
    if found:
        ctypes.CFUNCTYPE(None, pointer, ctypes.c_int)(found)(backend, 1)
