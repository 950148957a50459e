"""Starting a worker process, possibly before it is known what for.

In: nothing; later the files that the worker shall hold open.  Out: a process and the pipe to it.

A worker needs half a second to load numpy and the engine, and so does the parent to load the rest: a command that will
run passes calls `start_spare` first of all, and both load side by side.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import NamedTuple


class Child(NamedTuple):
    """A worker that has been started and told nothing yet.

    Attributes:
        process: The process.
        pipe: Our end of the pipe to it.
    """

    process: subprocess.Popen[bytes]
    pipe: Connection


_spares: list[Child] = []


def start() -> Child:
    """Start a worker; what it prints goes nowhere until it is handed its log."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
        [sys.executable, "-m", "agreement.workers.child", str(theirs.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
    )
    theirs.close()
    return Child(process, Connection(ours.detach()))


def start_spare() -> None:
    """Start a worker for the next `take`; one that nobody takes ends with this process."""
    if not _spares:
        _spares.append(start())


def take() -> Child:
    """Return a worker: the spare one if it is alive, else a new one."""
    while _spares:
        child = _spares.pop()
        if child.process.poll() is None:
            return child
    return start()


def hand_over(child: Child, descriptors: tuple[int, ...]) -> None:
    """Give a worker open files: first its log, then whatever it shall keep open.

    Raises:
        OSError: The worker is gone.
    """
    child.pipe.send(len(descriptors))
    with socket.socket(fileno=os.dup(child.pipe.fileno())) as channel:
        socket.send_fds(channel, [b"."], list(descriptors))


def receive(pipe: Connection) -> list[int]:
    """Return the open files that `hand_over` gives, on the worker's side."""
    count = pipe.recv()
    with socket.socket(fileno=os.dup(pipe.fileno())) as channel:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, count)
    return list(descriptors)
