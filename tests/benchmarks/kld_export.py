"""Proof that `agreement kld export` writes what the C++ tool accepts: the tool runs on the exported file.

    python tests/benchmarks/kld_export.py [--model M.gguf]

Records a baseline, exports it, lets `llama-perplexity --kl-divergence` compare a reduced setting with it, and prints
the tool's figures beside our own for the same setting.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import llama_perplexity

import agreement
from agreement.demo import CORPORA, MODEL
from agreement.exchange import export_base


def main() -> int:
    """Run all three steps; exit 1 if the figures differ by more than the codes explain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--text", type=Path, default=CORPORA["heldout-code"])
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=16)
    given = parser.parse_args()
    llama_perplexity.build()
    with tempfile.TemporaryDirectory() as folder:
        run, base = Path(folder) / "run", Path(folder) / "base.kld"
        # Chunks inside documents, which the tool itself would never cut: the file carries them all the same.
        options = agreement.ChunkOptions(n_ctx=given.ctx, n_chunks=given.chunks)
        report = agreement.sweep(given.model, given.text, run, experts=[6], chunks=options)
        size = export_base(run, base)
        override = ("--override-kv", "qwen3moe.expert_used_count=int:6")
        found = llama_perplexity.run_kld(given.model, base, given.ctx, extra=override).statistics
    (row,) = report.rows
    pairs = {
        "Same top p, %": (100 * row.agreement.value, found["Same top p"].value, 0.1),
        "Mean KLD": (row.kld.value, found["Mean KLD"].value, 4e-4),
        "PPL(Q)": (row.ppl, found["Mean PPL(Q)"].value, 1e-6 * row.ppl + 1e-6),
    }
    print(f"exported {size:,} bytes; the tool compared {len(report.rows)} setting over {row.n_positions} positions")
    beyond = 0
    for name, (ours, theirs, limit) in pairs.items():
        beyond += abs(ours - theirs) > limit
        print(f"{name:<16}{ours:>14.6f}{theirs:>14.6f}  limit {limit:.2g}")
    return 1 if beyond else 0


if __name__ == "__main__":
    raise SystemExit(main())
