"""A random small fleet and its traffic, the same for the naive fleet and for kvarts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from hypothesis import strategies as st
from msgspec import structs

from kvarts.core.events import Arrived, AtRest, LeapDone, PagesRemoved, PagesStored, StepDone, StepEnded, StepStarted
from kvarts.sim.fleet.config import FleetConfig, FleetWorker, PoolConfig, StoreSettings
from kvarts.sim.fleet.faults import Fault, Kind
from kvarts.sim.fleet.report import FleetReport
from kvarts.sim.fleet.scaling import parse_scaler
from kvarts.sim.replaying import replay
from kvarts.sim.routers.config import QueueOrder, Routing

from builders.case import Case, cases
from builders.grouped import Told
from oracles.naive_fleet import NaiveFault, NaiveFleet, worker_of

LATE = (Fault("down", 5, 60_000_000, 90_000_000), Fault("cut", 6, 50_000_000))
"""Faults of workers that come later, or never."""
ENDS = ("completed", "rejected", "failed", "cancelled")
SCALERS = (
    None,
    "script,0s=2:1,0.05s=1:3,0.1s=3:1,0.2s=1:1",
    "queue,target=1,every=0.03s,stable=0.1s",
    "kv,target=40,every=0.05s,stable=0s,most=3",
    "llm-d,every=0.04s",
)
QUEUE_ORDERS: tuple[QueueOrder, ...] = get_args(QueueOrder)


@dataclass
class FleetCase:
    case: Case
    num_prefills: int
    num_decodes: int
    decode_pages: int
    decode_seqs: int
    rate: float | None
    latency_ms: float
    only_missing: bool
    faults: tuple[Fault, ...] = ()
    least_remote: int | None = None
    num_layers: int = 0
    """0: transfers begin when the prompt is computed."""

    queue: tuple[float, QueueOrder] | None = None
    """The threshold and the order of a queue in the router of prefill workers, if that is not among the changes."""

    @property
    def is_layer_wise(self) -> bool:
        return bool(self.num_layers) and self.rate is not None and not self.is_mocker

    @property
    def is_mocker(self) -> bool:
        return self.case.profile == "mocker"

    def config(self, **changes: Any) -> FleetConfig:
        of_prefill = changes
        if self.queue is not None and "routing" not in changes:
            of_prefill = {**changes, "routing": Routing(queue_threshold=self.queue[0], queue=self.queue[1])}
        prefill = self.case.config(replicas=self.num_prefills, audit=True, **of_prefill)
        decode = self.case.config(
            replicas=self.num_decodes,
            num_pages=self.decode_pages,
            max_num_seqs=self.decode_seqs,
            audit=True,
            **changes,
        )
        return FleetConfig(
            pools=(PoolConfig(role="prefill", each=prefill), PoolConfig(role="decode", each=decode)),
            bytes_per_s=self.rate,
            latency_ms=self.latency_ms,
            transfer="layer-wise" if self.is_layer_wise else "missing" if self.only_missing else "full-prompt",
            layers=self.num_layers,
            token_bytes=1,
            least_remote=None if self.is_mocker else self.least_remote,
            faults=self.faults,
        )

    def naive(self, *, finds_prefixes: bool = True) -> NaiveFleet:
        case = self.case
        settings = {"page_size": case.page_size, "max_num_batched_tokens": case.max_num_batched_tokens}
        fleet = NaiveFleet(
            [
                worker_of(
                    is_mocker=self.is_mocker,
                    is_decode=False,
                    num_pages=case.num_pages,
                    max_num_seqs=case.max_num_seqs,
                    **settings,
                )
                for _ in range(self.num_prefills)
            ],
            [
                worker_of(
                    is_mocker=self.is_mocker,
                    is_decode=True,
                    num_pages=self.decode_pages,
                    max_num_seqs=self.decode_seqs,
                    **settings,
                )
                for _ in range(self.num_decodes)
            ],
            self.is_mocker,
            self.rate,
            round(self.latency_ms * 1e6),
            self.only_missing and not self.is_layer_wise,
            num_layers=self.num_layers if self.is_layer_wise else 0,
            queue_tokens=None if self.queue is None else self.queue[0] * case.max_num_batched_tokens,
            queue_order="" if self.queue is None else self.queue[1],
            least_remote=None if self.is_mocker else self.least_remote,
            faults=[
                NaiveFault(each.kind, each.worker, each.start_ns, each.end_ns, each.factor) for each in self.faults
            ],
        )
        for worker in (*fleet.prefills, *fleet.decodes):
            worker.finds_prefixes = finds_prefixes
        fleet.run(case.naive_requests())
        return fleet


@st.composite
def fleets(
    draw: st.DrawFn,
    *,
    max_requests: int = 24,
    profile: str | None = None,
    cancels: bool = False,
    faults: bool = False,
) -> FleetCase:
    """Small pools, slow links, and everything that makes requests wait for each other.

    `cancels`: clients give some requests up. `faults`: workers and links fail, some for good.
    """
    case = draw(cases(max_requests=max_requests, cancels=cancels))
    if profile is not None:
        case.profile = profile
    most = max(-(-(row.num_prompt_tokens + row.num_output_tokens - 1) // case.page_size) for row in case.rows)
    num_prefills, num_decodes = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 1, 2]))
    failing = st.lists(fault(num_prefills + num_decodes), max_size=6, unique_by=lambda each: (each.kind, each.worker))
    return FleetCase(
        case,
        num_prefills,
        num_decodes,
        max(1, most + draw(st.sampled_from([-1, 0, 0, 1, 3, 10, 50]))),
        min(case.max_num_batched_tokens, draw(st.sampled_from([1, 2, 4, 8]))),
        draw(st.sampled_from([None, None, 50.0, 1000.0, 100000.0])),
        draw(st.sampled_from([0.0, 0.0, 3.0, 30.0])),
        draw(st.booleans()),
        tuple(draw(failing)) if faults else (),
        draw(st.sampled_from([None, 1, 2, 5, 20])),
        draw(st.sampled_from([0, 0, 1, 2, 7])),
        draw(st.none() | st.tuples(st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from(QUEUE_ORDERS))),
    )


@st.composite
def fault(draw: st.DrawFn, num_workers: int) -> Fault:
    """Of any worker, soon, and for a while or for good."""
    kinds: list[Kind] = ["down", "down", "cut", "slow"]
    kind = draw(st.sampled_from(kinds))
    start_ms = draw(st.sampled_from([0, 5, 17, 40, 90, 200]) | st.integers(0, 400))
    after_ms = draw(st.sampled_from([None, 1, 20, 100, 1000]))
    return Fault(
        kind,
        draw(st.integers(0, num_workers - 1)),
        start_ms * 1_000_000,
        None if after_ms is None else (start_ms + after_ms) * 1_000_000,
        draw(st.integers(2, 20)) if kind == "slow" else 1,
    )


def assert_as_naive(
    case: FleetCase, naive: NaiveFleet, report: FleetReport, places: list[int], first_worker: int = 0
) -> None:
    """Assert that each request, at its place in the report, is as in the naive fleet, with the same times.

    `first_worker`: the number of the first worker in the report.
    """
    raw = report.request_columns
    reasons = report.requests["reason"]
    assert len(places) == len(naive.handoffs)
    for place, handoff in zip(places, naive.handoffs, strict=True):
        mine = {name: int(column[place]) for name, column in raw.items()}
        status = ("completed", "rejected", "failed", "cancelled")[mine["status"]]
        assert (mine["index"], status) == (place, handoff.outcome)
        if status in ("rejected", "failed"):
            continue
        decode, prefill = handoff.decode, handoff.prefill
        source = handoff.source if handoff.source < 0 else first_worker + handoff.source
        target = source if handoff.target < 0 else first_worker + case.num_prefills + handoff.target
        # Given up before it was placed again, it shows the worker that failed while it computed the prompt itself.
        was_local = handoff.is_local or (source < 0 and handoff.restarts > 0)
        expected = {
            "source": target if was_local else source,
            "replica": target,
            "is_local": int(handoff.is_local),
            "prefill_admitted_ns": (decode if handoff.is_local else prefill).first_admitted_ns,
            "held_ns": handoff.held_ns,
            "reserved_ns": handoff.reserved_ns,
            "activated_ns": handoff.activated_ns,
            "decode_admitted_ns": decode.first_admitted_ns,
            "released_ns": handoff.released_ns,
            "first_token_ns": decode.first_token_ns,
            "last_token_ns": None if status == "cancelled" else decode.last_token_ns,
            "output_tokens": decode.made,
            "preemptions": prefill.preemptions + decode.preemptions,
            "recomputed_tokens": prefill.recomputed_tokens + decode.recomputed_tokens,
            "num_restarts": handoff.restarts,
        }
        if case.is_mocker:
            expected["cached_tokens"] = max(prefill.largest_hit_tokens, decode.largest_hit_tokens)
        theirs = {name: -1 if value is None else value for name, value in expected.items()}
        assert {name: mine[name] for name in theirs} == theirs
        if status == "cancelled":
            after_ms = (handoff.cancelled_ns - decode.arrival_ns) / 1e6
            assert reasons[place] == f"its client gave up {after_ms:g} ms after sending it"


def told_to(told: dict[int, Told], worker: FleetWorker) -> list[Told]:
    told[worker.index] = Told()
    return [told[worker.index]]


def of_requests(told: Told) -> list[tuple[Any, ...]]:
    """What was told of requests and pages: leaps leave out steps in which nothing else happens."""
    return [each for each in told.plain() if each[0] not in (StepStarted, StepEnded, StepDone, LeapDone, AtRest)]


def replayed_with(
    case: FleetCase,
    policy: str | None,
    is_shared: bool,
    memory: dict[str, Any],
    store: StoreSettings | None,
    *,
    is_told: bool,
    step_by_step: bool,
    pulls: bool = False,
) -> tuple[FleetReport, list[list[tuple[Any, ...]]]]:
    told: dict[int, Told] = {}
    config = structs.replace(
        case.config(step_by_step=step_by_step, **memory),
        scaler=None if policy is None else partial(parse_scaler, policy),
        startup_s=0.03,
        sharing="worker" if is_shared else "none",
        store=store,
        pulls=pulls,
        faults=case.faults if policy is None else (*case.faults, *LATE),
    )
    report = replay(case.case.trace(), config, observers_of=partial(told_to, told) if is_told else None)
    return report, [of_requests(each) for each in told.values()]


def with_changes(config: FleetConfig, **changes: Any) -> FleetConfig:
    """Return `config` with settings of all its workers changed."""
    each = [structs.replace(pool, each=structs.replace(pool.each, **changes)) for pool in config.pools]
    return structs.replace(config, pools=tuple(each))


def assert_same_however_replayed(case: Case, config: FleetConfig) -> None:
    """Replay in leaps, step by step, with an audit and with readers of every event: requests and steps are the same."""
    told: dict[int, Told] = {}

    def readers_of(worker: FleetWorker) -> list[Told]:
        told[worker.index] = Told()
        return [told[worker.index]]

    fast: FleetReport = replay(case.trace(), with_changes(config, audit=False))
    others = [
        replay(case.trace(), with_changes(config, audit=False, step_by_step=True)),
        replay(case.trace(), config),
        replay(case.trace(), config, observers_of=readers_of),
    ]
    for other in others:
        assert other.to_json() == fast.to_json()
        assert other.requests_jsonl() == fast.requests_jsonl()
        for name, column in fast.steps.items():
            assert other.steps[name].tobytes() == column.tobytes(), name
    summary = fast.summary
    ends = sum(summary.get(f"num_{end}", 0) for end in ("completed", "rejected", "failed", "cancelled"))
    assert ends == summary["num_requests"]


def assert_of_own_requests(case: Case, config: FleetConfig) -> int:
    """What a worker tells of a store that workers share is about requests that it has got; return how much it tells."""
    told: dict[int, Told] = {}
    replay(case.trace(), config, observers_of=partial(told_to, told))
    num_emitted = 0
    for each in told.values():
        arrived: set[int] = set()
        for event in each.events:
            if isinstance(event, Arrived):
                arrived.add(event.request)
            elif isinstance(event, PagesStored | PagesRemoved) and event.medium == "store":
                assert event.content.owner in arrived
                num_emitted += 1
    return num_emitted
