"""KV events against an index that shares no code with kvarts: `python -m dynamo.indexer` of ai-dynamo.

    python -m venv ORACLE && ORACLE/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    ORACLE/bin/pip install pydantic
    python benchmarks/kv_events_oracle.py --oracle ORACLE/bin/python [--events 1000000] [--form map|array]

An engine in virtual time serves random requests with shared prefixes, host memory and files below it; its events go
over ZMQ. Whenever the engine is stopped, GET /dump of the indexer must have the blocks that the caches have, asked of
the caches: every hash in every tier, with its parent. The parts: random load; everything cleared; batches that are lost
on the way, and asked for again; an indexer that starts late; an engine that starts anew; and the rest of the events.

The indexer binds all interfaces, so the script puts itself in a network namespace of its own (`unshare -rn`).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import zmq

from dynamo_indexer import call, enter_own_network
from kvarts.core.events import Event, PagesRemoved, PagesStored
from kvarts.core.keys import BlockKeys
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.polynomial import LinearCost
from kvarts.doors.kv_events.batches import Form, KvEventsConfig
from kvarts.doors.kv_events.publisher import KvEvents, open_kv_events
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.config import ReplayConfig
from kvarts.sim.driver import Driver
from kvarts.sim.replay import open_replica
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.router import RoundRobin
from kvarts.sim.traffic.source import OpenLoop
from kvarts.sim.traffic.trace import Trace, TraceRequest

PAGE_SIZE = 16
PORT = 18390
LIVE, REPLAY, LOSSY = (f"tcp://127.0.0.1:{port}" for port in (15557, 15558, 15559))
TIERS = {"device": "device", "host": "host_pinned", "disk": "disk"}
"""The indexer's names of the tiers."""

Blocks = set[tuple[str, int, int | None]]
"""Tier, hash, and the parent's hash."""


class Indexer:
    """The process, and its HTTP interface."""

    def __init__(self, python: str, log: Path) -> None:
        self._log = log.open("a")
        self._process = subprocess.Popen(
            [python, "-m", "dynamo.indexer", "--port", str(PORT)], stdout=self._log, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.call("/health")
            except OSError:
                assert time.monotonic() < deadline, f"the indexer does not start: see {log}"
                time.sleep(0.05)
            else:
                return

    def call(self, path: str, body: Any = None) -> str:
        return call(PORT, path, body)

    def register(self, endpoint: str) -> None:
        body = {"instance_id": 1, "endpoint": endpoint, "replay_endpoint": REPLAY, "model_name": "m", "dp_rank": 0}
        self.call("/register", {**body, "block_size": PAGE_SIZE})

    def unregister(self) -> None:
        self.call("/unregister", {"instance_id": 1, "model_name": "m"})

    def blocks(self) -> Blocks:
        """What /dump says."""
        found: Blocks = set()
        for model in json.loads(self.call("/dump")).values():
            for told in model["events"]:
                stored = told["event"]["data"]["stored"]
                parent = stored["parent_hash"]
                for block in stored["blocks"]:
                    found.add((told["storage_tier"], block["block_hash"], parent))
                    parent = block["block_hash"]
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


class Lossy:
    """Forwards events, and loses some: each batch for which `is_lost` says so."""

    def __init__(self) -> None:
        self.is_lost: Callable[[int], bool] = lambda _: False
        self.num_lost = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        source, sink = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        for socket in (source, sink):
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
        source.setsockopt(zmq.SUBSCRIBE, b"")
        source.connect(LIVE)
        sink.bind(LOSSY)
        while not self._stop.is_set():
            if source.poll(50):
                frames = source.recv_multipart()
                if self.is_lost(int.from_bytes(frames[1], "big")):
                    self.num_lost += 1
                else:
                    sink.send_multipart(frames)
        source.close(linger=0)
        sink.close(linger=0)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.term()


class Load:
    """Random requests on one engine with `pages` pages and tiers below, which is stopped every so many events."""

    wants_details = True

    def __init__(self, events: KvEvents, *, pages: int, seed: int) -> None:
        self.events = events
        self.num_events = 0
        self._stop_after = 0
        self._when_stopped: Callable[[], None] = lambda: None
        self._random = random.Random(seed)
        offload = OffloadConfig(host_pages=2 * pages, disk_pages=4 * pages, policy="eager")
        self._config = ReplayConfig(num_pages=pages, page_size=PAGE_SIZE, offload=offload, cost=LinearCost(step_ms=1.0))
        self._replica = open_replica(self._config, [events.reader, self])
        self._now_ns = 0

    def observe(self, events: Sequence[Event]) -> None:
        self.num_events += sum(isinstance(event, PagesStored | PagesRemoved) for event in events)
        if self.num_events >= self._stop_after:
            self._stop_after = self.num_events + self._every
            self._when_stopped()

    def run(self, num_events: int, every: int, when_stopped: Callable[[], None]) -> None:
        """Serve until `num_events` more have happened; stop after each `every` events."""
        self._every, self._when_stopped = every, when_stopped
        self._stop_after = self.num_events + every
        until = self.num_events + num_events
        while self.num_events < until:
            trace = Trace(list(self._requests(500)), unit_tokens=1, has_output_tokens=True)
            log = RequestLog(largest_hit_counts=False)
            arrivals = Arrivals(trace, OpenLoop(trace), RoundRobin(1), [self._replica], log)
            Driver([arrivals], [self._replica]).run()
            self._now_ns = self._replica.engine.now_ns
        when_stopped()

    def _requests(self, num: int) -> Iterator[TraceRequest]:
        draw = self._random
        arrival_ns = self._now_ns
        for index in range(num):
            arrival_ns += draw.randrange(3_000_000)
            # Paths in a tree of 40 branches: prefixes are shared, and differ at any depth.
            tokens = [
                token
                for depth in range(draw.randrange(1, 12))
                for token in [1000 * depth + draw.randrange(3 if depth else 40)] * draw.choice([7, 16, 32])
            ]
            output = [draw.randrange(50_000) for _ in range(draw.randrange(1, 80))]
            yield TraceRequest(
                index,
                arrival_ns,
                array("Q", tokens).tobytes(),
                len(tokens),
                len(output),
                output_units=array("Q", output).tobytes(),
            )

    def clear(self) -> None:
        """Forget everything that nothing uses, on the device and below."""
        cache, tiers = self._replica.scheduler.cache, self._replica.engine.tiers
        assert tiers is not None
        tiers.reset()
        cache.evict(cache.num_cached)
        self._replica.engine.emit()
        self._replica.engine.log.flush()

    def blocks(self) -> Blocks:
        """What the caches hold, asked of the caches."""
        found: Blocks = set()
        chains: dict[int, BlockKeys] = {}
        engine = self._replica.engine
        runs = [("device", *run[1:4]) for run in cast(PageCache, engine.scheduler.cache).runs()]
        for tier in engine.tiers.tiers:  # type: ignore[union-attr]
            stored = (run for run in tier.index.runs() if run.state.name == "STORED")
            runs += [(tier.name, run.content, run.start, run.end) for run in stored]
        for tier_name, content, start, end in runs:
            keys = chains.setdefault(id(content), BlockKeys(content, algorithm="sha256_cbor"))
            for page in range(start, min(end, content.num_known_pages)):
                parent = int.from_bytes(keys[page - 1][-8:], "big") if page else None
                found.add((TIERS[tier_name], int.from_bytes(keys[page][-8:], "big"), parent))
        return found


class Comparison:
    """Compares, and says what differs."""

    def __init__(self, indexer: Indexer, load: Load) -> None:
        self._indexer, self._load = indexer, load
        self.num_compared = 0
        self.num_blocks = 0

    def __call__(self) -> None:
        expected = self._load.blocks()
        deadline = time.monotonic() + 60
        while (found := self._indexer.blocks()) != expected:
            if time.monotonic() > deadline:
                more, less = found - expected, expected - found
                sys.exit(f"DIFFERS after {self._load.num_events:,} events: {len(more)} too many, {len(less)} missing")
            time.sleep(0.05)
        self.num_compared += 1
        self.num_blocks = len(found)


@contextmanager
def opened(form: Form, **settings: Any) -> Iterator[KvEvents]:
    config = KvEventsConfig(endpoint=LIVE, replay_endpoint=REPLAY, form=form, **settings)
    events = open_kv_events(config)
    try:
        yield events
    finally:
        events.close()


def say(part: str, load: Load, compare: Comparison, started: float, more: str = "") -> None:
    """Print what a part of the run came to."""
    print(
        f"{part}: {load.num_events:,} events, {load.events.reader.num_batches:,} batches, "
        f"{compare.num_compared} times equal, last with {compare.num_blocks:,} blocks; "
        f"{time.monotonic() - started:.1f} s{more}",
        flush=True,
    )


def run(arguments: argparse.Namespace) -> None:
    """Run all parts; exit with a message where a dump differs."""
    log = Path(arguments.log)
    indexer = Indexer(arguments.oracle, log)
    lossy = Lossy()
    total = 0
    try:
        with opened(arguments.form) as events:
            load = Load(events, pages=arguments.pages, seed=1)
            compare = Comparison(indexer, load)
            indexer.register(LOSSY)
            time.sleep(1)  # it subscribes
            started = time.monotonic()
            load.run(20_000, 1_000, compare)
            say("random load", load, compare, started)
            load.clear()
            compare()
            assert not compare.num_blocks, "something is left"
            say("cleared", load, compare, started)
            lost = random.Random(2)
            # Batches in a row, at the end of which one arrives: that shows the gap.
            lossy.is_lost = lambda seq: lost.random() < 0.3 or seq % 50 < 10
            load.run(20_000, 20_000, lambda: None)
            lossy.is_lost = lambda _: False
            load.run(200, 200, lambda: None)
            compare()
            say("lost and replayed", load, compare, started, f", {lossy.num_lost:,} batches lost")
            total += load.num_events
        # The indexer passes over numbers that it has seen. Where an engine starts anew, it is registered anew.
        indexer.unregister()
        with opened(arguments.form) as events:
            load = Load(events, pages=arguments.pages, seed=3)
            compare = Comparison(indexer, load)
            indexer.register(LIVE)
            assert events.publisher.wait_for_subscriber(30)
            time.sleep(1)
            started = time.monotonic()
            load.run(20_000, 1_000, compare)
            say("the engine anew", load, compare, started)
            total += load.num_events
        for setting in ("state_on_replay", "state_on_subscribe"):
            indexer.close()
            with opened(arguments.form, buffer_steps=100, **{setting: True}) as events:
                load = Load(events, pages=arguments.pages, seed=4)
                load.run(20_000, 20_000, lambda: None)
                indexer = Indexer(arguments.oracle, log)
                compare = Comparison(indexer, load)
                indexer.register(LIVE)
                time.sleep(1)
                started = time.monotonic()
                load.run(200, 200, lambda: None)
                compare()
                load.run(10_000, 1_000, compare)
                say(f"the indexer late, {setting}", load, compare, started)
                total += load.num_events
        indexer.close()
        with opened(arguments.form) as events:
            indexer = Indexer(arguments.oracle, log)
            load = Load(events, pages=10 * arguments.pages, seed=5)
            compare = Comparison(indexer, load)
            indexer.register(LIVE)
            time.sleep(1)
            started = time.monotonic()
            left = max(1, arguments.events - total)
            load.run(left, max(10_000, left // 20), compare)
            total += load.num_events
            say("the rest", load, compare, started)
        print(f"equal throughout: {total:,} events")
    finally:
        indexer.close()
        lossy.close()


def main() -> None:
    """Parse the command line, enter a namespace, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oracle", required=True, metavar="PYTHON", help="A Python with ai-dynamo.")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--form", choices=["map", "array"], default="map")
    parser.add_argument("--pages", type=int, default=400)
    parser.add_argument("--log", default="indexer.log", help="Where the indexer's log goes.")
    arguments = parser.parse_args()
    enter_own_network()
    run(arguments)


if __name__ == "__main__":
    main()
