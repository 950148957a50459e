"""`agreement sweep`, `record` and `compare`: the commands that run an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agreement.cli import options
from agreement.cli.output import show_reports
from agreement.workers.spawn import start_spare

if TYPE_CHECKING:
    from agreement.plan import ChunkOptions
    from agreement.records import Corpus, Setting
    from agreement.report import Format

_FORMATS = ["text", "markdown", "csv", "json", "html"]


def _chosen(experts: str | None, extra: tuple[str, ...]) -> tuple[Setting, ...]:
    from agreement.settings import parse_experts

    listed = parse_experts(experts) if experts is not None else ()
    return (*listed, *(setting_from(text) for text in extra))


def setting_from(text: str) -> Setting:
    """Return the setting that a user wrote: a routing policy, or what `parse_setting` reads."""
    from agreement.records import Setting
    from agreement.routing import parse_policy
    from agreement.settings import parse_setting

    return Setting(name=str(parse_policy(text))) if text.startswith(("ser=", "topp=")) else parse_setting(text)


def _default_settings(model: str) -> tuple[Setting, ...]:
    """Return the cuts that people try: one and two experts fewer, a half, a quarter."""
    from agreement.model_file import read_model_file
    from agreement.settings import experts_setting

    used = read_model_file(model).n_expert_used or 8
    counts = sorted({n for n in (used - 1, used - 2, used // 2, used // 4) if 1 <= n < used}, reverse=True)
    return tuple(experts_setting(n) for n in counts)


def _take_chunk_options(given: dict[str, Any]) -> ChunkOptions:
    from agreement.plan import ChunkOptions

    names = ("chunking", "n_ctx", "first", "seed")
    return ChunkOptions(n_chunks=given.pop("n_chunks") or None, **{name: given.pop(name) for name in names})


def take_corpus(source: str, given: dict[str, Any]) -> Callable[[], Corpus]:
    """Take the corpus options out of a command's arguments and return a function that loads the corpus."""
    from agreement.corpus import load

    names = ("include", "exclude", "languages")
    return partial(load, source, **{name: given.pop(name) for name in names})


@click.command("sweep")
@click.argument("model", type=click.Path())
@click.argument("corpus", type=click.Path())
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The run directory to make.")
@options.settings_options
@click.option(
    "--noise-floor", is_flag=True, help="Also run all experts again, in another batch shape and with other threads."
)
@options.corpus_options
@options.chunk_options
@options.recording_options
@options.engine_options
@options.reading_options
@click.option(
    "--passes",
    type=click.Choice(["auto", "one", "separate"]),
    default="auto",
    show_default=True,
    help="All settings in one pass through the router hook, or one model load each.",
)
@click.option(
    "--record",
    "keep_recording",
    is_flag=True,
    help="Keep the baseline's recording in one pass, too, for `agreement compare`.",
)
@click.option("--plan", "plan_only", is_flag=True, help="Print the plan and stop; -o is not needed.")
@click.option("--format", "form", type=click.Choice(_FORMATS), default="text", help="Format of the table.")
@click.option("-q", "--quiet", is_flag=True, help="No plan and no progress.")
def sweep_command(
    model: str,
    corpus: str,
    out: Path | None,
    experts: str | None,
    extra_settings: tuple[str, ...],
    form: Format,
    quiet: bool,
    plan_only: bool,
    **given: Any,
) -> None:
    """Run the baseline and every setting over the same chunks, then print the table.

    CORPUS is a file, a folder, a git checkout, a corpus spec (.toml) or a corpus saved before.

    \b
    agreement sweep model.gguf ~/src/project --experts 7,6,4,2 -o runs/project
    agreement sweep model.gguf ~/src/project --experts 7,6,4,2 --plan
    """
    if plan_only and given["resume"]:
        raise click.UsageError("--plan is for a run that has not begun; leave out --resume")
    if out is None and not plan_only:
        raise click.UsageError("Missing option '-o' / '--out'.")
    start_spare()  # before anything heavy is loaded here
    from agreement.cli.progress import ProgressView, plan_lines
    from agreement.plan import plan_sweep
    from agreement.runs import sweep

    settings = _chosen(experts, extra_settings) or _default_settings(model)
    wishes = options.take_wishes(given)
    text = take_corpus(corpus, given)
    given |= {
        "settings": settings,
        "chunks": _take_chunk_options(given),
        "options": options.take_engine_options(given),
        "wishes": wishes,
    }
    if out is None or plan_only:
        del given["resume"]
        for line in plan_lines(plan_sweep(model, text, **given), every=True):
            click.echo(line)
        return
    with ProgressView(quiet=quiet) as view:
        report = sweep(model, text, out, listener=view.listener(), **given)
    show_reports([report], form)


@click.command("record")
@click.argument("model", type=click.Path())
@click.argument("corpus", type=click.Path())
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The run directory to make.")
@options.corpus_options
@options.chunk_options
@options.recording_options
@options.engine_options
@options.reading_options
@click.option("-q", "--quiet", is_flag=True, help="No plan and no progress.")
def record_command(model: str, corpus: str, out: Path, quiet: bool, **given: Any) -> None:
    """Record the baseline alone; `agreement compare` scores settings against it later.

    \b
    agreement record model.gguf ~/src/project -o runs/project
    agreement compare runs/project --experts 7,6
    """
    start_spare()  # before anything heavy is loaded here
    from agreement.cli.progress import ProgressView
    from agreement.runs import record

    wishes = options.take_wishes(given)
    text = take_corpus(corpus, given)
    with ProgressView(quiet=quiet) as view:
        record(
            model,
            text,
            out,
            chunks=_take_chunk_options(given),
            options=options.take_engine_options(given),
            wishes=wishes,
            listener=view.listener(),
            **given,
        )
    click.echo(f"recorded in {out}; next: agreement compare {out} --experts N,N,...")


@click.command("compare")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, type=click.Path())
@options.settings_options
@click.option("--name", "names", multiple=True, metavar="SETTING", help="With FILES: name of each, e.g. experts=6.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="With FILES: keep the result as a run directory.")
@click.option("--allow-truncated", is_flag=True, help="With FILES: use the whole chunks of files that were cut short.")
@click.option(
    "--model",
    type=click.Path(),
    help="Another model file with the same vocabulary (e.g. a quantisation), or the recorded one in a new place.",
)
@click.option("--format", "form", type=click.Choice(_FORMATS), default="text", help="Format of the table.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def compare_command(
    run: Path,
    files: tuple[str, ...],
    experts: str | None,
    extra_settings: tuple[str, ...],
    names: tuple[str, ...],
    out: Path | None,
    allow_truncated: bool,
    model: str | None,
    form: Format,
    quiet: bool,
) -> None:
    """Score settings against a recording made before, over its chunks and with its engine options.

    Or, with no engine at all, logits FILES of llama-perplexity against a base file given as RUN.

    Chunks that are already scored are kept, so an interrupted comparison goes on where it was.

    \b
    agreement compare runs/project --experts 5
    agreement compare runs/project --model model-Q4_K_M.gguf
    agreement compare base.kld exp6.kld --name experts=6
    """
    if files:
        if experts or extra_settings or model:
            raise click.UsageError("logits files are compared without an engine: no --experts, --setting or --model")
        _compare_files(run, files, names, out, allow_truncated, form)
        return
    if run.is_file():
        raise click.UsageError(f"{run} is a file; give the logits files of settings after it")
    if names or out or allow_truncated:
        raise click.UsageError(
            "--name, -o and --allow-truncated are for logits files; settings are added to the run they belong to"
        )
    from agreement.cli.progress import ProgressView
    from agreement.runs import compare

    with ProgressView(quiet=quiet) as view:
        report = compare(run, settings=_chosen(experts, extra_settings), model=model, listener=view.listener())
    show_reports([report], form)


def _compare_files(
    base: Path, files: tuple[str, ...], names: tuple[str, ...], out: Path | None, allow_truncated: bool, form: Format
) -> None:
    from tempfile import TemporaryDirectory

    from agreement.cli.kld import chunk_progress, named_files
    from agreement.exchange import import_files

    with TemporaryDirectory(prefix="agreement-") as folder:
        place = out or Path(folder) / base.stem
        report = import_files(
            base,
            named_files(files, names),
            place,
            allow_truncated=allow_truncated,
            keep_logits=out is not None,
            progress=chunk_progress(),
        )
    show_reports([report], form)
