"""Runs vllm-router, unchanged, with each of its policies in front of mocks, and prints the outcome of each policy.

    python benchmarks/serve_router.py --router /venvs/router/bin/vllm-router

Conversations of several turns go through the router, streamed and not, at the same time; each has an opening of its
own. Prints one JSON object per policy: requests answered, the share of prompt tokens that were cache hits, and the
requests of each worker. `--disaggregated` adds the router's mode with separate prefill and decode workers. `--fleet`
runs that mode, with several policies, in front of the workers of one `kvarts mock --fleet`, which send KV to each other
by `kv_transfer_params`, and then the same conversations through the fleet's own router.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

POLICIES = (
    "random",
    "round_robin",
    "cache_aware",
    "kv_aware",
    "power_of_two",
    "consistent_hash",
    "sticky_least_loaded",
)
FLEET_POLICIES = ("round_robin", "cache_aware", "power_of_two", "consistent_hash")
MODEL = "mock"
FLEET = """
pages = 4096
cost = "linear:step_ms=2,chunk_token_ms=0.02"

[transfer]
rate = "1GB/s"
token_bytes = 131072

[[pool]]
role = "prefill"
replicas = 2

[[pool]]
role = "decode"
replicas = 2
"""


def main() -> None:
    """Run every policy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--router", type=Path, required=True)
    parser.add_argument("--only", default="", help="policies with this in their name")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--disaggregated", action="store_true")
    parser.add_argument("--fleet", action="store_true")
    options = parser.parse_args()
    if options.fleet:
        for policy in ("", *FLEET_POLICIES):
            if options.only in policy:
                print(json.dumps(of_fleet(options, policy)), flush=True)
        return
    for policy in POLICIES:
        if options.only in policy:
            print(json.dumps(outcome(options, policy)), flush=True)
    if options.disaggregated:
        print(json.dumps(outcome(options, "round_robin", is_disaggregated=True)), flush=True)


def outcome(options: argparse.Namespace, policy: str, *, is_disaggregated: bool = False) -> dict[str, Any]:
    """Start workers and a router, send conversations, and return what became of them."""
    with ExitStack() as stack:
        urls, events = [], []
        for _ in range(2 if is_disaggregated else options.workers):
            events.append([f"tcp://127.0.0.1:{free_port()}" for _ in range(2)])
            command = [
                sys.executable, "-m", "kvarts", "mock", "--port", "0", "--served-model-name", MODEL, "--pages", "4096",
                "--cost", "linear:step_ms=2,chunk_token_ms=0.02", "--kv-events", events[-1][0],
                "--set", f"kv_events_replay={events[-1][1]}",
            ]  # fmt: skip
            worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            stack.callback(stop, worker)
            assert worker.stderr is not None
            urls.append(next(found[0] for line in worker.stderr if (found := re.search(r"http://[\d.:]+", line))))
        port = free_port()
        workers = ["--worker-urls", *urls]
        if is_disaggregated:
            workers = ["--vllm-pd-disaggregation", "--prefill", urls[0], "--decode", urls[1]]
        if policy == "kv_aware":
            workers += ["--kv-event-model", MODEL, "--kv-event-block-size", "16"]
            for url, (endpoint, replay) in zip(urls, events, strict=True):
                workers += ["--kv-event-source", f"{url}={endpoint}", "--kv-event-replay-source", f"{url}={replay}"]
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        ports = ["--port", str(port), "--prometheus-port", str(free_port())]
        command = [options.router, *workers, "--policy", policy, "--log-level", "warning", *ports]
        router = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(stop, router)
        url = f"http://127.0.0.1:{port}"
        result: dict[str, Any] = {"policy": policy + (", disaggregated" if is_disaggregated else "")}
        if not is_up(f"{url}/health", router):
            log.seek(0)
            return {**result, "error": "it did not start", "log": log.read().splitlines()[-4:]}
        with ThreadPoolExecutor(options.users) as pool:
            ends = list(pool.map(lambda user: converse(url, user, options.turns), range(options.users)))
        models = [model["id"] for model in json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=10))["data"]]
        hits, prompts, requests = zip(*map(counts, urls), strict=True)
        log.seek(0)
        warned = [line for line in log.read().splitlines() if "WARN" in line or "ERROR" in line]
        return {
            **result,
            "answered": sum(answered for answered, _ in ends),
            "of": options.users * options.turns,
            "errors": sorted({error for _, errors in ends for error in errors})[:3],
            "models": models,
            "hits": round(sum(hits) / max(1, sum(prompts)), 3),
            "requests": requests,
            "warnings": len(warned),
            "first warnings": [line[-200:] for line in warned[:2]],
        }


def of_fleet(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Return the outcome with a fleet's workers behind vllm-router; without a policy, behind the fleet's own router."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "fleet.toml").write_text(FLEET)
        command = [sys.executable, "-m", "kvarts", "mock", "--port", "0", "--served-model-name", MODEL, "--fleet"]
        fleet = subprocess.Popen([*command, str(folder / "fleet.toml")], stderr=subprocess.PIPE, text=True)
        stack.callback(stop, fleet)
        assert fleet.stderr is not None
        url, *urls = [re.findall(r"http://[\d.:]+", fleet.stderr.readline())[0] for _ in range(5)]
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        result: dict[str, Any] = {"policy": policy or "the fleet's own, round-robin"}
        if policy:
            port = free_port()
            workers = ["--prefill", urls[0], "--prefill", urls[1], "--decode", urls[2], "--decode", urls[3]]
            ports = ["--port", str(port), "--prometheus-port", str(free_port())]
            options_of = ["--vllm-pd-disaggregation", *workers, "--policy", policy, "--log-level", "warning", *ports]
            router = subprocess.Popen([options.router, *options_of], stdout=log, stderr=log)
            stack.callback(stop, router)
            url = f"http://127.0.0.1:{port}"
            if not is_up(f"{url}/health", router):
                log.seek(0)
                return {**result, "error": "it did not start", "log": log.read().splitlines()[-4:]}
        with ThreadPoolExecutor(options.users) as pool:
            ends = list(pool.map(lambda user: converse(url, user, options.turns), range(options.users)))
        hits, prompts, requests = zip(*map(counts, urls), strict=True)
        log.seek(0)
        warned = [line for line in log.read().splitlines() if "WARN" in line or "ERROR" in line]
        return {
            **result,
            "answered": sum(answered for answered, _ in ends),
            "of": options.users * options.turns,
            "errors": sorted({error for _, errors in ends for error in errors})[:3],
            "hits where prompts are computed": round(sum(hits[:2]) / max(1, sum(prompts[:2])), 3),
            "requests": requests,
            "tokens received": [
                metric(one, "vllm:prompt_tokens_by_source_total", "external_kv_transfer") for one in urls
            ],
            "pages in use at the end": [metric(one, "kvarts:pages", "used") for one in urls],
            "warnings": len(warned),
            "first warnings": [line[-200:] for line in warned[:2]],
        }


def metric(url: str, name: str, label: str) -> float:
    """Return the value of a metric with a label."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    return sum(map(float, re.findall(rf'^{name}\{{.*"{label}".*\}} (\S+)$', text, re.MULTILINE)))


def converse(url: str, user: int, turns: int) -> tuple[int, list[str]]:
    """Hold one conversation. Return the number of answered turns, and errors."""
    rng = random.Random(user)
    opening = f"I am user {user}. " + " ".join(f"fact {rng.randrange(10**6)}" for _ in range(120))
    messages = [{"role": "system", "content": opening}]
    answered, errors = 0, []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {turn}: {rng.randrange(10**9)}?"})
        is_stream = bool((user + turn) % 2)
        body = {"model": MODEL, "messages": messages, "max_tokens": 24, "ignore_eos": True, "stream": is_stream}
        headers = {"content-type": "application/json", "x-session-id": f"user-{user}"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        try:
            payload = urllib.request.urlopen(request, timeout=60).read()
            text = streamed(payload) if is_stream else json.loads(payload)["choices"][0]["message"]["content"]
            if len(text.split()) != 24:
                errors.append(f"has {len(text.split())} words: {payload[-200:]!r}")
            answered += 1
        except urllib.error.HTTPError as error:
            errors.append(f"{error.code}: {error.read()[:200]!r}")
            break
        except (OSError, ValueError, KeyError) as error:
            errors.append(repr(error))
            break
        messages.append({"role": "assistant", "content": text})
        time.sleep(0.2)
    return answered, errors


def streamed(payload: bytes) -> str:
    """Return the text of a stream."""
    events = [line[6:] for line in payload.decode().split("\n\n") if line.startswith("data: ")]
    if events.pop() != "[DONE]":
        raise ValueError("the stream has no end")
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def counts(url: str) -> tuple[float, float, float]:
    """Return hits and prompt tokens, and the number of requests, of a worker."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    names = ("vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total", "vllm:request_success_total")
    found = [sum(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE))) for name in names]
    return found[0], found[1], found[2]


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def is_up(url: str, process: subprocess.Popen[Any]) -> bool:
    """Wait for a server at most 60 s. Return whether it answers."""
    for _ in range(300):
        if process.poll() is not None:
            return False
        try:
            urllib.request.urlopen(url, timeout=5)
        except OSError:
            time.sleep(0.2)
        else:
            return True
    return False


def stop(process: subprocess.Popen[Any]) -> None:
    """End a process."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
