"""The command line as a user meets it: help, formats, exit codes, and that documented commands exist."""

from __future__ import annotations

import csv
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import click
import models
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import agreement
from agreement.analysis import changes, counts_to_json
from agreement.cli import main
from agreement.cli.options import Size
from agreement.plan import ChunkOptions
from agreement.summary import load_counts

ROOT = Path(__file__).parents[1]
TEXT = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n\n"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a corpus of eight files, and a run of two settings."""
    folder = tmp_path_factory.mktemp("cli")
    models.write_model(folder / "m.gguf")
    (folder / "text").mkdir()
    for i in range(8):
        (folder / "text" / f"{i}.py").write_text(f"# file {i}\n" + TEXT.replace("Point", f"Point{i}") * 20)
    agreement.sweep(
        folder / "m.gguf",
        folder / "text",
        folder / "run",
        experts=[7, 2],
        chunks=ChunkOptions(n_ctx=64, n_chunks=16),
        in_process=True,
    )
    return folder


def all_commands(group: click.Group, prefix: str = "agreement") -> list[tuple[str, click.Command]]:
    found: list[tuple[str, click.Command]] = []
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        found.append((f"{prefix} {name}", command))
        if isinstance(command, click.Group):
            found += all_commands(command, f"{prefix} {name}")
    return found


@pytest.mark.parametrize(("name", "command"), all_commands(main), ids=lambda x: x if isinstance(x, str) else "")
def test_every_command_explains_itself(name: str, command: click.Command) -> None:
    assert command.help
    if not isinstance(command, click.Group) and name != "agreement demo":
        assert f"{name} " in command.help, "the help shows an example"
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}"


def fenced_lines(text: str) -> list[str]:
    """Return the lines inside code fences that hold shell commands."""
    found, inside, shell = [], False, False
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            inside = not inside
            shell = inside and line[3:].strip() in ("", "sh", "bash", "console")
        elif shell:
            found.append(line.strip())
    return found


def documented_commands() -> list[str]:
    return [
        f"{path.name}: {line}"
        for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for line in fenced_lines(path.read_text(encoding="utf-8"))
        if line.startswith("agreement ")
    ]


@pytest.mark.parametrize("documented", documented_commands())
def test_documented_commands_exist(documented: str) -> None:
    """Each parses: command, options and number of arguments are real."""
    words = shlex.split(documented.split(": ", 1)[1], comments=True)[1:]
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, words[0]
        command, words = found, words[1:]
    if not isinstance(command, click.Group):
        command.make_context(command.name, [w for w in words if w != "…"])


def test_readme_shows_commands() -> None:
    assert any("agreement sweep" in line for line in documented_commands())


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom agreement.cli import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "print([m for m in ('numpy', 'scipy', 'datasets', 'llama_cpp', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_names_the_engine() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert agreement.__version__ in result.output
    assert "llama-cpp-python 0." in result.output


def test_table_as_json(place: Path) -> None:
    data = json.loads(run("table", place / "run", "--format", "json").output)
    assert [row["setting"] for row in data["rows"]] == ["experts=7", "experts=2"]
    for row in data["rows"]:
        assert row["n_positions"] == 16 * 31
        assert row["n_clusters"] == 8
        for metric in ("agreement", "ppl_ratio", "kld"):
            assert row[metric]["low"] <= row[metric]["value"] <= row[metric]["high"]
        assert 0 <= row["agreement"]["value"] <= 1


def test_every_format_has_the_same_rows(place: Path) -> None:
    agreements = [
        row["agreement"]["value"] for row in json.loads(run("table", place / "run", "--format", "json").output)["rows"]
    ]
    rows = list(csv.DictReader(io.StringIO(run("table", place / "run", "--format", "csv").output)))
    assert [float(row["agreement"]) for row in rows] == agreements
    for form in ("text", "markdown", "html"):
        output = run("table", place / "run", "--format", form).output
        assert "experts=7" in output
        assert "experts=2" in output


def test_two_runs_in_one_table(place: Path) -> None:
    both = [place / "run", place / "run"]
    assert len(json.loads(run("table", *both, "--format", "json").output)["reports"]) == 2
    rows = list(csv.DictReader(io.StringIO(run("table", *both, "--format", "csv").output)))
    assert [row["run"] for row in rows] == ["run"] * 4
    assert run("table", *both, "--format", "html").exit_code == 1


def test_differences_are_paired(place: Path) -> None:
    result = run("table", place / "run", "--against", "experts=7")
    assert "minus experts=7" in result.output
    missing = run("table", place / "run", "--against", "experts=3")
    assert missing.exit_code == 1
    assert "experts=7, experts=2" in missing.output


def test_differences_for_programs(place: Path) -> None:
    """One JSON document and one CSV table, whatever is asked for beside the reports."""
    one, both = [place / "run"], [place / "run", place / "run"]
    extra = ("--against", "experts=7", "--format")
    found = json.loads(run("table", *one, *extra, "json").output)
    plain = json.loads(run("table", *one, "--format", "json").output)
    (difference,) = found.pop("differences")
    assert found == plain
    assert (difference["setting"], difference["against"]) == ("experts=2", "experts=7")
    several = json.loads(run("table", *both, *extra, "json").output)["reports"]
    assert [report["differences"] for report in several] == [[difference], [difference]]
    rows = list(csv.DictReader(io.StringIO(run("table", *one, *extra, "csv").output)))
    assert [(r["metric"], float(r["value"])) for r in rows] == [
        (name, difference[name]["value"]) for name in ("agreement", "log_ppl", "kld")
    ]
    joined = list(csv.DictReader(io.StringIO(run("table", *both, *extra, "csv").output)))
    assert joined == [{"run": "run", **row} for row in rows] * 2
    text = run("table", *both, *extra, "text").output
    assert text.count("minus experts=7") == 2
    refused = run("table", *one, *extra, "html")
    assert refused.exit_code == 2
    assert "--format html shows no differences" in refused.output


def test_differences_that_cannot_be_shown(place: Path, tmp_path: Path) -> None:
    """The error names the run; a table without a line is none."""
    report = json.loads((place / "run" / "report.json").read_text(encoding="utf-8"))
    report["settings"] = [s for s in report["settings"] if s["setting"] == "experts=7"]
    (tmp_path / "one.json").write_text(json.dumps(report), encoding="utf-8")
    missing = run("table", place / "run", tmp_path / "one.json", "--against", "experts=2")
    assert missing.exit_code == 1
    assert missing.output.startswith(f"Error: {tmp_path / 'one.json'}: the run has no setting 'experts=2'")
    alone = run("table", tmp_path / "one.json", "--against", "experts=7")
    assert alone.exit_code == 1
    assert alone.output.strip() == (
        f"Error: {tmp_path / 'one.json'}: experts=7 is the only setting of the run; there is none to hold against it"
    )


def test_differences_of_policies_are_quoted(place: Path, tmp_path: Path) -> None:
    """`ser=4,0.2` has a comma."""
    text = (place / "run" / "report.json").read_text(encoding="utf-8").replace('"experts=2"', '"ser=4,0.2"')
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    for against, other in (("experts=7", "ser=4,0.2"), ("ser=4,0.2", "experts=7")):
        output = run("table", tmp_path / "r.json", "--against", against, "--format", "csv").output
        rows = list(csv.DictReader(io.StringIO(output)))
        assert [(r["setting"], r["against"], r["metric"]) for r in rows] == [
            (other, against, metric) for metric in ("agreement", "log_ppl", "kld")
        ]
        assert {None, ""}.isdisjoint(r["confidence"] for r in rows)


@pytest.mark.parametrize(
    ("requirement", "code", "word"),
    [
        ("experts=7 agreement>=10%", 0, "PASS"),
        ("experts=2 agreement>=99%", 3, "FAIL"),
        ("experts=2 kld<=0.0001", 3, "FAIL"),
        ("experts=9 agreement>=50%", 1, "experts=7, experts=2"),
        ("experts=7 agreement>=150%", 1, "150"),
        ("experts=7 speed>=1", 1, "speed"),
    ],
)
def test_gate_exit_codes(place: Path, requirement: str, code: int, word: str) -> None:
    result = run("gate", place / "run", "--require", requirement)
    assert result.exit_code == code
    assert word in result.output


def test_gate_says_how_many_clusters_would_settle_it(place: Path) -> None:
    value = json.loads(run("table", place / "run", "--format", "json").output)["rows"][0]["agreement"]["value"]
    result = run("gate", place / "run", "--require", f"experts=7 agreement>={value - 1e-4!r}")
    assert result.exit_code == 4
    assert "clusters in all" in result.output


def test_gate_reads_its_file(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("gate", place / "run").exit_code == 2
    (tmp_path / "agreement.toml").write_text('[gate]\nrequire = ["experts=7 agreement>=10%"]\n')
    assert run("gate", place / "run").exit_code == 0
    assert run("gate", place / "run", "--config", tmp_path / "none.toml").exit_code == 1


def test_gate_against_an_earlier_report_is_paired(place: Path, tmp_path: Path) -> None:
    """The same run again changed in no cluster: a margin of 0 holds. One hit less of 16 x 31 is a change of -1/496."""
    assert run("gate", place / "run", "--against", place / "run", "--margin", "agreement 0%").exit_code == 0
    counts, _ = load_counts(place / "run")
    better = counts_to_json(counts)
    better["settings"][0]["counts"]["n_agree"][0] += 1  # type: ignore[index]  # JSON-able columns
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(better))
    then, _ = load_counts(earlier)
    change = changes(counts, then, "agreement")["experts=7"]
    assert change.value == pytest.approx(-1 / 496)
    assert run("gate", place / "run", "--against", earlier, "--margin", "agreement 5%").exit_code == 0
    assert run("gate", place / "run", "--against", earlier).exit_code == 2


def test_inspect_reads_the_header_alone(place: Path, tmp_path: Path) -> None:
    result = run("inspect", place / "m.gguf")
    assert "qwen3moe" in result.output
    assert "16 routed" in result.output
    shards = models.write_split(tmp_path / "m", 3)
    assert run("inspect", shards[1]).output.count("qwen3moe") >= 1
    shards[2].unlink()
    missing = run("inspect", shards[0])
    assert missing.exit_code == 1
    assert "00003-of-00003" in missing.output


def test_a_corpus_built_once_gives_the_same_run(place: Path, tmp_path: Path) -> None:
    built = run("corpus", "build", place / "text", "-o", tmp_path / "saved", "--exclude", "7.py")
    assert built.exit_code == 0
    assert "7 documents" in built.output
    shown = run("corpus", "show", place / "text", "--exclude", "7.py")
    assert shown.output.splitlines()[-1].split()[-1] == built.output.split()[-1]  # the fingerprint
    swept = run(
        "sweep", place / "m.gguf", tmp_path / "saved", "-o", tmp_path / "run", "--experts", "7", "-c", "64", "-q"
    )
    assert swept.exit_code == 0, swept.output
    assert "experts=7" in swept.output


def test_sweep_says_what_it_will_do_before_it_does(place: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "agreement", "sweep", place / "m.gguf", place / "text", "-o", tmp_path / "run"),
            *("--experts", "6", "-c", "64", "--chunks", "8", "--noise-floor", "--format", "json"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    said = done.stderr
    for word in (
        "8 of 16 experts",
        "8 documents",
        "8 of 64 tokens",
        "248 positions",
        "full",
        "top",
        "preflight",
        "time",
    ):
        assert word in said
    assert said.index("passes") < said.index("baseline: 8/8")
    rows = json.loads(done.stdout)["rows"]
    assert [row["setting"] for row in rows] == ["experts=8,again", "experts=6"]
    assert rows[0]["agreement"]["value"] > rows[1]["agreement"]["value"]


def test_record_then_compare(place: Path, tmp_path: Path) -> None:
    common = ("-c", "64", "--chunks", "16", "-q")
    assert run("record", place / "m.gguf", place / "text", "-o", tmp_path / "run", *common).exit_code == 0
    result = run("compare", tmp_path / "run", "--experts", "7,2", "--format", "csv", "-q")
    assert result.exit_code == 0
    ours = [row["agreement"] for row in csv.DictReader(io.StringIO(result.output))]
    swept = [
        row["agreement"] for row in csv.DictReader(io.StringIO(run("table", place / "run", "--format", "csv").output))
    ]
    assert ours == swept
    assert run("compare", tmp_path / "run", "-q").exit_code == 1


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("300000", 300_000),
        ("1.5G", 1_500_000_000),
        ("200GiB", 200 * 2**30),
        ("0.3m", 300_000),
        ("64 KiB", 65_536),
        ("2tb", 2 * 10**12),
        ("0", 0),
        ("Auto", -1),
        ("off", 0),
        # 0.1 GiB is 107374182.4 bytes
        ("0.1Gi", 107_374_182),
    ],
)
def test_sizes_by_hand(text: str, expected: int) -> None:
    assert Size(auto=-1, off=0).convert(text, None, None) == expected


@given(number=st.integers(0, 10**12), unit=st.sampled_from(["", "k", "M", "G", "T"]), binary=st.booleans())
def test_sizes_are_exact(number: int, unit: str, binary: bool) -> None:
    power = "kMGT".index(unit) + 1 if unit else 0
    text = f"{number}{unit}{'i' if binary and unit else ''}B"
    assert Size().convert(text, None, None) == number * (1024 if binary and unit else 1000) ** power


@given(st.text(max_size=8))
def test_sizes_of_any_text(text: str) -> None:
    """A number, or a refusal that shows what was given; never another exception."""
    try:
        found = Size().convert(text, None, None)
    except click.BadParameter as error:
        message = error.message
        found = None
    assert found >= 0 if found is not None else repr(text) in message


def test_a_size_that_is_none() -> None:
    done = CliRunner().invoke(main, ["sweep", "m.gguf", "texts", "-o", "run", "--hold", "much"])
    assert done.exit_code == 2
    assert "'much' is no number of bytes such as 300000, 1.5G or 200GiB, 'auto', 'off'" in done.output
    done = CliRunner().invoke(main, ["sweep", "m.gguf", "texts", "-o", "run", "--memory", "-5"])
    assert done.exit_code == 2
