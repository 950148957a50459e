"""Engines: token ids in, logits out.  Nothing here knows of text corpora, recordings or scores."""

from agreement.engine.base import (
    Engine,
    EngineInfo,
    LogitsPart,
    SettingProof,
    engine_build,
    load_engine,
    measure_context,
)
from agreement.engine.mapping import without_read_ahead

__all__ = [
    "Engine",
    "EngineInfo",
    "LogitsPart",
    "SettingProof",
    "engine_build",
    "load_engine",
    "measure_context",
    "without_read_ahead",
]
