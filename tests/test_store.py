"""Recordings on disk: what comes back is what went in, or an error; never something else."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import string
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agreement.errors import AgreementError, IdentityError, StoreError
from agreement.store import BASELINE_PASS, RunStore, read_arrays, read_json, write_arrays, write_file
from agreement.store import arrays as arrays_module
from agreement.store import run as run_module

DTYPES = st.sampled_from([np.int32, np.int64, np.uint16, np.uint8, np.bool_, np.float32, np.float64])
NAMES = st.text(string.ascii_letters + "_é", min_size=1, max_size=6)
ARRAYS = st.dictionaries(
    NAMES,
    hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)),
    max_size=4,
)
META = st.dictionaries(NAMES, st.none() | st.booleans() | st.integers() | st.text(max_size=5), max_size=3)
IDENTITY = {"model": {"digest": "aa", "n_vocab": 16}, "options": {"n_threads": 2}, "chunks": {"fingerprint": "ff"}}
SMALL = {"ids": np.arange(5, dtype=np.int32), "x": np.array([[0.5, -1.5]], np.float32), "flag": np.array([True])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def make_run(path: Path) -> RunStore:
    return RunStore.create(path, IDENTITY, {"model": {}}, ({"tokens": np.zeros((1, 4), np.int32)}, {"first": 2}))


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a
    )


# --- files of arrays ---


@given(ARRAYS, META)
def test_what_is_read_is_what_was_written(folder: Path, arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    path = folder / "round.agr"
    write_arrays(path, arrays, meta)
    back, meta_back = read_arrays(path)
    assert equal(back, arrays)
    assert list(back) == list(arrays), "in the same order"
    assert meta_back == meta
    first = path.read_bytes()
    write_arrays(path, {k: v.copy() for k, v in arrays.items()}, dict(reversed(meta.items())))
    assert path.read_bytes() == first, "equal content, equal bytes"


def test_memory_layout_and_byte_order_do_not_matter(folder: Path) -> None:
    plain = np.arange(12, dtype=np.int32).reshape(3, 4)
    files = []
    for i, array in enumerate((plain, np.asfortranarray(plain), plain.astype(">i4"), plain[::-1][::-1])):
        write_arrays(folder / f"{i}.agr", {"a": array}, {}, durable=i == 0)
        files.append((folder / f"{i}.agr").read_bytes())
    assert len(set(files)) == 1
    np.testing.assert_array_equal(read_arrays(folder / "2.agr")[0]["a"], plain)


def test_the_layout_is_the_documented_one(folder: Path) -> None:
    path = folder / "layout.agr"
    write_arrays(path, {"a": np.array([1, 2], np.int32), "b": np.array([3.0], np.float32)}, {"chunk": 7})
    data = path.read_bytes()
    assert data[:8] == b"agrmnt\r\n"
    assert int.from_bytes(data[8:12], "little") == 1
    n_header = int.from_bytes(data[12:16], "little")
    assert (24 + n_header) % 64 == 0
    header = json.loads(data[24 : 24 + n_header])
    assert header["meta"] == {"chunk": 7}
    assert [(a["name"], a["dtype"], a["shape"], a["offset"]) for a in header["arrays"]] == [
        ("a", "<i4", [2], 0),
        ("b", "<f4", [1], 64),
    ]
    body = data[24 + n_header :]
    assert body == b"\1\0\0\0\2\0\0\0" + b"\0" * 56 + b"\0\0\x40\x40"  # 3.0 is 0x40400000


def test_arrays_are_read_only_and_can_be_chosen(folder: Path) -> None:
    path = folder / "chosen.agr"
    write_arrays(path, SMALL, {})
    arrays, _ = read_arrays(path, ("x",))
    assert list(arrays) == ["x"]
    with pytest.raises(ValueError, match="read-only"):
        arrays["x"][0, 0] = 1
    with pytest.raises(StoreError, match="has no array 'y'"):
        read_arrays(path, ("x", "y"))


def test_every_changed_byte_is_found(folder: Path) -> None:
    path = folder / "flip.agr"
    write_arrays(path, SMALL, {"chunk": 3})
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(StoreError):
            read_arrays(path)


def test_a_file_cut_anywhere_is_found_even_by_who_reads_a_part(folder: Path) -> None:
    path = folder / "cut.agr"
    write_arrays(path, SMALL, {})
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        for names in (None, ("ids",)):
            with pytest.raises(StoreError):
                read_arrays(path, names)
    path.write_bytes(whole + b"\0")
    with pytest.raises(StoreError, match="1 bytes too many"):
        read_arrays(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: 0x89}, "is not a recording of agreement"),
        ({6: 0x0A}, "is not a recording of agreement"),  # a transfer that made \r\n one line end
        ({8: 2}, "has format version 2, this program reads 1; record it again"),
        ({12: 0}, "has a damaged header"),
        ({16: 0, 17: 0}, "has a damaged header"),
    ],
)
def test_damage_to_the_head_is_named(folder: Path, change: dict[int, int], message: str) -> None:
    path = folder / "head.agr"
    write_arrays(path, SMALL, {})
    data = bytearray(path.read_bytes())
    for position, value in change.items():
        data[position] = value
    path.write_bytes(data)
    with pytest.raises(StoreError, match=message):
        read_arrays(path)


def test_missing_empty_and_unreadable_files(folder: Path) -> None:
    with pytest.raises(StoreError, match=r"nothing\.agr is missing; run again with --resume"):
        read_arrays(folder / "nothing.agr")
    (folder / "empty.agr").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be read"):
        read_arrays(folder / "empty.agr")
    (folder / "folder.agr").mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        read_arrays(folder / "folder.agr")


# --- disks that are full ---


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chunk.agr"
    write_arrays(path, SMALL, {})
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(arrays_module.os, "fsync", full)
    with pytest.raises(StoreError, match=r"cannot write .*chunk\.agr: No space left on device; free space"):
        write_arrays(path, {"a": np.zeros(3)}, {}, durable=True)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["chunk.agr"]


FILE_LIMIT = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from agreement.errors import StoreError
from agreement.store import write_arrays
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
path = Path(sys.argv[1])
write_arrays(path / "fits.agr", {"a": np.zeros(100)}, {})
try:
    write_arrays(path / "large.agr", {"a": np.zeros(100_000)}, {})
except StoreError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="the system has no limit of file sizes")
def test_a_write_that_the_system_cuts_short(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FILE_LIMIT, str(tmp_path)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[1]
    )
    assert "cannot write" in done.stdout
    assert "File too large" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["fits.agr"]
    assert read_arrays(tmp_path / "fits.agr")[0]["a"].shape == (100,)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(StoreError, match="cannot write"):
        write_file(tmp_path / "file" / "x", b"")
    with pytest.raises(StoreError, match="cannot make"):
        make_run(tmp_path / "file" / "run")
    run = make_run(tmp_path / "run")
    (run.path / "timings.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"cannot write .*timings\.jsonl"):
        run.add_timing({})
    (run.path / ".lock").mkdir()
    with pytest.raises(StoreError, match="cannot lock"), run.lock():
        pass


# --- run directories ---


def test_a_run_is_opened_as_it_was_made(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.header["settings"].append("experts=6")
    run.write_chunk(BASELINE_PASS, 0, SMALL, {"n_vocab": 16})
    run.write_chunk("experts=6", 12, SMALL, {})
    run.finish_pass(BASELINE_PASS, {"proof": []})
    again = RunStore.open(tmp_path / "run")
    assert again.header == run.header
    assert again.is_finished(BASELINE_PASS)
    assert not again.is_finished("experts=6")
    assert again.has_chunk("experts=6", 12)
    assert not again.has_chunk("experts=6", 11)
    assert again.read_chunks()[1] == {"first": 2}
    arrays, meta = again.read_chunk(BASELINE_PASS, 0)
    assert equal(arrays, SMALL)
    assert meta == {"pass": "baseline", "chunk": 0, "n_vocab": 16}
    assert (tmp_path / "run" / "settings" / "experts=6" / "chunk-000012.agr").exists()


def whole_run(path: Path) -> RunStore:
    """A run of four chunks whose baseline is complete."""
    store = RunStore.create(path, {"chunks": {"n_chunks": 4}}, {}, ({"tokens": np.arange(4)}, {}))
    for index in range(4):
        store.write_chunk(BASELINE_PASS, index, {"codes": np.arange(4000)}, {})
    store.finish_pass(BASELINE_PASS, {})
    return store


def test_a_whole_pass_is_verified(tmp_path: Path) -> None:
    store = whole_run(tmp_path / "run")
    store.verify(BASELINE_PASS)
    store.verify(BASELINE_PASS, contents=True)
    store.require_chunks(BASELINE_PASS)
    store.require_chunks("experts=6")  # not called complete, so nothing is missing


def test_missing_chunks_of_a_whole_pass_are_named(tmp_path: Path) -> None:
    store = whole_run(tmp_path / "run")
    for index in (1, 3):
        store.chunk_path(BASELINE_PASS, index).unlink()
    with pytest.raises(
        StoreError, match=r"chunk-000001.agr is missing, and 1 more of baseline; run again with --resume"
    ):
        store.require_chunks(BASELINE_PASS)
    with pytest.raises(
        StoreError, match=r"chunk-000001.agr is missing; .* \(1 more of baseline are missing or damaged\)"
    ):
        store.verify(BASELINE_PASS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "is cut short"),
        (lambda data: data + b"x", "1 bytes too many"),
        (lambda data: b"", "cannot be read"),
        (lambda data: data[:40] + b"?" + data[41:], "has a damaged header"),
    ],
)
def test_damage_that_verifying_finds_without_reading_contents(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    store = whole_run(tmp_path / "run")
    path = store.chunk_path(BASELINE_PASS, 2)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=message) as caught:
        store.verify(BASELINE_PASS)
    assert str(path) in str(caught.value)


def test_damage_that_only_the_contents_show(tmp_path: Path) -> None:
    store = whole_run(tmp_path / "run")
    path = store.chunk_path(BASELINE_PASS, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    store.verify(BASELINE_PASS)
    with pytest.raises(StoreError, match="array codes does not match its hash; delete that file and run again"):
        store.verify(BASELINE_PASS, contents=True)
    path.write_bytes(store.chunk_path(BASELINE_PASS, 1).read_bytes())
    with pytest.raises(StoreError, match="holds chunk 1 of baseline"):
        store.verify(BASELINE_PASS)


def test_two_runs_of_equal_content_have_equal_bytes(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        run = make_run(tmp_path / name)
        run.write_chunk(BASELINE_PASS, 0, SMALL, {})
        run.write_report({"facts": {"model": "m", "corpus": "c"}})
        files.append({p.name: p.read_bytes() for p in run.path.rglob("*") if p.is_file()})
    assert files[0] == files[1]
    assert list(RunStore.open(tmp_path / "a").read_report()["facts"]) == ["model", "corpus"], "in their order"


def test_names_of_passes_become_safe_folders(tmp_path: Path) -> None:
    run = RunStore(tmp_path, {})
    name = "experts=6+kv:a.b=str:x/../y+model=ü"
    parts = run.chunk_path(name, 3).relative_to(tmp_path).parts
    assert parts == ("settings", "experts=6+kv%3Aa.b=str%3Ax%2F..%2Fy+model=%C3%BC", "chunk-000003.agr")


def test_a_chunk_in_the_wrong_place_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.write_chunk(BASELINE_PASS, 0, SMALL, {})
    run.chunk_path(BASELINE_PASS, 0).rename(run.chunk_path(BASELINE_PASS, 1))
    with pytest.raises(StoreError, match="holds chunk 0 of baseline"):
        run.read_chunk(BASELINE_PASS, 1)


def test_a_run_is_not_made_over_something_else(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(StoreError, match="already holds a run; continue it with --resume"):
        make_run(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(StoreError, match="exists and is not a run directory"):
        make_run(tmp_path / "other")
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["thesis.txt"]
    (tmp_path / "begun").mkdir()
    for name in (".lock", "engine.log", ".run.json.partial", "chunks.agr"):
        (tmp_path / "begun" / name).write_bytes(b"left by a run that was killed")
    make_run(tmp_path / "begun")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ('{"format": "agreement-run"', "cannot be read"),
        ("[]", "is not a run of agreement"),
        ('{"format": "other"}', "is not a run of agreement"),
        ('{"format": "agreement-run", "format_version": 2}', "format version 2, this program reads 1"),
        ('{"format": "agreement-run", "format_version": 1, "identity": {}}', "lacks 'about'"),
        (
            '{"format":"agreement-run","format_version":1,"identity":{},"about":{},"settings":{},"passes":{}}',
            "settings is {}",
        ),
        (
            '{"format":"agreement-run","format_version":1,"identity":3,"about":{},"settings":[],"passes":{}}',
            "identity is 3",
        ),
        (
            '{"format":"agreement-run","format_version":1,"identity":{"chunks":3},"about":{},"settings":[],"passes":{}}',
            "n_chunks is 3; record the run again",
        ),
        (
            (
                '{"format":"agreement-run","format_version":1,"identity":{"chunks":{"n_chunks":"many"}},"about":{},'
                '"settings":[],"passes":{}}'
            ),
            "n_chunks is 'many'",
        ),
        (
            '{"format":"agreement-run","format_version":1,"identity":{},"about":{},"settings":[3],"passes":{}}',
            "a setting is named 3",
        ),
    ],
)
def test_a_damaged_run_json_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(StoreError, match=message):
        RunStore.open(tmp_path)


def test_bytes_that_are_no_text_and_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not a run directory \(no run.json\)"):
        RunStore.open(tmp_path)
    (tmp_path / "run.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(StoreError, match="cannot be read"):
        RunStore.open(tmp_path)
    with pytest.raises(StoreError, match="is not a run directory"):
        RunStore.open(tmp_path / "run.json")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_a_run_json_with_any_byte_changed_opens_or_says_so(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "run"
    if not path.exists():
        make_run(path)
        (tmp_path / "whole").write_bytes((path / "run.json").read_bytes())
    damaged = bytearray((tmp_path / "whole").read_bytes())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (path / "run.json").write_bytes(damaged)
    message = "fine"
    try:
        RunStore.open(path).require_identity(IDENTITY)
    except StoreError as error:
        message = str(error)
    assert message
    assert "\n" not in message


def test_the_field_that_differs_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.require_identity(IDENTITY)
    other = {**IDENTITY, "options": {"n_threads": 4}}
    with pytest.raises(IdentityError, match=r"recorded with options.n_threads = 2, now it is 4; use the same"):
        run.require_identity(other)
    run.require_identity(other, ignore=("options",))
    with pytest.raises(IdentityError, match=r"options.repack = None, now it is True"):
        run.require_identity({**IDENTITY, "options": {"n_threads": 2, "repack": True}})
    with pytest.raises(IdentityError, match=r"chunks.fingerprint = ff, now it is None"):
        run.require_identity({k: v for k, v in IDENTITY.items() if k != "chunks"})


def test_reports_and_other_json(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(StoreError, match="no report yet; finish the run with --resume"):
        run.read_report()
    run.write_report({"clusters": ["ä"]})
    assert run.read_report() == {"clusters": ["ä"]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.write_report({"nll": float("nan")})  # a number that is none never reaches a report
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(StoreError, match="is not a JSON object"):
        read_json(tmp_path / "list.json", "")


def test_timings_pass_over_a_line_cut_short(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert run.read_timings() == []
    run.add_timing({"pass": "baseline", "tokens": 5})
    with (run.path / "timings.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"pass": "exp\n')
    run.add_timing({"pass": "experts=6", "tokens": 7})
    assert [entry["tokens"] for entry in run.read_timings()] == [5, 7]


# --- the lock ---


def hold(path: Path, ready: Any, leave: Any) -> None:
    with RunStore(path, {}).lock():
        ready.set()
        leave.wait(30)


def test_a_run_is_locked_against_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "LOCK_WAIT_SECONDS", 0.1)
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, leave))
    other.start()
    try:
        assert ready.wait(30)
        with pytest.raises(StoreError, match="is in use by another process; wait for it to end"):
            RunStore(tmp_path, {}).lock().__enter__()  # it must raise before the body
    finally:
        leave.set()
        other.join(30)
    with RunStore(tmp_path, {}).lock() as descriptor:
        assert os.fstat(descriptor).st_size == 0
    with RunStore(tmp_path, {}).lock():
        pass  # let go of again


def test_a_lock_lives_on_in_a_child_that_inherited_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "LOCK_WAIT_SECONDS", 0.1)
    wait = textwrap.dedent("import sys; print('up', flush=True); sys.stdin.read()")
    with RunStore(tmp_path, {}).lock() as descriptor:
        child = subprocess.Popen(
            [sys.executable, "-c", wait], pass_fds=(descriptor,), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
    with pytest.raises(AgreementError, match="in use"), RunStore(tmp_path, {}).lock():
        pass
    child.communicate(b"", timeout=30)
    with RunStore(tmp_path, {}).lock():
        pass
