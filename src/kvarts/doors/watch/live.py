"""The live page of a watched engine, on the loopback address."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.doors.watch.metrics import EngineSample
from kvarts.sim.report.page import EVERY_S, LiveEngine, LiveHistory, LiveMemory, LiveRow, live_headers, live_page

if TYPE_CHECKING:
    from kvarts.doors.watch.watched import Watch

__all__ = ["WatchedPage"]

TIMEOUT_S = 2.0
"""One connection is served at a time, so long at most."""
LOOPBACK = "127.0.0.1"


class WatchedPage:
    """Serves the page at a port of the loopback address; 0: a free one. Raises ConfigError if the port is taken.

    `update` is called in the thread that watches; a thread of its own answers.
    """

    def __init__(self, port: int, *, name: str) -> None:
        self._name = name
        self._history = LiveHistory()
        self._before: EngineSample | None = None
        self._next_s = 0.0
        self._engine = LiveEngine(name=name, health="healthy", memories=[LiveMemory(name="device", unit="blocks")])
        page = self

        class Handler(_Handler):
            """Answers with the page or its data."""

            def told(self, since_s: float) -> bytes:
                """Return the data."""
                return page.data(since_s)

        try:
            self._server = HTTPServer((LOOPBACK, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {LOOPBACK}:{port} ({error.strerror or error})", field="ui", hint="Is the port taken?"
            ) from None
        self.url = f"http://{LOOPBACK}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def data(self, since_s: float) -> bytes:
        """Return the data for the page, with the rows of the history after `since_s`."""
        history = self._history
        engine = msgspec.structs.replace(self._engine, now_s=history.now_s, rows=history.since(since_s))
        return msgspec.json.encode([engine])

    def update(self, watch: Watch) -> None:
        """Read the state of the watch, if a second has passed since the last time."""
        if monotonic() < self._next_s:
            return
        self._next_s = monotonic() + EVERY_S
        watched, followed = watch.watched, watch.follower.counts
        claims, counts = watched.claims, watched.counts
        blocks = watched.blocks()
        on_device = blocks.pop("GPU", 0)
        sample = None if watch.looks is None else watch.looks.last
        total = claims.total_blocks
        used = 0
        if sample is not None and sample.usage is not None and total is not None:
            used = min(on_device, round(sample.usage * total))
        notes = [] if claims.is_complete else ["Blocks that were stored before the watch began are not known."]
        if sample is None:
            notes.append("Without --metrics, blocks in use count as cached.")
        if violations := sum(claims.num_violations.values()):
            notes.append(f"The engine's claims were violated {violations:,} times.")
        totals = {"events": counts.num_events, "stored": counts.num_stored_blocks, "removed": counts.num_removed_blocks}
        totals |= {"gaps": followed.num_gaps, "lost batches": followed.num_lost}
        if sample is not None:
            of_metrics = {"running": sample.num_running, "waiting": sample.num_waiting}
            of_metrics |= {"preemptions": sample.num_preempted, "hit tokens": sample.num_hit_tokens}
            totals |= {name: value for name, value in of_metrics.items() if value is not None}
        device = LiveMemory(name="device", unit="blocks", total=total, used=used, cached=on_device - used)
        below = [LiveMemory(name=name, unit="blocks", cached=num) for name, num in blocks.items()]
        self._engine = LiveEngine(
            name=self._name, health="healthy", memories=[device, *below], page_size=claims.block_size, totals=totals,
            notes=notes,
        )  # fmt: skip
        self._history.add(_row(self._history.now_s, device, self._before, sample))
        self._before = sample


def _row(t_s: float, device: LiveMemory, before: EngineSample | None, now: EngineSample | None) -> LiveRow:
    row = LiveRow(t_s, device.used, device.cached)
    if now is None:
        return row
    row = msgspec.structs.replace(row, running=now.num_running, waiting=now.num_waiting)
    if before is None:
        return row

    def more(name: str) -> int | None:
        then, later = getattr(before, name), getattr(now, name)
        return None if then is None or later is None else max(0, later - then)  # an engine may have begun again

    def mean_ms(name: str) -> tuple[float, float] | None:
        then, later = getattr(before, name), getattr(now, name)
        if then is None or later is None or later[1] <= then[1]:
            return None
        mean = round(1e3 * (later[0] - then[0]) / (later[1] - then[1]), 2)
        return mean, mean

    return msgspec.structs.replace(
        row,
        prompt_tokens=more("num_queried_tokens"),
        hit_tokens=more("num_hit_tokens"),
        tokens=more("num_generated_tokens"),
        preemptions=more("num_preempted"),
        first_ms=mean_ms("first_token_s"),
        next_ms=mean_ms("next_token_s"),
    )


class _Handler(BaseHTTPRequestHandler):
    """Answers GET / and GET /live to this machine's pages; a page of another host name or origin is refused."""

    timeout = TIMEOUT_S
    server_version, sys_version = "kvarts", ""

    def told(self, since_s: float) -> bytes:
        """Return the data."""
        raise NotImplementedError

    def do_GET(self) -> None:  # of BaseHTTPRequestHandler
        """Answer a request."""
        host = self.headers.get("host", "")
        origin = self.headers.get("origin")
        own = {f"{name}:{self.connection.getsockname()[1]}" for name in (LOOPBACK, "localhost")}
        url = urlsplit(self.path)
        if host not in own or (origin is not None and urlsplit(origin).netloc != host):
            self._send(403, b"this page is for this machine\n", "text/plain")
        elif url.path == "/":
            self._send(200, live_page(), "text/html; charset=utf-8", *live_headers())
        elif url.path == "/live":
            try:
                since_s = float(parse_qs(url.query).get("since", ["-1"])[0])
            except ValueError:
                self._send(400, b"since is a number of seconds\n", "text/plain")
                return
            self._send(200, self.told(since_s), "application/json")
        else:
            self._send(404, b"there is / and /live\n", "text/plain")

    def _send(self, status: int, body: bytes, kind: str, *headers: tuple[bytes, bytes]) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        for name, value in headers:
            self.send_header(name.decode(), value.decode())
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
