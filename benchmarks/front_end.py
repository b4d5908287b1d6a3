"""An engine behind vLLM's front end: its cost, the accuracy of its times, equality with a replay, and kills.

    python benchmarks/front_end.py cost --model DIR                       # processor time per token, without vLLM
    python benchmarks/front_end.py cost --model DIR --streams 64 --tokens 2000 --step-ms 2
    python benchmarks/front_end.py bench --model DIR --vllm VENV/bin/vllm # `vllm bench serve` against a replay
    python benchmarks/front_end.py bench --model DIR --vllm VENV/bin/vllm --rate 16 --tokens 400 -- --stream-interval 8
    python benchmarks/front_end.py trace --model DIR --vllm VENV/bin/vllm --speedup 8
    python benchmarks/front_end.py soak --model DIR --vllm VENV/bin/vllm --seconds 3600

`cost` plays the front end's side of the protocol here, and measures the processor time of `kvarts engine`, in a
separate process, from its first token to its last, without handshake and imports.

The others start `kvarts mock --front-end vllm`. `bench` has `vllm bench serve` keep `--streams` requests in flight, or
send `--rate` requests per second, in twice `--rounds` rounds, and replays these requests on the virtual clock, from the
times at which the client sent them: the output pairs the TTFT and TPOT at the client with those of the replay. What
front end and client add to the median TTFT in the first half of the rounds, by the median, is the replay's `--frontend-
ms` in the other half, which is compared. The means of TTFT from the front end on, and of the engine's queue and
prefill, are vLLM's metrics. With `--speedup 0.1`, all but the engine has ten times as long; the output is in the
engine's time. Words after `--` are arguments of `vllm serve`. `trace` streams the first `--requests` requests of the
bundled conversation trace at their times, with the time of the engine `--speedup` times as fast, and compares hits,
preemptions and times of the engine with those of a replay of the requests that arrived. `soak` loads the front end and
kills one of the two sides, or one of vLLM's processes, at a random time, again and again for `--seconds`: each request
and each process must end, and no directory may be left. Prints JSON; `trace` and `soak` end with status 1 if something
differs or is left.
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
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from kvarts.cost.polynomial import LinearCost
from kvarts.doors.vllm_front.front_end import METADATA, free_port
from kvarts.doors.vllm_front.protocol import ADD, known_versions, protocol_of
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import load_trace

CLOCK_HZ = os.sysconf("SC_CLK_TCK")
START_S = 1200.0
PAGES = 16_384
BLOCK = 512
"""Tokens of a block of the bundled trace."""
HANG_S = 120.0
"""A request or a process that has not ended after so many seconds hangs."""


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_HZ


class Started:
    """`kvarts mock --front-end vllm` as a process; leave the context to end it.

    `vllm`: its script; `folder`: for logs and temporary files; `arguments`: of `vllm serve`.
    """

    def __init__(
        self, vllm: str, model: str, folder: Path, settings: Sequence[str] = (), arguments: Sequence[str] = ()
    ) -> None:
        self.port = free_port()
        self.log, self._front_log = folder / "kvarts.log", folder / "vllm.log"
        words = [sys.executable, "-m", "kvarts", "mock", "--front-end", "vllm", "--model", model, "--port",
                 str(self.port), "--set", f"vllm={vllm}", "--set", f"front_end_log={self._front_log}",
                 "--set", f"front_end_start={START_S}", *settings, "--", "--disable-uvicorn-access-log",
                 *arguments]  # fmt: skip
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1", "TMPDIR": str(folder)}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(words, stdout=output, stderr=output, env=environment)

    def wait_until_up(self) -> None:
        """Wait until it serves. Raise RuntimeError with its last lines if it does not."""
        deadline_s = time.monotonic() + START_S
        while f":{self.port}/v1" not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                logs = self.log.read_text() + self._front_log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the front end is not up: {logs}")
            time.sleep(0.2)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def front_pid(self) -> int | None:
        """The process of `vllm serve`, which leads a group of processes; None if there is none yet."""
        with suppress(OSError):
            for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
                if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    return int(pid)
        return None

    def call(self, path: str, body: Any = None, timeout_s: float = HANG_S) -> Any:
        """Return the answer to a request, decoded if it is JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, payload, {"content-type": "application/json"})
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def metric(self, name: str) -> float:
        """Return the sum of the samples of a metric."""
        values = re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", self.call("/metrics"), re.MULTILINE)
        return sum(map(float, values))

    def end(self) -> None:
        """End it by SIGTERM."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(HANG_S)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@contextmanager
def served(
    options: argparse.Namespace, settings: Sequence[str] = (), arguments: Sequence[str] = ()
) -> Iterator[tuple[Started, Path]]:
    """Yield a front end that is up, and a directory for files."""
    with (
        tempfile.TemporaryDirectory() as name,
        Started(options.vllm[0], options.model, Path(name), settings, arguments) as front,
    ):
        front.wait_until_up()
        yield front, Path(name)


# Cost -------------------------------------------------------------------------------------------------------


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Return the processor time per token of an engine with some streams."""
    context: zmq.Context[Any] = zmq.Context()
    sockets = [context.socket(kind) for kind in (zmq.ROUTER, zmq.ROUTER, zmq.PULL)]
    for socket in sockets:
        socket.bind("tcp://127.0.0.1:0")
    handshake, requests, outputs = sockets
    address, *pair = (socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in sockets)
    version = known_versions()[-1]
    words = [sys.executable, "-m", "kvarts", "engine", "--handshake", address, "--model", options.model, "--cost",
             f"linear:step_ms={options.step_ms}", "--pages", str(options.streams * (options.tokens // 16 + 40)),
             "--set", f"vllm_version={version}"]  # fmt: skip
    with subprocess.Popen(words) as engine:
        name, _ = handshake.recv_multipart()
        addresses = {"inputs": pair[:1], "outputs": pair[1:]}
        handshake.send_multipart((name, msgspec.msgpack.encode({"addresses": addresses})))
        requests.recv_multipart()
        handshake.recv_multipart()
        order = protocol_of(version)._request
        for stream in range(options.streams):
            given = {
                "request_id": f"cmpl-{stream:032x}", "prompt_token_ids": [stream + place for place in range(512)],
                "sampling_params": {"max_tokens": options.tokens, "ignore_eos": True}, "arrival_time": 0.0,
                "client_index": 0, "priority": 0, "resumable": False, "abort_immediately": False,
            }  # fmt: skip
            payload = msgspec.msgpack.encode([given.get(field) for field in order])
            requests.send_multipart((name, ADD, payload))
        num_ended = num_tokens = num_messages = 0
        begun_s = wall_s = 0.0
        while num_ended < options.streams:
            message = msgspec.msgpack.decode(outputs.recv())
            for output in message[1]:
                num_tokens += len(output[1])
                num_ended += len(output) > 5 and output[5] is not None
            num_messages += 1
            if num_messages == 20:  # all prompts are computed
                begun_s, wall_s, num_tokens = cpu_s(engine.pid), time.monotonic(), 0
        used_s, took_s = cpu_s(engine.pid) - begun_s, time.monotonic() - wall_s
        engine.send_signal(signal.SIGTERM)
        engine.wait()
    context.destroy(linger=0)
    return {
        "streams": options.streams,
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / took_s),
        "cpu_us_per_token": round(used_s / num_tokens * 1e6, 2),
    }


# Accuracy ---------------------------------------------------------------------------------------------------


def loaded_by_client(options: argparse.Namespace, front: Started, folder: Path, seed: int) -> dict[str, Any]:
    """Return what `vllm bench serve` measures with requests of `--prompt-tokens` tokens."""
    metadata = folder / "vllm-0.0.0+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(METADATA.format("0.0.0+cpu"))
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    result = folder / f"{seed}.json"
    client = [options.vllm[0], "bench", "serve", "--backend", "openai", "--base-url", front.url,
              "--model", options.model, "--dataset-name", "random", "--random-input-len",
              str(options.prompt_tokens), "--random-output-len", str(options.tokens), "--num-prompts",
              str(options.requests), "--ignore-eos",
              "--seed", str(seed), "--save-result", "--save-detailed", "--result-filename", str(result)]  # fmt: skip
    client += ["--request-rate", str(options.rate)] if options.rate else ["--max-concurrency", str(options.streams)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    done = subprocess.run(client, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the client has failed: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


LEGS = {"front_end": "time_to_first_token_seconds", "engine_queue": "request_queue_time_seconds",
        "engine_prefill": "request_prefill_time_seconds"}  # fmt: skip
"""Metrics of vLLM with the parts of TTFT: from the front end on, and within the engine."""


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Return the latencies that `vllm bench serve` measures, and those of a replay of the requests that it sent."""
    cost = LinearCost(step_ms=options.step_ms, chunk_token_ms=options.chunk_token_ms)
    config = ReplayConfig(num_pages=PAGES, max_num_seqs=256, max_num_batched_tokens=options.budget, cost=cost)
    settings = ["--cost", f"linear:step_ms={options.step_ms},chunk_token_ms={options.chunk_token_ms}", "--pages",
                str(PAGES), "--speedup", str(options.speedup)]  # fmt: skip
    limits = ["--max-model-len", "16384", "--max-num-batched-tokens", str(options.budget)]
    with served(options, settings, [*limits, *options.arguments]) as (front, folder):
        clients = [loaded_by_client(options, front, folder, number) for number in range(2 * options.rounds)]
        legs_ms = {name: 1000 * options.speedup * front.metric(f"{metric}_sum") / front.metric(f"{metric}_count")
                   for name, metric in LEGS.items()}  # fmt: skip
        measured = [latencies_of_client(client, options.speedup) for client in clients]
        sent = [sent_by_client(client, options.speedup, folder) for client in clients]
    first = zip(measured[: options.rounds], sent, strict=False)
    added_ms = [float(np.median(each["ttft"])) - replay(trace, config).summary["ttft_ms"]["p50"]
                for each, trace in first]  # fmt: skip
    frontend_ms = max(0.0, float(np.median(added_ms)))
    config = msgspec.structs.replace(config, frontend_ms=frontend_ms)
    rounds = [compared(each, replay(trace, config).summary) for each, trace in zip(measured, sent, strict=True)]
    rounds = rounds[options.rounds :]
    seen_ms = float(np.mean(np.concatenate([each["ttft"] for each in measured])))
    return {
        "completed": sum(client["completed"] for client in clients),
        "tokens_per_s": round(sum(client["output_throughput"] for client in clients) / len(clients)),
        "load_average": round(os.getloadavg()[0], 1),
        "frontend_ms": round(frontend_ms, 2),
        "added_ms": [round(each, 2) for each in added_ms],
        "mean_ttft_ms": {"client": round(seen_ms, 2)} | {name: round(each, 2) for name, each in legs_ms.items()},
        "rounds": rounds,
        "median_off_pct": {name: round(float(np.median([each[name]["off_pct"] for each in rounds])), 1)
                           for name in rounds[0]},
    }  # fmt: skip


def latencies_of_client(client: dict[str, Any], speedup: float) -> dict[str, Any]:
    """Return TTFT and TPOT of each request, as `vllm bench serve` measured them, in the engine's time."""
    rows = [(ttft_s, sum(itls_s), num_tokens) for ttft_s, itls_s, num_tokens in
            zip(client["ttfts"], client["itls"], client["output_lens"], strict=True)]  # fmt: skip
    ttft_s, decode_s, num_tokens = (np.array(column, float) for column in zip(*rows, strict=True))
    return {"ttft": 1000 * speedup * ttft_s, "tpot": 1000 * speedup * decode_s / (num_tokens - 1)}


def sent_by_client(client: dict[str, Any], speedup: float, folder: Path) -> Any:
    """Return the trace of the requests of `vllm bench serve`, at the times at which it sent them, in the engine's."""
    times_s = [speedup * at_s for at_s in client["start_times"]]
    path = folder / "sent.json"
    path.write_text(json.dumps(client | {"start_times": times_s}))
    return load_trace(path)


def compared(client: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """Return the medians of both, and how far those at the client are from those of the replay."""
    pairs = {name: (float(np.median(times_ms)), summary[f"{name}_ms"]["p50"]) for name, times_ms in client.items()}
    return {f"{name}_ms_p50": {"client": round(here, 2), "replay": round(there, 2),
                               "off_pct": round(100 * (here / there - 1), 1)}
            for name, (here, there) in pairs.items()}  # fmt: skip


# Equality ---------------------------------------------------------------------------------------------------


def trace(options: argparse.Namespace) -> dict[str, Any]:
    """Return counts and times of the front end's metrics, paired with those of a replay of what arrived."""
    rows = [json.loads(line) for line in conversation().read_text().splitlines()[: options.requests]]
    vocabulary = len(json.loads(Path(options.model, "tokenizer.json").read_text())["model"]["vocab"])
    cost = LinearCost(step_ms=options.step_ms, chunk_token_ms=options.chunk_token_ms)
    settings = ["--cost", f"linear:step_ms={options.step_ms},chunk_token_ms={options.chunk_token_ms}", "--pages",
                str(options.pages), "--speedup", str(options.speedup)]  # fmt: skip
    arguments = ["--max-model-len", "131072", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192",
                 "--enable-prompt-tokens-details", "--served-model-name", "traced"]  # fmt: skip
    with tempfile.TemporaryDirectory() as own:
        recorded = Path(own, "recorded.jsonl")
        with served(options, [*settings, "--record", str(recorded)], arguments) as (front, _):
            bodies = [body_of(row, vocabulary) for row in rows]
            began_s, began_cpu_s = time.monotonic(), cpu_s(front.process.pid)
            times_s = [row["timestamp"] / 1000 / options.speedup for row in rows]
            answers = asyncio.run(all_answers(front.port, bodies, times_s))
            took_s, used_s = time.monotonic() - began_s, cpu_s(front.process.pid) - began_cpu_s
            audit = front.call("/collective_rpc", {"method": "check"})
            metrics = {name: front.metric(name) for name in METRICS}
            front.end()
        config = ReplayConfig(num_pages=options.pages, max_num_seqs=256, max_num_batched_tokens=8192, cost=cost)
        report = replay(load_trace(recorded), config)
    pairs = pairs_of(metrics, report, options.speedup)
    predicted = {str(name): int(count) for name, count in
                 zip(report.requests["request_id"], report.requests["cached_tokens"], strict=True)}  # fmt: skip
    differing = [number for number, (_, cached) in enumerate(answers) if predicted.get(f"cmpl-row{number}-0") != cached]
    num_events = sum(events for events, _ in answers)
    return {
        "requests": len(rows),
        "seconds": round(took_s, 1),
        "tokens_per_s": round(report.summary["num_output_tokens"] / took_s),
        "events_per_s": round(num_events / took_s),
        "engine_cpu_us_per_token": round(used_s / report.summary["num_output_tokens"] * 1e6, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "audit": audit,
        **{name: {"front_end": here, "replay": there} for name, (here, there, _) in pairs.items()},
        "requests_with_other_hits": differing,
        "is_equal": not differing and all(is_equal for _, _, is_equal in pairs.values()),
    }


METRICS = ("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total",
           "generation_tokens_total", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
           "request_decode_time_seconds_sum")  # fmt: skip


def pairs_of(metrics: dict[str, float], report: Any, speedup: float) -> dict[str, tuple[float, float, bool]]:
    """Return metrics with the replay's value, and whether they are equal: counts exactly, times to a microsecond."""
    of, summary = report.requests, report.summary
    places = {name: np.asarray(of[f"{name}_ms"], float) for name in
              ("arrival", "first_admitted", "first_token", "last_token")}  # fmt: skip
    counts = {
        "prefix_cache_queries_total": summary["num_input_tokens"],
        "prefix_cache_hits_total": summary["num_cached_tokens"],
        "num_preemptions_total": summary["num_preemptions"],
        "prompt_tokens_total": summary["num_input_tokens"],
        "generation_tokens_total": summary["num_output_tokens"],
    }
    times_s = {
        f"request_{name}_time_seconds_sum": float((places[last] - places[first]).sum() / 1000)
        for name, first, last in (("queue", "arrival", "first_admitted"), ("prefill", "first_admitted", "first_token"),
                                  ("decode", "first_token", "last_token"))
    }  # fmt: skip
    pairs = {name: (metrics[name], float(count), metrics[name] == count) for name, count in counts.items()}
    for name, there_s in times_s.items():
        here_s = metrics[name] * speedup
        is_equal = abs(here_s - there_s) <= 1e-6 * speedup * summary["num_requests"]
        pairs[name] = (round(here_s, 6), round(there_s, 6), is_equal)
    return pairs


def conversation() -> Path:
    """Return the path of the bundled trace."""
    return Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))


def body_of(row: dict[str, Any], vocabulary: int) -> bytes:
    """Return the body of a request: each block of the trace is the same tokens wherever it occurs."""
    blocks = [np.random.default_rng(block).integers(vocabulary, size=BLOCK) for block in row["hash_ids"]]
    prompt = np.concatenate(blocks)[: row["input_length"]].tolist()
    given = {"model": "traced", "prompt": prompt, "max_tokens": row["output_length"], "ignore_eos": True,
             "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    return json.dumps(given).encode()


async def all_answers(port: int, bodies: Sequence[bytes], times_s: Sequence[float]) -> list[tuple[int, int]]:
    """Send each body at its time; return, per request, the events of its stream and the cached tokens."""
    began_s = time.monotonic()

    async def answer(number: int) -> tuple[int, int]:
        await asyncio.sleep(max(0.0, began_s + times_s[number] - time.monotonic()))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = bodies[number]
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: kvarts\r\nConnection: close\r\nX-Request-Id: row%d\r\n"
                     b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (number, len(body)))  # fmt: skip
        writer.write(body)
        text = (await reader.read()).decode()
        writer.close()
        usage = re.findall(r'"cached_tokens":(\d+)', text)
        assert usage, text[-500:]
        return text.count("data: ") - 2, int(usage[-1])  # without usage and [DONE]

    return list(await asyncio.gather(*map(answer, range(len(bodies)))))


# Kills ------------------------------------------------------------------------------------------------------

KILLS: list[tuple[str, int]] = [
    ("kvarts", signal.SIGKILL),
    ("vllm serve", signal.SIGKILL),
    ("kvarts", signal.SIGTERM),
    ("one of vLLM's processes", signal.SIGKILL),
    ("vllm serve", signal.SIGTERM),
    ("the engine", 0),
    ("kvarts, during its start", signal.SIGKILL),
    ("vllm serve, during its start", signal.SIGKILL),
    ("kvarts, during its start", signal.SIGTERM),
]
SHAPES: tuple[list[str], ...] = ([], ["--data-parallel-size", "2"], ["--api-server-count", "2"])
"""Arguments of `vllm serve`: one process, a coordinator and two ranks, two API servers."""


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Return what became of requests and processes over `--seconds` of kills."""
    chance = random.Random(options.seed)
    until_s = time.monotonic() + options.seconds
    rounds: list[dict[str, Any]] = []
    outcomes: Counter[str] = Counter()
    while time.monotonic() < until_s:
        cycle, place = divmod(len(rounds), len(KILLS))
        what, number = KILLS[place]
        shape = SHAPES[(cycle + place) % len(SHAPES)]
        script = options.vllm[len(rounds) % len(options.vllm)]
        try:
            rounds.append(killed(options.model, script, what, number, shape, chance, outcomes))
        except RuntimeError as error:  # it did not start
            rounds.append({"killed": what, "end_s": 0.0, "request_s": 0.0, "bad": [str(error)]})
        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    return {
        "seconds": options.seconds,
        "rounds": len(rounds),
        "rounds_by_kill": dict(Counter(each["killed"] for each in rounds)),
        "requests": dict(outcomes.most_common()),
        "longest_end_s": max(each["end_s"] for each in rounds),
        "longest_request_after_kill_s": max(each["request_s"] for each in rounds),
        "bad_rounds": [each for each in rounds if each["bad"]],
    }


def killed(
    model: str,
    script: str,
    what: str,
    number: int,
    shape: Sequence[str],
    chance: random.Random,
    outcomes: Counter[str],
) -> dict[str, Any]:
    """Start the front end `script`, load it, and send the signal `number` to `what`.

    Return what happened. `bad`: what hangs.
    """
    settings = ["--cost", "linear:step_ms=5", "--pages", "2048"]
    name = f"{what}, {signal.Signals(number).name}" if number else f"{what} fails"
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own)
        with Started(script, model, folder, settings, ["--max-model-len", "8192", *shape]) as front:
            users = Users(front.port, outcomes, chance.random())
            is_starting = "start" in what
            if is_starting:
                while front.front_pid is None and front.process.poll() is None:
                    time.sleep(0.1)
                time.sleep(chance.uniform(0.0, 15.0))
            else:
                front.wait_until_up()
                users.start(8)
                time.sleep(chance.uniform(1.0, 6.0))
            group = front.front_pid
            victim = {"kvarts": front.process.pid, "vllm serve": group}.get(what.partition(",")[0])
            if what.startswith("one of"):
                victim = chance.choice(members(group))
            version = (re.findall(r"kvarts: vllm (\S+) starts", front.log.read_text()) or [None])[0]
            killed_s = time.monotonic()
            if what == "the engine":
                with suppress(OSError, HTTPException):
                    front.call("/collective_rpc", {"method": "fail", "args": ["first 1: die"]})
            elif victim is not None:
                with suppress(ProcessLookupError):
                    os.kill(victim, number)
            goes_on = False
            try:
                front.process.wait(HANG_S / 2)
            except subprocess.TimeoutExpired:  # a helper of vLLM that does not matter may have been killed
                goes_on = is_starting or users.is_answered()
                if not goes_on:
                    bad.append("kvarts has not ended")
                front.end()
            end_s = time.monotonic() - killed_s
            bad += users.stop(killed_s)
        left = left_of(group)
        bad += [f"process {each} is left" for each in left]
        bad += [f"{each.name} is left" for each in folder.glob("kvarts-front-end-*")]
        if bad:
            bad.append(front.log.read_text()[-1500:])
    return {"killed": name, "vllm": version, "arguments": list(shape), "end_s": round(end_s, 1), "goes_on": goes_on,
            "request_s": round(users.longest_s, 1), "bad": bad}  # fmt: skip


class Users:
    """Clients that ask, read, or drop the answer, until `stop`."""

    def __init__(self, port: int, outcomes: Counter[str], seed: float) -> None:
        self._port = port
        self._outcomes = outcomes
        self._seed = seed
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ends: list[tuple[float, str]] = []
        self.longest_s = 0.0

    def start(self, num_users: int) -> None:
        """Let some users ask."""
        self._threads = [threading.Thread(target=self._use, args=(number,)) for number in range(num_users)]
        for thread in self._threads:
            thread.start()

    def _use(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        while not self._is_over.is_set():
            kind = chance.choice(["whole", "stream", "dropped"])
            outcome = f"{kind}: {self._ask(kind, chance)}"
            self._outcomes[outcome] += 1
            self._ends.append((time.monotonic(), outcome))
            if "Refused" in outcome:
                self._is_over.wait(0.2)

    def _ask(self, kind: str, chance: random.Random) -> str:
        body = {"prompt": "the people said " * chance.randint(1, 60), "max_tokens": chance.randint(1, 200),
                "ignore_eos": True, "stream": kind != "whole"}  # fmt: skip
        connection = HTTPConnection("127.0.0.1", self._port, timeout=HANG_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read(chance.randint(1, 400)) if kind == "dropped" else answer.read()
        except (OSError, HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()
        return f"{answer.status} with an error" if b'"error"' in text and answer.status == 200 else str(answer.status)

    def is_answered(self) -> bool:
        """Return whether a request is answered now."""
        return self._ask("whole", random.Random(0)) == "200"

    def stop(self, killed_s: float) -> list[str]:
        """End the users; return the requests that hang since the kill."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * HANG_S)
        late = [at_s - killed_s for at_s, outcome in self._ends if at_s > killed_s and "Refused" not in outcome]
        self.longest_s = max(late, default=0.0)
        hanging = [outcome for at_s, outcome in self._ends if at_s > killed_s and "Timeout" in outcome]
        return [*hanging, *("a user has not ended" for thread in self._threads if thread.is_alive())]


def members(group: int | None) -> list[int]:
    """Return the processes of a process group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                state, _, of_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(of_group) == group and state != "Z":
                    found.append(int(entry.name))
    return found


def left_of(group: int | None) -> list[int]:
    """Return the processes of a group that have not ended ten seconds after the end of its owner."""
    deadline_s = time.monotonic() + 10.0
    while (left := members(group)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def main() -> None:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "bench", "trace", "soak"])
    parser.add_argument("--model", required=True, help="a directory with config.json and tokenizer.json")
    parser.add_argument("--vllm", action="append", help="the script of vLLM; of soak, several take turns")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of each prompt, in bench")
    parser.add_argument("--budget", type=int, default=8192, help="most tokens of a step, in bench")
    parser.add_argument("--requests", type=int, help="of bench (256) or trace (1000)")
    parser.add_argument("--rounds", type=int, default=3, help="of bench: as many give the constant as use it")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second, of bench; 0: all at once")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--chunk-token-ms", type=float, default=0.0)
    parser.add_argument("--pages", type=int, default=PAGES)
    parser.add_argument("--speedup", type=float, help="of the engine: bench (1) or trace (8)")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    words = [*sys.argv[1:], "--"]
    place = words.index("--")
    options = parser.parse_args(words[:place])
    options.arguments = words[place + 1 : -1]
    options.vllm = options.vllm or ["vllm"]
    options.requests = options.requests or {"trace": 1000}.get(options.what, 256)
    options.speedup = options.speedup or {"trace": 8.0}.get(options.what, 1.0)
    found = {"cost": cost, "bench": bench, "trace": trace, "soak": soak}[options.what](options)
    print(json.dumps(found, indent=2))
    if found.get("bad_rounds") or not found.get("is_equal", True):
        sys.exit(1)


if __name__ == "__main__":
    main()
