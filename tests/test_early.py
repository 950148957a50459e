"""The sequential gate: it stops early, agrees with a whole run, and says what it rests on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
from click.testing import CliRunner

import agreement
import agreement.plan as plan_module
from agreement.cli import main
from agreement.early import Early, sequential_gate
from agreement.errors import GateError, KilledForMemoryError, UsageError
from agreement.passes import Listener
from agreement.plan import ChunkOptions, Plan
from agreement.recording import Progress
from agreement.records import EngineOptions, Verdict
from agreement.requirements import parse_requirement
from agreement.settings import experts_setting
from agreement.store import RunStore
from agreement.streaming import Wishes

# Another batch shape than that of separate passes gives the same logits only without flash attention.
EXACT = EngineOptions(n_threads=2, flash_attn="off", repack=False)
CUT = ChunkOptions(n_ctx=128, n_chunks=30)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early")
    models.write_model(folder / "m.gguf")
    (folder / "text").mkdir()
    for i in range(30):
        lines = "".join(f"def f{i}_{j}(x, y={j}):\n    return x * {i * j} + y\n\n\n" for j in range(12))
        (folder / "text" / f"{i:02d}.py").write_text(lines)
    return folder


def early(place: Path, out: Path, requirement: str, **extra: Any) -> Early:
    return sequential_gate(
        place / "m.gguf",
        place / "text",
        parse_requirement(requirement),
        experts_setting(7),
        out,
        **{"chunks": CUT, "max_clusters": 30, "options": EXACT, "in_process": True, **extra},
    )


def test_a_clear_requirement_is_decided_before_the_end(place: Path, tmp_path: Path) -> None:
    found = early(place, tmp_path / "run", "experts=7 agreement>=30%")
    assert found.judgement.verdict is Verdict.PASS
    assert found.state.clusters < 30
    assert not (tmp_path / "run" / "settings" / "experts=7" / "chunk-000029.agr").exists()
    assert "random order" in found.assumption
    fail = early(place, tmp_path / "fail", "experts=7 agreement>=95%")
    assert fail.judgement.verdict is Verdict.FAIL
    assert fail.state.clusters < 30


def test_it_sees_the_numbers_of_a_whole_run(place: Path, tmp_path: Path) -> None:
    """With the bound on the estimate it goes to the end, and its estimate is that of `sweep` over the same chunks."""
    report = agreement.sweep(
        place / "m.gguf", place / "text", tmp_path / "sweep", experts=[7], chunks=CUT, options=EXACT, in_process=True
    )
    value = report.rows[0].agreement.value
    found = early(place, tmp_path / "run", f"experts=7 agreement>={value!r}")
    assert found.judgement.verdict is Verdict.INCONCLUSIVE
    assert found.state.clusters == 30
    assert found.state.agreement == value


def test_it_goes_on_where_it_stopped(place: Path, tmp_path: Path) -> None:
    first = early(place, tmp_path / "run", "experts=7 agreement>=30%")
    chunk = tmp_path / "run" / "settings" / "experts=7" / "chunk-000000.agr"
    before = chunk.stat().st_mtime_ns
    again = early(place, tmp_path / "run", "experts=7 agreement>=30%", resume=True)
    assert again.state == first.state
    assert chunk.stat().st_mtime_ns == before


def test_no_chunk_is_decoded_twice(place: Path, tmp_path: Path) -> None:
    """Four chunks of 128 tokens, each beside its baseline, fill a micro-batch of 1024."""
    options = replace(EXACT, n_batch=1024, n_ubatch=1024)
    found = early(place, tmp_path / "run", "experts=7 agreement>=30%", options=options)
    lines = (tmp_path / "run" / "timings.jsonl").read_text(encoding="utf-8").splitlines()
    tokens = [json.loads(line)["tokens"] for line in lines]
    assert tokens == [1024] * -(-found.state.clusters // 4)
    assert found.state == early(place, tmp_path / "b", "experts=7 agreement>=30%").state


def test_a_document_gives_one_chunk(place: Path, tmp_path: Path) -> None:
    """More windows than documents: those that no look would reach are not planned for."""
    found = early(place, tmp_path / "run", "experts=7 agreement>=30%", max_clusters=60)
    run = RunStore.open(tmp_path / "run")
    assert run.n_chunks == 30
    assert found.state.max_clusters == 30


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Leave the model little memory, part of which is held; return what `early` then needs."""
    monkeypatch.setattr(plan_module, "memory_available", lambda _memory: 121_900_000)
    monkeypatch.setattr("agreement.streaming.shapes.LEAST_HOLD", 10_000)
    return {"in_process": False}


def readings(run: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return how many starts of a run read, and what those that ended said."""
    entries = [json.loads(line) for line in (run / "timings.jsonl").read_text(encoding="utf-8").splitlines()]
    return sum(e["pass"] == "reading begun" for e in entries), [e for e in entries if e["pass"] == "reading"]


@pytest.mark.parametrize("kills", [1, 2])
def test_killed_for_memory(
    kills: int, place: Path, deaths: Callable[[], None], tmp_path: Path, streams: dict[str, Any]
) -> None:
    """Once with part of the model held: it goes on with nothing held and the same numbers.  Twice: one line."""
    whole = early(place, tmp_path / "whole", "experts=7 agreement>=30%", **streams)
    begun, ended = readings(tmp_path / "whole")
    assert (begun, len(ended)) == (1, 1)
    killed: list[Progress] = []
    notes: list[str] = []

    def progress(told: Progress) -> None:
        if len(killed) < kills:
            killed.append(told)
            deaths()

    streams["listener"] = Listener(progress=progress, note=notes.append)
    if kills == 2:
        with pytest.raises(KilledForMemoryError, match=r"whole chunks are kept; .* start anew with a smaller -ub"):
            early(place, tmp_path / "run", "experts=7 agreement>=30%", **streams)
        assert len(notes) == 1
        assert readings(tmp_path / "run") == (2, [])
    else:
        found = early(place, tmp_path / "run", "experts=7 agreement>=30%", **streams)
        assert found == whole
        begun, (reading,) = readings(tmp_path / "run")
        assert begun == 2
        assert reading["bytes_planned"] > 0
        assert found.state.clusters <= reading["n_chunks"] < 30
        assert re.fullmatch(rf"read .*B for {reading['n_chunks']} documents; planned .*B for all 30", notes[1])
        assert len(notes) == 2
    assert notes[0].endswith("it goes on with nothing of the model held")


def test_killed_before_the_first_chunk(place: Path, wide: Path, deaths: Callable[[], None], tmp_path: Path) -> None:
    """With nothing held, too: half the micro-batch, and what a run with that one finds."""
    plans: list[Plan] = []
    left = [2]

    def passes(_name: str, _chunks: int) -> None:
        if left[0]:
            left[0] -= 1
            deaths()

    (tmp_path / "m.gguf").symlink_to(wide)
    (tmp_path / "text").symlink_to(place / "text")
    extra: dict[str, Any] = {"in_process": False, "chunks": replace(CUT, n_ctx=32)}
    wishes = Wishes(memory=124_000_000, hold=0)
    listener = Listener(plan=plans.append, passes=passes)
    found = early(tmp_path, tmp_path / "run", "experts=7 agreement>=30%", wishes=wishes, listener=listener, **extra)
    first, second, third = (plan.reading.n_ubatch for plan in plans)
    assert third <= second // 2 <= first // 4
    wishes = replace(wishes, n_ubatch=third)
    assert found == early(tmp_path, tmp_path / "asked", "experts=7 agreement>=30%", wishes=wishes, **extra)
    assert RunStore.open(tmp_path / "run").header["identity"]["options"]["n_ubatch"] == third


@pytest.mark.parametrize("kept", [True, False])
def test_killed_under_the_command(
    kept: bool, place: Path, deaths: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line says how the gate is gone on with, if it can be."""
    monkeypatch.setattr("agreement.cli.progress.ProgressView.looked", lambda _self, _state: deaths())
    arguments = ["gate", str(place / "m.gguf"), str(place / "text"), "--require", "experts=7 agreement>=30%"]
    arguments += ["--sequential", "-c", "128", "-ub", "256", *(["-o", str(tmp_path / "run")] if kept else [])]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    line = result.output.strip().splitlines()[-1]
    assert "because memory ran out; " in line
    assert ("engine.log" in line) == kept
    if kept:
        assert line.endswith("; the same command goes on from there")
        monkeypatch.undo()
        assert CliRunner().invoke(main, arguments).exit_code == 0
    else:
        assert "; nothing of the run is kept: give -o for a run that can be gone on with, and its log; " in line
        assert line.endswith("say with --memory what may be used")


def test_refusals(place: Path, tmp_path: Path) -> None:
    with pytest.raises(GateError, match="agreement against a fixed bound"):
        early(place, tmp_path / "a", "experts=7 kld<=0.1")
    with pytest.raises(UsageError, match="--chunking document"):
        sequential_gate(
            place / "m.gguf",
            place / "text",
            parse_requirement("experts=7 agreement>=30%"),
            experts_setting(7),
            tmp_path / "b",
            chunks=ChunkOptions(chunking="llama-perplexity", n_ctx=64),
        )
    few = tmp_path / "few"
    few.mkdir()
    for i in range(3):
        (few / f"{i}.py").write_text((place / "text" / f"{i:02d}.py").read_text())
    with pytest.raises(GateError, match="3 documents"):
        sequential_gate(
            place / "m.gguf",
            few,
            parse_requirement("experts=7 agreement>=30%"),
            experts_setting(7),
            tmp_path / "c",
            chunks=CUT,
            in_process=True,
        )


def test_command(place: Path, tmp_path: Path) -> None:
    arguments = ["gate", str(place / "m.gguf"), str(place / "text"), "--require", "experts=7 agreement>=95%"]
    result = CliRunner().invoke(main, [*arguments, "--sequential", "-c", "128"])
    assert result.exit_code == 3
    assert "FAIL" in result.stdout
    assert "assumed: documents come in random order" in result.stderr
    assert CliRunner().invoke(main, arguments).exit_code == 2
    assert CliRunner().invoke(main, [*arguments, "--sequential", "--require", "experts=6 agreement>=9%"]).exit_code == 2
