"""The main job as a library: sweep, its halves, what it tells while it runs, and what it leaves."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from reference import load_reference, score
from small_runs import FOUR_AT_A_TIME, ONE_AT_A_TIME, SHORT, children, make_text, snapshot, write_corpus

from agreement import ChunkOptions, compare, load_report, record, sweep
from agreement.corpus import load
from agreement.errors import IdentityError, SettingError, StoreError, UsageError
from agreement.passes import Listener
from agreement.plan import Plan
from agreement.preflight import Preflight
from agreement.recording import Progress, load_chunks, stored_scores
from agreement.records import Corpus, Report
from agreement.runs import CorpusSource
from agreement.settings import parse_setting
from agreement.store import RunStore


def small_sweep(model: Path, corpus: CorpusSource, out: Path, **changed: Any) -> Report:
    arguments: dict[str, Any] = {"experts": (7, 4), "chunks": SHORT, "options": FOUR_AT_A_TIME, "in_process": True}
    return sweep(model, corpus, out, **{**arguments, **changed})


def without_speed(report: Report) -> Report:
    return replace(report, rows=tuple(replace(row, tokens_per_second=None) for row in report.rows))


@pytest.fixture
def recorded(tmp_path: Path, qwen: Path, text_folder: Path) -> Path:
    out = tmp_path / "recorded" / "run"
    record(qwen, text_folder, out, chunks=SHORT, options=FOUR_AT_A_TIME, in_process=True)
    return out


# ------------------------------------------------------------------------------------------------------- the same job


def test_worker_and_this_process_leave_the_same_bytes(tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    here = small_sweep(qwen, text_folder, tmp_path / "a" / "run")
    there = small_sweep(qwen, text_folder, tmp_path / "b" / "run", in_process=False)
    assert without_speed(here) == without_speed(there)
    assert snapshot(tmp_path / "a" / "run") == snapshot(tmp_path / "b" / "run")
    log = (tmp_path / "b" / "run" / "engine.log").read_text(encoding="utf-8")
    assert "qwen3moe.expert_used_count' = 4" in log


def test_record_then_compare_is_sweep(tmp_path: Path, qwen: Path, text_folder: Path, recorded: Path) -> None:
    whole = small_sweep(qwen, text_folder, tmp_path / "whole" / "run")
    compare(recorded, experts=(7,), in_process=True)
    halves = compare(recorded, experts=(4,))
    assert without_speed(halves) == without_speed(whole)
    assert snapshot(recorded) == snapshot(tmp_path / "whole" / "run")


def test_sources_of_a_corpus(tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    """A path, the corpus loaded from it, and a function that returns it are the same job."""
    small_sweep(qwen, text_folder, tmp_path / "a" / "run")
    corpus = load(text_folder)
    settings = [parse_setting("experts=7"), parse_setting("experts=4")]
    small_sweep(qwen, corpus, tmp_path / "b" / "run", experts=(), settings=settings)
    small_sweep(qwen, lambda: corpus, tmp_path / "c" / "run")
    assert snapshot(tmp_path / "a" / "run") == snapshot(tmp_path / "c" / "run")
    assert snapshot(tmp_path / "a" / "run") == snapshot(tmp_path / "b" / "run")


def test_report_is_what_the_folder_says(tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    out = tmp_path / "run"
    report = small_sweep(qwen, text_folder, out)
    assert load_report(out) == report
    assert load_report(out / "report.json") == without_speed(report)
    assert [row.setting for row in report.rows] == ["experts=7", "experts=4"]
    assert [row.experts for row in report.rows] == [7, 4]
    # Two layers of 16 experts of three 32 x 32 float32 matrices: 2 * 3 * 32 * 32 * 4 bytes = 24,576 an expert.
    assert [row.expert_bytes for row in report.rows] == [7 * 24_576, 4 * 24_576]
    for row in report.rows:
        assert row.n_positions == 12 * 31
        assert row.n_clusters == 4
        assert row.tokens_per_second is not None
        assert row.tokens_per_second > 0
        assert row.run_length == pytest.approx(1 / (1 - row.agreement.value))
        assert row.ppl_delta.value == pytest.approx(row.ppl - report.baseline_ppl)
        assert row.agreement.low is not None
        assert row.agreement.high is not None
        assert row.agreement.low <= row.agreement.value <= row.agreement.high


def test_rows_follow_the_order_asked_for(tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    mixed = parse_setting("experts=6+kv:general.name=str:other")
    report = small_sweep(qwen, text_folder, tmp_path / "run", experts=(2, 7), settings=(mixed,))
    names = ["experts=2", "experts=7", "experts=6+kv:general.name=str:other"]
    assert [row.setting for row in report.rows] == names
    plain = small_sweep(qwen, text_folder, tmp_path / "plain", experts=(6,))
    assert report.rows[2].agreement == plain.rows[0].agreement  # a name changes no number


def test_recorded_model_in_another_place(tmp_path: Path, qwen: Path, recorded: Path) -> None:
    """The recorded model elsewhere is the recorded model: its settings keep their names."""
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(qwen.read_bytes())
    report = compare(recorded, experts=(4,), model=moved, in_process=True)
    assert [row.setting for row in report.rows] == ["experts=4"]
    with pytest.raises(UsageError, match="nothing to compare"):
        compare(recorded, model=moved, in_process=True)


# ------------------------------------------------------------------------------------------------------ another model


def test_another_model_of_the_same_vocabulary(tmp_path: Path, qwen: Path, recorded: Path) -> None:
    """Half precision of the same weights: nearly the same answers, as the second way finds them, too."""
    half = models.write_model(tmp_path / "half.gguf", "qwen3moe", dtype="f16")
    report = compare(recorded, model=half, in_process=True)
    (row,) = report.rows
    assert row.setting == "model=half"
    chunks = load_chunks(RunStore.open(recorded))
    at = slice(chunks.first, chunks.last)
    with load_reference(qwen) as model:
        base = model.logits(chunks.tokens.tolist())[:, at]
    with load_reference(half) as model:
        test = model.logits(chunks.tokens.tolist())[:, at]
    scores = score(base, test, chunks.targets)
    assert 0 < scores.kld.mean() < 1e-3
    assert row.agreement.value == pytest.approx(scores.n_agree / scores.kld.size, abs=0.01)  # other batch shape
    assert row.ppl == pytest.approx(scores.ppl, rel=1e-3)
    assert row.kld.value == pytest.approx(scores.kld.mean(), abs=1e-4)
    report = compare(recorded, model=half, experts=(4,), in_process=True)
    assert [r.setting for r in report.rows] == ["model=half", "experts=4+model=half"]
    assert report.rows[1].agreement.value < row.agreement.value


def test_another_model_of_the_same_name(tmp_path: Path, recorded: Path) -> None:
    """Two files named alike are two models: the scores of one never stand for the other."""
    first = models.write_model(tmp_path / "m.gguf", "qwen3moe", dtype="f16")
    (tmp_path / "b").mkdir()
    second = models.write_model(tmp_path / "b" / "m.gguf", "qwen3moe", seed=9)
    one = compare(recorded, model=first, in_process=True)
    assert one.rows[0].agreement.value > 0.95
    before = snapshot(recorded)
    with pytest.raises(IdentityError, match="model=m"):
        compare(recorded, model=second, in_process=True)
    assert snapshot(recorded) == before


def test_another_vocabulary_is_refused(tmp_path: Path, recorded: Path) -> None:
    larger = models.write_model(tmp_path / "m.gguf", "qwen3moe", n_vocab=models.N_VOCAB + 3)
    before = snapshot(recorded)
    with pytest.raises(IdentityError, match=r"recorded with model\.(n_vocab|vocabulary) ="):
        compare(recorded, model=larger, in_process=True)
    assert snapshot(recorded) == before


def test_changed_model_is_refused(tmp_path: Path, text_folder: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe")
    out = tmp_path / "run"
    record(path, text_folder, out, chunks=SHORT, options=FOUR_AT_A_TIME, in_process=True)
    before = snapshot(out)
    models.write_model(path, "qwen3moe", seed=1)
    with pytest.raises(IdentityError, match=r"m\.gguf is not the model that .* was recorded with; it has changed"):
        compare(out, experts=(4,), in_process=True)
    with pytest.raises(IdentityError, match=r"recorded with model\.digest = "):
        small_sweep(path, text_folder, out, resume=True)
    path.unlink()
    with pytest.raises(Exception, match=r"m\.gguf"):
        compare(out, experts=(4,), in_process=True)
    assert snapshot(out) == before


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("engine", "binding", "llama-cpp-python 0.0.1"),
        ("engine", "version", "another build"),
        ("options", "n_threads", 3),
        ("options", "n_ubatch", 128),
    ],
)
def test_recording_of_another_engine_or_machine(recorded: Path, section: str, field: str, value: object) -> None:
    """Options are taken over from the recording; what this machine cannot be made to match is refused by name."""
    run = RunStore.open(recorded)
    run.header["identity"][section][field] = value
    run.save_header()
    if section == "options":
        assert len(compare(recorded, experts=(4,), in_process=True).rows) == 1
        return
    with pytest.raises(IdentityError, match=f"recorded with {section}.{field} = {value}, now it is "):
        compare(recorded, experts=(4,), in_process=True)
    assert not RunStore.open(recorded).is_finished("experts=4")


def test_comparing_with_half_a_baseline(recorded: Path) -> None:
    run = RunStore.open(recorded)
    run.header["passes"].clear()
    run.save_header()
    with pytest.raises(StoreError, match="the baseline is not complete; finish it with --resume"):
        compare(recorded, experts=(4,), in_process=True)


def test_impossible_settings_of_a_comparison(recorded: Path) -> None:
    before = snapshot(recorded)
    for experts, expected in (((17,), "16 experts"), ((8,), "by itself"), ((0,), "at least one")):
        with pytest.raises(SettingError, match=expected):
            compare(recorded, experts=experts, in_process=True)
    with pytest.raises(UsageError, match="nothing to compare"):
        compare(recorded, in_process=True)
    assert snapshot(recorded) == before


# ------------------------------------------------------------------------------------------------- what a run tells


def test_what_a_listener_hears(tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    out = tmp_path / "run"
    heard: list[tuple[str, Any]] = []

    def plan(value: Plan) -> None:
        assert not (out / "run.json").exists()  # told before anything is written
        heard.append(("plan", value))

    def passes(name: str, n_chunks: int) -> None:
        heard.append(("pass", (name, n_chunks)))

    listener = Listener(
        plan=plan,
        preflight=lambda value: heard.append(("preflight", value)),
        passes=passes,
        progress=lambda value: heard.append(("progress", value)),
    )
    small_sweep(qwen, text_folder, out, listener=listener, in_process=False, chunks=replace(SHORT, n_chunks=10))
    kinds = [kind for kind, _ in heard]
    one_pass = ["pass", "progress", "progress", "progress"]  # ten chunks in blocks of four, four and two
    assert kinds == ["plan", "preflight", *one_pass * 3]
    assert [value for kind, value in heard if kind == "pass"] == [
        ("baseline", 10), ("experts=7", 10), ("experts=4", 10),
    ]  # fmt: skip
    told = [value for kind, value in heard if kind == "progress"]
    assert [(p.pass_name, p.done, p.total, p.tokens) for p in told] == [
        (name, done, 10, done * 64) for name in ("baseline", "experts=7", "experts=4") for done in (4, 8, 10)
    ]
    for a, b in pairwise(told):
        assert b.pass_name != a.pass_name or b.seconds > a.seconds > 0


def test_plan_knows_what_will_happen(tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    plans: list[Plan] = []
    sizes = {}
    for mode in ("full", "top"):
        out = tmp_path / mode
        small_sweep(qwen, text_folder, out, logits=mode, listener=Listener(plan=plans.append))
        sizes[mode] = sum(p.stat().st_size for p in (out / "baseline").iterdir())
    assert plans[0].n_positions == 12 * 31
    assert plans[0].n_tokens == 3 * 12 * 64
    assert [s.name for s in plans[0].settings] == ["experts=7", "experts=4"]
    assert plans[0].sizes == plans[1].sizes
    for mode, size in sizes.items():
        assert size == pytest.approx(plans[0].sizes[mode], rel=0.25)


def test_timings(tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    out = tmp_path / "run"
    report = small_sweep(qwen, text_folder, out, in_process=False)
    entries = [json.loads(line) for line in (out / "timings.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [e["pass"] for e in entries] == ["baseline", "experts=7", "experts=4"]
    for e in entries:
        assert e["tokens"] == 12 * 64
        assert 0 < e["seconds_scoring"] < e["seconds"]
        assert e["seconds_loading"] > 0
    assert report.rows[0].tokens_per_second == pytest.approx(12 * 64 / entries[1]["seconds"])


def test_preflight_is_kept_and_shown(tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    seen: list[Preflight] = []
    report = small_sweep(qwen, text_folder, tmp_path / "run", listener=Listener(preflight=seen.append))
    (result,) = seen
    assert result.repeat_max_difference == 0
    assert result.n_positions == 31
    kept = RunStore.open(tmp_path / "run").header["about"]["preflight"]
    assert kept["shape_max_difference"] == result.shape_max_difference
    assert "tokens_per_second" not in kept  # it would make every run's bytes its own
    assert "repeats itself to the bit" in report.facts["preflight"]


# ------------------------------------------------------------------------------------------------------- what is scored


def test_documents_of_the_same_text(tmp_path: Path, qwen: Path) -> None:
    """A folder's copies are left out and counted; a corpus made with two of them scores both, and both alike."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(make_text(3, 200), encoding="utf-8")
    cutting = ChunkOptions(n_ctx=64, n_chunks=None)
    arguments: dict[str, Any] = {"experts": (4,), "chunks": cutting, "options": ONE_AT_A_TIME, "in_process": True}
    one = sweep(qwen, folder, tmp_path / "one", **arguments)
    about = RunStore.open(tmp_path / "one").header["about"]["corpus"]
    assert about["documents"] == sum(about["skipped"].values()) == 1

    (document,) = load(folder).documents
    twice = Corpus("twice", (document, replace(document, name="b.txt")), (), "not looked at")
    two = sweep(qwen, twice, tmp_path / "two", **arguments)
    run = RunStore.open(tmp_path / "two")
    chunks = load_chunks(run)
    assert sorted(chunks.cluster_names) == ["a.txt", "b.txt"]
    scores: tuple[dict[bytes, Any], dict[bytes, Any]] = ({}, {})
    for i, cluster in enumerate(chunks.cluster):
        found = stored_scores(run, "experts=4", i)
        scores[cluster][chunks.tokens[i].tobytes()] = (found.test_top.tolist(), found.kld_low.tolist())
    assert scores[0] == scores[1]
    assert (one.rows[0].n_clusters, two.rows[0].n_clusters) == (1, 2)
    assert 2 * one.rows[0].n_positions == two.rows[0].n_positions
    assert one.rows[0].agreement.value == two.rows[0].agreement.value
    assert one.rows[0].agreement.low is None  # one cluster tells nothing of the spread between them


def test_seed_chooses_the_chunks(tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    tokens = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        small_sweep(qwen, text_folder, tmp_path / name, chunks=replace(SHORT, seed=seed))
        tokens.append(load_chunks(RunStore.open(tmp_path / name)).tokens)
    assert np.array_equal(tokens[0], tokens[1])
    assert not np.array_equal(tokens[0], tokens[2])


def test_more_chunks_keep_the_scores_of_the_first(tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    for name, n in (("few", 8), ("more", 12)):
        small_sweep(qwen, text_folder, tmp_path / name, chunks=replace(SHORT, n_chunks=n))
    few, more = (RunStore.open(tmp_path / name) for name in ("few", "more"))
    for i in range(8):
        assert few.chunk_path("experts=4", i).read_bytes() == more.chunk_path("experts=4", i).read_bytes()


# --------------------------------------------------------------------------------------------------------------- memory


def peak_memory(pid: int) -> int:
    """Return the most memory a process has held so far, bytes (`VmHWM` of proc(5))."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def test_memory_does_not_grow_with_the_number_of_chunks(tmp_path: Path) -> None:
    """8 and 64 chunks of 31 scored positions and 32,000 tokens.

    A chunk's logits are 31 * 32,000 * 4 = 4 MB and its codes 2 MB: kept, 56 chunks more would be 222 or 111 MB.
    """
    model = models.write_model(tmp_path / "m.gguf", n_vocab=32_000)
    folder = write_corpus(tmp_path / "texts", n_documents=6, n_words=300)
    peaks: dict[int, dict[str, int]] = {8: {}, 64: {}}
    for n, by_pass in peaks.items():

        def note(progress: Progress, by_pass: dict[str, int] = by_pass) -> None:
            (worker,) = children(os.getpid())
            by_pass[progress.pass_name] = peak_memory(worker)

        sweep(
            model, folder, tmp_path / str(n), experts=(4,), chunks=ChunkOptions(n_ctx=64, n_chunks=n),
            options=FOUR_AT_A_TIME, listener=Listener(progress=note),
        )  # fmt: skip
    for name in ("baseline", "experts=4"):
        assert peaks[64][name] - peaks[8][name] < 24e6
