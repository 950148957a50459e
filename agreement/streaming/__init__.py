"""Models larger than memory: a plan that reads the weights as few times as possible, and what carries it out.

In: a model's header, memory, what is to be run.  Out: `ReadingPlan`; `Hold`, which locks part of the file in memory;
counters of what was really read.
"""

from agreement.streaming.budget import Choice, ReadingPlan, plan_reading
from agreement.streaming.costs import Costs, estimated_costs, measured_costs
from agreement.streaming.disk import read_speed
from agreement.streaming.hold import Hold, Span, hold_order, lock_allowance
from agreement.streaming.io import Counters, MemoryUse, bytes_read, memory_available, memory_kills, memory_use
from agreement.streaming.shapes import Host, Passes, Wishes, Work
from agreement.streaming.watch import RoomWatch

__all__ = [
    "Choice",
    "Costs",
    "Counters",
    "Hold",
    "Host",
    "MemoryUse",
    "Passes",
    "ReadingPlan",
    "RoomWatch",
    "Span",
    "Wishes",
    "Work",
    "bytes_read",
    "estimated_costs",
    "hold_order",
    "lock_allowance",
    "measured_costs",
    "memory_available",
    "memory_kills",
    "memory_use",
    "plan_reading",
    "read_speed",
]
