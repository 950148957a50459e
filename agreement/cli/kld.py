"""`agreement kld`: the logits files of llama-perplexity, with no engine present."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agreement.cli.output import show_reports

if TYPE_CHECKING:
    from collections.abc import Callable

    from agreement.report import Format

_FORMATS = ["text", "markdown", "csv", "json", "html"]
_truncated = click.option("--allow-truncated", is_flag=True, help="Use the whole chunks of a file that was cut short.")


@click.group("kld")
def kld_group() -> None:
    """Read and write the logits files of `llama-perplexity --kl-divergence-base`."""


@kld_group.command("info")
@click.argument("file", type=click.Path())
@_truncated
def info_command(file: str, allow_truncated: bool) -> None:
    """Show what a file holds, who wrote it where that shows, and whether it is whole.

    \b
    agreement kld info base.kld
    """
    from agreement.kld import facts, open_logits_file

    found = facts(open_logits_file(file, allow_truncated=allow_truncated, every_row=True))
    width = max(map(len, found))
    for name, value in found.items():
        click.echo(f"{name:<{width}}  {value}")


def named_files(files: tuple[str, ...], names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (name, file) of each setting's file; without `--name` a file is called by its stem."""
    if names and len(names) != len(files):
        raise click.UsageError(f"{len(files)} files of settings and {len(names)} --name; give one each")
    return list(zip(names or tuple(Path(f).stem for f in files), files, strict=True))


@kld_group.command("import")
@click.argument("base", type=click.Path())
@click.argument("files", nargs=-1, type=click.Path())
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The run directory to make.")
@click.option("--name", "names", multiple=True, metavar="SETTING", help="Name of each file in turn, e.g. experts=6.")
@click.option("--keep-logits/--drop-logits", default=True, help="Keep the base's distribution in the run.")
@_truncated
@click.option("--format", "form", type=click.Choice(_FORMATS), default="text", help="Format of the table.")
def import_command(
    base: str,
    files: tuple[str, ...],
    out: Path,
    names: tuple[str, ...],
    keep_logits: bool,
    allow_truncated: bool,
    form: Format,
) -> None:
    """Make a run from a base file and files of settings, which `table`, `gate` and `breakdown` read like any other.

    \b
    agreement kld import base.kld exp6.kld --name experts=6 -o runs/from-files
    """
    from agreement.exchange import import_files

    if not files:
        raise click.UsageError(
            f"{base} alone makes no table: give the files of settings after it, or look at it with "
            f"`agreement kld info {base}`"
        )
    report = import_files(
        base,
        named_files(files, names),
        out,
        allow_truncated=allow_truncated,
        keep_logits=keep_logits,
        progress=chunk_progress(),
    )
    show_reports([report], form)


@kld_group.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
def export_command(run: Path, file: Path) -> None:
    """Write a run's recording as a base file that `llama-perplexity --kl-divergence` accepts.

    \b
    agreement kld export runs/code base.kld
    """
    from agreement.exchange import export_base

    size = export_base(run, file, progress=chunk_progress())
    click.echo(f"{file}: {size:,} bytes")


def chunk_progress() -> Callable[[str, int, int], None]:
    """Return a listener that shows chunks done on standard error, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)

    def advance(name: str, done: int, total: int) -> None:
        if console.is_terminal:
            console.print(f"{name}: {done}/{total} chunks", end="\n" if done == total else "\r", markup=False)

    return advance
