"""Passes in a process of their own: a crash of the engine costs one pass and gives a message."""

from agreement.workers.client import Runner, WorkerRunner

__all__ = ["Runner", "WorkerRunner"]
