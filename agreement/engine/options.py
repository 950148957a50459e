"""Engine options: defaults made explicit, sizes checked; without loading the native library.

In: `EngineOptions` as a user gave them.  Out: the same, complete, as they are recorded.
"""

from __future__ import annotations

import os
from dataclasses import replace

from agreement.errors import UsageError
from agreement.records import EngineOptions

CACHE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20,
}  # fmt: skip
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
NUMA = {"disabled": 0, "distribute": 1, "isolate": 2, "numactl": 3, "mirror": 4}
PLAIN_TYPES = ("f32", "f16", "bf16")  # of CACHE_TYPES, those that are not quantised
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MAX_THREADS = 512  # GGML_MAX_N_THREADS


def resolve_options(options: EngineOptions, n_ctx: int, n_sequences: int) -> EngineOptions:
    """Return `options` with every default made explicit, as they will be recorded.

    Raises:
        UsageError: An unknown cache type, a quantised V cache without flash attention, or sizes that do not fit
            together.
    """
    for name in (options.type_k, options.type_v):
        if name not in CACHE_TYPES:
            raise UsageError(f"cache type {name!r} is not one of {', '.join(CACHE_TYPES)}")
    if options.flash_attn == "off" and options.type_v not in PLAIN_TYPES:
        raise UsageError(
            f"-ctv {options.type_v} -fa off: a quantised V cache needs flash attention; give -fa on, or -ctv f16"
        )
    if options.numa not in NUMA:
        raise UsageError(f"--numa {options.numa!r} is not one of {', '.join(NUMA)}")
    if options.n_batch < 1 or options.n_ubatch < 1:
        raise UsageError(f"-b {options.n_batch} -ub {options.n_ubatch}: both must be at least 1")
    if not 0 <= options.n_threads <= MAX_THREADS:
        raise UsageError(f"-t {options.n_threads}: give 1 to {MAX_THREADS} threads, or 0 for all processors")
    if n_sequences > MAX_SEQUENCES:
        raise UsageError(f"{n_sequences} chunks side by side; llama.cpp takes at most {MAX_SEQUENCES}: lower -b")
    threads = options.n_threads or _usable_processors()
    n_batch = min(options.n_batch, n_ctx * n_sequences)
    return replace(options, n_threads=threads, n_batch=n_batch, n_ubatch=min(options.n_ubatch, n_batch))


def _usable_processors() -> int:
    """Return the processors this process may run on; all there are where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
