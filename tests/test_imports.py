"""The package's shape: who may import whom, which outside library has which door, what a module must say of itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "agreement"
MODULES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 450

_RECORDS = {"errors", "records"}
_PASSES = _RECORDS | {"settings", "model_file", "chunks", "engine", "preflight", "scoring", "store"}

# stage: what it may import.  Everything flows one way: text, chunks, engine, recording, scores, intervals, report.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "records": {"errors"},
    "settings": _RECORDS | {"routing"},
    "corpus": _RECORDS,
    "chunks": _RECORDS,
    "model_file": _RECORDS,
    "memory": _RECORDS,
    "streaming": _RECORDS | {"memory", "model_file"},
    "routing": _RECORDS,
    "engine": _RECORDS | {"settings", "routing"},
    "preflight": _RECORDS | {"engine", "scoring"},
    "scoring": _RECORDS,
    "store": _RECORDS,
    "kld": _RECORDS,
    "recording": _PASSES,
    "onepass": _PASSES | {"routing", "recording"},
    "runner": _PASSES | {"memory", "streaming", "routing", "recording", "onepass"},
    "workers": _PASSES | {"streaming", "recording", "runner"},
    "plan": _PASSES | {"memory", "streaming", "corpus", "recording", "workers"},
    "checks": _RECORDS | {"streaming", "workers", "plan"},
    "intervals": _RECORDS,
    "analysis": _RECORDS | {"intervals", "settings"},
    "summary": _RECORDS | {"analysis", "intervals", "model_file", "recording", "scoring", "store"},
    "passes": _PASSES | {"streaming", "recording", "onepass", "workers", "plan", "checks", "summary"},
    "requirements": _RECORDS,
    "gate": _RECORDS | {"requirements"},
    "sequential": _RECORDS | {"intervals", "requirements"},
    "breakdown": _RECORDS | {"intervals", "store", "recording"},
    "report": _RECORDS | {"breakdown"},
    "demo": set(),
}
# The layers on top: everything that runs a whole job may use everything below, but never the command line.
TOP = {"cli", "__main__", "__init__", "runs", "exchange", "early"}
NEVER_BELOW_CLI = {"cli", "__main__"}

# library: the only places that may import it
DOORS: dict[str, tuple[str, ...]] = {
    "llama_cpp": ("engine/",),
    "datasets": ("corpus/",),
    "gguf": ("model_file/", "demo/export.py"),
    "torch": ("demo/",),
    "tokenizers": ("demo/",),
    "click": ("cli/", "demo/train.py"),
    "rich": ("cli/", "report/"),
    "scipy": ("intervals/",),
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def stage_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(source: str) -> set[str]:
    """Return the dotted names that a module imports anywhere in it, `from agreement import x` as `agreement.x`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test sees them"
            module = str(node.module)
            names |= {f"agreement.{alias.name}" for alias in node.names} if module == "agreement" else {module}
    return names


def stages_imported(source: str) -> set[str]:
    return {name.split(".")[1] for name in imported(source) if name.startswith("agreement.")}


def test_what_imported_sees() -> None:
    source = "from agreement import kld\nimport numpy as np\ndef f():\n    from agreement.store.run import RunStore\n"
    assert imported(source) == {"agreement.kld", "numpy", "agreement.store.run"}
    assert stages_imported(source) == {"kld", "store"}


def test_every_stage_stands_in_the_table() -> None:
    assert {stage_of(path) for path in MODULES} == ALLOWED.keys() | TOP


def test_every_stage_has_a_row_in_the_docs() -> None:
    """Whoever looks for the room of a line of code finds it in `docs/architecture.md`."""
    text = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1] for line in text.partition("## Modules")[2].partition("##")[0].splitlines() if "|" in line
    ]
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([a-z_/]+)`", row)}
    assert named == {stage for stage in ALLOWED.keys() | TOP if not stage.startswith("__")}


def test_the_table_has_no_circle() -> None:
    order: list[str] = []
    while len(order) < len(ALLOWED):
        free = [s for s, allowed in ALLOWED.items() if s not in order and allowed <= set(order)]
        assert free, f"in a circle: {sorted(ALLOWED.keys() - set(order))}"
        order += free


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_point_one_way(path: Path) -> None:
    stage = stage_of(path)
    found = stages_imported(path.read_text(encoding="utf-8")) - {stage}
    if stage in ALLOWED:
        assert found <= ALLOWED[stage]
    elif stage not in NEVER_BELOW_CLI:
        assert not found & NEVER_BELOW_CLI


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_each_outside_library_has_one_door(path: Path) -> None:
    for library in {name.split(".")[0] for name in imported(path.read_text(encoding="utf-8"))} & DOORS.keys():
        assert relative(path).startswith(DOORS[library]), f"{library} has its door in {DOORS[library]}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_says_what_it_is_for_and_stays_short(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_LINES
    docstring = ast.get_docstring(ast.parse(source)) or ""
    assert re.search(r"[.?:]$", docstring.split("\n")[0]), "the first line is a sentence, or says what a drawing shows"


@pytest.mark.parametrize("stage", sorted(ALLOWED.keys() - {"errors", "records"}))
def test_a_stage_says_what_flows_in_and_out(stage: str) -> None:
    # The stage's own module, or any module of its folder: the stage as a whole has to say it.
    paths = [path for path in MODULES if stage_of(path) == stage]
    docstrings = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in paths]
    assert any(re.search(r"\bin\b.*\bout\b", text, re.IGNORECASE | re.DOTALL) for text in docstrings)


def loaded_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT.parent)
    return {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}


HELP = """
from agreement.cli import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code in (0, None), end.code
"""


def test_help_loads_nothing_heavy() -> None:
    heavy = {"numpy", "scipy", "datasets", "gguf", "llama_cpp", "torch", "tokenizers", "xxhash"}
    assert not loaded_after(HELP) & heavy


def test_pure_stages_load_no_engine_and_no_data_sets() -> None:
    stages = ("scoring", "store", "intervals", "analysis", "chunks", "settings", "kld", "corpus", "gate")
    loaded = loaded_after("\n".join(f"import agreement.{stage}" for stage in stages))
    assert not loaded & {"datasets", "llama_cpp", "torch", "gguf", "click"}
