"""Logits files to runs and back: no engine for the first, the tool's own format for the second."""

from __future__ import annotations

import shutil
from pathlib import Path

import models
import numpy as np
import pytest
from click.testing import CliRunner

import agreement
from agreement import compare
from agreement.cli import main
from agreement.errors import LogitsFileError, NoEffectError, StoreError, UsageError
from agreement.exchange import export_base, import_files
from agreement.gate import judge, parse_requirement
from agreement.kld import dequantise, iter_chunks, open_logits_file
from agreement.plan import ChunkOptions
from agreement.recording import baseline_rows
from agreement.records import Verdict
from agreement.store import RunStore
from agreement.summary import load_report

GOLD = Path(__file__).parent / "gold" / "kld"
TEXT = "def area(width, height):\n    return width * height\n\n\n" * 60


def test_two_files_give_the_tools_figures(tmp_path: Path) -> None:
    """Gold: experts-6.txt is what `llama-perplexity --kl-divergence` printed for these files (see record.py there)."""
    report = import_files(GOLD / "base.kld", [("experts=6", GOLD / "experts-6.kld")], tmp_path / "run")
    (row,) = report.rows
    assert (row.setting, row.experts, row.n_positions, row.n_clusters) == ("experts=6", 6, 124, 4)
    assert f"{100 * row.agreement.value:.3f}" == "75.806"  # Same top p
    assert row.kld.value == pytest.approx(0.111823, abs=1.4e-4)  # Mean KLD, from exact logits there, from codes here
    assert np.log(row.ppl_ratio.value) == pytest.approx(-0.102459, abs=1.3e-4)
    assert report.baseline_ppl == pytest.approx(4676.579814, rel=1e-6)  # both from the same codes
    assert any("two quantised files" in warning for warning in row.warnings)


def test_the_run_is_read_like_any_other(tmp_path: Path) -> None:
    import_files(GOLD / "base.kld", [("experts=6", GOLD / "experts-6.kld")], tmp_path / "run")
    report = load_report(tmp_path / "run")
    assert judge(report, parse_requirement("experts=6 agreement>=90%")).verdict is Verdict.FAIL
    assert report.facts["engine"].startswith("written by llama.cpp")


def test_import_then_export_gives_the_same_bytes(tmp_path: Path) -> None:
    import_files(GOLD / "base.kld", [], tmp_path / "run")
    export_base(tmp_path / "run", tmp_path / "again.kld")
    assert (tmp_path / "again.kld").read_bytes() == (GOLD / "base.kld").read_bytes()


def test_the_same_file_twice_is_no_setting(tmp_path: Path) -> None:
    shutil.copy(GOLD / "base.kld", tmp_path / "other.kld")
    with pytest.raises(NoEffectError, match="same bits"):
        import_files(GOLD / "base.kld", [("experts=6", tmp_path / "other.kld")], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_names_must_differ(tmp_path: Path) -> None:
    pair = ("experts=6", GOLD / "experts-6.kld")
    with pytest.raises(UsageError, match="name of its own"):
        import_files(GOLD / "base.kld", [pair, pair], tmp_path / "run")


def test_names_must_not_be_empty(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name is empty; give each file one"):
        import_files(GOLD / "base.kld", [("", GOLD / "experts-6.kld")], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_import_is_not_made_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine", encoding="utf-8")
    pair = [("experts=6", GOLD / "experts-6.kld")]
    with pytest.raises(StoreError, match="mine exists and is not a run directory"):
        import_files(GOLD / "base.kld", pair, tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    import_files(GOLD / "base.kld", pair, tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(StoreError, match="already holds a run, which an import cannot add to; choose another -o"):
        import_files(GOLD / "base.kld", pair, tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreError("the disk is full")])
def test_an_import_that_ends_early_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def stop(name: str, done: int, _total: int) -> None:
        if (name, done) == ("experts=6", 2):
            raise error

    with pytest.raises(type(error)):
        import_files(GOLD / "base.kld", [("experts=6", GOLD / "experts-6.kld")], tmp_path / "run", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_an_imported_run_has_no_engine_to_compare_with(tmp_path: Path) -> None:
    import_files(GOLD / "base.kld", [("experts=6", GOLD / "experts-6.kld")], tmp_path / "run")
    with pytest.raises(UsageError, match="came from logits files, with no engine to run; compare files"):
        compare(tmp_path / "run", experts=(4,))


def test_a_base_without_settings(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["kld", "import", str(GOLD / "base.kld"), "-o", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "alone makes no table: give the files of settings after it, or look at it with `agreement kld info" in (
        result.stderr
    )
    assert list(tmp_path.iterdir()) == []


def test_a_file_cut_short_is_used_only_if_asked(tmp_path: Path) -> None:
    data = (GOLD / "experts-6.kld").read_bytes()
    (tmp_path / "short.kld").write_bytes(data[: len(data) * 6 // 10])
    pair = [("experts=6", tmp_path / "short.kld")]
    with pytest.raises(LogitsFileError):
        import_files(GOLD / "base.kld", pair, tmp_path / "run")
    report = import_files(GOLD / "base.kld", pair, tmp_path / "run", allow_truncated=True)
    assert report.rows[0].n_positions == 2 * 31  # two of four chunks are whole
    assert any("2 of 4 chunks are missing" in note for note in report.notes)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exchange")
    text = folder / "text.py"
    text.write_text(TEXT)
    model = models.write_model(folder / "m.gguf")
    options = ChunkOptions(chunking="llama-perplexity", n_ctx=64, n_chunks=6)
    agreement.sweep(model, text, folder / "run", experts=[6], chunks=options, in_process=True)
    agreement.record(model, text, folder / "top", chunks=options, logits="top", in_process=True)
    return folder


def test_an_exported_recording_holds_the_recorded_log_probs(recorded: Path) -> None:
    """A log-prob above the tool's clip is off by at most our half code and its half code (16 / 65535 / 2)."""
    export_base(recorded / "run", recorded / "base.kld")
    run = RunStore.open(recorded / "run")
    for chunk in iter_chunks(open_logits_file(recorded / "base.kld")):
        rows = baseline_rows(*run.read_chunk("baseline", chunk.index))
        assert rows.codes is not None
        assert rows.step is not None
        assert rows.low is not None
        kept = rows.codes * rows.step[:, None] + rows.low[:, None]
        found = dequantise(chunk.rows)
        shown = kept > kept.max(axis=1, keepdims=True) - 15.9
        limit = float(rows.step.max()) / 2 + 16 / 65535 / 2 + 1e-5
        assert np.abs(found - kept)[shown].max() <= limit
        assert (found.argmax(axis=1) == rows.top_ids[:, 0]).mean() > 0.98
        assert (chunk.targets == rows.target).all()


def test_a_recording_of_the_top_alone_cannot_be_exported(recorded: Path) -> None:
    with pytest.raises(StoreError, match="--logits full"):
        export_base(recorded / "top", recorded / "no.kld")
    assert not (recorded / "no.kld").exists()


def test_a_recording_with_a_chunk_missing(recorded: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded / "run", tmp_path / "run")
    (tmp_path / "run" / "baseline" / "chunk-000001.agr").unlink()
    with pytest.raises(StoreError, match=r"baseline/chunk-000001.agr is missing; run again with --resume"):
        export_base(tmp_path / "run", tmp_path / "no.kld")
    with pytest.raises(LogitsFileError, match=r"cannot be written \(No such file or directory\); choose another place"):
        export_base(recorded / "run", tmp_path / "none" / "no.kld")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_commands(recorded: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    info = runner.invoke(main, ["kld", "info", str(GOLD / "base.kld")])
    assert info.exit_code == 0
    assert "llama.cpp" in info.output
    pair = [str(GOLD / "base.kld"), str(GOLD / "experts-6.kld"), "--name", "experts=6", "--format", "csv"]
    compared = runner.invoke(main, ["compare", *pair])
    imported = runner.invoke(main, ["kld", "import", *pair, "-o", str(tmp_path / "run")])
    assert compared.exit_code == imported.exit_code == 0
    assert compared.output.splitlines()[-1] == imported.output.splitlines()[-1]
    bad = runner.invoke(main, ["compare", *pair, "--experts", "6"])
    assert bad.exit_code == 2
    missing = runner.invoke(main, ["kld", "info", str(tmp_path / "none.kld")])
    assert missing.exit_code == 1
    assert missing.output.count("\n") == 1
