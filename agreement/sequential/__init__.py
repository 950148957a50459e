"""Counts of one cluster after another flow in, a verdict flows out as soon as it is safe; pure.

The gate's own interval is looked at again and again, each time at a confidence so much higher that all looks together
err no more often than one look of a fixed run. Saying "at least" takes one thing more: enough clusters to make it
unlikely that rare bad ones exist and none has been drawn. `docs/sequential.md` has the reasons,
`reports/sequential.md` the simulated errors.

`run_many` plays many runs at once for simulations; `SequentialTest` plays one. Both ask `judge_look`.
"""

from agreement.sequential.looks import Ended, Looked, ends, judge_look, run_many, unseen
from agreement.sequential.rules import Rules, make_rules, spend
from agreement.sequential.run import METHOD, SequentialTest, State

__all__ = [
    "METHOD",
    "Ended",
    "Looked",
    "Rules",
    "SequentialTest",
    "State",
    "ends",
    "judge_look",
    "make_rules",
    "run_many",
    "spend",
    "unseen",
]
