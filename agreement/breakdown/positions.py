"""The scores of all chunks of one setting as arrays, and their reading from a run.

In: a run directory, or chunks with their position scores.  Out: `Positions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agreement.errors import StoreError, UsageError
from agreement.recording import load_chunks, stored_scores
from agreement.records import ChunkSet, Float32Array, Float64Array, Int32Array, PositionScores
from agreement.store import RunStore

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Positions:
    """Every scored position of one setting; unless said otherwise arrays are (n_chunks, n_scored).

    Attributes:
        title: The run's name.
        setting: The setting's name.
        cluster_names: One a cluster.
        cluster: (n_chunks,) int32, index into `cluster_names`.
        first: Position in the chunk of column 0.
        base_top: int32, the baseline's argmax.
        test_top: int32, the setting's argmax.
        target: int32, the true next token.
        margin: float32, the baseline's top-1 minus top-2 log-probability, nats; infinite for a vocabulary of one token.
        dp: float64, probability of the true token, setting minus baseline.
        kld_low: float32, nats, KL divergence baseline‖setting or its lower bound.
        kld_high: float32, nats, the same value or its upper bound.
        n_ambiguous: Positions where the stored baseline cannot tell its two best tokens apart.
    """

    title: str
    setting: str
    cluster_names: tuple[str, ...]
    cluster: Int32Array
    first: int
    base_top: Int32Array
    test_top: Int32Array
    target: Int32Array
    margin: Float32Array
    dp: Float64Array
    kld_low: Float32Array
    kld_high: Float32Array
    n_ambiguous: int

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return int(self.target.shape[0])

    @property
    def n_scored(self) -> int:
        """Scored positions a chunk."""
        return int(self.target.shape[1])

    @property
    def n_positions(self) -> int:
        """Scored positions."""
        return int(self.target.size)

    @property
    def agree(self) -> BoolArray:
        """Whether both argmaxes are the same token."""
        agree: BoolArray = self.base_top == self.test_top
        return agree

    def sums(
        self,
        values: BoolArray | Float32Array | Float64Array | None = None,
        group: NDArray[np.intp] | None = None,
        n_groups: int = 1,
    ) -> Float64Array:
        """Return sums by group and cluster, (n_groups, n_clusters) float64.

        Args:
            values: (n_chunks, n_scored), what to add up; None counts positions.
            group: (n_chunks, n_scored), from 0 below `n_groups`; None puts all positions into group 0.
            n_groups: Number of groups.
        """
        n_clusters = len(self.cluster_names)
        cell = np.broadcast_to(self.cluster[:, None].astype(np.intp), self.target.shape)
        if group is not None:
            cell = group * n_clusters + cell
        weights = None if values is None else values.ravel().astype(np.float64)
        sums = np.bincount(cell.ravel(), weights, minlength=n_groups * n_clusters)
        return sums.astype(np.float64).reshape(n_groups, n_clusters)


def positions(title: str, setting: str, chunks: ChunkSet, scores: Iterable[PositionScores]) -> Positions:
    """Lay the scores of a setting's chunks one below the other.

    Args:
        title: The run's name.
        setting: The setting's name.
        chunks: The token windows.
        scores: One a chunk, in order.

    Raises:
        StoreError: The scores are not of these chunks.
        UsageError: There is no scored position.
    """
    rows = list(scores)
    if not rows or not chunks.n_scored:
        raise UsageError(f"{setting} has no scored position; score at least one chunk")
    if len(rows) != chunks.n_chunks:
        raise StoreError(f"{setting} has scores of {len(rows)} of {chunks.n_chunks} chunks; go on with --resume")
    for index, row in enumerate(rows):
        if not np.array_equal(row.target, chunks.targets[index]):
            raise StoreError(f"{setting}: the scores of chunk {index} are of other tokens; delete them and --resume")
    base_p, test_p = (
        np.exp(np.stack([getattr(row, name) for row in rows]).astype(np.float64))
        for name in ("base_target_logprob", "test_target_logprob")
    )
    return Positions(
        title=title,
        setting=setting,
        cluster_names=chunks.cluster_names,
        cluster=chunks.cluster,
        first=chunks.first,
        base_top=np.stack([row.base_top for row in rows]),
        test_top=np.stack([row.test_top for row in rows]),
        target=np.stack([row.target for row in rows]),
        margin=np.stack([row.base_margin for row in rows]),
        dp=test_p - base_p,
        kld_low=np.stack([row.kld_low for row in rows]),
        kld_high=np.stack([row.kld_high for row in rows]),
        n_ambiguous=sum(int(row.ambiguous.sum()) for row in rows),
    )


def load_positions(path: str | Path, setting: str | None = None) -> Positions:
    """Read the scores of one finished setting of a run.

    Args:
        path: The run directory.
        setting: The setting's name; None takes the only one.

    Raises:
        StoreError: No run there, it is damaged, or a file of the setting's scores is missing.
        UsageError: A file instead of a run; the run has no such setting or has not finished it; or none is named and
            there are several.
    """
    if Path(path).is_file():
        raise UsageError(f"{path} is a file; a breakdown reads the scores of a run: give the run's directory")
    run = RunStore.open(Path(path))
    finished = [name for name in run.header["settings"] if run.is_finished(name)]
    if setting is not None:
        run.require_chunks(setting)
    elif not finished:
        for name in run.header["settings"]:
            run.require_chunks(name)
    if setting is None:
        if len(finished) != 1:
            choice = f"name one of {', '.join(finished)}" if finished else "finish one with --resume"
            raise UsageError(f"{path} has {len(finished)} finished settings; {choice}")
        setting = finished[0]
    if setting not in finished:
        state = "not finished" if setting in run.header["settings"] else "not in the run"
        raise UsageError(f"{setting!r} is {state}; {path} has {', '.join(finished) or 'no finished setting'}")
    chunks = load_chunks(run)
    scores = (stored_scores(run, setting, index) for index in range(chunks.n_chunks))
    return positions(run.path.name, setting, chunks, scores)
