"""`kvarts watch` over real sockets: late, with gaps, through restarts, and what it says in the end."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs kvarts[serve]")

import msgspec
import zmq

from kvarts.cli.watch import tiers_line
from kvarts.core.content import Content
from kvarts.core.events import PagesRemoved, PagesStored
from kvarts.doors.kv_events.batches import KvEventsConfig
from kvarts.doors.kv_events.publisher import KvEvents, open_kv_events
from kvarts.doors.watch.metrics import parse_metrics
from kvarts.proof.explain.reading import load_journal
from kvarts.proof.verify.verifier import verify_file

from builders import preforked
from builders.ports import free_port
from builders.streams import removed, stored
from builders.working import give_time, working

Run = Callable[..., int]


def free_endpoints() -> tuple[str, str]:
    return f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"


def content(owner: int) -> Content:
    return Content.from_tokens([owner, owner], page_size=2, owner=owner)


def store(events: KvEvents, start: int, end: int) -> None:
    for owner in range(start, end):
        events.reader.observe([PagesStored(content(owner), 0, 1, None)])


def verdict_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_late_watch_of_an_engine_that_begins_anew(
    run_command: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live, replay = free_endpoints()
    config = KvEventsConfig(endpoint=live, replay_endpoint=replay, buffer_steps=2)
    first = open_kv_events(config)
    store(first, 0, 50)

    def work() -> None:
        first.publisher.wait_for_subscriber(10)
        give_time(0.3)
        store(first, 50, 60)
        first.reader.observe([PagesRemoved(content(7), 0, 1)])
        first.close()
        again = open_kv_events(config)
        store(again, 100, 103)
        again.publisher.wait_for_subscriber(10)
        give_time(0.3)
        store(again, 103, 105)
        give_time(0.5)
        again.close()

    out, journal = tmp_path / "verdict.json", tmp_path / "journal.jsonl.gz"
    with working(work):
        code = run_command(
            *("watch", live, "--replay", replay, "--duration", 60, "--events", journal, "--verdict", out),
            *("--set", "every=0.2"),
        )
    printed = capsys.readouterr()
    assert (code, printed.out.splitlines()[0]) == (0, "ok")
    assert "begun anew 1" in printed.err
    verdict = verdict_of(out)
    assert verdict["blocks"] == {"GPU": 5}
    assert verdict["most_blocks"] == 60
    assert verdict["followed"]["num_restarts"] == 1
    assert verdict["followed"]["num_lost"] == 0
    assert len(load_journal(journal).contents) == 65


class Fake:
    """An engine like vLLM: its sockets, and what it says, true or not."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.live: zmq.Socket[bytes] = self.context.socket(zmq.XPUB)
        self.port = self.live.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{self.port}"

    def send(self, seq: int, *events: Any, topic: bytes = b"") -> None:
        self.live.send_multipart((topic, seq.to_bytes(8, "big"), msgspec.msgpack.encode([1.0 + seq, list(events), 0])))

    def wait(self) -> None:
        assert self.live.poll(10_000)
        self.live.recv()
        give_time(0.2)

    def close(self) -> None:
        self.live.close(linger=1000)
        self.context.term()


@pytest.fixture
def fake() -> Iterator[Fake]:
    engine = Fake()
    yield engine
    engine.close()


def test_claims_that_cannot_be_are_listed_and_the_code_is_5(
    run_command: Run, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        fake.wait()
        fake.send(0, stored([1, 2]))
        fake.live.send_multipart((b"", b"short", b""))
        fake.send(1, stored([1]), removed([9]))
        fake.send(4, stored([3], 77))

    with working(work):
        code = run_command("watch", fake.endpoint, "--duration", 60, "--json", "--set", "no_copies=true")
    verdict = json.loads(capsys.readouterr().out)
    assert (code, verdict["verdict"]) == (5, "violated")
    statuses = {result["rule"]: result["status"] for result in verdict["rules"]}
    assert [rule for rule, status in statuses.items() if status == "violated"] == [
        "sequence",
        "stored_twice",
        "never_stored",
    ]
    assert statuses["parent_unknown"] == "inconclusive", "it may have been in the batches that are lost"
    assert "1 messages are not batches" in verdict["notes"]


def test_without_replay_what_was_there_before_is_inconclusive(run_command: Run, fake: Fake) -> None:
    def work() -> None:
        fake.wait()
        fake.send(7, removed([1]))

    with working(work):
        assert run_command("watch", fake.endpoint, "--duration", 60, "--set", "quiet=true") == 6


def test_nothing_at_all_is_inconclusive(run_command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    live, _ = free_endpoints()
    assert run_command("watch", live, "--duration", 0.3) == 6
    out = capsys.readouterr().out
    assert out.startswith("inconclusive: no event came\n")
    assert f"note: nothing was at {live}" in out


def test_only_a_topic_is_heard(run_command: Run, fake: Fake, tmp_path: Path) -> None:
    def work() -> None:
        fake.wait()
        fake.send(0, stored([1]), topic=b"kv@a@m")
        fake.send(0, stored([2, 3]), topic=b"kv@b@m")

    with working(work):
        run_command("watch", fake.endpoint, "--duration", 60, "--set", "topic=kv@b", "--verdict", tmp_path / "v.json")
    assert verdict_of(tmp_path / "v.json")["blocks"] == {"GPU": 2}


METRICS = """# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:prefix_cache_queries_total{engine="0"} 200.0
vllm:prefix_cache_hits_total{engine="0"} 50.0
vllm:cache_config_info{block_size="2",engine="0",num_gpu_blocks="4"} 1.0
vllm:other NaN
not a line at all {
"""


def test_metrics_are_read_by_the_names_of_vllm() -> None:
    sample = parse_metrics(METRICS)
    assert (sample.usage, sample.num_running, sample.num_waiting, sample.num_preempted) == (0.25, 3, 1, 2)
    assert (sample.num_blocks, sample.hit_share) == (4, 0.25)
    assert parse_metrics("").usage is None


def test_tiers_inside_vllm_are_in_a_line() -> None:
    """Pages found by tier, why others were not, bytes, and pages that wait for a file."""
    text = (
        'vllm:kvarts_pages_total{engine="0",model_name="m",what="loaded"} 55.0\n'
        'vllm:kvarts_pages_total{engine="0",model_name="m",what="promoted"} 12.0\n'
        'vllm:kvarts_pages_total{engine="0",model_name="m",what="refused"} 3.0\n'
        'vllm:kvarts_resident_pages{engine="0",model_name="m",tier="host"} 120.0\n'
        'vllm:kvarts_resident_pages{engine="0",model_name="m",tier="files"} 300.0\n'
        'vllm:kvarts_waiting_pages{engine="0",model_name="m",lane="write"} 2.0\n'
        'vllm:kv_offload_load_bytes_total{engine="0",model_name="m"} 8.8e+06\n'
        "vllm:kvarts_resident_pages 7.0\n"
    )
    assert tiers_line(parse_metrics(text)) == (
        "tiers: host 120, files 300 pages; loaded 55 (8.8 MB), read from files 12; stored 0 (0.0 MB); "
        "not loaded or stored: no room 3, sooner computed 0, broken 0; waiting to be read 0, written 2"
    )
    assert parse_metrics("vllm:num_requests_running 3\n").tier_resident == {}


def test_metrics_give_a_timeline_and_the_size_of_the_pool(run_command: Run, fake: Fake, tmp_path: Path) -> None:
    looks = threading.Semaphore(0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())
            looks.release()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()

    def work() -> None:
        fake.wait()
        fake.send(0, stored([1, 2, 3, 4]))
        for _ in range(4):
            assert looks.acquire(timeout=30)

    timeline = tmp_path / "timeline.jsonl"
    try:
        with working(work):
            code = run_command(
                *("watch", fake.endpoint, "--duration", 60, "--timeline", timeline, "--verdict", tmp_path / "v.json"),
                *("--metrics", f"http://127.0.0.1:{server.server_port}/metrics"),
            )
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    verdict = verdict_of(tmp_path / "v.json")
    assert (code, verdict["total_blocks"], verdict["most_blocks"]) == (0, 4, 4)
    judged = verify_file(timeline)
    assert (judged.verdict, judged.num_rows >= 2) == ("ok", True), judged.to_text()


def test_a_watch_that_observed_nothing_writes_a_timeline_that_is_inconclusive(run_command: Run, tmp_path: Path) -> None:
    """Neither the engine nor its metrics could be reached: the timeline names what is not known."""
    live, _ = free_endpoints()
    timeline = tmp_path / "timeline.jsonl"
    run_command("watch", live, "--duration", 0.3, "--timeline", timeline, "--metrics", "http://127.0.0.1:1/metrics")
    head = json.loads(timeline.read_bytes().splitlines()[0])
    assert (head["block_size_tokens"], head["total_blocks"]) == (None, None)
    judged = verify_file(timeline)
    assert (judged.verdict, judged.why) == (
        "inconclusive",
        "the timeline is empty: block_size_tokens and total_blocks were not observed",
    ), judged.to_text()


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["nonsense"], 2, "ENDPOINT: is no endpoint"),
        (["tcp://127.0.0.1:1", "--replay", "udp//x"], 2, "replay: is no endpoint"),
        (["tcp://127.0.0.1:1", "--timeline", "t.jsonl"], 2, "needs metrics"),
        (["tcp://127.0.0.1:1", "--events", "/no/such/folder/x.jsonl"], 7, "/no/such/folder"),
    ],
)
def test_what_cannot_be_is_a_line_and_a_code(
    run_command: Run, arguments: list[str], code: int, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("watch", *arguments, "--duration", 0.2) == code
    assert what in capsys.readouterr().err


def test_a_replay_publishes_and_a_watch_follows_it(
    run_command: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live, replay = free_endpoints()
    rows = [{"timestamp": 9 * n, "input_length": 512, "output_length": 3, "hash_ids": [n % 7]} for n in range(60)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--pages", "70", "--page-size", "16", "--max-seqs", "2"]
    publish = ["--kv-events", live, "--set", f"kv_events_replay={replay}"]
    publish += ["--set", "kv_events_wait=20", "--set", "kv_events_stay=1"]
    with preforked.start("replay", trace, *options, *publish) as process:

        def end_the_watch() -> None:
            process.wait()
            os.kill(os.getpid(), signal.SIGINT)

        ending = threading.Thread(target=end_the_watch)
        ending.start()
        code = run_command("watch", live, "--replay", replay, "--duration", 60, "--set", "total_blocks=70", "--json")
        ending.join()
    verdict = json.loads(capsys.readouterr().out)
    assert (process.returncode, code) == (0, 0), verdict
    counts = verdict["counts"]
    assert (verdict["verdict"], verdict["blocks"]) == ("ok", {"GPU": 68}), "what is there at the end"
    assert counts["num_stored_blocks"] - counts["num_removed_blocks"] == 68
    # A watch on a busy machine may ask when much has happened: it is told what is there, and not what was.
    assert verdict["followed"]["num_states"] or verdict["num_stored_again"] == 1696


def test_options_of_a_replay_that_cannot_be_are_refused(
    run_command: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jsonl").write_text(
        json.dumps({"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [1]})
    )
    trace = tmp_path / "t.jsonl"
    assert run_command("replay", trace, "--set", "kv_events_replay=tcp://127.0.0.1:1") == 2
    assert "has no effect without --kv-events" in capsys.readouterr().err
    assert run_command("replay", trace, "--kv-events", "5557") == 2
    assert "is no endpoint" in capsys.readouterr().err
