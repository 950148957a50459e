"""Our scorer beside `llama-perplexity --kl-divergence`: same model, same text, same chunks, figure by figure.

    python tests/benchmarks/score_comparison.py [--model M.gguf] [--text FILE] [--experts 7,6,4,2]

Builds the tool from the source package of the llama-cpp-python in use, if it is not built yet.  The tool reads its
baseline from 16-bit codes that are clipped at 16 nats below the maximum, ours is exact at the top: what remains
between the two columns must be within what that explains, and is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import llama_perplexity
import numpy as np

import agreement
from agreement.corpus import joined_text, load
from agreement.demo import CORPORA, MODEL
from agreement.recording import baseline_rows
from agreement.store import RunStore
from agreement.summary import load_counts


@dataclass(frozen=True)
class Figures:
    """What both tools say of one setting."""

    ppl_base: float
    ppl: float
    ln_ratio: float
    kld: float
    same_top_percent: float
    dp_percent: float
    dp_rms_percent: float


# What the tool's codes can move (and at least half a unit of the last digit that it prints): a code is at most
# 16/65535 = 2.4e-4 nat, so a log-prob of the base is off by at most 1.2e-4, and two tokens closer than a code can
# change places.  PPL is relative; the tool computes that of the test from exact logits.
TOLERANCE = Figures(
    ppl_base=1.3e-4, ppl=5e-7, ln_ratio=1.3e-4, kld=1.3e-4, same_top_percent=0.1, dp_percent=0.02, dp_rms_percent=0.02
)


def theirs(model: Path, base: Path, n_ctx: int, overrides: tuple[str, ...]) -> Figures:
    """Run the tool's comparison and return its figures."""
    arch = "qwen3moe"
    extra = [part for o in overrides for part in ("--override-kv", f"{arch}.{o}")]
    run = llama_perplexity.run_kld(model, base, n_ctx, extra=extra)
    s = {label: figure.value for label, figure in run.statistics.items()}
    return Figures(
        ppl_base=s["Mean PPL(base)"],
        ppl=s["Mean PPL(Q)"],
        ln_ratio=s["Mean ln(PPL(Q)/PPL(base))"],
        kld=s["Mean KLD"],
        same_top_percent=s["Same top p"],
        dp_percent=s["Mean Δp"],
        dp_rms_percent=s["RMS Δp"],
    )


def clipped_away(run: Path) -> float:
    """Return by how much the tool's clip lowers its base's mean negative log-likelihood, nats a position.

    Its file raises every log-prob to at least 16 nats below the row's maximum, the true token's too.  Ours is exact, so
    what that does to the tool's figures can be computed.
    """
    store = RunStore.open(run)
    raised, n = 0.0, 0
    for index in range(int(store.header["identity"]["chunks"]["n_chunks"])):
        rows = baseline_rows(*store.read_chunk("baseline", index))
        floor = rows.top_logprobs[:, 0].astype(np.float64) - 16
        raised += float(np.maximum(floor - rows.target_logprob, 0).sum())
        n += len(rows.target)
    return raised / n


def ours(run: Path) -> dict[str, Figures]:
    """Return our figures by setting, those of the base as the tool's clip would make them."""
    counts, _ = load_counts(run)
    clip = clipped_away(run)
    print(
        f"the tool's clip lowers its base's log PPL by {clip:.6f}; ppl_base and ln_ratio below are ours with that clip"
    )
    found = {}
    for s in counts.settings:
        total = sum(s.counts[1:], s.counts[0])
        found[s.setting] = Figures(
            ppl_base=math.exp(total.nll_base / total.n - clip),
            ppl=math.exp(total.nll_test / total.n),
            ln_ratio=(total.nll_test - total.nll_base) / total.n + clip,
            kld=total.kld_low / total.n,
            same_top_percent=100 * total.n_agree / total.n,
            dp_percent=100 * total.dp / total.n,
            dp_rms_percent=100 * math.sqrt(total.dp_squared / total.n),
        )
    return found


def main() -> int:
    """Run both and print them side by side; exit 1 if a difference is larger than the codes explain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--text", type=Path, default=CORPORA["heldout-code"])
    parser.add_argument("--experts", default="7,6,4,2")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--json", type=Path, help="Also write both columns here.")
    given = parser.parse_args()
    llama_perplexity.build()
    experts = [int(n) for n in given.experts.split(",")]
    corpus = load(given.text)
    with tempfile.TemporaryDirectory() as folder:
        text, base, run = Path(folder) / "text.txt", Path(folder) / "base.kld", Path(folder) / "run"
        text.write_text(joined_text(corpus), encoding="utf-8")
        options = agreement.ChunkOptions(chunking="llama-perplexity", n_ctx=given.ctx, n_chunks=given.chunks)
        agreement.sweep(given.model, corpus, run, experts=experts, chunks=options)
        llama_perplexity.run_base(given.model, text, given.ctx, given.chunks, base_file=base)
        left = ours(run)
        right = {f"experts={n}": theirs(given.model, base, given.ctx, (f"expert_used_count=int:{n}",)) for n in experts}
    worst = 0
    print(f"{'setting':<12}{'figure':<18}{'agreement':>14}{'llama-perplexity':>18}{'difference':>12}{'explained':>11}")
    for setting, mine in left.items():
        for name, value in asdict(mine).items():
            other = getattr(right[setting], name)
            limit = getattr(TOLERANCE, name) * (other if name.startswith("ppl") else 1)
            limit = max(limit, 6e-7 if name != "same_top_percent" else 6e-4)
            beyond = abs(value - other) > limit
            worst += beyond
            print(
                f"{setting:<12}{name:<18}{value:>14.6f}{other:>18.6f}{value - other:>12.6f}{limit:>11.6f}"
                + ("  BEYOND" if beyond else "")
            )
    if given.json:
        data = {
            "agreement": {k: asdict(v) for k, v in left.items()},
            "llama-perplexity": {k: asdict(v) for k, v in right.items()},
        }
        given.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print("all differences are explained" if not worst else f"{worst} differences are NOT explained")
    return 1 if worst else 0


if __name__ == "__main__":
    raise SystemExit(main())
