"""Everything a user can get wrong, and everything that can go wrong: one clear line, exit 1, nothing half-written.

Each refusal is tried twice: through `agreement.sweep`, which raises, and through the command, which prints.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFReader
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

from agreement import ChunkOptions, compare, load_report, record, sweep
from agreement.cli import main
from agreement.errors import (
    AgreementError,
    CorpusError,
    EngineError,
    IdentityError,
    ModelFileError,
    NoEffectError,
    SettingError,
    StoreError,
)
from agreement.passes import Listener
from agreement.recording import Progress
from agreement.records import EngineOptions, Setting
from agreement.settings import parse_setting
from agreement.store import RunStore

ENGINE = ("-t", "1", "-b", "256", "--no-repack")
CUT = ("-c", "64", "--chunks", "12")
N_LONG = 100  # chunks of a run that is long enough to be disturbed


@dataclass(frozen=True)
class Place:
    """A folder with a good model, a good corpus, and a place for a run."""

    root: Path
    model: Path
    corpus: Path

    @property
    def out(self) -> Path:
        return self.root / "runs" / "run"


@pytest.fixture
def place(tmp_path: Path, qwen: Path, text_folder: Path) -> Place:
    return Place(tmp_path, qwen, text_folder)


def one_line(message: str) -> None:
    assert message
    assert "\n" not in message
    assert "Traceback" not in message


def check_command(expected: str, *arguments: str | Path) -> None:
    """The command prints exactly one line, with `expected` in it, and ends with 1."""
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert expected in line
    assert result.exit_code == 1


def refused(
    place: Place,
    kind: type[AgreementError],
    expected: str,
    *,
    model: Path | None = None,
    corpus: Path | None = None,
    experts: str = "4",
    out: Path | None = None,
) -> None:
    """`sweep` refuses, in both ways, and leaves every folder as it was."""
    model, corpus, out = model or place.model, corpus or place.corpus, out or place.out
    before = names(place.root)
    counts = [int(n) for n in experts.split(",")]
    with pytest.raises(kind) as caught:
        sweep(model, corpus, out, experts=counts, chunks=SHORT, options=FOUR_AT_A_TIME)
    assert type(caught.value) is kind
    one_line(str(caught.value))
    assert expected in str(caught.value)
    assert names(place.root) == before
    check_command(expected, "sweep", model, corpus, "--experts", experts, "-o", out, "-q", *CUT, *ENGINE)
    assert names(place.root) == before


# ---------------------------------------------------------------------------------------------------- model files


def test_no_such_model(place: Place) -> None:
    refused(place, ModelFileError, "no.gguf", model=place.root / "no.gguf")


def test_model_is_a_folder(place: Place) -> None:
    refused(place, ModelFileError, str(place.corpus), model=place.corpus)


@pytest.mark.parametrize("content", [b"", b"GG", b"# a model card, not a model\n" * 100, bytes(4096)])
def test_not_a_gguf(place: Place, content: bytes) -> None:
    path = place.root / "m.gguf"
    path.write_bytes(content)
    refused(place, ModelFileError, str(path), model=path)


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.999])
def test_truncated_gguf(place: Place, share: float) -> None:
    """Cut within the fixed head, the keys, the data, and its very end."""
    whole = place.model.read_bytes()
    path = place.root / "m.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    refused(place, ModelFileError, str(path), model=path)


def test_missing_shard(place: Place) -> None:
    shards = models.write_split(place.root / "part", 3)
    shards[1].unlink()
    for given in (shards[0], shards[2]):
        refused(place, ModelFileError, "part-00002-of-00003.gguf", model=given)


def test_dense_model(place: Place) -> None:
    path = models.write_model(place.root / "m.gguf", "llama", dense=True)
    refused(place, ModelFileError, "dense", model=path)


# ------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        ("0", "experts=0"),
        ("-1", "experts=-1"),
        ("17", "16 experts"),
        ("7,4,7", "7 is given twice"),
        ("7,8", "experts=8 is what"),
    ],
)
def test_impossible_expert_count(place: Place, experts: str, expected: str) -> None:
    if experts == "7,4,7":
        expected = "given twice"  # the list and the plan say it in their own words
    refused(place, SettingError, expected, experts=experts)


@pytest.mark.parametrize("text", ["", "7,,4", "seven", "7.5", "7;4", "7 4"])
def test_experts_that_are_no_list(place: Place, text: str) -> None:
    before = names(place.root)
    check_command("whole number", "sweep", place.model, place.corpus, "--experts", text, "-o", place.out, "-q")
    assert names(place.root) == before


@pytest.mark.parametrize("text", ["experts", "experts=7,6", "kv:a.b=int:x", "kv:a.b", "topk=4", "experts=4+experts=5"])
def test_settings_that_are_none(place: Place, text: str) -> None:
    before = names(place.root)
    with pytest.raises(SettingError) as caught:
        parse_setting(text)
    one_line(str(caught.value))
    check_command("", "sweep", place.model, place.corpus, "--setting", text, "-o", place.out, "-q")
    assert names(place.root) == before


def test_setting_given_in_two_ways(place: Place) -> None:
    with pytest.raises(SettingError, match="given twice"):
        sweep(place.model, place.corpus, place.out, experts=(4,), settings=(parse_setting("experts=4"),), chunks=SHORT)


# --------------------------------------------------------------------------------------------------------- corpora


def test_no_such_corpus(place: Place) -> None:
    refused(place, CorpusError, "nowhere", corpus=place.root / "nowhere")


def test_folder_without_usable_text(place: Place) -> None:
    folder = place.root / "texts"
    folder.mkdir()
    refused(place, CorpusError, str(folder), corpus=folder)
    (folder / "empty.txt").touch()
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\0\0" * 100)
    (folder / "latin.txt").write_bytes("Grüße\n".encode("latin-1") * 100)
    refused(place, CorpusError, str(folder), corpus=folder)


def test_text_shorter_than_a_chunk(place: Place) -> None:
    folder = place.root / "texts"
    folder.mkdir()
    (folder / "short.txt").write_text("a b c d e f", encoding="utf-8")
    refused(place, CorpusError, "64 tokens are needed in one document, the longest of 1 (short.txt)", corpus=folder)


# --------------------------------------------------------------------------------------------- output and options


def test_output_that_is_no_run(place: Place) -> None:
    place.out.mkdir(parents=True)
    (place.out / "thesis.txt").write_text("mine", encoding="utf-8")
    refused(place, StoreError, "is not a run directory")
    assert (place.out / "thesis.txt").read_text(encoding="utf-8") == "mine"


def test_output_that_is_a_file(place: Place) -> None:
    file = place.root / "file"
    file.write_text("mine", encoding="utf-8")
    refused(place, StoreError, str(file), out=file)
    refused(place, StoreError, str(file), out=file / "below")
    assert file.read_text(encoding="utf-8") == "mine"


def test_output_that_holds_a_run(place: Place) -> None:
    record(place.model, place.corpus, place.out, chunks=SHORT, options=FOUR_AT_A_TIME, in_process=True)
    before = snapshot(place.out)
    refused(place, StoreError, "already holds a run")
    assert snapshot(place.out) == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-c", "4"), "context of 4"),
        (("-c", "64", "--first", "63"), "first scored position 63"),
        (("-c", "64", "-b", "0"), "-b 0"),
        (("-c", "64", "-ub", "-3"), "-ub -3"),
        (("-c", "64", "-ctk", "q9_9"), "q9_9"),
        (("-c", "0"), "context of 0"),
        (("-c", "-5"), "context of -5"),
    ],
)
def test_options_that_cannot_be(place: Place, arguments: tuple[str, ...], expected: str) -> None:
    before = names(place.root)
    check_command(expected, "sweep", place.model, place.corpus, "--experts", "4", "-o", place.out, "-q", *arguments)
    assert names(place.root) == before


# --------------------------------------------------------------------------------------------- another run's folder


@pytest.fixture
def recorded(place: Place) -> Place:
    record(place.model, place.corpus, place.out, chunks=SHORT, options=FOUR_AT_A_TIME, in_process=True)
    return place


OTHERS: dict[str, tuple[str, Callable[[Place], dict[str, Any]]]] = {
    "model": ("model.digest", lambda p: {"model": models.write_model(p.root / "other.gguf", seed=1)}),
    "corpus": ("chunks.fingerprint", lambda p: {"corpus": write_corpus(p.root / "other", seed=1)}),
    "context": ("chunks.", lambda _: {"chunks": replace(SHORT, n_ctx=32)}),
    "chunks": ("chunks.", lambda _: {"chunks": replace(SHORT, n_chunks=11)}),
    "first": ("chunks.", lambda _: {"chunks": replace(SHORT, first=20)}),
    "seed": ("chunks.", lambda _: {"chunks": replace(SHORT, seed=1)}),
    "chunking": ("chunks.", lambda _: {"chunks": replace(SHORT, chunking="llama-perplexity")}),
    "logits": ("recording.logits", lambda _: {"logits": "top"}),
    "batch": ("options.n_batch", lambda _: {"options": replace(FOUR_AT_A_TIME, n_batch=128, n_ubatch=64)}),
    "cache": ("options.type_k", lambda _: {"options": replace(FOUR_AT_A_TIME, type_k="f32")}),
    "attention": ("options.flash_attn", lambda _: {"options": replace(FOUR_AT_A_TIME, flash_attn="off")}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_resuming_another_run(recorded: Place, what: str) -> None:
    field, other = OTHERS[what]
    given: dict[str, Any] = {
        "model": recorded.model,
        "corpus": recorded.corpus,
        "chunks": SHORT,
        "options": FOUR_AT_A_TIME,
    }
    given |= other(recorded)
    before = snapshot(recorded.out)
    model, corpus = given.pop("model"), given.pop("corpus")
    with pytest.raises(IdentityError) as caught:
        sweep(model, corpus, recorded.out, experts=(4,), resume=True, **given)
    one_line(str(caught.value))
    assert f"recorded with {field}" in str(caught.value)
    assert snapshot(recorded.out) == before


def test_resuming_another_run_from_the_command_line(recorded: Place) -> None:
    before = snapshot(recorded.out)
    arguments = ("--experts", "4", "-o", recorded.out, "-q", "--resume", "-c", "32", "--chunks", "12", *ENGINE)
    check_command("recorded with chunks.", "sweep", recorded.model, recorded.corpus, *arguments)
    assert snapshot(recorded.out) == before


def edited(run: Path, old: str, new: str) -> None:
    file = run / "run.json"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"format_version": 1', '"format_version": 2', "format version 2"),
        ('"format": "agreement-run"', '"format": "other"', "not a run of agreement"),
        ('"identity":', '"identiti":', "lacks 'identity'"),
        ("{", "", "cannot be read"),
    ],
)
def test_run_of_another_format(recorded: Place, old: str, new: str, expected: str) -> None:
    edited(recorded.out, old, new)
    before = snapshot(recorded.out)
    with pytest.raises(StoreError, match=expected) as caught:
        sweep(
            recorded.model, recorded.corpus, recorded.out, experts=(4,), chunks=SHORT, options=FOUR_AT_A_TIME,
            resume=True,
        )  # fmt: skip
    one_line(str(caught.value))
    check_command(expected, "compare", recorded.out, "--experts", "4", "-q")
    check_command(expected, "table", recorded.out)
    assert snapshot(recorded.out) == before


def test_folder_that_is_no_run(place: Place) -> None:
    before = names(place.root)
    for path in (place.root, place.root / "nothing"):
        for call in (lambda p: compare(p, experts=(4,)), load_report):
            with pytest.raises(StoreError) as caught:
                call(path)
            one_line(str(caught.value))
            assert str(path) in str(caught.value)
        check_command(str(path), "compare", path, "--experts", "4", "-q")
        check_command(str(path), "table", path)
        check_command(str(path), "gate", path, "--require", "experts=4 agreement>=90%")
    assert names(place.root) == before


# ------------------------------------------------------------------------------------------------ damaged recordings


def chunk_file(place: Place, name: str) -> Path:
    return place.out / ("chunks.agr" if name == "chunks" else f"{name}/chunk-000005.agr")


def cut_short(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda p: cut_short(p, 0),
    "cut in the head": lambda p: p.write_bytes(p.read_bytes()[:20]),
    "cut in the middle": lambda p: cut_short(p, 0.5),
    "cut at the end": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "flipped in the magic": lambda p: flip(p, 0),
    "flipped in the version": lambda p: flip(p, 8),
    "flipped in the header": lambda p: flip(p, 60),
    "flipped at the end": lambda p: flip(p, p.stat().st_size - 1),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["chunks", "baseline"])
def test_damaged_recording(recorded: Place, name: str, damage: str) -> None:
    path = chunk_file(recorded, name)
    DAMAGES[damage](path)
    before = snapshot(recorded.out)
    with pytest.raises(StoreError) as caught:
        compare(recorded.out, experts=(4,), in_process=True)
    one_line(str(caught.value))
    where = recorded.out if damage == "gone" else path
    assert str(where) in str(caught.value)
    after = snapshot(recorded.out)
    whole = {k for k in after if k.startswith("settings/")}
    assert all(f"chunk-00000{i}" not in k for k in whole for i in range(5, 10))  # nothing from the damage on
    assert {k: v for k, v in after.items() if k not in whole | {"run.json"}} == {
        k: v for k, v in before.items() if k != "run.json"
    }
    assert not RunStore.open(recorded.out).is_finished("experts=4")
    if name == "baseline":
        check_command(str(where), "compare", recorded.out, "--experts", "4", "-q")


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d not in ("flipped at the end", "gone")])
def test_damaged_recording_of_a_complete_run(recorded: Place, damage: str) -> None:
    """Nothing is left to do, but a later `compare` could not be done: said now."""
    arguments: dict[str, Any] = {"chunks": SHORT, "options": FOUR_AT_A_TIME, "in_process": True, "resume": True}
    sweep(recorded.model, recorded.corpus, recorded.out, experts=(6,), **arguments)
    path = chunk_file(recorded, "baseline")
    DAMAGES[damage](path)
    before = snapshot(recorded.out)
    with pytest.raises(StoreError) as caught:
        sweep(recorded.model, recorded.corpus, recorded.out, experts=(6,), **arguments)
    one_line(str(caught.value))
    assert str(path) in str(caught.value)
    assert snapshot(recorded.out) == before


def test_any_flipped_byte_of_a_recording_is_found(recorded: Place) -> None:
    """One bit at 400 seeded places: refused, or in padding that nobody reads."""
    path = chunk_file(recorded, "baseline")
    run = RunStore.open(recorded.out)
    data = path.read_bytes()
    arrays, meta = run.read_chunk("baseline", 5)
    kept = {name: array.copy() for name, array in arrays.items()}
    used = sum(array.nbytes for array in kept.values())
    found = 0
    for at in np.random.default_rng(7).choice(len(data), 400, replace=False):
        flip(path, int(at))
        try:
            again, other = run.read_chunk("baseline", 5)
        except StoreError as error:
            one_line(str(error))
            found += 1
        else:
            assert other == meta
            assert all(np.array_equal(again[name], array) for name, array in kept.items())
        path.write_bytes(data)
    assert found > 400 * 0.9 * used / len(data)


@pytest.mark.parametrize("damage", ["cut in the middle", "flipped at the end", "gone"])
@pytest.mark.parametrize("name", ["baseline", "settings/experts=4"])
def test_damage_is_mended_by_what_the_message_says(place: Place, name: str, damage: str) -> None:
    """The message says: delete that file and run again with --resume.  Done so, every byte is as it was."""
    arguments: dict[str, Any] = {"experts": (4, 2), "chunks": SHORT, "options": FOUR_AT_A_TIME, "in_process": True}
    sweep(place.model, place.corpus, place.out, **arguments)
    before = snapshot(place.out)
    path = chunk_file(place, name)
    DAMAGES[damage](path)
    if path.exists():
        with pytest.raises(StoreError, match="delete that file and run again with --resume"):
            RunStore.open(place.out).read_chunk(name.removeprefix("settings/"), 5)
        path.unlink()
    sweep(place.model, place.corpus, place.out, **arguments, resume=True)
    assert snapshot(place.out) == before


# ------------------------------------------------------------------------------------------------ the disk is full


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """Mount a file system of that size, which takes a superuser who may mount; elsewhere the test is skipped."""
    folder.mkdir()
    options = f"size={kilobytes}k"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def grow(folder: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", folder], check=True)


@pytest.mark.parametrize("kilobytes", [4, 60, 150, 300])
def test_disk_full(place: Place, kilobytes: int) -> None:
    """Full before the run begins, within the log, the baseline and the settings; resumed when there is room."""
    arguments: dict[str, Any] = {"experts": (4, 2), "chunks": SHORT, "options": FOUR_AT_A_TIME}
    whole = place.root / "whole" / "run"
    sweep(place.model, place.corpus, whole, **arguments)
    size = sum(len(content) for content in snapshot(whole).values())
    assert size > 300 * 1024
    with small_disk(place.root / "disk", kilobytes) as disk:
        out = disk / "run"
        with pytest.raises(StoreError) as caught:
            sweep(place.model, place.corpus, out, **arguments)
        one_line(str(caught.value))
        assert "No space left on device" in str(caught.value)
        assert str(out) in str(caught.value)
        assert not [name for name in names(disk) if "partial" in name]
        if (out / "run.json").exists():
            run = RunStore.open(out)
            for name in ("baseline", "experts=4", "experts=2"):
                for i in range(SHORT.n_chunks or 0):
                    if run.has_chunk(name, i):
                        run.read_chunk(name, i)  # whole, or it raises
        grow(disk, 4 * size // 1024)
        sweep(place.model, place.corpus, out, **arguments, resume=True)
        assert snapshot(out) == snapshot(whole)


def test_file_that_may_not_grow(place: Place) -> None:
    """The same without a mount: a limit on the size of any file, which a chunk of this vocabulary exceeds."""
    model = models.write_model(place.root / "m.gguf", n_vocab=8_000)
    limit = 250_000  # a chunk has 31 * 8,000 * 2 bytes of codes, about twice as much; the log stays far below
    arguments = ("sweep", model, place.corpus, "--experts", "4", "-o", place.out, "-q", *CUT, *ENGINE)
    command = command_line(*arguments)
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: cannot write {place.out}")
    assert "File too large" in line
    assert (result.returncode, result.stdout) == (1, "")
    assert {name for name in names(place.out) if "chunk-" in name} == set()
    assert run_command(*arguments, "--resume").returncode == 0


# -------------------------------------------------------------------------------------- two processes, one run folder


@contextlib.contextmanager
def started(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start the command in a process group of its own, as a shell does; nothing of it is left afterwards."""
    process = subprocess.Popen(
        command_line(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def n_chunks_there(out: Path) -> int:
    return len([name for name in names(out) if name.endswith(".agr")]) if out.exists() else 0


LONG_CUT = ("-c", "64", "--chunks", str(N_LONG))
LONG = ("--experts", "7,4,2", "-q", *LONG_CUT, *ENGINE)


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("long") / "texts", n_documents=6, n_words=500)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, qwen: Path, long_text: Path) -> dict[str, bytes]:
    """Return what a run of `LONG` that nobody disturbs leaves in a folder named `run`."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    assert run_command("sweep", qwen, long_text, "-o", out, *LONG).returncode == 0
    return snapshot(out)


def test_two_processes_on_one_run(place: Place, long_text: Path, unbroken: dict[str, bytes]) -> None:
    with started("sweep", place.model, long_text, "-o", place.out, *LONG) as first:
        wait_for(lambda: n_chunks_there(place.out) > 10)
        os.killpg(first.pid, signal.SIGSTOP)  # so that it is surely still there
        arguments = ("--experts", "7,4,2", "-q", "-o", place.out, *LONG_CUT, *ENGINE, "--resume")
        check_command("is in use by another process", "sweep", place.model, long_text, *arguments)
        os.killpg(first.pid, signal.SIGCONT)
        assert first.wait(300) == 0
    assert snapshot(place.out) == unbroken


# ------------------------------------------------------------------------------------- the engine crashes or is killed


def test_engine_that_crashes(place: Place) -> None:
    """float64 weights load, and the first decoding aborts the engine's process."""
    model = models.write_model(place.root / "m.gguf", float64=True)
    with pytest.raises(EngineError) as caught:
        sweep(model, place.corpus, place.out, experts=(4,), chunks=SHORT, options=FOUR_AT_A_TIME)
    message = str(caught.value)
    one_line(message)
    assert "died with SIG" in message
    assert "during preflight" in message
    assert str(place.out / "engine.log") in message
    assert n_chunks_there(place.out) == 1  # the token windows, no recording
    arguments = ("--experts", "4", "-o", place.root / "other", "-q", *CUT, *ENGINE)
    check_command("died with SIG", "sweep", model, place.corpus, *arguments)


def worker_of(pid: int) -> int:
    """Return the engine's process below `pid`."""
    (worker,) = (c for c in children(pid) if b"agreement.workers.child" in Path(f"/proc/{c}/cmdline").read_bytes())
    return worker


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_engine_killed_mid_pass(place: Place, number: signal.Signals) -> None:
    whole = place.root / "whole" / "run"
    arguments: dict[str, Any] = {"experts": (4, 2), "chunks": SHORT, "options": FOUR_AT_A_TIME}
    sweep(place.model, place.corpus, whole, **arguments)

    def kill(progress: Progress) -> None:
        if (progress.pass_name, progress.done) == ("experts=4", 4):
            os.kill(worker_of(os.getpid()), number)

    with pytest.raises(EngineError) as caught:
        sweep(place.model, place.corpus, place.out, **arguments, listener=Listener(progress=kill))
    message = str(caught.value)
    one_line(message)
    assert f"died with {number.name}" in message
    assert ("out of memory?" in message) == (number == signal.SIGKILL)
    assert "during experts=4 after chunk" in message
    assert message.endswith("engine.log; whole chunks are kept")
    assert "experts=4" not in RunStore.open(place.out).header["passes"]
    sweep(place.model, place.corpus, place.out, **arguments, resume=True)
    assert snapshot(place.out) == snapshot(whole)


# ---------------------------------------------------------------------------------------------- numbers that are none


def test_nan_in_every_logit_row(place: Place) -> None:
    model = models.write_model(place.root / "m.gguf", nan=True)
    with pytest.raises(EngineError, match="chunk 0, position 32: logits are NaN or infinite") as caught:
        sweep(model, place.corpus, place.out, experts=(4,), chunks=SHORT, options=FOUR_AT_A_TIME)
    one_line(str(caught.value))
    assert n_chunks_there(place.out) == 1
    arguments = ("--experts", "4", "-o", place.root / "other", "-q", *CUT, *ENGINE)
    check_command("NaN", "sweep", model, place.corpus, *arguments)


def poison(path: Path, token: int) -> None:
    """Make the embedding of one token NaN."""
    (tensor,) = (t for t in GGUFReader(path).tensors if t.name == "token_embd.weight")
    data = bytearray(path.read_bytes())
    width = int(tensor.shape[0])
    start = tensor.data_offset + 4 * width * token
    data[start : start + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(data)


def test_nan_in_a_later_chunk(place: Place) -> None:
    """A token that the first document lacks: the preflight sees nothing, the pass names the chunk, and keeps none."""
    folder = place.root / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("in the end " * 60, encoding="utf-8")
    (folder / "b.txt").write_text("in ~ the end " * 60, encoding="utf-8")
    model = models.write_model(place.root / "m.gguf")
    poison(model, models.byte_alphabet().index("~"))
    cutting = ChunkOptions(n_ctx=64, n_chunks=2)
    options = EngineOptions(n_threads=1, n_batch=64, repack=False)
    with pytest.raises(EngineError, match="baseline, chunk 1, rows from position 32 on: logits are NaN") as caught:
        sweep(model, folder, place.out, experts=(4,), chunks=cutting, options=options)
    one_line(str(caught.value))
    assert {name for name in names(place.out) if "chunk-" in name} == {"baseline/chunk-000000.agr"}


def test_setting_that_breaks_the_numbers(place: Place) -> None:
    """The baseline is sound and the setting is not: expert weights scaled beyond float32."""
    model = models.write_model(place.root / "m.gguf", "deepseek2")
    broken = Setting(
        name="huge", experts=4, overrides=parse_setting("kv:deepseek2.expert_weights_scale=float:1e38").overrides
    )
    with pytest.raises(EngineError, match=r"huge, chunk [0-9], rows from position [0-9]+ on: logits are") as caught:
        sweep(model, place.corpus, place.out, settings=(broken,), chunks=SHORT, options=FOUR_AT_A_TIME)
    one_line(str(caught.value))
    run = RunStore.open(place.out)
    assert run.is_finished("baseline")
    assert not run.is_finished("huge")
    broken_at = int(str(caught.value).partition("chunk ")[2].partition(",")[0])
    assert not any(run.has_chunk("huge", i) for i in range(broken_at, 12))


# ------------------------------------------------------------------------------------------- settings without effect


def test_count_stored_by_layer(place: Place) -> None:
    model = models.write_model(place.root / "m.gguf", per_layer_used=True)
    refused(place, NoEffectError, "one expert count a layer", model=model)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("kv:llama.expert_used_count=int:4", "architecture 'qwen3moe' does not read"),  # wrong architecture
        ("kv:qwen3moe.expert_used_count=float:4", "architecture 'qwen3moe' does not read"),  # wrong type
        ("kv:qwen3moe.expert_weights_scale=float:0.5", "architecture 'qwen3moe' does not read"),  # never looked at
        ("kv:general.name=str:other", "general.name=str:other"),  # read, but no number depends on it
    ],
)
def test_override_that_does_nothing(place: Place, text: str, cause: str) -> None:
    setting = parse_setting(text)
    with pytest.raises(NoEffectError) as caught:
        sweep(place.model, place.corpus, place.out, settings=(setting,), chunks=SHORT, options=FOUR_AT_A_TIME)
    one_line(str(caught.value))
    assert setting.name in str(caught.value)
    assert cause in str(caught.value)
    run = RunStore.open(place.out)
    assert not run.is_finished(setting.name)
    assert not any(run.has_chunk(setting.name, i) for i in range(12))
    check_command(text, "compare", place.out, "--setting", text, "-q")


def test_file_without_expert_width(place: Place) -> None:
    """The baseline loads; with another count llama.cpp expects other shapes, and the message says which key lacks."""
    model = models.write_model(place.root / "m.gguf", omit_expert_width=True)
    with pytest.raises(EngineError) as caught:
        sweep(model, place.corpus, place.out, experts=(4,), chunks=SHORT, options=FOUR_AT_A_TIME)
    one_line(str(caught.value))
    assert str(caught.value).startswith(f"experts=4: the engine cannot load {model}")
    assert "qwen3moe.expert_feed_forward_length is missing" in str(caught.value)
    run = RunStore.open(place.out)
    assert run.is_finished("baseline")
    assert not run.is_finished("experts=4")


# ------------------------------------------------------------------------------------------------------------ Ctrl-C


@pytest.mark.parametrize("n_files", [20, N_LONG + 50])
def test_ctrl_c(place: Place, long_text: Path, unbroken: dict[str, bytes], n_files: int) -> None:
    """Ctrl-C reaches the whole process group: one line, exit 1, no process left, and `--resume` ends the run."""
    arguments = ("sweep", place.model, long_text, "-o", place.out, *LONG)
    with started(*arguments) as process:
        wait_for(lambda: n_chunks_there(place.out) > n_files)
        worker = worker_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    (line,) = err.strip().splitlines()
    assert line.startswith("Error: interrupted")
    assert "--resume" in line
    assert (process.returncode, out) == (1, "")
    assert not Path(f"/proc/{worker}").exists()
    assert n_chunks_there(place.out) < 1 + 4 * N_LONG
    assert run_command(*arguments, "--resume").returncode == 0
    assert snapshot(place.out) == unbroken


def test_engine_killed_under_a_command(place: Place, long_text: Path, unbroken: dict[str, bytes]) -> None:
    """The line says how this command is gone on with."""
    arguments = ("sweep", place.model, long_text, "-o", place.out, *LONG)
    with started(*arguments) as process:
        wait_for(lambda: n_chunks_there(place.out) > 20)
        os.kill(worker_of(process.pid), signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    (line,) = err.strip().splitlines()
    assert line.startswith("Error: the engine's process died with SIGKILL")
    assert line.endswith("; whole chunks are kept; the same command with --resume goes on from there")
    assert (process.returncode, out) == (1, "")
    assert run_command(*arguments, "--resume").returncode == 0
    assert snapshot(place.out) == unbroken


def test_ctrl_c_through_the_library(place: Place) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(
            place.model, place.corpus, place.out, experts=(4,), chunks=SHORT, options=FOUR_AT_A_TIME,
            listener=Listener(progress=interrupt),
        )  # fmt: skip
    assert not [c for c in children(os.getpid()) if b"agreement.workers" in Path(f"/proc/{c}/cmdline").read_bytes()]
    sweep(place.model, place.corpus, place.out, experts=(4,), chunks=SHORT, options=FOUR_AT_A_TIME, resume=True)
