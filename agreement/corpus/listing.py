"""Listing: the files of a folder or a git checkout, each with a reason if it is not to be read.

In: a folder.  Out: `Listing`. Nothing is opened here: a name alone may be a pipe or point out of the folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from agreement.records import Skipped

_GIT_TIMEOUT = 120  # seconds
_SHORT_COMMIT = 12  # hex digits


@dataclass(frozen=True)
class Listing:
    """Files found below a folder.

    Attributes:
        name: What to call the corpus.
        files: `(name, path)` of each regular file, sorted by name.
        skipped: What is there and not to be read.
        notes: Remarks, e.g. the commit.
    """

    name: str
    files: tuple[tuple[str, Path], ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...] = ()


def list_folder(root: Path) -> Listing:
    """List everything below a folder; hidden folders and links to folders are not entered."""
    names: set[str] = set()
    skipped: list[Skipped] = []

    def unreadable(error: OSError) -> None:
        name = Path(error.filename).relative_to(root).as_posix()
        skipped.append(Skipped(_printable(f"{name}/"), f"unreadable: {error.strerror}"))

    for folder, subfolders, files in os.walk(root, onerror=unreadable):
        prefix = Path(folder).relative_to(root)
        names.update((prefix / name).as_posix() for name in files)
        for name in [*subfolders]:
            relative = (prefix / name).as_posix()
            if name.startswith("."):
                skipped.append(Skipped(_printable(f"{relative}/"), "hidden folder"))
                subfolders.remove(name)
            elif (Path(folder) / name).is_symlink():
                names.add(relative)
    files_found, left_out = _sorted_out(root, names)
    return Listing(root.resolve().name, files_found, (*skipped, *left_out))


def list_git(root: Path) -> Listing | str:
    """List the tracked files of a git checkout as they are in the working tree.

    Returns:
        The listing, named `folder@commit` with `+dirty` if tracked files differ from the commit; or, if git is not
        there or refuses, one line that says why.
    """
    git = shutil.which("git")
    if git is None:
        return "git is not installed: every file of the folder is listed, tracked or not"
    try:
        tracked = _git(git, root, "ls-files", "-z").split(b"\0")
        untracked = _git(git, root, "ls-files", "-z", "--others", "--exclude-standard").count(b"\0")
        dirty = bool(_git(git, root, "status", "--porcelain", "--untracked-files=no"))
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        first_line = said.decode(errors="replace").strip().split("\n")[0]
        return f"git cannot list this checkout ({first_line}): every file of the folder is listed, tracked or not"
    try:
        commit = _git(git, root, "rev-parse", "--verify", "HEAD").decode().strip()
    except subprocess.SubprocessError:
        commit = ""
    names = {os.fsdecode(name) for name in tracked if name}
    hidden = {_hidden_part(name) for name in names} - {""}
    files, skipped = _sorted_out(root, {name for name in names if not _hidden_part(name)})
    state = "with changes since" if dirty else "unchanged since"
    notes = [f"git commit {commit}, tracked files {state}" if commit else "git checkout without a commit"]
    if untracked:
        notes.append(f"{untracked} untracked file(s) not read")
    return Listing(
        name=f"{root.resolve().name}@{commit[:_SHORT_COMMIT] or 'none'}{'+dirty' if dirty else ''}",
        files=files,
        skipped=(*(Skipped(_printable(name), "hidden folder") for name in sorted(hidden)), *skipped),
        notes=tuple(notes),
    )


def _git(git: str, root: Path, *arguments: str) -> bytes:
    # A checkout is somebody else's: no variable of a surrounding git command, no file-system monitor it may
    # configure, no lock and no write into its index.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    command = [git, "-c", "core.fsmonitor=false", "-C", str(root), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=_GIT_TIMEOUT)  # noqa: S603  # a fixed command
    return done.stdout


def _hidden_part(name: str) -> str:
    """Return the outermost hidden folder of a file's name with a closing slash, or nothing."""
    parts = name.split("/")[:-1]
    for depth, part in enumerate(parts, start=1):
        if part.startswith("."):
            return "/".join(parts[:depth]) + "/"
    return ""


def _sorted_out(root: Path, names: set[str]) -> tuple[tuple[tuple[str, Path], ...], list[Skipped]]:
    inside = root.resolve()
    files: list[tuple[str, Path]] = []
    skipped: list[Skipped] = []
    for name in sorted(names):
        reason = _reason_in_name(name) or _reason_not_to_open(inside / name, inside)
        if reason:
            skipped.append(Skipped(_printable(name), reason))
        else:
            files.append((name, root / name))
    return tuple(files), skipped


def _reason_in_name(name: str) -> str:
    """Return why a file is left out for its name alone, or nothing."""
    if name != _printable(name):
        return "name is not UTF-8"
    return "hidden file" if name.rpartition("/")[2].startswith(".") else ""


def _reason_not_to_open(path: Path, root: Path) -> str:
    """Return why a path below `root` (itself resolved) is not to be read as a file, or nothing."""
    try:
        linked = path.is_symlink()
        if not path.resolve().is_relative_to(root):  # the link may also be one of the folders on the way
            return "symlink pointing outside"
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "symlink to nothing" if linked else "missing: tracked, not in the working tree"
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, up to Python 3.12
        return f"unreadable: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(mode):
        return "symlink to a folder" if linked else "submodule: a checkout of its own"
    return "" if stat.S_ISREG(mode) else "not a regular file"


def _printable(name: str) -> str:
    """Return a name with the bytes that are not UTF-8 spelled in hex."""
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")
