"""The demo model in PyTorch: a small `qwen3moe`, operation for operation what llama.cpp computes.

In: token ids `(batch, n_ctx)`.  Out: logits `(batch, n_ctx, n_vocab)` and the load-balancing loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The model's sizes, named as in llama.cpp."""

    n_vocab: int = 2048
    n_ctx: int = 512
    n_embd: int = 192
    n_layer: int = 4
    n_head: int = 6
    n_head_kv: int = 2
    n_embd_head: int = 32
    n_expert: int = 32
    n_expert_used: int = 8
    n_ff_exp: int = 48
    rope_freq_base: float = 10000.0
    norm_rms_eps: float = 1e-6


class _Dispatch(torch.autograd.Function):
    """Copy token rows into expert order, `(n, d)` to `(n * n_used, d)`.

    Plain indexing has a scatter-add as its gradient, which is slow on a CPU and may add in any order; the
    gradient here is a gather and a sum over a fixed axis, so training repeats to the bit.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, n_used: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.n_used = n_used
        return x[order // n_used]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grads[0][inverse]
        return grad.view(-1, ctx.n_used, grad.shape[-1]).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """Bring expert rows back to token order: a permutation, whose gradient is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y[inverse]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0][order], None, None


class MixtureOfExperts(nn.Module):
    """Softmax router over all experts, top-k, kept weights renormalised; each expert is a SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        e, d, f = shape.n_expert, shape.n_embd, shape.n_ff_exp
        self.n_used = shape.n_expert_used
        self.n_expert = e
        self.router = nn.Linear(d, e, bias=False)
        self.gate_up = nn.Parameter(torch.empty(e, d, 2 * f))  # columns [0, f) gate, [f, 2f) up
        self.down = nn.Parameter(torch.empty(e, f, d))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n, d = x.shape
        probs = self.router(x).float().softmax(-1)
        weights, chosen = probs.topk(self.n_used, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        counts = torch.bincount(flat, minlength=self.n_expert)
        rows: Tensor = _Dispatch.apply(x, order, inverse, self.n_used)
        outputs = []
        parts = torch.split(rows, counts.tolist())
        for r, w_in, w_out in zip(parts, self.gate_up.unbind(), self.down.unbind(), strict=True):
            gate, up = (r @ w_in).chunk(2, dim=-1)
            outputs.append((F.silu(gate) * up) @ w_out)
        y: Tensor = _Combine.apply(torch.cat(outputs), order, inverse)
        y = (y.view(n, self.n_used, d) * weights.unsqueeze(-1).to(y.dtype)).sum(1)
        # Shazeer-style balance: share of choices times mean probability, 1.0 when even (Fedus et al. 2022, eq. 4).
        share = counts.float() / flat.numel()
        return y, self.n_expert * (share * probs.mean(0)).sum()


class Block(nn.Module):
    """Pre-norm attention (grouped queries, RMS norm on queries and keys, rotary) and a mixture of experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d, h = shape.n_embd, shape.n_embd_head
        self.attn_norm = nn.RMSNorm(d, eps=shape.norm_rms_eps)
        self.q = nn.Linear(d, shape.n_head * h, bias=False)
        self.k = nn.Linear(d, shape.n_head_kv * h, bias=False)
        self.v = nn.Linear(d, shape.n_head_kv * h, bias=False)
        self.o = nn.Linear(shape.n_head * h, d, bias=False)
        self.q_norm = nn.RMSNorm(h, eps=shape.norm_rms_eps)
        self.k_norm = nn.RMSNorm(h, eps=shape.norm_rms_eps)
        self.ffn_norm = nn.RMSNorm(d, eps=shape.norm_rms_eps)
        self.moe = MixtureOfExperts(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        s = self.shape
        b, t, d = x.shape
        a = self.attn_norm(x)
        q = _rotate(self.q_norm(self.q(a).view(b, t, s.n_head, s.n_embd_head)), cos, sin)
        k = _rotate(self.k_norm(self.k(a).view(b, t, s.n_head_kv, s.n_embd_head)), cos, sin)
        v = self.v(a).view(b, t, s.n_head_kv, s.n_embd_head)
        a = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2).to(q.dtype), is_causal=True, enable_gqa=True
        )
        x = x + self.o(a.transpose(1, 2).reshape(b, t, -1))
        y, balance = self.moe(self.ffn_norm(x).view(b * t, d))
        return x + y.view(b, t, d), balance


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split ("neox") order that llama.cpp uses for qwen3moe."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Network(nn.Module):
    """The whole model; the output matrix is the token embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.norm = nn.RMSNorm(shape.n_embd, eps=shape.norm_rms_eps)
        half = shape.n_embd_head // 2
        freq = shape.rope_freq_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(shape.n_ctx, dtype=torch.float64), freq)
        self.register_buffer("cos", angle.cos().float()[:, None, :], persistent=False)
        self.register_buffer("sin", angle.sin().float()[:, None, :], persistent=False)

    def layers(self) -> list[Block]:
        """Return the blocks, with their own type."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def initialise(self, seed: int) -> None:
        """Draw all matrices from a normal of 0.02, output projections scaled down by depth."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            std = 0.02 / (2 * self.shape.n_layer) ** 0.5 if name.endswith(("o.weight", "down")) else 0.02
            if not name.endswith(("o.weight", "down", "embed.weight")):
                std = p.shape[-2 if p.dim() == 3 else -1] ** -0.5  # keeps unit variance at this small width
            nn.init.normal_(p, std=std, generator=generator)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        t = ids.shape[1]
        cos, sin = self.cos[:t], self.sin[:t]
        balance = x.new_zeros(())
        for block in self.blocks:
            x, b = block(x, cos, sin)
            balance = balance + b / self.shape.n_layer
        return F.linear(self.norm(x), self.embed.weight), balance
