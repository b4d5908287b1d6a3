"""How long reading and replaying plays of agents takes: AgentX's form, with sub-agents that are forked and joined.

    python benchmarks/agent_plays.py [--requests 4265] [--rounds 3] [--lanes 16] [--file PLAYS]
    python benchmarks/agent_plays.py --sessions TRACES --requests 4473 [--rounds 3] [--builds SRC ...]

Plays are made from a seed, after the statistics that kv-cache-tester publishes of its 739 sessions: prompts of tens of
thousands of tokens that grow, log-normal answers, think times of 10 s by the median; answers are as long as the 4.5
million tokens of 4,265 requests ask for. A fifth of the requests start up to four sub-agents. Printed are the plays,
and the processor time of reading them and of replaying them: the median of `--rounds`, interpreted or compiled,
whichever is installed.

`--sessions`: whole processes of `kvarts replay` instead, of recorded sessions: in the order of their names, those of
TRACES (`traces` of kv-cache-tester) whose prompts have at most 111,000 tokens on average, until there are so many
requests: 398 million prompt tokens in 4,473 requests of 76 sessions. `--builds`: sources of other versions
and builds, such as `DIR/src` of `scripts/compiled_build.py --keep DIR`; they take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import kvarts.sim.traffic.source
from kvarts import ReplayConfig, replay
from kvarts.sim.traffic.formats import load_trace
from processes import Cost, median_of, run

ROOT = Path(__file__).resolve().parents[1]
MOST_MEAN_TOKENS = 111_000
BLOCK = 64
REQUESTS_PER_PLAY = 80
OUTPUT_TOKENS = 4_500_000 / 4_265


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4_265)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lanes", type=int, default=16, help="plays that are open at a time")
    parser.add_argument("--file", type=Path, help="read these plays instead of making some")
    parser.add_argument("--sessions", type=Path, metavar="TRACES", help="replay recorded sessions instead")
    parser.add_argument("--builds", type=Path, nargs="+", default=[ROOT / "src"], metavar="SRC")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.sessions is not None:
            taken = taken_sessions(arguments.sessions, Path(folder) / "sessions", arguments.requests)
            processes(taken, arguments.rounds, arguments.builds)
            return
        path = arguments.file or Path(folder) / "plays.jsonl"
        if arguments.file is None:
            path.write_bytes(b"".join(msgspec.json.encode(play) + b"\n" for play in made(arguments.requests)))
        measure(path, arguments.rounds, arguments.lanes)


def taken_sessions(directory: Path, out: Path, most_requests: int) -> Path:
    """Write sessions with so many requests to `out`; the last one ends where they are enough."""
    out.mkdir()
    num_requests = num_tokens = 0
    for path in sorted(directory.glob("*.json")):
        session = json.loads(path.read_bytes())
        parts = [(entry, entry.get("requests", [entry])) for entry in session["requests"]]
        tokens = [request["in"] for _, requests in parts for request in requests]
        if not tokens or sum(tokens) > MOST_MEAN_TOKENS * len(tokens):
            continue
        session["requests"] = []
        for entry, requests in parts:
            if num_requests + len(requests) > most_requests:
                break
            session["requests"].append(entry)
            num_requests += len(requests)
            num_tokens += sum(request["in"] for request in requests)
        if session["requests"]:
            (out / path.name).write_text(json.dumps(session, separators=(",", ":")))
    print(f"{num_requests:,} requests, {num_tokens:,} prompt tokens, {len(list(out.iterdir())):,} sessions", flush=True)
    return out


def processes(sessions: Path, rounds: int, builds: list[Path]) -> None:
    """Replay in whole processes, the builds in turns, and print their times and memory."""
    costs: dict[tuple[str, Path], list[Cost]] = {}
    for _ in range(rounds):
        for what, options in (
            ("pages of 64", ["--pages", "200000", "--page-size", "64"]),
            ("pages of 16", ["--pages", "800000", "--page-size", "16"]),
            ("16 sessions at a time", ["--pages", "100000", "--page-size", "64", "--concurrency", "16"]),
        ):
            for build in builds:
                os.environ["PYTHONPATH"] = str(build.resolve())
                command = [sys.executable, "-m", "kvarts", "replay", str(sessions), *options, "--json"]
                costs.setdefault((what, build), []).append(run(command))
    for (what, build), found in costs.items():
        cost = median_of(found)
        print(
            f"{what}, {build}: {cost.cpu_seconds:.2f} s of processor time, least "
            f"{min(each.cpu_seconds for each in found):.2f}, {cost.seconds:.2f} s, {cost.mebibytes:.0f} MiB"
        )


def measure(path: Path, rounds: int, lanes: int) -> None:
    trace, read_s = timed(lambda: load_trace(path), rounds)
    requests = list(trace)
    print(
        f"{len(requests):,} requests, {sum(r.num_prompt_tokens for r in requests):,} prompt tokens, "
        f"{sum(r.num_output_tokens for r in requests):,} output tokens; "
        f"{sum(bool(r.after) for r in requests):,} forks and joins"
    )
    build = "compiled" if str(kvarts.sim.traffic.source.__file__).endswith(".so") else "interpreted"
    print(f"{build}: read in {read_s:.2f} s")
    for name, config in (
        ("an endless cache", ReplayConfig(num_pages=20_000_000, page_size=BLOCK)),
        (f"{lanes} plays at a time", ReplayConfig(num_pages=100_000, page_size=BLOCK, concurrency=lanes)),
    ):
        report, replay_s = timed(lambda config=config: replay(trace, config), rounds)  # type: ignore[misc]
        summary = report.summary
        print(
            f"{build}: replayed in {replay_s:.2f} s, {name}: {summary['num_steps']:,} steps, hits "
            f"{summary['prefix_hit_ratio']:.1%}, {summary['duration_ms'] / 3.6e6:.1f} h of virtual time"
        )


def timed(what: Callable[[], Any], rounds: int) -> tuple[Any, float]:
    """Return the last result, and the median of processor times in seconds."""
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        result = what()
        times.append(time.process_time() - begin)
    return result, statistics.median(times)


def made(num_requests: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return plays in AgentX's form with so many requests in all."""
    rng = np.random.Generator(np.random.PCG64(seed))
    plays: list[dict[str, Any]] = []
    while num_requests > 0:
        count = min(num_requests, max(3, int(rng.lognormal(np.log(48), 1.0))), 4 * REQUESTS_PER_PLAY)
        plays.append(play(f"play-{len(plays)}", count, rng))
        num_requests -= count
    return plays


def play(name: str, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return a play of `count` requests, those of its sub-agents included."""
    main = _Chain(rng, min(int(rng.lognormal(np.log(40_000), 1.0)), 300_000), first_id=1)
    requests: list[dict[str, Any]] = []
    now_s, agents = 0.0, 0
    while count > 0:
        requests.append(main.turn(now_s))
        count -= 1
        end_s = now_s + requests[-1]["api_time"]
        now_s = end_s + float(rng.lognormal(np.log(10.0), 1.0))
        if count > 8 and rng.random() < 0.2:
            for _ in range(int(rng.integers(1, 5))):
                size = min(int(rng.integers(1, 8)), count - 1)
                if size < 1:
                    break
                agents += 1
                begin_s = end_s + float(rng.uniform(0.1, 2.0))
                child = _Chain(rng, int(rng.lognormal(np.log(12_000), 0.5)), first_id=agents * 1_000_000)
                turns, at_s = [], begin_s
                for _ in range(size):
                    turns.append(child.turn(at_s))
                    at_s += turns[-1]["api_time"] + float(rng.lognormal(np.log(3.0), 0.7))
                count -= size
                requests.append({
                    "t": begin_s, "type": "subagent", "agent_id": f"agent_{agents:03}", "subagent_type": "Explore",
                    "duration_ms": int((at_s - begin_s) * 1e3), "status": "completed", "models": ["m"],
                    "requests": turns,
                })  # fmt: skip
                now_s = max(now_s, at_s + 1.0)
    return {"id": name, "models": ["m"], "block_size": BLOCK, "hash_id_scope": "local", "requests": requests}


class _Chain:
    """A conversation that grows by its answers and by what tools and users add."""

    def __init__(self, rng: np.random.Generator, num_tokens: int, *, first_id: int) -> None:
        self._rng = rng
        self._num_tokens = max(1_000, num_tokens)
        self._first_id = first_id

    def turn(self, now_s: float) -> dict[str, Any]:
        num_prompt = self._num_tokens
        num_output = max(1, int(self._rng.lognormal(np.log(OUTPUT_TOKENS) - 0.5, 1.0)))
        self._num_tokens += num_output + int(self._rng.lognormal(np.log(800), 1.0))
        ids = list(range(self._first_id, self._first_id + num_prompt // BLOCK))
        api_s = 1.0 + num_output * 0.012
        return {"t": now_s, "type": "s", "model": "m", "in": num_prompt, "out": num_output, "hash_ids": ids,
                "api_time": api_s, "think_time": 0.0}  # fmt: skip


if __name__ == "__main__":
    main()
