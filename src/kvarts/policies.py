"""Parts that decide, in an engine or in front of it: eviction orders, admission policies, routers, tiers, cost models.

A setting for one of them accepts a class, an object or a name, as `ReplayConfig(eviction=...)` does. `kvarts.testing`
has the contract of each.

>>> import kvarts
>>> from kvarts.policies import RankedOrder
>>> class FewestHits(RankedOrder):
...     def rank(self, node, hits, born):
...         return hits, self.now
>>> config = kvarts.ReplayConfig(num_pages=2_000, page_size=512, eviction=FewestHits)
>>> kvarts.replay("sample:mooncake", config).summary["config"]["eviction"]
'FewestHits'
"""

from kvarts.core.executor import CostModel
from kvarts.core.hints import Hints
from kvarts.core.kv.eviction import BaseOrder, EvictionOrder, LruOrder, Run
from kvarts.core.request import Request
from kvarts.core.sched.policy import NEVER_NS, AdmissionPolicy, PriorityPolicy
from kvarts.core.tiers.tier import MemoryTier
from kvarts.sim.auto_order import AutoOrder
from kvarts.sim.orders import HintedOrder, RankedOrder, SoonestReturnOrder, TimedOrder
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.view import Asked, Needs, RouterPolicy, View

__all__ = [
    "NEVER_NS",
    "AdmissionPolicy",
    "Asked",
    "AutoOrder",
    "BaseOrder",
    "CostModel",
    "EvictionOrder",
    "HintedOrder",
    "Hints",
    "LruOrder",
    "MemoryTier",
    "Needs",
    "PriorityPolicy",
    "RankedOrder",
    "Request",
    "RouterPolicy",
    "Routing",
    "Run",
    "SoonestReturnOrder",
    "TimedOrder",
    "View",
]
