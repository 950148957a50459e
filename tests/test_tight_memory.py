"""Memory that is too little or becomes so during a run: what is let go of, what is tried again, what is told."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
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
import agreement.runner as runner_module
import agreement.workers.client as client_module
from agreement import compare, record, sweep
from agreement.errors import EngineError, IdentityError, KilledForMemoryError
from agreement.passes import Listener
from agreement.plan import Plan
from agreement.recording import Progress
from agreement.records import Report
from agreement.store import RunStore
from agreement.streaming import RoomWatch, Wishes, memory_kills, read_speed
from agreement.streaming import disk as disk_module
from agreement.workers.client import WorkerRunner

# See `test_reading.TOO_SMALL`: 2.0 MB beside what the plan keeps for the process and for pages on their way.
MEMORY, HOLD = 121_900_000, 300_000
TIGHT = Wishes(memory=MEMORY, hold=HOLD)
# 4.1 MB beside the same, less than `wide` however small its micro-batch.
TIGHTER = Wishes(memory=124_000_000, hold=0)


def run_sweep(model: Path, corpus: Path, out: Path, **changed: Any) -> Report:
    arguments: dict[str, Any] = {"experts": (6, 2), "chunks": SHORT, "options": FOUR_AT_A_TIME, "wishes": TIGHT}
    return sweep(model, corpus, out, **{**arguments, **changed})


def timings(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "timings.jsonl").read_text(encoding="utf-8").splitlines()]


# --- letting go -------------------------------------------------------------------------------------------------------


class Held:
    """A hold in steps of 32 bytes."""

    def __init__(self, held: int) -> None:
        self.held = held

    def shrink(self, n_bytes: int) -> int:
        before = self.held
        while self.held > n_bytes:
            self.held -= 32
        return before - self.held


@pytest.mark.parametrize(
    ("room", "left"),
    [
        (500, 320),  # enough
        (75, 320),  # exactly the least
        (74, 288),  # 26 bytes missing to 100: one step of 32
        (36, 256),  # 64 missing: two
        (-1000, 0),  # all of it, and no more
    ],
)
def test_look_by_hand(room: int, left: int) -> None:
    hold = Held(320)
    watch = RoomWatch(hold, lambda: room, least=75, enough=100)
    watch.look()
    assert (hold.held, watch.let_go) == (left, 320 - left)
    assert bool(watch.note()) == (left < 320)
    if left == 256:
        assert watch.note().startswith("memory became tight: 64 B of what was held let go, 256 B are still held; ")


def test_watch_looks_by_itself_and_stops() -> None:
    hold, looks = Held(64), iter([1000, 1000, 0])
    watch = RoomWatch(hold, lambda: next(looks, 1000), least=75, enough=100, interval=0.001)
    with watch:
        wait_for(lambda: hold.held == 0)
    assert not watch._thread.is_alive()  # nobody looks any more
    assert watch.let_go == 64


@pytest.mark.parametrize("passes", ["one", "separate"])
def test_run_that_lets_go_ends_with_the_same_bytes(
    passes: str, qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, tight = tmp_path / "whole" / "run", tmp_path / "tight" / "run"
    report = run_sweep(qwen, text_folder, whole, passes=passes, wishes=replace(TIGHT, hold=0))
    assert not any("memory" in note for note in report.notes)
    # Room enough while the file is locked, none once a pass runs.
    monkeypatch.setattr(runner_module, "_room", lambda: 0 if watching else 10**12)
    watching: list[bool] = []

    class Watch(RoomWatch):
        def __enter__(self) -> Self:
            watching.append(True)
            return super().__enter__()

    monkeypatch.setattr(runner_module, "RoomWatch", functools.partial(Watch, interval=0.001))
    told: list[Progress] = []
    report = run_sweep(
        qwen, text_folder, tight, passes=passes, in_process=True, listener=Listener(progress=told.append)
    )
    note = "memory became tight: 299 kB of what was held let go, 0 B are still held; "  # 73 pages of 4,096 bytes
    assert [n for n in report.notes if n.startswith(note)]
    assert told[-1].note == "" or told[-1].note.startswith(note)
    assert any(p.note.startswith(note) for p in told)
    here, there = snapshot(tight), snapshot(whole)
    assert {n for n in here if here[n] != there[n]} == {"run.json", "report.json"}  # what was planned
    assert {"pass": "reading note", "text": next(n for n in report.notes if n.startswith(note))} in timings(tight)


@pytest.mark.parametrize("passes", ["one", "separate"])
@pytest.mark.parametrize("n_ctx", [8, 20, 32])
def test_chunks_shorter_than_the_check(passes: str, n_ctx: int, wide: Path, text_folder: Path, tmp_path: Path) -> None:
    """The engine has room for the scored positions of a micro-batch alone, and the check may not ask for more."""
    chunks = replace(SHORT, n_ctx=n_ctx)
    report = run_sweep(
        wide,
        text_folder,
        tmp_path / "run",
        passes=passes,
        wishes=replace(TIGHTER, n_ubatch=2 * n_ctx),
        chunks=chunks,
        experts=(6,),
    )
    preflight = RunStore.open(tmp_path / "run").header["about"]["preflight"]
    scored = n_ctx - n_ctx // 2 - 1
    assert preflight["n_positions"] == min(16, scored if passes == "one" else n_ctx)
    assert [row.n_positions for row in report.rows] == [scored * SHORT.n_chunks] * len(report.rows)


# --- killed for memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", ["one", "separate"])
def test_killed_while_holding_goes_on_with_nothing_held(
    passes: str, deaths: Callable[[], None], qwen: Path, text_folder: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    run_sweep(qwen, text_folder, whole, passes=passes)
    kills, notes = [], []

    def progress(told: Progress) -> None:
        if told.done >= 4 and not kills:
            kills.append(told)
            deaths()

    report = run_sweep(
        qwen, text_folder, killed, passes=passes, listener=Listener(progress=progress, note=notes.append)
    )
    assert len(kills) == 1
    assert len(notes) == 1
    assert notes[0].startswith("the system killed the engine's process during ")
    assert notes[0].endswith(" because memory ran out; it goes on with nothing of the model held")
    assert notes[0] in report.notes
    assert "really read at least" in report.facts["reading"]
    assert snapshot(killed) == snapshot(whole)


@pytest.mark.parametrize("passes", ["one", "separate"])
def test_killed_with_nothing_held_before_the_first_chunk(
    passes: str, deaths: Callable[[], None], wide: Path, text_folder: Path, tmp_path: Path
) -> None:
    """The next smaller micro-batch is the run's, as if it had been asked for."""
    out, plans = tmp_path / "run", []

    def begin(_name: str, _chunks: int) -> None:
        if len(plans) == 1:
            deaths()

    listener = Listener(plan=plans.append, passes=begin)
    report = run_sweep(wide, text_folder, out, passes=passes, wishes=TIGHTER, listener=listener)
    first, second = (p.reading.n_ubatch for p in plans)
    assert second <= first // 2
    assert f"memory ran out with micro-batches of {first} tokens; {second} instead" in report.notes
    assert "really read at least" in report.facts["reading"]
    assert RunStore.open(out).header["identity"]["options"]["n_ubatch"] == second
    asked = tmp_path / "asked"
    run_sweep(wide, text_folder, asked, passes=passes, wishes=replace(TIGHTER, n_ubatch=second))
    chunks = {n: b for n, b in snapshot(out).items() if n.endswith(".agr")}
    assert chunks == {n: b for n, b in snapshot(asked).items() if n.endswith(".agr")}
    before = snapshot(out)
    run_sweep(wide, text_folder, out, passes=passes, wishes=Wishes(), resume=True)
    assert snapshot(out) == before


def test_killed_again_and_again(deaths: Callable[[], None], wide: Path, text_folder: Path, tmp_path: Path) -> None:
    plans: list[Plan] = []
    listener = Listener(plan=plans.append, passes=lambda _name, _chunks: deaths())
    with pytest.raises(
        KilledForMemoryError, match=r"because memory ran out; .* start anew with a smaller -ub"
    ) as caught:
        run_sweep(wide, text_folder, tmp_path / "run", wishes=TIGHTER, listener=listener)
    assert "\n" not in str(caught.value)
    sizes = [p.reading.n_ubatch for p in plans]
    assert 2 <= len(sizes) <= 4
    assert all(b <= a // 2 for a, b in itertools.pairwise(sizes))


def test_killed_after_a_chunk_with_nothing_held(
    deaths: Callable[[], None], qwen: Path, text_folder: Path, tmp_path: Path
) -> None:
    """Chunks of two micro-batches are not of one run, so it is for the user to decide; nothing is lost."""
    out = tmp_path / "run"
    listener = Listener(progress=lambda _told: deaths())
    with pytest.raises(KilledForMemoryError, match="start anew with a smaller -ub"):
        run_sweep(qwen, text_folder, out, passes="separate", wishes=replace(TIGHT, hold=0), listener=listener)
    assert RunStore.open(out).has_any_chunk()
    whole = tmp_path / "whole" / "run"
    run_sweep(qwen, text_folder, whole, passes="separate", wishes=replace(TIGHT, hold=0))
    run_sweep(qwen, text_folder, out, passes="separate", resume=True)
    chunks = {n: b for n, b in snapshot(out).items() if n.endswith(".agr")}
    assert chunks == {n: b for n, b in snapshot(whole).items() if n.endswith(".agr")}


def test_killed_though_it_fits(deaths: Callable[[], None], qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    listener = Listener(progress=lambda _told: deaths())
    with pytest.raises(KilledForMemoryError, match=r"whole chunks are kept.*--memory"):
        run_sweep(qwen, text_folder, tmp_path / "run", wishes=Wishes(), listener=listener)


def test_killed_by_somebody_is_not_tried_again(
    deaths: Callable[[], None], qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "memory_kills", lambda: 7)  # the kernel has counted none
    listener = Listener(progress=lambda _told: deaths())
    with pytest.raises(EngineError, match=r"died with SIGKILL \(out of memory\?\)") as caught:
        run_sweep(qwen, text_folder, tmp_path / "run", listener=listener)
    assert not isinstance(caught.value, KilledForMemoryError)


def test_the_worker_offers_itself_to_the_kernel(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    seen = []

    def progress(_told: Progress) -> None:
        seen.extend(Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii") for pid in children(os.getpid()))

    run_sweep(qwen, text_folder, tmp_path / "run", listener=Listener(progress=progress))
    assert "500\n" in seen


def test_kills_by_hand(tmp_path: Path) -> None:
    assert memory_kills(proc=tmp_path) is None
    (tmp_path / "vmstat").write_text("oom_kill_other 9\noom_kill 3\n", encoding="ascii")
    assert memory_kills(proc=tmp_path) == 3


# --- a streamed run with a hold, killed and resumed -------------------------------------------------------------------

STREAMED = ("--experts", "6,2", "-q", "-c", "64", "-t", "1", "--memory", str(MEMORY), "--hold", "0.3M")


@pytest.mark.parametrize("passes", ["one", "separate"])
def test_streamed_run_killed_and_resumed(passes: str, qwen: Path, tmp_path: Path) -> None:
    """Resumed with other memory at hand: the plan it began with is kept, and so are its bytes."""
    texts = write_corpus(tmp_path / "texts", n_documents=6, n_words=400)
    arguments = ("--chunks", "60", "--passes", passes, *STREAMED)
    whole, out = tmp_path / "whole" / "run", tmp_path / "broken" / "run"
    done = run_command("sweep", qwen, texts, "-o", whole, *arguments)
    assert done.returncode == 0, done.stderr
    assert RunStore.open(whole).header["about"]["reading_bytes"] > qwen.stat().st_size
    process = subprocess.Popen(
        command_line("sweep", qwen, texts, "-o", out, *arguments),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: len(list(out.rglob("experts=*/*.agr"))) >= 10 or process.poll() is not None)
        workers = children(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), seconds=10)
    resumed = arguments[:-4]  # neither --memory nor --hold
    done = run_command("sweep", qwen, texts, "-o", out, *resumed, "--resume")
    assert done.returncode == 0, done.stderr
    assert snapshot(out) == snapshot(whole)


@pytest.mark.parametrize("kills", [0, 1])
def test_a_recording_of_a_model_that_streams_is_compared_with_a_hold(
    kills: int,
    deaths: Callable[[], None],
    wide: Path,
    text_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compared in the recording's micro-batch, so as if all had been one sweep; once more if killed with a hold."""
    monkeypatch.setattr(plan_module, "memory_available", lambda _memory: MEMORY)
    monkeypatch.setattr("agreement.streaming.shapes.LEAST_HOLD", 100_000)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_sweep(wide, text_folder, whole, passes="separate", wishes=Wishes())
    record(wide, text_folder, halves, chunks=SHORT, options=FOUR_AT_A_TIME)
    held: list[int] = []
    really_hold = WorkerRunner.hold

    def hold(self: WorkerRunner, n_bytes: int, keep_free: int) -> str:
        held.append(n_bytes)
        return really_hold(self, n_bytes, keep_free)

    monkeypatch.setattr(WorkerRunner, "hold", hold)
    killed: list[Progress] = []

    def progress(told: Progress) -> None:
        if len(killed) < kills:
            killed.append(told)
            deaths()

    notes: list[str] = []
    compare(halves, experts=(6, 2), listener=Listener(progress=progress, note=notes.append))
    assert len(held) == 1
    assert held[0] > 100_000
    assert len(killed) == kills
    assert [n.endswith("it goes on with nothing of the model held") for n in notes] == [True] * kills
    here, there = snapshot(halves), snapshot(whole)
    assert {n: b for n, b in here.items() if n.endswith(".agr")} == {
        n: b for n, b in there.items() if n.endswith(".agr")
    }


def test_record_plans_with_given_memory(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    arguments = ("-c", "64", "--chunks", "4", "-t", "1", "-q", "--memory", str(MEMORY), "--hold", "0.3M")
    done = run_command("record", qwen, text_folder, "-o", tmp_path / "run", *arguments)
    assert done.returncode == 0, done.stderr
    lines = RunStore.open(tmp_path / "run").header["about"]["reading"]
    assert any(line.startswith("hold        300 kB of the file locked: as asked") for line in lines)


def test_resumed_in_other_passes_says_so(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    run_sweep(qwen, text_folder, tmp_path / "run", passes="separate", wishes=Wishes())
    with pytest.raises(IdentityError, match=r"recording\.passes = separate, now it is one; "):
        run_sweep(qwen, text_folder, tmp_path / "run", passes="one", wishes=Wishes(), resume=True)


def test_wishes_for_a_model_that_fits_are_carried_out(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    options = replace(FOUR_AT_A_TIME, repack=True)
    run_sweep(qwen, text_folder, tmp_path / "run", options=options, wishes=Wishes(n_ubatch=64, repack=False))
    found = RunStore.open(tmp_path / "run").header["identity"]["options"]
    assert (found["n_ubatch"], found["repack"]) == (64, False)


def test_nobody_counts(qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right to read a process's counters the run goes on and says so."""
    monkeypatch.setattr(runner_module, "bytes_read", lambda: None)
    monkeypatch.setattr(runner_module, "memory_use", lambda: None)
    told: list[Progress] = []
    report = run_sweep(qwen, text_folder, tmp_path / "run", in_process=True, listener=Listener(progress=told.append))
    assert report.facts["reading"].endswith("really read: not known, the system does not say")
    assert {(p.bytes_read, p.beside) for p in told} == {(None, None)}


def test_a_hold_that_falls_short_is_told(
    qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_room", lambda: 0)
    notes: list[str] = []
    report = run_sweep(
        qwen, text_folder, tmp_path / "run", passes="separate", in_process=True, listener=Listener(note=notes.append)
    )
    assert len(notes) == 1
    assert notes[0].startswith("held 0 B of 300 kB (the memory that may be used has become less); every reading ")
    assert notes[0] in report.notes


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_speed_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 32 MiB pass at once, the other 32 MiB take 10 ms a block of 4 MiB: 419.4304 MB/s."""
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    clock, offsets = [0.0], []

    def preadv(_descriptor: int, buffers: list[Any], offset: int) -> int:
        offsets.append(offset)
        clock[0] += 0.01 if offset >= (100 << 20) + (32 << 20) else 0.0
        return len(buffers[0])

    monkeypatch.setattr(disk_module.os, "O_DIRECT", 0, raising=False)
    monkeypatch.setattr(disk_module.os, "preadv", preadv)
    monkeypatch.setattr(disk_module.time, "perf_counter", lambda: clock[0])
    assert read_speed(str(path)) == pytest.approx(4 * 2**20 / 0.01)
    assert offsets == [(100 << 20) + i * (4 << 20) for i in range(16)]
    # a slow disk: half a second is enough to know
    offsets.clear()

    def slow(_descriptor: int, buffers: list[Any], offset: int) -> int:
        offsets.append(offset)
        clock[0] += 0.2
        return len(buffers[0])

    monkeypatch.setattr(disk_module.os, "preadv", slow)
    assert read_speed(str(path)) == pytest.approx((4 << 20) / 0.2)
    assert len(offsets) == 3


def test_speed_where_it_cannot_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"x" * 1000)
    assert read_speed(str(small)) is None
    assert read_speed(str(tmp_path / "missing")) is None
    monkeypatch.delattr(disk_module.os, "O_DIRECT", raising=False)
    large = tmp_path / "large"
    large.write_bytes(bytes(8 << 20))
    assert read_speed(str(large)) is None


def test_plan_with_given_memory(qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "read_speed", lambda path: {str(qwen): 2e8}[path])
    arguments = ("sweep", qwen, text_folder, "--experts", "6,2", "-c", "64", "-t", "1", "--plan", "--hold", "0.3M")
    from click.testing import CliRunner  # noqa: PLC0415  # the same

    from agreement.cli import main  # noqa: PLC0415  # the only test here that needs it

    done = CliRunner().invoke(main, [*map(str, arguments), "--memory", "121.9M"])
    assert done.exit_code == 0, done.output
    for words in (
        "in 122 MB: that is what may be used (--memory, as asked)",
        "reading    a token     ",
        "laid out by the engine, not yet allocated",
        "reading    hold        300 kB of the file locked: as asked",
        "at 200 MB/s (measured), and computing on top",
    ):
        assert words in done.stdout
    assert names(tmp_path) == set()
