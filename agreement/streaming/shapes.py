"""What could fill a micro-batch, the memory it takes and the bytes it makes the run read.

In: sizes of a model and of the work.  Out: candidates for the plan of `agreement.streaming.budget`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agreement.records import EngineOptions, ModelFile
from agreement.streaming.costs import Costs

Passes = Literal["one", "separate"]

# Code of the engine, of Python and of NumPy whose pages every step needs, and small buffers.  The processes themselves
# run when the plan is made: their own memory is no longer available.
PROCESS_BYTES = 48 << 20
# Pages being read for the layer at work: read-ahead is up to some MiB a thread, and a product of one layer's experts
# goes through its weights once.  Less than this and the kernel reads pages twice.
PAGES_BYTES = 64 << 20
# How far the sum may be wrong.  Holding 65 % of a file where 63 % were left was killed for memory.
SHARE_MEASURED, SHARE_ESTIMATED = 0.05, 0.20
# Part of what may be used that is never planned for: others on the machine move too.
SHARE_FREE = 0.02
# A hold below this changes less than the kernel's own choice of pages does.
LEAST_HOLD = 32 << 20
PASSES: tuple[Passes, ...] = ("one", "separate")
MAX_SEQUENCES = 256  # llama.cpp's LLAMA_MAX_SEQ
CHECK_TOKENS = 16  # that the preflight decodes of a model that streams, see `agreement.preflight.SHORT`
_LEAST_PIECE = 64  # tokens of a chunk in a micro-batch; below, a chunk is not cut further


@dataclass(frozen=True)
class Work:
    """What is to be run.

    Attributes:
        n_chunks: Chunks.
        n_ctx: Tokens a chunk.
        n_scored: Scored positions a chunk.
        n_settings: Settings beside the baseline that one pass could run.
        n_loads: Further settings that need a load of their own (another file, further overrides).
    """

    n_chunks: int
    n_ctx: int
    n_scored: int
    n_settings: int
    n_loads: int = 0


@dataclass(frozen=True)
class Wishes:
    """What the user decided; None is left to the plan.

    Attributes:
        n_ubatch: Tokens a micro-batch, `-ub`.
        hold: Bytes to hold, `--hold`; 0 for off.
        passes: `--passes`.
        repack: `--repack` or `--no-repack`.
        memory: Bytes that the run may take, `--memory`, instead of what is free.
        begun: Whether a run goes on, and how its model was read: `fitted` stays as it is, `streamed` keeps a
            micro-batch of exactly `n_ubatch` tokens, however little memory is left.
    """

    n_ubatch: int | None = None
    hold: int | None = None
    passes: Passes | None = None
    repack: bool | None = None
    memory: int | None = None
    begun: Literal["fitted", "streamed"] | None = None


@dataclass(frozen=True)
class Host:
    """What the machine offers.

    Attributes:
        available: Bytes that may be taken now, see `memory_available`.
        source: Where that number is from, for people.
        may_lock: Bytes that may be locked; None for no limit.
        disk: Bytes a second; None if not measured.
    """

    available: int
    source: str = "machine"
    may_lock: int | None = None
    disk: float | None = None


@dataclass(frozen=True)
class Shape:
    """Chunks that share a micro-batch, or the part of a chunk that fills one."""

    passes: Passes
    sequences: int
    piece: int
    batches: int  # decode calls of one pass

    def micro_batches(self, n_ctx: int) -> int:
        """Return the micro-batches of one pass over chunks of `n_ctx` tokens."""
        return self.batches * -(-n_ctx // self.piece)

    @property
    def n_ubatch(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.piece


@dataclass(frozen=True)
class Candidate:
    """A shape with its memory and its bytes."""

    shape: Shape
    beside: int
    free: int
    hold: int
    lost: int
    loads: int
    micro_batches: int
    n_bytes: int


def as_given(options: EngineOptions, work: Work, wishes: Wishes) -> Shape:
    """Return the shape of separate passes that the options ask for, as the engine cuts them."""
    n_ubatch = wishes.n_ubatch or options.n_ubatch
    together = max(1, min(MAX_SEQUENCES, max(options.n_batch, n_ubatch) // work.n_ctx, work.n_chunks))
    piece = max(1, min(work.n_ctx, n_ubatch // together))
    return Shape("separate", together, piece, -(-work.n_chunks // together))


def shapes(work: Work, wishes: Wishes) -> Iterator[Shape]:
    """Yield what could fill a micro-batch: for each number of batches the fewest chunks side by side, then pieces."""
    for passes in PASSES:
        if wishes.passes not in (None, passes) or (passes == "one" and work.n_settings == 0):
            continue
        group = 1 + work.n_settings if passes == "one" else 1
        if group > MAX_SEQUENCES:
            continue
        seen: set[int] = set()
        for chunks in range(1, min(work.n_chunks, MAX_SEQUENCES // group) + 1):
            batches = -(-work.n_chunks // chunks)
            if batches not in seen:
                seen.add(batches)
                yield Shape(passes, chunks * group, work.n_ctx, batches)
        piece = -(-work.n_ctx // 2)
        while piece >= min(_LEAST_PIECE, work.n_ctx) and piece < work.n_ctx:
            yield Shape(passes, group, piece, work.n_chunks)
            piece = -(-piece // 2)


def bytes_beside(shape: Shape, work: Work, costs: Costs) -> int:
    """Return the memory beside the weights that a shape takes."""
    outputs = shape.sequences * min(work.n_scored, shape.piece)
    # Separate passes hand a batch of whole chunks to the engine, which cuts it; one pass hands over each piece.
    kept = outputs if shape.passes == "one" else shape.sequences * work.n_scored
    buffer = max(costs.activation * shape.n_ubatch, costs.output * outputs) + costs.copied * shape.n_ubatch
    cache = costs.cache * shape.sequences * work.n_ctx
    scoring = costs.coded * work.n_scored * 2
    return math.ceil(PROCESS_BYTES + buffer + cache + costs.logits * kept + scoring)


def keep_free(beside: int, host: Host, costs: Costs) -> int:
    """Return the memory to leave alone when `beside` bytes are taken beside the weights."""
    share = SHARE_MEASURED if costs.measured else SHARE_ESTIMATED
    return math.ceil(PAGES_BYTES + share * (beside - PROCESS_BYTES) + SHARE_FREE * host.available)


def candidate(shape: Shape, model: ModelFile, host: Host, work: Work, costs: Costs, wishes: Wishes) -> Candidate | None:
    """Return a shape's memory and bytes; None if it does not fit or is not the micro-batch that was wished for."""
    kept = wishes.begun == "streamed"
    if wishes.n_ubatch is not None and shape.n_ubatch > wishes.n_ubatch:
        return None
    if kept and shape.n_ubatch != wishes.n_ubatch:
        return None
    beside = bytes_beside(shape, work, costs)
    free = keep_free(beside, host, costs)
    left = host.available - beside - free
    if kept:
        left = max(0, left)
    if left < 0:
        return None
    wanted = min(left, model.bytes_total) if wishes.hold is None else wishes.hold
    if wishes.hold is not None and wishes.hold > left:
        if not kept:
            return None
        wanted = left
    if wishes.hold is None and wanted < LEAST_HOLD:
        wanted = 0
    hold = wanted if host.may_lock is None else min(wanted, host.may_lock)
    one = shape.passes == "one"
    apart = work.n_loads if one else 1 + work.n_settings + work.n_loads  # loads with a pass of their own
    micro_batches = apart * (_apart(shape, work) if one else shape).micro_batches(work.n_ctx)
    if one:
        micro_batches += shape.micro_batches(work.n_ctx)
    scanned = max(0, _touched(model, shape.n_ubatch) - hold)
    loads = apart + int(one)
    checking = _checked(model, host.available)
    n_bytes = hold + loads * (model.bytes_total - hold) + checking + micro_batches * scanned
    return Candidate(shape, beside, free, hold, wanted - hold, loads, micro_batches, n_bytes)


def _checked(model: ModelFile, available: int) -> int:
    """Return the bytes that the preflight reads: three decodes of few tokens, after a load.

    What of the file is in memory then, locked or lately read, need not be read again; the second and third decode find
    what the first has read, if memory has room for it.
    """
    touched = _touched(model, CHECK_TOKENS)
    missing = max(0.0, 1 - available / model.bytes_total) if model.bytes_total else 0.0
    return math.ceil(touched * missing) * (1 if touched <= available else 3)


def _apart(shape: Shape, work: Work) -> Shape:
    """Return how a separate pass runs with the micro-batch of a one-pass shape."""
    together = max(1, min(shape.n_ubatch // work.n_ctx, work.n_chunks, MAX_SEQUENCES))
    return Shape("separate", together, min(work.n_ctx, shape.n_ubatch), -(-work.n_chunks // together))


def _touched(model: ModelFile, n_tokens: int) -> int:
    """Return the bytes that a micro-batch is expected to touch: few tokens, few experts, if drawn at random."""
    if not model.n_expert or not model.n_expert_used:
        return model.bytes_total
    share = 1 - (1 - model.n_expert_used / model.n_expert) ** n_tokens
    return model.bytes_resident + math.ceil(share * model.bytes_experts)
