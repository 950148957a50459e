"""Train the bundled demo model: `python -m agreement.demo.train --out model.gguf`.

In: the running Python's standard library.  Out: a GGUF file, and a JSON file beside it that says what was reached.
Every batch is drawn from (seed, step), so a run that was interrupted and resumed takes the same steps.
"""

from __future__ import annotations

import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agreement.demo import data, export
from agreement.demo.network import Network, Shape

SEED = 20261130
BATCH = 8  # windows of n_ctx tokens a step
PEAK_RATE, FINAL_RATE, WARMUP = 4e-3, 1e-4, 200
BALANCE_LOSS = 0.01
CHECKPOINT_EVERY = 250


def batch_at(tokens: np.ndarray, step: int, n_ctx: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of one step, each (BATCH, n_ctx) int64, a function of (SEED, step) alone."""
    starts = np.random.default_rng([SEED, step]).integers(0, len(tokens) - n_ctx - 1, BATCH)
    windows = np.stack([tokens[s : s + n_ctx + 1] for s in starts]).astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def learning_rate(step: int, n_steps: int) -> float:
    """Linear warm-up, then a cosine down to FINAL_RATE."""
    if step < WARMUP:
        return PEAK_RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, n_steps - WARMUP)
    return FINAL_RATE + (PEAK_RATE - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def evaluate(network: Network, tokens: np.ndarray, n_windows: int = 200) -> tuple[float, float]:
    """Return mean loss in nats and next-token accuracy over the first windows of `tokens`."""
    n_ctx = network.shape.n_ctx
    n_windows = min(n_windows, (len(tokens) - 1) // n_ctx)
    losses, hits = [], []
    for w in range(n_windows):
        ids = torch.from_numpy(tokens[w * n_ctx : (w + 1) * n_ctx + 1].astype(np.int64))
        logits, _ = network(ids[None, :-1])
        losses.append(F.cross_entropy(logits[0].float(), ids[1:]).item())
        hits.append((logits[0].argmax(-1) == ids[1:]).float().mean().item())
    return float(np.mean(losses)), float(np.mean(hits))


def _optimiser(network: Network) -> torch.optim.AdamW:
    matrices = [p for p in network.parameters() if p.dim() >= 2]
    vectors = [p for p in network.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def _save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The GGUF to write.")
@click.option("--steps", default=4000, show_default=True, help="Optimiser steps of 4,096 tokens.")
@click.option("--threads", default=2, show_default=True, help="CPU threads; part of what makes a run repeat.")
def main(out: Path, steps: int, threads: int) -> None:
    """Train the demo model on the standard library and export it; continues from its checkpoint if there is one."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    corpus = data.load()
    click.echo(f"{len(corpus.train):,} training and {len(corpus.held_out):,} held-out tokens")
    network = Network(Shape())
    network.initialise(SEED)
    optimiser = _optimiser(network)
    checkpoint = out.with_suffix(".checkpoint")
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(state["network"])
        optimiser.load_state_dict(state["optimiser"])
        first = int(state["step"])
        click.echo(f"continuing at step {first}")
    started = time.monotonic()
    for step in range(first, steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps)
        ids, targets = batch_at(corpus.train, step, network.shape.n_ctx)
        logits, balance = network(ids)  # float32: autocast to bfloat16 was slower on the CPU it was tried on
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss + BALANCE_LOSS * balance).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if (step + 1) % 50 == 0:
            rate = (step + 1 - first) * BATCH * network.shape.n_ctx / (time.monotonic() - started)
            left = (steps - step - 1) * BATCH * network.shape.n_ctx / rate / 60
            click.echo(
                f"step {step + 1}/{steps}  loss {loss.item():.3f}  balance {balance.item():.3f}  "
                f"{rate:,.0f} tokens/s  {left:.0f} min left"
            )
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            state = {"network": network.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1}
            _save_checkpoint(checkpoint, state)
    loss_held_out, accuracy = evaluate(network, corpus.held_out)
    summary = {
        "parameters": sum(p.numel() for p in network.parameters()),
        "steps": steps,
        "tokens_seen": steps * BATCH * network.shape.n_ctx,
        "held_out_loss_nats": round(loss_held_out, 4),
        "held_out_next_token_accuracy": round(accuracy, 4),
        "training_files": corpus.n_files[0],
        "held_out_files": corpus.n_files[1],
        "training_tokens": len(corpus.train),
        "text_sha256": corpus.sha256,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": SEED,
        "threads": threads,
    }
    export.write_gguf(out, network, corpus.tokenizer, summary)
    out.with_suffix(".json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    click.echo(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
