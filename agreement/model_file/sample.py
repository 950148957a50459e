"""Samples: a small model file made of the first blocks and the first experts of a large one.

In: a model file.  Out: a GGUF from which llama.cpp builds the same graph with the same types and widths of weights, of
few layers and experts.

Blocks are kept up to the second with routed experts: one that is not the last of the model, one that is.  Of a model
that mixes attention with recurrent blocks at least one of each kind is kept: llama.cpp makes a cache for both, and
aborts where one has no layer.  What is cut off lies at the end of a tensor's slowest dimension, so each tensor of the
sample is the beginning of one of the file's.  The vocabulary is cut to its first tokens and has no texts: llama.cpp
takes its size from `vocab_size`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from agreement.errors import ModelFileError
from agreement.model_file import read_model_file
from agreement.model_file.architectures import UNIFORM, size_keys
from agreement.model_file.digest import opened, pieces
from agreement.model_file.facts import size_text
from agreement.model_file.header import SCALARS, STRING, Header, Key, Tensor, type_sizes
from agreement.model_file.names import ROUTED, block_of
from agreement.model_file.shards import read_shards
from agreement.records import ModelFile

N_VOCAB = 256  # tokens of a sample

_COPY_BYTES = 1 << 20  # bytes copied at a time; memory does not grow with the model
_UINT32 = 4  # GGUF's number for the type
_ROUTER = re.compile(r"blk\.[0-9]+\.(ffn_gate_inp\.(weight|bias)|exp_probs_b(_vl)?(\.bias)?)")
_VOCABULARY = frozenset({"token_embd.weight", "per_layer_token_embd.weight", "output.weight", "output.bias"})
_UNKNOWN_CUT = {
    "_chexps.": "it has a second set of experts",
    ".ffn_gate_tid2eid.": "some of its layers choose experts from a table",
}
_STATE = re.compile(r"blk\.[0-9]+\.(ssm_|shortconv|attn_norm_2\.).+")  # the last one marks minimax-01's
_ATTENTION = re.compile(r"blk\.[0-9]+\.attn_output\.weight")
_NOT_BY_LAYER = ("rope.dimension_sections", "classifier.output_labels")  # arrays that have a length of their own


class _UnfitError(Exception):
    """No sample can be made; the message says why."""


@dataclass(frozen=True)
class _Sizes:
    """What is kept of a model: the numbers of its blocks in order, its first experts, its first tokens."""

    blocks: tuple[int, ...]
    n_expert: int
    n_vocab: int


@dataclass(frozen=True)
class _Piece:
    """A tensor of the sample: the first `n_bytes` of `source`, a tensor of the file `path`."""

    name: str
    shape: tuple[int, ...]
    n_bytes: int
    source: Tensor
    path: str


def write_sample(model: ModelFile, path: Path, *, most_bytes: int) -> ModelFile:
    """Write a sample of a model to `path`; only the bytes of the sample are read.

    Args:
        model: A model with routed experts.
        path: File to write; its folder exists, and it appears whole or not at all.
        most_bytes: Size that the sample may have.

    Returns:
        What the header of the sample says.

    Raises:
        ModelFileError: The model has no routed experts, or stores their number by layer, or has tensors of a type or
            shape that is not known here; the sample would be larger than `most_bytes`; a file cannot be read or
            written.
    """
    part = path.with_name(path.name + ".part")
    try:
        try:
            _write(model, part, most_bytes)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except (_UnfitError, ModelFileError, OSError) as error:
        reason = f"{path} cannot be written ({error.strerror})" if isinstance(error, OSError) else error
        raise ModelFileError(f"no sample of {model.path} can be made: {reason}") from error
    return read_model_file(path)


def _write(model: ModelFile, path: Path, most_bytes: int) -> None:
    if model.n_expert == 0:
        raise _UnfitError("it has no routed experts")
    if model.n_expert_used is None:
        raise _UnfitError("the number of experts used is stored by layer, and no override changes it")
    headers = read_shards(model.path)
    tensors = [t for header in headers for t in header.tensors if block_of(t.name) < model.n_layer]
    n_expert = kept_experts(
        model.n_expert,
        model.n_expert_used,
        _number(model, "expert_group_count"),
        _number(model, "expert_group_used_count"),
    )
    sizes = _Sizes(_kept_blocks(model, tensors), n_expert, min(model.n_vocab, N_VOCAB))
    kept = list(_pieces_of(headers, model, sizes))
    alignment = int(headers[0].scalars.get("general.alignment", 32))
    head = _head(_keys(headers[0], model, sizes), kept, alignment)
    n_bytes = len(head) + sum(_padded(piece.n_bytes, alignment) for piece in kept)
    if n_bytes > most_bytes:
        raise _UnfitError(f"it would take {size_text(n_bytes)}, and it may take {size_text(most_bytes)}")
    with path.open("wb") as out:
        out.write(head)
        for piece in kept:
            for data in _data(piece):
                out.write(data)
            out.write(bytes(_padded(piece.n_bytes, alignment) - piece.n_bytes))


def _data(piece: _Piece) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(piece.n_bytes, _COPY_BYTES)))
    with opened(piece.path) as file:
        if hasattr(os, "posix_fadvise"):  # or the kernel reads on past what is kept: 46 MB for 17
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        yield from pieces(file, [(piece.source.start, piece.n_bytes)], buffer, piece.path)


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def _number(model: ModelFile, key: str) -> int:
    value = model.metadata.get(f"{model.architecture}.{key}", 0)
    return value if isinstance(value, int) else 0


# ------------------------------------------------------------------------------------------------------ what is kept


def kept_experts(n_expert: int, n_used: int, n_groups: int, n_groups_used: int) -> int:
    """Return how many experts a layer of the sample has: the fewest that leave its router a choice.

    That is twice as many as it selects.  Where it selects groups of experts first, llama.cpp ranks groups by their two
    best, and those it selects must hold as many experts as it selects.

    Args:
        n_expert: Experts a layer.
        n_used: Experts selected.
        n_groups: Groups of equal size; at most 1 for none.
        n_groups_used: Groups selected.
    """
    if n_groups <= 1:
        return min(max(2, 2 * n_used), n_expert)
    for size in range(2, n_expert // n_groups):
        if n_groups * size >= 2 * n_used and n_groups_used * size >= n_used:
            return n_groups * size
    return n_expert


def _kept_blocks(model: ModelFile, tensors: list[Tensor]) -> tuple[int, ...]:
    routed = sorted({block_of(t.name) for t in tensors if ROUTED.fullmatch(t.name)})
    if not routed:
        raise _UnfitError("its experts are not stored as merged tensors (ffn_*_exps)")
    last = routed[:2][-1]
    states = {block_of(t.name) for t in tensors if _STATE.fullmatch(t.name)}
    attention = {block_of(t.name) for t in tensors if _ATTENTION.fullmatch(t.name)} - states
    if states and attention:
        last = max(last, min(states), min(attention))
        last = min((block for block in routed if block >= last), default=last)
    first = routed[0]
    if model.architecture in UNIFORM and first == _number(model, "leading_dense_block_count") > 1:
        return (0, *range(first, last + 1))  # one dense block is as good as three
    return tuple(range(last + 1))


def _pieces_of(headers: tuple[Header, ...], model: ModelFile, sizes: _Sizes) -> Iterator[_Piece]:
    number = {old: new for new, old in enumerate(sizes.blocks)}
    for header in headers:
        for tensor in header.tensors:
            block = block_of(tensor.name)
            if block < 0:
                yield _piece(header.path, tensor, tensor.name, _global_end(tensor, model, sizes))
            elif block in number:
                name = tensor.name.replace(f"blk.{block}.", f"blk.{number[block]}.", 1)
                yield _piece(header.path, tensor, name, _block_end(tensor, model, sizes))


def _global_end(tensor: Tensor, model: ModelFile, sizes: _Sizes) -> tuple[int, int] | None:
    """Return the length of the slowest dimension, before and after it is cut; None if it is not."""
    if tensor.name in _VOCABULARY:
        return model.n_vocab, sizes.n_vocab
    if model.n_vocab > sizes.n_vocab and model.n_vocab in tensor.shape:
        raise _UnfitError(f"tensor {tensor.name} has {model.n_vocab} rows, one a token, and is not known here")
    return None


def _block_end(tensor: Tensor, model: ModelFile, sizes: _Sizes) -> tuple[int, int] | None:
    """Return the same of a tensor in a block."""
    for part, reason in _UNKNOWN_CUT.items():
        if part in tensor.name:
            raise _UnfitError(f"{reason} (tensor {tensor.name})")
    if ROUTED.fullmatch(tensor.name) or _ROUTER.fullmatch(tensor.name):
        return model.n_expert, sizes.n_expert
    return None


def _piece(path: str, tensor: Tensor, name: str, end: tuple[int, int] | None) -> _Piece:
    """Return the beginning of a tensor, cut along its slowest dimension from `end[0]` to `end[1]`."""
    if tensor.kind not in type_sizes():
        raise _UnfitError(f"tensor {tensor.name} is of type {tensor.kind}, whose size is not known here")
    block, n_bytes = type_sizes()[tensor.kind]
    if end is None:
        shape = tensor.shape
    elif tensor.shape[-1:] != end[:1]:
        raise _UnfitError(f"tensor {tensor.name} has the shape {tensor.shape}, which does not end with {end[0]}")
    else:
        shape = (*tensor.shape[:-1], end[1])
    if shape and shape[0] % block:
        raise _UnfitError(f"tensor {tensor.name} has rows of {shape[0]}, cut within a block of {block}")
    return _Piece(name, shape, prod(shape) // block * n_bytes, tensor, path)


# -------------------------------------------------------------------------------------------------------- the header


def _changes(header: Header, model: ModelFile, sizes: _Sizes) -> dict[str, int]:
    """Return the numbers that differ from the file's, or are not in it, by key."""
    arch, n = model.architecture, len(sizes.blocks)
    changes = {
        f"{arch}.block_count": n,
        f"{arch}.expert_count": sizes.n_expert,
        f"{arch}.vocab_size": sizes.n_vocab,
        **size_keys(arch, model.n_layer, model.n_vocab, header.scalars),
    }
    if f"{arch}.nextn_predict_layers" in header.scalars:
        changes[f"{arch}.nextn_predict_layers"] = 0
    if sizes.blocks != tuple(range(n)):
        changes[f"{arch}.leading_dense_block_count"] = 1
    shared = _number(model, "attention.shared_kv_layers")  # the last so many blocks have no keys and values (gemma4)
    if shared:
        changes[f"{arch}.attention.shared_kv_layers"] = max(0, n - (model.n_layer - shared))
    return changes


def _keys(header: Header, model: ModelFile, sizes: _Sizes) -> list[bytes]:
    """Return every key of the sample as it stands in a GGUF."""
    changes = _changes(header, model, sizes)
    arch = f"{model.architecture}."
    lengths = {model.n_layer, model.n_layer + _number(model, "nextn_predict_layers")}
    fixed = {arch + key for key in _NOT_BY_LAYER}
    encoded: list[bytes] = []
    buffer = memoryview(bytearray(_COPY_BYTES))
    with opened(header.path) as file:
        for name, key in header.keys.items():
            if name.startswith(("tokenizer.", "split.")) or name in changes:
                continue
            value = b"".join(map(bytes, pieces(file, [(key.start, key.stop - key.start)], buffer, header.path)))
            if name.startswith(arch) and name not in fixed and header.array_lengths.get(name) in lengths:
                value = _elements(value, sizes.blocks)
            encoded.append(_key(name, key.kind, value))
    no_texts = _key("tokenizer.ggml.model", STRING, _text("no_vocab"))
    return [*encoded, *_numbers(changes, header.keys), no_texts]


def _numbers(changes: dict[str, int], keys: Mapping[str, Key]) -> Iterator[bytes]:
    """Yield keys that hold whole numbers, each in the type that it has in the file."""
    for name, value in changes.items():
        kind = keys[name].kind if name in keys else _UINT32
        if kind not in SCALARS:
            raise _UnfitError(f"{name} is no number")
        yield _key(name, kind, SCALARS[kind].pack(value))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _elements(array: bytes, indices: tuple[int, ...]) -> bytes:
    """Return an array, as GGUF stores it, with the elements at `indices` only."""
    kind, n = struct.unpack_from("<IQ", array)
    at = [struct.calcsize("<IQ")]
    for _ in range(n):
        size = SCALARS[kind].size if kind != STRING else 8 + struct.unpack_from("<Q", array, at[-1])[0]
        at.append(at[-1] + size)
    return struct.pack("<IQ", kind, len(indices)) + b"".join(array[at[i] : at[i + 1]] for i in indices)


def _head(keys: list[bytes], kept: list[_Piece], alignment: int) -> bytes:
    """Return everything before the tensor data, padded."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(kept), len(keys)), *keys]
    offset = 0
    for piece in kept:
        shape = piece.shape
        parts += [_text(piece.name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, piece.source.kind, offset)]
        offset += _padded(piece.n_bytes, alignment)
    head = b"".join(parts)
    return head.ljust(_padded(len(head), alignment), b"\0")
