"""What llama.cpp does with kept experts, by architecture, and what that means for an override of their number.

In: an architecture's name and a header's keys.  Out: whether kept weights are rescaled, warnings, and what is concluded
from a model's size.

The tables were derived from llama.cpp as vendored in llama-cpp-python 0.3.36: each architecture's source in
`src/models/` calls `build_moe_ffn`, whose argument after the activation (`norm_w`) says whether the weights of the
selected experts are divided by their sum: `true`, `false`, or `hparams.expert_weights_norm`, a key of the file which
is false where it is absent.  Some share another's graph (`granitemoe` that of `granite`, `mistral4` and
`deepseek2-ocr` that of `deepseek2`, `phimoe` that of `phi3`).  `gpt-oss` passes `false`, but its gate is a softmax over
the selected experts only, so its weights always sum to one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from agreement.model_file.header import Scalar

Rescaling = Literal["always", "never", "by key"]

_ALWAYS = (
    "arctic", "dbrx", "ernie4_5-moe", "gemma4", "gpt-oss", "granite", "granite_swa", "granitehybrid", "granitemoe",
    "grok", "grovemoe", "hunyuan-moe", "kimi-linear", "lfm2moe", "llama", "llama-embed", "maple", "mellum", "mimo2",
    "minicpm", "minimax-01", "minimax-m2", "mistral3", "phimoe", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vlmoe",
    "qwen4exp", "rnd1", "smallthinker",
)  # fmt: skip
_NEVER = ("deepseek", "jamba", "llada-moe", "llama4", "nomic-bert-moe", "olmoe", "qwen2moe")
_BY_KEY = (
    "afmoe", "bailingmoe", "bailingmoe2", "bailingmoe3", "cohere2moe", "deepseek2", "deepseek2-ocr", "deepseek32",
    "deepseek4", "dots1", "dots3note", "exaone-moe", "glm-dsa", "glm4moe", "glm5-next", "hy_v3", "hy_v4", "kimi-k3",
    "laguna", "minimax-m3", "mistral4", "nemotron_h", "nemotron_h_moe", "step35",
)  # fmt: skip
RESCALING: dict[str, Rescaling] = {
    **dict.fromkeys(_ALWAYS, "always"),
    **dict.fromkeys(_NEVER, "never"),
    **dict.fromkeys(_BY_KEY, "by key"),
}

# Where `expert_feed_forward_length` is absent these take `feed_forward_length / expert_used_count` for it (search for
# `n_ff / n_expert_used`), so with an overridden count the experts' tensors no longer have the shape that is expected.
WIDTH_FROM_COUNT = frozenset({
    "glm4moe", "grovemoe", "hy_v3", "llada-moe", "mellum", "nemotron_h", "nemotron_h_moe", "qwen2moe", "qwen35moe",
    "qwen3moe", "qwen3next", "qwen3vlmoe", "qwen4exp", "rnd1",
})  # fmt: skip

_SIGMOID, _SOFTMAX_OVER_SELECTED = 2, 3  # values of the key `expert_gating_func`

# Their blocks do not depend on their number: whether a block is dense is all that `leading_dense_block_count` says.
UNIFORM = frozenset({"deepseek2"})


def rescaled(architecture: str, scalars: dict[str, Scalar]) -> bool | None:
    """Return whether the weights of the kept experts are rescaled to their full sum; None if not known here."""
    rule = RESCALING.get(architecture)
    if rule is None:
        return None
    if rule == "by key":
        selected = scalars.get(f"{architecture}.expert_gating_func") == _SOFTMAX_OVER_SELECTED
        return selected or bool(scalars.get(f"{architecture}.expert_weights_norm", False))
    return rule == "always"


def warnings(
    architecture: str,
    scalars: dict[str, Scalar],
    array_lengths: dict[str, int],
    tensor_names: frozenset[str],
    *,
    has_expert_tensors: bool,
) -> tuple[str, ...]:
    """Return what an override of the expert count would meet in this file, one line each; empty if nothing."""
    used, width = f"{architecture}.expert_used_count", f"{architecture}.expert_feed_forward_length"
    lines: list[str] = []
    if used in array_lengths:
        lines.append(f"{used} is an array, one value a layer: llama.cpp ignores an override of it without a word")
    elif used not in scalars:
        lines.append(f"{used} is missing: llama.cpp does not load such a model")
    if architecture in WIDTH_FROM_COUNT and width not in scalars and width not in array_lengths:
        lines.append(
            f"{width} is missing: llama.cpp derives it from the expert count, so the model does not load with another; "
            "add the key with gguf-new-metadata or convert the model again"
        )
    if any(name.endswith(".ffn_gate_tid2eid.weight") for name in tensor_names):
        lines.append(
            "some layers choose experts from a table with as many columns as experts are used: "
            "llama.cpp does not load the model with another number"
        )
    if not has_expert_tensors:
        lines.append("experts are not stored as merged tensors (ffn_*_exps): llama.cpp no longer loads such a file")
    kept = rescaled(architecture, scalars)
    if kept is False:
        lines.append("the weights of kept experts are not rescaled: with each expert dropped their output shrinks")
    elif kept is None:
        lines.append(f"whether architecture {architecture} rescales the weights of kept experts is not known here")
    return tuple(lines)


def size_keys(architecture: str, n_layer: int, n_vocab: int, scalars: dict[str, Scalar]) -> dict[str, int]:
    """Return keys that say what llama.cpp concludes from the number of blocks and the size of the vocabulary.

    A file with fewer blocks and tokens is built to the same graph only if these keys are in it.  In `src/models/` only
    `deepseek2.cpp`, which mistral4 shares, concludes anything: from the sizes of the lite models that their queries
    are not compressed, and from those of another one, where the key is missing, that its gates are sigmoids.
    """
    keys: dict[str, int] = {}
    if architecture in ("deepseek2", "mistral4"):
        if n_layer in (26, 27) or (n_layer, n_vocab) == (48, 128_256):
            keys[f"{architecture}.attention.q_lora_rank"] = 0
        gating = f"{architecture}.expert_gating_func"
        if n_layer in (47, 48) and n_vocab == 154_880 and not scalars.get(gating):
            keys[gating] = _SIGMOID
    return keys
