"""Tiny random models, one for each routing family that llama.cpp knows, written as GGUF files.

In: a family's name, a seed, and what shall be odd about the file.  Out: a GGUF that llama.cpp loads (unless the
oddity is that it must not), in about 20 ms and well under 1 MB.

Weights come from the raw bits of PCG64 through a table of normal quantiles, not from `Generator.normal`: NumPy keeps
the bit stream stable for ever, its distributions not, and gold files depend on the weights.  Each tensor has its own
stream, so a variant differs from the plain model only in what it changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from families import FAMILIES, N_VOCAB, Dims, Family, TensorSpec, byte_alphabet, common_keys, matrix, norm, vocabulary
from numpy.typing import NDArray
from scipy.special import ndtri

__all__ = [
    "FAMILIES",
    "N_VOCAB",
    "Dims",
    "Family",
    "TensorSpec",
    "Variant",
    "byte_alphabet",
    "metadata",
    "tensors",
    "vocabulary",
    "write_model",
    "write_split",
]

WeightType = Literal["f32", "f16"]


@cache
def _quantiles() -> NDArray[np.float32]:
    """Return the normal quantiles of the 65,536 midpoints, float32."""
    table: NDArray[np.float32] = ndtri((np.arange(65536) + 0.5) / 65536).astype(np.float32)
    return table


_BLOCK = 1 << 22  # values made at a time; a benchmark model's embedding is too large to make in one go


def _blocks(spec: TensorSpec, seed: int, dtype: type[np.floating[Any]]) -> Iterator[NDArray[Any]]:
    """Yield the values of a tensor in order, block by block."""
    bits = np.random.PCG64([seed, zlib.crc32(spec.name.encode())])
    table = (_quantiles() * np.float32(spec.std) + np.float32(spec.mean)).astype(dtype)
    left = int(np.prod(spec.shape))
    while left > 0:
        n = min(left, _BLOCK)
        raw = bits.random_raw((n + 3) // 4).view(np.uint16)[:n]
        yield table[raw]
        left -= n


@dataclass(frozen=True)
class Variant:
    """What is odd about a file; the default is nothing.

    Attributes:
        seed: Of the weights.
        dtype: Type of the matrices. Float32 by default: every kernel is exact in it.
        dense: No experts at all (`llama` only).
        nan: One weight of the output matrix is NaN, so one token's logit is, at every position.
        float64: One attention matrix is float64, which llama.cpp loads and then aborts on.
        per_layer_used: `expert_used_count` is stored as an array with one value a block.
        omit_expert_width: `expert_feed_forward_length` is left out, so llama.cpp derives the width of an expert as
            `feed_forward_length / expert_used_count`, which is right as long as nobody overrides the count.
        add_bos: `tokenizer.ggml.add_bos_token`.
        extra: Further metadata by full key.
        remove: Full keys to leave out.
    """

    seed: int = 0
    dtype: WeightType = "f32"
    dense: bool = False
    nan: bool = False
    float64: bool = False
    per_layer_used: bool = False
    omit_expert_width: bool = False
    add_bos: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    remove: tuple[str, ...] = ()


_FLOAT64_TENSOR = "blk.0.attn_output.weight"


def tensors(family: Family, dims: Dims) -> list[TensorSpec]:
    """Return every tensor of a model, in the order in which it is written."""
    specs = [TensorSpec("token_embd.weight", (dims.n_vocab, dims.n_embd), 1.0)]
    for layer in range(dims.n_layer):
        specs += family.block(f"blk.{layer}", layer, dims)
    return [*specs, norm("output_norm", dims.n_embd), matrix("output", dims.n_vocab, dims.n_embd, 2.5)]


def metadata(name: str, family: Family, dims: Dims, variant: Variant) -> dict[str, Any]:
    """Return every key of a model's header but `general.architecture`, in order; values carry their type."""
    own = {**common_keys(dims), **family.keys(dims)}
    if dims.n_expert:
        used = [dims.n_expert_used] * dims.n_layer if variant.per_layer_used else dims.n_expert_used
        own |= {"expert_count": dims.n_expert, "expert_used_count": used}
    if variant.omit_expert_width:
        del own["expert_feed_forward_length"]
        own["feed_forward_length"] = dims.n_ff_exp * dims.n_expert_used
    texts, types, merges = vocabulary(dims.n_vocab)
    keys: dict[str, Any] = {"general.name": f"tiny {name} {variant.seed}"}
    keys |= {f"{family.architecture}.{key}": value for key, value in own.items()}
    keys |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": dims.n_vocab - 2,
        "tokenizer.ggml.eos_token_id": dims.n_vocab - 1,
        "tokenizer.ggml.add_bos_token": variant.add_bos,
        **variant.extra,
    }
    return {key: value for key, value in keys.items() if key not in variant.remove}


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _dtype(spec: TensorSpec, variant: Variant) -> type[np.floating[Any]]:
    if variant.float64 and spec.name == _FLOAT64_TENSOR:
        return np.float64
    return np.float32 if spec.vector or variant.dtype == "f32" else np.float16


@dataclass(frozen=True)
class _Split:
    """Where a shard stands: its number from 0, the number of shards, the number of tensors in all."""

    no: int
    count: int
    n_tensors: int


def _write(
    path: Path,
    architecture: str,
    keys: dict[str, Any],
    specs: Sequence[TensorSpec],
    *,
    variant: Variant,
    split: _Split | None = None,
) -> None:
    """Write one file, each tensor as it is made: memory is one block of a tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add_key(writer, key, value)
    if split:  # llama.cpp insists on these very types
        writer.add_uint16("split.no", split.no)
        writer.add_uint16("split.count", split.count)
        writer.add_int32("split.tensors.count", split.n_tensors)
    for spec in specs:
        dtype = _dtype(spec, variant)
        n_bytes = int(np.prod(spec.shape)) * np.dtype(dtype).itemsize
        writer.add_tensor_info(spec.name, spec.shape, np.dtype(dtype), n_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (out,) = writer.fout
    writer.write_padding(out, out.tell())
    for spec in specs:
        poison = variant.nan and spec.name == "output.weight"
        start = out.tell()
        for i, block in enumerate(_blocks(spec, variant.seed, _dtype(spec, variant))):
            if poison and i == 0:
                block[0] = np.nan
            block.tofile(out)
        writer.write_padding(out, out.tell() - start)
    writer.close()


def _prepare(family: str, dims: Dims | None, n_vocab: int | None, variant: Variant) -> tuple[Family, Dims]:
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}: expected one of {', '.join(FAMILIES)}")
    fam = FAMILIES[family]
    dims = dims or fam.dims
    if n_vocab is not None:
        dims = replace(dims, n_vocab=n_vocab)
    if variant.dense:
        if family != "llama":
            raise ValueError(f"family {family!r}: only llama has a dense variant")
        dims = replace(dims, n_expert=0, n_expert_used=0)
    return fam, dims


def write_model(
    path: str | Path, family: str = "qwen3moe", *, dims: Dims | None = None, n_vocab: int | None = None, **variant: Any
) -> Path:
    """Write a model of `family` (a key of `FAMILIES`) to `path` and return it.

    Args:
        path: File to write; its folder exists.
        family: Key of `FAMILIES`.
        dims: Sizes other than the family's.
        n_vocab: Vocabulary size, at least `N_VOCAB`.
        variant: Fields of `Variant`: seed, dtype, dense, nan, float64, per_layer_used, omit_expert_width, add_bos, ...
    """
    odd = Variant(**variant)
    fam, sizes = _prepare(family, dims, n_vocab, odd)
    _write(Path(path), fam.architecture, metadata(family, fam, sizes, odd), tensors(fam, sizes), variant=odd)
    return Path(path)


def write_split(
    prefix: str | Path, n_shards: int, family: str = "qwen3moe", *, dims: Dims | None = None, **variant: Any
) -> list[Path]:
    """Write the same model as `write_model` in `n_shards` files `PREFIX-00001-of-0000N.gguf`; return them in order.

    As llama.cpp's `gguf-split` does: the header's keys are in the first, each names its number, their count and the
    number of tensors in all.
    """
    odd = Variant(**variant)
    fam, sizes = _prepare(family, dims, None, odd)
    specs = tensors(fam, sizes)
    keys = metadata(family, fam, sizes, odd)
    bounds = [len(specs) * i // n_shards for i in range(n_shards + 1)]
    paths = [Path(f"{prefix}-{i + 1:05d}-of-{n_shards:05d}.gguf") for i in range(n_shards)]
    for i, path in enumerate(paths):
        part, split = specs[bounds[i] : bounds[i + 1]], _Split(i, n_shards, len(specs))
        _write(path, fam.architecture, keys if i == 0 else {}, part, variant=odd, split=split)
    return paths
