"""KV events over real sockets on loopback: frames, numbers, replay, full state, and what may go wrong."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs kvarts[serve]")

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.core.content import Content
from kvarts.core.events import PagesRemoved, PagesStored
from kvarts.doors.kv_events.batches import KvEventsConfig, at_rank
from kvarts.doors.kv_events.publisher import KvEvents, open_kv_events

from builders.kv_event_client import END, TIMEOUT_MS, Client, open_client
from oracles.naive_kv_events import NaiveConsumer, chain

ANY = "tcp://127.0.0.1:0"
PAGE = 2


@contextmanager
def opened(**settings: Any) -> Iterator[tuple[KvEvents, Client]]:
    """A publisher and a client that has subscribed."""
    events = open_kv_events(KvEventsConfig(**{"endpoint": ANY, "replay_endpoint": ANY, **settings}))
    try:
        publisher = events.publisher
        with open_client(publisher.endpoint, publisher.replay_endpoint, topic=settings.get("topic", "")) as client:
            assert publisher.wait_for_subscriber(10)
            yield events, client
    finally:
        events.close()


def content(*tokens: int, owner: int = 0) -> Content:
    return Content.from_tokens(tokens, page_size=PAGE, owner=owner)


def store(events: KvEvents, count: int, start: int = 0) -> None:
    """Store `count` sequences of one block each, a batch each."""
    for owner in range(start, start + count):
        events.reader.observe([PagesStored(content(owner, owner, owner=owner), 0, 1, None)])


def wait_until_sent(events: KvEvents) -> None:
    deadline = time.monotonic() + 10
    while events.publisher.num_sent < events.reader.num_batches:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("topic", ["", "kv@pod-1@llama"])
def test_a_batch_is_topic_number_payload_and_numbers_begin_with_nought(topic: str) -> None:
    with opened(topic=topic) as (events, client):
        store(events, 3)
        received = [client.receive() for _ in range(3)]
    assert [(name, seq) for name, seq, _ in received] == [(topic.encode(), seq) for seq in range(3)]


def test_an_event_is_a_map_with_the_fields_of_vllm() -> None:
    of = Content.from_tokens([1, 2, 3, 4], page_size=2, owner=0, salt="t")
    names = [int.from_bytes(name[24:], "big") for name in chain([1, 2, 3, 4], 2, "t")]
    with opened() as (events, client):
        events.reader.observe([PagesStored(of, 0, 2, None), PagesRemoved(of, 1, 2)])
        time_s, told, rank = msgspec.msgpack.decode(client.receive()[2])
    assert isinstance(time_s, float) and rank == 0
    assert told == [
        {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["t"], None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        },
        {"type": "BlockRemoved", "block_hashes": [names[1]], "medium": "GPU", "group_idx": 0},
    ]


def test_an_event_is_an_array_where_that_is_asked_for() -> None:
    of, whole = content(1, 2, 3, 4), chain([1, 2, 3, 4], 2)
    with opened(form="array", hash_bytes=True) as (events, client):
        events.reader.observe([PagesStored(of, 0, 1, None), PagesStored(of, 1, 2, of, "host"), PagesRemoved(of, 0, 1)])
        events.reader.observe([PagesRemoved(of, 1, 2, "host")])
        first, second = (msgspec.msgpack.decode(client.receive()[2])[1] for _ in range(2))
    assert first == [
        ["BlockStored", [whole[0]], None, [1, 2], 2, None, "GPU", None],
        ["BlockStored", [whole[1]], whole[0], [3, 4], 2, None, "CPU", None],
        ["BlockRemoved", [whole[0]], "GPU"],
    ]
    assert second == [["AllBlocksCleared"]]


def test_a_replay_begins_where_it_is_asked_to_and_says_where_it_ends() -> None:
    with opened(topic="t") as (events, client):
        assert client.replay(0) == []
        store(events, 5)
        live = [client.receive() for _ in range(5)]
        assert client.replay(0) == live
        assert client.replay(3) == live[3:]
        assert client.replay(9) == []


def test_a_replay_has_the_last_batches_only() -> None:
    with opened(buffer_steps=4) as (events, client):
        store(events, 10)
        wait_until_sent(events)
        assert [seq for _, seq, _ in client.replay(0)] == [6, 7, 8, 9]


def test_a_long_replay_to_a_slow_client_has_no_gap() -> None:
    """ZMQ drops what goes beyond the mark of a ROUTER, 1,000 messages unless it is told otherwise."""
    with opened() as (events, client):
        store(events, 6000)
        wait_until_sent(events)
        asking = client.ask(b"", bytes(8))
        time.sleep(0.3)
        for seq in range(6000):
            assert asking.poll(TIMEOUT_MS)
            assert asking.recv_multipart()[2] == seq.to_bytes(8, "big")
        assert asking.recv_multipart() == [b"", b"", END, b""]


@pytest.mark.parametrize("frames", [[b""], [bytes(8)], [b"", b"", bytes(8)], [b"", bytes(9)], [b"x"] * 7])
def test_what_is_no_request_is_counted_and_the_next_one_is_answered(frames: list[bytes]) -> None:
    with opened() as (events, client):
        store(events, 1)
        wait_until_sent(events)
        client.ask(*frames)
        deadline = time.monotonic() + 10
        while not events.publisher.num_bad_requests:
            assert time.monotonic() < deadline
        assert len(client.replay(0)) == 1


def state_of(messages: list[tuple[bytes, int, bytes]]) -> NaiveConsumer:
    consumer = NaiveConsumer()
    for _, _, payload in messages:
        consumer.apply(payload)
    return consumer


def test_full_state_is_what_there_is_after_the_batch_whose_number_it_has() -> None:
    with opened(buffer_steps=2) as (events, client):
        assert client.replay(-2) == []
        store(events, 2500)
        events.reader.observe([PagesRemoved(content(7, 7), 0, 1)])
        messages = client.replay(-2)
        assert {seq for _, seq, _ in messages} == {2500}
        assert len(messages) == 3, "a message has a bounded number of runs"
        late = state_of(messages)
        assert len(late.content()["GPU"]) == 2499
        live = NaiveConsumer()
        for _ in range(2501):
            _, seq, payload = client.receive()
            live.take(seq, payload)
        assert late.content() == live.content()


def test_a_snapshot_is_full_state_under_the_number_to_go_on_with() -> None:
    with opened(buffer_steps=2) as (events, client):
        assert client.answers(b"snapshot") == []
        store(events, 1500)
        whole, snapshot = client.replay(-2), client.answers(b"snapshot")
        assert [payload for _, _, payload in whole] == [payload for _, _, payload in snapshot]
        assert [{seq for _, seq, _ in messages} for messages in (whole, snapshot)] == [{1499}, {1500}]


def test_a_consumer_that_begins_late_goes_on_from_full_state_while_the_engine_runs() -> None:
    """Whatever was told between its subscription and the state, it applies what comes after the number, and no more."""
    with opened(buffer_steps=3) as (events, client):
        stop = threading.Event()

        def run() -> None:
            owner = 0
            while not stop.is_set():
                store(events, 1, owner)
                if owner > 50:
                    gone = owner - 50
                    events.reader.observe([PagesRemoved(content(gone, gone, owner=gone), 0, 1)])
                if owner % 8 == 0:
                    time.sleep(0.001)  # all of it is read below
                owner += 1

        engine = threading.Thread(target=run)
        engine.start()
        try:
            for _ in range(5):
                time.sleep(0.02)
                messages = client.replay(-2)
                consumer, seq = state_of(messages), messages[0][1]
        finally:
            stop.set()
            engine.join()
        consumer.next_seq = seq + 1
        last = events.reader.num_batches - 1
        while consumer.next_seq <= last:
            _, number, payload = client.receive()
            if number > seq:
                consumer.take(number, payload)
        state = NaiveConsumer()
        state.apply(events.publisher._wire.encode(events.reader.snapshot().told, 0.0))
        assert consumer.content() == state.content() != {}


def test_an_engine_that_is_faster_than_the_sender_does_not_keep_a_request_waiting() -> None:
    with opened() as (events, client):
        stop = threading.Event()

        def run() -> None:
            owner = 0
            while not stop.is_set():
                store(events, 1, owner)
                owner += 1

        engine = threading.Thread(target=run)
        engine.start()
        try:
            time.sleep(0.2)
            assert state_of(client.replay(-2)).content()["GPU"]
        finally:
            stop.set()
            engine.join()


def test_a_replay_that_is_too_late_begins_with_full_state_where_that_is_asked_for() -> None:
    with opened(buffer_steps=4, state_on_replay=True) as (events, client):
        store(events, 10)
        wait_until_sent(events)
        messages = client.replay(0)
        assert len(state_of(messages).content()["GPU"]) == 10
        assert {seq for _, seq, _ in messages} == {9}
        assert [seq for _, seq, _ in client.replay(6)] == [6, 7, 8, 9]


def test_a_new_subscriber_is_told_everything_where_that_is_asked_for() -> None:
    with opened(state_on_subscribe=True) as (events, client):
        store(events, 3)
        early = NaiveConsumer()
        for _ in range(4):
            _, seq, payload = client.receive()
            early.take(seq, payload)
        with open_client(events.publisher.endpoint) as late:
            _, seq, payload = late.receive()
            consumer = NaiveConsumer()
            consumer.apply(payload)
            early.take(*client.receive()[1:])
            store(events, 1, 3)
            consumer.next_seq = seq + 1
            consumer.take(*late.receive()[1:])
            early.take(*client.receive()[1:])
        assert consumer.content() == early.content()
        assert len(consumer.content()["GPU"]) == 4


def test_subscriptions_are_counted_and_end() -> None:
    with opened() as (events, client):
        assert events.publisher.num_subscriptions == 1
        client.subscriber.close(linger=0)
        deadline = time.monotonic() + 10
        while events.publisher.num_subscriptions:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_engine_that_is_faster_than_the_publisher_waits_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvarts.doors.kv_events import batches

    monkeypatch.setattr(batches, "MAX_WAITING", 10)
    with opened() as (events, client):
        store(events, 3000)
        assert [client.receive()[1] for _ in range(3000)] == list(range(3000))
        assert client.replay(-2)


def test_closing_sends_what_waits_and_what_comes_later_is_dropped() -> None:
    with opened() as (events, client):
        store(events, 500)
        events.close()
        assert [client.receive()[1] for _ in range(500)] == list(range(500))
        store(events, 1)
        events.close()


def test_a_publisher_can_connect_to_a_consumer_that_binds() -> None:
    import zmq

    context: zmq.Context[Any] = zmq.Context()
    bound: zmq.Socket[bytes] = context.socket(zmq.SUB)
    bound.setsockopt(zmq.SUBSCRIBE, b"")
    port = bound.bind_to_random_port("tcp://127.0.0.1")
    events = open_kv_events(KvEventsConfig(endpoint=f"tcp://127.0.0.1:{port}", connects=True))
    try:
        deadline = time.monotonic() + 10
        while not events.publisher.wait_for_subscriber(0):
            assert time.monotonic() < deadline
            bound.poll(10)  # a socket that binds subscribes when it is looked at
        store(events, 1)
        assert bound.poll(TIMEOUT_MS)
        assert bound.recv_multipart()[1] == bytes(8)
    finally:
        events.close()
        bound.close(linger=0)
        context.term()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"endpoint": "127.0.0.1:5557"}, "endpoint"),
        ({"endpoint": "tcp://127.0.0.1"}, "endpoint"),
        ({"replay_endpoint": "udp://127.0.0.1:1"}, "replay_endpoint"),
        ({"form": "json"}, "form"),
        ({"rank": -1}, "rank"),
        ({"buffer_steps": 0}, "buffer_steps"),
        ({"endpoint": "tcp://127.0.0.1:65535", "rank": 1}, "endpoint"),
        ({"endpoint": "tcp://127.0.0.1:70000"}, "endpoint"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        KvEventsConfig(**{"endpoint": ANY, **settings})
    assert raised.value.field == field


def test_an_endpoint_that_is_taken_is_an_error_and_leaves_nothing_open() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for config in (KvEventsConfig(endpoint=endpoint), KvEventsConfig(endpoint=ANY, replay_endpoint=endpoint)):
            with pytest.raises(ConfigError, match="cannot be bound"):
                open_kv_events(config)


def test_ranks_have_ports_and_names_of_their_own() -> None:
    assert at_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert at_rank("tcp://[::1]:5557", 1) == "tcp://[::1]:5558"
    assert at_rank("tcp://*:0", 2) == "tcp://*:0"
    assert (at_rank("ipc:///tmp/kv", 0), at_rank("ipc:///tmp/kv", 1)) == ("ipc:///tmp/kv", "ipc:///tmp/kv_dp1")
