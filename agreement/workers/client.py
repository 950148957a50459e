"""The parent's side of a worker process.

In: calls.  Out: results, progress, and an `EngineError` with the engine's last words if the process dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from agreement.engine.log import EngineLog
from agreement.errors import EngineDiedError, EngineError, KilledForMemoryError, ModelFileError
from agreement.preflight import Preflight
from agreement.recording import LogitsMode, Progress, ProgressListener, Vocabulary
from agreement.records import ChunkSet, EngineOptions, ModelFile, Setting
from agreement.store import RunStore
from agreement.streaming import Counters, memory_kills
from agreement.workers import spawn

_LAST_BYTES = 65536


class Runner(Protocol):
    """What runs passes: `FullRunner` in this process, `WorkerRunner` in another."""

    def tokenise(self, texts: Sequence[str]) -> Vocabulary:
        """See `PassRunner.tokenise`."""
        ...

    def preflight(self, chunks: ChunkSet, *, short: bool = False) -> Preflight:
        """See `PassRunner.preflight`."""
        ...

    def record_baseline(
        self, run: RunStore, *, logits: LogitsMode, top_k: int | None = None, progress: ProgressListener = ...
    ) -> dict[str, Any]:
        """See `PassRunner.record_baseline`."""
        ...

    def run_setting(self, run: RunStore, setting: Setting, *, progress: ProgressListener = ...) -> dict[str, Any]:
        """See `PassRunner.run_setting`."""
        ...

    def hook_difference(self, chunks: ChunkSet, experts: int, *, sampled: bool = False) -> float:
        """See `FullRunner.hook_difference`."""
        ...

    def run_one_pass(
        self,
        run: RunStore,
        settings: Sequence[Setting],
        *,
        logits: LogitsMode = ...,
        top_k: int | None = None,
        write_baseline: bool = False,
        n_chunks: int | None = None,
        progress: ProgressListener = ...,
    ) -> dict[str, dict[str, Any]]:
        """See `FullRunner.run_one_pass`."""
        ...

    def configure(self, options: EngineOptions, n_sequences: int) -> EngineOptions:
        """See `FullRunner.configure`."""
        ...

    def measure(self, n_ubatch: int, n_sequences: int, n_outputs: int) -> tuple[str, ...]:
        """See `FullRunner.measure`."""
        ...

    def hold(self, n_bytes: int, keep_free: int) -> str:
        """See `FullRunner.hold`."""
        ...

    def counters(self) -> Counters:
        """See `FullRunner.counters`."""
        ...

    def check_one_pass(self, chunks: ChunkSet, settings: Sequence[Setting]) -> Preflight:
        """See `FullRunner.check_one_pass`."""
        ...

    def load(self, chunks: ChunkSet, n_settings: int | None) -> None:
        """See `FullRunner.load`."""
        ...

    def close(self) -> None:
        """Free the engine."""
        ...


def _ignore(_progress: Progress) -> None:
    """Listen to nothing."""


class WorkerRunner:
    """Runs `FullRunner` in a process of its own.

    The process starts with `prepare` or the first call and serves all later ones; after a crash the next call starts
    another.

    Args:
        model: The model file.
        options: Engine options.
        n_ctx: Tokens a chunk.
        log_path: File that takes the engine's log and whatever it prints while dying.
        lock: Descriptor of the run's lock; the worker inherits it, so the run stays locked as long as anyone writes.
    """

    def __init__(
        self, model: ModelFile, options: EngineOptions, n_ctx: int, *, log_path: Path, lock: int | None = None
    ) -> None:
        self._args = (model, options, n_ctx)
        self._log_path = log_path
        self._lock = lock
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None
        self._greeted = False
        self._configured: tuple[EngineOptions, int] | None = None
        self._kills: int | None = None

    def tokenise(self, texts: Sequence[str]) -> Vocabulary:
        """See `PassRunner.tokenise`."""
        result: Vocabulary = self._call("tokenise", (list(texts),))
        return result

    def preflight(self, chunks: ChunkSet, *, short: bool = False) -> Preflight:
        """See `PassRunner.preflight`."""
        result: Preflight = self._call("preflight", (chunks,), {"short": short})
        return result

    def record_baseline(
        self,
        run: RunStore,
        *,
        logits: LogitsMode,
        top_k: int | None = None,
        progress: ProgressListener = _ignore,
    ) -> dict[str, Any]:
        """See `PassRunner.record_baseline`."""
        result: dict[str, Any] = self._call(
            "record_baseline", (run,), {"logits": logits, "top_k": top_k}, progress=progress
        )
        return result

    def run_setting(self, run: RunStore, setting: Setting, *, progress: ProgressListener = _ignore) -> dict[str, Any]:
        """See `PassRunner.run_setting`."""
        result: dict[str, Any] = self._call("run_setting", (run, setting), progress=progress)
        return result

    def hook_difference(self, chunks: ChunkSet, experts: int, *, sampled: bool = False) -> float:
        """See `FullRunner.hook_difference`.

        The folder of the sample is made and deleted here: a worker that is killed cannot.
        """
        result: float
        if not sampled:
            result = self._call("hook_difference", (chunks, experts))
            return result
        try:
            folder = TemporaryDirectory(prefix="agreement-", ignore_cleanup_errors=True)
        except OSError as error:
            raise ModelFileError(f"no sample can be made: {error.filename}: {error.strerror}") from error
        with folder as place:
            result = self._call("hook_difference", (chunks, experts), {"sampled": True, "folder": Path(place)})
        return result

    def run_one_pass(
        self,
        run: RunStore,
        settings: Sequence[Setting],
        *,
        logits: LogitsMode = "full",
        top_k: int | None = None,
        write_baseline: bool = False,
        n_chunks: int | None = None,
        progress: ProgressListener = _ignore,
    ) -> dict[str, dict[str, Any]]:
        """See `FullRunner.run_one_pass`."""
        kwargs = {"logits": logits, "top_k": top_k, "write_baseline": write_baseline, "n_chunks": n_chunks}
        result: dict[str, dict[str, Any]] = self._call(
            "run_one_pass", (run, tuple(settings)), kwargs, progress=progress
        )
        return result

    def configure(self, options: EngineOptions, n_sequences: int) -> EngineOptions:
        """See `FullRunner.configure`."""
        result: EngineOptions = self._call("configure", (options, n_sequences))
        self._configured = (options, n_sequences)
        return result

    def measure(self, n_ubatch: int, n_sequences: int, n_outputs: int) -> tuple[str, ...]:
        """See `FullRunner.measure`."""
        result: tuple[str, ...] = self._call("measure", (n_ubatch, n_sequences, n_outputs))
        return result

    def hold(self, n_bytes: int, keep_free: int) -> str:
        """See `FullRunner.hold`."""
        result: str = self._call("hold", (n_bytes, keep_free))
        return result

    def counters(self) -> Counters:
        """See `FullRunner.counters`."""
        result: Counters = self._call("counters", ())
        return result

    def check_one_pass(self, chunks: ChunkSet, settings: Sequence[Setting]) -> Preflight:
        """See `FullRunner.check_one_pass`."""
        result: Preflight = self._call("check_one_pass", (chunks, tuple(settings)))
        return result

    def load(self, chunks: ChunkSet, n_settings: int | None) -> None:
        """See `FullRunner.load`."""
        self._call("load", (chunks, n_settings))

    def close(self) -> None:
        """End the worker, whatever it is doing."""
        if self._process is None:
            return
        self._pipe.close()
        self._process.kill()
        self._process.wait()
        self._process = None

    def prepare(self) -> None:
        """Start the process now, so that it loads its libraries while the caller reads text."""
        if self._process is None:
            self._spawn()

    def _spawn(self) -> None:
        child = spawn.take()
        self._process, self._pipe = child.process, child.pipe
        self._greeted = False
        self._kills = memory_kills()
        with self._log_path.open("ab") as log, contextlib.suppress(OSError):  # a dead worker shows at the first call
            spawn.hand_over(child, (log.fileno(), *(() if self._lock is None else (self._lock,))))

    def _call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        progress: ProgressListener = _ignore,
    ) -> Any:
        self.prepare()
        if not self._greeted:
            self._exchange(("", self._args, {}), _ignore, "start")
            self._greeted = True
            if self._configured is not None and method != "configure":  # in place of one that died
                self._exchange(("configure", self._configured, {}), _ignore, "start")
        return self._exchange((method, args, kwargs or {}), progress, method)

    def _exchange(self, message: tuple[str, Any, Any], progress: ProgressListener, what: str) -> Any:
        last: Progress | None = None
        try:
            self._tell(message, what)
            while True:
                kind, value = self._answer(what, last)
                if kind == "error":
                    break
                if kind != "progress":
                    return value
                last = value
                progress(value)
        except BaseException:  # Ctrl-C or the listener's own: the worker is at work, its answer would meet another call
            self.close()
            raise
        raise value

    def _tell(self, message: tuple[str, Any, Any], what: str) -> None:
        try:
            self._pipe.send(message)
        except ConnectionError:
            raise self._obituary(what, None) from None

    def _answer(self, what: str, last: Progress | None) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._obituary(what, last) from None
        return answer

    def _obituary(self, what: str, last: Progress | None) -> EngineError:
        """Return one line on how the worker died: signal or status, where it was, its last words."""
        process, self._process = self._process, None
        status = process.wait() if process is not None else 0
        where = f"{last.pass_name} after chunk {last.done} of {last.total}" if last else what.replace("_", " ")
        resumable = self._log_path.with_name("run.json").exists()
        left = "nothing of the run was written yet"  # then the log does not stay either
        if resumable:
            left = f"its whole log is {self._log_path}; whole chunks are kept"
        if status == -signal.SIGKILL and self._kills is not None and (memory_kills() or 0) > self._kills:
            what = f"the system killed the engine's process during {where}, because memory ran out"
            return KilledForMemoryError(what, left=left, resumable=resumable)
        cause = f"exit status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                cause = signal.Signals(-status).name
        hint = " (out of memory?)" if status == -signal.SIGKILL else ""
        what = f"the engine's process died with {cause}{hint} during {where}: {self._last_words()}"
        return EngineDiedError(what, left=left, resumable=resumable)

    def _last_words(self) -> str:
        with self._log_path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LAST_BYTES))
            tail = file.read().decode("utf-8", errors="replace")
        log = EngineLog()
        log.feed(tail + "\n")
        return log.last_words()
