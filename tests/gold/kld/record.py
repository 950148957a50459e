"""Record the files of this folder with llama.cpp's own `llama-perplexity`.

    python tests/benchmarks/llama_perplexity.py        # once: builds the tool
    python tests/gold/kld/record.py

It writes `base.kld` (the model as its file says), `experts-6.kld` (two experts fewer) and what the tool printed when it
compared the latter setting with `base.kld`. The model is the tiny `granitemoe` of tests/models.py, whose logits spread
over 13 to 20 nats, so that some rows are clipped and some not; its odd vocabulary makes padded rows.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import models  # noqa: E402 - the path comes first
from benchmarks import llama_perplexity  # noqa: E402 - the same

N_CTX = 64
CHUNKS = 4
N_VOCAB = 301
THREADS = ("-t", "1")
SIX = ("--override-kv", "granitemoe.expert_used_count=int:6", *THREADS)


def text() -> str:
    """Return the text: plain code-like lines, no two alike."""
    return "\n".join(f"self.item_{i} = the_return_of({i * i}, line={i})  # {i} in {i + 7}" for i in range(40))


def main() -> None:
    """Run the tool three times."""
    llama_perplexity.build()
    with tempfile.TemporaryDirectory() as folder:
        model = models.write_model(Path(folder) / "model.gguf", "granitemoe", n_vocab=N_VOCAB)
        source = Path(folder) / "text.txt"
        source.write_text(text(), encoding="utf-8")
        base, six = HERE / "base.kld", HERE / "experts-6.kld"
        first = llama_perplexity.run_base(model, source, N_CTX, CHUNKS, base_file=base, extra=THREADS)
        second = llama_perplexity.run_base(model, source, N_CTX, CHUNKS, base_file=six, extra=SIX)
        compared = llama_perplexity.run_kld(model, base, N_CTX, extra=SIX)
    for run, experts in ((first, 8), (second, 6), (compared, 6)):
        if run.n_expert_used != experts:
            raise SystemExit(f"the engine used {run.n_expert_used} experts, not {experts}")
    # Standard output alone: the log on the other stream holds times and paths.
    printed = compared.output[: compared.output.index("Same top p:")] + "Same top p:"
    last = compared.output[len(printed) :].splitlines()[0]
    (HERE / "experts-6.txt").write_text(f"{printed}{last}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
