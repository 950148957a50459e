"""How a run reads its weights, end to end: the plan by itself, what was really read, one pass and its fallback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from small_runs import (
    FOUR_AT_A_TIME,
    SHORT,
    children,
    command_line,
    names,
    run_command,
    snapshot,
    wait_for,
    write_corpus,
)

import agreement.plan as plan_module
import agreement.recording as recording_module
import agreement.runner as runner_module
from agreement import load_report, sweep
from agreement.cli import main
from agreement.corpus import load
from agreement.errors import ContextError, EngineError, UsageError
from agreement.model_file import size_text
from agreement.passes import Listener
from agreement.plan import Plan, plan_sweep
from agreement.recording import Progress
from agreement.records import Report
from agreement.runner import FullRunner
from agreement.settings import experts_setting
from agreement.store import RunStore

# The plan keeps 48 MiB for the process, 64 MiB for pages from disk and 2 % of all: with so much, 2.0 MB are left, too
# little for the tiny model's 0.5 MB and the activations of 256 tokens, enough for those of 192 without the model.
TOO_SMALL = 121_900_000


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plan believe in so little memory that the model streams."""
    monkeypatch.setattr(plan_module, "memory_available", lambda _memory: TOO_SMALL)


def run_sweep(model: Path, corpus: Path, out: Path, **changed: Any) -> Report:
    arguments: dict[str, Any] = {"experts": (6, 2), "chunks": SHORT, "options": FOUR_AT_A_TIME, "in_process": True}
    return sweep(model, corpus, out, **{**arguments, **changed})


def timings(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "timings.jsonl").read_text(encoding="utf-8").splitlines()]


# --- the plan by itself ---------------------------------------------------------------------------------------------


def test_plan_of_a_model_that_fits(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    before = names(tmp_path)
    arguments = ("sweep", qwen, text_folder, "--experts", "6,2", "-c", "64", "--chunks", "12", "-t", "1")
    done = CliRunner().invoke(main, [*map(str, arguments), "--plan", "-o", str(tmp_path / "new" / "run")])
    assert done.exit_code == 0, done.output
    for words in (
        "chunks     12 of 64 tokens",
        "passes     baseline, then experts=6, experts=2: fewer experts is also less arithmetic",
        "reading    memory      the model stays in memory, with ",
        "reading    micro-batch 512 tokens: as given",
        "reading    hold        nothing: all of the file stays in memory",
        "reading    repack      on: as given",
        "1.0 readings of the file: the first load",
    ):
        assert words in done.stdout
    assert done.stdout.count("passes  ") == 1
    assert names(tmp_path) == before


@pytest.mark.parametrize("arguments", [("--plan", "--resume"), ()])
def test_plan_and_its_arguments(arguments: tuple[str, ...], qwen: Path, text_folder: Path) -> None:
    done = CliRunner().invoke(main, ["sweep", str(qwen), str(text_folder), "--experts", "6", *arguments])
    assert done.exit_code == 2
    assert ("leave out --resume" if arguments else "Missing option '-o' / '--out'") in done.output


@pytest.mark.usefixtures("streaming")
def test_plan_of_a_model_that_streams(qwen: Path, text_folder: Path) -> None:
    arguments: dict[str, Any] = {"settings": [experts_setting(6)], "chunks": SHORT, "options": FOUR_AT_A_TIME}
    plan = plan_sweep(qwen, load(text_folder), noise_floor=True, **arguments)
    assert [s.name for s in plan.settings] == ["experts=8,again", "experts=6"]
    assert not plan.reading.fits
    assert plan.about["reading_bytes"] == plan.reading.bytes_expected > plan.model.bytes_total
    assert plan.records_baseline  # the noise floor is scored against it


def test_plan_refuses_what_a_sweep_would(qwen: Path, text_folder: Path) -> None:
    with pytest.raises(UsageError, match="cache type 'f3'"):
        plan_sweep(
            qwen, lambda: load(text_folder), settings=[experts_setting(6)], options=replace(FOUR_AT_A_TIME, type_k="f3")
        )


# --- planned and read -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("passes", ["one", "separate"])
def test_what_was_read_stands_beside_the_plan(
    passes: str, qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Progress] = []
    plans: list[Plan] = []
    counter = iter(range(100_000, 10_000_000, 100_000))
    monkeypatch.setattr(runner_module, "bytes_read", lambda: next(counter))
    listener = Listener(plan=plans.append, progress=told.append)
    out = tmp_path / "run"
    report = run_sweep(qwen, text_folder, out, passes=passes, listener=listener)
    # One count a block; the sum of the run is one more.
    assert [p.bytes_read for p in told] == [100_000 * (i + 1) for i in range(len(told))]
    planned = f"planned {size_text(plans[0].reading.bytes_expected)}"
    read, taken, beside_planned = report.facts["reading"].split(", ", 3)[1:]
    assert read == f"really read {size_text(100_000 * (len(told) + 1))}"
    most = max(p.beside for p in told if p.beside is not None)
    assert taken == f"{size_text(most)} of memory beside the weights"
    assert beside_planned == f"planned {size_text(plans[0].reading.activations)}"
    assert load_report(out) == report
    assert load_report(out / "report.json").facts["reading"] == planned
    before, kept = snapshot(out), timings(out)
    assert run_sweep(qwen, text_folder, out, passes=passes, resume=True) == report  # complete: nothing is done
    assert (snapshot(out), timings(out)) == (before, kept)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([{"pass": "reading begun"}, {"pass": "reading", "bytes": 2_000_000}], "planned 1.00 MB, really read 2.00 MB"),
        # a start that was killed said nothing
        (
            [{"pass": "reading begun"}] * 2 + [{"pass": "reading", "bytes": 5000}],
            "planned 1.00 MB, really read at least 5.00 kB",
        ),
        ([{"pass": "reading begun"}], "planned 1.00 MB"),
        ([{"pass": "reading", "bytes": None}], "planned 1.00 MB, really read: not known, the system does not say"),
        ([{"pass": "reading", "bytes": 1_000_000}] * 2, "planned 1.00 MB, really read 2.00 MB"),
    ],
)  # fmt: skip
def test_readings_of_several_starts(
    entries: list[dict[str, Any]], expected: str, qwen: Path, text_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run_sweep(qwen, text_folder, out, experts=(2,), chunks=replace(SHORT, n_chunks=4))
    run = RunStore.open(out)
    run.header["about"]["reading_bytes"] = 1_000_000
    run.save_header()
    (out / "report.json").unlink()
    (out / "timings.jsonl").unlink()
    for entry in entries:
        run.add_timing(entry)
    report = run_sweep(qwen, text_folder, out, experts=(2,), chunks=replace(SHORT, n_chunks=4), resume=True)
    assert report.facts["reading"] == expected


def test_progress_shows_what_was_read(capsys: pytest.CaptureFixture[str], qwen: Path, text_folder: Path) -> None:
    from agreement.cli.progress import ProgressView  # noqa: PLC0415  # its console takes the captured stream

    plan = plan_sweep(qwen, load(text_folder), settings=[experts_setting(6)], chunks=SHORT, options=FOUR_AT_A_TIME)
    streamed = replace(plan, reading=replace(plan.reading, fits=False, bytes_expected=3_280_000_000))
    for shown, count, expected in (
        (streamed, 1_200_000_000, "baseline: 12/12 chunks, 768 tokens/s, 1.20 GB read of 3.28 GB planned\n"),
        (streamed, None, "baseline: 12/12 chunks, 768 tokens/s\n"),
        (plan, 1_200_000_000, "baseline: 12/12 chunks, 768 tokens/s\n"),
    ):
        view = ProgressView()
        view.plan(shown)
        view.advance(Progress("baseline", 12, 12, 768, 1.0, count))
        assert capsys.readouterr().err.endswith(expected)


def test_a_worker_counts_what_it_reads(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    told: list[Progress] = []
    run_sweep(qwen, text_folder, tmp_path / "run", in_process=False, listener=Listener(progress=told.append))
    if not os.access("/proc/self/io", os.R_OK):
        assert {p.bytes_read for p in told} == {None}
        return
    counts = [p.bytes_read for p in told if p.bytes_read is not None]
    assert len(counts) == len(told) == 9
    assert counts == sorted(counts)


# --- hook and override ----------------------------------------------------------------------------------------------


def differ_by(value: float, seen: list[int]) -> Callable[..., float]:
    def difference(_self: FullRunner, _chunks: object, experts: int, *, sampled: bool = False) -> float:
        seen.append(-experts if sampled else experts)
        return value

    return difference


@pytest.mark.parametrize("value", [None, 0.25])
def test_one_pass_in_memory_compares_hook_and_override(
    value: float | None, qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: the engine's own answer, which is 0 on the CPU."""
    seen: list[int] = []
    if value is not None:
        monkeypatch.setattr(FullRunner, "hook_difference", differ_by(value, seen))
    out = tmp_path / "run"
    report = run_sweep(qwen, text_folder, out, passes="one")
    found = RunStore.open(out).header
    assert found["about"]["preflight"]["hook_difference"] == (value or 0)
    assert found["about"]["preflight"]["repeat_max_difference"] == 0
    assert found["identity"]["recording"]["passes"] == "one"
    notes = [n for n in report.notes if "router hook and override differ by up to 0.25 in a logit" in n]
    assert len(notes) == (value is not None)
    assert all(n.startswith("one pass though ") for n in notes)
    assert seen == ([] if value is None else [2])
    before = snapshot(out)
    assert run_sweep(qwen, text_folder, out, passes="one", resume=True).notes == report.notes
    assert snapshot(out) == before
    assert len(seen) == (value is not None)  # a resumed run remembers


def test_policies_keep_to_one_pass(
    qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agreement.cli.passes import setting_from  # noqa: PLC0415  # the only test here that needs it

    seen: list[int] = []
    monkeypatch.setattr(FullRunner, "hook_difference", differ_by(0.25, seen))
    report = run_sweep(qwen, text_folder, tmp_path / "a", experts=(), settings=[setting_from("topp=0.8")])
    assert seen == []  # no override to compare with
    assert not any("hook" in note for note in report.notes)
    report = run_sweep(qwen, text_folder, tmp_path / "b", experts=(4,), settings=[setting_from("topp=0.8")])
    assert seen == [4]
    assert any(note.startswith("one pass though ") for note in report.notes)


def test_auto_falls_back_to_separate_passes(
    qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_sweep(qwen, text_folder, tmp_path / "separate" / "run")
    seen: list[int] = []
    monkeypatch.setattr(plan_module, "choose_passes", lambda *_: ("one", "chosen by the test"))
    monkeypatch.setattr(FullRunner, "hook_difference", differ_by(0.25, seen))
    plans: list[Plan] = []
    out = tmp_path / "fallen" / "run"
    report = run_sweep(qwen, text_folder, out, listener=Listener(plan=plans.append))
    assert (plans[0].passes, seen) == ("separate", [2])
    assert "differ by up to 0.25" in plans[0].passes_reason
    assert any(note.startswith("separate passes instead of one: router hook") for note in report.notes)
    fallen, separate = snapshot(out), snapshot(tmp_path / "separate" / "run")
    assert fallen.keys() == separate.keys()
    assert {n for n in fallen if fallen[n] != separate[n]} == {"run.json", "report.json"}  # the note
    assert RunStore.open(out).header["identity"] == RunStore.open(tmp_path / "separate" / "run").header["identity"]
    run_sweep(qwen, text_folder, out, resume=True)
    assert snapshot(out) == fallen


@pytest.mark.usefixtures("streaming")
def test_a_model_that_streams_is_compared_on_a_sample(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    report = run_sweep(qwen, text_folder, out, passes="one", in_process=False)
    assert RunStore.open(out).header["about"]["preflight"]["hook_difference"] == 0
    assert not any("hook" in note for note in report.notes)


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("asked", ["auto", "one"])
def test_a_sample_that_differs(
    asked: Any, wide: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Auto reads the model another way then: planned as separate passes, with their own micro-batch."""
    seen: list[int] = []
    monkeypatch.setattr(FullRunner, "hook_difference", differ_by(0.25, seen))
    plans: list[Plan] = []
    few = replace(SHORT, n_chunks=2)  # one micro-batch for all, so that one pass reads least
    out = tmp_path / "run"
    report = run_sweep(wide, text_folder, out, passes=asked, chunks=few, listener=Listener(plan=plans.append))
    assert seen == [-2]
    expected = "separate" if asked == "auto" else "one"
    assert [p.passes for p in plans] == [expected]
    start = "separate passes instead of one: " if asked == "auto" else "one pass though "
    assert [n for n in report.notes if n.startswith(f"{start}router hook and override differ by up to 0.25")]
    header = RunStore.open(out).header
    assert header["identity"]["recording"]["passes"] == expected
    assert header["about"]["preflight"]["hook_difference"] == 0.25
    before = snapshot(out)
    assert run_sweep(wide, text_folder, out, passes=asked, chunks=few, resume=True).notes == report.notes
    assert (snapshot(out), seen) == (before, [-2])
    if asked == "auto":
        run_sweep(wide, text_folder, tmp_path / "separate", passes="separate", chunks=few)
        chunks = {n: b for n, b in before.items() if n.endswith(".agr")}
        assert chunks == {n: b for n, b in snapshot(tmp_path / "separate").items() if n.endswith(".agr")}


@pytest.mark.usefixtures("streaming")
def test_no_sample_to_compare(qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "SAMPLE_BYTES", 1000)
    report = run_sweep(qwen, text_folder, tmp_path / "run", passes="one")
    note = next(n for n in report.notes if n.startswith("the router hook was not compared with an override: no sample"))
    assert "it may take 1.00 kB" in note


def test_hook_that_gives_no_number(
    qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FullRunner, "hook_difference", differ_by(float("inf"), []))
    with pytest.raises(EngineError, match=r"NaN on chunk 0; try --passes separate"):
        run_sweep(qwen, text_folder, tmp_path / "run", passes="one")
    assert names(tmp_path) == set()


# --- too little memory ------------------------------------------------------------------------------------------------


def refuse_above(limit: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let no context be made for larger micro-batches; return the list of those tried."""
    tried: list[int] = []

    def load_engine(*args: Any, **kwargs: Any) -> Any:
        options = args[2]
        if not kwargs.get("vocab_only"):
            tried.append(options.n_ubatch)
            if options.n_ubatch > limit:
                raise ContextError(f"no context of {options.n_ubatch}")
        return really_load(*args, **kwargs)

    really_load = runner_module.load_engine
    monkeypatch.setattr(runner_module, "load_engine", load_engine)
    monkeypatch.setattr(recording_module, "load_engine", load_engine)
    return tried


def test_smaller_micro_batch_where_memory_is_too_little(
    qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1.1 MB less than `TOO_SMALL`: room for 128 tokens without the model, not for 64 with it
    monkeypatch.setattr(plan_module, "memory_available", lambda _memory: 120_750_000)
    tried = refuse_above(100, monkeypatch)
    plans: list[Plan] = []
    arguments: dict[str, Any] = {"passes": "separate"}
    out = tmp_path / "run"
    report = run_sweep(qwen, text_folder, out, listener=Listener(plan=plans.append), **arguments)
    assert [p.reading.n_ubatch for p in plans] == [128, 64]
    # The engine that was made serves preflight and baseline; each setting loads its own.
    assert tried == [128, 64, 64, 64]
    assert "the engine could not make a context for micro-batches of 128 tokens; 64 instead" in report.notes
    assert RunStore.open(out).header["identity"]["options"]["n_ubatch"] == 64
    before = snapshot(out)
    RunStore.open(out).chunk_path("experts=2", 3).unlink()
    run_sweep(qwen, text_folder, out, resume=True, **arguments)
    assert snapshot(out) == before


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("passes", ["one", "separate"])
def test_no_context_at_all(
    passes: str, qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = refuse_above(0, monkeypatch)
    with pytest.raises(EngineError, match=r"no context of \d+; micro-batches down to \d+ tokens") as caught:
        run_sweep(qwen, text_folder, tmp_path / "run", passes=passes)
    assert "\n" not in str(caught.value)
    assert 1 <= len(tried) <= 4
    assert tried == sorted(tried, reverse=True)
    assert names(tmp_path) == set()


# --- the recording on request, and resuming ---------------------------------------------------------------------------

ONE_PASS = ("--experts", "6,2", "--passes", "one", "-q", "-c", "64", "-t", "1", "-b", "256", "--no-repack")


def test_recording_on_request(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    """Without it there is nothing to compare with; with it a further setting joins."""
    bare, kept = tmp_path / "bare" / "run", tmp_path / "kept" / "run"
    common = ("--chunks", "12", *ONE_PASS)
    assert run_command("sweep", qwen, text_folder, "-o", bare, *common).returncode == 0
    assert run_command("sweep", qwen, text_folder, "-o", kept, *common, "--record").returncode == 0
    assert not (bare / "baseline").exists()
    refused = run_command("compare", bare, "--experts", "4", "-q")
    assert refused.returncode == 1
    assert "the baseline is not complete" in refused.stderr
    joined = run_command("compare", kept, "--experts", "4", "-q", "--format", "json")
    assert joined.returncode == 0, joined.stderr
    rows = {row["setting"]: row["agreement"]["value"] for row in json.loads(joined.stdout)["rows"]}
    separate = run_sweep(qwen, text_folder, tmp_path / "separate", experts=(6, 4, 2))
    for row in separate.rows:  # another batch shape: 12 x 31 positions, of which rounding may flip a few
        assert rows[row.setting] == pytest.approx(row.agreement.value, abs=0.01)
    # a recording asked for later is made then, and nothing else changes
    later = run_command("sweep", qwen, text_folder, "-o", bare, *common, "--record", "--resume")
    assert later.returncode == 0, later.stderr
    assert run_command("compare", bare, "--experts", "4", "-q").returncode == 0
    assert snapshot(bare) == snapshot(kept)


@pytest.mark.parametrize("record", [(), ("--record",)])
def test_one_pass_killed_and_resumed(record: tuple[str, ...], qwen: Path, tmp_path: Path) -> None:
    """Killed twice, command and worker: the bytes of an unbroken run; once complete, resuming changes nothing."""
    texts = write_corpus(tmp_path / "texts", n_documents=6, n_words=400)
    arguments = ("--chunks", "60", *ONE_PASS, *record)
    whole, out = tmp_path / "whole" / "run", tmp_path / "broken" / "run"
    assert run_command("sweep", qwen, texts, "-o", whole, *arguments).returncode == 0
    landed = 0
    for n in (1, 70):  # of 120 files of scores
        resume = ("--resume",) if (out / "run.json").exists() else ()
        process = subprocess.Popen(
            command_line("sweep", qwen, texts, "-o", out, *arguments, *resume),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(lambda n=n, p=process: len(list(out.rglob("experts=*/*.agr"))) >= n or p.poll() is not None)
            workers = children(process.pid)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
        landed += process.wait(60) == -signal.SIGKILL
        wait_for(lambda w=workers: not any(Path(f"/proc/{pid}").exists() for pid in w), seconds=10)
    assert landed
    assert run_command("sweep", qwen, texts, "-o", out, *arguments, "--resume").returncode == 0
    assert snapshot(out) == snapshot(whole)
    stamps = {p: p.stat().st_mtime_ns for p in out.rglob("*.agr")}
    kept = (out / "timings.jsonl").read_bytes()
    time.sleep(0.01)
    assert run_command("sweep", qwen, texts, "-o", out, *arguments, "--resume").returncode == 0
    assert snapshot(out) == snapshot(whole)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.agr")} == stamps
    assert (out / "timings.jsonl").read_bytes() == kept
