"""Graph nodes of the engine: where their values lie, reading and writing them on whatever backend holds them.

In: the address of a `ggml_tensor`.  Out: its name, its layout, its bytes; errors where a build keeps its nodes in
another way than this module knows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agreement.errors import EngineError
from agreement.records import Float32Array

_F32 = 0  # GGML_TYPE_F32
_LIBRARIES = ("ggml-base", "ggml")
_LIBRARY_NAMES = ("lib{}.so", "lib{}.dylib", "{}.dll", "lib{}.dll")


class _TensorHead(ctypes.Structure):
    """The first fields of `ggml_tensor`: all that no exported function tells.

    The layout is checked against `ggml_nelements` and `ggml_nbytes` before it is believed.
    """

    _fields_ = (
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


@dataclass(frozen=True)
class TensorLayout:
    """Where the gate values lie in a node's memory.

    Attributes:
        ne: Elements along each dimension, the fastest first: (1, n_used, n_tokens, 1).
        nb: Bytes from one element to the next along each.
        n_bytes: Bytes from the first element to the end of the last.
    """

    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    n_bytes: int

    def rows(self, buffer: NDArray[np.uint8]) -> Float32Array:
        """Return a writable (n_tokens, n_used) float32 view of `buffer`, which holds `n_bytes` bytes of the node.

        Raises:
            EngineError: The node is not of a shape that this hook knows.
        """
        n_one, n_used, n_tokens, n_more = self.ne
        if n_one != 1 or n_more != 1:
            raise EngineError(f"router weights have the unknown shape {self.ne}; run separate passes")
        if any(stride % 4 for stride in self.nb[1:3]):
            raise EngineError(f"router weights have the unknown strides {self.nb}; run separate passes")
        view: Float32Array = np.lib.stride_tricks.as_strided(
            buffer.view(np.float32), (n_tokens, n_used), (self.nb[2], self.nb[1])
        )
        return view


class Tensors:
    """Reading and writing graph nodes on whatever backend holds them, through exported functions of `ggml-base`."""

    def __init__(self, llama: Any) -> None:
        self._name = exported(llama, "ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        self._n_bytes = exported(llama, "ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        self._n_elements = exported(llama, "ggml_nelements", ctypes.c_int64, ctypes.c_void_p)
        transfer = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
        self._get = exported(llama, "ggml_backend_tensor_get", None, *transfer)
        self._set = exported(llama, "ggml_backend_tensor_set", None, *transfer)
        self._is_host = exported(llama, "ggml_backend_buffer_is_host", ctypes.c_bool, ctypes.c_void_p)

    def name(self, tensor: int) -> bytes:
        """Return a node's name."""
        name: bytes = self._name(tensor)
        return name

    def layout(self, tensor: int) -> TensorLayout:
        """Return where a node's float32 values lie.

        Raises:
            EngineError: It holds something else, or this build keeps its nodes in another way.
        """
        head = _TensorHead.from_address(tensor)
        ne, nb = tuple(head.ne), tuple(head.nb)
        n_bytes, n_elements = int(self._n_bytes(tensor)), int(self._n_elements(tensor))
        spanned = 4 + sum((n - 1) * stride for n, stride in zip(ne, nb, strict=True)) if n_elements else 0
        if head.type != _F32 or int(np.prod(ne)) != n_elements or spanned != n_bytes:
            raise EngineError(
                f"{self.name(tensor).decode(errors='replace')} is not the float32 tensor that the router hook knows "
                f"(type {head.type}, {ne}, {n_bytes} bytes); run separate passes"
            )
        return TensorLayout(ne, nb, n_bytes)

    def on_host(self, tensor: int) -> bool:
        """Say whether a node's data lies in the processor's memory, so that the processor computed it."""
        buffer = _TensorHead.from_address(tensor).buffer
        return bool(buffer and self._is_host(buffer))

    def read(self, tensor: int, n_bytes: int) -> NDArray[np.uint8]:
        """Return the first `n_bytes` bytes of a node's data."""
        buffer = np.empty(n_bytes, np.uint8)
        self._get(tensor, buffer.ctypes.data, 0, n_bytes)
        return buffer

    def write(self, tensor: int, buffer: NDArray[np.uint8]) -> None:
        """Overwrite the first bytes of a node's data."""
        self._set(tensor, buffer.ctypes.data, 0, buffer.nbytes)


def exported(llama: Any, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return an exported function of `ggml-base` or `ggml`.

    A handle also finds the symbols of the libraries it depends on, except on Windows; there, and should a build hide
    them, the libraries are opened by their files beside llama.cpp's own.

    Raises:
        EngineError: None of them has it.
    """
    prototype = ctypes.CFUNCTYPE(result, *arguments)
    library = llama._lib  # noqa: SLF001  # the binding offers no other way to the library's functions
    try:
        return prototype((name, library))
    except AttributeError:
        folder = Path(str(library._name)).parent  # noqa: SLF001  # ctypes keeps the path under this name
    for path in (folder / file.format(library) for library in _LIBRARIES for file in _LIBRARY_NAMES):
        with suppress(OSError, AttributeError):  # another system's file name, or a library without the symbol
            return prototype((name, ctypes.CDLL(str(path))))
    raise EngineError(f"the engine's libraries do not offer {name}, so no router can be reached; run separate passes")
