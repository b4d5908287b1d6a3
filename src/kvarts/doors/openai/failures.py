"""Failures on purpose: a script that states which requests fail, and how.

A script is a list of rules separated by semicolons; the first rule that applies to a request decides:

    first 2: 429 retry_after=1; every 10th: cut after 5 chunks; 7-9: stall 3s; rate 1%: bad chunk; rest: ok

Requests are counted from 1, over all endpoints that generate. `rate` is drawn from the seed and the request's number,
so the same script on the same sequence of requests fails the same ones. Rules that begin with `transfers` apply to the
engine:

    transfers every 3rd: fail; transfers rate 5%: fail

Transfers are counted from 1 as well, from the first one that begins after the script is set.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import brief
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.http import HttpResponse

__all__ = ["NO_FAILURE", "Cut", "Failure", "FailureScript", "fail_transfers", "parse_failure"]

FAILURES = (
    "a status with or without retry_after=S, cut after N chunks, drop, stall Ss, bad chunk, no finish_reason, die, ok"
)
GRAMMAR = (
    "A rule is WHICH: WHAT. WHICH: first N, every Nth, N, N-M, rate P%, all; requests count from 1. "
    f"WHAT: {FAILURES}. Of transfers to and from tiers: transfers WHICH: fail."
)


MAX_STALL_S = 300.0
"""A stalled request holds a place, so stalls are bounded."""


class Cut(Exception):  # noqa: N818  # the failure is the point
    """Request to close the connection with the answer unfinished."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one request."""

    text: str = "ok"
    status: int = 0
    retry_after_s: float | None = None
    cut_after: int | None = None
    """Chunks of a stream that are written before the connection is closed."""
    drops: bool = False
    """Whether the connection is closed without an answer."""
    stall_s: float = 0.0
    has_bad_chunk: bool = False
    drops_finish_reason: bool = False
    kills_engine: bool = False

    @property
    def has_any(self) -> bool:
        """Whether chunks must be handled one at a time."""
        return self.cut_after is not None or self.has_bad_chunk

    def before_request(self) -> None:
        """Raise the refusal of the request, if there is one."""
        if self.status:
            raise ApiError(self.status, f"fails on purpose: {self.text}", retry_after_s=self.retry_after_s)
        if self.drops:
            raise Cut

    def before_answer(self) -> None:
        """Raise the failure of an answer that is not streamed."""
        if self.cut_after == 0:
            raise Cut

    async def stall(self) -> None:
        """Wait if the failure is a stall."""
        if self.stall_s:
            await asyncio.sleep(self.stall_s)

    async def write(self, response: HttpResponse, parts: Sequence[bytes]) -> None:
        """Write chunks of a stream up to the cut."""
        if not self.has_any:
            await response.more(b"".join(parts))
            return
        for part in parts:
            for chunk in filter(None, re.split(rb"(?<=\n\n)", part)):
                if self.cut_after is not None and response.num_chunks >= self.cut_after:
                    raise Cut
                is_bad = self.has_bad_chunk and response.num_chunks == 1
                response.num_chunks += 1
                await response.more(b'data: {"id": "broken", "choices": [{\n\n' if is_bad else chunk)

    async def write_whole(self, response: HttpResponse, payload: bytes) -> None:
        """Write an answer that is not streamed, intact or damaged."""
        await self.stall()
        if self.has_bad_chunk:
            payload = payload[: len(payload) // 2]
        elif self.cut_after is not None:
            await response.unfinished(payload)
            raise Cut
        elif self.drops_finish_reason:
            payload = re.sub(rb'"finish_reason":"\w+"', b'"finish_reason":null', payload)
        await response.whole(payload)


NO_FAILURE = Failure()

_STATUS = re.compile(r"([45]\d\d)(?:\s+retry_after=(\d{1,9}(?:\.\d{1,9})?)s?)?")
_CUT = re.compile(r"cut(?:\s+after\s+(\d{1,12})\s+chunks?)?")
_STALL = re.compile(r"stall\s+(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s)?")
_SIMPLE = {
    "ok": NO_FAILURE,
    "drop": Failure(text="drop", drops=True),
    "bad chunk": Failure(text="bad chunk", has_bad_chunk=True),
    "no finish_reason": Failure(text="no finish_reason", drops_finish_reason=True),
    "die": Failure(text="die", kills_engine=True),
}


def parse_failure(text: str) -> Failure:
    """Parse a failure. Raise ConfigError if `text` is not one."""
    text = " ".join(text.split())
    if text in _SIMPLE:
        return _SIMPLE[text]
    if match := _STATUS.fullmatch(text):
        retry_after_s = None if match[2] is None else float(match[2])
        return Failure(text=text, status=int(match[1]), retry_after_s=retry_after_s)
    if match := _CUT.fullmatch(text):
        return Failure(text=text, cut_after=int(match[1] or 0))
    if match := _STALL.fullmatch(text):
        stall_s = float(match[1]) / (1000 if match[2] == "ms" else 1)
        if stall_s > MAX_STALL_S:
            raise ConfigError(f"a stall has at most {MAX_STALL_S:g} s", field="fail", hint=f"A failure: {FAILURES}.")
        return Failure(text=text, stall_s=stall_s)
    raise ConfigError(f"{brief(text)} is no failure", field="fail", hint=f"A failure: {FAILURES}.")


class _Rule(msgspec.Struct, frozen=True, kw_only=True):
    first: int = 1
    last: int = 1 << 62
    every: int = 1
    rate: float = 1.0
    failure: Failure


_WHICH: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], dict[str, Any]]], ...] = (
    (re.compile(r"first (\d{1,12})"), lambda m: {"last": int(m[1])}),
    (re.compile(r"every (\d{1,12})(?:st|nd|rd|th)?"), lambda m: {"every": int(m[1])}),
    (re.compile(r"(\d{1,12})"), lambda m: {"first": int(m[1]), "last": int(m[1])}),
    (re.compile(r"(\d{1,12})-(\d{1,12})"), lambda m: {"first": int(m[1]), "last": int(m[2])}),
    (re.compile(r"rate (\d{1,9}(?:\.\d{1,9})?)%"), lambda m: {"rate": float(m[1]) / 100}),
    (re.compile(r"all|rest|then"), lambda _: {}),
)


_TRANSFERS = re.compile(r"transfers?\b")


class FailureScript:
    """The failures of all requests. Owner of the request count. Raises ConfigError for an invalid script."""

    def __init__(self, text: str = "", *, seed: int = 0) -> None:
        self.text = text
        self.num_requests = 0
        self._seed = seed
        parts = [part.strip() for part in text.split(";") if part.strip()]
        self._rules = [_rule(part) for part in parts if not _TRANSFERS.match(part)]
        self._of_transfers = [_transfer_rule(part) for part in parts if _TRANSFERS.match(part)]

    def next(self) -> Failure:
        """Count a request, and return its failure."""
        self.num_requests += 1
        number = self.num_requests
        for rule in self._rules:
            if self._applies(rule, number, ""):
                return rule.failure
        return NO_FAILURE

    @property
    def needs_http(self) -> bool:
        """Whether a rule changes an answer on its way to the client."""
        return any(
            rule.failure.has_any or rule.failure.drops or rule.failure.drops_finish_reason for rule in self._rules
        )

    @property
    def has_transfers(self) -> bool:
        """Whether any rule applies to transfers."""
        return bool(self._of_transfers)

    def transfer_fails(self, number: int) -> bool:
        """Return whether transfer `number`, counted from 1, fails."""
        return any(self._applies(rule, number, "transfer ") for rule in self._of_transfers)

    def _applies(self, rule: _Rule, number: int, kind: str) -> bool:
        if not rule.first <= number <= rule.last or number % rule.every:
            return False
        return rule.rate >= 1.0 or self._drawn(number, kind) < rule.rate

    def _drawn(self, number: int, kind: str) -> float:
        digest = sha256(f"{self._seed} {kind}{number}".encode()).digest()
        return int.from_bytes(digest[:8], "little") / 2**64


def fail_transfers(tiers: Any, fails: Callable[[int], bool] | None) -> Callable[[], None]:
    """Return the change after which transfers of `tiers` fail as `fails` says, by their numbers from 1; None: none.

    It must be made between two steps. Raise ConfigError without tiers.
    """
    if tiers is None:
        if fails is not None:
            raise ConfigError(
                "there are no tiers below the device, so no transfers", field="fail", hint="Give --host-memory."
            )
        return lambda: None

    def change() -> None:
        num_before = tiers.num_transfers
        tiers.fails = None if fails is None else lambda number: number > num_before and fails(number - num_before)

    return change


def _transfer_rule(text: str) -> _Rule:
    which, _, what = text.partition(":")
    which = _TRANSFERS.sub("", which).strip() or "all"
    if what.strip() != "fail":
        raise ConfigError(f"{what.strip()!r} is nothing that transfers do", field="fail", hint=GRAMMAR)
    return _rule(f"{which}: ok")


def _rule(text: str) -> _Rule:
    which, colon, what = text.strip().partition(":")
    if not colon:
        head, _, rest = which.partition(" ")
        which, what = ("then", rest) if head == "then" else ("all", which)
    for pattern, fields in _WHICH:
        match = pattern.fullmatch(" ".join(which.split()))
        if match is not None:
            rule = _Rule(failure=_what(what), **fields(match))
            if rule.every < 1 or not 0.0 <= rule.rate <= 1.0 or not 1 <= rule.first <= rule.last:
                break
            return rule
    raise ConfigError(f"{brief(which.strip())} names no requests", field="fail", hint=GRAMMAR)


def _what(text: str) -> Failure:
    try:
        return parse_failure(text)
    except ConfigError as error:
        error.hint = GRAMMAR
        raise
