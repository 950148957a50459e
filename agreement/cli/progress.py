"""What a person sees while passes run.

In: the plan and progress of a run.  Out: lines on standard error, with a bar where that is a terminal.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from agreement.model_file import size_text
from agreement.passes import Listener
from agreement.plan import Plan, scores_bytes
from agreement.preflight import Preflight
from agreement.recording import Progress as PassProgress
from agreement.sequential import State

_PLAIN_SECONDS = 10.0  # between lines where the output is a file or a pipe


class ProgressView:
    """Shows a run on standard error; standard output stays for the result."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._live = self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("chunks  {task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._plan: Plan | None = None
        self._remaining_passes = 0
        self._last_line = 0.0
        self._told: set[str] = set()

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing; what was shown stays."""
        if self._live:
            self._bar.stop()

    def listener(self) -> Listener:
        """Return what to hand to `sweep`."""
        return Listener(
            plan=self.plan,
            preflight=self.preflight,
            passes=self.start_pass,
            progress=self.advance,
            note=self.note,
        )

    def sequential_listener(self) -> Listener:
        """Return what to hand to the sequential gate, whose pass is shown by `looked` instead of a bar."""
        return Listener(plan=self._sequential_plan, preflight=self._stable, note=self.note)

    def looked(self, state: State) -> None:
        """Say where a sequential gate stands."""
        line = f"{state.clusters}/{state.max_clusters} documents, agreement {state.agreement or 0:.2%}"
        if state.low is not None and state.high is not None:
            line += f", interval of this look [{state.low:.2%}, {state.high:.2%}]"
        self._console.print(line, end="\r" if self._live and state.verdict is None else "\n", markup=False)

    def plan(self, plan: Plan) -> None:
        """Say what will be done, before anything is."""
        self._plan = plan
        self._remaining_passes = 1 + len(plan.settings)
        for line in plan_lines(plan):
            self._console.print(line, markup=False, soft_wrap=True)

    def _sequential_plan(self, plan: Plan) -> None:
        """Say what a sequential gate will do, before it does."""
        for line in sequential_lines(plan):
            self._console.print(line, markup=False, soft_wrap=True)

    def preflight(self, result: Preflight) -> None:
        """Say how stable the engine is, and how long the run will take."""
        self._stable(result)
        if self._plan is not None and self._plan.reading.fits:  # else its few tokens mostly waited for the disk
            seconds = self._plan.n_tokens / result.tokens_per_second
            rate = f"{result.tokens_per_second:,.0f} tokens/s"
            self._console.print(f"time       about {duration(seconds)} at the preflight's {rate}", markup=False)

    def _stable(self, result: Preflight) -> None:
        """Say how stable the engine is."""
        line = (
            f"preflight  same shape: equal to the bit; {result.other_shape}: logits within "
            f"{result.shape_max_difference:.2g}, top-1 differs at {result.shape_disagreement:.2%} "
            f"of {result.n_positions} positions"
        )
        self._console.print(line, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Say once what goes otherwise than planned."""
        if text and text not in self._told:
            self._told.add(text)
            self._console.print(f"note       {text}", markup=False, soft_wrap=True)

    def start_pass(self, name: str, n_chunks: int) -> None:
        """Begin a bar."""
        self._task = self._bar.add_task(name, total=n_chunks, rate="", left="") if self._live else None
        self._last_line = time.monotonic()

    def advance(self, progress: PassProgress) -> None:
        """Move the bar, or print a line now and then where there is none."""
        self._told_memory(progress)
        self.note(progress.note)
        rate = progress.tokens / progress.seconds if progress.seconds > 0 and progress.tokens else 0.0
        left = ""
        if rate and progress.tokens:
            per_chunk = progress.seconds / max(1, progress.tokens / self._tokens_a_chunk())
            left = f"{duration(per_chunk * (progress.total - progress.done))} left"
        shown = f"{rate:,.0f} tokens/s" if rate else "already there"
        shown += self._read_text(progress)
        if self._task is not None:
            self._bar.update(self._task, completed=progress.done, rate=shown, left=left)
            return
        now = time.monotonic()
        if progress.done == progress.total or now - self._last_line > _PLAIN_SECONDS:
            self._last_line = now
            line = f"{progress.pass_name}: {progress.done}/{progress.total} chunks, {shown}"
            self._console.print(line + (f", {left}" if left and progress.done < progress.total else ""), markup=False)

    def _told_memory(self, progress: PassProgress) -> None:
        """Say after the first micro-batch what memory it took, beside the plan's figure."""
        if self._plan is None or progress.beside is None or "memory" in self._told:
            return
        self._told.add("memory")
        planned = size_text(self._plan.reading.activations)
        self._console.print(
            f"memory     {size_text(progress.beside)} taken beside the weights, {planned} planned", markup=False
        )

    def _read_text(self, progress: PassProgress) -> str:
        """Return what was read beside the plan, for a model that streams from disk."""
        if self._plan is None or self._plan.reading.fits or progress.bytes_read is None:
            return ""
        return f", {size_text(progress.bytes_read)} read of {size_text(self._plan.reading.bytes_expected)} planned"

    def _tokens_a_chunk(self) -> int:
        return self._plan.chunks.n_ctx if self._plan is not None else 512


def plan_lines(plan: Plan, *, every: bool = False) -> list[str]:
    """Return what a run will do, line by line; with `every` also how a model that fits in memory is read."""
    model, chunks = plan.model, plan.chunks
    scored = f"scored [{chunks.first}, {chunks.last}): {plan.n_positions:,} positions"
    scores = scores_bytes(chunks, len(plan.settings))
    disk = size_text(scores + (plan.sizes[plan.logits] if plan.records_baseline else 0))
    sizes = f"full {size_text(plan.sizes['full'])}, top {size_text(plan.sizes['top'])}"
    lines = [
        *_source_lines(plan),
        f"chunks     {chunks.n_chunks} of {chunks.n_ctx} tokens ({chunks.chunking}), {scored}",
        f"clusters   {len(chunks.cluster_names)}, drawn with seed {chunks.seed}",
        f"passes     {_passes(plan)}",
        f"disk       {disk} with --logits {plan.logits} (recording: {sizes})"
        + ("" if plan.records_baseline else ", no recording kept: --record"),
    ]
    if every or not plan.reading.fits:
        # Of a model that fits the line above says it all: the choice does not depend on how it is read.
        lines += [f"reading    {c}" for c in plan.reading.lines(skip=("passes",) if plan.reading.fits else ())]
    if plan.about.get("preflight", {}).get("hook_difference") == 0:
        where = "chunk 0" if plan.reading.fits else "a small sample of the model"
        lines.append(f"hook       equal to an override to the bit on {where}")
    notes = (*plan.about.get("notes", ()), *plan.corpus.notes, *chunks.notes, *model.warnings)
    lines += [f"note       {note}" for note in notes]
    return lines


def sequential_lines(plan: Plan) -> list[str]:
    """Return what a sequential gate will do; how many chunks it will decode, and write, nobody knows."""
    chunks = plan.chunks
    window = f"one chunk of {chunks.n_ctx} tokens each, scored [{chunks.first}, {chunks.last})"
    lines = [
        *_source_lines(plan),
        f"documents  at most {len(chunks.cluster_names)}, drawn with seed {chunks.seed}; {window}",
        f"pass       baseline and {', '.join(s.name for s in plan.settings)} side by side until the verdict is safe",
    ]
    if not plan.reading.fits:
        lines += [f"reading    {c}" for c in plan.reading.lines(skip=("passes",))]
    # Not the notes on chunks: those tell how to have more in a sweep.
    notes = (*plan.about.get("notes", ()), *plan.corpus.notes, *plan.model.warnings)
    return lines + [f"note       {note}" for note in notes]


def _source_lines(plan: Plan) -> list[str]:
    """Return what model and text are."""
    model = plan.model
    used = model.n_expert_used if model.n_expert_used is not None else "a number a layer"
    shared = f" and {model.n_expert_shared} shared" if model.n_expert_shared else ""
    skipped = sum(plan.about["corpus"]["skipped"].values())
    experts = f"{used} of {model.n_expert} experts{shared} in {model.n_expert_layers} of {model.n_layer} layers"
    return [
        f"model      {model.name}: {model.architecture}, {experts}, {size_text(model.bytes_total)}",
        f"corpus     {plan.corpus.name}: {len(plan.corpus.documents)} documents"
        + (f", {skipped} files skipped (see `agreement corpus`)" if skipped else ""),
    ]


def _passes(plan: Plan) -> str:
    names = ", ".join(s.name for s in plan.settings)
    if not names:
        return "baseline"
    if plan.passes == "one":
        return f"one, of baseline, {names}: {plan.passes_reason}"
    return f"baseline, then {names}: {plan.passes_reason}"


def duration(seconds: float) -> str:
    """Return a length of time as people say it, rounded up to the next second."""
    whole = int(seconds) + 1
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
