"""What end-to-end tests share: a model and a corpus that are only read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import models
import pytest
from hypothesis import settings
from small_runs import write_corpus

settings.register_profile("agreement", deadline=None)  # a busy machine is no failure
settings.load_profile("agreement")


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny qwen3moe, 8 of 16 experts, float32: one model for all tests, to be read only."""
    return models.write_model(tmp_path_factory.mktemp("model") / "qwen.gguf", "qwen3moe")


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model of 6.4 MB, 8 of 256 experts: larger than its activations, to be read only."""
    dims = replace(models.FAMILIES["qwen3moe"].dims, n_expert=256)
    return models.write_model(tmp_path_factory.mktemp("model") / "wide.gguf", "qwen3moe", dims=dims)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of four texts of about 500 tokens each, to be read only."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")
