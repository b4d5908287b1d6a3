"""The live page: what it shows of a server, to whom, and in a real browser."""

from __future__ import annotations

import math
import re
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.tenants import Owner
from kvarts.doors.openai.live import MOST_HOLDERS, middle_and_tail_ms
from kvarts.doors.openai.meter import FINE_S, FIRST_TOKEN_S, BucketCounts
from kvarts.doors.openai.running import RunningServer
from kvarts.sim.report.page import MOST_ROWS, LiveEngine, LiveHistory, LiveRow

from builders.http_client import OpenStream, call

COMPLETIONS = "/v1/completions"


def live(server: RunningServer, since: float = -1, **headers: str) -> LiveEngine:
    reply = call(server.url, f"/live?since={since}", headers=headers)
    assert reply.status == 200, reply.payload
    return msgspec.json.decode(reply.payload, type=list[LiveEngine])[0]


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_memory_and_its_holders_are_those_of_the_engine() -> None:
    with RunningServer(pages=512, cost="linear:step_ms=5") as server:
        prompt = "the sea " * 64
        call(server.url, COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        body = {"prompt": prompt + "and land", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with OpenStream(server.url, COMPLETIONS, body, {"x-request-id": "the-one"}):
            until(lambda: bool(live(server).holders) and live(server).holders[0].tokens > 20)
            engine = live(server)
            (holder,), device = engine.holders, engine.memories[0]
            assert (holder.name, holder.state, holder.prompt_tokens) == ("the-one", "decoding", 130)
            assert holder.shared == 8 and holder.pages == device.used
            assert holder.pages - 1 <= -(-(holder.prompt_tokens + holder.tokens) // 16) <= holder.pages + 1
            assert device.total == 512 and device.used + device.cached <= 512
            assert (engine.totals["running"], engine.totals["waiting"]) == (1, 0) and engine.health == "healthy"
        until(lambda: not live(server).holders)
        engine = live(server)
        assert engine.memories[0].used == 0 and engine.memories[0].cached > 8
        assert engine.totals["hit tokens"] == 128


def test_rows_count_what_happened_in_their_second() -> None:
    with RunningServer(pages=512, cost="linear:step_ms=20") as server:
        for attempt in range(1, 6):
            begun_s = time.monotonic()
            call(server.url, COMPLETIONS, {"prompt": "a b c", "max_tokens": 60, "ignore_eos": True})
            took_s = time.monotonic() - begun_s
            until(lambda: sum(row.tokens or 0 for row in live(server).rows) == 60 * attempt)  # noqa: B023
            rows = live(server).rows
            assert sum(row.prompt_tokens or 0 for row in rows) == 3 * attempt and took_s > 1.1
            assert any(row.first_ms for row in rows)
            nexts = [row.next_ms for row in rows if row.next_ms]
            assert nexts and all(middle <= tail for middle, tail in nexts)
            # Tokens that a machine kept back come at once, so it may take one more request.
            if len(rows) > 1 and any(15 <= middle <= 30 for middle, _ in nexts):
                break
        else:
            pytest.fail(f"no second of {rows} has tokens 20 ms apart")
        assert live(server, rows[-2].t_s).rows[0] == rows[-1]
        assert call(server.url, "/live?since=x").error["param"] == "since"
        assert call(server.url, "/live?since=nan").error["param"] == "since"


def test_an_owner_sees_its_own_requests_and_an_administrator_all() -> None:
    keys = {"a": Owner(name="red"), "b": Owner(name="blue")}
    with RunningServer(api_key=keys, admin_key="c", pages=512, cost="linear:step_ms=5") as server:
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        assert call(server.url, "/live").status == 401
        page = call(server.url, "/")
        assert page.status == 200 and b"<title>" in page.payload
        streams = [
            OpenStream(server.url, COMPLETIONS, body, {"authorization": f"Bearer {key}", "x-request-id": f"of-{key}"})
            for key in "ab"
        ]
        until(lambda: live(server, authorization="Bearer c").totals["running"] == 2)
        time.sleep(0.3)  # what was read is shared for a moment
        for key, names, others in (("a", ["of-a"], 1), ("b", ["of-b"], 1), ("c", ["of-a", "of-b"], 0)):
            engine = live(server, authorization=f"Bearer {key}")
            assert (sorted(holder.name for holder in engine.holders), engine.others) == (names, others)
            assert {holder.owner for holder in engine.holders} <= {"red", "blue"}
        for stream in streams:
            stream.close()


def test_many_requests_and_a_dead_engine() -> None:
    with RunningServer(pages=4096, cost="linear:step_ms=50", max_queued=400) as server:
        body = {"prompt": ["x"] * (MOST_HOLDERS + 9), "max_tokens": 50, "ignore_eos": True, "stream": True}
        with OpenStream(server.url, COMPLETIONS, body):
            until(lambda: live(server).totals["running"] == MOST_HOLDERS + 9)
            engine = live(server)
            assert (len(engine.holders), engine.others) == (MOST_HOLDERS, 9) and engine.other_pages >= 9
        call(server.url, "/admin/config", {"health": {"mock": "dead"}})
        until(lambda: live(server).health == "dead")
        assert live(server).memories[0].total == 4096


def test_the_page_speaks_to_its_own_server_alone() -> None:
    with RunningServer() as server:
        page = call(server.url, "/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
        for tag in ("script", "style"):
            (text,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), page.payload, re.DOTALL)
            assert f"'sha256-{b64encode(sha256(text).digest()).decode()}'" in policy
        assert not re.search(rb"https?://|<link|src=|innerHTML|url\(", page.payload)
        assert call(server.url, "/", method="HEAD").payload == b""
        foreign = {"origin": "http://elsewhere.example"}
        assert call(server.url, "/live", headers=foreign).status == 403
        assert call(server.url, "/live", headers={"host": "elsewhere.example"}).status == 403
        assert call(server.url, "/live", method="HEAD").payload == b""
        assert call(server.url, "/x").status == 404
    with RunningServer(has_page=False) as server:
        assert [call(server.url, path).status for path in ("/", "/live")] == [404, 404]


@given(st.lists(st.floats(0, 2000), max_size=30))
def test_values_are_counted_alike_one_by_one_and_all_at_once(values: list[float]) -> None:
    one_by_one, at_once = BucketCounts(FIRST_TOKEN_S), BucketCounts(FIRST_TOKEN_S)
    for value in values:
        one_by_one.add(value)
    at_once.add_sorted(sorted(values))
    assert at_once.counts == one_by_one.counts
    assert at_once.total == pytest.approx(one_by_one.total)


def test_a_history_is_ten_minutes() -> None:
    history = LiveHistory()
    for second in range(MOST_ROWS + 50):
        history.add(LiveRow(float(second)))
    rows = history.since(-1)
    assert len(rows) == MOST_ROWS and rows[0].t_s == 50 and [row.t_s for row in history.since(648)] == [649]


@given(values=st.lists(st.floats(0.0002, 200.0), min_size=1, max_size=300))
def test_percentiles_are_within_a_bucket_and_published_buckets_exact(values: list[float]) -> None:
    fine, coarse = BucketCounts(FINE_S, FIRST_TOKEN_S), BucketCounts(FIRST_TOKEN_S)
    before = list(fine.counts)
    for value in values:
        fine.add(value)
        coarse.add(value)
    assert fine.cumulative() == coarse.cumulative() and fine.total == coarse.total
    told = middle_and_tail_ms(fine, before, fine.counts)
    assert told is not None
    for share, told_ms in zip((0.5, 0.99), told, strict=True):
        exact = sorted(values)[math.floor(share * (len(values) - 1) + 0.5 + 1e-9)]
        assert exact <= told_ms / 1e3 * 1.001 and told_ms / 1e3 <= exact * 1.16
    assert middle_and_tail_ms(fine, fine.counts, fine.counts) is None


def test_the_page_in_a_browser(browser: Callable[[bool], Any]) -> None:
    from builders.browser import as_phone, inks, scrolls_sideways

    driver = browser(False)
    keys = {"secret": Owner(name="red")}
    with RunningServer(api_key=keys, pages=256, cost="linear:step_ms=10") as server:
        server.excuse("unread stream")

        def ask(number: int) -> None:
            headers = {"authorization": "Bearer secret", "x-request-id": f"<b>request {number}</b>"}
            call(server.url, COMPLETIONS, {"prompt": "the sea " * 40 + str(number), "max_tokens": 900,
                                           "ignore_eos": True}, headers=headers)  # fmt: skip

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        driver.get(server.url)

        def state() -> str:
            return str(driver.find_element("id", "state").text)

        until(lambda: "key is needed" in state())
        field = driver.find_element("id", "key")
        field.send_keys("wrong")
        field.submit()
        time.sleep(1.5)
        assert "key is needed" in state() and not driver.find_elements("css selector", "h2")
        field.send_keys("secret")
        field.submit()
        until(lambda: state() == "live")
        for thread in threads:
            thread.start()
        until(lambda: "request 2" in driver.find_element("tag name", "table").text)
        assert "<b>request 2</b>" in driver.find_element("tag name", "table").text  # data, never markup
        until(lambda: inks(driver, "canvas.cells") >= 5)  # shared, three requests, lines between
        heads = [head.text for head in driver.find_elements("css selector", "h3")]
        assert len(heads) == 7 and heads[5].startswith("ITL") and "decoding" in driver.page_source
        until(lambda: "\u2013" not in driver.find_elements("css selector", "h3")[5].text)
        assert inks(driver, "canvas.chart") >= 1
        as_phone(driver)
        time.sleep(1.2)
        assert not scrolls_sideways(driver)
        for thread in threads:
            thread.join()
        until(lambda: "request" not in driver.find_element("tag name", "table").text)
        # The browser itself logs a refused key, and that this test reads a canvas.
        logs = [
            log for log in driver.get_log("browser") if "401" not in log["message"] and "readback" not in log["message"]
        ]
        assert logs == [] and "secret" not in driver.current_url
    until(lambda: state() != "live")
