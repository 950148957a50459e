"""`agreement corpus`: look at a corpus, or build one once and use it many times."""

from __future__ import annotations

from pathlib import Path

import click

from agreement.cli import options


@click.group("corpus")
def corpus_group() -> None:
    """Look at a corpus, or save one for later runs."""


@corpus_group.command("show")
@click.argument("source", type=click.Path())
@options.corpus_options
def show_command(source: str, include: tuple[str, ...], exclude: tuple[str, ...], languages: tuple[str, ...]) -> None:
    """List documents and every file that was left out, with the reason.

    \b
    agreement corpus show ~/src/project --language python
    """
    from agreement.corpus import counted, load

    corpus = load(source, include=include, exclude=exclude, languages=languages)
    for document in corpus.documents:
        click.echo(f"{len(document.text):>9,}  {document.language or '-':<10}  {document.name}")
    for skipped in corpus.skipped:
        click.echo(f"  skipped  {skipped.reason:<28}  {skipped.name}")
    total = sum(len(d.text) for d in corpus.documents)
    reasons = ", ".join(f"{n} {reason}" for reason, n in counted(corpus.skipped).items()) or "nothing"
    click.echo(f"{corpus.name}: {len(corpus.documents)} documents, {total:,} characters; left out: {reasons}")
    click.echo(f"fingerprint {corpus.fingerprint}")


@corpus_group.command("build")
@click.argument("source", type=click.Path())
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@options.corpus_options
def build_command(
    source: str, out: Path, include: tuple[str, ...], exclude: tuple[str, ...], languages: tuple[str, ...]
) -> None:
    """Save a corpus as a data set folder that `sweep` takes as its CORPUS.

    \b
    agreement corpus build ~/src/project --language python -o corpora/project
    """
    from agreement.corpus import load, save

    corpus = load(source, include=include, exclude=exclude, languages=languages)
    save(corpus, out)
    click.echo(f"{out}: {len(corpus.documents)} documents, fingerprint {corpus.fingerprint}")
