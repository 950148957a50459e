"""Mistakes that a newcomer made at the command line: each is refused by name, early, and leaves nothing behind."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from small_runs import FOUR_AT_A_TIME, SHORT, command_line, names, write_corpus

import agreement
from agreement.cli import gate, main
from agreement.early import sequential_gate
from agreement.engine import load_engine
from agreement.engine.options import CACHE_TYPES, PLAIN_TYPES, resolve_options
from agreement.errors import ContextError, EngineError, GateError, SettingError, UsageError
from agreement.model_file import read_model_file
from agreement.records import EngineOptions, MetadataOverride, Setting
from agreement.requirements import parse_requirement
from agreement.routing import Policy
from agreement.sequential.rules import FIRST_LOOK
from agreement.settings import BASELINE

CUT = ("-c", "64", "-t", "1", "--no-repack")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def refused(result: Result, code: int, message: str) -> None:
    """One line of error after the usage, if any, and nothing on standard output."""
    assert result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("Error: ")
    assert message in line
    assert result.stderr.splitlines()[:-1] == [] or result.stderr.startswith("Usage: ")
    assert result.exit_code == code


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("policy", ["ser=9,0.2", "ser=17,0.2"])
def test_policy_that_keeps_more_than_the_model_uses(policy: str, qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    """The model uses 8 of 16.  Refused by its header: there is no corpus to tokenise either."""
    arguments = ("--setting", policy, "-o", tmp_path / "run", *CUT)
    refused(run("sweep", qwen, tmp_path / "no corpus", *arguments), 1, "give K from 1 to 8, such as ser=4,0.2")
    assert names(tmp_path) == set()


def test_the_hook_says_what_to_give(qwen: Path) -> None:
    """Reached where the header has no single count; `experts=9` can run by itself, `ser=9,T` cannot."""
    model = read_model_file(qwen)
    options = EngineOptions(n_threads=1, n_batch=64, n_ubatch=64, repack=False)
    engine = load_engine(model, BASELINE, options, n_ctx=32, n_sequences=1, hooked=True)
    tokens = np.arange(32, dtype=np.int32)[None, :]
    with pytest.raises(SettingError, match=r"ser=9,0.5: the model selects 8 experts .*; give K from 1 to 8$"):
        next(engine.decode(tokens, 0, 31, routing=(Policy("ser", 9, 0.5),)))
    with pytest.raises(SettingError, match=r"experts=9: the model selects 8 .*; run it with --passes separate$"):
        next(engine.decode(tokens, 0, 31, routing=(Policy("experts", 9),)))
    engine.close()


# ------------------------------------------------------------------------------------------------------------- engine


@pytest.mark.parametrize("type_v", CACHE_TYPES)
def test_a_quantised_v_cache_needs_flash_attention(type_v: str) -> None:
    for flash_attn in ("on", "auto", "off"):
        options = EngineOptions(type_k="q8_0", type_v=type_v, flash_attn=flash_attn)
        if flash_attn == "off" and type_v not in PLAIN_TYPES:
            with pytest.raises(UsageError, match=f"-ctv {type_v} -fa off: .* give -fa on, or -ctv f16"):
                resolve_options(options, 64, 1)
        else:
            assert resolve_options(options, 64, 1).type_v == type_v


def test_a_quantised_v_cache_is_refused_before_anything_is_made(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    arguments = ("--experts", "7", "-o", tmp_path / "run", "-ctv", "q8_0", "-fa", "off", *CUT)
    refused(run("sweep", qwen, text_folder, *arguments), 1, "-ctv q8_0 -fa off: a quantised V cache needs flash")
    assert names(tmp_path) == set()


def test_a_context_refused_for_another_reason_than_memory(qwen: Path) -> None:
    """The tiny model's heads are narrower than a block of q8_0."""
    model = read_model_file(qwen)
    options = EngineOptions(n_threads=1, type_k="q8_0", flash_attn="on", repack=False)
    with pytest.raises(
        EngineError, match=r"the engine refuses these options: .*does not divide n_embd_head_k"
    ) as caught:
        load_engine(model, BASELINE, options, n_ctx=64, n_sequences=1)
    assert not isinstance(caught.value, ContextError)
    assert "lower -b" not in str(caught.value)
    assert "token_embd" not in str(caught.value)  # what was logged while the model loaded


# --------------------------------------------------------------------------------------------------------- empty paths


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "m.gguf", "text", "-o", ""),
        ("sweep", "", "text", "-o", "run"),
        ("record", "m.gguf", "text", "--out="),
        ("compare", "base.kld", "six.kld", "-o", ""),
        ("gate", "", "--require", "experts=7 agreement>=90%"),
        ("gate", "m.gguf", "text", "--sequential", "--require", "experts=7 agreement>=90%", "-o", ""),
        ("breakdown", ""),
        ("table", "run", ""),
        ("demo", "-o", ""),
        ("inspect", ""),
        ("corpus", "show", ""),
        ("corpus", "build", "text", "-o", ""),
        ("kld", "info", ""),
        ("kld", "import", "base.kld", "six.kld", "-o", ""),
        ("kld", "export", "run", ""),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run(*arguments), 2, "the path is empty; name a file or folder")
    assert names(tmp_path) == set()


# --------------------------------------------------------------------------------------------------------------- gate


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, qwen: Path, text_folder: Path) -> Path:
    out = tmp_path_factory.mktemp("made") / "run"
    agreement.sweep(qwen, text_folder, out, experts=[4], chunks=SHORT, options=FOUR_AT_A_TIME, in_process=True)
    return out


REQUIRE = ("--require", "experts=4 agreement>=1%")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--max-clusters", "60"), "--max-clusters: only with --sequential"),  # even the default, if it is typed
        (("-c", "128", "--seed", "3"), "-c, --seed: only with"),
        (("--include", "*.py", "--language", "python"), "--include, --language: only with"),
        (("-t", "4", "-ctv", "q8_0", "--no-mmap"), "-t, -ctv, --no-mmap: only with"),
        (("-o", "here"), "-o: only with"),
        (("text",), "CORPUS: only with"),
        (("--margin", "agreement 1%"), "--against and --margin go together"),
        (("--against", "other"), "--against and --margin go together"),
    ],
)
def test_options_of_the_sequential_gate(arguments: tuple[str, ...], named: str, made: Path) -> None:
    refused(run("gate", made, *arguments, *REQUIRE), 2, named)


def test_every_option_of_the_gate_is_of_a_run_or_of_sequential() -> None:
    parameters = {p.name for p in gate.gate_command.params}
    assert parameters >= gate._OF_A_RUN | gate._OF_BOTH
    of_sequential = parameters - gate._OF_A_RUN - gate._OF_BOTH
    assert of_sequential >= {"corpus", "out", "max_clusters", "n_ctx", "seed", "n_threads"}


def test_options_of_a_run_in_the_sequential_gate(qwen: Path, text_folder: Path) -> None:
    arguments = ("gate", qwen, text_folder, "--sequential", *REQUIRE, "--against", "run", "--margin", "agreement 1%")
    refused(run(*arguments), 2, "--against, --margin: --sequential judges a fixed bound alone; leave it out")


def test_a_model_where_a_run_is_wanted(qwen: Path) -> None:
    refused(run("gate", qwen, *REQUIRE), 2, "is a model: give a run directory, or a CORPUS and --sequential")
    refused(run("table", qwen), 1, "give a run directory, or the report.json of one")


def test_the_gate_of_a_run_may_be_quiet(made: Path) -> None:
    result = run("gate", made, *REQUIRE, "-q")
    assert (result.exit_code, result.stderr) == (0, "")


def test_plan_and_quiet_of_the_sequential_gate(qwen: Path, tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text", n_documents=8, n_words=100)
    arguments = ("gate", qwen, text, "--sequential", *REQUIRE, *CUT)
    loud, quiet = run(*arguments), run(*arguments, "-q")
    assert loud.exit_code == quiet.exit_code == 0
    assert loud.stdout == quiet.stdout
    plan = loud.stderr[: loud.stderr.index("preflight")].splitlines()
    assert [line.split()[0] for line in plan] == ["model", "corpus", "documents", "pass"]
    assert "at most 8, drawn with seed 0; one chunk of 64 tokens each, scored [32, 63)" in plan[2]
    assert "baseline and experts=4 side by side until the verdict is safe" in plan[3]
    for of_a_sweep in ("--record", "--logits", "more chunks", "as asked"):
        assert of_a_sweep not in loud.stderr
    (line,) = quiet.stderr.splitlines()
    assert line.startswith("sequential: ")  # what the verdict rests on is part of it


def test_most_documents_are_at_least_those_of_the_first_look() -> None:
    (option,) = (p for p in gate.gate_command.params if p.name == "max_clusters")
    assert isinstance(option.type, click.IntRange)
    assert option.type.min == FIRST_LOOK


@pytest.mark.parametrize(
    "setting",
    [
        Setting("experts=9", experts=9),
        Setting("kv:a.b=int:1", overrides=(MetadataOverride("a.b", "int", 1),)),
        Setting("experts=4+kv:a.b=int:1", experts=4, overrides=(MetadataOverride("a.b", "int", 1),)),
    ],
)
def test_settings_that_cannot_ride_beside_the_baseline(
    setting: Setting, qwen: Path, text_folder: Path, tmp_path: Path
) -> None:
    requirement = parse_requirement(f"{setting.name} agreement>=50%")
    with pytest.raises(GateError, match=r"experts=N with N below 8, ser=K,T or topp=P .*`agreement sweep` this one"):
        sequential_gate(qwen, text_folder, requirement, setting, tmp_path / "run")
    assert names(tmp_path) == set()


def test_too_few_documents_leave_no_run(qwen: Path, text_folder: Path, tmp_path: Path) -> None:
    arguments = ("gate", qwen, text_folder, "--sequential", *REQUIRE, *CUT, "-o", tmp_path / "run")
    refused(run(*arguments), 1, "the corpus has 4 documents long enough for a chunk: 4 clusters are fewer than the 6")
    assert names(tmp_path) == set()


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize(
    ("command", "called", "end"),
    [
        (("sweep", "m", "t", "-o", "r"), "agreement.runs.sweep", "the same command with --resume goes on from there"),
        (("compare", "r", "--experts", "4"), "agreement.runs.compare", "kept: the same command goes on from there"),
        (("gate", "m", "t", "--sequential", *REQUIRE), "agreement.early.sequential_gate", "with -o whole chunks are"),
        (("kld", "import", "b", "f", "-o", "r"), "agreement.exchange.import_files", "interrupted"),
        (("corpus", "build", "t", "-o", "c"), "agreement.corpus.load", "interrupted"),
    ],
)
def test_what_an_interrupt_leaves(
    command: tuple[str, ...], called: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_given: Any, **_named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(called, interrupted)
    monkeypatch.setattr("agreement.cli.passes._default_settings", lambda _model: ())
    monkeypatch.setattr("agreement.cli.passes.start_spare", lambda: None)
    monkeypatch.chdir(tmp_path)
    result = run(*command)
    refused(result, 1, end)
    if end == "interrupted":
        assert result.stderr == "Error: interrupted\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_output_that_cannot_be_written(made: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(command_line("table", made), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "Error: cannot read or write the output: No space left on device\n"
    assert done.returncode == 1
