"""`agreement demo`: the whole job on the bundled model, on text it has never seen and on text it has."""

from __future__ import annotations

from pathlib import Path

import click

from agreement.cli.output import show_reports
from agreement.workers.spawn import start_spare


@click.command("demo")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Where to put runs.",
)
@click.option("--chunks", type=click.IntRange(min=2), default=64, show_default=True, help="Chunks a corpus.")
def demo_command(out: Path, chunks: int) -> None:
    """Sweep the bundled model over held-out code and over code it was trained on, print both tables and a gate.

    Takes about a minute. The model is a small trained MoE (8 of 32 experts); the first corpus was written after it
    was trained and by other hands, the second is part of what it was trained on. What an earlier demo has done is
    not done again.
    """
    start_spare()  # before anything heavy is loaded here
    from agreement.cli.progress import ProgressView
    from agreement.corpus import load
    from agreement.demo import CORPORA, MODEL
    from agreement.gate import judge, overall, parse_requirement
    from agreement.plan import ChunkOptions
    from agreement.report import render_judgements
    from agreement.runs import sweep

    reports = []
    for name, source in CORPORA.items():
        with ProgressView() as view:
            report = sweep(
                MODEL,
                load(source),
                out / name,
                experts=(7, 6, 4, 2),
                chunks=ChunkOptions(n_chunks=chunks),
                resume=True,
                listener=view.listener(),
            )
        reports.append(report)
        show_reports([report], "text")
        click.echo()
    requirement = parse_requirement("experts=7 agreement>=90%")
    click.echo(f'agreement gate {out / next(iter(CORPORA))} --require "experts=7 agreement>=90%"')
    judgements = [judge(reports[0], requirement)]
    click.echo(render_judgements(judgements, overall(judgements), "text"), nl=False)
