"""agreement: how often does a Mixture-of-Experts model's output change when it runs with fewer experts?

The main calls: `sweep`, its halves `record` and `compare`, and `load_report`.  The stages below them are modules of
their own; `docs/architecture.md` shows how they fit together.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from agreement.plan import ChunkOptions
    from agreement.runs import compare, record, sweep
    from agreement.summary import load_report

_HOMES = {
    "ChunkOptions": "agreement.plan",
    "compare": "agreement.runs",
    "load_report": "agreement.summary",
    "record": "agreement.runs",
    "sweep": "agreement.runs",
}

__all__ = ["ChunkOptions", "__version__", "compare", "load_report", "record", "sweep"]


def __getattr__(name: str) -> Any:
    """Import the public calls when they are first used: `agreement --help` must not load numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'agreement' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = getattr(home, name)
    globals()[name] = value
    return value
