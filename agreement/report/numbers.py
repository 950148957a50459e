"""Numbers as people read them: floats flow in, strings flow out that never look better than the number is.

A float stands for its shortest decimal that reads back as the same float, the one JSON shows. Three rules hold
everywhere: the low end of an interval is rounded down and the high end up; a number that is not a limit of its
metric (100 %, a ratio of 1, a divergence of 0) is never shown as that limit but gets more digits; and what is not a
number is said to be none.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from typing import Literal

Rounding = Literal["nearest", "down", "up"]

_MODES = {"nearest": ROUND_HALF_EVEN, "down": ROUND_FLOOR, "up": ROUND_CEILING}

# Float64 reach from 5e-324 to 1.8e308; quantize needs room for every digit between the point and either end.
_CONTEXT = Context(prec=700)

# From here on digits before the point, or zeros after it, say less than an exponent does.
_LARGE = Decimal("1e9")
_MOST_PLACES = 9
_MANTISSA_PLACES = 3

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def exact(x: float, shift: int = 0) -> Decimal:
    """Return the shortest decimal that reads back as `x`, times `10**shift`; `x` must be finite."""
    return Decimal(repr(float(x))).scaleb(shift, _CONTEXT)


def decimals(width: float, *, shift: int = 0, least: int = 0, default: int = 2) -> int:
    """Return the digits after the point that an interval needs.

    The half-width's first digit is shown, and the second too where the first is 1 or 2, so that rounding an end
    outwards never moves it by more than a third of the half-width.

    Args:
        width: Half-width in the metric's own unit; zero or one that is not finite says nothing.
        shift: Power of ten between the metric's unit and the one shown; 2 for a fraction shown in percent.
        least: Fewest digits to return.
        default: What to return where the width says nothing.
    """
    if not math.isfinite(width) or width <= 0:
        return default
    shown = exact(width, shift)
    first = int(shown.scaleb(-shown.adjusted(), _CONTEXT))
    needed = -shown.adjusted() + (1 if first < 3 else 0)
    return min(max(needed, least), _MOST_PLACES)


def fixed(
    x: float,
    places: int,
    *,
    rounding: Rounding = "nearest",
    shift: int = 0,
    limits: tuple[float, ...] = (),
) -> str:
    """Return `x` with `places` digits after the point, or more where fewer would show a limit that `x` is not.

    Args:
        x: The number.
        places: Digits after the point.
        rounding: `down` for low ends, `up` for high ends.
        shift: Power of ten to multiply by; 2 shows a fraction in percent.
        limits: Values of `x` that only `x` itself may look like.
    """
    if not math.isfinite(x):
        return "not a number" if math.isnan(x) else ("inf" if x > 0 else "-inf")
    number, mode = exact(x, shift), _MODES[rounding]
    apart = {exact(limit, shift) for limit in limits} - {number}
    if abs(number) >= _LARGE:
        return _scientific(number, mode)
    while True:
        shown = number.quantize(Decimal(1).scaleb(-places), mode, _CONTEXT)
        if shown not in apart:
            return f"{abs(shown) if shown == 0 else shown:f}"
        if shown == 0 and places >= _MOST_PLACES:
            return _scientific(number, mode)
        places += 1


def _scientific(number: Decimal, mode: str) -> str:
    """Return the number with an exponent, rounded to a fixed count of significant digits; it is not zero."""
    step = Decimal(1).scaleb(number.adjusted() - _MANTISSA_PLACES, _CONTEXT)
    return f"{number.quantize(step, mode, _CONTEXT):.{_MANTISSA_PLACES}e}"


def significant(x: float, digits: int = 3, *, rounding: Rounding = "nearest") -> str:
    """Return a positive number with `digits` significant digits, or more where that many are before the point."""
    if not math.isfinite(x) or x <= 0:
        return fixed(x, 0)
    number = exact(x)
    if number >= _LARGE:
        return _scientific(number, _MODES[rounding])
    places = max(digits - 1 - number.adjusted(), 0)
    shown = number.quantize(Decimal(1).scaleb(-places), _MODES[rounding], _CONTEXT)
    if places and shown.adjusted() > number.adjusted():  # 9.999 became 10.00: drop the digit that is one too many
        shown = shown.quantize(Decimal(1).scaleb(1 - places), context=_CONTEXT)
    return f"{shown:,f}"


def count(n: int) -> str:
    """Return a whole number with its thousands apart."""
    return f"{n:,}"


def size(n_bytes: int) -> str:
    """Return a number of bytes in decimal units, three significant digits, rounded up."""
    shown, unit = str(n_bytes), _UNITS[0]
    if n_bytes < 1000:
        return f"{shown} {unit}"
    for power, unit in enumerate(_UNITS[1:], 1):
        shown = significant(n_bytes / 1000**power, rounding="up")
        if Decimal(shown.replace(",", "")) < 1000 or unit == _UNITS[-1]:
            break
    return f"{shown} {unit}"


def tokens(run_length: float, agreement_low: float | None) -> str:
    """Return the tokens to the first divergence, rounded down.

    Where no position differed the length is infinite; then `>` and what the low end of agreement allows, if it
    allows anything.

    Args:
        run_length: `1 / (1 - agreement)`.
        agreement_low: Low end of agreement's interval, a fraction, or None.
    """
    if math.isfinite(run_length):
        return significant(run_length, rounding="down")
    if agreement_low is None or not 0.0 <= agreement_low < 1.0:
        return "none seen"
    return f">{significant(float(1 / (1 - exact(agreement_low))), rounding='down')}"
