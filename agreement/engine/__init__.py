"""Engines: token ids in, logits out.  Nothing here knows of text corpora, recordings or scores."""

from agreement.engine.base import Engine, EngineInfo, LogitsPart, SettingProof, engine_build, load_engine

__all__ = ["Engine", "EngineInfo", "LogitsPart", "SettingProof", "engine_build", "load_engine"]
