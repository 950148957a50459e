"""Every notebook runs from top to bottom and defines no statistics of its own."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the kernel's own libraries warn of their own deprecations
        NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(tmp_path))
    said = "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    assert "experts=7" in said
    assert "expert bytes" in said  # the table itself, not only what is printed beside it
    assert "minus experts=7" in said


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_defines_no_statistics(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            tree = ast.parse(cell.source)
            assert not any(isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef) for node in ast.walk(tree))
            imported = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
            assert not {"numpy", "scipy", "statistics"} & set(imported)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
