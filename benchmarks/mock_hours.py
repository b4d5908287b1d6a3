"""Hours of a mock under load: its memory, descriptors and threads.

    python benchmarks/mock_hours.py --hours 8 --speedup 8

Starts `kvarts mock --speedup N` with host memory, KV events and durable sessions, and keeps `--clients` busy until the
engine's clock has gone `--hours`, which takes hours / N of wall time: chats, streams, streams that the client drops,
turns of sessions that are never closed, requests that are refused, and a look at /metrics, with a pause after each.
Prompts share a prefix, and the rest of each is new. Prints one JSON object: counts of answers, and a row per tenth of
the time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

KINDS = ("chat", "stream", "dropped", "session", "refused", "metrics")


def main() -> None:
    """Run the mock and its clients; print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=float, default=8.0, help="of the engine's clock")
    parser.add_argument("--speedup", type=float, default=8.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=0.4, help="mean pause of a client after a request")
    options = parser.parse_args()
    wall_s = options.hours * 3600 / options.speedup
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "kvarts", "mock", "--port", "0", "--speedup", str(options.speedup), "--pages", "2000",
            "--cost", "linear:step_ms=20", "--set", "offload.host_pages=4000", "--max-model-len", "4000", "--state-dir",
            folder, "--kv-events", "tcp://127.0.0.1:0",
        ]  # fmt: skip
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as mock:
            try:
                print(json.dumps(observe(mock, wall_s, options), indent=1))
            finally:
                mock.terminate()


def observe(mock: subprocess.Popen[str], wall_s: float, options: argparse.Namespace) -> dict[str, object]:
    """Load the mock for `wall_s`; return the counts and the rows."""
    lines: list[str] = []
    assert mock.stderr is not None
    address = next(found[1] for line in mock.stderr if (found := re.search(r"http://([\d.:]+)", line)))
    threading.Thread(target=lambda: lines.extend(mock.stderr or ()), daemon=True).start()
    counts: Counter[str] = Counter()
    longest_ms = [0] * options.clients
    began = time.monotonic()
    clients = [
        threading.Thread(target=use, args=(address, number, began + wall_s, options.pause_s, counts, longest_ms))
        for number in range(options.clients)
    ]
    for client in clients:
        client.start()
    rows = []
    for tenth in range(11):
        until = began + wall_s * tenth / 10
        # The first row is taken when all that is allocated once has been.
        time.sleep(max(0.0, until - time.monotonic()) + (min(30.0, wall_s / 20) if not tenth else 0.0))
        if tenth == 10:
            for client in clients:
                client.join()
        rows.append({"wall_s": round(time.monotonic() - began), **state_of(mock.pid), "answered": counts.total()})
    return {"wall_s": wall_s, "engine_h": options.hours, "counts": dict(sorted(counts.items())),
            "longest_ms": max(longest_ms), "rows": rows,
            "stderr_lines": len(lines), "tracebacks": sum("Traceback" in line for line in lines)}  # fmt: skip


def state_of(pid: int) -> dict[str, float]:
    """Return memory, descriptors and threads of a process, from /proc."""
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return {"rss_mib": int(status["VmRSS"]) // 1024, "descriptors": descriptors, "threads": int(status["Threads"])}


def use(address: str, number: int, until: float, pause_s: float, counts: Counter[str], longest_ms: list[int]) -> None:
    """Be one client: ask, read or drop the answer, and pause."""
    rng = random.Random(number)
    while time.monotonic() < until:
        kind = rng.choice(KINDS)
        began = time.monotonic()
        try:
            outcome = ask(address, kind, rng)
        except (OSError, http.client.HTTPException) as error:
            outcome = type(error).__name__
        counts[f"{kind}: {outcome}"] += 1
        longest_ms[number] = max(longest_ms[number], round((time.monotonic() - began) * 1000))
        time.sleep(rng.expovariate(1 / pause_s))


def ask(address: str, kind: str, rng: random.Random) -> str:
    """Send one request; return the status of its answer."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        if kind == "metrics":
            connection.request("GET", "/metrics")
            return str(_status_of(connection))
        text = "the shared beginning " * 40 + " ".join(str(rng.randrange(10**9)) for _ in range(rng.randrange(4, 200)))
        body = {
            "model": "nobody" if kind == "refused" else "mock",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": rng.randrange(1, 120),
            "stream": kind in {"stream", "dropped"},
        }
        if kind == "session":
            body["session_id"] = f"s{rng.randrange(40)}"
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        if kind == "dropped":
            answer = connection.getresponse()
            answer.read(rng.randrange(1, 400))
            return str(answer.status)
        return str(_status_of(connection))
    finally:
        connection.close()


def _status_of(connection: http.client.HTTPConnection) -> int:
    answer = connection.getresponse()
    answer.read()
    return answer.status


if __name__ == "__main__":
    main()
