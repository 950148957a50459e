"""Scoring: logits in, per-position numbers out; pure functions that know no engine and no file."""

from agreement.scoring.baseline import (
    FULL_TOP_K,
    BaselineRows,
    default_top_k,
    encode_rows,
    quantised_rows,
    row_bytes,
)
from agreement.scoring.compare import RowScores, score_rows
from agreement.scoring.counts import count_chunk, position_scores

__all__ = [
    "FULL_TOP_K",
    "BaselineRows",
    "RowScores",
    "count_chunk",
    "default_top_k",
    "encode_rows",
    "position_scores",
    "quantised_rows",
    "row_bytes",
    "score_rows",
]
