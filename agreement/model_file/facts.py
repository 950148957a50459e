"""What a model's header means for running it with fewer experts, ready to print.

In: a `ModelFile`.  Out: rows of text and numbers; nothing is printed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agreement.records import ModelFile

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class ExpertRow:
    """What one number of experts costs in reading.

    Attributes:
        n_used: Experts used per token in each layer.
        expert_bytes: Bytes of routed experts that one token reads.
        share: Those and the resident bytes, as a fraction of what the file's own number reads; None if the file has
            no such number.
    """

    n_used: int
    expert_bytes: int
    share: float | None


def expert_rows(model: ModelFile) -> tuple[ExpertRow, ...]:
    """Return a row for each number of experts from 1 to the file's own (to all, if it has no single one)."""
    return tuple(_row(model, n) for n in range(1, (model.n_expert_used or model.n_expert) + 1))


def _row(model: ModelFile, n: int) -> ExpertRow:
    used = model.expert_bytes_per_token(n)
    if model.n_expert_used is None:
        return ExpertRow(n, used, None)
    own = model.bytes_resident + model.expert_bytes_per_token(model.n_expert_used)
    return ExpertRow(n, used, (model.bytes_resident + used) / own if own else None)


def size_text(n_bytes: int) -> str:
    """Return a size for people, in decimal units with three significant digits: `1.64 GB`."""
    value, unit = float(n_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"


def describe(model: ModelFile, memory: int | None = None) -> list[tuple[str, str]]:
    """Return facts as (label, text), in the order to print them.

    Args:
        model: What to describe.
        memory: Bytes that may be used on this machine; without it nothing is said about fitting.
    """
    rows = [
        ("model", model.name),
        ("architecture", model.architecture),
        ("files", str(len(model.shards))),
        ("layers", f"{model.n_layer}, {model.n_expert_layers} of them with routed experts"),
        ("vocabulary", str(model.n_vocab)),
        ("context in training", str(model.n_ctx_train)),
        ("width", str(model.n_embd)),
    ]
    if model.n_expert:
        rows += _expert_facts(model)
    else:
        rows.append(("experts", "none: a dense model"))
    rows += [("size", size_text(model.bytes_total)), ("read for every token", size_text(model.bytes_resident))]
    if model.n_expert:
        rows.append(("routed experts", size_text(model.bytes_experts)))
    if memory is not None:
        fits = "fits in" if model.bytes_total < memory else "is larger than"
        rows.append(("memory", f"{fits} the {size_text(memory)} that may be used (weights alone)"))
    return rows


def _expert_facts(model: ModelFile) -> list[tuple[str, str]]:
    used = "not one number for all layers" if model.n_expert_used is None else str(model.n_expert_used)
    kept = {True: "yes", False: "no", None: "not known"}[model.renormalised]
    return [
        ("experts a layer", f"{model.n_expert} routed, {model.n_expert_shared} shared"),
        ("experts used per token", used),
        ("weights of kept experts rescaled", kept),
    ]
