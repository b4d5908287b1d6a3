"""What a client says about how long the KV of a request is worth keeping; eviction orders may use it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec.structs import replace

from kvarts.base.limits import MOST_COUNT, MOST_MS

__all__ = ["MOST_RANGES", "MOST_TOOL_CHARS", "Hints", "Priority", "RetainedRange", "Token"]

MOST_TOOL_CHARS = 256
MOST_RANGES = 16

Priority = Annotated[int, msgspec.Meta(ge=-MOST_COUNT, le=MOST_COUNT)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_MS)]
Token = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
Name = Annotated[str, msgspec.Meta(max_length=MOST_TOOL_CHARS)]

NS_PER_MS = 1e6


class RetainedRange(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """A claim on tokens [start, end) of a request instead of its own `priority` and `ttl_ms`.

    Without `end`, it reaches to the last token; `covers_output`: generated ones included, else to the prompt's last.
    """

    start: Token = 0
    end: Token | None = None
    priority: Priority | None = None
    ttl_ms: Milliseconds | None = None
    covers_output: bool = True

    def __post_init__(self) -> None:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"`end` must be above `start`, got {self.end} and {self.start}")

    def has(self, token: int) -> bool:
        """Return whether the claim is on `token`."""
        return self.start <= token and (self.end is None or token < self.end)


Ranges = Annotated[tuple[RetainedRange, ...], msgspec.Meta(max_length=MOST_RANGES)]


class Hints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Hints of one request, all optional. They change no result, and no engine has to follow them.

    `priority`: larger values are kept longer. `ttl_ms`: how long after its end the KV is worth keeping. `pause_ms`:
    about how long after its end the client returns, as when a tool runs. `tool`: the tool it runs until then.
    `retain`: claims on ranges of tokens, which replace the first two there; the first range that has a token counts.
    """

    priority: Priority | None = None
    ttl_ms: Milliseconds | None = None
    pause_ms: Milliseconds | None = None
    tool: Name | None = None
    retain: Ranges = ()

    @property
    def ttl_ns(self) -> int | None:
        """`ttl_ms` in nanoseconds."""
        return None if self.ttl_ms is None else round(self.ttl_ms * NS_PER_MS)

    @property
    def pause_ns(self) -> int | None:
        """`pause_ms` in nanoseconds."""
        return None if self.pause_ms is None else round(self.pause_ms * NS_PER_MS)

    def for_prompt(self, num_prompt_tokens: int) -> Hints:
        """Return the same with ranges that end with the prompt where they are not to cover generated tokens."""
        if all(each.covers_output or each.end is not None for each in self.retain):
            return self
        retain = []
        for each in self.retain:
            if each.covers_output or each.end is not None:
                retain.append(each)
            elif each.start < num_prompt_tokens:
                retain.append(replace(each, end=num_prompt_tokens, covers_output=True))
        return replace(self, retain=tuple(retain))

    def parts(self, page_size: int, num_pages: int) -> list[tuple[int, Hints]]:
        """Return the first page of each stretch of `num_pages` pages with the same claim, and the claim as hints.

        A page has the claim of its first token, or those of pages after it, which are useless without it, if these are
        larger: the largest priority, and the longest time to live, or none if one with a priority has none.
        """
        edges = {0}
        for each in self.retain:
            edges.add(-(-each.start // page_size))
            if each.end is not None:
                edges.add(-(-each.end // page_size))
        parts: list[tuple[int, Hints]] = []
        after: Hints | None = None
        for page in sorted(edges, reverse=True):
            if page and page >= num_pages:
                continue
            claim = next((each for each in self.retain if each.has(page * page_size)), self)
            alone = replace(self, priority=claim.priority, ttl_ms=claim.ttl_ms, retain=())
            after = alone if after is None else after.joined(alone)
            if parts and parts[-1][1] == after:
                parts.pop()
            parts.append((page, after))
        return parts[::-1]

    def joined(self, other: Hints) -> Hints:
        """Return these hints with the larger of both priorities and the longer time to live."""
        lives = [each.ttl_ms for each in (self, other) if each.ttl_ms is not None]
        lasts = any((each.priority or 0) > 0 and each.ttl_ms is None for each in (self, other))
        priority = max(self.priority or 0, other.priority or 0)
        return replace(
            self,
            priority=None if self.priority is other.priority is None else priority,
            ttl_ms=None if lasts else max(lives, default=None),
        )
