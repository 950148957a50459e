"""What end-to-end tests share: a model and a corpus that are only read."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import models
import pytest
from hypothesis import settings
from small_runs import write_corpus

import agreement.workers.client as client_module
from agreement.workers.client import WorkerRunner

settings.register_profile("agreement", deadline=None)  # a busy machine is no failure
settings.load_profile("agreement")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's `pytest &`; the commands started here would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function that kills this process's worker and lets the kernel have counted it as out of memory."""
    counted = [7]
    workers: list[WorkerRunner] = []
    really_spawn = WorkerRunner._spawn  # to know the worker that lives

    def spawn(self: WorkerRunner) -> None:
        really_spawn(self)
        workers.append(self)

    def kill() -> None:
        counted[0] += 1
        process = workers[-1]._process  # the same
        if process is not None:
            process.kill()
            process.wait()

    monkeypatch.setattr(client_module, "memory_kills", lambda: counted[0])
    monkeypatch.setattr(WorkerRunner, "_spawn", spawn)
    return kill
