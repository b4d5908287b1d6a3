"""Publishers, replay endpoints and metrics that mean harm: a watch takes a bounded part of them, and says so."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs kvarts[serve]")

import msgspec
import zmq

from kvarts.doors.watch.claims import MAX_PARTS, Claims
from kvarts.doors.watch.decoding import MAX_BATCH_BYTES, MalformedError, Stored, TooLongError, decode_batch
from kvarts.doors.watch.metrics import parse_metrics
from kvarts.doors.watch.sockets import Followed
from kvarts.doors.watch.watched import Watched

from builders.server_process import MIB, Process, kvarts_process
from builders.streams import removed, stored

MAX_GROWTH_BYTES = 200 * MIB
FLOOD_S = 2.0

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="watches memory in /proc")

Send = Callable[[int, bytes], None]


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, list(events), 0])


def map_of(**fields: Any) -> bytes:
    return batch({"type": "BlockStored", "block_hashes": [], "token_ids": [], "block_size": 1, **fields})


@contextmanager
def watching(tmp_path: Path, *options: str) -> Iterator[tuple[Process, Send, Callable[[], dict[str, Any]]]]:
    """A watch, what publishes to it, and what waits for its verdict."""
    context: zmq.Context[Any] = zmq.Context()
    publisher: zmq.Socket[bytes] = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.SNDHWM, 100)
    endpoint = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"
    verdict = tmp_path / "verdict.json"
    arguments = ["watch", endpoint, "--verdict", str(verdict), *options]
    try:
        with kvarts_process(*arguments) as process:
            assert publisher.poll(20_000), "it does not subscribe"
            time.sleep(0.3)

            def send(seq: int, payload: bytes) -> None:
                publisher.send_multipart((b"", seq.to_bytes(8, "big"), payload))

            def end() -> dict[str, Any]:
                process.stop()
                found: dict[str, Any] = json.loads(verdict.read_text())
                return found

            yield process, send, end
    finally:
        publisher.close(linger=0)
        context.term()


def flood(send: Send, make: Callable[[int], bytes]) -> None:
    deadline, seq = time.monotonic() + FLOOD_S, 0
    while time.monotonic() < deadline:
        send(seq, make(seq))
        seq += 1
        if seq % 50 == 0:
            time.sleep(0.01)


def rule(verdict: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [result for result in verdict["rules"] if result["rule"] == name]
    return dict(found)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id=""),
        pytest.param(["--events", "journal.jsonl.gz"], id="with a journal"),
    ],
)
def test_blocks_without_end_are_left_out_and_the_verdict_says_so(tmp_path: Path, options: list[str]) -> None:
    options = [str(tmp_path / each) if each.endswith(".gz") else each for each in options]

    def make(seq: int) -> bytes:
        names = list(range(seq * 10_000, (seq + 1) * 10_000))
        return batch(stored(names, token_ids=[1] * 20_000))

    with watching(tmp_path, *options) as (process, send, end):
        idle = process.resident_bytes
        process.forget_peak()
        flood(send, make)
        time.sleep(1.0)
        grown = process.peak_bytes - idle
        verdict = end()
    assert grown <= MAX_GROWTH_BYTES, f"{grown / MIB:.0f} MiB"
    limits = rule(verdict, "limits")
    assert limits["status"] == "inconclusive" and "blocks more than the 524,288 that are kept" in limits["why"]
    assert verdict["verdict"] != "ok"


@pytest.mark.parametrize(
    "make",
    [
        lambda: map_of(block_hashes=list(range(4_000_000))),
        pytest.param(lambda: map_of(block_hashes=[1] * 7_000_000), marks=pytest.mark.long),
        pytest.param(lambda: msgspec.msgpack.encode([0.0, [None] * 7_000_000, 0]), marks=pytest.mark.long),
        lambda: b"\x93\xcb" + bytes(8) + b"\xdd" + (7_000_000).to_bytes(4, "big") + b"\x90" * 7_000_000,
        pytest.param(lambda: map_of(extra_keys=[[] for _ in range(4_000_000)]), marks=pytest.mark.long),
        pytest.param(lambda: batch({"type": "x" * 7_000_000}), marks=pytest.mark.long),
        pytest.param(lambda: map_of(block_hashes=[bytes(7_000_000)]), marks=pytest.mark.long),
    ],
    ids=["hashes beyond the limit", "hashes", "nothings", "arrays", "extra keys", "a kind", "a hash"],
)
def test_one_large_batch_after_another(tmp_path: Path, make: Callable[[], bytes]) -> None:
    payload = make()
    is_too_long = len(payload) > MAX_BATCH_BYTES
    with watching(tmp_path) as (process, send, end):
        idle = process.resident_bytes
        process.forget_peak()
        send(0, batch(stored([1])))
        for seq in range(1, 8):
            send(seq, payload)
            time.sleep(0.2)
        time.sleep(1.0)
        grown = process.peak_bytes - idle
        verdict = end()
    assert grown <= MAX_GROWTH_BYTES, f"{grown / MIB:.0f} MiB"
    assert verdict["verdict"] != "ok" or verdict["counts"]["num_unknown_events"] or b"extra_keys" in payload[:100]
    says_so = any("connections ended with a message of more than 8 MiB" in note for note in verdict["notes"])
    assert says_so == is_too_long, verdict["notes"]
    if is_too_long:
        assert rule(verdict, "limits")["status"] == "inconclusive"


def test_a_replay_without_end_is_given_up(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 10)
    endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    stop = threading.Event()

    def answer() -> None:
        clients: list[bytes] = []
        seq = 0
        while not stop.is_set():
            if router.poll(0 if clients else 50):
                clients = [router.recv_multipart()[0]]
            for client in clients:
                router.send_multipart((client, b"", b"", seq.to_bytes(8, "big"), bytes(500_000)))
                seq += 1
                time.sleep(0.002)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with watching(tmp_path, "--replay", endpoint) as (process, send, end):
            idle = process.resident_bytes
            process.forget_peak()
            for seq in range(10, 30):
                send(seq, batch(stored([seq])))
                time.sleep(0.1)
            grown = process.peak_bytes - idle
            verdict = end()
    finally:
        stop.set()
        thread.join()
        router.close(linger=0)
        context.term()
    assert grown <= MAX_GROWTH_BYTES, f"{grown / MIB:.0f} MiB"
    assert any("longer than is read" in note for note in verdict["notes"]), verdict["notes"]


class _Endless(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        line = b'vllm:num_requests_running{a="' + b"\\" * 1_000_000 + b"\n"
        with suppress(OSError):
            while True:
                self.wfile.write(line)

    def log_message(self, *_: object) -> None:
        pass


def test_metrics_without_end_are_read_in_part(tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Endless)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with watching(tmp_path, "--metrics", url) as (process, send, end):
            idle = process.resident_bytes
            process.forget_peak()
            flood(send, lambda seq: batch(stored([seq])))
            grown = process.peak_bytes - idle
            end()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert grown <= MAX_GROWTH_BYTES, f"{grown / MIB:.0f} MiB"


def test_metrics_are_read_in_time_linear_in_their_length() -> None:
    lines = ['vllm:num_requests_running{x="' + '\\"' * 4_000 + "\n", 'a{b="' * 3_000 + "\n", "a{" * 5_000 + "} 1\n"]
    begin = time.perf_counter()
    parse_metrics("".join(lines) * 300)
    assert time.perf_counter() - begin < 5.0  # with a pattern that backtracks, hours
    sample = parse_metrics('vllm:cache_config_info{x="1",num_gpu_blocks="77",y="}"} 1.0\nvllm:num_requests_running 3\n')
    assert (sample.num_blocks, sample.num_running) == (77, 3)


def test_what_is_longer_than_is_read_is_no_violation_and_not_forgotten() -> None:
    watched = Watched()
    watched.begin(is_complete=True)
    watched.apply(0, batch(stored([1])))
    watched.apply(1, bytes(MAX_BATCH_BYTES + 1))
    watched.apply(2, batch(removed([1, 2])))
    verdict = watched.verdict(Followed(), [])
    assert verdict.verdict == "inconclusive"
    assert {result.rule: result.status for result in verdict.rules}["limits"] == "inconclusive"
    assert not verdict.violations


def test_forms_that_cannot_be_are_refused_before_they_are_made() -> None:
    with pytest.raises(TooLongError, match=r"has 4,294,967,295 events"):
        decode_batch(b"\x93\x00\xdd\xff\xff\xff\xff")
    with pytest.raises(TooLongError, match=r"has 600,000 blocks"):
        decode_batch(batch(*[stored([1] * 200_000, token_ids=[])] * 3))
    for text in ("", "93", "9300", "93cb", "9300dc00", "920091", "9400900000"):
        with pytest.raises(MalformedError):
            decode_batch(bytes.fromhex(text))
    wrong: list[Any] = [[], {}, None, 7, {"type": 7}, stored([1], medium="m" * 65), stored([1], token_ids=[-1, 2])]
    for event in wrong:
        with pytest.raises(MalformedError):
            decode_batch(batch(event))
    with pytest.raises(MalformedError):
        decode_batch(map_of(block_hashes=[bytes(65)]))


def test_media_without_end_are_left_out() -> None:
    claims = Claims()
    for number in range(MAX_PARTS + 10):
        claims.store(number, Stored([1], None, [1], 1, f"medium-{number}", 0))
    assert len(claims.media) == MAX_PARTS and claims.num_left_out == 10
