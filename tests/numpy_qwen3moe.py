"""A `qwen3moe` forward pass in float64 numpy, written from the architecture's description, to check engines against.

In: a GGUF and token ids `(n_ctx,)`.  Out: logits `(n_ctx, n_vocab)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return scalar metadata and tensors, each in row-major (n_out, n_in) order, float64."""
    reader = gguf.GGUFReader(path)
    scalars = {k: f.contents() for k, f in reader.fields.items() if f.types and f.types[0] != gguf.GGUFValueType.ARRAY}
    return scalars, {t.name: np.asarray(t.data, np.float64) for t in reader.tensors}


def logits(path: Path, tokens: NDArray[np.int32], n_used: int | None = None) -> Array:
    """Run the model with `n_used` experts per token (the file's number if None)."""
    meta, t = read(path)

    def key(name: str) -> Any:
        return meta[f"qwen3moe.{name}"]

    n_head, n_kv, width = key("attention.head_count"), key("attention.head_count_kv"), key("attention.key_length")
    eps, used = key("attention.layer_norm_rms_epsilon"), n_used or key("expert_used_count")
    n = len(tokens)
    half = width // 2
    angle = np.outer(np.arange(n), key("rope.freq_base") ** (-np.arange(half) / half))
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]

    def norm(x: Array, weight: Array) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight

    def rotate(x: Array) -> Array:
        a, b = x[..., :half], x[..., half:]
        return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)

    def softmax(x: Array) -> Array:
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    x = t["token_embd.weight"][tokens]
    hidden = np.triu(np.full((n, n), -np.inf), 1)
    for i in range(key("block_count")):
        w = {name.removeprefix(f"blk.{i}.").removesuffix(".weight"): v for name, v in t.items() if f"blk.{i}." in name}
        a = norm(x, w["attn_norm"])
        q = rotate(norm((a @ w["attn_q"].T).reshape(n, n_head, width), w["attn_q_norm"]))
        k = rotate(norm((a @ w["attn_k"].T).reshape(n, n_kv, width), w["attn_k_norm"]))
        v = (a @ w["attn_v"].T).reshape(n, n_kv, width)
        heads = []
        for h in range(n_head):
            g = h // (n_head // n_kv)
            heads.append(softmax(q[:, h] @ k[:, g].T / np.sqrt(width) + hidden) @ v[:, g])
        x = x + np.concatenate(heads, axis=-1) @ w["attn_output"].T
        a = norm(x, w["ffn_norm"])
        probs = softmax(a @ w["ffn_gate_inp"].T)
        chosen = np.argsort(-probs, axis=-1, kind="stable")[:, :used]
        kept = np.take_along_axis(probs, chosen, axis=-1)
        kept /= kept.sum(-1, keepdims=True)
        out = np.zeros_like(x)
        for p in range(n):
            for e, share in zip(chosen[p], kept[p], strict=True):
                gate, up = w["ffn_gate_exps"][e] @ a[p], w["ffn_up_exps"][e] @ a[p]
                out[p] += share * (w["ffn_down_exps"][e] @ (gate / (1 + np.exp(-gate)) * up))
        x = x + out
    return norm(x, t["output_norm.weight"]) @ t["token_embd.weight"].T
