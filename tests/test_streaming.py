"""Models larger than memory: the plan by hand numbers, costs against the engine, locked pages, counters."""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import models
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agreement.errors import ModelFileError, UsageError
from agreement.memory import Memory
from agreement.model_file import read_model_file
from agreement.preflight import SHORT
from agreement.records import EngineOptions, ModelFile
from agreement.streaming import (
    Costs,
    Hold,
    Host,
    Span,
    Wishes,
    Work,
    bytes_read,
    estimated_costs,
    hold_order,
    lock_allowance,
    measured_costs,
    memory_available,
    memory_use,
    plan_reading,
)
from agreement.streaming import hold as hold_module
from agreement.streaming.shapes import CHECK_TOKENS

PROCESS, PAGES = 48 << 20, 64 << 20  # 50,331,648 and 67,108,864
COSTS = Costs(activation=9000.0, copied=1000.0, output=0.0, cache=0.0, logits=0.0, coded=0.0, measured=True)
WORK = Work(n_chunks=8, n_ctx=1000, n_scored=500, n_settings=1)
OPTIONS = EngineOptions()


def a_model(total: int = 10**9, experts: int = 9 * 10**8, n_expert: int = 8, used: int = 8) -> ModelFile:
    return ModelFile(
        path="m.gguf", shards=("m.gguf",), architecture="qwen3moe", name="m", n_layer=2, n_expert_layers=2,
        n_expert=n_expert, n_expert_used=used, n_expert_shared=0, n_vocab=1000, n_ctx_train=4096, n_embd=64,
        bytes_total=total, bytes_experts=experts, renormalised=True, warnings=(), metadata={},
    )  # fmt: skip


# --- the plan -------------------------------------------------------------------------------------------------------


def test_one_pass_by_hand() -> None:
    plan = plan_reading(a_model(), Host(800_000_000, disk=2e8), OPTIONS, WORK, COSTS)
    # 8 chunks x 2 sequences x 1000 tokens x 10 kB = 160 MB beside the code
    assert (plan.passes, plan.n_ubatch, plan.n_sequences) == ("one", 16_000, 16)
    assert plan.bytes_beside == PROCESS + 160_000_000
    # 64 MiB, 5 % of the 160 MB, 2 % of the 800 MB
    assert plan.keep_free == PAGES + 8_000_000 + 16_000_000
    # 800,000,000 - 210,331,648 - 91,108,864
    assert plan.hold == 498_559_488
    # the load reads the file once, held or not; the micro-batch what is not held: 10^9 + (10^9 - 498,559,488); the
    # three decodes of the preflight touch all of it (8 of 8 experts), of which 800 MB are in memory, each time others
    assert plan.bytes_expected == 1_501_440_512 + 3 * 200_000_000
    assert plan.seconds_reading == pytest.approx(10.50720256)
    assert (plan.loads, plan.micro_batches, plan.repack, plan.fits) == (1, 1, False, False)


def test_separate_passes_by_hand() -> None:
    plan = plan_reading(a_model(), Host(800_000_000), OPTIONS, WORK, COSTS, Wishes(passes="separate"))
    # 80 MB of activations; 800,000,000 - 130,331,648 - (67,108,864 + 4,000,000 + 16,000,000)
    assert (plan.n_ubatch, plan.n_batch, plan.hold) == (8000, 8000, 582_559_488)
    # hold once, then two loads and two micro-batches of the rest: 4 x 10^9 - 3 x 582,559,488; the preflight as above
    assert plan.bytes_expected == 2_252_321_536 + 600_000_000
    assert (plan.loads, plan.micro_batches) == (2, 2)


def test_settings_that_need_a_load_of_their_own_come_on_top() -> None:
    plan = plan_reading(a_model(), Host(800_000_000), OPTIONS, replace(WORK, n_loads=1), COSTS, Wishes(passes="one"))
    # load and micro-batch of one further pass: 1,501,440,512 + 2 x (10^9 - 498,559,488); the preflight as above
    assert plan.bytes_expected == 2_504_321_536 + 600_000_000


def test_a_model_that_fits_changes_nothing() -> None:
    options = EngineOptions(n_batch=2048, n_ubatch=512, repack=True)
    plan = plan_reading(a_model(), Host(2_000_000_000), options, WORK, COSTS)
    assert plan.fits
    assert plan.passes == "separate"
    assert plan.options(options) == options
    assert (plan.hold, plan.readings) == (0, 1.0)


def test_fits_exactly_and_not_by_one_byte() -> None:
    # as given: 2 chunks of 1000 in a batch of 2048, 256 tokens of each in a micro-batch: 512 x 10 kB = 5.12 MB
    # F + beside + free = 10^9 + 50,331,648 + 5,120,000 + 67,108,864 + 256,000 + 0.02 A  =  A
    needed = (10**9 + PROCESS + 5_120_000 + PAGES + 256_000) / 0.98
    assert plan_reading(a_model(), Host(int(needed) + 2), OPTIONS, WORK, COSTS).fits
    assert not plan_reading(a_model(), Host(int(needed) - 2), OPTIONS, WORK, COSTS).fits


def test_memory_goes_to_the_micro_batch_before_the_hold() -> None:
    # 32 MB a chunk: 8 chunks are 256 MB, and everything fits one micro-batch with something left to hold
    costs = replace(COSTS, activation=32_000.0, copied=0.0)
    plan = plan_reading(a_model(), Host(600_000_000), OPTIONS, replace(WORK, n_settings=0), costs)
    assert (plan.n_ubatch, plan.micro_batches) == (8000, 1)
    assert 0 < plan.hold < 300_000_000


def test_a_chunk_is_cut_where_not_even_one_fits() -> None:
    # 400 kB a token: a chunk of 1000 is 400 MB and does not fit in 400 MB; a quarter, 100 MB, does with half not:
    # 50.3 + 200 + 67.1 + 10 + 8 = 335 MB fits already
    costs = replace(COSTS, activation=400_000.0, copied=0.0)
    plan = plan_reading(a_model(), Host(400_000_000), OPTIONS, replace(WORK, n_settings=0), costs)
    assert (plan.n_ubatch, plan.n_batch, plan.micro_batches) == (500, 1000, 16)


def test_too_little_memory_says_what_is_needed() -> None:
    with pytest.raises(UsageError, match=r"m: 100 MB may be used \(machine\), the smallest micro-batch needs 1\d\d MB"):
        plan_reading(a_model(), Host(100_000_000), OPTIONS, WORK, COSTS)


def test_few_tokens_touch_few_experts() -> None:
    # 100 MB for every token, 900 MB of experts, 2 of 8 used; a micro-batch of 1 token: 100 + 900 x 2/8 = 325 MB
    model = a_model(used=2)
    work = Work(n_chunks=1, n_ctx=1, n_scored=1, n_settings=0)
    plan = plan_reading(model, Host(300_000_000), OPTIONS, work, COSTS, Wishes(hold=0))
    # three decodes of 16 tokens touch 100 + 900 x (1 - 0.75^16) = 990.98 MB, of which 300 of 1,000 MB are in memory
    assert plan.bytes_expected == pytest.approx(10**9 + 325_000_000 + 3 * 0.7 * 990_979_664)


def test_checks_that_find_their_pages() -> None:
    # 900 MB of 384 experts, 8 used: 16 tokens touch 100 + 900 x (1 - (376/384)^16) = 357.4 MB, less than the 800 MB
    # that may be used, so they are read once: the fifth of them that is not in memory
    model = a_model(n_expert=384, used=8)
    plan = plan_reading(model, Host(800_000_000), OPTIONS, WORK, COSTS, Wishes(hold=0))
    assert plan.bytes_expected == pytest.approx(2 * 10**9 + 0.2 * (10**8 + 9 * 10**8 * (1 - (376 / 384) ** 16)), abs=2)


def test_checks_are_as_long_as_the_preflight() -> None:
    assert CHECK_TOKENS == SHORT


def test_without_the_right_to_lock() -> None:
    allowed = plan_reading(a_model(), Host(800_000_000), OPTIONS, WORK, COSTS)
    plan = plan_reading(a_model(), Host(800_000_000, may_lock=8 << 20), OPTIONS, WORK, COSTS)
    assert plan.hold == 8 << 20
    assert plan.hold_lost == allowed.hold - (8 << 20)
    assert any("no right to lock" in line and "ulimit -l" in line for line in plan.lines())


@pytest.mark.parametrize("hold", [0, 100_000_000])
def test_wishes_are_carried_out(hold: int) -> None:
    wishes = Wishes(n_ubatch=4000, hold=hold, passes="separate", repack=True)
    plan = plan_reading(a_model(), Host(800_000_000), OPTIONS, WORK, COSTS, wishes)
    assert (plan.n_ubatch, plan.hold, plan.passes, plan.repack) == (4000, hold, "separate", True)
    assert sum(": as asked" in line for line in plan.lines()) == 3


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (Wishes(n_ubatch=0), "-ub 0"),
        (Wishes(hold=-1), "--hold -1"),
        (Wishes(memory=0), "--memory 0"),
        (Wishes(hold=790_000_000), "lower -c, --hold"),
    ],
)
def test_wishes_that_cannot_be(wishes: Wishes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_reading(a_model(), Host(800_000_000), OPTIONS, WORK, COSTS, wishes)


def test_one_pass_of_nothing_and_layers_on_the_gpu() -> None:
    with pytest.raises(UsageError, match="--passes one"):
        plan_reading(a_model(), Host(800_000_000), OPTIONS, replace(WORK, n_settings=0), COSTS, Wishes(passes="one"))
    plan = plan_reading(a_model(), Host(800_000_000), EngineOptions(n_gpu_layers=4), WORK, COSTS)
    assert plan.fits
    assert "-ngl 4 puts weights on a GPU" in plan.lines()[0]


@given(
    total=st.integers(10**8, 10**12),
    share=st.floats(0.2, 1.5),
    activation=st.floats(1e3, 1e6),
    work=st.builds(
        Work, n_chunks=st.integers(1, 100), n_ctx=st.sampled_from([128, 512]), n_scored=st.just(64),
        n_settings=st.integers(0, 10), n_loads=st.integers(0, 2),
    ),
)  # fmt: skip
def test_every_plan_keeps_within_memory(total: int, share: float, activation: float, work: Work) -> None:
    model, available = a_model(total, total * 9 // 10), int(total * share)
    costs = replace(COSTS, activation=activation)
    try:
        plan = plan_reading(model, Host(available), OPTIONS, work, costs)
    except UsageError:
        return
    if plan.fits:
        assert model.bytes_total + plan.bytes_beside + plan.keep_free <= available
        return
    assert plan.hold + plan.bytes_beside + plan.keep_free <= available
    # never fewer than one reading, never more than one a load, micro-batch and decode of the preflight
    assert total <= plan.bytes_expected <= total * (plan.loads + plan.micro_batches + 3)
    less = plan_reading(model, Host(available), OPTIONS, work, costs, Wishes(hold=0))
    assert less.bytes_expected >= plan.bytes_expected


# --- costs ----------------------------------------------------------------------------------------------------------


def reserved(path: Path, n_ubatch: int, n_outputs: int, n_sequences: int) -> list[str]:
    """Return what llama.cpp logs of a context of `n_sequences` x 512 that it lays out without allocating it."""
    import llama_cpp.llama_cpp as llama  # noqa: PLC0415  # the native library, for the tests that need it

    text: list[str] = []
    callback = llama.llama_log_callback(lambda _level, line, _user: text.append(line.decode()))
    llama.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        params = llama.llama_model_default_params()
        params.n_gpu_layers, params.no_alloc, params.load_mode, params.use_extra_bufts = 0, True, 0, False
        model = llama.llama_model_load_from_file(str(path).encode(), params)
        context = llama.llama_context_default_params()
        context.n_ctx, context.n_seq_max, context.kv_unified = 512 * n_sequences, n_sequences, False
        context.n_batch, context.n_ubatch, context.n_outputs_max = n_ubatch, n_ubatch, n_outputs
        made = llama.llama_init_from_model(model, context)
        llama.llama_free(made)
        llama.llama_model_free(model)
    finally:
        silent = llama.llama_log_callback(lambda _level, _line, _user: None)
        _KEPT.append(silent)  # the library keeps the pointer
        llama.llama_log_set(silent, ctypes.c_void_p(0))
    return "".join(text).splitlines()


_KEPT: list[object] = []
# Estimated over reserved activations; gpt-oss keeps two more rows, glm-dsa its indexer's scores.
LOW = {"gpt-oss": 0.80, "glm-dsa": 0.70}


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_estimates_against_the_engine(family: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", family)
    estimate = estimated_costs(read_model_file(path), OPTIONS, 512)
    log = reserved(path, 4096, 2048, 8)
    measured = measured_costs(estimate, log, n_ubatch=4096, n_outputs=2048, n_tokens=4096)
    assert measured.measured
    assert LOW.get(family, 0.92) <= estimate.activation / measured.activation <= 1.02
    caches = [float(m) for m in re.findall(r"size = +([0-9.]+) MiB \(", "\n".join(log))]
    assert measured.cache * 4096 == pytest.approx(sum(caches) * 2**20)
    assert estimate.cache == pytest.approx(measured.cache, rel=0.01)


def test_estimate_by_hand(tmp_path: Path) -> None:
    model = read_model_file(models.write_model(tmp_path / "m.gguf", "qwen3moe"))
    costs = estimated_costs(model, OPTIONS, 512)
    # width 32, 8 experts of 32: 4 x (2 x 8 x (32 + 32) + 2 x 32) = 4352; the down product's input 2 x 8 x 32 = 512
    assert (costs.activation, costs.copied) == (4352.0, 512.0)
    # 2 layers x 2 heads x (8 + 8) x 2 bytes, and 298 tokens in float32 and in codes
    assert (costs.cache, costs.logits, costs.coded) == (128.0, 1192.0, 596.0)
    assert costs.output == 4 * (298 + 2 * 32)
    # a window of 600 takes the cells of 768
    assert estimated_costs(model, OPTIONS, 600).cache == 128.0 * 768 / 600
    # one head scores 512 positions twice: 4 heads x 512 x 2 x 4 bytes
    assert estimated_costs(model, EngineOptions(flash_attn="off"), 512).activation == 16384.0
    # q8_0: 34 bytes for 32 values
    assert estimated_costs(model, EngineOptions(type_k="q8_0", type_v="q8_0"), 512).cache == 128 * 34 / 64
    assert estimated_costs(model, OPTIONS, 512, full_logits=False).coded == 1024.0


def test_measured_from_log_lines() -> None:
    log = [
        "llama_kv_cache: size =   30.00 MiB (   512 cells,   6 layers, 40/40 seqs), K (f16):   15.00 MiB, V (f16): ...",
        "sched_reserve:      CUDA0 compute buffer size =   999.00 MiB",
        "sched_reserve:        CPU compute buffer size =   760.51 MiB",
    ]
    costs = measured_costs(COSTS, log, n_ubatch=20480, n_outputs=10240, n_tokens=20480)
    assert costs.activation == pytest.approx(760.51 * 2**20 / 20480)
    assert costs.cache == 30 * 2**20 / 20480
    assert (costs.copied, costs.measured) == (COSTS.copied, True)
    assert measured_costs(COSTS, [], n_ubatch=512, n_outputs=1, n_tokens=512) == COSTS
    # a buffer that the outputs fill says nothing of the activations: 760.51 MiB / 10,240 = 77,877 bytes an output
    large = replace(COSTS, output=77_000.0)
    assert measured_costs(large, log, n_ubatch=20480, n_outputs=10240, n_tokens=20480).activation == COSTS.activation


# --- holding --------------------------------------------------------------------------------------------------------


def locked_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"VmLck:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]  # the line is always there


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(np.random.default_rng(0).bytes(8 << 20))
    return path


def require_lock(n_bytes: int) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("locked memory is read from /proc")
    allowance = lock_allowance()
    if allowance is not None and allowance < n_bytes:
        pytest.skip(f"this process may lock {allowance} bytes only; raise `ulimit -l`")


def test_hold_locks_and_lets_go(weights: Path) -> None:
    require_lock(4 << 20)
    before = locked_bytes()
    with Hold((Span(str(weights), 0, 8 << 20),), 4 << 20) as hold:
        assert (hold.held, hold.asked, hold.note) == (4 << 20, 4 << 20, "")
        assert locked_bytes() - before == 4 << 20
        assert hold.shrink(1 << 20) == 4 << 20  # a step is let go of as a whole
        assert hold.held == 0
    assert locked_bytes() == before


def test_hold_keeps_to_whole_pages_and_to_the_spans(weights: Path) -> None:
    require_lock(1 << 20)
    page = mmap.PAGESIZE
    # bytes 100 to page + 1 lie on two pages; what is asked for beyond the spans is not there to be held
    with Hold((Span(str(weights), 100, page + 1), Span(str(weights), 8 * page, 10 * page)), 100 * page) as hold:
        assert hold.held == 4 * page
    with Hold((Span(str(weights), 0, 8 << 20),), 3 * page + 5) as hold:
        assert hold.held == 3 * page
    with Hold((Span(str(weights), 0, 8 << 20),), 0) as hold:
        assert (hold.held, hold.note) == (0, "")


def test_hold_stops_where_memory_ran_out(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_module, "_STEP", 1 << 20)
    require_lock(4 << 20)
    left = iter([10 << 20, 6 << 20, 3 << 20])
    with Hold((Span(str(weights), 0, 8 << 20),), 8 << 20, room=lambda: next(left), keep_free=4 << 20) as hold:
        assert hold.held == 2 << 20  # the third step would leave less than 4 MiB
        assert "held 2.10 MB of 8.39 MB (the memory that may be used has become less)" in hold.note


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EAGAIN, errno.EPERM, errno.ENOSYS])
def test_hold_goes_on_with_less_where_refused(weights: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(hold_module, "_STEP", 1 << 20)
    answers = iter([0, 0, code])
    monkeypatch.setattr(hold_module._Mapping, "lock", lambda *_: next(answers))
    with Hold((Span(str(weights), 0, 8 << 20),), 8 << 20) as hold:
        assert hold.held == 2 << 20
        assert hold.note.startswith("held 2.10 MB of 8.39 MB (")
        assert "6.29 MB more from disk" in hold.note


def test_hold_of_a_file_that_is_gone(tmp_path: Path) -> None:
    require_lock(4096)
    with pytest.raises(ModelFileError, match=r"gone\.gguf: cannot be held in memory"):
        Hold((Span(str(tmp_path / "gone.gguf"), 0, 4096),), 4096)


def test_lock_allowance_from_capabilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "win32":
        pytest.skip("no such limits there")
    import resource  # noqa: PLC0415  # not there on Windows

    status = tmp_path / "status"
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (65536, 131072))
    status.write_text("Name: x\nCapEff:\t0000000000004000\n")  # bit 14
    assert lock_allowance(status) is None
    status.write_text("CapEff:\t0000000000003fff\n")  # all below it
    assert lock_allowance(status) == 131072
    assert lock_allowance(tmp_path / "absent") == 131072
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (65536, resource.RLIM_INFINITY))
    assert lock_allowance(status) is None


def test_hold_order(tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "m.gguf", "qwen3moe")
    model = read_model_file(path)
    spans = hold_order(model)
    # every byte once, up to the padding between tensors
    assert model.bytes_total <= sum(s.n_bytes for s in spans) <= path.stat().st_size
    tensors = {t.name: (int(t.data_offset), int(t.n_bytes)) for t in gguf.GGUFReader(path).tensors}

    def place(name: str) -> int:
        start, n_bytes = tensors[name]
        return next(i for i, s in enumerate(spans) if s.start <= start and start + n_bytes <= s.stop)

    routed = [place(name) for name in tensors if "_exps." in name]
    resident = [place(name) for name in tensors if "_exps." not in name and name != "token_embd.weight"]
    assert max(resident) <= min(routed)
    if "output.weight" in tensors:
        assert place("token_embd.weight") >= max(routed)


# --- counters -------------------------------------------------------------------------------------------------------


def test_counters_by_hand(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/io").write_text("rchar: 5\nread_bytes: 4096\nwrite_bytes: 9\n")
    (tmp_path / "7/status").write_text("Name:\tx\nVmHWM:\t    2048 kB\nRssAnon:\t     100 kB\n")
    assert bytes_read(7, proc=tmp_path) == 4096
    use = memory_use(7, proc=tmp_path)
    assert use is not None
    assert (use.anonymous, use.peak) == (102_400, 2_097_152)
    assert bytes_read(8, proc=tmp_path) is None
    assert memory_use(8, proc=tmp_path) is None
    (tmp_path / "7/io").write_text("read_bytes: many\n")
    assert bytes_read(7, proc=tmp_path) is None


def test_counters_of_this_process() -> None:
    if not Path("/proc/self/io").exists():
        pytest.skip("no /proc/self/io here")
    before = memory_use()
    block = np.ones(4 << 20, np.float64)  # 32 MiB
    after = memory_use()
    assert before is not None
    assert after is not None
    assert after.anonymous - before.anonymous > 28 << 20
    assert after.peak >= after.anonymous
    assert block[0] == 1
    assert (bytes_read() or 0) >= 0


MEMINFO = "MemTotal: 1000 kB\nMemAvailable: 500 kB\n"


@pytest.mark.parametrize(
    ("files", "limit", "expected"),
    [
        # version 1: limit - used + file pages of the group and those below: 400,000 - 300,000 + (20,000 + 30,000)
        (
            {
                "memory.usage_in_bytes": "300000",
                "memory.stat": "active_file 1\ntotal_active_file 20000\ntotal_inactive_file 30000\n",
            },
            400_000,
            150_000,
        ),
        # version 2
        ({"memory.current": "300000", "memory.stat": "active_file 20000\ninactive_file 50000\n"}, 400_000, 170_000),
        # the machine has less than the group would allow: 500 KiB
        ({"memory.current": "0", "memory.stat": ""}, 900_000, 512_000),
        # more used than allowed: nothing, not less
        ({"memory.current": "500000", "memory.stat": ""}, 400_000, 0),
        # nobody says what is used
        ({}, 400_000, 400_000),
    ],
)
def test_memory_available(tmp_path: Path, files: dict[str, str], limit: int, expected: int) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    memory = Memory(machine=1_024_000, limit=limit, source=str(tmp_path / "memory.max"))
    assert memory_available(memory, proc=tmp_path) == expected


def test_memory_available_without_groups(tmp_path: Path) -> None:
    memory = Memory(1_024_000, 1_024_000, "machine")
    assert memory_available(memory, proc=tmp_path) == 1_024_000  # no meminfo
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert memory_available(memory, proc=tmp_path) == 512_000
