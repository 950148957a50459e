"""Checks of an engine against the plan of a run, before the run is made: router hook, and memory for the context.

In: a plan and the runner for its passes.  Out: the plan, or another one that this engine can carry out, with a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from agreement.errors import AgreementError, ContextError, EngineError, KilledForMemoryError, UsageError
from agreement.plan import Passes, Plan, is_policy, is_routing, run_identity
from agreement.streaming.shapes import PAGES_BYTES
from agreement.workers.client import Runner

HALVINGS = 3


def check_hook(
    plan: Plan, runner: Runner, asked: Passes, separate: Callable[[], Plan], *, known: float | None = None
) -> Plan:
    """Compare router hook and override before a one pass; where they differ, fall back or say so.

    Only a setting `experts=N` can be run both ways.  Of a model that streams a small sample is compared, since loading
    it twice would read all of it twice.

    Args:
        plan: The plan.
        runner: What runs the passes.
        asked: What the user asked for: `auto` may fall back to separate passes, unless a policy needs the hook.
        separate: Plans again with separate passes; asked where the model streams, since it is then read another way.
        known: The difference, where the run has found it before.

    Returns:
        The plan with the difference in `about["preflight"]`, and a note where it is not 0 or could not be found out.

    Raises:
        EngineError: A logit of the first chunk is NaN.
    """
    counts = [s.experts for s in plan.settings if is_routing(s) and s.experts is not None]
    if plan.passes != "one" or not counts:
        return plan
    streams = not plan.reading.fits
    try:
        difference = runner.hook_difference(plan.chunks, min(counts), sampled=streams) if known is None else known
    except AgreementError as error:
        if not streams:
            raise
        return noted(plan, f"the router hook was not compared with an override: {error}")
    what = "a small sample of the model" if streams else "chunk 0"
    if not math.isfinite(difference):
        raise EngineError(f"the router hook or the override gives logits that are NaN on {what}; try --passes separate")
    about = {**plan.about, "preflight": {"hook_difference": difference}}
    if difference == 0:
        return replace(plan, about=about)
    found = f"router hook and override differ by up to {difference:.3g} in a logit of {what} on this engine"
    if asked != "auto" or any(is_policy(s) for s in plan.settings):
        note = f"one pass though {found}: agreement may not be that of the override"
        return noted(replace(plan, about=about), note)
    note = f"separate passes instead of one: {found}"
    if streams:
        plan = separate()
        return noted(replace(plan, about={**plan.about, "preflight": {"hook_difference": difference}}), note)
    identity = run_identity(
        plan.model, plan.vocabulary, plan.chunks, plan.logits, plan.top_k, "separate", plan.settings
    )
    return noted(replace(plan, passes="separate", passes_reason=found, identity=identity, about=about), note)


def load_within_memory(plan: Plan, runner: Runner, replan: Callable[[int], Plan]) -> Plan:
    """Load the engine for a plan that streams; where its context cannot be made, plan a smaller micro-batch.

    The micro-batch is halved at most three times.  Passes then go on with the engine that was loaded.

    Args:
        plan: The plan.
        runner: What runs the passes.
        replan: Plans again with a micro-batch of at most so many tokens.

    Raises:
        EngineError: Not even the smallest one; or the model cannot be loaded.
    """
    if plan.reading.fits:
        return plan
    first = tried = plan.reading.n_ubatch
    for halvings in range(HALVINGS + 1):
        try:
            plan = _load_killed_once(plan, runner)
        except (ContextError, KilledForMemoryError) as error:
            cause, reason, what = error, str(error), "the engine could not make a context for"
            if isinstance(error, KilledForMemoryError):
                reason, what = error.what, "memory ran out with"
        else:
            return noted(plan, f"{what} micro-batches of {first} tokens; {tried} instead") if halvings else plan
        if halvings == HALVINGS:
            break
        try:
            plan = replan(tried // 2)
        except UsageError:  # no smaller one can be planned
            break
        if plan.reading.fits:  # with such options by themselves; that is another run, for the user to choose
            break
        tried = plan.reading.n_ubatch
    raise EngineError(
        f"{reason}; micro-batches down to {tried} tokens were tried: allow more memory, or lower -ub, --ctx or the "
        "number of settings"
    ) from cause


def _load_killed_once(plan: Plan, runner: Runner) -> Plan:
    """Load; if the process is killed for memory, once more with nothing of the file held."""
    try:
        _load(plan, runner)
    except KilledForMemoryError as error:
        if not plan.reading.hold:
            raise
        plan = noted(replace(plan, reading=replace(plan.reading, hold=0)), without_hold(error))
        _load(plan, runner)
    return plan


def without_hold(error: KilledForMemoryError) -> str:
    """Return what is told when a process that held part of the model was killed, and another one goes on."""
    return f"{error.what}; it goes on with nothing of the model held"


def _load(plan: Plan, runner: Runner) -> None:
    """Load the engine of the first pass, with that much of the file held that leaves it room."""
    reading = plan.reading
    runner.hold(reading.hold, reading.bytes_beside + PAGES_BYTES)
    runner.load(plan.chunks, sum(is_routing(s) for s in plan.settings) if plan.passes == "one" else None)


def noted(plan: Plan, note: str) -> Plan:
    """Return the plan with one more note for the report."""
    return replace(plan, about={**plan.about, "notes": [*plan.about.get("notes", ()), note]})
