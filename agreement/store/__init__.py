"""Recordings on disk: versioned, atomic, checked.  The format is described in `docs/formats.md`."""

from agreement.store.arrays import Arrays, read_arrays, write_arrays, write_file
from agreement.store.run import BASELINE_PASS, RUN_FILE, RunStore, read_json, refuse_foreign

__all__ = [
    "BASELINE_PASS",
    "RUN_FILE",
    "Arrays",
    "RunStore",
    "read_arrays",
    "read_json",
    "refuse_foreign",
    "write_arrays",
    "write_file",
]
