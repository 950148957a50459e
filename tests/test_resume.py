"""A run killed at any moment goes on from its last whole chunk, and ends with the bytes of an unbroken run.

Compared is every file but the log, the timings and the lock (`small_runs.VOLATILE`), leftovers included.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from small_runs import FOUR_AT_A_TIME, SHORT, children, command_line, run_command, snapshot, wait_for, write_corpus

from agreement import record, sweep
from agreement.passes import Listener
from agreement.recording import Progress
from agreement.store import RunStore

N_CHUNKS = 80
N_FILES = 1 + 4 * N_CHUNKS  # token windows; baseline and three settings
OPTIONS = (
    "--experts", "7,4,2", "-q", "-c", "64", "--chunks", str(N_CHUNKS), "-t", "1", "-b", "256", "--no-repack",
)  # fmt: skip
KILLS = ("command", "group", "worker")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("long") / "texts", n_documents=6, n_words=400)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, qwen: Path, texts: Path) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    assert run_command("sweep", qwen, texts, "-o", out, *OPTIONS).returncode == 0
    found = snapshot(out)
    assert len([name for name in found if name.endswith(".agr")]) == N_FILES
    return found


def n_files(out: Path) -> int:
    return len(list(out.rglob("*.agr"))) if out.exists() else 0


def kill(process: subprocess.Popen[bytes], what: str) -> None:
    """Send SIGKILL to the command alone, to it and its worker, or to the worker alone."""
    if what == "worker":
        for worker in children(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
    elif what == "group":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def run_until(out: Path, model: Path, texts: Path, n: int, delay: float, what: str) -> int:
    """Start or resume the run, and kill it `delay` seconds after its `n`th file has appeared; return its status."""
    resume = ("--resume",) if (out / "run.json").exists() else ()
    process = subprocess.Popen(
        command_line("sweep", model, texts, "-o", out, *OPTIONS, *resume),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: n_files(out) >= n or process.poll() is not None)
        time.sleep(delay)
        workers = children(process.pid)
        kill(process, what)
        status = process.wait(120)
        wait_for(
            lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), seconds=10
        )  # nobody writes on
        return status
    finally:
        kill(process, "group")
        process.wait()


def test_one_run_killed_five_times(tmp_path: Path, qwen: Path, texts: Path, unbroken: dict[str, bytes]) -> None:
    """Five seeded moments, one in each fifth of the run; the next start resumes."""
    draw = random.Random(20)
    out = tmp_path / "run"
    landed = 0
    for i in range(5):
        n, what = int((i + draw.random()) * N_FILES / 5), KILLS[i % 3]
        status = run_until(out, qwen, texts, n, draw.random() * 0.01, what)
        landed += status == (1 if what == "worker" else -signal.SIGKILL)
        if (out / "run.json").exists():
            assert n <= n_files(out) <= N_FILES
    assert landed >= 3  # on a busy machine one or two may come too late
    assert run_command("sweep", qwen, texts, "-o", out, *OPTIONS, "--resume").returncode == 0
    assert snapshot(out) == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_a_random_moment(
    seed: int, tmp_path: Path, qwen: Path, texts: Path, unbroken: dict[str, bytes]
) -> None:
    """Twenty runs, each killed once: at any file, from before the first to after the last."""
    draw = random.Random(seed)
    out = tmp_path / "run"
    run_until(out, qwen, texts, draw.randint(0, N_FILES), draw.random() * 0.05, KILLS[seed % 3])
    resume = ("--resume",) if (out / "run.json").exists() else ()
    assert run_command("sweep", qwen, texts, "-o", out, *OPTIONS, *resume).returncode == 0
    assert snapshot(out) == unbroken


@pytest.fixture
def complete(tmp_path: Path, qwen: Path, text_folder: Path) -> Path:
    """Return a complete short run."""
    sweep_short(qwen, text_folder, tmp_path / "run")
    return tmp_path / "run"


def sweep_short(model: Path, corpus: Path, out: Path, **changed: Any) -> list[Progress]:
    """Sweep 12 chunks in blocks of four, and return the progress that was told."""
    told: list[Progress] = []
    arguments: dict[str, Any] = {"experts": (4, 2), "chunks": SHORT, "options": FOUR_AT_A_TIME, "in_process": True}
    sweep(model, corpus, out, listener=Listener(progress=told.append), **{**arguments, **changed})
    return told


@pytest.mark.parametrize("resume", [False, True])
def test_killed_before_the_run_began(
    resume: bool, tmp_path: Path, qwen: Path, text_folder: Path, complete: Path
) -> None:
    """What such a start leaves is no run: the same command, without `--resume`, begins anew; with it, too."""
    whole = snapshot(complete)
    out = tmp_path / "other" / "run"
    out.mkdir(parents=True)
    (out / ".lock").touch()
    (out / "engine.log").write_text("half a li", encoding="utf-8")
    (out / "chunks.agr").write_bytes(whole["chunks.agr"])
    (out / ".run.json.partial").write_bytes(whole["run.json"][:100])
    sweep_short(qwen, text_folder, out, resume=resume)
    assert snapshot(out) == whole


def test_resuming_a_complete_run_does_nothing(complete: Path, qwen: Path, text_folder: Path) -> None:
    before, timings = snapshot(complete), (complete / "timings.jsonl").read_bytes()
    stamps = {p: p.stat().st_mtime_ns for p in complete.rglob("chunk-*.agr")}
    assert sweep_short(qwen, text_folder, complete, resume=True) == []
    assert snapshot(complete) == before
    assert (complete / "timings.jsonl").read_bytes() == timings
    assert {p: p.stat().st_mtime_ns for p in complete.rglob("chunk-*.agr")} == stamps


def test_resuming_where_nothing_is_starts_a_run(tmp_path: Path, qwen: Path, text_folder: Path, complete: Path) -> None:
    sweep_short(qwen, text_folder, tmp_path / "other" / "run", resume=True)
    assert snapshot(tmp_path / "other" / "run") == snapshot(complete)


@pytest.mark.parametrize("seed", range(6))
def test_any_set_of_chunks_may_be_there(seed: int, complete: Path, qwen: Path, text_folder: Path) -> None:
    """Take away a random set of chunks of passes not noted as complete; only blocks that lack one are run again."""
    before = snapshot(complete)
    draw = random.Random(seed)
    run = RunStore.open(complete)
    passes = ("baseline", "experts=4", "experts=2")
    lacking: set[tuple[str, int]] = set()
    for name in passes[draw.randrange(3) :]:
        run.header["passes"].pop(name)
        for i in draw.sample(range(12), draw.randrange(1, 6)):
            run.chunk_path(name, i).unlink()
            lacking.add((name, i // 4))
    run.save_header()
    (complete / "report.json").unlink()
    told = sweep_short(qwen, text_folder, complete, resume=True)
    assert snapshot(complete) == before
    tokens = dict.fromkeys(passes, 0) | {p.pass_name: p.tokens for p in told}
    for name in passes:
        assert tokens[name] == 4 * 64 * len([block for block in lacking if block[0] == name])


def test_further_settings_join_a_run(complete: Path, tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    """A resumed run may be asked for more: what is there stays, and the bytes are those of asking for all at once."""
    told = sweep_short(qwen, text_folder, complete, experts=(4, 2, 6), resume=True)
    assert {p.pass_name for p in told} == {"experts=6"}
    sweep_short(qwen, text_folder, tmp_path / "other" / "run", experts=(4, 2, 6))
    assert snapshot(complete) == snapshot(tmp_path / "other" / "run")


def test_sweep_goes_on_from_a_recording(complete: Path, tmp_path: Path, qwen: Path, text_folder: Path) -> None:
    out = tmp_path / "other" / "run"
    record(qwen, text_folder, out, chunks=SHORT, options=FOUR_AT_A_TIME, in_process=True)
    told = sweep_short(qwen, text_folder, out, resume=True)
    assert {p.pass_name for p in told} == {"experts=4", "experts=2"}
    assert snapshot(out) == snapshot(complete)
