"""Models, engine options and settings: what a pass is run with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

OverrideType = Literal["int", "float", "bool", "str"]


@dataclass(frozen=True)
class MetadataOverride:
    """One `--override-kv KEY=TYPE:VALUE` in llama.cpp's terms."""

    key: str
    type: OverrideType
    value: int | float | bool | str

    def __str__(self) -> str:
        """Return it as llama.cpp's command line takes it."""
        value = str(self.value).lower() if self.type == "bool" else str(self.value)
        return f"{self.key}={self.type}:{value}"


@dataclass(frozen=True)
class Setting:
    """What is changed against the baseline.

    Attributes:
        name: Canonical name, e.g. `experts=6`; also the name of its folder and its row.
        experts: Experts used per token, or None to leave the file's value.
        overrides: Further metadata overrides.
        model: Path of another model file with the same vocabulary, or None for the baseline's own.
        again: The baseline once more, at another batch shape and thread count: the noise floor.
    """

    name: str
    experts: int | None = None
    overrides: tuple[MetadataOverride, ...] = ()
    model: str | None = None
    again: bool = False


@dataclass(frozen=True)
class ModelFile:
    """What the header of a GGUF (all shards) says.

    Attributes:
        path: The file given, the first shard of a split model.
        shards: All files of the model in order, including `path`.
        architecture: `general.architecture`.
        name: `general.name`, or the file's name.
        n_layer: Blocks in the model.
        n_expert_layers: Blocks that have routed experts.
        n_expert: Routed experts a layer; 0 for a dense model.
        n_expert_used: Experts used per token by the file; None if the file stores one value a layer.
        n_expert_shared: Shared experts a layer.
        n_vocab: Size of the vocabulary.
        n_ctx_train: Context length in training.
        n_embd: Width.
        bytes_total: Size of all tensors.
        bytes_experts: Size of the routed experts' tensors, the part that is read sparsely.
        renormalised: Whether kept expert weights are rescaled to their full sum; None if not known here.
        warnings: What an override of the expert count would meet in this file, one line each.
        metadata: Scalar metadata of the header, arrays left out.
    """

    path: str
    shards: tuple[str, ...]
    architecture: str
    name: str
    n_layer: int
    n_expert_layers: int
    n_expert: int
    n_expert_used: int | None
    n_expert_shared: int
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    bytes_total: int
    bytes_experts: int
    renormalised: bool | None
    warnings: tuple[str, ...]
    metadata: dict[str, Any] = field(repr=False)

    @property
    def bytes_resident(self) -> int:
        """Bytes read for every token: everything that is not a routed expert."""
        return self.bytes_total - self.bytes_experts

    def expert_bytes_per_token(self, n_used: int) -> int:
        """Bytes of routed experts that one token reads with `n_used` experts in each layer."""
        return self.bytes_experts * n_used // self.n_expert if self.n_expert else 0


@dataclass(frozen=True)
class EngineOptions:
    """Engine options, in llama.cpp's names; part of what makes passes comparable.

    Attributes:
        n_gpu_layers: `-ngl`.
        n_threads: `-t`.
        n_batch: `-b`, tokens a decode call.
        n_ubatch: `-ub`, tokens a micro-batch.
        flash_attn: `-fa`: on, off or auto.
        type_k: `-ctk`.
        type_v: `-ctv`.
        use_mmap: False with `--no-mmap`.
        use_mlock: True with `--mlock`.
        numa: `--numa`: disabled, distribute, isolate, numactl or mirror.
        repack: False with `--no-repack`: weights stay as the file has them.
    """

    n_gpu_layers: int = 0
    n_threads: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: Literal["on", "off", "auto"] = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    use_mmap: bool = True
    use_mlock: bool = False
    numa: str = "disabled"
    repack: bool = True
