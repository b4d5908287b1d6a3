"""A mock at its knee among clients that misbehave: is a page lost, does memory grow, is every error an envelope?

    python benchmarks/serve_faults.py [--minutes 30] [--clients 64] [--flood 2000]

Starts `kvarts mock` with every law of page accounting checked after every step (--audit), with so few pages that
requests are preempted and the queue is full. Clients ask and read, leave in the middle, read slowly or not at all, send
half of a body, bytes that are no UTF-8, JSON that is no request, ids that are no tokens, bodies of 100 MB with their
length and without, and what is no HTTP. Once a minute so many connections come at once. At the end SIGTERM comes while
requests are under way.

Prints what was asked and answered, and a verdict of each claim. Exits with 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

PATH = "/v1/completions"
SETTINGS = ["--pages", "300", "--page-size", "16", "--max-seqs", "48", "--set", "max_queued=32", "--audit",
            "--cost", "linear:step_ms=10,chunk_token_ms=0.004", "--host-pages", "200", "--port", "0",
            "--set", "drain=10"]  # fmt: skip
BIG_BYTES = 100_000_000
RETRY_S = 0.05


class Account:
    """What was asked and answered, and what was wrong."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.answered: Counter[int] = Counter()
        self.wrong: Counter[str] = Counter()

    def check(self, status: int, payload: bytes, allowed: tuple[int, ...]) -> None:
        """Note an answer. Every error is an envelope, and of a status that is expected."""
        self.answered[status] += 1
        if status not in allowed:
            self.wrong[f"status {status} where {allowed} were expected: {payload[:200]!r}"] += 1
        if status >= 400:
            try:
                error = json.loads(payload)["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["code"] == status
                assert "Traceback" not in error["message"]
            except (ValueError, KeyError, TypeError, AssertionError):
                self.wrong[f"an error of status {status} is no envelope: {payload[:200]!r}"] += 1


class Clients:
    """Asks one server in many ways."""

    def __init__(self, url: str, account: Account, seed: int) -> None:
        self._host, _, port = urlsplit(url).netloc.partition(":")
        self._port = int(port)
        self._account = account
        self._rng = random.Random(seed)

    def body(self, **fields: Any) -> bytes:
        """Return the body of a request that is good; many share a beginning."""
        rng = self._rng
        head = [rng.randrange(6)] * (16 * rng.randrange(1, 20))
        prompt = head + [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
        return json.dumps(
            {"prompt": prompt, "max_tokens": rng.randrange(1, 200), "ignore_eos": True, **fields}
        ).encode()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection."""
        return await asyncio.wait_for(asyncio.open_connection(self._host, self._port), 30)

    async def post(self, body: bytes, allowed: tuple[int, ...], *, timeout_s: float = 120.0) -> int:
        """Ask, read all, and check the answer; return its status."""
        reader, writer = await self.open()
        try:
            writer.write(head_of(len(body)) + body)
            status, payload = await asyncio.wait_for(read_answer(reader), timeout_s)
            self._account.check(status, payload, allowed)
            return status
        finally:
            writer.close()

    async def one(self) -> None:
        """Ask once, in some way."""
        kind, ask = self._rng.choices(KINDS, weights=WEIGHTS)[0]
        self._account.asked[kind] += 1
        try:
            await ask(self)
        except (ConnectionError, asyncio.IncompleteReadError, BrokenPipeError) as error:
            if kind in MAY_BE_CUT:
                return
            self._account.wrong[f"{kind}: {error!r}"] += 1
        except TimeoutError:
            self._account.wrong[f"{kind}: no answer in time"] += 1

    # Ways to ask ------------------------------------------------------------------------------------------

    async def good(self) -> None:
        """Ask as one should; come again later if there is no room."""
        if await self.post(self.body(), (200, 429)) == 429:
            await asyncio.sleep(RETRY_S)

    async def stream(self) -> None:
        """Read a stream to its end."""
        if await self.post(self.body(stream=True, stream_options={"include_usage": True}), (200, 429)) == 429:
            await asyncio.sleep(RETRY_S)

    async def leave(self) -> None:
        """Ask, read a bit, and go."""
        reader, writer = await self.open()
        body = self.body(stream=self._rng.random() < 0.7, n=self._rng.choice([1, 1, 3]))
        writer.write(head_of(len(body)) + body)
        if self._rng.random() < 0.7:
            await asyncio.wait_for(reader.read(400), 60)
        await asyncio.sleep(self._rng.random() * 0.2)
        if self._rng.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def slow(self) -> None:
        """Read a stream slowly, or not at all."""
        reader, writer = await self.open()
        body = self.body(stream=True)
        writer.write(head_of(len(body)) + body)
        is_reading = self._rng.random() < 0.5
        for _ in range(10):
            if is_reading and not await asyncio.wait_for(reader.read(100), 120):
                break
            await asyncio.sleep(0.3)
        writer.transport.abort()

    async def half(self) -> None:
        """Send half of a body, and go, or wait a bit."""
        _, writer = await self.open()
        body = self.body()
        writer.write(head_of(len(body)) + body[: len(body) // 2])
        await asyncio.sleep(self._rng.choice([0.0, 2.0]))
        writer.close()

    async def no_text(self) -> None:
        """Send bytes that are no UTF-8."""
        await self.post(b'{"prompt": "\xff\xfe\xc0 \x80", "max_tokens": 3}', (400,))

    async def nonsense(self) -> None:
        """Send JSON that is no request."""
        body = self._rng.choice([b"{", b"[1]", b"null", b"7", b'{"n": 1e9}', b'{"prompt": {}}', b"[" * 50_000, b"\x00"])
        await self.post(body, (400,))

    async def bad_ids(self) -> None:
        """Ask with ids that are no tokens, and numbers that cannot be."""
        bad: list[dict[str, Any]] = [
            {"prompt": [-1]},
            {"prompt": [2**32]},
            {"prompt": [2**80]},
            {"prompt": [1.5]},
            {"prompt": [[1], "a", [None]]},
            {"prompt": []},
            {"prompt": "a", "max_tokens": 10**9},
            {"prompt": "a", "max_tokens": -1},
            {"prompt": "a", "temperature": -1},
            {"prompt": "a", "n": 0},
            {"prompt": "a", "top_p": 7},
            {"prompt": [1] * 30_000},
            {"prompt": "a", "stop": ["x"] * 100},
        ]
        await self.post(json.dumps(self._rng.choice(bad)).encode(), (400,))

    async def elsewhere(self) -> None:
        """Ask for what is not there."""
        reader, writer = await self.open()
        path = self._rng.choice(["/v1/nothing", "/v1/models/none", "/v1/responses/none", "/%00%ff", "/v1/completions"])
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        status, payload = await asyncio.wait_for(read_answer(reader), 60)
        self._account.check(status, payload, (404, 405))
        writer.close()

    async def no_http(self) -> None:
        """Send what is no HTTP."""
        reader, writer = await self.open()
        writer.write(self._rng.randbytes(self._rng.randrange(1, 400)) + b"\r\n\r\n")
        status, payload = await asyncio.wait_for(read_answer(reader), 60)
        self._account.check(status, payload, (400,))
        writer.close()

    async def big(self) -> None:
        """Send 100 MB, with its length or in chunks, until the server has enough."""
        reader, writer = await self.open()
        has_length = self._rng.random() < 0.5
        length = f"content-length: {BIG_BYTES}" if has_length else "transfer-encoding: chunked"
        writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{length}\r\n\r\n".encode())
        part = b" " * 65_536
        chunk = part if has_length else b"10000\r\n" + part + b"\r\n"
        answer = asyncio.ensure_future(read_answer(reader))
        try:
            for _ in range(BIG_BYTES // len(part)):
                if answer.done():
                    break
                writer.write(chunk)
                await asyncio.wait_for(writer.drain(), 60)
        except ConnectionError:
            pass  # it has answered, and closed
        try:
            status, payload = await asyncio.wait_for(answer, 60)
        finally:
            writer.close()
        self._account.check(status, payload, (413,))


KINDS = (
    ("good", Clients.good),
    ("stream", Clients.stream),
    ("leave", Clients.leave),
    ("slow", Clients.slow),
    ("half", Clients.half),
    ("no UTF-8", Clients.no_text),
    ("nonsense", Clients.nonsense),
    ("bad ids", Clients.bad_ids),
    ("elsewhere", Clients.elsewhere),
    ("no HTTP", Clients.no_http),
    ("100 MB", Clients.big),
)
WEIGHTS = (30, 30, 20, 5, 4, 4, 4, 6, 3, 3, 0.2)
MAY_BE_CUT = ("leave", "slow", "half", "no HTTP", "100 MB")
"""Where the connection may go before the answer is read."""


def head_of(length: int) -> bytes:
    """Return the head of a request."""
    return f"POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n".encode()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the status and the body of an answer, as far as it came."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    length = re.search(rb"content-length: (\d+)", head.lower())
    if length:
        return status, await reader.readexactly(int(length[1]))
    return status, await reader.read()


async def ask(clients: Clients, until_s: float) -> None:
    """Ask one time after the other."""
    while time.monotonic() < until_s:
        await clients.one()


async def flood(clients: Clients, account: Account, num_connections: int, until_s: float) -> None:
    """Open so many connections at once, once a minute, each with a request."""
    while time.monotonic() < until_s:
        account.asked["of a flood"] += num_connections
        body = json.dumps({"prompt": "a flood", "max_tokens": 5}).encode()
        told = await asyncio.gather(
            *(clients.post(body, (200, 429)) for _ in range(num_connections)), return_exceptions=True
        )
        for error in told:
            if isinstance(error, BaseException):
                account.wrong[f"of a flood: {error!r}"] += 1
        await asyncio.sleep(60.0)


def rss_kib(pid: int) -> int:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


async def watch(pid: int, seen: list[int], until_s: float) -> None:
    """Look at the memory of the server every second."""
    while time.monotonic() < until_s:
        seen.append(rss_kib(pid))
        await asyncio.sleep(1.0)


async def metric(clients: Clients, name: str) -> float:
    """Return one sample."""
    reader, writer = await clients.open()
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    _, payload = await read_answer(reader)
    writer.close()
    line = next(line for line in payload.decode().splitlines() if re.match(name, line))
    return float(line.rsplit(" ", 1)[1])


async def at_rest(clients: Clients) -> dict[str, float]:
    """Wait until nothing is under way, nor a page held by a transfer; return what is used then."""
    names = {"requests": "kvarts:requests_live", "pages used": r'kvarts:pages\{.*state="used"'}
    for _ in range(600):
        used = {what: await metric(clients, name) for what, name in names.items()}
        if not any(used.values()):
            break
        await asyncio.sleep(0.1)
    return used | {
        "preemptions": await metric(clients, "vllm:num_preemptions_total"),
        "aborted": await metric(clients, "kvarts:requests_aborted_total"),
    }


async def terminated(process: subprocess.Popen[bytes], clients: Clients, account: Account) -> tuple[int, float]:
    """Send SIGTERM while streams are under way, which must end well; return the exit code, and how long it took."""
    body = json.dumps({"prompt": [1] * 40, "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
    asking = [asyncio.ensure_future(clients.post(body, (200,))) for _ in range(16)]
    await asyncio.sleep(0.5)
    began_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    for told in await asyncio.gather(*asking, return_exceptions=True):
        if isinstance(told, BaseException):
            account.wrong[f"under way at SIGTERM: {told!r}"] += 1
    code = await asyncio.to_thread(process.wait, 60)
    return code, time.monotonic() - began_s


async def run(args: argparse.Namespace) -> int:
    """Run all of it."""
    account = Account()
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-m", "kvarts", "mock", *SETTINGS]
        process = subprocess.Popen(command, stderr=errors, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        try:
            url = None
            while url is None:
                await asyncio.sleep(0.1)
                errors.seek(0)
                found = re.search(rb"http://[0-9.:]+", errors.read())
                url = found and found[0].decode()
                assert process.poll() is None, "the server did not start"
            until_s = time.monotonic() + 60 * args.minutes
            clients = [Clients(url, account, seed) for seed in range(args.clients)]
            seen: list[int] = []
            await asyncio.gather(
                watch(process.pid, seen, until_s),
                flood(Clients(url, account, -1), account, args.flood, until_s - 30),
                *(ask(each, until_s) for each in clients),
            )
            rest = await at_rest(clients[0])
            code, drain_s = await terminated(process, clients[0], account)
        finally:
            process.kill()
        errors.seek(0)
        told = errors.read().decode()
    quarter = max(1, len(seen) // 4)
    # A flood and a body of 32 MiB are there for a moment: what stays is the median.
    before, after = median(seen[quarter : 2 * quarter]), median(seen[-quarter:])
    claims = {
        "every answer was as expected, and every error an envelope": not account.wrong,
        "no page is used and no request is left": rest["requests"] == rest["pages used"] == 0,
        "the engine was at its knee: requests were preempted and refused": rest["preemptions"] > 0
        and account.answered[429] > 0,
        "memory is flat: the median of the last quarter is within 5 % of that of the second": after <= before * 1.05,
        "no traceback": "Traceback" not in told,
        "SIGTERM drained, and the process ended well": code == 0,
    }
    print(f"{args.minutes:g} minutes, {args.clients} clients; asked: {dict(account.asked)}")
    print(f"answered: {dict(sorted(account.answered.items()))}; at rest: {rest}")
    quarters = [seen[first : first + quarter] for first in range(0, 4 * quarter, quarter)]
    told_mib = ", ".join(f"{median(each) / 1024:.0f} ({max(each) / 1024:.0f})" for each in quarters if each)
    print(f"resident, MiB, median of each quarter, and the most: {told_mib}")
    print(f"SIGTERM: exit code {code} after {drain_s:.1f} s; on standard error:\n{told.strip()[-1500:]}")
    for what, count in account.wrong.most_common(20):
        print(f"WRONG {count} times: {what}")
    for claim, holds in claims.items():
        print(f"{'ok' if holds else 'MISSED'}: {claim}")
    return 0 if all(claims.values()) else 1


def main() -> None:
    """Parse, run, and exit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--flood", type=int, default=2000)
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
