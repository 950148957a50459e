"""The sizes, tensors and keys of the tiny models, one routing family at a time; nothing here writes files.

In: sizes.  Out: tensor shapes and scales, header keys, a tokenizer.

Scales are chosen so that logits have a standard deviation of 2 to 3, and routing matters: the residual stream starts
with embeddings of unit variance, and each layer's experts add about as much again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import gguf

# ----------------------------------------------------------------------------------------------------- tokenizer

_COMMON = (  # Merges, so that a token is not always a byte; `Ġ` is how byte-level BPE writes a space.
    "Ġ Ġ", "ĠĠ ĠĠ", "Ġ t", "h e", "i n", "r e", "o n", "Ġt he", "e r", "Ġ a", "a t", "Ġ s", "e n", "o r", "Ġ =", "s e",
    "Ġ c", "l e", "i on", "e s", "Ġ f", "Ġ i", "in g", "s t", "a n", "l f", "se lf", "r o", "d e", "u r", "t ion",
    "m e", "Ġ o", "Ġo f", "re t", "ret ur", "retur n", "Ġ re", "Ġ in", "n e",
)  # fmt: skip
BOS_TEXT = "<|begin|>"
EOS_TEXT = "<|end|>"
N_VOCAB = 256 + len(_COMMON) + 2


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of each byte value in byte-level BPE (GPT-2's): 256 characters.

    Bytes that print stand for themselves; the others, in rising order, take the code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def vocabulary(n_vocab: int = N_VOCAB) -> tuple[list[str], list[int], list[str]]:
    """Return token texts, token types and merges of a byte-level tokenizer with `n_vocab` entries.

    First the bytes, then merged tokens, then filler that no text is split into, last BOS and EOS.
    """
    merges = list(_COMMON)
    texts = [*byte_alphabet(), *(m.replace(" ", "") for m in merges)]
    if n_vocab < len(texts) + 2:
        raise ValueError(f"n_vocab={n_vocab}: at least {len(texts) + 2} are needed")
    filler = [f"<filler-{i}>" for i in range(n_vocab - len(texts) - 2)]
    types = [gguf.TokenType.NORMAL] * (len(texts) + len(filler)) + [gguf.TokenType.CONTROL] * 2
    return [*texts, *filler, BOS_TEXT, EOS_TEXT], [int(t) for t in types], merges


# -------------------------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Dims:
    """Sizes of a model, in llama.cpp's names, and two scales.

    The larger `router_gain`, the less the last of the chosen experts weigh; `expert_gain` times the family's own scale
    is what the experts add to the residual stream.  Together they set how much a dropped expert changes.
    """

    n_vocab: int = N_VOCAB
    n_layer: int = 2
    n_embd: int = 32
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 64
    n_expert: int = 16
    n_expert_used: int = 8
    n_ff_exp: int = 32
    n_ctx_train: int = 4096
    router_gain: float = 1.5
    expert_gain: float = 1.0

    @property
    def head(self) -> int:
        """Return the width of one attention head."""
        return self.n_embd // self.n_head


@dataclass(frozen=True)
class TensorSpec:
    """One tensor before it exists.

    Attributes:
        name: Its name in the file.
        shape: In NumPy's order (rows first).
        std: Standard deviation of the weights around `mean`.
        mean: 1 for norms, else 0.
        vector: Kept in float32 whatever the weight type, as converters do with norms, biases and routers.
    """

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    vector: bool = False


def matrix(name: str, n_out: int, n_in: int, gain: float = 1.0) -> TensorSpec:
    """Return a matrix that keeps the variance of its input, times `gain` squared."""
    return TensorSpec(f"{name}.weight", (n_out, n_in), gain / n_in**0.5)


def _experts(name: str, n: int, n_out: int, n_in: int, gain: float = 1.0) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (n, n_out, n_in), gain / n_in**0.5)


def norm(name: str, n: int) -> TensorSpec:
    """Return the weights of a normalisation: around 1."""
    return TensorSpec(f"{name}.weight", (n,), 0.1, 1.0, vector=True)


def _bias(name: str, *shape: int, std: float = 0.1) -> TensorSpec:
    return TensorSpec(f"{name}.bias", shape, std, vector=True)


def _attention(p: str, d: Dims) -> Iterator[TensorSpec]:
    yield norm(f"{p}.attn_norm", d.n_embd)
    yield matrix(f"{p}.attn_q", d.n_head * d.head, d.n_embd)
    yield matrix(f"{p}.attn_k", d.n_head_kv * d.head, d.n_embd)
    yield matrix(f"{p}.attn_v", d.n_head_kv * d.head, d.n_embd)
    yield matrix(f"{p}.attn_output", d.n_embd, d.n_head * d.head)


_EXPERT_GAIN = 6.0  # SiLU gating shrinks the variance; several experts' outputs average out


def _moe(p: str, d: Dims, gain: float = _EXPERT_GAIN) -> Iterator[TensorSpec]:
    yield replace(matrix(f"{p}.ffn_gate_inp", d.n_expert, d.n_embd, d.router_gain), vector=True)
    yield _experts(f"{p}.ffn_gate_exps", d.n_expert, d.n_ff_exp, d.n_embd)
    yield _experts(f"{p}.ffn_up_exps", d.n_expert, d.n_ff_exp, d.n_embd)
    yield _experts(f"{p}.ffn_down_exps", d.n_expert, d.n_embd, d.n_ff_exp, gain * d.expert_gain)


def _shared(p: str, d: Dims, n_ff: int) -> Iterator[TensorSpec]:
    yield matrix(f"{p}.ffn_gate_shexp", n_ff, d.n_embd)
    yield matrix(f"{p}.ffn_up_shexp", n_ff, d.n_embd)
    yield matrix(f"{p}.ffn_down_shexp", d.n_embd, n_ff)


def _dense(p: str, d: Dims) -> Iterator[TensorSpec]:
    yield matrix(f"{p}.ffn_gate", d.n_ff, d.n_embd)
    yield matrix(f"{p}.ffn_up", d.n_ff, d.n_embd)
    yield matrix(f"{p}.ffn_down", d.n_embd, d.n_ff)


# ------------------------------------------------------------------------------------------------------ families

Block = Callable[[str, int, Dims], Iterator[TensorSpec]]
Keys = Callable[[Dims], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """A routing family: what its blocks hold and which further keys its architecture reads.

    Attributes:
        architecture: `general.architecture`.
        block: Tensors of one block.
        keys: Metadata without the architecture's prefix; bool, int, float or list values.
        dims: Sizes.
        renormalised: Whether llama.cpp rescales the kept weights to their full sum.
        softmax_weights: Whether the gate is a softmax over the selected experts only.
    """

    architecture: str
    block: Block
    keys: Keys
    dims: Dims = field(default_factory=Dims)
    renormalised: bool = True
    softmax_weights: bool = False


def _qwen3moe_block(p: str, _: int, d: Dims) -> Iterator[TensorSpec]:
    yield from _attention(p, d)
    yield norm(f"{p}.attn_q_norm", d.head)
    yield norm(f"{p}.attn_k_norm", d.head)
    yield norm(f"{p}.ffn_norm", d.n_embd)
    yield from _moe(p, d)


def _qwen2moe_block(p: str, _: int, d: Dims) -> Iterator[TensorSpec]:
    yield from _attention(p, d)
    yield norm(f"{p}.ffn_norm", d.n_embd)
    yield from _moe(p, d, 2 * _EXPERT_GAIN)  # without renormalisation the experts' sum is smaller
    yield TensorSpec(f"{p}.ffn_gate_inp_shexp.weight", (d.n_embd,), d.n_embd**-0.5, vector=True)
    yield from _shared(p, d, d.n_ff)


def _olmoe_block(p: str, _: int, d: Dims) -> Iterator[TensorSpec]:
    yield from _attention(p, d)
    yield norm(f"{p}.attn_q_norm", d.n_embd)
    yield norm(f"{p}.attn_k_norm", d.n_embd)
    yield norm(f"{p}.ffn_norm", d.n_embd)
    yield from _moe(p, d, 2 * _EXPERT_GAIN)


def _gpt_oss_block(p: str, _: int, d: Dims) -> Iterator[TensorSpec]:
    yield from _attention(p, d)
    for name, width in (("q", d.n_head), ("k", d.n_head_kv), ("v", d.n_head_kv)):
        yield _bias(f"{p}.attn_{name}", width * d.head)
    yield _bias(f"{p}.attn_output", d.n_embd)
    yield norm(f"{p}.post_attention_norm", d.n_embd)
    yield TensorSpec(f"{p}.attn_sinks.weight", (d.n_head,), 1.0, vector=True)
    yield from _moe(p, d)
    yield _bias(f"{p}.ffn_gate_inp", d.n_expert)
    yield _bias(f"{p}.ffn_gate_exps", d.n_expert, d.n_ff_exp)
    yield _bias(f"{p}.ffn_up_exps", d.n_expert, d.n_ff_exp)
    yield _bias(f"{p}.ffn_down_exps", d.n_expert, d.n_embd)


def _llama_block(p: str, _: int, d: Dims) -> Iterator[TensorSpec]:
    yield from _attention(p, d)
    yield norm(f"{p}.ffn_norm", d.n_embd)
    if d.n_expert == 0:
        yield from _dense(p, d)
    else:
        yield from _moe(p, replace(d, n_ff_exp=d.n_ff))  # llama's experts are `feed_forward_length` wide


def _granitemoe_block(p: str, layer: int, d: Dims) -> Iterator[TensorSpec]:
    yield from _llama_block(p, layer, d)
    yield from _shared(p, d, d.n_ff)


_KV_LORA, _Q_LORA, _ROPE, _NOPE, _V_HEAD = 16, 24, 8, 8, 16  # widths of the latent attention


def _mla_block(p: str, layer: int, d: Dims) -> Iterator[TensorSpec]:
    yield norm(f"{p}.attn_norm", d.n_embd)
    yield norm(f"{p}.attn_q_a_norm", _Q_LORA)
    yield norm(f"{p}.attn_kv_a_norm", _KV_LORA)
    yield matrix(f"{p}.attn_q_a", _Q_LORA, d.n_embd)
    yield matrix(f"{p}.attn_q_b", d.n_head * (_NOPE + _ROPE), _Q_LORA)
    yield matrix(f"{p}.attn_kv_a_mqa", _KV_LORA + _ROPE, d.n_embd)
    yield _experts(f"{p}.attn_k_b", d.n_head, _KV_LORA, _NOPE)
    yield _experts(f"{p}.attn_v_b", d.n_head, _V_HEAD, _KV_LORA)
    yield matrix(f"{p}.attn_output", d.n_embd, d.n_head * _V_HEAD)
    yield norm(f"{p}.ffn_norm", d.n_embd)
    if layer == 0:
        yield from _dense(p, d)
    else:
        yield from _moe(p, d, _EXPERT_GAIN / 3)  # sigmoid gates are flatter and are scaled up
        yield _bias(f"{p}.exp_probs_b", d.n_expert)
        yield from _shared(p, d, d.n_ff_exp)


_INDEXER_HEADS, _INDEXER_WIDTH = 2, 64  # llama.cpp makes the indexer's Hadamard matrix from a width of 64 on


def _glm_dsa_block(p: str, layer: int, d: Dims) -> Iterator[TensorSpec]:
    yield from _mla_block(p, layer, d)
    yield norm(f"{p}.indexer.k_norm", _INDEXER_WIDTH)
    yield _bias(f"{p}.indexer.k_norm", _INDEXER_WIDTH)
    yield matrix(f"{p}.indexer.proj", _INDEXER_HEADS, d.n_embd)
    yield matrix(f"{p}.indexer.attn_k", _INDEXER_WIDTH, d.n_embd)
    yield matrix(f"{p}.indexer.attn_q_b", _INDEXER_HEADS * _INDEXER_WIDTH, _Q_LORA)


def common_keys(d: Dims) -> dict[str, Any]:
    """Return the keys that every architecture reads, without its prefix."""
    return {
        "context_length": d.n_ctx_train,
        "embedding_length": d.n_embd,
        "block_count": d.n_layer,
        "feed_forward_length": d.n_ff,
        "attention.head_count": d.n_head,
        "attention.head_count_kv": d.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": d.head,
        "attention.value_length": d.head,
        "rope.dimension_count": d.head,
        "rope.freq_base": 10000.0,
    }


def _expert_width(d: Dims) -> dict[str, Any]:
    return {"expert_feed_forward_length": d.n_ff_exp}


def _qwen2moe_keys(d: Dims) -> dict[str, Any]:
    return {**_expert_width(d), "expert_shared_feed_forward_length": d.n_ff}


def _gpt_oss_keys(d: Dims) -> dict[str, Any]:
    return {**_expert_width(d), "attention.sliding_window": 128}


def _granitemoe_keys(d: Dims) -> dict[str, Any]:
    return {
        "logit_scale": 1.0,
        "residual_scale": 1.0,
        "embedding_scale": 1.0,
        "attention.scale": d.head**-0.5,
        "expert_shared_feed_forward_length": d.n_ff,
    }


def _mla_keys(d: Dims) -> dict[str, Any]:
    return {
        **_expert_width(d),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": _Q_LORA,
        "attention.kv_lora_rank": _KV_LORA,
        "attention.key_length": _KV_LORA + _ROPE,
        "attention.value_length": _KV_LORA,
        "attention.key_length_mla": _NOPE + _ROPE,
        "attention.value_length_mla": _V_HEAD,
        "rope.dimension_count": _ROPE,
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.0,
        "expert_weights_norm": True,
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
    }


def _grouped_keys(d: Dims) -> dict[str, Any]:
    return {**_mla_keys(d), "expert_group_count": 4, "expert_group_used_count": 3}


def _glm_dsa_keys(d: Dims) -> dict[str, Any]:
    return {
        **_mla_keys(d),
        "attention.indexer.head_count": _INDEXER_HEADS,
        "attention.indexer.key_length": _INDEXER_WIDTH,
        "attention.indexer.top_k": 32,
    }


_MLA_DIMS = Dims(n_layer=3)  # the first block is dense
FAMILIES: dict[str, Family] = {
    "qwen3moe": Family("qwen3moe", _qwen3moe_block, _expert_width),
    "qwen2moe": Family("qwen2moe", _qwen2moe_block, _qwen2moe_keys, renormalised=False),
    "olmoe": Family("olmoe", _olmoe_block, lambda _: {}, Dims(n_head_kv=4, n_ff=32), renormalised=False),
    "gpt-oss": Family("gpt-oss", _gpt_oss_block, _gpt_oss_keys, softmax_weights=True),
    "llama": Family("llama", _llama_block, lambda _: {}, Dims(n_ff=32)),
    "granitemoe": Family("granitemoe", _granitemoe_block, _granitemoe_keys, Dims(n_ff=32)),
    "deepseek2": Family("deepseek2", _mla_block, _mla_keys, _MLA_DIMS),
    "deepseek2-groups": Family("deepseek2", _mla_block, _grouped_keys, _MLA_DIMS),
    "glm-dsa": Family("glm-dsa", _glm_dsa_block, _glm_dsa_keys, _MLA_DIMS),
}
