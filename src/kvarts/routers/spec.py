"""Policies by name: `llm-d:prefix=3,queue=2`, or `module:Class` for your own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvarts.errors import ConfigError, did_you_mean
from kvarts.limits import brief
from kvarts.rooms import code_named, is_code_name
from kvarts.routers.policies import (
    AibrixPrefix,
    BySession,
    DynamoKv,
    LeastLoaded,
    LlmD,
    PowerOfTwo,
    PrefixAware,
    ProductionStackKv,
    ProductionStackPrefix,
    RoundRobinPolicy,
    SglangCacheAware,
    VllmRanks,
)
from kvarts.sched.rank_loads import RANKS_STALENESS_NS
from kvarts.settings import SettingError

__all__ = ["POLICIES", "policy_of", "split_names"]

POLICIES: dict[str, type[msgspec.Struct]] = {
    "round-robin": RoundRobinPolicy,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "session": BySession,
    "prefix": PrefixAware,
    "dynamo-kv": DynamoKv,
    "llm-d": LlmD,
    "sglang-cache-aware": SglangCacheAware,
    "production-stack-prefix": ProductionStackPrefix,
    "production-stack-kv": ProductionStackKv,
    "aibrix-prefix": AibrixPrefix,
    "vllm-ranks": VllmRanks,
}

STALENESS_NS = {"llm-d": 50_000_000, "vllm-ranks": RANKS_STALENESS_NS}
"""Default maximum age of metrics: llm-d polls them every 50 ms, vLLM's ranks report theirs every 100 ms. Other policies
see current ones."""


def split_names(text: str) -> list[str]:
    """Return the routers in a comma-separated list, whose options may themselves be separated by commas."""
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part.strip())
    return names


def policy_of(router: str | Callable[[], Any]) -> Any:
    """Return a new Policy: by name, or made by a class or a function without arguments.

    Raise ConfigError for the field `router`.
    """
    if callable(router):
        return _made(router, getattr(router, "__name__", repr(router)))
    if is_code_name(router):
        return _imported(router)
    name, _, options = router.partition(":")
    struct = POLICIES.get(name)
    if struct is None:
        hint = did_you_mean(name, list(POLICIES)) or "For one of your own, give module:Class."
        raise SettingError(f"must be one of {', '.join(POLICIES)}, got {name!r}", "router", hint=hint)
    values: dict[str, Any] = {}
    known = {} if not msgspec.structs.fields(struct) else {each.name: each for each in msgspec.structs.fields(struct)}
    known.pop("next_turn", None)
    for part in options.split(",") if options else ():
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            hint = f"Known: {', '.join(known)}." if known else f"{name} has no options."
            raise SettingError(f"{name} has no option {part!r}", "router", hint=hint)
        if key in values:
            raise SettingError(f"{name} has {key} twice", "router")
        values[key] = value
    try:
        made: Any = msgspec.convert(values, struct, strict=False)
    except msgspec.ValidationError as error:
        raise SettingError(f"{name}: {error}", "router", hint="Write NAME:key=value,key=value.") from error
    except ConfigError as error:
        raise SettingError(f"{name}: {error.field} {error.what}", "router", hint=error.hint) from error
    return made.open() if hasattr(made, "open") else made


def _imported(text: str) -> Any:
    try:
        return _made(code_named(text), text)
    except ConfigError as error:
        hint = "Name a policy, or module:Class of a module that Python finds."
        raise SettingError(error.what, "router", hint=error.hint or hint) from error


def _made(maker: Callable[[], Any], name: str) -> Any:
    try:
        made = maker()
    except TypeError as error:
        hint = "Give a class, or a function without arguments that makes one."
        raise SettingError(f"{name} makes no router: {error}", "router", hint=hint) from error
    return _checked(made, name)


def _checked(policy: Any, name: str) -> Any:
    if not callable(getattr(policy, "choose", None)):
        hint = "See kvarts.routers.view.Policy for what a policy has."
        raise SettingError(f"{name} has no choose", "router", hint=hint)
    needs = getattr(policy, "needs", None)
    if needs is not None and not hasattr(needs, "pages"):
        hint = "Write needs = Needs(metrics=True), with Needs of kvarts."
        raise SettingError(f"{name} has needs that are not a Needs: {brief(needs)}", "router", hint=hint)
    return policy
