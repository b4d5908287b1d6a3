"""Hints on how long the KV of a request is worth keeping, in the forms in which clients send them.

- `kv_hints`: vLLM's envelope of actions (vLLM pull request 53423). Of the actions, `kv.retain` of version 1 is read:
  its `directives` hold a `priority` from 0 to 100, a `duration` in seconds, or null, and the tokens that they claim,
  from `start` to `end`, or null; `covers_output` adds generated tokens to an open end. These are the ranges of
  TensorRT-LLM's KvCacheRetentionConfig. One directive without a range claims the whole request.
- `nvext`: Dynamo's extension. `agent_hints.priority` and `cache_control` are read.
- `cache_control`: Anthropic's, of a whole request or of a part of it: `{"type": "ephemeral", "ttl": "5m"}`. That of a
  part claims the prompt up to there; here it claims the request.
- `kvarts_hints`: `kvarts.core.hints.Hints`, as rows of traces have them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import asdict, replace

from kvarts.base.decoders import convert
from kvarts.base.errors import parts_of
from kvarts.core.hints import MOST_RANGES, Hints, Priority, RetainedRange, Token
from kvarts.doors.openai.errors import ApiError

__all__ = [
    "NO_PRIORITY",
    "CacheControl",
    "KvHints",
    "NvExt",
    "hints_of",
    "hints_of_parts",
    "longest_of",
    "with_control",
    "with_parts",
]

NO_PRIORITY = "the owner of this key may not set priorities: leave it out"
MOST_ACTIONS = 16
DEFAULT_TTL = "5m"
MOST_TTL_S = 3600
MOST_DURATION_S = 30 * 24 * 3600.0
SECONDS = {"s": 1, "m": 60, "h": 3600}


class CacheControl(msgspec.Struct):
    """A time to live: a number of `s`, `m` or `h`, at most an hour."""

    type: Literal["ephemeral"]
    ttl: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,4}[smh]\Z")] | None = None


class AgentHints(msgspec.Struct):
    """The hint of Dynamo's that is read. The others are for its router."""

    priority: Priority | None = None


class NvExt(msgspec.Struct):
    """Dynamo's extension of a body."""

    agent_hints: AgentHints | None = None
    cache_control: CacheControl | None = None


class Action(msgspec.Struct):
    """One action of vLLM's envelope; only `kv.retain` is read."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any] = {}


class KvHints(msgspec.Struct):
    """vLLM's envelope."""

    protocol_version: str
    message_id: str
    actions: Annotated[list[Action], msgspec.Meta(max_length=MOST_ACTIONS)] = []


class Directive(msgspec.Struct, forbid_unknown_fields=True):
    """A claim of `kv.retain` on a range of tokens."""

    priority: Annotated[int, msgspec.Meta(ge=0, le=100)]
    duration: Annotated[float, msgspec.Meta(ge=0, le=MOST_DURATION_S)] | None = None
    start: Token = 0
    end: Token | None = None
    covers_output: bool = False

    @property
    def ttl_ms(self) -> float | None:
        """`duration` in milliseconds."""
        return None if self.duration is None else 1000.0 * self.duration

    def retained(self) -> RetainedRange:
        """Return it as a range of `Hints`. Raise ValueError for an empty one."""
        covers_output = self.covers_output or self.end is not None
        return RetainedRange(
            start=self.start, end=self.end, priority=self.priority, ttl_ms=self.ttl_ms, covers_output=covers_output
        )


class Retain(msgspec.Struct):
    """The payload of `kv.retain`. `scope` names the owner of the claim, and has no effect here."""

    directives: Annotated[list[Directive], msgspec.Meta(min_length=1, max_length=MOST_RANGES)]
    scope: str | None = None


def hints_of(
    kvarts_hints: Hints | None,
    kv_hints: KvHints | None,
    nvext: NvExt | None,
    cache_control: CacheControl | None,
    *,
    may_prioritize: bool,
) -> Hints | None:
    """Return the hints of a body; None for none.

    Raise ApiError for a bad one, one that is given twice, and a priority of those that may not set any.
    """
    nvext = nvext or NvExt()
    agent_hints = nvext.agent_hints or AgentHints()
    found = {
        "kvarts_hints": kvarts_hints,
        "kv_hints": None if kv_hints is None else _retained(kv_hints),
        "nvext.agent_hints": None if agent_hints.priority is None else Hints(priority=agent_hints.priority),
        "nvext.cache_control": _cached(nvext.cache_control, "nvext.cache_control"),
        "cache_control": _cached(cache_control, "cache_control"),
    }
    merged: Hints | None = None
    for param, hints in found.items():
        if hints is None:
            continue
        if not may_prioritize and (hints.priority or any(each.priority for each in hints.retain)):
            raise ApiError(403, NO_PRIORITY, param=param)
        given = {name: value for name, value in asdict(hints).items() if value not in (None, ())}
        if merged is not None and (twice := [name for name in given if getattr(merged, name) not in (None, ())]):
            raise ApiError(400, f"{twice[0]} is given by another field as well: give it once", param=param)
        merged = hints if merged is None else replace(merged, **given)
    return merged


def hints_of_parts(**fields: object) -> Hints | None:
    """Return the longest time to live of any `cache_control` in `fields` of a body; None without one.

    Raise ApiError for a bad one, by its field.
    """
    longest: Hints | None = None
    left = [(part, name) for name, part in fields.items()]
    while left:
        part, field = left.pop()
        if isinstance(part, list):
            left += [(each, f"{field}[{index}]") for index, each in enumerate(part) if isinstance(each, dict)]
        elif isinstance(part, dict):
            left += [(part[name], f"{field}.{name}") for name in ("content", "function", "output") if name in part]
            if part.get("cache_control") is None:
                continue
            try:
                control = convert(part["cache_control"], CacheControl)
            except msgspec.ValidationError as error:
                what, name = parts_of(error)
                param = f"{field}.cache_control{'.' * bool(name)}{name or ''}"
                raise ApiError(400, what, param=param) from error
            longest = longest_of(_cached(control, f"{field}.cache_control"), longest)
    return longest


def longest_of(*hints: Hints | None) -> Hints | None:
    """Return the hints with the longest time to live; None without any."""
    return max(hints, key=lambda each: -1 if each is None else each.ttl_ms or 0)


def with_control(message: dict[str, Any], hints: Hints | None) -> dict[str, Any]:
    """Return a message with the time to live of `hints`, which its parts or those of others had."""
    if hints is None or hints.ttl_ms is None:
        return message
    return {**message, "cache_control": {"type": "ephemeral", "ttl": f"{round(hints.ttl_ms / 1000)}s"}}


def with_parts(hints: Hints | None, of_parts: Hints | None) -> Hints | None:
    """Return the hints of a request with the time to live of its parts, unless it has one of its own."""
    if hints is None or of_parts is None:
        return hints or of_parts
    return hints if hints.ttl_ms is not None else replace(hints, ttl_ms=of_parts.ttl_ms)


def _cached(control: CacheControl | None, param: str) -> Hints | None:
    if control is None:
        return None
    ttl = control.ttl or DEFAULT_TTL
    ttl_s = int(ttl[:-1]) * SECONDS[ttl[-1]]
    if not 0 < ttl_s <= MOST_TTL_S:
        raise ApiError(400, f"must be from 1s to 1h, got {ttl}", param=f"{param}.ttl")
    return Hints(ttl_ms=1000.0 * ttl_s)


def _retained(envelope: KvHints) -> Hints | None:
    actions = [(index, each) for index, each in enumerate(envelope.actions) if each.action_type == "kv.retain"]
    if not actions:
        return None
    index, action = actions[0]
    where = f"kv_hints.actions[{index}]"
    if len(actions) > 1:
        raise ApiError(400, "one kv.retain for a request", param=f"kv_hints.actions[{actions[1][0]}]")
    if action.action_version.partition(".")[0] != "1":
        raise ApiError(400, f"must be 1.x, got {action.action_version[:20]!r}", param=f"{where}.action_version")
    try:
        directives = convert(action.payload, Retain).directives
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise ApiError(400, f"{field}: {what}", param=f"{where}.payload") from error
    first = directives[0]
    if len(directives) == 1 and not first.start and first.end is None:
        return Hints(priority=first.priority, ttl_ms=first.ttl_ms)
    retain: list[RetainedRange] = []
    for each in directives:
        try:
            retain.append(each.retained())
        except ValueError as error:
            param = f"{where}.payload.directives[{len(retain)}].end"
            raise ApiError(400, str(error), param=param) from error
    return Hints(retain=tuple(retain))
