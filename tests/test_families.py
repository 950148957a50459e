"""Every routing family, end to end: the override is proven, changes logits, and the report holds true numbers.

The numbers come a second time from `reference.py`, which shares no code with the package: agreement is equal to the
count, perplexity to 1e-5 of its value, KL divergence to 1e-4 nat at each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import models
import numpy as np
import pytest
from numpy.typing import NDArray
from reference import Reference, Scores, load_reference, score
from small_runs import FOUR_AT_A_TIME, ONE_AT_A_TIME, make_text, write_corpus

from agreement import ChunkOptions, sweep
from agreement.recording import load_chunks, stored_scores
from agreement.records import EngineOptions, Report
from agreement.store import RunStore

EXPERTS = (7, 4, 2)
N_CTX = 64
FIRST = N_CTX // 2  # documented default: half the window


@dataclass(frozen=True)
class Expected:
    """What the second way gives, window by window.

    Attributes:
        windows: Token windows as they are decoded, (n_chunks, n_ctx).
        scores: By number of experts, arrays (n_chunks, n_scored).
    """

    windows: NDArray[np.int32]
    scores: dict[int, Scores]


def windows_of_documents(texts: Sequence[list[int]], n_ctx: int) -> NDArray[np.int32]:
    """Return every window of every document: each begins where the scored range of the one before it ends."""
    step = n_ctx - 1 - n_ctx // 2
    cut = [ids[s : s + n_ctx] for ids in texts for s in range(0, len(ids) - n_ctx + 1, step)]
    return np.array(cut, np.int32)


def expect(
    path: Path,
    windows: NDArray[np.int32],
    *,
    bos: bool = False,
    piece: int | None = None,
    architecture: str = "qwen3moe",
    experts: Sequence[int] = EXPERTS,
) -> Expected:
    first = windows.shape[1] // 2
    targets = windows[:, first + 1 :].copy()

    def scored_logits(model: Reference) -> NDArray[np.float32]:
        if bos:
            windows[:, 0] = model.bos
        return model.logits(windows.tolist(), piece=piece)[:, first:-1]

    with load_reference(path) as model:
        base = scored_logits(model)
    scores = {}
    for n in experts:
        with load_reference(path, key=f"{architecture}.expert_used_count", value=n) as model:
            scores[n] = score(base, scored_logits(model), targets)
    return Expected(windows, scores)


def tokenised(path: Path, folder: Path) -> list[list[int]]:
    with load_reference(path) as model:
        return [model.tokens(p.read_text(encoding="utf-8")) for p in sorted(folder.iterdir())]


def check(report: Report, out: Path, expected: Expected, *, full: bool = True) -> None:
    """Hold a report and the position scores of its run against the second way."""
    run = RunStore.open(out)
    chunks = load_chunks(run)
    where = {window.tobytes(): i for i, window in enumerate(expected.windows)}
    order = [where[window.tobytes()] for window in chunks.tokens]
    assert sorted(order) == list(range(len(expected.windows)))  # every window is there, once
    assert [row.experts for row in report.rows] == list(expected.scores)
    for row, scores in zip(report.rows, expected.scores.values(), strict=True):
        assert row.n_positions == scores.kld.size
        assert row.agreement.value * row.n_positions == pytest.approx(scores.n_agree, abs=1e-6)
        assert report.baseline_ppl == pytest.approx(scores.base_ppl, rel=1e-5)
        assert row.ppl == pytest.approx(scores.ppl, rel=1e-5)
        assert row.ppl_ratio.value == pytest.approx(scores.ppl / scores.base_ppl, rel=1e-5)
        if full:
            assert row.kld.value == pytest.approx(scores.kld.mean(), abs=1e-4)
        for i, at in enumerate(order):
            ours = stored_scores(run, row.setting, i)
            assert np.array_equal(ours.base_top, scores.base_top[at])
            assert np.array_equal(ours.test_top, scores.test_top[at])
            assert np.allclose(ours.base_target_logprob, scores.base_logprob[at], rtol=0, atol=1e-5)
            assert np.allclose(ours.test_target_logprob, scores.test_logprob[at], rtol=0, atol=1e-5)
            if full:
                assert np.array_equal(ours.kld_low, ours.kld_high)
                assert np.allclose(ours.kld_low, scores.kld[at], rtol=0, atol=1e-4)
            else:
                assert (ours.kld_low <= scores.kld[at] + 1e-5).all()
                assert (ours.kld_high >= scores.kld[at] - 1e-5).all()


def check_proof(out: Path, architecture: str) -> None:
    """The proof that each override took effect is kept, and no chunk of a setting equals the baseline's."""
    run = RunStore.open(out)
    assert run.header["passes"]["baseline"]["proof"] == {"n_expert_used": 8, "overrides": []}
    base = [run.read_chunk("baseline", i)[1]["logits_xxh3"] for i in range(load_chunks(run).n_chunks)]
    for n in EXPERTS:
        proof = run.header["passes"][f"experts={n}"]["proof"]
        assert proof == {"n_expert_used": n, "overrides": [f"{architecture}.expert_used_count=int:{n}"]}
        digests = [run.read_chunk(f"experts={n}", i)[1]["logits_xxh3"] for i in range(len(base))]
        assert not set(base) & set(digests)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_family(family: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", family)
    architecture = models.FAMILIES[family].architecture
    folder = write_corpus(tmp_path / "texts", n_documents=3, n_words=120)
    cutting = ChunkOptions(n_ctx=N_CTX, n_chunks=None)
    expected = expect(path, windows_of_documents(tokenised(path, folder), N_CTX), architecture=architecture)
    assert len(expected.windows) > 15

    full = sweep(path, folder, tmp_path / "full", experts=EXPERTS, chunks=cutting, options=ONE_AT_A_TIME)
    check(full, tmp_path / "full", expected)
    check_proof(tmp_path / "full", architecture)
    agreement = [row.agreement.value for row in full.rows]
    assert 0.98 > agreement[0] > agreement[1] > agreement[2]

    top = sweep(
        path, folder, tmp_path / "top", experts=EXPERTS, chunks=cutting, options=ONE_AT_A_TIME, logits="top",
        in_process=True,
    )  # fmt: skip
    check(top, tmp_path / "top", expected, full=False)
    check_proof(tmp_path / "top", architecture)
    for row, scores in zip(top.rows, expected.scores.values(), strict=True):
        assert row.kld.low is not None
        assert row.kld.high is not None
        assert row.kld.low < scores.kld.mean() < row.kld.high


@pytest.mark.parametrize("family", models.FAMILIES)
def test_chunks_side_by_side(family: str, tmp_path: Path) -> None:
    """Four chunks in a batch against one: the same tokens, and logits that differ by rounding at most."""
    path = models.write_model(tmp_path / "m.gguf", family)
    folder = write_corpus(tmp_path / "texts", n_documents=3, n_words=80)
    cutting = ChunkOptions(n_ctx=N_CTX, n_chunks=10)  # two whole blocks of four, and one of two
    found = []
    for name, options in (("one", ONE_AT_A_TIME), ("four", FOUR_AT_A_TIME)):
        out = tmp_path / name
        sweep(path, folder, out, experts=(4,), chunks=cutting, options=options, in_process=True)
        run = RunStore.open(out)
        found.append([stored_scores(run, "experts=4", i) for i in range(10)])
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a.target, b.target)
        assert np.allclose(a.base_target_logprob, b.base_target_logprob, rtol=0, atol=1e-3)
        assert np.allclose(a.test_target_logprob, b.test_target_logprob, rtol=0, atol=1e-3)
        assert np.allclose(a.kld_low, b.kld_low, rtol=0, atol=1e-3)
        clear = a.base_margin > 1e-3  # only a baseline that hardly prefers its first token may change its mind
        assert np.array_equal(a.base_top[clear], b.base_top[clear])


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "deepseek2", "glm-dsa"])
def test_chunk_larger_than_a_batch(family: str, tmp_path: Path) -> None:
    """A window of 160 tokens in batches of 48: three whole pieces and one of 16, none scored before position 80.

    gpt-oss looks back 128 tokens only and glm-dsa attends to 32 of them, so both must forget and choose across pieces.
    """
    path = models.write_model(tmp_path / "m.gguf", family)
    folder = write_corpus(tmp_path / "texts", n_documents=2, n_words=150)
    options = EngineOptions(n_threads=1, n_batch=48, repack=False)
    windows = windows_of_documents(tokenised(path, folder), 160)
    expected = expect(path, windows, piece=48, architecture=models.FAMILIES[family].architecture, experts=(4,))
    cutting = ChunkOptions(n_ctx=160, n_chunks=None)
    report = sweep(path, folder, tmp_path / "run", experts=(4,), chunks=cutting, options=options, in_process=True)
    check(report, tmp_path / "run", expected)


def test_batch_that_is_no_multiple_of_the_micro_batch(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    """Micro-batches change no number that is shown: 3 chunks of 64 in a batch of 200, fed to the graph 50 at a time."""
    cutting = ChunkOptions(n_ctx=N_CTX, n_chunks=7)
    odd = EngineOptions(n_threads=1, n_batch=200, n_ubatch=50, repack=False)
    a = sweep(qwen, text_folder, tmp_path / "a", experts=(4,), chunks=cutting, options=ONE_AT_A_TIME, in_process=True)
    b = sweep(qwen, text_folder, tmp_path / "b", experts=(4,), chunks=cutting, options=odd, in_process=True)
    assert b.rows[0].n_positions == a.rows[0].n_positions == 7 * 31
    assert b.rows[0].ppl == pytest.approx(a.rows[0].ppl, rel=1e-3)
    assert b.rows[0].kld.value == pytest.approx(a.rows[0].kld.value, abs=1e-3)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_model_with_bos(dtype: models.WeightType, tmp_path: Path) -> None:
    """BOS replaces the first token of each window, and no target."""
    path = models.write_model(tmp_path / "m.gguf", "llama", add_bos=True, dtype=dtype)
    folder = write_corpus(tmp_path / "texts", n_documents=3, n_words=80)
    cutting = ChunkOptions(n_ctx=N_CTX, n_chunks=None)
    windows = windows_of_documents(tokenised(path, folder), N_CTX)
    expected = expect(path, windows, bos=True, architecture="llama")
    report = sweep(path, folder, tmp_path / "run", experts=EXPERTS, chunks=cutting, options=ONE_AT_A_TIME)
    check(report, tmp_path / "run", expected)
    assert (load_chunks(RunStore.open(tmp_path / "run")).tokens[:, 0] == models.N_VOCAB - 2).all()


@pytest.mark.parametrize("add_bos", [False, True])
def test_windows_of_llama_perplexity(add_bos: bool, tmp_path: Path) -> None:
    """One text with what the model puts in front, cut side by side, the first token of each window replaced by BOS."""
    path = models.write_model(tmp_path / "m.gguf", "llama", add_bos=add_bos)
    text = tmp_path / "text.txt"
    text.write_text(make_text(5, 300) + "\n", encoding="utf-8")
    with load_reference(path) as model:
        ids = model.tokens(text.read_text(encoding="utf-8").removesuffix("\n"), special=True)
    assert (ids[0] == models.N_VOCAB - 2) == add_bos
    n = len(ids) // N_CTX
    windows = np.array(ids[: n * N_CTX], np.int32).reshape(n, N_CTX)
    expected = expect(path, windows, bos=add_bos, architecture="llama")
    cutting = ChunkOptions(chunking="llama-perplexity", n_ctx=N_CTX, n_chunks=None)
    report = sweep(path, text, tmp_path / "run", experts=EXPERTS, chunks=cutting, options=ONE_AT_A_TIME)
    check(report, tmp_path / "run", expected)
    assert np.array_equal(load_chunks(RunStore.open(tmp_path / "run")).tokens, expected.windows)  # in that order


def test_more_experts_than_the_file_uses(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", "olmoe")
    folder = write_corpus(tmp_path / "texts", n_documents=2, n_words=60)
    windows = windows_of_documents(tokenised(path, folder), N_CTX)
    expected = expect(path, windows, architecture="olmoe", experts=(16, 12, 1))
    cutting = ChunkOptions(n_ctx=N_CTX, n_chunks=None)
    report = sweep(
        path, folder, tmp_path / "run", experts=(16, 12, 1), chunks=cutting, options=ONE_AT_A_TIME, in_process=True
    )
    check(report, tmp_path / "run", expected)


def test_split_model(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    shards = models.write_split(tmp_path / "part", 3, "qwen3moe")
    cutting = ChunkOptions(n_ctx=N_CTX, n_chunks=4)
    options = replace(ONE_AT_A_TIME, n_batch=128)
    whole = sweep(qwen, text_folder, tmp_path / "a", experts=(4,), chunks=cutting, options=options, in_process=True)
    for i, shard in enumerate(shards):  # any of its files names the model
        out = tmp_path / f"b{i}"
        split = sweep(shard, text_folder, out, experts=(4,), chunks=cutting, options=options, in_process=True)
        assert split.rows[0].agreement == whole.rows[0].agreement
        assert split.rows[0].kld == whole.rows[0].kld
        assert split.rows[0].expert_bytes == whole.rows[0].expert_bytes
