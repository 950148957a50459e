"""The frozen records that travel between stages.

In and out: nothing.  Nothing here computes more than a property; nothing here reads files.
"""

from __future__ import annotations

from agreement.records.arrays import Float32Array, Float64Array, Int32Array
from agreement.records.model import EngineOptions, MetadataOverride, ModelFile, OverrideType, Setting
from agreement.records.results import Difference, Estimate, Judgement, Metric, Report, Requirement, Row, Verdict
from agreement.records.scores import Counts, PositionScores
from agreement.records.text import Chunking, ChunkSet, Corpus, Document, Skipped

__all__ = [
    "ChunkSet",
    "Chunking",
    "Corpus",
    "Counts",
    "Difference",
    "Document",
    "EngineOptions",
    "Estimate",
    "Float32Array",
    "Float64Array",
    "Int32Array",
    "Judgement",
    "MetadataOverride",
    "Metric",
    "ModelFile",
    "OverrideType",
    "PositionScores",
    "Report",
    "Requirement",
    "Row",
    "Setting",
    "Skipped",
    "Verdict",
]
