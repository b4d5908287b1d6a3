"""A run of prompts on a real model, with the same report as a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.core.config import Slo
from kvarts.core.content import pack_units
from kvarts.core.event_log import EventReader
from kvarts.core.events import Event
from kvarts.core.sampling import SamplingParams
from kvarts.sim.report.report import EngineTotals, Report
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.report.steps import StepLog
from kvarts.sim.traffic.trace import Trace, TraceRequest

if TYPE_CHECKING:
    from kvarts.core.request import Request
    from kvarts.run.torch.llm import LLM

__all__ = ["Profile"]


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a profile, with the field names of replay reports."""

    num_pages: int = msgspec.field(name="pages")
    page_size: int
    max_num_batched_tokens: int = msgspec.field(name="max_batched_tokens")
    max_num_seqs: int = msgspec.field(name="max_seqs")
    profile: str
    cost: str = "measured"
    replicas: int = 1
    router: str = "round-robin"
    concurrency: int | None = None
    speedup: float = 1.0
    slo: Slo = Slo()
    offload: Any = None
    kv_groups: str = "off"
    whole_pages: str = ""

    def to_builtins(self) -> dict[str, Any]:
        """Return the configuration as JSON-able values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        if not self.whole_pages:
            del values["whole_pages"]
            if self.kv_groups == "off":
                del values["kv_groups"]
        return values


class Profile:
    """An EventReader of an LLM that runs prompts on it and reports on them.

    `live`: another reader of the same events.
    """

    wants_details = False

    def __init__(self) -> None:
        self.live: EventReader | None = None
        self._log = StepLog(1)
        self._report: Report | None = None
        self._ran: list[tuple[Request, tuple[int, ...]]] = []

    def observe(self, events: Sequence[Event]) -> None:
        """Record the steps in `events`, and pass the events on to the timeline that is being written."""
        self._log.observe(events)
        if self.live is not None:
            self.live.observe(events)

    def run(self, llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> None:
        """Run all of `prompts` on an LLM that has this among its readers, then build the report."""
        config = llm.config
        self._log = StepLog(llm.num_pages, llm.tiers, llm.kv_blocks)
        requests = {index: llm.request(index) for index in (llm.submit(prompt, params) for prompt in prompts)}
        log = RequestLog(largest_hit_counts=False, tiers=llm.tiers)
        rows = []
        while llm.has_work:
            for completion in llm.step():
                request = requests[completion.index]
                # It may have ended before its max_tokens; a replay should end at the same token.
                request.max_tokens = len(completion.tokens)
                content = request.content
                row = TraceRequest(
                    request.index,
                    request.arrival_ns,
                    pack_units(content.tokens(0, request.num_prompt_tokens)),
                    request.num_prompt_tokens,
                    request.max_tokens,
                )
                rows.append(row)
                log.end(request, row, 0)
                self._ran.append((request, completion.tokens))
        rows.sort(key=lambda row: row.row)
        measured = MeasuredRun(
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            profile=config.profile,
            offload=llm.offload,
            kv_groups=llm.kv_groups,
            whole_pages=llm.whole_pages,
        )
        self._report = Report(
            Trace(rows, name="prompts"),
            measured,
            log,
            [self._log],
            [EngineTotals(llm.num_evicted_pages, llm.num_evicted_parts, next(iter(llm.transfers), None))],
        )

    @property
    def trace(self) -> bytes:
        """The requests that were run, in order, in the format of `kvarts replay FILE --trace-block-size 1`."""
        ran = sorted(self._ran, key=lambda one: one[0].index)
        return b"".join(msgspec.json.encode(_trace_row(*one)) + b"\n" for one in ran)

    @property
    def summary(self) -> dict[str, Any]:
        """`Report.summary` with `cost` set to "measured"."""
        assert self._report is not None
        return self._report.summary


def _trace_row(request: Request, tokens: Sequence[int]) -> dict[str, Any]:
    """Return a row of a Mooncake trace with blocks of one token, so hash ids are tokens. All arrive at time 0."""
    prompt = request.content.tokens(0, request.num_prompt_tokens)
    return {
        "request_id": str(request.index),
        "timestamp": 0,
        "input_length": len(prompt),
        "output_length": len(tokens),
        "hash_ids": [int(token) for token in prompt],
        "output_token_ids": list(tokens),
        "priority": request.priority,
    }
