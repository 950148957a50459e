"""Runs of a model that streams which are resumed, ended from outside, or asked for what cannot be."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import FOUR_AT_A_TIME, SHORT, command_line, names, snapshot, wait_for, write_corpus

import agreement.runs as runs_module
from agreement import record, sweep
from agreement.cli.group import _terminated_like_interrupted  # no other door: the signal of this process
from agreement.errors import EngineError, IdentityError, KilledForMemoryError, ModelFileError, UsageError
from agreement.memory import Memory
from agreement.passes import Listener
from agreement.plan import Plan
from agreement.recording import Progress
from agreement.records import EngineOptions, ModelFile, Report
from agreement.store import RunStore
from agreement.streaming import Costs, Host, Wishes, Work, lock_allowance, memory_available, plan_reading
from agreement.workers.client import WorkerRunner

# See `test_reading.TOO_SMALL`: 2.0 MB beside what the plan keeps for the process and for pages on their way; with
# LESS 1.1 MB, so that a plan of its own would take a smaller micro-batch.
MEMORY, LESS = 121_900_000, 121_000_000
TIGHT = Wishes(memory=MEMORY, hold=0)


def run_sweep(model: Path, corpus: Path, out: Path, **changed: Any) -> Report:
    arguments: dict[str, Any] = {"experts": (6, 2), "chunks": SHORT, "options": FOUR_AT_A_TIME, "wishes": TIGHT}
    return sweep(model, corpus, out, **{"in_process": True, **arguments, **changed})


def broken(whole: Path, out: Path) -> Path:
    """Copy a run as if it had been interrupted in its last setting, one chunk before the end."""
    shutil.copytree(whole, out)
    header = json.loads((out / "run.json").read_text(encoding="utf-8"))
    del header["passes"]["experts=2"]
    (out / "run.json").write_text(json.dumps(header), encoding="utf-8")
    (out / "settings/experts=2/chunk-000011.agr").unlink()
    return out


def chunk_files(run: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(run).items() if name.endswith(".agr")}


def begun_with(run: Path) -> dict[str, Any]:
    options: dict[str, Any] = RunStore.open(run).header["identity"]["options"]
    return options


# --- resumed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", ["one", "separate"])
@pytest.mark.parametrize(
    "wishes",
    [
        replace(TIGHT, memory=LESS),
        replace(TIGHT, memory=1),
        replace(TIGHT, memory=LESS, hold=10**9),
        replace(TIGHT, memory=10**12),
        replace(TIGHT, n_ubatch=100_000),
        replace(TIGHT, n_ubatch=100_000, memory=LESS),
    ],
)
def test_resumed_whatever_memory_there_is(
    passes: str, wishes: Wishes, qwen: Path, text_folder: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    run_sweep(qwen, text_folder, whole, passes=passes)
    out = broken(whole, tmp_path / "out")
    plans: list[Plan] = []
    run_sweep(qwen, text_folder, out, passes=passes, wishes=wishes, resume=True, listener=Listener(plan=plans.append))
    assert chunk_files(out) == chunk_files(whole)
    assert begun_with(out) == begun_with(whole)
    # the plan that is shown is of that micro-batch, and holds nothing that is not there
    assert plans[0].reading.n_ubatch == begun_with(whole)["n_ubatch"]
    assert wishes.memory == 10**12 or plans[0].reading.hold <= max(0, (wishes.memory or MEMORY) - 117_000_000)


def test_a_plan_of_its_own_would_differ(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    """What the test above is worth."""
    sizes = []
    for memory in (MEMORY, LESS):
        run_sweep(qwen, text_folder, tmp_path / str(memory), wishes=replace(TIGHT, memory=memory))
        sizes.append(begun_with(tmp_path / str(memory))["n_ubatch"])
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"options": replace(FOUR_AT_A_TIME, flash_attn="off")}, "options.flash_attn = auto, now it is off"),
        ({"options": replace(FOUR_AT_A_TIME, type_k="f32")}, "options.type_k = f16, now it is f32"),
        ({"options": replace(FOUR_AT_A_TIME, n_threads=2)}, "options.n_threads = 1, now it is 2"),
        ({"wishes": replace(TIGHT, repack=True)}, "options.repack = False, now it is True"),
        ({"wishes": replace(TIGHT, repack=True, memory=10**12)}, "options.repack = False, now it is True"),
        ({"wishes": replace(TIGHT, memory=LESS, n_ubatch=128)}, "= 256, now it is 128"),
        ({"passes": "one"}, "now it is "),
        ({"chunks": replace(SHORT, n_ctx=32)}, "chunks.n_ctx = 64, now it is 32"),
        ({"chunks": replace(SHORT, n_chunks=3)}, "chunks.n_chunks = 12, now it is 3"),
    ],
)
def test_resumed_with_other_options(
    changed: dict[str, Any], message: str, qwen: Path, text_folder: Path, tmp_path: Path
) -> None:
    """They are refused, as they are where a model fits in memory."""
    out = tmp_path / "run"
    run_sweep(qwen, text_folder, out)
    before = snapshot(out)
    with pytest.raises(IdentityError) as caught:
        run_sweep(qwen, text_folder, out, resume=True, **changed)
    if "chunks" not in changed:
        assert message in str(caught.value)
    assert snapshot(out) == before


def test_begun_in_memory_and_resumed_with_too_little(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run_sweep(qwen, text_folder, whole, wishes=Wishes())
    out = broken(whole, tmp_path / "out")
    plans: list[Plan] = []
    run_sweep(qwen, text_folder, out, resume=True, listener=Listener(plan=plans.append))
    assert chunk_files(out) == chunk_files(whole)
    assert "not planned for: the run began with the model in memory" in plans[0].reading.lines()[0]


def test_a_model_that_is_replaced_between_two_passes(qwen: Path, wide: Path, text_folder: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "model.gguf", tmp_path / "run"
    shutil.copy(qwen, model)

    def replace_file(name: str, _chunks: int) -> None:
        if name == "baseline":
            model.rename(tmp_path / "moved")
            shutil.copy(wide, model)

    with pytest.raises(IdentityError, match=r"model\.gguf has changed since the run began; bring the first file back"):
        run_sweep(model, text_folder, out, passes="separate", listener=Listener(passes=replace_file))
    assert not list(out.glob("settings/*/*.agr"))
    shutil.copy(qwen, model)
    run_sweep(model, text_folder, out, passes="separate", resume=True)
    run_sweep(qwen, text_folder, tmp_path / "whole", passes="separate")
    assert chunk_files(out) == chunk_files(tmp_path / "whole")


# --- ended from outside -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineError("the engine's process died")])
def test_sample_of_a_worker_that_was_killed_is_deleted(
    error: BaseException, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []

    def call(_self: WorkerRunner, method: str, _args: Any, kwargs: dict[str, Any]) -> float:
        assert method == "hook_difference"
        (kwargs["folder"] / "agreement-x").mkdir()
        (kwargs["folder"] / "agreement-x" / "sample.gguf.part").write_bytes(b"x")
        seen.append(names(tmp_path))
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(WorkerRunner, "_call", call)
    runner = WorkerRunner(_model(), EngineOptions(), 64, log_path=tmp_path / "engine.log")
    with pytest.raises(type(error)):
        runner.hook_difference(None, 2, sampled=True)  # type: ignore[arg-type]  # no chunk is needed for a sample
    assert len(seen[0]) == 3
    assert names(tmp_path) == set()


def test_no_folder_for_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    runner = WorkerRunner(_model(), EngineOptions(), 64, log_path=tmp_path / "engine.log")
    with pytest.raises(ModelFileError, match=r"^no sample can be made: .*gone.*: No such file or directory$"):
        runner.hook_difference(None, 2, sampled=True)  # type: ignore[arg-type]  # as above


def test_terminated_like_interrupted(qwen: Path, tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "texts", n_documents=6, n_words=400)
    out = tmp_path / "run"
    arguments = ("--experts", "6,2", "-q", "-c", "64", "-t", "1", "--chunks", "60", "--memory", str(MEMORY))
    process = subprocess.Popen(
        command_line("sweep", qwen, texts, "-o", out, *arguments), stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: list(out.rglob("*.agr")) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 1
    assert text.splitlines() == [
        "Error: interrupted; whole chunks are kept: the same command with --resume goes on from there"
    ]


def test_a_handler_of_the_caller_is_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with _terminated_like_interrupted():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_listener_that_fails_is_not_taken_for_the_worker(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    def progress(_told: Progress) -> None:
        raise BrokenPipeError("the reader had enough")

    with pytest.raises(BrokenPipeError, match="the reader had enough"):
        run_sweep(qwen, text_folder, tmp_path / "run", in_process=False, listener=Listener(progress=progress))


def test_a_worker_that_dies_before_there_is_a_run(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    """Its log goes with the folder, so nobody is sent to it."""

    def plan(_plan: Plan) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run_sweep(qwen, text_folder, out, in_process=False, listener=Listener(plan=plan))
    assert not out.exists()
    runner = WorkerRunner(_model(), EngineOptions(), 64, log_path=tmp_path / "engine.log")
    runner.prepare()
    assert runner._process is not None  # to end it as the kernel would
    runner._process.kill()
    runner._process.wait()
    with pytest.raises(EngineError, match="nothing of the run was written yet") as caught:
        runner.tokenise([])
    assert "engine.log" not in str(caught.value)


# --- killed while the model is loaded ---------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", ["one", "separate"])
@pytest.mark.parametrize(("kills", "hold"), [(1, 300_000), (1, 0), (2, 300_000)])
def test_killed_while_loading(
    passes: str, kills: int, hold: int, wide: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First nothing is held, then the micro-batch is halved."""
    really_load, left = WorkerRunner.load, [kills]
    words = "the system killed the engine's process during load, because memory ran out"

    def load(self: WorkerRunner, *args: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise KilledForMemoryError(words, left="its whole log is there")
        really_load(self, *args)

    monkeypatch.setattr(WorkerRunner, "load", load)
    plans: list[Plan] = []
    wishes = Wishes(memory=124_000_000, hold=hold)
    report = run_sweep(
        wide,
        text_folder,
        tmp_path / "run",
        passes=passes,
        wishes=wishes,
        in_process=False,
        listener=Listener(plan=plans.append),
    )
    first, last = plans[0].reading.n_ubatch, plans[-1].reading.n_ubatch
    halved = kills > (hold > 0)
    assert last <= first // 2 if halved else last == first
    held = [f"{words}; it goes on with nothing of the model held"] if hold else []
    assert [n for n in report.notes if n.startswith("the system killed")] == (held if not halved else [])
    assert [n for n in report.notes if "could not make a context" in n or "memory ran out with" in n] == (
        [f"memory ran out with micro-batches of {first} tokens; {last} instead"] if halved else []
    )


def test_killed_at_every_load(wide: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_self: WorkerRunner, *_args: Any) -> None:
        raise KilledForMemoryError("the system killed the engine's process during load, because memory ran out")

    monkeypatch.setattr(WorkerRunner, "load", load)
    with pytest.raises(EngineError, match=r"because memory ran out; micro-batches down to \d+ tokens were tried"):
        run_sweep(
            wide,
            text_folder,
            tmp_path / "run",
            wishes=Wishes(memory=124_000_000, hold=0),
            in_process=False,
        )
    assert names(tmp_path) == set()


# --- a recording ------------------------------------------------------------------------------------------------------


def test_a_recording_counts_what_it_reads_and_is_tried_again(
    qwen: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agreement import plan as plan_module  # noqa: PLC0415  # the only test here that needs it

    monkeypatch.setattr(plan_module, "memory_available", lambda _memory: MEMORY)
    out = tmp_path / "run"
    record(qwen, text_folder, out, chunks=SHORT, options=FOUR_AT_A_TIME, in_process=True)
    entries = [json.loads(line) for line in (out / "timings.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [e["pass"] for e in entries if e["pass"].startswith("reading")] == ["reading begun", "reading"]
    tried: list[int] = []

    def smaller(job: Any, error: KilledForMemoryError, _listener: Listener) -> Any:
        tried.append(job.plan.reading.n_ubatch)
        raise error

    def killed(*_args: Any) -> None:
        raise KilledForMemoryError("killed")

    monkeypatch.setattr(runs_module, "smaller", smaller)
    monkeypatch.setattr(runs_module, "carry_out", killed)
    with pytest.raises(KilledForMemoryError):
        record(qwen, text_folder, tmp_path / "b", chunks=SHORT, options=FOUR_AT_A_TIME, in_process=True)
    assert tried == [256]


# --- plans ------------------------------------------------------------------------------------------------------------

COSTS = Costs(activation=9000.0, copied=1000.0, output=0.0, cache=0.0, logits=0.0, coded=0.0, measured=True)
WORK = Work(n_chunks=8, n_ctx=1000, n_scored=500, n_settings=2)


def _model() -> ModelFile:
    return ModelFile(
        path="m.gguf", shards=("m.gguf",), architecture="qwen3moe", name="m", n_layer=2, n_expert_layers=2,
        n_expert=8, n_expert_used=8, n_expert_shared=0, n_vocab=1000, n_ctx_train=4096, n_embd=64,
        bytes_total=10**9, bytes_experts=9 * 10**8, renormalised=True, warnings=(), metadata={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("work", "wishes", "message"),
    [
        # a chunk of 1000 halved thrice; once more would be less than 64
        (WORK, Wishes(n_ubatch=100, passes="one"), r"-ub 100: .* at least 375 tokens here \(125 of each sequence, 3 "),
        (WORK, Wishes(n_ubatch=1), r"-ub 1: .* at least 125 tokens here \(125 of each sequence, 1 side by side\)"),
        (replace(WORK, n_settings=256), Wishes(passes="one"), "256 settings and the baseline are more than the 256 "),
    ],
)
def test_plans_that_cannot_be(work: Work, wishes: Wishes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_reading(_model(), Host(800_000_000), EngineOptions(), work, COSTS, wishes)


def test_too_little_memory_counts_only_what_was_asked_for() -> None:
    """The smallest is 125 tokens of 400 kB: 50.3 + 50 + (67.1 + 2.5 + 3) = 173 MB; so it was before."""
    costs = replace(COSTS, activation=400_000.0, copied=0.0)
    with pytest.raises(UsageError, match=r"150 MB may be used .* the smallest micro-batch needs 17[0-9] MB"):
        plan_reading(_model(), Host(150_000_000), EngineOptions(), WORK, costs, Wishes(n_ubatch=500))


def test_the_whole_file_is_not_locked_by_the_engine() -> None:
    options = EngineOptions(use_mlock=True)
    plan = plan_reading(_model(), Host(800_000_000), options, WORK, COSTS)
    assert not plan.options(options).use_mlock
    assert sum(line.startswith("mlock       off: ") for line in plan.lines()) == 1
    fits = plan_reading(_model(), Host(4_000_000_000), options, WORK, COSTS)
    assert fits.options(options).use_mlock


def test_the_limit_of_a_group_above_may_bind_first(tmp_path: Path) -> None:
    """Ours: 900,000 - 100,000; above, where others took 700,000: 1,000,000 - 800,000 + 50,000 that can be dropped."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job/memory.current").write_text("100000")
    (tmp_path / "memory.current").write_text("800000")
    (tmp_path / "memory.stat").write_text("active_file 20000\ninactive_file 30000\n")
    ours, above = (900_000, str(tmp_path / "job/memory.max")), (1_000_000, str(tmp_path / "memory.max"))
    memory = Memory(2_000_000, *ours, limits=(ours, above))
    assert memory_available(memory, proc=tmp_path) == 250_000
    assert memory_available(replace(memory, limits=(ours,)), proc=tmp_path) == 800_000


def test_the_root_of_a_container_may_not_lock_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (65536, 131072))
    status, uid_map = tmp_path / "status", tmp_path / "uid_map"
    status.write_text("CapEff:\t000001ffffffffff\n")
    for text, expected in (
        ("         0          0 4294967295\n", None),
        ("         0       1000          1\n", 131072),
    ):
        uid_map.write_text(text)
        assert lock_allowance(status, uid_map) == expected
    assert lock_allowance(status, tmp_path / "absent") is None
