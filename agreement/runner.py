"""Everything a worker can be asked: separate passes, one pass for all settings, and whether both agree.

In: a model file, options, a run directory.  Out: chunk files and small results, as from `PassRunner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agreement.engine import load_engine
from agreement.onepass import Layout, equality, one_pass_layout, run_one_pass
from agreement.recording import LogitsMode, PassRunner, ProgressListener, load_chunks
from agreement.records import ChunkSet, Setting
from agreement.settings import BASELINE
from agreement.store import RunStore


def _no_progress(_progress: object) -> None:
    """Listen to nothing."""


class FullRunner(PassRunner):
    """A `PassRunner` that can also run many settings in one pass."""

    _layout: Layout | None = None

    def hook_difference(self, chunks: ChunkSet, experts: int) -> float:
        """Return the largest logit difference between the router hook and the override on the first chunk."""
        self.close()
        first, last = chunks.first, chunks.last
        return equality(self.model, self.options, chunks.tokens[0], first, last, experts=experts, log=self._log)

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
        layout = one_pass_layout(len(settings), chunks.n_chunks, chunks.n_ctx, self.options.n_ubatch)
        if n_chunks is not None:
            part = slice(0, min(n_chunks, chunks.n_chunks))
            chunks = replace(
                chunks, tokens=chunks.tokens[part], targets=chunks.targets[part], cluster=chunks.cluster[part]
            )
        if self._engine is None or self._layout != layout:
            self.close()
            self._engine = load_engine(
                self.model,
                BASELINE,
                layout.options(self.options),
                n_ctx=chunks.n_ctx,
                n_sequences=layout.n_sequences,
                hooked=True,
                log=self._log,
            )
            self._layout = layout
        return run_one_pass(
            self._engine,
            run,
            chunks,
            settings,
            layout=layout,
            logits=logits,
            top_k=top_k,
            write_baseline=write_baseline,
            progress=progress,
        )

    def close(self) -> None:
        """Free the engine."""
        super().close()
        self._layout = None
