"""A command group that loads commands when they are called and turns the package's errors into one line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from agreement.errors import AgreementError


class AgreementGroup(click.Group):
    """Loads commands lazily; errors that the package raises on purpose end with one line and exit code 1."""

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted({*super().list_commands(ctx), *self._lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, importing its module if need be."""
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute = self._lazy[cmd_name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except AgreementError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            raise click.ClickException(
                "interrupted; whole chunks are kept: the same command with --resume goes on from there"
            ) from None
