"""The plan for a model larger than its memory: how to read the weights as few times as possible.

In: sizes.  Out: `ReadingPlan`, each choice with its reason; nothing is read or measured here.

A prompt pass reads the whole file once per micro-batch, except what is held.  So with `F` bytes of weights, `A` that
may be used, `a` bytes of activations a token and micro-batches of `u` tokens, `T` tokens cost about

    T / u  readings of  F - (A - a u)  bytes   =   T / u * (F - A)  +  T a

The second term does not depend on `u`: memory given to a larger micro-batch is always better spent than memory that
holds weights, until everything is one micro-batch.  The plan therefore tries every number of chunks that could share a
micro-batch, holds what is left over, and takes the one that reads least.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agreement.errors import UsageError
from agreement.model_file import size_text
from agreement.records import EngineOptions, ModelFile
from agreement.streaming.costs import Costs
from agreement.streaming.shapes import (
    MAX_SEQUENCES,
    PASSES,
    PROCESS_BYTES,
    Candidate,
    Host,
    Passes,
    Shape,
    Wishes,
    Work,
    as_given,
    bytes_beside,
    candidate,
    keep_free,
    shapes,
)

DISK_SPEED = 1e9  # bytes a second, where it was not measured: an ordinary NVMe drive through page faults
_ALMOST = 0.95  # one pass must save at least a twentieth of the reading, since it computes more


@dataclass(frozen=True)
class Choice:
    """One choice of the plan, for people: what was decided, and why, one line each."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class ReadingPlan:
    """How a run reads its weights.

    Attributes:
        fits: Whether the model stays in memory; then nothing else is changed.
        passes: One pass, or one a setting.
        n_batch: Tokens a decode call.
        n_ubatch: Tokens a micro-batch.
        n_sequences: Sequences side by side.
        repack: Whether the engine may repack weights.
        hold: Bytes of the file to hold.
        hold_lost: Bytes more that would be held if the process had the right.
        bytes_beside: Memory the passes take beside the weights.
        keep_free: Memory left alone.
        loads: Times the file is loaded.
        micro_batches: Micro-batches of all passes.
        bytes_expected: Bytes read from disk in all.
        readings: The same in readings of the whole file.
        seconds_reading: At the disk's speed.
        choices: Each choice with its reason.
    """

    fits: bool
    passes: Passes
    n_batch: int
    n_ubatch: int
    n_sequences: int
    repack: bool
    hold: int
    hold_lost: int
    bytes_beside: int
    keep_free: int
    loads: int
    micro_batches: int
    bytes_expected: int
    readings: float
    seconds_reading: float
    choices: tuple[Choice, ...]

    @property
    def activations(self) -> int:
        """Of `bytes_beside` what the process takes for itself: all but code, which is pages of files."""
        return max(0, self.bytes_beside - PROCESS_BYTES)

    def options(self, options: EngineOptions) -> EngineOptions:
        """Return engine options that carry out the plan."""
        if self.fits:
            return replace(options, n_ubatch=self.n_ubatch, repack=self.repack)
        return replace(
            options,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            repack=self.repack,
            use_mmap=True,
            use_mlock=False,  # it locks the whole file: the process would be killed while it loads
        )

    def lines(self, *, skip: tuple[str, ...] = ()) -> list[str]:
        """Return the plan for people, a line a choice, those named in `skip` left out."""
        return [f"{c.name:<12}{c.value}: {c.reason}" for c in self.choices if c.name not in skip]


def plan_reading(
    model: ModelFile, host: Host, options: EngineOptions, work: Work, costs: Costs, wishes: Wishes | None = None
) -> ReadingPlan:
    """Plan how to read a model's weights.

    Args:
        model: The model file.
        host: Memory, the right to lock, and the disk.
        options: Engine options as given.
        work: Chunks and settings.
        costs: Memory beside the weights, see `estimated_costs`.
        wishes: What the user decided.

    Raises:
        UsageError: Not even the smallest micro-batch fits, or a wish that cannot be carried out.
    """
    wishes = wishes or Wishes()
    _check(wishes, work)
    within = as_given(options, work, wishes)
    beside = bytes_beside(within, work, costs)
    free = keep_free(beside, host, costs)
    # Weights on a GPU take no main memory, how much is not known here: such a run is left as the user set it.
    fits = model.bytes_total + beside + free <= host.available
    if options.n_gpu_layers or wishes.begun == "fitted" or fits:
        return _in_memory(model, host, options, work, wishes, within, (beside, free))
    if wishes.begun and not any(s.n_ubatch == wishes.n_ubatch for s in shapes(work, wishes)):
        wishes = replace(wishes, begun=None)  # other chunks or settings: another run, which its identity will say
    candidates = [candidate(s, model, host, work, costs, wishes) for s in shapes(work, wishes)]
    possible = [c for c in candidates if c is not None]
    if not possible:
        raise UsageError(_too_little(model, host, work, costs, wishes))
    best = {p: min((c for c in possible if c.shape.passes == p), key=_order, default=None) for p in PASSES}
    one, separate = best["one"], best["separate"]
    if one is None or separate is None:
        chosen, other = (one or separate), None
    else:
        better = one.n_bytes < _ALMOST * separate.n_bytes
        chosen, other = (one, separate) if better else (separate, one)
    assert chosen is not None  # `possible` is not empty
    plan = _streamed(model, host, work, wishes, costs, chosen, other)
    if not options.use_mlock:
        return plan
    mlock = Choice("mlock", "off", "it would lock the whole file, more than memory has; what fits is held instead")
    return replace(plan, choices=(*plan.choices[:-1], mlock, plan.choices[-1]))


def _order(candidate: Candidate) -> tuple[int, int]:
    return candidate.n_bytes, candidate.shape.n_ubatch


def _check(wishes: Wishes, work: Work) -> None:
    if wishes.n_ubatch is not None and wishes.n_ubatch < 1:
        raise UsageError(f"-ub {wishes.n_ubatch}: give at least 1 token")
    if wishes.memory is not None and wishes.memory < 1:
        raise UsageError(f"--memory {wishes.memory}: give the bytes that the run may take, or auto")
    if wishes.hold is not None and wishes.hold < 0:
        raise UsageError(f"--hold {wishes.hold}: give bytes from 0 on, auto or off")
    if wishes.passes == "one" and work.n_settings == 0:
        raise UsageError("--passes one: no setting here can ride along with the baseline; use separate passes")


def _in_memory(
    model: ModelFile,
    host: Host,
    options: EngineOptions,
    work: Work,
    wishes: Wishes,
    shape: Shape,
    needs: tuple[int, int],
) -> ReadingPlan:
    beside, free = needs
    passes = wishes.passes or "separate"
    spare = host.available - model.bytes_total - beside - free
    memory = Choice(
        "memory",
        f"the model stays in memory, with {size_text(max(0, spare))} to spare",
        f"{size_text(model.bytes_total)} of weights and {size_text(beside)} beside them, of "
        f"{size_text(host.available)} ({host.source})",
    )
    if options.n_gpu_layers:
        memory = Choice("memory", "not planned for", f"-ngl {options.n_gpu_layers} puts weights on a GPU")
    elif model.bytes_total + beside + free > host.available:
        memory = Choice("memory", "not planned for", "the run began with the model in memory, and goes on as it began")
    n_ubatch = wishes.n_ubatch or options.n_ubatch
    repack = options.repack if wishes.repack is None else wishes.repack
    seconds = model.bytes_total / (host.disk or DISK_SPEED)
    choices = [
        memory,
        Choice("micro-batch", f"{n_ubatch} tokens", "as given: a larger one would save no reading"),
        Choice("passes", passes, _asked(wishes.passes) or "in memory fewer experts also compute less"),
        Choice("repack", "on" if repack else "off", "as given"),
    ]
    if not options.n_gpu_layers:
        choices[3:3] = [Choice("hold", "nothing", "all of the file stays in memory")]
        reason = f"the first load, where the file is not in memory yet; {_reading_time(seconds, host)}"
        choices.append(Choice("reading", f"{size_text(model.bytes_total)}, 1.0 readings of the file", reason))
    return ReadingPlan(
        fits=True,
        passes=passes,
        n_batch=options.n_batch,
        n_ubatch=n_ubatch,
        n_sequences=shape.sequences,
        repack=repack,
        hold=0,
        hold_lost=0,
        bytes_beside=beside,
        keep_free=free,
        loads=1 + work.n_settings + work.n_loads if passes == "separate" else 1 + work.n_loads,
        micro_batches=(1 + work.n_settings + work.n_loads) * shape.micro_batches(work.n_ctx),
        bytes_expected=model.bytes_total,
        readings=1.0,
        seconds_reading=seconds,
        choices=tuple(choices),
    )


def _streamed(
    model: ModelFile,
    host: Host,
    work: Work,
    wishes: Wishes,
    costs: Costs,
    chosen: Candidate,
    other: Candidate | None,
) -> ReadingPlan:
    shape = chosen.shape
    repack = bool(wishes.repack)
    readings = chosen.n_bytes / model.bytes_total if model.bytes_total else 0.0
    seconds = chosen.n_bytes / (host.disk or DISK_SPEED)
    return ReadingPlan(
        fits=False,
        passes=shape.passes,
        n_batch=shape.n_ubatch if shape.passes == "one" else shape.sequences * work.n_ctx,
        n_ubatch=shape.n_ubatch,
        n_sequences=shape.sequences,
        repack=repack,
        hold=chosen.hold,
        hold_lost=chosen.lost,
        bytes_beside=chosen.beside,
        keep_free=chosen.free,
        loads=chosen.loads,
        micro_batches=chosen.micro_batches,
        bytes_expected=chosen.n_bytes,
        readings=readings,
        seconds_reading=seconds,
        choices=(
            Choice(
                "memory",
                f"the model streams from disk, {size_text(model.bytes_total)} in {size_text(host.available)}",
                f"that is what may be used ({host.source}); {size_text(chosen.beside)} go to activations, cache and "
                "code" + ("" if costs.measured else " (estimated)"),
            ),
            _token_choice(costs),
            _ubatch_choice(work, wishes, chosen),
            _passes_choice(wishes, chosen, other),
            _hold_choice(model, wishes, chosen),
            Choice("free", size_text(chosen.free), "pages on their way from disk, and an error of the estimate"),
            Choice(
                "repack",
                "on" if repack else "off",
                _asked(wishes.repack) or "it would copy the weights into memory that cannot be dropped",
            ),
            Choice(
                "reading",
                f"{size_text(chosen.n_bytes)}, {readings:.1f} readings of the file",
                f"{chosen.loads} loads, checks and {chosen.micro_batches} micro-batches; "
                f"{_reading_time(seconds, host)}, and computing on top",
            ),
        ),
    )


def _too_little(model: ModelFile, host: Host, work: Work, costs: Costs, wishes: Wishes) -> str:
    possible = list(shapes(work, wishes))
    if not possible:
        return (
            f"{work.n_settings} settings and the baseline are more than the {MAX_SEQUENCES} sequences of one pass over "
            "a model that streams; run them in several sweeps"
        )
    least = min(possible, key=lambda s: s.n_ubatch)
    if wishes.n_ubatch is not None and wishes.n_ubatch < least.n_ubatch:
        return (
            f"-ub {wishes.n_ubatch}: a micro-batch of a model that streams has at least {least.n_ubatch} tokens here "
            f"({least.piece} of each sequence, {least.sequences} side by side); raise -ub, or leave it to the plan"
        )
    asked = [s for s in possible if wishes.n_ubatch is None or s.n_ubatch <= wishes.n_ubatch]
    needs = [bytes_beside(s, work, costs) for s in asked]
    smallest = min(beside + keep_free(beside, host, costs) for beside in needs)
    hold = wishes.hold or 0
    return (
        f"{model.name}: {size_text(host.available)} may be used ({host.source}), the smallest micro-batch needs "
        f"{size_text(smallest + hold)}; lower -c, --hold or the number of settings, or allow more memory"
    )


def _reading_time(seconds: float, host: Host) -> str:
    how = "measured" if host.disk else "assumed"
    return f"{seconds:,.0f} s at {size_text(int(host.disk or DISK_SPEED))}/s ({how})"


def _token_choice(costs: Costs) -> Choice:
    return Choice(
        "a token",
        f"{size_text(round(costs.activation + costs.copied))} of activations, {size_text(round(costs.cache))} of cache",
        f"and {size_text(round(costs.logits))} of logits where it is scored; "
        + ("laid out by the engine, not yet allocated" if costs.measured else "estimated from the header"),
    )


def _asked(value: object) -> str:
    return "" if value is None else "as asked"


def _ubatch_choice(work: Work, wishes: Wishes, chosen: Candidate) -> Choice:
    shape = chosen.shape
    what = (
        f"{shape.sequences} sequences of {work.n_ctx}"
        if shape.piece == work.n_ctx
        else f"{shape.sequences} sequences, {shape.piece} tokens of each at a time"
    )
    reason = "at most what was asked for" if wishes.n_ubatch is not None else "each micro-batch reads the weights again"
    if wishes.begun:
        reason = "the run began so"
    return Choice("micro-batch", f"{shape.n_ubatch} tokens ({what})", reason)


def _passes_choice(wishes: Wishes, chosen: Candidate, other: Candidate | None) -> Choice:
    name = "one pass" if chosen.shape.passes == "one" else "separate passes"
    reason = _asked(wishes.passes)
    if not reason and other is None:
        reason = "the other way does not fit in memory, or has nothing to run"
    elif not reason and other is not None:
        rival = "separate passes" if chosen.shape.passes == "one" else "one pass"
        reason = f"{rival} would read {size_text(other.n_bytes)} instead of {size_text(chosen.n_bytes)}"
    return Choice("passes", name, reason)


def _hold_choice(model: ModelFile, wishes: Wishes, chosen: Candidate) -> Choice:
    value = f"{size_text(chosen.hold)} of the file locked"
    saved = size_text(chosen.hold * (chosen.micro_batches + chosen.loads - 1))
    reason = _asked(wishes.hold) or (
        f"what memory leaves, {chosen.hold / model.bytes_total:.0%}; it saves {saved} of reading"
        if chosen.hold
        else "memory is better spent on the micro-batch, and what is left is too little"
    )
    if chosen.lost:
        lost = size_text(chosen.lost * (chosen.micro_batches + chosen.loads - 1))
        reason = f"no right to lock {size_text(chosen.lost)} more, which would save {lost} of reading: `ulimit -l`"
    return Choice("hold", value, reason)
