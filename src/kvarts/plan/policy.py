"""The eviction policy as a setting: on the command line, in files and in grids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.settings import Given, Section, setting

if TYPE_CHECKING:
    from kvarts.sim.traffic.trace import Trace

__all__ = ["KEY", "SECTION", "PolicySettings", "check_policy", "with_policy"]

StructT = TypeVar("StructT", bound=msgspec.Struct)
KEY = "eviction"


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The eviction policy, by name."""

    eviction: Annotated[
        str | None,
        setting(
            "Which cached pages go next: a policy of `kvarts plan policies`, such as auto; on the command line "
            "also module:Class.",
            metavar="NAME",
            default="lru",
        ),
    ] = None


SECTION = Section(struct=PolicySettings, title="Engine and load")


def check_policy(given: Given, key: str = KEY) -> None:
    """Raise ConfigError if `key` is given and is not a policy."""
    from kvarts.sim.traffic.trace import Trace

    if key in given:
        _find(given, Trace([]), key)


def with_policy(config: StructT, given: Given, trace: Trace | None, key: str = KEY) -> StructT:
    """Return `config`, which has an `eviction`, with the policy that was given by `key`, if any.

    `trace`: the requests, where they are known beforehand. Raise ConfigError if it is not a policy.
    """
    return msgspec.structs.replace(config, eviction=_find(given, trace, key)) if key in given else config


def _find(given: Given, trace: Trace | None, key: str) -> Any:
    from kvarts.sim.eviction import order_maker

    if ":" in given[key] and given.source_of(key).path is not None:
        # Configuration files are shared; opening one must not run code from its directory.
        raise given.error(
            key, "names code, which no file may", hint=f"Give it on the command line: --eviction {given[key]}."
        )
    try:
        make = order_maker(given[key], trace)
        if trace is None:
            make()  # an order that needs a trace raises
    except ConfigError as error:
        raise given.error(key, error.what, hint=error.hint) from error
    return make
