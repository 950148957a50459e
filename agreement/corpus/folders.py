"""New folders: written beside their place under a hidden name and moved there when whole."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agreement.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder to fill; on success it becomes `target`, else nothing is left of it.

    Raises:
        CorpusError: Something is at `target` already, or the files cannot be written.
    """
    if target.exists():
        raise CorpusError(f"{target}: is there already; remove it or give another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            partial.chmod(0o755)  # mkdtemp makes a private folder; a corpus is to be read by others
            yield partial
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial)
            raise
    except OSError as error:
        raise CorpusError(f"{target}: cannot be written ({error.strerror or error}); nothing was kept") from error
