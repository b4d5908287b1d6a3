"""Loads by layer: a request computes on while the last layers of its load are under way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvarts.core.config import EngineConfig
from kvarts.core.events import Admitted, ChunkComputed, Event, LoadStarted, LoadUsed, StepDone, TransferEnded
from kvarts.core.sched.plan import Batch
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.simulated import PrefillCost, SimExecutor
from kvarts.proof.audit.ledger import AuditError
from kvarts.sim.config import make_config
from kvarts.sim.replaying import replay
from kvarts.sim.replica import Replica
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.engines import make_replica, request_of, run
from builders.kept import Kept
from builders.tiers import offloader_of

NS_PER_S = 1_000_000_000
NUM_LAYERS = 10
A_PAGE_A_SECOND = 1_000


class OneByOne:
    """A tenth of a second per token of a prompt, half as much per decode."""

    def step_ns(self, batch: Batch) -> int:
        num_tokens = sum(chunk.num_tokens for chunk in batch.chunks)
        return num_tokens * NS_PER_S // 10 + batch.num_decodes * NS_PER_S // 20

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        return [num_decodes * NS_PER_S // 20] * num_steps


class Slowly(OneByOne):
    """As the engine expects steps to be: so long that loading always pays."""

    def step_ns(self, batch: Batch) -> int:
        return 100 * super().step_ns(batch)


def make_engine(*, prefill: Any = None, **settings: Any) -> tuple[Replica, list[Event]]:
    """An engine with pages of one token and a thousand bytes, which fit on the device 200 at a time."""
    kept = Kept()
    engine: dict[str, Any] = {"num_pages": 200, "page_size": 1, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    engine |= {name: settings.pop(name) for name in ("max_num_batched_tokens", "max_itl_ms") if name in settings}
    tier: dict[str, Any] = {
        "host_pages": 1000,
        "latency_us": 0.0,
        "kv_bytes_per_token": 1000,
        "h2d": 10 * A_PAGE_A_SECOND,
    }
    below = OffloadConfig(**{"load_overlap": "layers", "num_layers": NUM_LAYERS, **tier, **settings})
    cost = OneByOne()
    replica = make_replica(
        EngineConfig(**engine),
        SimExecutor(cost),
        offload=below,
        readers=[kept],
        audit=True,
        prefill=PrefillCost(prefill or cost, token_budget=64, pool_tokens=200).prefill_ns,
        step_ns=cost.step_ns,
    )
    return replica, kept.events


def with_history(**settings: Any) -> tuple[Replica, list[Event]]:
    """An engine whose tier has 60 tokens that the device has not."""
    engine, events = make_engine(**settings)
    run(engine, request_of(0, range(60)))
    for index in range(4):
        run(engine, request_of(1 + index, range(1000 * index + 1000, 1000 * index + 1199)))
    return engine, events


def steps_of(events: list[Event], request: int) -> list[StepDone]:
    """The steps that computed tokens of `request`."""
    steps, computes = [], False
    for event in events:
        if isinstance(event, ChunkComputed):
            computes = computes or event.request == request
        elif isinstance(event, StepDone):
            if computes:
                steps.append(event)
            computes = False
    return steps


def times_of(engine: Replica, events: list[Event], *tail: int) -> tuple[float, float, float]:
    """When the load of the history and new tokens ended, and when their step began and ended, in seconds."""
    since_ns = engine.now_ns
    run(engine, request_of(9, [*range(60), *tail]))
    (load,) = [event for event in events if isinstance(event, LoadStarted) and event.request == 9]
    (end_ns,) = [e.time_ns for e in events if isinstance(e, TransferEnded) and e.transfer == load.transfer]
    (step,) = steps_of(events, 9)
    times = end_ns, step.start_ns, step.start_ns + step.duration_ns
    return tuple((ns - since_ns) / NS_PER_S for ns in times)  # type: ignore[return-value]


def test_the_last_layer_is_computed_after_the_last_layer_is_loaded() -> None:
    """60 pages take six seconds, and 30 tokens three: nine tenths of these are hidden."""
    engine, events = with_history(prefill=Slowly())
    since_ns = engine.now_ns
    engine.submit(request_of(9, [*range(60), *range(500, 530)]), since_ns)
    engine.run_until(1 << 60, [])
    engine.flush()
    (used,) = [event for event in events if isinstance(event, LoadUsed)]
    (step,) = steps_of(events, 9)
    (end_ns,) = [e.time_ns for e in events if isinstance(e, TransferEnded) and e.transfer == used.transfer]
    # The engine takes the step for 100 times as long as it is: so it begins with the first layer.
    assert step.start_ns - since_ns == pytest.approx(0.6 * NS_PER_S, abs=2)
    assert step.start_ns + step.duration_ns - since_ns == pytest.approx(6.3 * NS_PER_S, abs=2)
    assert end_ns >= since_ns + 6 * NS_PER_S


def test_a_step_begins_when_it_need_not_wait_for_any_layer() -> None:
    engine, events = with_history(h2d=100 * A_PAGE_A_SECOND)
    end_s, step_begin_s, step_end_s = times_of(engine, events, *range(500, 504))
    assert step_begin_s == pytest.approx(0.6 - 0.36, abs=1e-6)
    assert step_end_s == pytest.approx(0.6 + 0.04, abs=1e-6)
    assert end_s >= 0.6


def test_without_layers_it_waits_for_the_whole_load() -> None:
    engine, events = with_history(h2d=100 * A_PAGE_A_SECOND, load_overlap="none")
    _, step_begin_s, step_end_s = times_of(engine, events, *range(500, 504))
    assert step_begin_s == pytest.approx(0.6, abs=1e-6)
    assert step_end_s == pytest.approx(1.0, abs=1e-6)


def test_a_front_is_computed_as_well() -> None:
    """Half of the load is hidden behind the new tokens: the front is shorter than without layers."""
    fronts, ends = {}, {}
    for overlap in ("none", "layers"):
        engine, events = with_history(h2d=10 * A_PAGE_A_SECOND, load_overlap=overlap)
        since_ns = engine.now_ns
        prompt = request_of(9, [*range(60), *range(500, 520)])
        run(engine, prompt)
        (load,) = [event for event in events if isinstance(event, LoadStarted) and event.request == 9]
        fronts[overlap], ends[overlap] = load.num_front_pages, (prompt.first_token_ns - since_ns) / NS_PER_S
        assert prompt.cached_tokens == 60 - load.num_front_pages
    # A page takes a tenth of a second either way. 30 + 20 tokens; or 21 + 20 while 39 pages are loaded, ninths of two
    # seconds later.
    assert fronts == {"none": 30, "layers": 21}
    assert ends == {"none": pytest.approx(5.0, abs=1e-3), "layers": pytest.approx(4.1, abs=1e-3)}


def test_a_load_that_fails_is_waited_for() -> None:
    engine, events = with_history(h2d=100 * A_PAGE_A_SECOND)
    number = offloader_of(engine).num_transfers + 1
    offloader_of(engine).fails = lambda transfer: transfer == number
    prompt = request_of(9, [*range(60), *range(500, 504)])
    run(engine, prompt)
    assert not [event for event in events if isinstance(event, LoadUsed)]
    assert offloader_of(engine).counts.num_failed == 1
    assert (prompt.cached_tokens, prompt.recomputed_tokens) == (0, 0)


def test_a_bound_of_latency_keeps_decodes_from_waiting_for_layers() -> None:
    longest_ms = {}
    for most_ms in (None, 200.0):
        engine, events = with_history(max_itl_ms=most_ms, prefill=Slowly(), h2d=100 * A_PAGE_A_SECOND)
        talking = request_of(8, range(5000, 5001), max_tokens=100)
        engine.submit(talking, engine.now_ns)
        engine.run_until(engine.now_ns + NS_PER_S, [])
        prompt, since_ns = request_of(9, [*range(60), 500]), engine.now_ns
        engine.submit(prompt, since_ns)
        engine.run_until(1 << 60, [])
        engine.flush()
        assert prompt.cached_tokens == 60
        steps = [event for event in events if isinstance(event, StepDone) and event.start_ns >= since_ns]
        longest_ms[most_ms] = max(step.duration_ns for step in steps) / 1e6
    # A step of 150 ms begins when the load has taken 100 of 600, and computes its last layer after that.
    assert longest_ms == {None: 515, 200.0: 150}


def test_requests_that_wait_for_a_load_go_on_when_its_request_does() -> None:
    engine, events = with_history(h2d=100 * A_PAGE_A_SECOND)
    first, second = request_of(8, [*range(60), *range(500, 504)]), request_of(9, [*range(60), *range(600, 604)])
    run(engine, first, second)
    admitted = [event.request for event in events if isinstance(event, Admitted)][-2:]
    assert admitted == [8, 9]
    assert first.first_token_ns == second.first_token_ns, "in one step"
    assert offloader_of(engine).counts.num_loads == 1


@pytest.mark.parametrize("after_s", [0.1, 0.3, 0.64])
def test_a_request_may_be_cancelled_at_any_time(after_s: float) -> None:
    engine, _ = with_history(h2d=100 * A_PAGE_A_SECOND, max_num_batched_tokens=64)
    prompt = request_of(9, [*range(60), *range(500, 504)], max_tokens=9)
    engine.submit(prompt, engine.now_ns)
    engine.run_until(engine.now_ns + round(after_s * NS_PER_S), [])
    engine.drop(prompt, engine, engine.now_ns)
    engine.run_until(1 << 60, [])
    engine.flush()
    assert not engine.has_work
    assert engine.scheduler.cache.num_used == 0
    assert offloader_of(engine).tiers[0].num_used_blocks == 0


def test_an_audit_finds_a_step_that_ends_before_its_load() -> None:
    engine, _ = with_history(prefill=Slowly())
    tiers: Any = offloader_of(engine)
    tiers.step_ns = lambda now_ns, duration_ns: duration_ns
    with pytest.raises(AuditError, match=r"uses transfer .*, which ends after it"):
        run(engine, request_of(9, [*range(60), *range(500, 530)]), request_of(10, range(7000, 7010)))


# Real hardware --------------------------------------------------------------------------------------------


def ttft_ms(num_pages: int, offload: OffloadConfig | None, *prompts: tuple[range, ...], **values: Any) -> float:
    """TTFT of the last of prompts that arrive a minute apart."""
    rows = [
        TraceRequest(index, 60 * NS_PER_S * index, tokens, sum(map(len, tokens)), 1)
        for index, tokens in enumerate(prompts)
    ]
    config = make_config({"model": "qwen3-8b", "device": "h100-80gb", "pages": num_pages, **values})
    config = msgspec.structs.replace(config, offload=offload, audit=True)
    columns = replay(Trace(rows), config).request_columns
    return float(columns["first_token_ns"][-1] - columns["arrival_ns"][-1]) / 1e6


def test_where_load_and_compute_take_as_long_both_at_once_is_much_sooner() -> None:
    history, turn = (range(32_768),), (range(32_768), range(50_000, 58_192))
    other = (range(100_000, 100_000 + 40_960),)
    new_ms = ttft_ms(8000, None, history, turn)
    all_ms = ttft_ms(8000, None, turn)
    rate = round(32_768 * 147_456 / new_ms * 1e3)
    tier = OffloadConfig(host_memory="64GiB", h2d=rate, kv_bytes_per_token=147_456, num_layers=36)
    layers_ms = ttft_ms(2568, msgspec.structs.replace(tier, load_overlap="layers"), history, other, turn)
    whole_ms = ttft_ms(2568, tier, history, other, turn)
    assert 1.3 * layers_ms <= min(all_ms, 2 * new_ms)
    assert 1.3 * layers_ms <= whole_ms


@pytest.mark.parametrize(
    ("overlap", "host", "times"),
    [
        ("none", "64GiB", 1.3),
        ("layers", "64GiB", 1.6),
        ("none", "1GiB", 1.3),
        ("layers", "1GiB", 1.6),
        ("layers", "16GiB", 2.0),
    ],
    ids=["host memory", "by layer", "files", "files by layer", "both by layer"],
)
def test_with_kv_groups_the_last_pages_are_loaded_while_the_first_are_computed(
    overlap: Any, host: str, times: float
) -> None:
    """Where loading takes as long as computing; the device has evicted the history, and host memory some of it."""
    history, turn = (range(32_768),), (range(32_768), range(50_000, 58_192))
    others = (range(100_000, 197_000),), (range(300_000, 380_000),)
    grouped = {"model": "gemma-3-27b", "page_size": 64, "kv_groups": "tails"}
    new_ms, all_ms = ttft_ms(4000, None, history, turn, **grouped), ttft_ms(4000, None, turn, **grouped)
    num_bytes = 512 * 64 * 10 * 8192 + 16 * 64 * 52 * 8192  # of ten layers that keep all tokens, and of windows
    rate = round(num_bytes / (all_ms - new_ms) * 1e3)
    tier = OffloadConfig(
        host_memory=host, h2d=rate, disk_memory="128GiB", disk_read=rate, disk_write=rate * 100, num_layers=62,
        load_overlap=overlap, store_within_ms=1000.0,
    )  # fmt: skip
    assert times * ttft_ms(400, tier, history, *others, turn, **grouped) <= all_ms
