"""A replay of one model with an eviction policy of the league."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvarts.cli.replay import OneRun
from kvarts.plan.policy import with_policy

if TYPE_CHECKING:
    from kvarts.traffic.trace import Trace

__all__ = ["PolicyRun"]


class PolicyRun(OneRun):
    """A replay with the given policy."""

    def load(self) -> tuple[Trace, Sequence[Trace]]:
        """Load the trace, and pass its sessions to the policy."""
        traffic, traces = super().load()
        self.config = with_policy(self.config, self._given, traffic)
        return traffic, traces
