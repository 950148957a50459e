"""The whole sweep against `llama-perplexity` doing the same passes: wall time, side by side, medians.

    python tests/benchmarks/sweep_speed.py [--model M.gguf] [--text FILE] [--chunks N] [--repeats 3]
    python tests/benchmarks/sweep_speed.py --synthetic      # vocabulary 151,936, 64 experts, made on the spot

Same model, text, chunks, threads, batch, micro-batch and engine build.  The tool makes its base file and then one
`--kl-divergence` run a setting; ours is one `agreement sweep`, start-up, planning, preflight and table included.
Both are started in turn, so that a drift of the machine meets both.  The tool runs twice: as it comes, and without its
warm-up and its memory fitting (`--no-warmup -fit off`), its fastest way.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import llama_perplexity
import synthetic

from agreement.corpus import joined_text, load
from agreement.demo import CORPORA, MODEL

EXPERTS = (7, 6, 4, 2)
LEAN = ("--no-warmup", "-fit", "off")


def run_tool(
    program: Path, model: Path, text: Path, base: Path, given: argparse.Namespace, extra: tuple[str, ...]
) -> float:
    """Run the tool's five passes and return seconds."""
    common = [str(program), "-m", str(model), "-c", str(given.ctx), "-t", str(given.threads), *extra]
    common += ["-b", str(given.batch), "-ub", str(given.ubatch), "--kl-divergence-base", str(base)]
    passes = [[*common, "-f", str(text), "--chunks", str(given.chunks)]]
    key = "qwen3moe.expert_used_count=int"
    passes += [[*common, "--kl-divergence", "--override-kv", f"{key}:{n}"] for n in EXPERTS]
    started = time.monotonic()
    for command in passes:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - started


def run_ours(model: Path, text: Path, out: Path, given: argparse.Namespace) -> float:
    """Run `agreement sweep` and return seconds."""
    command = [sys.executable, "-m", "agreement", "sweep", str(model), str(text), "-o", str(out), "--quiet"]
    command += ["--experts", ",".join(map(str, EXPERTS)), "--chunking", "llama-perplexity"]
    command += ["-c", str(given.ctx), "--chunks", str(given.chunks), "-t", str(given.threads)]
    command += ["-b", str(given.batch), "-ub", str(given.ubatch)]
    shutil.rmtree(out, ignore_errors=True)
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def scoring_share(out: Path) -> tuple[float, float]:
    """Return scoring's share of the passes' time, and the passes' seconds."""
    lines = [json.loads(line) for line in (out / "timings.jsonl").read_text(encoding="utf-8").splitlines()]
    total = sum(entry["seconds"] for entry in lines)
    return sum(entry["seconds_scoring"] for entry in lines) / total, total


def peak_memory(model: Path, text: Path, out: Path, given: argparse.Namespace, chunks: int) -> float:
    """Return the largest resident memory of any process of one sweep over `chunks` chunks, MB."""
    code = (
        "import resource, runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try:\n    runpy.run_module('agreement', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)\n"
        "print('PEAK', max(resource.getrusage(who).ru_maxrss for who in both))\n"
    )
    command = [sys.executable, "-c", code, "agreement", "sweep", str(model), str(text), "-o", str(out), "--quiet"]
    command += ["--experts", "6", "-c", str(given.ctx), "--chunks", str(chunks), "-t", str(given.threads)]
    command += ["-b", str(given.batch), "-ub", str(given.ubatch), "--chunking", "llama-perplexity"]
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("PEAK"))
    return int(line.split()[1]) * (1 if sys.platform == "darwin" else 1024) / 1e6


def main() -> int:
    """Time both and print medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--synthetic", action="store_true", help="Make and use the large-vocabulary model.")
    parser.add_argument("--text", type=Path, default=CORPORA["heldout-code"])
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="Also compare peak memory at 8 and 64 chunks.")
    given = parser.parse_args()
    program = llama_perplexity.build()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        text, out = folder / "text.txt", folder / "run"
        text.write_text(joined_text(load(given.text)), encoding="utf-8")
        model = folder / "synthetic.gguf" if given.synthetic else given.model
        if given.synthetic:
            synthetic.write_synthetic(model, "vocabulary")
        print(
            f"{model.name}, {given.chunks} chunks of {given.ctx}, -t {given.threads} -b {given.batch} "
            f"-ub {given.ubatch}"
        )
        seconds: dict[str, list[float]] = {"agreement": [], "tool": [], "tool, lean": []}
        shares = []
        for repeat in range(given.repeats):
            seconds["agreement"].append(run_ours(model, text, out, given))
            shares.append(scoring_share(out)[0])
            seconds["tool"].append(run_tool(program, model, text, folder / "base", given, ()))
            seconds["tool, lean"].append(run_tool(program, model, text, folder / "base", given, LEAN))
            print(f"  run {repeat + 1}: " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in seconds.items()), flush=True)
        ours = statistics.median(seconds["agreement"])
        for peer in ("tool", "tool, lean"):
            ratios = [a / b for a, b in zip(seconds["agreement"], seconds[peer], strict=True)]
            median = statistics.median(seconds[peer])
            print(
                f"agreement {ours:.2f} s / {peer} {median:.2f} s: ratio {statistics.median(ratios):.3f} "
                f"(pairs {min(ratios):.3f} to {max(ratios):.3f})"
            )
        print(f"scoring takes {statistics.median(shares):.1%} of our passes")
        if given.memory:
            few, many = (peak_memory(model, text, out, given, n) for n in (8, 64))
            print(f"peak memory {few:.0f} MB at 8 chunks, {many:.0f} MB at 64")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
