"""The bundled demo model and the corpora to run it on."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent
# In an installed wheel the corpora lie beside this file; in a checkout they are a top-level folder.
_CORPORA = _HERE / "corpora" if (_HERE / "corpora").is_dir() else _HERE.parents[1] / "corpora"

MODEL = _HERE / "demo-moe.gguf"
CORPORA = {"heldout-code": _CORPORA / "heldout-code", "stdlib": _CORPORA / "stdlib.toml"}
