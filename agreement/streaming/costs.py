"""Memory that a pass takes beside the weights: estimated from the header, then measured by the engine.

In: a model's header, engine options, lines of the engine's log.  Out: `Costs`, bytes per token.

The estimate's terms were checked against the compute buffer that llama.cpp reserves without allocating it
(`no_alloc`): within 8 % for seven of nine routing families, 18 % too low for gpt-oss and 28 % for glm-dsa, whose
indexer it leaves out.  Caches agree to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from agreement.records import EngineOptions, ModelFile

_F32 = 4
# Bytes an element of a cache type: ggml's blocks of 32 values hold so many bytes.
_CACHE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
_COMPUTE = re.compile(r"(\S+) compute buffer size = +([0-9.]+) MiB")
_CACHE = re.compile(r"size = +([0-9.]+) MiB \( *[0-9]+ cells")
_HOST = ("CPU", "CPU_Mapped", "CPU_REPACK")
_MIB = 1 << 20


@dataclass(frozen=True)
class Costs:
    """Bytes of memory beside the weights.

    Attributes:
        activation: For each token of a micro-batch, in the engine's compute buffer.
        copied: For each token of a micro-batch: the copy of its inputs, in the weights' own type, that a matrix product
            makes outside that buffer.
        output: For each wanted position of a micro-batch, in the same buffer: it is not held at the same time as the
            largest activations, so the larger of the two counts.
        cache: For each token that a context holds: keys and values of all layers.
        logits: For each wanted position of a batch, in the engine's output buffer.
        coded: For each scored position of a chunk: the baseline's row as it is recorded.
        measured: Whether `activation` and `cache` come from the engine instead of the header.
    """

    activation: float
    copied: float
    output: float
    cache: float
    logits: float
    coded: float
    measured: bool = False


def estimated_costs(model: ModelFile, options: EngineOptions, n_ctx: int, *, full_logits: bool = True) -> Costs:
    """Estimate the costs from the header.

    With `k` experts used, widths `d` (model) and `f` (expert), llama.cpp's graph holds at its peak the outputs of the
    up and gate products, `2 k f`, the experts' outputs before and after weighting, `2 k d`, and two rows of `d`, all
    in float32; the down product's input, `k f`, is copied in at most two bytes a value.  Without flash attention the
    scores of all heads against the whole window are there too, twice.

    Args:
        model: The model file.
        options: Engine options: cache types and flash attention matter here.
        n_ctx: Tokens a chunk.
        full_logits: Whether the whole distribution is recorded, 2 bytes a token, and not only its top.
    """
    d, k = model.n_embd, model.n_expert_used or model.n_expert
    f = _number(model, "expert_feed_forward_length") or _number(model, "feed_forward_length") or 4 * d
    shared = _number(model, "expert_shared_feed_forward_length") or f * model.n_expert_shared
    dense = max(_number(model, "feed_forward_length"), shared)
    heads = _number(model, "attention.head_count") or 1
    widest = max(_F32 * (2 * k * (f + d) + 2 * d), _F32 * (2 * dense + 3 * d))
    if options.flash_attn == "off":
        widest = max(widest, _F32 * 2 * heads * _padded(n_ctx))
    return Costs(
        activation=float(widest),
        copied=2.0 * max(k * f, dense),
        output=float(_F32 * (model.n_vocab + 2 * d)),
        cache=_cache_bytes(model, options) * _padded(n_ctx) / n_ctx,
        logits=float(_F32 * model.n_vocab),
        coded=2.0 * model.n_vocab if full_logits else 1024.0,
    )


def _cache_bytes(model: ModelFile, options: EngineOptions) -> float:
    """Return bytes of keys and values of one token in all layers; latent attention keeps one row and no values."""
    heads = _number(model, "attention.head_count") or 1
    heads_kv = _number(model, "attention.head_count_kv") or heads
    head = max(1, model.n_embd // heads)
    key = _number(model, "attention.key_length") or head
    value = _number(model, "attention.value_length") or head
    per_k, per_v = _CACHE_BYTES.get(options.type_k, 4.0), _CACHE_BYTES.get(options.type_v, 4.0)
    indexer = _number(model, "attention.indexer.key_length") * per_k  # of sparse attention, e.g. glm-dsa
    rank = _number(model, "attention.kv_lora_rank")
    if rank and _number(model, "attention.key_length_mla"):
        row = (rank + _number(model, "rope.dimension_count")) * per_k
    else:
        row = heads_kv * (key * per_k + value * per_v)
    return model.n_layer * (row + indexer)


def _padded(n_ctx: int) -> int:
    """Return the cells that llama.cpp gives a sequence: whole steps of 256."""
    return -(-n_ctx // 256) * 256


def _number(model: ModelFile, key: str) -> int:
    value: Any = model.metadata.get(f"{model.architecture}.{key}", 0)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def measured_costs(costs: Costs, log: Iterable[str], *, n_ubatch: int, n_outputs: int, n_tokens: int) -> Costs:
    """Replace estimates by what the engine's log says it reserved for a context.

    The engine can make a context without allocating anything or reading a weight (`no_alloc`), and logs the same sizes
    then.  Outputs and activations share the buffer, so where outputs fill it the activations keep their estimate.

    Args:
        costs: The estimate.
        log: Lines logged while the context was made.
        n_ubatch: Its micro-batch.
        n_outputs: Wanted positions it was made for.
        n_tokens: Tokens it holds.

    Returns:
        `costs` unchanged where the log names no buffer in main memory.
    """
    compute, cache = 0.0, 0.0
    for line in log:
        if (found := _COMPUTE.search(line)) and found[1] in _HOST:
            compute += float(found[2]) * _MIB
        elif found := _CACHE.search(line):
            cache += float(found[1]) * _MIB
    if compute <= 0 or n_ubatch < 1:
        return costs
    by_outputs = 0.95 * compute <= costs.output * n_outputs
    activation = min(costs.activation, compute / n_ubatch) if by_outputs else compute / n_ubatch
    new = replace(costs, activation=activation, measured=True)
    return replace(new, cache=cache / n_tokens) if cache > 0 and n_tokens else new
