"""A command group that loads commands when they are called and turns the package's errors into one line."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click

from agreement.errors import AgreementError, EngineDiedError

_RESUME = "the same command with --resume goes on from there"
_AGAIN = "the same command goes on from there"
# How a command that was cut off is gone on with, by its name; of the others nothing is left.
_GO_ON = {"sweep": _RESUME, "record": _RESUME, "compare": _AGAIN, "demo": _AGAIN, "gate": _AGAIN}


class _GivenPath(click.Path):
    """A path as an option describes it, and not an empty one.

    `Path("")` is the current folder: an unset variable in `-o "$OUT"` would be taken for it.
    """

    def __init__(self, described: click.Path) -> None:
        super().__init__()
        self.__dict__.update(described.__dict__)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value == "":
            self.fail("the path is empty; name a file or folder (is a shell variable unset?)", param, ctx)
        return super().convert(value, param, ctx)


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
        _refuse_empty_paths(command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            with _terminated_like_interrupted():
                return super().invoke(ctx)
        except EngineDiedError as error:
            how = _GO_ON.get(ctx.invoked_subcommand or "") if error.resumable else None
            raise click.ClickException(f"{error}; {how}" if how else str(error)) from error
        except AgreementError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            command = ctx.invoked_subcommand or ""
            kept = "with -o whole chunks are kept, and" if command == "gate" else "whole chunks are kept:"
            left = f"; {kept} {_GO_ON[command]}" if command in _GO_ON else ""
            raise click.ClickException(f"interrupted{left}") from None
        except OSError as error:  # a full disk under the output, say; what the package reads and writes it names itself
            if isinstance(error, BrokenPipeError):  # the reader had enough, which click ends quietly
                raise
            where = error.filename or "the output"
            raise click.ClickException(f"cannot read or write {where}: {error.strerror or error}") from error


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does: temporary files are deleted, and one line says how to go on."""
    mine = threading.current_thread() is threading.main_thread()  # only there handlers can be set
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _refuse_empty_paths(command: click.Command) -> None:
    """Let every path that a command takes refuse an empty text, below a group too."""
    for parameter in command.params:
        if type(parameter.type) is click.Path:
            parameter.type = _GivenPath(parameter.type)
    if isinstance(command, click.Group):
        for below in command.commands.values():
            _refuse_empty_paths(below)
