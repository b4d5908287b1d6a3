"""Results of a replay: latencies, hit rates, memory, and the limit of the run.

Everything is computed on demand from integer columns. A percentile of n sorted values is the element round(p (n - 1)),
halves up: an observed value, never one between two. Times are in milliseconds from arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import isnan
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.columns import Column, to_frame
from kvarts.base.errors import ConfigError
from kvarts.base.units import as_hits
from kvarts.core.events import Blocked
from kvarts.core.kv.transfer import TransferTotals
from kvarts.sim.report.advice import Trials, advice
from kvarts.sim.report.distributions import (
    NS_PER_MS,
    Distribution,
    Extent,
    Ranges,
    dot,
    exact_sum,
    sorted_distribution_ms,
    weighted_distribution_ms,
)
from kvarts.sim.report.requests import CANCELLED, COMPLETED, FAILED, REJECTED, RequestLog, of_prompts
from kvarts.sim.report.steps import StepLog
from kvarts.sim.report.words import facts, plus_minus
from kvarts.sim.traffic.info import distinct_pages
from kvarts.sim.traffic.trace import Trace

if TYPE_CHECKING:
    from kvarts.core.config import Slo
    from kvarts.core.sched.scheduler import Scheduler
    from kvarts.cost.roofline_settings import HeldOut
    from kvarts.sim.report.run_directory import RunConfig

__all__ = ["REPORT_VERSION", "EngineTotals", "Report"]

REPORT_VERSION = 1
LIMITS = {Blocked.BUDGET: "compute", Blocked.PAGES: "kv_pages", Blocked.SEQS: "sequence_cap"}
STATUS_NAMES = ("completed", "rejected", "failed", "cancelled")


class EngineTotals(msgspec.Struct, frozen=True):
    """Counts of one engine at the end of a replay.

    `num_evicted_parts`: by KV group, if groups are counted; pages are then blocks. `transfers`: None without tiers.
    """

    num_evicted_pages: int
    num_evicted_parts: tuple[int, ...] = ()
    transfers: TransferTotals | None = None

    @classmethod
    def of(cls, scheduler: Scheduler) -> EngineTotals:
        """Return the counts of the engine with this scheduler."""
        transfers = None if scheduler.below is None else scheduler.below.totals()
        return cls(scheduler.cache.num_evicted, scheduler.num_evicted_parts(), transfers)


class Report:
    """The outcome of a replay.

    `requests` and `steps` are columns that `pandas.DataFrame` and `polars.DataFrame` accept directly; `summary`, with
    `advice`, is printed by `--json`. `steps`, `engines`: of each engine. `trials` finds the sizes in the advice by
    replays, when the advice is first read.

    >>> from kvarts import ReplayConfig, replay
    >>> report = replay("sample:mooncake", ReplayConfig(num_pages=2_000, page_size=512))
    >>> report.summary["num_completed"], len(report.request_columns["input_tokens"])
    (1000, 1000)
    """

    def __init__(
        self,
        trace: Trace,
        config: RunConfig,
        requests: RequestLog,
        steps: Sequence[StepLog],
        engines: Sequence[EngineTotals],
        *,
        sessions: Mapping[str, int] | None = None,
        trials: Callable[[], Trials] | None = None,
    ) -> None:
        self.config = config
        self.trace_name = trace.name
        self._trace = trace
        self._request_log = requests
        self.step_logs = steps
        self._stalls_ns = requests.stalls_ns
        self._engines = engines
        self._transfers = [each.transfers for each in engines if each.transfers is not None]
        self._sessions = sessions
        self._tiers = list(steps[0].tiers)
        self._trials = trials
        self.spread: Mapping[str, Distribution] | None = None
        """One standard deviation of each latency statistic in milliseconds, if the uncertainty of the cost model is
        known. It must be set before the summary is first read."""
        self.held_out: Mapping[str, HeldOut] | None = None
        """Used without a spread: errors of predictions for measured engines, by metric; empty if none was measured."""

    # Columns ----------------------------------------------------------------------------------------------

    @cached_property
    def requests(self) -> dict[str, Sequence[Any] | Column]:
        """One row per request, in arrival order. Times are in ms from the start, or NaN without the event."""
        raw = self._request_log.columns
        return {
            "request_id": self.request_ids,
            "arrival_ms": _ms(raw["arrival_ns"]),
            "input_tokens": raw["input_tokens"],
            "output_tokens": raw["output_tokens"],
            "first_admitted_ms": _ms(raw["first_admitted_ns"]),
            "first_token_ms": _ms(raw["first_token_ns"]),
            "last_token_ms": _ms(raw["last_token_ns"]),
            "cached_tokens": raw["cached_tokens"],
            **{f"{name}_tokens": raw[f"{name}_tokens"] for name in self._tiers},
            "admissions": raw["admissions"],
            "preemptions": raw["preemptions"],
            "recomputed_tokens": raw["recomputed_tokens"],
            "replica": raw["replica"],
            "status": [STATUS_NAMES[status] for status in raw["status"].tolist()],
            "reason": self._request_log.reasons(),
        }

    @cached_property
    def steps(self) -> dict[str, Column]:
        """One row per step, by replica, then time.

        `used_pages` and `cached_pages` are at the step's high-water mark; with KV groups they count blocks, and the
        parts of each group are added. `blocked` is the reason why the head of the queue was not admitted: 0 nothing
        waits, 1 token budget, 2 pages, 3 sequence cap.
        """
        logs = [log.columns for log in self.step_logs]
        raw = {name: np.concatenate([log[name] for log in logs]) for name in logs[0]}
        return {
            "replica": np.repeat(np.arange(len(logs)), [len(log) for log in self.step_logs]),
            "start_ms": _ms(raw["start_ns"]),
            "duration_ms": _ms(raw["duration_ns"]),
            "tokens": raw["tokens"],
            "decodes": raw["decodes"],
            "running": raw["running"],
            "waiting": raw["waiting"],
            "blocked": raw["blocked"],
            "admitted": raw["admitted"],
            "preempted": raw["preempted"],
            "used_pages": raw["used"],
            "cached_pages": raw["cached"],
            **{f"{field}_pages": raw[field] for field in self.step_logs[0].tier_fields},
            **{f"{field}_parts": raw[field] for field in self.step_logs[0].group_fields},
        }

    @property
    def request_columns(self) -> Mapping[str, Column]:
        """Integer columns of the requests, by index: `row` of the trace, `status`, times in ns, tokens."""
        return self._request_log.columns

    @property
    def request_ids(self) -> list[str]:
        """The outside name of each request, by index."""
        return self._request_log.request_ids()

    # For people -------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        summary = self.summary
        ttft, hits = summary["ttft_ms"], summary["prefix_hit_ratio"]
        unsure = summary.get("uncertainty", {}).get("ttft_ms", {})
        ended = f"{summary['num_completed']:,} of {summary['num_requests']:,} requests completed"
        return (
            f"<Report on {self.trace_name}: {ended}; "
            f"TTFT p50 {plus_minus(ttft['p50'], unsure.get('p50'))}, p99 {plus_minus(ttft['p99'], unsure.get('p99'))}; "
            f"{as_hits(hits)} prefix hits; limited by {summary['limited_by']['cause'].replace('_', ' ')}>"
        )

    def _repr_html_(self) -> str:
        from kvarts.sim.report.page import table_html
        from kvarts.sim.report.run_directory import RunReport

        summary = msgspec.convert({**self.summary, "advice": self.advice}, RunReport)
        return table_html(f"Replay of {self.trace_name}", [], [], facts(summary))

    def to_pandas(self, rows: Literal["requests", "steps"] = "requests") -> Any:
        """Return `requests`, or `steps`, as a pandas.DataFrame."""
        if rows not in ("requests", "steps"):
            raise ConfigError(f"must be 'requests' or 'steps', got {rows!r}", field="rows")
        return to_frame(self.requests if rows == "requests" else self.steps)

    def plot(self) -> Any:
        """Return KV use, queues, latencies and hits as a matplotlib Figure. Raise ConfigError without matplotlib."""
        from kvarts.sim.report.pictures import figure_of

        return figure_of(f"Replay of {self.trace_name}", self.steps, self.requests, self.config.slo)

    # Advice -----------------------------------------------------------------------------------------------

    @cached_property
    def advice(self) -> str | None:
        """The next option to try, and the reason, in a sentence; None without advice.

        It may run some replays of a short run; it runs none of a long one.
        """
        return advice(self.summary, trials=self._trials)

    # Summary ----------------------------------------------------------------------------------------------

    @cached_property
    def summary(self) -> dict[str, Any]:
        """All results in one JSON-able value."""
        config = self.config
        num_steps = sum(map(len, self.step_logs))
        raw = self._request_log.as_ended
        done = raw["status"] == COMPLETED
        are_all_done = done.all()

        def completed(name: str) -> Column:
            """Return a column of the requests that have completed."""
            return raw[name] if are_all_done else raw[name][done]

        latencies = latencies_of(completed, config.slo)
        logs, totals = self.step_logs, self._step_totals
        num_requests = len(done)
        num_completed = int(done.sum())
        duration_s = max(*(each.end_ns for each in totals), int(raw["arrival_ns"].max(initial=0))) / 1e9
        input_tokens = int(completed("input_tokens").sum())
        output_tokens = int(completed("output_tokens").sum())
        found = of_prompts(completed("cached_tokens"), completed("input_tokens"))
        cached_tokens = int(found.sum())
        own_tokens = int(completed("cached_tokens").sum()) - cached_tokens
        cached_by_tier = {}
        for name in self._tiers:
            of_tier = np.minimum(completed(f"{name}_tokens"), found)
            found = found - of_tier
            cached_by_tier[name] = int(of_tier.sum())
        cached_by_tier = {"device": int(found.sum()), **cached_by_tier}
        busy_ns = sum(each.busy_ns for each in totals)
        used_page_ns = sum(each.used_page_ns for each in totals)
        busy_page_ns = sum(each.busy_ns * log.num_pages for each, log in zip(totals, logs, strict=True))
        peaks = [each.peak_used for each in totals]
        peak_used = max(peaks)
        distributions = latencies.distributions
        return {
            "version": REPORT_VERSION,
            "trace": self.trace_name,
            "config": config.to_builtins(),
            "percentile_method": "element round(p * (n - 1)) of the sorted values, halves up",
            "duration_ms": duration_s * 1e3,
            "num_requests": num_requests,
            "num_completed": num_completed,
            "num_rejected": int((raw["status"] == REJECTED).sum()),
            "num_failed": int((raw["status"] == FAILED).sum()),
            **self._cancelled(raw),
            "num_skipped_lines": self._trace.num_skipped_lines,
            **({"left_out": dict(self._trace.left_out)} if self._trace.left_out else {}),
            **({"warnings": warnings} if (warnings := self._warnings()) else {}),
            "num_input_tokens": input_tokens,
            "num_output_tokens": output_tokens,
            "ttft_ms": distributions["ttft_ms"],
            "itl_ms": self._itl(),
            "tpot_ms": distributions["tpot_ms"],
            "e2e_ms": distributions["e2e_ms"],
            "queue_ms": latencies.queue_ms,
            **self._uncertainty(distributions),
            "request_throughput_per_s": _ratio(num_completed, duration_s),
            "input_throughput_tokens_per_s": _ratio(input_tokens, duration_s),
            "output_throughput_tokens_per_s": _ratio(output_tokens, duration_s),
            "goodput": self._goodput(latencies, duration_s),
            "prefix_hit_ratio": self._hit_ratio(cached_tokens, input_tokens),
            "prefix_hit_ratio_is_lower_bound": not self._trace.tells_hits,
            "prefix_hit_ratio_by_tier": {
                name: self._hit_ratio(hit, input_tokens) for name, hit in cached_by_tier.items()
            },
            "num_cached_tokens": cached_tokens,
            "num_cached_tokens_by_tier": cached_by_tier,
            **({"num_cached_output_tokens": own_tokens} if own_tokens else {}),
            "transfers": _added_up(self._transfers) if self._tiers else None,
            **({} if self._sessions is None else {"sessions": dict(self._sessions)}),
            "num_recomputed_tokens": int(completed("recomputed_tokens").sum()),
            "num_preemptions": sum(each.num_preemptions for each in totals),
            "num_tokens_lost_to_preemption": sum(log.tokens_lost for log in logs),
            "num_steps": num_steps,
            "num_evicted_pages": sum(each.num_evicted_pages for each in self._engines),
            "peak_used_pages": peak_used,
            "peak_used_pct": max(peak / log.num_pages for peak, log in zip(peaks, logs, strict=True)),
            "mean_used_pct": _ratio(used_page_ns, busy_page_ns),
            "busy_pct": _ratio(busy_ns, self._worker_ns(duration_s)),
            "peak_running": max(each.peak_running for each in totals),
            "peak_waiting": max(each.peak_waiting for each in totals),
            "distinct_pages": distinct_pages(self._trace, config.page_size),
            **self._memory(),
            "limited_by": self._limits(latencies, raw),
            **self._longest_rejected(raw),
            "replicas": self._replicas(raw, done),
        }

    def _worker_ns(self, duration_s: float) -> float:
        """Return the time of all replicas together."""
        return duration_s * 1e9 * self.config.replicas

    def _hit_ratio(self, num_hit: int, num_tokens: int) -> float | None:
        """Return the share of hits; None if prefixes are unknown, and so hits are."""
        return _ratio(num_hit, num_tokens) if self._trace.knows_prefixes else None

    def _uncertainty(self, distributions: Mapping[str, Distribution]) -> dict[str, Any]:
        """Return one standard deviation of each latency statistic, if known."""
        if self.spread is not None:
            return {"uncertainty": {name: dict(row) for name, row in self.spread.items()}}
        found = {
            name: {
                statistic: None if value is None else value * share for statistic, value in distributions[name].items()
            }
            for metric, error in (self.held_out or {}).items()
            for name, share in [(f"{metric}_ms", error.one_sigma)]
        }
        return {} if self.held_out is None else {"uncertainty": found}

    def to_json(self) -> bytes:
        """Return the summary and the advice as indented JSON, ending in a line end."""
        values = {**self.summary, "advice": self.advice}
        return msgspec.json.format(msgspec.json.encode(values), indent=2) + b"\n"

    def distributions_json(self) -> bytes:
        """Return the gaps between tokens as a histogram.

        It is `itl_ms`, with `upper_ms` of each bin, 2 % wide, and `counts`.
        """
        upper_ms = 0.001 * 1.02 ** np.arange(1400)  # from a microsecond to ten days
        counts = np.zeros(len(upper_ms), np.int64)
        for values_ns, weights in self._gaps():
            gaps_ms = np.asarray(values_ns) / NS_PER_MS
            at = np.minimum(np.searchsorted(upper_ms, gaps_ms), len(upper_ms) - 1)
            counts += np.bincount(at, weights=weights, minlength=len(upper_ms)).astype(np.int64)
        filled = np.flatnonzero(counts)
        value = {"itl_ms": {"upper_ms": upper_ms[filled].tolist(), "counts": counts[filled].tolist()}}
        return msgspec.json.encode(value) + b"\n"

    def requests_jsonl(self) -> bytes:
        """Return the requests as JSON lines, in arrival order; null for the time of an event that never happened."""
        columns = []
        for column in self.requests.values():
            if not isinstance(column, np.ndarray):
                columns.append(column)
            elif column.dtype.kind == "f":
                columns.append([None if isnan(value) else value for value in column.tolist()])
            else:
                columns.append(column.tolist())
        names = list(self.requests)
        encode_lines: bytes = msgspec.json.Encoder().encode_lines(
            [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        )
        return encode_lines

    def _itl(self) -> Distribution:
        """Return the gaps between a request's tokens, usually the duration of the step that produced the later one."""
        return weighted_distribution_ms(self._gaps, within=self._gaps_within, extent=self._gap_extent())

    def _gaps(self) -> Iterator[tuple[Column, Column]]:
        """Return gaps in ns, and the number of requests with each, in batches."""
        for log in self.step_logs:
            yield from log.gaps()
            log.forget()
        yield from self._stall_gaps()

    def _stall_gaps(self) -> Iterator[tuple[Column, Column]]:
        num_stalls = len(self._stalls_ns)
        if not num_stalls:
            return
        yield np.asarray(self._stalls_ns, np.int64), np.ones(num_stalls, np.int32)

    def _gaps_within(self, ranges: Ranges) -> Iterator[tuple[Column, Column]]:
        for log in self.step_logs:
            yield from log.gaps_within(ranges)
            log.forget()
        yield from self._stall_gaps()

    def _gap_extent(self) -> Extent | None:
        """Return the extent of `_gaps` if all logs know theirs."""
        if len(self._stalls_ns):
            return None
        extents: list[Extent] = []
        for log in self.step_logs:
            if len(log):
                extent = log.gap_extent()
                log.forget()
                if extent is None:
                    return None
                extents.append(extent)
        if not extents:
            return None
        counts, totals_ns, lowest_ns, highest_ns = zip(*extents, strict=True)
        return sum(counts), sum(totals_ns), min(lowest_ns), max(highest_ns)

    def _goodput(self, latencies: Latencies, duration_s: float) -> dict[str, float | None] | None:
        """Return the requests per second that keep the SLO; None without an SLO."""
        if latencies.num_good is None:
            return None
        num_good = latencies.num_good
        return {"requests_per_s": _ratio(num_good, duration_s), "ratio": _ratio(num_good, latencies.num_requests)}

    @cached_property
    def _step_totals(self) -> list[StepTotals]:
        """The sums over the steps of each replica. The columns of one log are in memory at a time."""
        found = []
        for log in self.step_logs:
            found.append(totals_of(log))
            log.forget()
        return found

    def _limits(self, latencies: Latencies, raw: Mapping[str, Column]) -> dict[str, Any]:
        """Return the causes of waiting, weighted by time.

        Requests that wait for a load wait for transfers. If others wait for pages or for a place, running and loading
        requests hold these equally, so the time is divided by their numbers.
        """
        waited_by_lane: dict[str, int] = {}
        for transfers in self._transfers if self._tiers else ():
            for name, waited_ns in transfers.waited_ns.items():
                waited_by_lane[name] = waited_by_lane.get(name, 0) + waited_ns
        totals = self._step_totals
        waited = {name: sum(each.waited_ns[name] for each in totals) for name in LIMITS.values()}
        lane = {}
        if waited_by_lane:
            waited["transfers"] = sum(each.held_ns for each in totals) + sum(waited_by_lane.values())
            lane = {"lane": max(waited_by_lane, key=lambda name: waited_by_lane[name])}
        total = sum(waited.values())
        cause = max(waited, key=lambda name: waited[name]) if total else "nothing"
        if not latencies.num_requests and int((raw["status"] == REJECTED).sum()):
            cause = "kv_pages"  # no request fits, so none waited
        elif latencies.queue_ns * 100 < latencies.e2e_ns:
            cause = "nothing"
        return {
            "cause": cause,
            **lane,
            "share_of_waiting": {name: _ratio(value, total) for name, value in waited.items()},
        }

    def _warnings(self) -> list[str]:
        """Return the notes on the trace, and on how it fits the model."""
        said = list(self._trace.said())
        unit_tokens, page_size = self._trace.unit_tokens, self.config.page_size
        groups = [group for log in self.step_logs for group in log.memory.get("kv_groups", ())]
        finds_prefixes = not getattr(self.config, "no_prefix_caching", False)
        if (
            finds_prefixes
            and page_size < unit_tokens
            and any(group["kind"] == "state" and "tokens" not in group for group in groups)
        ):
            said.append(
                f"layers have a state, and a hash id of the trace stands for {unit_tokens} tokens: with pages of "
                f"{page_size}, most snapshots at the ends of prompts are never found; use --page-size "
                f"{unit_tokens}"
            )
        return said

    def _cancelled(self, raw: Mapping[str, Column]) -> dict[str, Any]:
        """Return the counts of requests that their clients cancelled; empty without any.

        Retries are requests themselves; `num_retries` counts them. `prompt_tokens` computed and `output_tokens`
        generated for cancelled requests are wasted.
        """
        gave_up = raw["status"] == CANCELLED
        count = int(gave_up.sum())
        if not count:
            return {}
        return {
            "num_cancelled": count,
            "cancelled": {
                "before_admission": int((gave_up & (raw["first_admitted_ns"] < 0)).sum()),
                "before_first_token": int((gave_up & (raw["first_token_ns"] < 0)).sum()),
                "num_retries": len(raw["row"]) - len(set(raw["row"].tolist())),
                "prompt_tokens": self._request_log.cancelled_prompt_tokens,
                "output_tokens": int(raw["output_tokens"][gave_up].sum()),
            },
        }

    def _longest_rejected(self, raw: Mapping[str, Column]) -> dict[str, Any]:
        """Return the tokens of the longest rejected request; empty without any."""
        if not int((raw["status"] == REJECTED).sum()):
            return {}
        raw = self._request_log.columns  # of several that are equally long, the first that arrived counts
        sizes = zip(raw["status"].tolist(), raw["input_tokens"].tolist(), raw["output_tokens"].tolist(), strict=True)
        refused = [(num_input, num_output) for status, num_input, num_output in sizes if status == REJECTED]
        num_input, num_output = max(refused, key=sum)
        return {"longest_rejected": {"input_tokens": num_input, "output_tokens": num_output}}

    def _memory(self) -> dict[str, Any]:
        """Return the use of each KV group, if all engines count the same: `pages` of the summary are then blocks."""
        logs = self.step_logs
        memory = logs[0].memory
        if not memory or any(log.memory != memory for log in logs):
            return {}
        spans = [log.spans for log in logs]
        busy_ns = sum(int(span["duration_ns"].sum()) for span in spans)
        groups = []
        of_engines = zip(*(each.num_evicted_parts for each in self._engines), strict=True)
        for index, (group, evicted) in enumerate(zip(memory["kv_groups"], of_engines, strict=True)):
            used = [log.of_each(f"group{index}_used") for log in logs]
            part_ns = sum(dot(of_log, log.durations_ns) for of_log, log in zip(used, logs, strict=True))
            groups.append(
                {
                    **group,
                    "peak_used_parts": max(int(of_log.max(initial=0)) for of_log in used),
                    "mean_used_parts": _ratio(part_ns, busy_ns),
                    "num_evicted_parts": sum(evicted),
                }
            )
        return {"block_bytes": memory["block_bytes"], "total_blocks": logs[0].num_pages, "kv_groups": groups}

    def _replicas(self, raw: Mapping[str, Column], done: Column) -> list[dict[str, Any]]:
        out = []
        replicas, input_of, cached_of = raw["replica"], raw["input_tokens"], raw["cached_tokens"]
        for replica, (log, totals) in enumerate(zip(self.step_logs, self._step_totals, strict=True)):
            mine = done & (replicas == replica) if len(self.step_logs) > 1 else done
            input_tokens = int(input_of[mine].sum())
            out.append(
                {
                    "num_completed": int(mine.sum()),
                    "num_steps": len(log),
                    "num_preemptions": totals.num_preemptions,
                    "prefix_hit_ratio": self._hit_ratio(
                        int(of_prompts(cached_of[mine], input_of[mine]).sum()), input_tokens
                    ),
                    "peak_used_pct": totals.peak_used / log.num_pages,
                    "busy_ms": totals.busy_ns / NS_PER_MS,
                }
            )
        return out


class Latencies(msgspec.Struct, frozen=True):
    """The times of completed requests: distributions of TTFT, TPOT and end-to-end times by name, and that of times in
    the queue. `queue_ns`, `e2e_ns`: the sums of times in the queue and of end-to-end times. `num_good`: the number of
    requests that keep the SLO, if there is one.
    """

    num_requests: int
    distributions: dict[str, Distribution]
    queue_ms: Distribution
    queue_ns: float
    e2e_ns: float
    num_good: int | None


def latencies_of(read: Callable[[str], Column], slo: Slo) -> Latencies:
    """Return the latencies of requests. `read` returns a new column of these by name; few are in memory at a time."""
    decode_ns = read("last_token_ns")
    decode_ns -= read("first_token_ns")
    output = read("output_tokens")
    several = output > 1
    tpot_ns = decode_ns[several]
    del decode_ns
    tpot_ns = tpot_ns / (output[several] - 1)
    good = None
    if slo.tpot_ms is not None:
        good = output > -1  # a request with one token keeps any bound
        good[several] = tpot_ns <= slo.tpot_ms * NS_PER_MS
    del output, several
    tpot_ms = sorted_distribution_ms(tpot_ns)
    del tpot_ns
    arrival_ns = read("arrival_ns")
    ttft_ns = read("first_token_ns")
    ttft_ns -= arrival_ns
    if slo.ttft_ms is not None:
        keeps = ttft_ns <= slo.ttft_ms * NS_PER_MS
        good = keeps if good is None else good & keeps
    ttft_ms = sorted_distribution_ms(ttft_ns)
    del ttft_ns
    e2e_ns = read("last_token_ns")
    e2e_ns -= arrival_ns
    if slo.e2e_ms is not None:
        keeps = e2e_ns <= slo.e2e_ms * NS_PER_MS
        good = keeps if good is None else good & keeps
    sum_e2e_ns, e2e_ms = exact_sum(e2e_ns), sorted_distribution_ms(e2e_ns)
    del e2e_ns
    queue_ns = read("first_admitted_ns")
    queue_ns -= arrival_ns
    return Latencies(
        len(arrival_ns),
        {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms},
        queue_ns=exact_sum(queue_ns),
        queue_ms=sorted_distribution_ms(queue_ns),
        e2e_ns=sum_e2e_ns,
        num_good=None if good is None else int(good.sum()),
    )


class StepTotals(msgspec.Struct, frozen=True):
    """Sums over the steps of a log. `used_page_ns`: used pages times the time for which they were used.

    `waited_ns`: the time that requests waited, by what they waited for; `held_ns`: while loading requests held it.
    """

    end_ns: int
    busy_ns: int
    used_page_ns: int
    peak_used: int
    peak_running: int
    peak_waiting: int
    num_preemptions: int
    waited_ns: dict[str, int]
    held_ns: int


def totals_of(log: StepLog) -> StepTotals:
    """Return the sums over the steps of `log`."""
    used_page_ns = peak_used = held_ns = 0
    for used, durations_ns in log.used_over_time():
        used_page_ns += dot(used, durations_ns)
        peak_used = max(peak_used, int(used.max()))
    spans = log.spans
    lasts_ns, blocked, running = spans["duration_ns"], spans["blocked"], spans["running"]
    num_loading, num_waiting = spans["loading"], spans["waiting"]
    peak_waiting = int(num_waiting.max(initial=0))
    held = None
    if int(num_loading.max(initial=0)):
        num_waiting = num_waiting - num_loading
        held = num_waiting * num_loading // (num_loading + running).clip(1)
    waited_ns = {}
    for reason, name in LIMITS.items():
        is_reason = blocked == reason
        of_reason_ns = lasts_ns[is_reason]
        waited_ns[name] = dot(num_waiting[is_reason], of_reason_ns)
        if held is not None and reason != Blocked.BUDGET:
            num_ns = dot(held[is_reason], of_reason_ns)
            waited_ns[name] -= num_ns
            held_ns += num_ns
    return StepTotals(
        log.end_ns,
        busy_ns=int(lasts_ns.sum()),
        used_page_ns=used_page_ns,
        peak_used=peak_used,
        peak_running=int(running.max(initial=0)),
        peak_waiting=peak_waiting,
        num_preemptions=len(log.preemptions) + len(log.late),
        waited_ns=waited_ns,
        held_ns=held_ns,
    )


def _added_up(transfers: Sequence[TransferTotals]) -> dict[str, Any]:
    """Return the transfers between tiers, of all replicas together."""
    return {
        **_sums([totals.counts for totals in transfers]),
        "bytes": _sums([totals.num_bytes for totals in transfers]),
        "num_evicted_pages": _sums([totals.num_evicted_pages for totals in transfers]),
    }


def _sums(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for each in counts for name in each)
    return {name: sum(each.get(name, 0) for each in counts) for name in names}


def _ms(ns: Column) -> npt.NDArray[np.float64]:
    ms = ns / NS_PER_MS
    ms[ns < 0] = np.nan
    return ms


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
