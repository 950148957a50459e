"""Synthetic qwen3moe models of realistic size for benchmarks; random weights, the same for the same seed.

    python tests/benchmarks/synthetic.py vocabulary MODEL.gguf     a vocabulary of 151,936 and 64 experts, 0.5 GB
    python tests/benchmarks/synthetic.py experts MODEL.gguf        384 small experts a layer, 1.1 GB

Each is written tensor by tensor, so making it needs no more than some tens of megabytes of memory.  Text is split as by
the tiny models' tokenizer (bytes and forty merges); the rest of the vocabulary is filler that only the output layer
knows.  Scales are chosen so that agreement at 7, 6, 4 and 2 of 8 experts is about that of large trained
models.  Seen with 300 tokens of source text: 95, 91, 79, 49 % (`vocabulary`) and 91, 86, 75, 53 % (`experts`).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where `models` is, when run as a script

import models

VOCABULARY = models.Dims(
    n_vocab=151_936,
    n_layer=4,
    n_embd=512,
    n_head=8,
    n_head_kv=2,
    n_ff=2048,
    n_expert=64,
    n_expert_used=8,
    n_ff_exp=256,
    n_ctx_train=32_768,
    router_gain=2.5,
    expert_gain=0.1,
)
EXPERTS = models.Dims(
    n_vocab=4096,
    n_layer=6,
    n_embd=256,
    n_head=8,
    n_head_kv=2,
    n_ff=2560,
    n_expert=384,
    n_expert_used=8,
    n_ff_exp=320,
    n_ctx_train=32_768,
    router_gain=3.0,
    expert_gain=0.1,
)
KINDS = {"vocabulary": VOCABULARY, "experts": EXPERTS}


def write_synthetic(path: str | Path, kind: str, *, n_vocab: int | None = None, seed: int = 0) -> Path:
    """Write one of `KINDS` to `path` at F16 and return it.

    Args:
        path: File to write; its folder exists.
        kind: Key of `KINDS`.
        n_vocab: Another vocabulary size than the kind's.
        seed: Of the weights.
    """
    return models.write_model(path, "qwen3moe", dims=KINDS[kind], n_vocab=n_vocab, seed=seed, dtype="f16")


def main() -> None:
    """Write a model from the command line."""
    parser = argparse.ArgumentParser(description="Write a synthetic model for benchmarks.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--vocab", type=int, default=None, help="vocabulary size other than the kind's")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    path = write_synthetic(arguments.path, arguments.kind, n_vocab=arguments.vocab, seed=arguments.seed)
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
