"""`agreement gate`: requirements against a run, or against passes that stop as soon as the verdict is safe."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agreement.cli import options

if TYPE_CHECKING:
    from agreement.records import Judgement, Requirement
    from agreement.report import JudgementFormat


@click.command("gate")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("corpus", required=False, type=click.Path())
@click.option(
    "--require", "requirements", multiple=True, metavar="TEXT", help='E.g. "experts=7 agreement>=90%". Repeatable.'
)
@click.option(
    "--config", type=click.Path(path_type=Path), help="Requirements file.  [default: agreement.toml if there]"
)
@click.option("--against", type=click.Path(path_type=Path), help="An earlier run or report.json to be no worse than.")
@click.option(
    "--margin",
    "margins",
    multiple=True,
    metavar="TEXT",
    help='How much worse than --against is allowed, e.g. "agreement 1%", "kld 0.005". Repeatable.',
)
@click.option("--sequential", is_flag=True, help="Run MODEL over CORPUS until the verdict is safe.")
@click.option("--max-clusters", type=click.IntRange(min=6), default=60, show_default=True, help="Most documents drawn.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="With --sequential: keep the run here.")
@options.corpus_options
@click.option("-c", "--ctx", "n_ctx", type=int, default=512, show_default=True, help="Tokens a chunk (n_ctx).")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the order of documents."
)
@options.engine_options
@options.reading_options
@click.option("-q", "--quiet", is_flag=True, help="No plan and no progress.")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Confidence of every interval.")
@click.option("--format", "form", type=click.Choice(["text", "json", "junit"]), default="text", help="Output format.")
@click.pass_context
def gate_command(
    ctx: click.Context,
    /,
    run: Path,
    corpus: str | None,
    requirements: tuple[str, ...],
    config: Path | None,
    against: Path | None,
    margins: tuple[str, ...],
    confidence: float,
    form: JudgementFormat,
    sequential: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Judge a run against requirements: exit 0 passed, 3 failed, 4 inconclusive.

    A requirement passes only if its whole interval is on the good side of the bound. With --sequential the first
    argument is a model, the second a corpus, and documents are drawn until one requirement on agreement is decided.

    \b
    agreement gate runs/code --require "experts=7 agreement>=90%" --require "experts=6 kld<=0.05"
    agreement gate runs/code --against reports/last.json --margin "agreement 1%"
    agreement gate model.gguf ~/src/project --require "experts=7 agreement>=90%" --sequential
    """
    from agreement.analysis import changes
    from agreement.gate import exit_code, judge, not_worse, overall, parse_margin, parse_requirement, read_requirements
    from agreement.report import as_dict, render_judgements
    from agreement.summary import load_counts, load_report

    _check_kind(ctx, sequential=sequential)
    wanted = [parse_requirement(text) for text in requirements]
    default = Path("agreement.toml")
    if config is not None or (not wanted and against is None and default.exists()):
        wanted += read_requirements(config or default)
    if not wanted and against is None:
        raise click.UsageError('nothing to require: give --require "experts=7 agreement>=90%" or an agreement.toml')
    if sequential:
        if corpus is None or len(wanted) != 1:
            raise click.UsageError("--sequential takes a MODEL, a CORPUS and one --require")
        judgements = [_early(run, corpus, wanted[0], confidence, given, quiet=quiet)]
        verdict = overall(judgements)
        click.echo(render_judgements(judgements, verdict, form), nl=False)
        ctx.exit(exit_code(verdict))
    reports = {level: load_report(run, confidence=level) for level in {confidence, *_levels(wanted)}}
    judgements = [judge(reports[r.confidence or confidence], r) for r in wanted]
    if against is not None:
        earlier = as_dict(load_report(against, confidence=confidence))
        (now, _), (then, _) = load_counts(run), load_counts(against)
        for text in margins:
            metric, margin = parse_margin(text)
            paired = changes(now, then, metric, confidence=confidence)
            judgements += not_worse(reports[confidence], earlier, metric, margin, paired=paired)
    verdict = overall(judgements)
    click.echo(render_judgements(judgements, verdict, form), nl=False)
    ctx.exit(exit_code(verdict))


# What judges a run; everything else that the command takes is for the passes of --sequential.
_OF_A_RUN = {"against", "margins"}
_OF_BOTH = {"run", "requirements", "config", "sequential", "confidence", "form", "quiet"}


def _check_kind(ctx: click.Context, *, sequential: bool) -> None:
    """Refuse by name what the other kind of gate takes, instead of passing it over."""
    given = {
        p.name: p
        for p in ctx.command.params
        if p.name is not None and ctx.get_parameter_source(p.name) is click.core.ParameterSource.COMMANDLINE
    }
    if ctx.params["corpus"] is None:  # an argument left out counts as given
        given.pop("corpus", None)
    wrong = [
        _spelled(p, ctx.params[name])
        for name, p in given.items()
        if name not in _OF_BOTH and (name in _OF_A_RUN) == sequential
    ]
    if wrong and sequential:
        raise click.UsageError(f"{', '.join(wrong)}: --sequential judges a fixed bound alone; leave it out")
    run: Path = ctx.params["run"]
    if not sequential and run.suffix == ".gguf":
        raise click.UsageError(f"{run} is a model: give a run directory, or a CORPUS and --sequential to run it")
    if wrong:
        raise click.UsageError(
            f"{', '.join(wrong)}: only with --sequential; a run is judged with the text and options it was made with"
        )
    if ("against" in given) != ("margins" in given):
        raise click.UsageError("--against and --margin go together")


def _spelled(parameter: click.Parameter, value: Any) -> str:
    """Return an option as it is typed."""
    if isinstance(parameter, click.Argument):
        return parameter.human_readable_name
    return (parameter.secondary_opts if value is False else parameter.opts)[0]


def _levels(requirements: list[Requirement]) -> list[float]:
    """Return the confidences that requirements name themselves."""
    return [r.confidence for r in requirements if r.confidence is not None]


def _early(
    model: Path,
    corpus: str,
    requirement: Requirement,
    confidence: float,
    given: dict[str, Any],
    *,
    quiet: bool,
) -> Judgement:
    """Run the sequential gate, showing where it stands on standard error."""
    from agreement.cli.passes import setting_from, take_corpus
    from agreement.cli.progress import ProgressView
    from agreement.early import sequential_gate
    from agreement.errors import EngineDiedError
    from agreement.plan import ChunkOptions

    out, wishes = given.pop("out"), options.take_wishes(given)
    with contextlib.ExitStack() as stack:
        place = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agreement-"))) / "run"
        view = stack.enter_context(ProgressView(quiet=quiet))
        try:
            found = sequential_gate(
                model,
                take_corpus(corpus, given),
                requirement,
                setting_from(requirement.setting),
                place,
                max_clusters=given.pop("max_clusters"),
                confidence=confidence,
                chunks=ChunkOptions(n_ctx=given.pop("n_ctx"), seed=given.pop("seed")),
                options=options.take_engine_options(given),
                wishes=wishes,
                resume=out is not None,
                listener=view.sequential_listener(),
                looked=view.looked,
            )
        except EngineDiedError as error:
            if out is not None or not error.resumable:
                raise
            left = "nothing of the run is kept: give -o for a run that can be gone on with, and its log"
            raise type(error)(error.what, left=left, advice=error.advice) from error
    click.echo(found.assumption, err=True)
    return found.judgement
