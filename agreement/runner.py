"""Everything a worker can be asked: separate passes, one pass for all settings, and whether both agree.

In: a model file, options, a run directory.  Out: chunk files and small results, as from `PassRunner`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agreement.engine import Engine, load_engine, measure_context
from agreement.memory import read_memory
from agreement.onepass import Layout, equality, one_pass_layout, run_one_pass, sampled_equality
from agreement.preflight import Preflight, short_preflight
from agreement.recording import LogitsMode, PassRunner, Progress, ProgressListener, load_chunks
from agreement.records import ChunkSet, EngineOptions, Setting
from agreement.settings import BASELINE
from agreement.store import RunStore
from agreement.streaming import Counters, Hold, RoomWatch, bytes_read, hold_order, memory_available, memory_use
from agreement.streaming.shapes import PAGES_BYTES, PROCESS_BYTES

# Pages on their way from disk and those of code count as free, and are needed.  With 60 MB left of them a run read
# twice the bytes.
_ENOUGH_ROOM = PROCESS_BYTES + PAGES_BYTES
_LEAST_ROOM = PROCESS_BYTES + 3 * PAGES_BYTES // 4

SAMPLE_BYTES = 2 << 30  # most that a sample of a model may take in the folder for temporary files


def _no_progress(_progress: object) -> None:
    """Listen to nothing."""


def _room() -> int:
    return memory_available(read_memory())


class FullRunner(PassRunner):
    """A `PassRunner` that can also run many settings in one pass."""

    _layout: Layout | None = None
    _hold: Hold | None = None
    _before: int | None = None  # the process's own memory before anything was loaded
    _beside: int | None = None
    _notes: tuple[str, ...] = ()

    def configure(self, options: EngineOptions, n_sequences: int) -> EngineOptions:
        """Take other options, as the plan of reading chose them; return them complete."""
        self.close_engine()
        self.set_options(options, n_sequences)
        return self.options

    def measure(self, n_ubatch: int, n_sequences: int, n_outputs: int) -> tuple[str, ...]:
        """Return the engine's log of a context of that size, laid out but not allocated."""
        return measure_context(
            self.model,
            self.options,
            n_ctx=self.n_ctx,
            n_sequences=n_sequences,
            n_outputs=n_outputs,
            n_ubatch=n_ubatch,
        )

    def hold(self, n_bytes: int, keep_free: int) -> str:
        """Hold so many bytes of the model's file, more or fewer than before; return a note if it could not be all."""
        if self._before is None:
            self._before = self._own_memory()
        if self._hold is not None and n_bytes < self._hold.asked:
            self._hold.shrink(n_bytes)
            return ""
        if self._hold is None or n_bytes > self._hold.asked:  # the same again would count what is loaded since as taken
            if self._hold is not None:
                self._hold.close()
            self._hold = Hold(hold_order(self.model), n_bytes, room=_room, keep_free=keep_free)
        return self._hold.note

    def counters(self) -> Counters:
        """Return what was read and taken so far."""
        use = memory_use()
        return Counters(bytes_read(), None if use is None else use.peak, self._beside, self._notes)

    def _own_memory(self) -> int | None:
        use = memory_use()
        return None if use is None else use.anonymous

    def _add_note(self, note: str) -> None:
        if note and note not in self._notes:
            self._notes += (note,)

    @contextlib.contextmanager
    def _watched(self, progress: ProgressListener) -> Iterator[ProgressListener]:
        """Watch memory during a pass; yield a listener that also hears what was read, taken and let go."""
        if self._hold is None or self._before is None:  # the model stays in memory, or nobody counts
            yield lambda told: progress(replace(told, bytes_read=bytes_read()))
            return
        watch = RoomWatch(self._hold, _room, least=_LEAST_ROOM, enough=_ENOUGH_ROOM)

        def listen(told: Progress) -> None:
            taken = (self._own_memory() or 0) - (self._before or 0)
            self._beside = max(taken, self._beside or 0)
            progress(replace(told, bytes_read=bytes_read(), beside=taken, note=watch.note()))

        try:
            with watch:
                yield listen
        finally:
            self._add_note(watch.note())

    def check_one_pass(self, chunks: ChunkSet, settings: Sequence[Setting]) -> Preflight:
        """Check on few tokens that the engine of a one pass repeats itself; see `preflight`."""
        engine, layout = self._hooked(len(settings), chunks)
        # The engine's buffer has room for the scored positions of a micro-batch; more would abort it.
        head = chunks.tokens[0][: chunks.n_scored]
        return short_preflight(engine, self.model, head, room=layout.n_sequences)

    def hook_difference(
        self, chunks: ChunkSet, experts: int, *, sampled: bool = False, folder: Path | None = None
    ) -> float:
        """Return the largest logit difference between the router hook and the override.

        Args:
            chunks: The first one is decoded both ways.
            experts: Experts to keep.
            sampled: Decode a few tokens of a small sample of the model instead, see `sampled_equality`.
            folder: Where the sample is made; None for the system's folder for temporary files.

        Raises:
            ModelFileError: No sample can be made.
            EngineError: The engine refused one of the two ways.
        """
        self.close_engine()
        if sampled:
            most = min(SAMPLE_BYTES, _room() // 4)
            return sampled_equality(
                self.model, self.options, experts=experts, most_bytes=most, folder=folder, log=self._log
            )
        first, last = chunks.first, chunks.last
        return equality(self.model, self.options, chunks.tokens[0], first, last, experts=experts, log=self._log)

    def record_baseline(
        self, run: RunStore, *, logits: LogitsMode, top_k: int | None = None, progress: ProgressListener = _no_progress
    ) -> dict[str, Any]:
        """See `PassRunner.record_baseline`; progress says what was read."""
        with self._watched(progress) as listen:
            return super().record_baseline(run, logits=logits, top_k=top_k, progress=listen)

    def run_setting(
        self, run: RunStore, setting: Setting, *, progress: ProgressListener = _no_progress
    ) -> dict[str, Any]:
        """See `PassRunner.run_setting`; progress says what was read."""
        with self._watched(progress) as listen:
            return super().run_setting(run, setting, progress=listen)

    def run_one_pass(
        self,
        run: RunStore,
        settings: Sequence[Setting],
        *,
        logits: LogitsMode = "full",
        top_k: int | None = None,
        write_baseline: bool = False,
        n_chunks: int | None = None,
        progress: ProgressListener = _no_progress,
    ) -> dict[str, dict[str, Any]]:
        """Run all settings, and the baseline with them, over the chunks of a run; see `onepass.run_one_pass`.

        Args:
            run: Where the chunks are and chunk files go.
            settings: Settings that are routing policies.
            logits: Whether KLD is computed from the whole distribution or bounded from its top.
            top_k: Tokens of the baseline kept exactly.
            write_baseline: Also write the baseline's recording.
            n_chunks: Only the first so many chunks; what is already there is kept, so a later call goes on.
            progress: Called after each block.
        """
        chunks = load_chunks(run)
        engine, layout = self._hooked(len(settings), chunks)
        if n_chunks is not None:
            part = slice(0, min(n_chunks, chunks.n_chunks))
            chunks = replace(
                chunks, tokens=chunks.tokens[part], targets=chunks.targets[part], cluster=chunks.cluster[part]
            )
        with self._watched(progress) as listen:
            return run_one_pass(
                engine,
                run,
                chunks,
                settings,
                layout=layout,
                logits=logits,
                top_k=top_k,
                write_baseline=write_baseline,
                progress=listen,
            )

    def _hooked(self, n_settings: int, chunks: ChunkSet) -> tuple[Engine, Layout]:
        """Return the engine of a one pass over all chunks, and the layout it was loaded for."""
        layout = one_pass_layout(n_settings, chunks.n_chunks, chunks.n_ctx, self.options.n_ubatch)
        if self._engine is None or self._layout != layout:
            self.close_engine()
            self._engine = load_engine(
                self.model,
                BASELINE,
                layout.options(self.options),
                n_ctx=chunks.n_ctx,
                n_sequences=layout.n_sequences,
                n_outputs=layout.n_sequences * min(layout.piece, chunks.n_scored),
                hooked=True,
                log=self._log,
            )
            self._layout = layout
        return self._engine, layout

    def load(self, chunks: ChunkSet, n_settings: int | None) -> None:
        """Load the engine of a one pass with so many settings, or for None that of the baseline.

        Raises:
            ContextError: Memory does not hold its context.
        """
        if n_settings is None:
            self._load(BASELINE)
        else:
            self._hooked(n_settings, chunks)

    def close_engine(self) -> None:
        """Free the engine and keep what is held."""
        super().close_engine()
        self._layout = None

    def close(self) -> None:
        """Free the engine and let go of what is held."""
        self.close_engine()
        if self._hold is not None:
            self._hold.close()
            self._hold = None
