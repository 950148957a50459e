"""Model files: what a GGUF says about itself, from its header alone.

In: the path of a GGUF, or of any shard of a split one.  Out: `ModelFile`, its digest, and facts to print.

Blocks that only predict further tokens (multi-token prediction, `nextn_predict_layers`) are left out of every count
and size: llama.cpp does not load them for plain decoding.
"""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from agreement.errors import ModelFileError
from agreement.model_file.architectures import rescaled, warnings
from agreement.model_file.digest import model_digest
from agreement.model_file.facts import ExpertRow, describe, expert_rows, size_text
from agreement.model_file.names import ROUTED, SHARED, block_of
from agreement.model_file.shards import read_shards
from agreement.records import ModelFile

if TYPE_CHECKING:
    from agreement.model_file.header import Header, Tensor

__all__ = [
    "ExpertRow",
    "describe",
    "expert_rows",
    "model_digest",
    "read_model_file",
    "require_moe",
    "size_text",
]


def read_model_file(path: str | PathLike[str]) -> ModelFile:
    """Read what a model's header says, all shards included, without touching tensor data.

    Args:
        path: A GGUF file, or any shard of a split model.

    Raises:
        ModelFileError: The file is unreadable, no GGUF, cut short, damaged, lacks a shard, or is no language model.
    """
    headers = read_shards(fspath(path))
    first = headers[0]
    architecture = first.scalars.get("general.architecture")
    kind = first.scalars.get("general.type", "model")
    if not isinstance(architecture, str) or kind != "model":
        what = f"a GGUF of type {kind!r}" if kind != "model" else "a GGUF without general.architecture"
        raise ModelFileError(f"{first.path}: {what}, not a language model; give the model's own file")
    n_predict = _count(first, f"{architecture}.nextn_predict_layers", 0)
    n_layer = _count(first, f"{architecture}.block_count") - n_predict
    if n_layer < 0:
        raise ModelFileError(f"{first.path}: damaged, {n_predict} of {n_layer + n_predict} blocks are for prediction")
    tensors = [t for header in headers for t in header.tensors if block_of(t.name) < n_layer]
    n_expert = _count(first, f"{architecture}.expert_count", 0)
    routed = [t for t in tensors if ROUTED.fullmatch(t.name)] if n_expert else []
    return ModelFile(
        path=first.path,
        shards=tuple(header.path for header in headers),
        architecture=architecture,
        name=str(first.scalars.get("general.name", Path(first.path).stem)),
        n_layer=n_layer,
        n_expert_layers=len({block_of(t.name) for t in routed}),
        n_expert=n_expert,
        n_expert_used=_used(first, architecture) if n_expert else 0,
        n_expert_shared=_shared(first, architecture, tensors),
        n_vocab=_vocabulary(first, architecture, tensors),
        n_ctx_train=_count(first, f"{architecture}.context_length", 0),
        n_embd=_count(first, f"{architecture}.embedding_length", 0),
        bytes_total=sum(t.n_bytes for t in tensors),
        bytes_experts=sum(t.n_bytes for t in routed),
        renormalised=rescaled(architecture, first.scalars) if n_expert else None,
        warnings=_warnings(first, architecture, tensors, routed) if n_expert else (),
        metadata=dict(first.scalars),
    )


def require_moe(model: ModelFile) -> None:
    """Refuse a model without routed experts.

    Raises:
        ModelFileError: The model is dense.
    """
    if model.n_expert == 0:
        raise ModelFileError(
            f"{model.path}: a dense model ({model.architecture}), so there are no experts to use fewer of; "
            "give a Mixture-of-Experts model"
        )


def _count(header: Header, key: str, default: int | None = None) -> int:
    value = header.scalars.get(key, default)
    if value is None:
        raise ModelFileError(f"{header.path}: no {key} in its header; not a model that llama.cpp loads")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelFileError(f"{header.path}: damaged, {key} is {value!r}; get the file again")
    return value


def _used(header: Header, architecture: str) -> int | None:
    key = f"{architecture}.expert_used_count"
    return _count(header, key) if key in header.scalars else None


def _shared(header: Header, architecture: str, tensors: list[Tensor]) -> int:
    """Return the number of shared experts; some architectures have one without saying so in a key."""
    present = any(SHARED.fullmatch(t.name) for t in tensors)
    return _count(header, f"{architecture}.expert_shared_count", int(present))


def _vocabulary(header: Header, architecture: str, tensors: list[Tensor]) -> int:
    listed = header.array_lengths.get("tokenizer.ggml.tokens")
    if listed is not None:
        return listed
    embedding = next((t for t in tensors if t.name == "token_embd.weight"), None)
    return _count(header, f"{architecture}.vocab_size", embedding.shape[-1] if embedding and embedding.shape else 0)


def _warnings(header: Header, architecture: str, tensors: list[Tensor], routed: list[Tensor]) -> tuple[str, ...]:
    names = frozenset(t.name for t in tensors)
    return warnings(architecture, header.scalars, header.array_lengths, names, has_expert_tensors=bool(routed))
