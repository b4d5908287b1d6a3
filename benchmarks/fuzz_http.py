"""Random bodies, heads and schemas at the HTTP door of a mock: does it stay up, small and quick for everybody else?

    python benchmarks/fuzz_http.py [--minutes 60] [--seed 0] [--clients 4] [--pause-s 0]

Starts `kvarts mock` with three owners and every law of page accounting checked after every step (--audit). Some clients
send what they make up: JSON with fields of any type and size, schemas that refer to themselves and to each other, bytes
cut out of and put into good requests, images and audio with torn heads, heads that are long, many, torn or nonsense,
bodies that stop half-way, the wrong keys, and everything at once. One client, which is in a process of its own, asks
for three tokens fifty times a second.

The server is watched from outside: its memory (VmHWM) may grow by 200 MB, the wait of the other client by the 99th
percentile of each minute may be half a second, every answer is a status that the door knows, with an envelope, and at
the end nothing is under way and every page is accounted for. Prints what was asked and answered, and a verdict of each
bound. Exits with 1 if one does not hold. A seed sends the same bytes; their order among clients is the machine's.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import multiprocessing
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MIB = 1 << 20
MOST_BYTES = 200 * MIB
MOST_P99_S = 0.5
KEYS = "victim owner=victim\nfuzz-a owner=a\nfuzz-b owner=b priority share=2\n"
STATUSES = {200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 431, 503}
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize",
    "/detokenize", "/v1/completions/render", "/v1/chat/completions/render", "/v1/messages/count_tokens",
    "/v1/responses/resp_x", "/v1/models", "/metrics", "/admin/config", "/sleep", "/v1/load_lora_adapter",
    "/abort_requests", "/reset_prefix_cache", "/nothing", "/live", "/kv_event_sources",
)  # fmt: skip
WEIGHTS = (12, 12, 6, 8, 6, 3, 3, 2, 2, 2, *([1] * 11))
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIELDS = (
    "model", "prompt", "messages", "input", "instructions", "previous_response_id", "stream", "stream_options",
    "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "stop", "stop_token_ids",
    "ignore_eos", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "priority", "cache_salt", "user", "return_token_ids", "kv_transfer_params",
    "session_id", "logprobs", "top_logprobs", "echo", "tools", "tool_choice", "response_format", "chat_template",
    "continue_final_message", "metadata", "text", "include", "tokens", "add_special_tokens", "return_token_strs",
    "prompt_logprobs", "store", "kvarts_answer", "dimensions", "encoding_format", "system", "output_config",
    "stop_sequences", "parallel_tool_calls", "thinking", "thinking_token_budget", "thinking_budget_tokens", "reasoning",
    "reasoning_effort", "chat_template_kwargs", "cache_control", "kvarts_hints", "kv_hints", "nvext", "background",
)  # fmt: skip
MEDIA_HEADS = (
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\2\0\0\0\2\0\x08\2\0\0\0",
    b"GIF89a\x10\0\x10\0\xf0\0\0",
    b"\xff\xd8\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0\xff\xc0\0\x11\x08\1\0\1\0\3",
    b"RIFF\x24\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\0\0\xff\0\0",
    b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0\0\x7d\0\0\2\0\x10\0data\0\x7d\0\0",
    b"\xff\xfb\x90\0" + bytes(400),
)
KEYWORDS = (
    "type", "properties", "required", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "enum",
    "const", "anyOf", "oneOf", "allOf", "$ref", "minimum", "maximum", "exclusiveMinimum", "additionalProperties",
    "uniqueItems", "minProperties", "format", "pattern", "not",
)  # fmt: skip


class Maker:
    """Makes things up. Owner of the random numbers of one client."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def number(self) -> int | float:
        """A number, often near a bound."""
        rng = self.rng
        near = rng.choice([0, 1, 2, 16, 128, 1024, 20_000, 100_000, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30])
        return rng.choice([near, near + 1, -near, near - 1, rng.random(), -1.5, 1e308, rng.randrange(100)])

    def size(self, most: int) -> int:
        """A size, seldom a large one."""
        return int(most ** self.rng.random() ** 2)

    def text(self, most: int = 200_000) -> str:
        """A text of words, of one letter, or of any characters."""
        rng, count = self.rng, self.size(most)
        kind = rng.randrange(4)
        if kind == 0:
            return " ".join(rng.choices(["the", "of", "and", "hello", "a"], k=count // 4 + 1))
        if kind == 1:
            return rng.choice("a \n\0\u00e9\u4e2d\U0001f600") * count
        if kind == 2:
            return "".join(map(chr, rng.choices([*range(1, 0xD800)], k=min(count, 2000))))
        return rng.choice(["", "a", "auto", "required", "none", "json_schema", "mock", "<|im_start|>"])

    def value(self, depth: int = 0) -> Any:
        """Any JSON value, small or large."""
        rng, kind = self.rng, self.rng.randrange(9)
        if kind == 0 and depth < 6:
            return {self.text(20): self.value(depth + 1) for _ in range(rng.randrange(5))}
        if kind == 1 and depth < 6:
            return [self.value(depth + 1) for _ in range(rng.randrange(5))]
        if kind == 2:
            return [rng.choice([0, 1, "a", [], {}, None, 5, -1, 2**40])] * self.size(400_000 if not depth else 100)
        if kind == 3:
            value: Any = 1
            for _ in range(self.size(300)):
                value = [value]
            return value
        if kind in (4, 5):
            return self.number()
        return self.text() if kind == 6 else rng.choice([None, True, False])

    def schema(self, depth: int = 0) -> Any:
        """A JSON schema, or what is nearly one."""
        rng = self.rng
        if depth > 5 or rng.random() < 0.1:
            return rng.choice([{}, True, {"type": "string"}, {"$ref": "#/$defs/a"}, {"$ref": "#"}, self.value(3)])
        schema: dict[str, Any] = {}
        for keyword in rng.sample(KEYWORDS, rng.randrange(1, 5)):
            if keyword in ("properties", "$defs"):
                schema[keyword] = {f"p{k}": self.schema(depth + 1) for k in range(self.size(40))}
            elif keyword in ("items", "additionalProperties", "not"):
                schema[keyword] = self.schema(depth + 1)
            elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
                schema[keyword] = [self.schema(depth + 1) for _ in range(rng.randrange(1, 4))]
            elif keyword == "$ref":
                schema[keyword] = rng.choice(["#", "#/$defs/a", "#/$defs/b", "#/properties/p0", "#/x/~1", "http://x"])
            elif keyword == "type":
                schema[keyword] = rng.choice(["object", "array", "string", "integer", "number", "boolean", "null", "x"])
            elif keyword == "required":
                schema[keyword] = [f"p{k}" for k in range(self.size(3000))]
            elif keyword in ("enum", "const", "format", "pattern"):
                schema[keyword] = self.value(2)
            else:
                schema[keyword] = rng.choice([self.number(), 40, 1000, 99_999, self.value(4)])
        if not depth:
            schema["$defs"] = {name: self.schema(depth + 1) for name in ("a", "b")}
        return schema

    def body(self, path: str) -> dict[str, Any]:
        """A body that is nearly right for its path."""
        rng = self.rng
        hello = [{"role": "user", "content": "hello"}]
        body: dict[str, Any] = {"prompt": "hello", "messages": hello, "input": "hello", "max_tokens": 4}
        if "detokenize" in path:
            body["tokens"] = [1, 2, 3]
        for field in rng.sample(FIELDS, rng.randrange(5)):
            body[field] = self.value()
        if rng.random() < 0.15:
            calls = [{"name": self.text(9), "arguments": self.value(3)} for _ in range(self.size(500))]
            told: dict[str, Any] = {
                "text": self.text(),
                "calls": calls,
                "reasoning": self.text(),
                "refusal": self.text(2),
            }
            body["kvarts_answer"] = {name: told[name] for name in rng.sample([*told], rng.randrange(5))}
        kind = rng.randrange(9)
        if kind == 0:
            schema = self.schema()
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body["text"] = body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        elif kind == 1:
            schema = self.schema()
            function = {"name": "f", "parameters": schema, "input_schema": schema}
            body["tools"] = [{"type": "function" if "chat" in path else "custom", "function": function, **function}]
            if "responses" in path:
                body["tools"][0]["type"] = "function"
            body["tool_choice"] = {"type": "any"} if "messages" in path else "required"
        elif kind == 2:
            body["prompt"] = rng.choice(
                [["a"] * self.size(20_000), [1] * self.size(500_000), [[1, 2]] * self.size(9999)]
            )
            body["n"] = rng.choice([1, 2, 128])
        elif kind == 3:
            body["messages"] = [{"role": "user", "content": self.text(40)}] * self.size(100_000)
        elif kind == 5:
            kinds = ["text", "tool_use", "tool_result", "thinking", "image", "function_call", "function_call_output"]
            parts = [
                {"type": rng.choice(kinds), "text": "x", "id": "y", "call_id": "y", "name": "f", "input": self.value(3)}
                for _ in range(self.size(3000))
            ]
            body["messages"] = [{"role": rng.choice(["user", "assistant"]), "content": parts}]
            body["input"] = parts
        elif kind == 6:
            parts = [self.medium() for _ in range(self.size(200))]
            body["messages"] = [{"role": "user", "content": [*parts, {"type": "text", "text": "hello"}]}]
            body["input"] = [{"role": "user", "content": [*parts, {"type": "input_text", "text": "hello"}]}]
        elif kind == 7:
            control = {"type": "ephemeral", "ttl": rng.choice(["5m", "1h", "0s", "9999h", "5m\n", 5])}
            budget = rng.choice([0, 1024, self.number()])
            body |= {
                "cache_control": control,
                "thinking": {"type": rng.choice(["enabled", "disabled", "adaptive", []]), "budget_tokens": budget},
                "thinking_token_budget": budget,
                "tool_choice": {"type": rng.choice(["auto", "any", "tool", [], {}])},
                "kvarts_hints": {"priority": self.number(), "retain": [{"start": self.number(), "end": self.number()}]},
            }
            for field in rng.sample([*body], rng.randrange(4)):
                del body[field]
        elif kind == 4:
            body |= {"stream": True, "max_tokens": self.size(3000), "ignore_eos": True, "n": rng.choice([1, 1, 8])}
        return body

    def medium(self) -> dict[str, Any]:
        """An image or audio, perhaps damaged, in the form of any API."""
        rng = self.rng
        data = bytearray(rng.choice(MEDIA_HEADS) + rng.randbytes(self.size(20_000)))
        for _ in range(rng.choice([0, 0, 1, 3])):
            data[rng.randrange(min(60, len(data)))] = rng.choice([0, 1, 0x7F, 0xFF])
        del data[rng.choice([len(data), len(data), rng.randrange(60)]) :]
        text = base64.b64encode(data).decode()[rng.choice([0, 0, 0, 1]) :]
        url = rng.choice([f"data:image/png;base64,{text}", f"data:audio/wav;base64,{text}", "https://x/y.png", text])
        image = {"url": url, "detail": rng.choice(["auto", "low", "high", 7])}
        return rng.choice([
            {"type": "image_url", "image_url": image},
            {"type": "input_image", "image_url": url},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}},
            {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": url}},
            {"type": rng.choice(["video_url", "file", "input_file"]), "file": image},
        ])  # fmt: skip

    def payload(self, path: str) -> bytes:
        """The bytes of a body, perhaps damaged."""
        rng = self.rng
        body = self.value() if rng.random() < 0.05 else self.body(path)
        payload = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        if rng.random() < 0.15:
            place = rng.randrange(len(payload) + 1)
            deep = rng.choice([b"{", b"["]) * self.size(100_000)
            damage = rng.choice([b"", b"\xff", b"\0", deep, b"9" * 5000, rng.randbytes(20)])
            payload = payload[:place] + damage + payload[place + rng.randrange(3) :]
        return payload

    def head(self, method: str, path: str, length: int | None) -> bytes:
        """A head, perhaps damaged."""
        rng = self.rng
        key = rng.choices(["fuzz-a", "fuzz-b", "", "wrong", "fuzz-a\x80"], (8, 8, 2, 1, 1))[0]
        lines = [f"{method} {path} HTTP/1.{rng.choices([1, 0], (9, 1))[0]}", "host: x", f"authorization: Bearer {key}"]
        if length is not None:
            lines.append(f"content-length: {length}")
        kinds = ["application/json", "text/plain", "application/json; charset=utf-8", ""]
        lines.append(f"content-type: {rng.choices(kinds, (16, 1, 2, 1))[0]}")
        names = ("origin", "x-session-id", "x-request-id", "x-kvarts-fail", "expect", "upgrade", "connection", "accept")
        values = ("http://evil.example", "100-continue", "h2c", "die", "x" * self.size(70_000))
        count = rng.choices([0, 1, 2], (8, 2, 1))[0]
        lines += [f"{name}: {rng.choice(values)}" for name in rng.sample(names, count)]
        head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
        if rng.random() < 0.05:
            place = rng.randrange(len(head))
            head = head[:place] + rng.randbytes(rng.randrange(9)) + head[place + rng.randrange(9) :]
        return head


class Account:
    """What was asked and answered, and what was wrong. Shared by all clients."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, answer: bytes) -> None:
        """Check the first answer on a connection, and note its status."""
        answer = answer.removeprefix(CONTINUE)
        found = re.match(rb"HTTP/1\.1 (\d+) ", answer)
        told = found[1].decode() if found else "closed"
        wrong = None
        if found and int(found[1]) not in STATUSES:
            wrong = f"{told}: {answer[:300]!r}"
        elif found and int(found[1]) >= 400:
            head, _, body = answer.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            try:
                envelope = json.loads(body[: int(length[1])] if length else body)
                error = envelope["error"]
                if envelope.get("type") == "error":  # of /v1/messages
                    assert set(error) == {"message", "type"}
                else:
                    assert set(error) == {"message", "type", "param", "code"} and error["code"] == int(found[1])
                assert "Traceback" not in error["message"] and len(error["message"]) < 10_000
            except (ValueError, KeyError, TypeError, AssertionError):
                wrong = f"no envelope: {answer[:300]!r}"
        with self._lock:
            self.answered[told] += 1
            if wrong is not None:
                self.wrong[wrong] += 1


def fuzz(url: str, seed: int, account: Account, pause_s: float, until: Callable[[], bool]) -> None:
    """Send what is made up, one connection after the other."""
    maker = Maker(seed)
    rng = maker.rng
    host, _, port = urlsplit(url).netloc.partition(":")
    while not until():
        time.sleep(pause_s)
        path = rng.choices(PATHS, WEIGHTS)[0]
        payload = maker.payload(path)
        kind = rng.choices(["whole", "half", "heads", "nonsense", "go"], (20, 2, 2, 1, 3))[0]
        length = len(payload) + (rng.randrange(1, 10_000_000) if kind == "half" else 0)
        data = maker.head(rng.choices(["POST", "GET", "PUT", "OPTIONS"], (17, 1, 1, 1))[0], path, length) + payload
        if kind == "heads":
            data = maker.head("GET", path, None) * maker.size(30_000)
        elif kind == "nonsense":
            data = rng.randbytes(maker.size(100_000))
        try:
            with socket.create_connection((host, int(port)), timeout=10) as client:
                client.settimeout(0.3 if kind == "half" else 10)
                client.sendall(data)
                if kind == "go":
                    continue
                account.note(_answer(client))
        except OSError:
            account.note(b"")


def _answer(client: socket.socket) -> bytes:
    """The first part of what comes, to the end of a whole answer where it is short."""
    answer = b""
    while len(answer) < 100_000:
        part = client.recv(65536)
        if not part:
            break
        answer += part
        head, end, body = answer.removeprefix(CONTINUE).partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if end and (length is None or len(body) >= int(length[1])):
            break
    return answer


def wait_for_answers(url: str, waits: Any) -> None:
    """Ask as another owner does, again and again, and put the seconds of each minute into `waits`."""
    seconds: list[float] = []
    minute = time.monotonic() + 60
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    headers = {"authorization": "Bearer victim", "content-type": "application/json"}
    while True:
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", b'{"prompt": "hello", "max_tokens": 3}', headers)
        response = connection.getresponse()
        response.read()
        seconds.append(time.perf_counter() - began)
        if response.status != 200:
            waits.put(("status", response.status))
        if time.monotonic() > minute or len(seconds) % 50 == 0:
            waits.put(("p99_s", sorted(seconds)[-(len(seconds) // 100) - 1]))
        if time.monotonic() > minute:
            seconds, minute = [], time.monotonic() + 60
        time.sleep(0.02)


def memory_of(pid: int, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each request of a client")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        keys, admin = Path(directory, "keys"), Path(directory, "admin")
        keys.write_text(KEYS)
        admin.write_text("root\n")
        command = [
            sys.executable, "-m", "kvarts", "mock", "--port", "0", "--cost", "linear:step_ms=1", "--pages", "16384",
            "--max-seqs", "64", "--max-queued", "256", "--audit", "--kv-cache-metrics", "--api-key-file", str(keys),
            "--admin-key-file", str(admin),
        ]  # fmt: skip
        return _run(_started(command, stack), arguments)


def _started(command: list[str], stack: ExitStack) -> subprocess.Popen[str]:
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    stack.callback(server.wait)
    stack.callback(server.kill)
    return server


def _run(server: subprocess.Popen[str], arguments: argparse.Namespace) -> int:
    assert server.stderr is not None
    said = server.stderr.readline()
    found = re.search(r"http://[\d.:]+", said)
    assert found is not None, said
    url = found[0]
    lines: list[str] = []
    threading.Thread(target=lambda: lines.extend(server.stderr or ()), daemon=True).start()
    waits: Any = multiprocessing.Queue()
    victim = multiprocessing.Process(target=wait_for_answers, args=(url, waits), daemon=True)
    victim.start()
    time.sleep(2.0)
    idle = memory_of(server.pid, "VmRSS")
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")
    account = Account()
    end = time.monotonic() + arguments.minutes * 60
    clients = [
        threading.Thread(
            target=fuzz,
            args=(url, arguments.seed * 1000 + k, account, arguments.pause_s, lambda: time.monotonic() > end),
        )
        for k in range(arguments.clients)
    ]
    sampling, resident_mib = threading.Event(), list[float]()

    def sample() -> None:
        while not sampling.wait(60.0):
            resident_mib.append(round((memory_of(server.pid, "VmRSS") - idle) / MIB, 1))

    threading.Thread(target=sample, daemon=True).start()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    sampling.set()
    grown = memory_of(server.pid, "VmHWM") - idle
    is_alive = victim.is_alive() and server.poll() is None
    victim.terminate()
    victim.join()
    told: dict[str, list[float]] = {"p99_s": [], "status": []}
    while not waits.empty():
        what, value = waits.get()
        told[what].append(value)
    live = _live(url) if is_alive else -1
    server.terminate()
    server.wait(60)
    worst = max(told["p99_s"], default=float("inf"))
    verdicts = {
        "memory": grown <= MOST_BYTES,
        "waits": worst <= MOST_P99_S,
        "other client answered": is_alive and not told["status"],
        "answers": not account.wrong,
        "nothing under way at the end": live == 0,
        "ended well": server.returncode == 0 and not any("Traceback" in line for line in lines),
    }
    result = {
        "minutes": arguments.minutes,
        "answered": dict(sorted(account.answered.items())),
        "grown_mib": round(grown / MIB, 1),
        "grown_mib_each_minute": resident_mib,
        "worst_p99_s": round(worst, 3),
        "wrong": account.wrong.most_common(5),
        "said": lines[-5:],
        "holds": verdicts,
    }
    print(json.dumps(result, indent=1))
    return 0 if all(verdicts.values()) else 1


def _live(url: str) -> int:
    """Requests that are under way some seconds after the last client went."""
    deadline = time.monotonic() + 20
    while True:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
        connection.request("GET", "/load", headers={"authorization": "Bearer root"})
        live = int(json.loads(connection.getresponse().read())["server_load"])
        connection.close()
        if not live or time.monotonic() > deadline:
            return live
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
