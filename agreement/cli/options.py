"""Options shared by several commands, named as in llama.cpp where it has a name."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from agreement.records import EngineOptions
    from agreement.streaming import Wishes

AUTO = -1  # of a size: left to the plan
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class ChunkCount(click.ParamType[int]):
    """A positive number, or `all`, which becomes 0."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        if str(value).lower() == "all":
            return 0
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor 'all'", param, ctx)
        if number < 1:
            self.fail(f"{number} is not a positive number of chunks", param, ctx)
        return number


class Size(click.ParamType[int]):
    """A number of bytes: `300000`, `1.5G`, `200GiB`; k, M, G and T are powers of 1000, with an `i` of 1024.

    Args:
        words: What may stand instead of a number.
    """

    name = "BYTES"
    _UNITS = "kmgt"

    def __init__(self, **words: int) -> None:
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes."""
        text = str(value).strip().lower()
        if text in self._words:
            return self._words[text]
        found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(?:([kmgt])(i?))?b?", text)
        if found is None:
            others = "".join(f", {word!r}" for word in self._words)
            self.fail(f"{value!r} is no number of bytes such as 300000, 1.5G or 200GiB{others}", param, ctx)
        number, unit, binary = found.groups()
        power = self._UNITS.index(unit) + 1 if unit else 0
        # A fraction of a byte is rounded down; `Fraction` keeps large numbers exact.
        return int(Fraction(number) * (1024 if binary else 1000) ** power)


def _stack(*decorators: Decorator) -> Decorator:
    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


settings_options = _stack(
    click.option("--experts", metavar="N,N,...", help="Numbers of experts per token to try, e.g. 7,6,4,2."),
    click.option(
        "--setting",
        "extra_settings",
        multiple=True,
        metavar="SETTING",
        help="Further: experts=N, kv:KEY=TYPE:VALUE (joined with '+'), or a policy topp=P or ser=K,T. Repeatable.",
    ),
)

corpus_options = _stack(
    click.option("--include", multiple=True, metavar="GLOB", help="Only documents whose name matches. Repeatable."),
    click.option(
        "--exclude", multiple=True, metavar="GLOB", help="Leave out documents whose name matches. Repeatable."
    ),
    click.option(
        "--language", "languages", multiple=True, metavar="NAME", help="Only this language, e.g. python, prose."
    ),
)

chunk_options = _stack(
    click.option(
        "--chunking",
        type=click.Choice(["document", "llama-perplexity"]),
        default="document",
        show_default=True,
        help="Windows inside single documents, or as llama-perplexity cuts one joined text.",
    ),
    click.option("-c", "--ctx", "n_ctx", type=int, default=512, show_default=True, help="Tokens a chunk (n_ctx)."),
    click.option(
        "--chunks", "n_chunks", type=ChunkCount(), default="64", show_default=True, help="Chunks to use, or 'all'."
    ),
    click.option("--first", type=int, default=None, help="First scored position of a chunk.  [default: half of --ctx]"),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the selection."),
)

recording_options = _stack(
    click.option(
        "--logits",
        type=click.Choice(["full", "top"]),
        default="full",
        show_default=True,
        help="Record the whole distribution (2 bytes a token) or only its top; with 'top' KLD becomes bounds.",
    ),
    click.option("--resume", is_flag=True, help="Continue the run in the output directory from its last whole chunk."),
)

engine_options = _stack(
    click.option("-ngl", "--n-gpu-layers", type=int, default=0, show_default=True, help="Layers on the GPU."),
    click.option(
        "-t", "--threads", "n_threads", type=click.IntRange(min=0), default=0, help="Threads.  [default: all]"
    ),
    click.option("-b", "--batch-size", "n_batch", type=int, default=2048, show_default=True, help="Tokens a batch."),
    click.option(
        "-ub", "--ubatch-size", "n_ubatch", type=int, default=512, show_default=True, help="Tokens a micro-batch."
    ),
    click.option(
        "-fa", "--flash-attn", type=click.Choice(["on", "off", "auto"]), default="auto", help="Flash attention."
    ),
    click.option("-ctk", "--cache-type-k", "type_k", default="f16", show_default=True, help="KV cache type of K."),
    click.option("-ctv", "--cache-type-v", "type_v", default="f16", show_default=True, help="KV cache type of V."),
    click.option("--mmap/--no-mmap", "use_mmap", default=True, help="Map the model file, or read it into memory."),
    click.option("--mlock", "use_mlock", is_flag=True, help="Keep the model in memory."),
    click.option(
        "--numa",
        type=click.Choice(["disabled", "distribute", "isolate", "numactl", "mirror"]),
        default="disabled",
        help="NUMA strategy.",
    ),
    click.option("--repack/--no-repack", "repack", default=True, help="Let the engine repack weights at load."),
)


reading_options = _stack(
    click.option(
        "--hold",
        type=Size(auto=AUTO, off=0),
        default="auto",
        metavar="BYTES|auto|off",
        show_default=True,
        help="How much of a model larger than memory to lock in memory.",
    ),
    click.option(
        "--memory",
        type=Size(auto=AUTO),
        default="auto",
        metavar="BYTES|auto",
        show_default=True,
        help="Plan with so much memory instead of what is free now, e.g. 200G.",
    ),
)


def take_wishes(given: dict[str, Any]) -> Wishes:
    """Take what the user decided about reading the weights out of a command's arguments.

    Micro-batch and repacking count as decided where they were typed.
    """
    from agreement.streaming import Wishes

    context = click.get_current_context()

    def typed(name: str) -> Any:
        source = context.get_parameter_source(name)
        return given[name] if source is click.core.ParameterSource.COMMANDLINE else None

    hold, memory = given.pop("hold"), given.pop("memory")
    return Wishes(
        n_ubatch=typed("n_ubatch"),
        hold=None if hold == AUTO else hold,
        repack=typed("repack"),
        memory=None if memory == AUTO else memory,
    )


def take_engine_options(given: dict[str, Any]) -> EngineOptions:
    """Take the engine's options out of a command's arguments."""
    from agreement.records import EngineOptions

    return EngineOptions(**{name: given.pop(name) for name in EngineOptions.__dataclass_fields__})
