"""The eviction policy as a setting: on the command line, in files and in grids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvarts.errors import ConfigError
from kvarts.settings import Given, Section, setting

if TYPE_CHECKING:
    from kvarts.sim.config import ReplayConfig
    from kvarts.traffic.trace import Trace

__all__ = ["KEY", "SECTION", "PolicySettings", "check_policy", "with_policy"]

KEY = "eviction"


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The eviction policy, by name."""

    eviction: Annotated[
        str | None,
        setting(
            "Which cached pages go next: a policy of `kvarts plan --league`, such as arc; on the command line "
            "also module:Class.",
            metavar="NAME",
            default="lru",
        ),
    ] = None


SECTION = Section(struct=PolicySettings, title="Engine and load")


def check_policy(given: Given) -> None:
    """Raise ConfigError if `eviction` is given and is not a policy."""
    from kvarts.traffic.trace import Trace

    if KEY in given:
        _find(given, Trace([]))


def with_policy(config: ReplayConfig, given: Given, trace: Trace | None) -> ReplayConfig:
    """Return `config` with the policy that was given, if any. Raise ConfigError if it is not a policy.

    `trace`: the requests, where they are known beforehand.
    """
    return msgspec.structs.replace(config, eviction=_find(given, trace)) if KEY in given else config


def _find(given: Given, trace: Trace | None) -> Any:
    from kvarts.plan.league import find_policy

    if ":" in given[KEY] and given.source_of(KEY).path is not None:
        # Configuration files are shared; opening one must not run code from its directory.
        raise given.error(
            KEY, "names code, which no file may", hint=f"Give it on the command line: --eviction {given[KEY]}."
        )
    try:
        return find_policy(given[KEY], trace)
    except ConfigError as error:
        raise given.error(KEY, error.what, hint=error.hint) from error
