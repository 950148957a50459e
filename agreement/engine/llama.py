"""llama.cpp through the low-level API of llama-cpp-python.

In: token ids of several chunks.  Out: logits, read in place from the engine's output buffer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np
import xxhash

from agreement.engine.base import EngineInfo, LogitsPart, SettingProof
from agreement.engine.log import EngineLog
from agreement.errors import EngineError, UsageError
from agreement.records import EngineOptions, Int32Array, MetadataOverride, ModelFile, Setting
from agreement.settings import metadata_overrides

try:
    import llama_cpp.llama_cpp as llama
except (ImportError, OSError, RuntimeError) as error:  # the binding raises each of these when its library is absent
    raise EngineError(
        f"the engine llama-cpp-python does not load ({error}); it compiles at install and needs a C++ compiler and "
        "CMake: install those, then `pip install --force-reinstall llama-cpp-python`"
    ) from error

CACHE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20,
}  # fmt: skip
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
NUMA = {"disabled": 0, "distribute": 1, "isolate": 2, "numactl": 3, "mirror": 4}
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ

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


def resolve_options(options: EngineOptions, n_ctx: int, n_sequences: int) -> EngineOptions:
    """Return `options` with every default made explicit, as they will be recorded.

    Raises:
        UsageError: An unknown cache type, or sizes that do not fit together.
    """
    for name in (options.type_k, options.type_v):
        if name not in CACHE_TYPES:
            raise UsageError(f"cache type {name!r} is not one of {', '.join(CACHE_TYPES)}")
    if options.numa not in NUMA:
        raise UsageError(f"--numa {options.numa!r} is not one of {', '.join(NUMA)}")
    if options.n_batch < 1 or options.n_ubatch < 1:
        raise UsageError(f"-b {options.n_batch} -ub {options.n_ubatch}: both must be at least 1")
    if n_sequences > MAX_SEQUENCES:
        raise UsageError(f"{n_sequences} chunks side by side; llama.cpp takes at most {MAX_SEQUENCES}: lower -b")
    threads = options.n_threads or len(os.sched_getaffinity(0))
    n_batch = min(options.n_batch, n_ctx * n_sequences)
    return replace(options, n_threads=threads, n_batch=n_batch, n_ubatch=min(options.n_ubatch, n_batch))


def other_shape(options: EngineOptions, n_ctx: int) -> EngineOptions:
    """Return the same engine at another batch shape and thread count, where sums are added in another order.

    One chunk at a time instead of several, in micro-batches of another size, with one thread fewer (or two for one).
    """
    threads = options.n_threads - 1 if options.n_threads > 1 else 2
    n_ubatch = max(1, min(options.n_ubatch, n_ctx) // 2)
    return replace(options, n_threads=threads, n_batch=n_ctx, n_ubatch=n_ubatch)


def sequences_per_batch(options: EngineOptions, n_ctx: int) -> int:
    """Return how many chunks of `n_ctx` tokens one batch takes, as llama-perplexity counts them.

    Raises:
        UsageError: No tokens a chunk.
    """
    if n_ctx < 1:
        raise UsageError(f"a context of {n_ctx} tokens is too small; give more")
    return max(1, min(MAX_SEQUENCES, options.n_batch // n_ctx))


@dataclass
class _Batch:
    """A llama_batch over numpy memory; the arrays must live as long as the structure."""

    struct: Any
    token: Int32Array
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
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._log = EngineLog(log)
        self._model: Any = None
        self._context: Any = None
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
            self._context = llama.llama_init_from_model(self._model, self._context_params(n_ctx, n_sequences))
            if not self._context:
                message = (
                    f"the engine cannot make a context of {n_sequences} x {n_ctx} tokens: {self._log.last_words()}"
                )
                self.close()
                raise EngineError(message + "; lower -b or -ub")

    def _model_params(self, vocab_only: bool) -> Any:
        params = llama.llama_model_default_params()
        params.n_gpu_layers = self.options.n_gpu_layers
        params.load_mode = (1 if self.options.use_mmap else 0) + (2 if self.options.use_mlock else 0)
        params.use_extra_bufts = self.options.repack
        params.vocab_only = vocab_only
        params.kv_overrides = ctypes.cast(self._keep_alive, ctypes.POINTER(llama.llama_model_kv_override))
        return params

    def _context_params(self, n_ctx: int, n_sequences: int) -> Any:
        o = self.options
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx * n_sequences
        params.n_batch, params.n_ubatch = o.n_batch, o.n_ubatch
        params.n_seq_max = n_sequences
        params.n_threads = params.n_threads_batch = o.n_threads
        params.flash_attn_type = FLASH_ATTENTION[o.flash_attn]
        params.type_k, params.type_v = CACHE_TYPES[o.type_k], CACHE_TYPES[o.type_v]
        params.kv_unified = False  # with a unified cache equal sequences get slightly different logits
        params.no_perf = True
        return params

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

    def decode(self, tokens: Int32Array, first: int, last: int, *, piece: int | None = None) -> Iterator[LogitsPart]:
        """Yield logits part by part; see `Engine.decode`."""
        n_sequences, n_ctx = tokens.shape
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        step = max(1, min(piece or n_ctx, self.options.n_batch // n_sequences, n_ctx))
        for start in range(0, n_ctx, step):
            stop = min(start + step, n_ctx)
            batch = self._batch(tokens[:, start:stop], start, first, last)
            status = int(llama.llama_decode(self._context, batch.struct))
            if status != 0:
                raise EngineError(f"llama_decode failed with status {status}: {self._log.last_words()}")
            low, high = max(start, first), min(stop, last)
            if high <= low:
                continue
            rows = high - low
            pointer = llama.llama_get_logits(self._context)
            view = np.ctypeslib.as_array(pointer, shape=(n_sequences * rows, self.n_vocab))
            for sequence in range(n_sequences):
                yield LogitsPart(sequence, low, view[sequence * rows : (sequence + 1) * rows])

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
        return _Batch(struct, token, (token, pos, n_seq_id, seq_id, seq_pointers, wanted))

    def close(self) -> None:
        """Free the context and the model."""
        if self._context:
            llama.llama_free(self._context)
            self._context = None
        if self._model:
            llama.llama_model_free(self._model)
            self._model = None
