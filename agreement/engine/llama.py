"""llama.cpp through the low-level API of llama-cpp-python.

In: token ids of several chunks.  Out: logits, read in place from the engine's output buffer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from agreement.engine.base import EngineInfo, LogitsPart, SettingProof
from agreement.engine.hook import Kept, RouterHook
from agreement.engine.log import EngineLog, lacks_memory
from agreement.engine.mapping import without_read_ahead
from agreement.engine.options import CACHE_TYPES, FLASH_ATTENTION, NUMA, resolve_options
from agreement.errors import ContextError, EngineError
from agreement.records import EngineOptions, Int32Array, MetadataOverride, ModelFile, Setting
from agreement.routing import Policy
from agreement.settings import BASELINE, metadata_overrides

try:
    import llama_cpp.llama_cpp as llama
except (ImportError, OSError, RuntimeError) as error:  # the binding raises each of these when its library is absent
    raise EngineError(
        f"the engine llama-cpp-python does not load ({error}); it compiles at install and needs a C++ compiler and "
        "CMake: install those, then `pip install --force-reinstall llama-cpp-python`"
    ) from error

_current_log = EngineLog()


@llama.llama_log_callback  # type: ignore[untyped-decorator]  # ctypes
def _on_log(_level: int, text: bytes, _user: Any) -> None:
    _current_log.feed(text.decode("utf-8", errors="replace"))


def _use_log(log: EngineLog) -> None:
    """Send the library's log, which is one for the whole process, to `log`."""
    global _current_log  # noqa: PLW0603  # the library has one log callback a process, so there is one current log
    _current_log = log
    llama.llama_log_set(_on_log, ctypes.c_void_p(0))


def build_info() -> EngineInfo:
    """Return the binding's version, the library's and what processor features it uses."""
    features = llama.llama_print_system_info().decode().strip(" |")
    return EngineInfo(
        name="llama.cpp",
        binding=f"llama-cpp-python {metadata.version('llama-cpp-python')}",
        version=f"{llama.llama_version().decode()}; {features}",
    )


def _no_context(n_sequences: int, n_ctx: int, words: str) -> EngineError:
    """Return the error of a context that was not made; only for lack of memory does a smaller one help."""
    if lacks_memory(words):
        return ContextError(
            f"the engine cannot make a context of {n_sequences} x {n_ctx} tokens: {words}; lower -b or -ub"
        )
    return EngineError(f"the engine refuses these options: {words}; change what it names, e.g. -ctk, -ctv or -fa")


def _overrides_array(overrides: tuple[MetadataOverride, ...]) -> Any:
    """Return the C array that llama.cpp walks until an empty key."""
    array = (llama.llama_model_kv_override * (len(overrides) + 1))()
    for entry, override in zip(array, overrides, strict=False):
        entry.key = override.key.encode()
        kind = override.type
        entry.tag = {"int": 0, "float": 1, "bool": 2, "str": 3}[kind]
        if kind == "int":
            entry.value.val_i64 = override.value
        elif kind == "float":
            entry.value.val_f64 = override.value
        elif kind == "bool":
            entry.value.val_bool = override.value
        else:
            entry.value.val_str = str(override.value).encode()
    return array


@dataclass
class _Batch:
    """A llama_batch over numpy memory; the arrays must live as long as the structure."""

    struct: Any
    token: Int32Array
    wanted: NDArray[np.bool_]
    keep_alive: tuple[Any, ...]


class LlamaEngine:
    """A GGUF model loaded under one setting; see `Engine`."""

    def __init__(
        self,
        model: ModelFile,
        setting: Setting,
        options: EngineOptions,
        *,
        n_ctx: int,
        n_sequences: int,
        vocab_only: bool = False,
        hooked: bool = False,
        n_outputs: int | None = None,
        no_alloc: bool = False,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._n_outputs, self._no_alloc = n_outputs, no_alloc
        self._shards = model.shards
        self._log = EngineLog(log)
        self._model: Any = None
        self._context: Any = None
        self._hook = RouterHook(llama) if hooked else None
        _use_log(self._log)
        llama.llama_backend_init()
        self.options = resolve_options(options, n_ctx, n_sequences)
        if NUMA[self.options.numa]:
            llama.llama_numa_init(NUMA[self.options.numa])
        overrides = metadata_overrides(setting, model.architecture)
        self._keep_alive = _overrides_array(overrides)
        self._model = llama.llama_model_load_from_file(os.fsencode(model.path), self._model_params(vocab_only))
        if not self._model:
            raise EngineError(f"the engine cannot load {model.path}: {self._log.last_words()}")
        vocab = llama.llama_model_get_vocab(self._model)
        self._vocab = vocab
        self.n_vocab = int(llama.llama_vocab_n_tokens(vocab))
        self.bos = int(llama.llama_vocab_bos(vocab)) if llama.llama_vocab_get_add_bos(vocab) else None
        self.proof: SettingProof = self._log.proof()
        self.info = build_info()
        if not vocab_only:
            loaded = self._log.n_lines
            self._context = llama.llama_init_from_model(self._model, self._context_params(n_ctx, n_sequences))
            if not self._context:
                self.close()
                raise _no_context(n_sequences, n_ctx, self._log.last_words(since=loaded))
            self._learn_routing()

    def _model_params(self, vocab_only: bool) -> Any:
        params = llama.llama_model_default_params()
        params.n_gpu_layers = self.options.n_gpu_layers
        params.load_mode = (1 if self.options.use_mmap else 0) + (2 if self.options.use_mlock else 0)
        params.use_extra_bufts = self.options.repack
        params.vocab_only = vocab_only
        if self._no_alloc:  # sizes only: nothing is allocated, nothing is read
            params.no_alloc, params.load_mode = True, 0
        params.kv_overrides = ctypes.cast(self._keep_alive, ctypes.POINTER(llama.llama_model_kv_override))
        return params

    def _context_params(self, n_ctx: int, n_sequences: int) -> Any:
        o = self.options
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx * n_sequences
        params.n_batch, params.n_ubatch = o.n_batch, o.n_ubatch
        params.n_seq_max = n_sequences
        params.n_outputs_max = self._n_outputs or 0
        params.n_threads = params.n_threads_batch = o.n_threads
        params.flash_attn_type = FLASH_ATTENTION[o.flash_attn]
        params.type_k, params.type_v = CACHE_TYPES[o.type_k], CACHE_TYPES[o.type_v]
        params.kv_unified = False  # with a unified cache equal sequences get slightly different logits
        params.no_perf = True
        if self._hook is not None:
            params.cb_eval = self._hook.callback
        return params

    def _learn_routing(self) -> None:
        if self._hook is None:
            return
        batch = self._batch(np.zeros((1, 1), np.int32), 0, 0, 1)
        try:
            with without_read_ahead(self._shards):
                self._hook.learn(lambda: self._decode_batch(batch))
        except EngineError:
            self.close()
            raise

    def tokenize(self, text: str) -> Int32Array:
        """Return the ids of `text` as (n,) int32; special tokens are neither added nor recognised in the text."""
        data = text.encode()
        room = len(data) + 16
        while True:
            buffer = np.empty(room, np.int32)
            pointer = buffer.ctypes.data_as(ctypes.POINTER(llama.llama_token))
            n = int(llama.llama_tokenize(self._vocab, data, len(data), pointer, room, False, False))
            if n >= 0:
                return buffer[:n].copy()
            room = -n

    def vocabulary_digest(self) -> str:
        """Return a digest of all token texts; see `Engine.vocabulary_digest`."""
        digest = xxhash.xxh3_128()
        for token in range(self.n_vocab):
            digest.update(llama.llama_vocab_get_text(self._vocab, token) or b"")
            digest.update(b"\0")
        return digest.hexdigest()

    def decode(
        self,
        tokens: Int32Array,
        first: int,
        last: int,
        *,
        piece: int | None = None,
        routing: Sequence[Policy | None] | None = None,
    ) -> Iterator[LogitsPart]:
        """Yield logits part by part; see `Engine.decode`."""
        n_sequences, n_ctx = tokens.shape
        hook = self._hook_for(routing, n_sequences)
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        # A routed batch is one micro-batch, so that the rows of the graph are the rows of the batch, in its order.
        room = self.options.n_batch if hook is None else self.options.n_ubatch
        step = max(1, min(piece or n_ctx, room // n_sequences, n_ctx))
        for start in range(0, n_ctx, step):
            stop = min(start + step, n_ctx)
            batch = self._batch(tokens[:, start:stop], start, first, last)
            if hook is None or routing is None:
                self._decode_batch(batch)
            else:
                with hook.during(routing, stop - start, batch.wanted):
                    self._decode_batch(batch)
            low, high = max(start, first), min(stop, last)
            if high <= low:
                continue
            rows = high - low
            pointer = llama.llama_get_logits(self._context)
            view = np.ctypeslib.as_array(pointer, shape=(n_sequences * rows, self.n_vocab))
            for sequence in range(n_sequences):
                yield LogitsPart(sequence, low, view[sequence * rows : (sequence + 1) * rows])

    def _hook_for(self, routing: Sequence[Policy | None] | None, n_sequences: int) -> RouterHook | None:
        """Return the hook if there is routing to do, made ready for a decode.

        Raises:
            EngineError: The engine was loaded without the hook, or the sequences do not fit one micro-batch.
            SettingError: A policy that this model cannot run.
        """
        if routing is None:
            return None
        if self._hook is None:
            raise EngineError("the engine was loaded without its router hook; load it with hooked=True")
        if n_sequences > self.options.n_ubatch:
            raise EngineError(
                f"{n_sequences} sequences do not fit a micro-batch of {self.options.n_ubatch} tokens: raise -ub"
            )
        self._hook.check(routing)
        self._hook.kept = [Kept() for _ in range(n_sequences)]
        return self._hook

    def experts_kept(self) -> tuple[Kept, ...]:
        """Return what routing has kept so far in the current decode, one a sequence; see `Engine.experts_kept`."""
        return tuple(replace(kept) for kept in self._hook.kept) if self._hook is not None else ()

    def _decode_batch(self, batch: _Batch) -> None:
        status = int(llama.llama_decode(self._context, batch.struct))
        if status != 0:
            raise EngineError(f"llama_decode failed with status {status}: {self._log.last_words()}")

    def _batch(self, tokens: Int32Array, start: int, first: int, last: int) -> _Batch:
        """Return a batch of (n_sequences, n) tokens at positions from `start` on, sequence by sequence."""
        n_sequences, n = tokens.shape
        total = n_sequences * n
        token = np.ascontiguousarray(tokens, np.int32).reshape(-1)
        positions = np.arange(start, start + n, dtype=np.int32)
        pos = np.tile(positions, n_sequences)
        n_seq_id = np.ones(total, np.int32)
        seq_id = np.repeat(np.arange(n_sequences, dtype=np.int32), n)
        seq_pointers = seq_id.ctypes.data + 4 * np.arange(total, dtype=np.uint64)
        wanted = np.tile(((positions >= first) & (positions < last)).astype(np.int8), n_sequences)
        struct = llama.llama_batch()
        struct.n_tokens = total
        for name, array, kind in (
            ("token", token, llama.llama_token),
            ("pos", pos, llama.llama_pos),
            ("n_seq_id", n_seq_id, ctypes.c_int32),
            ("seq_id", seq_pointers, ctypes.POINTER(llama.llama_seq_id)),
            ("logits", wanted, ctypes.c_int8),
        ):
            setattr(struct, name, ctypes.cast(array.ctypes.data, ctypes.POINTER(kind)))
        return _Batch(struct, token, wanted.astype(np.bool_), (token, pos, n_seq_id, seq_id, seq_pointers, wanted))

    def close(self) -> None:
        """Free the context and the model."""
        if self._context:
            llama.llama_free(self._context)
            self._context = None
        if self._model:
            llama.llama_model_free(self._model)
            self._model = None


def measured_context(
    model: ModelFile, options: EngineOptions, *, n_ctx: int, n_sequences: int, n_outputs: int
) -> tuple[str, ...]:
    """Return the log lines of a context that is laid out but not allocated; see `agreement.engine.measure_context`."""
    lines: list[str] = []
    LlamaEngine(
        model,
        BASELINE,
        options,
        n_ctx=n_ctx,
        n_sequences=n_sequences,
        n_outputs=n_outputs,
        no_alloc=True,
        log=lines.append,
    ).close()
    return tuple(lines)
