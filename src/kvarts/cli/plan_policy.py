"""The part of `kvarts replay` for eviction policies of the league."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvarts.cli.parts import CommandPart, ReplayRun
from kvarts.plan.policy import KEY, SECTION, check_policy
from kvarts.settings import Given, Section

__all__ = ["PART"]


class PolicyPart(CommandPart):
    """An eviction policy, by name. Policies that use the ends of sessions learn these from the trace."""

    sections = (SECTION,)

    def check(self, given: Given) -> None:
        """Raise ConfigError for an unknown policy, and with several models: each has its own eviction order."""
        if KEY in given and given.names("models"):
            raise given.error(KEY, "is for one model", hint="In Python, each model can have its own.")
        check_policy(given)

    def run(
        self, given: Given, trace: Path | None, sections: Sequence[Section], places: dict[str, Any]
    ) -> ReplayRun | None:
        """Return the run if a policy is given."""
        if KEY not in given:
            return None
        from kvarts.cli.plan_run import PolicyRun

        return PolicyRun(given, trace, sections)


PART = PolicyPart()
