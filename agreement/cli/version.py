"""`agreement --version`: the package's version and the engine's build."""

from __future__ import annotations

import click

from agreement import __version__


def print_version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    """Print both and end the program, if the option was given."""
    if not value or ctx.resilient_parsing:
        return
    click.echo(f"agreement {__version__} ({_engine()})")
    ctx.exit()


def _engine() -> str:
    from agreement.engine import engine_build
    from agreement.errors import EngineError

    try:
        return engine_build()
    except EngineError as error:
        return str(error)
