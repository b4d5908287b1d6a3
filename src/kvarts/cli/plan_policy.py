"""The part of `kvarts replay` for eviction policies of the league."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarts.base.settings import Given, Section
from kvarts.cli.parts import CommandPart, ReplayRun
from kvarts.cli.replaying import OneRun
from kvarts.plan.policy import KEY, SECTION, check_policy, with_policy

if TYPE_CHECKING:
    from kvarts.sim.traffic.trace import Trace

__all__ = ["PART", "PolicyRun"]


class PolicyPart(CommandPart):
    """An eviction policy, by name. Policies that use the ends of sessions learn these from the trace."""

    sections = (SECTION,)

    def check(self, given: Given) -> None:
        """Raise ConfigError for an unknown policy."""
        check_policy(given)

    def run(
        self, given: Given, trace: Path | None, sections: Sequence[Section], places: dict[str, Any]
    ) -> ReplayRun | None:
        """Return the run if a policy is given, unless it is that of several models."""
        if KEY not in given or given.names("models"):
            return None
        return PolicyRun(given, trace, sections)


PART = PolicyPart()


class PolicyRun(OneRun):
    """A replay with the given policy."""

    def load(self) -> tuple[Trace, Sequence[Trace]]:
        """Load the trace, and pass its sessions to the policy."""
        traffic, traces = super().load()
        self.config = with_policy(self.config, self._given, traffic)
        return traffic, traces
