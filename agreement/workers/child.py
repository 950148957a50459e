"""The worker process: `python -m agreement.workers.child FD`, started by `WorkerRunner`.

In: pickled calls of `FullRunner` methods on a pipe.  Out: progress and results on the same pipe; the engine's log on
standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from agreement.errors import AgreementError
from agreement.recording import Progress
from agreement.runner import FullRunner
from agreement.workers.spawn import receive

_PR_SET_PDEATHSIG = 1
_WITH_PROGRESS = frozenset({"record_baseline", "run_setting", "run_one_pass"})


def _end_with_parent() -> None:
    """Die when the parent dies, so that a killed run leaves nobody writing; where the kernel offers it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_first() -> None:
    """Offer this process to the kernel before others when memory runs out: its parent then can go on with less."""
    with contextlib.suppress(OSError):  # another system
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


def serve(pipe: Connection) -> None:
    """Answer calls until the pipe closes.

    A message is `(method, args, kwargs)`, the first one `("", args of FullRunner, {})`.  Answers are
    `("progress", Progress)`, `("result", value)`, `("error", AgreementError)`.
    """
    _, args, _ = pipe.recv()
    runner: FullRunner | None = None
    while True:
        try:
            if runner is None:
                runner = FullRunner(*args, log=_write_line)
                answer: object = None
            else:
                method, args, kwargs = pipe.recv()
                if method in _WITH_PROGRESS:
                    kwargs["progress"] = lambda progress: _send_progress(pipe, progress)
                answer = getattr(runner, method)(*args, **kwargs)
            pipe.send(("result", answer))
        except EOFError:
            return
        except AgreementError as error:
            pipe.send(("error", error))


def _write_line(line: str) -> None:
    """Write a line of the engine's log at once: if the engine aborts, its last words must already be in the file."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _send_progress(pipe: Connection, progress: Progress) -> None:
    pipe.send(("progress", progress))


def main() -> None:
    """Serve on the pipe whose descriptor is the first argument; the second is the parent's process id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    _end_with_parent()
    _die_first()
    if os.getppid() != int(sys.argv[2]):  # it died before the line above
        return
    with Connection(int(sys.argv[1])) as pipe, contextlib.suppress(BrokenPipeError, EOFError):
        log, *kept_open = receive(pipe)  # the lock, if there is one, stays open as long as this process
        for standard in (sys.stdout, sys.stderr):
            os.dup2(log, standard.fileno())
        serve(pipe)
        del kept_open


if __name__ == "__main__":
    main()
