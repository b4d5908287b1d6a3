"""Agentic runs that others published, predicted: hits, requests per hour, TTFT and ITL, with nothing fitted to them.

    python benchmarks/agentx.py [--runs NAME ...] [--corpus TRACES] [--seconds 3600] [--seed 1] [--sessions 150]

The runs are AgentX' (InferenceX, SemiAnalysis) and their repetitions in ai-dynamo/aisimulate (docs/experiments,
Apache-2.0; figures only), of August and September 2026. AIPerf replayed the 393 sessions of coding agents of the data
set cc-traces-weka-062126 with a fixed number of lanes for an hour. Without it, sessions are made from a seed, after its
statistics as AIPerf's log and public repositories state them; `--corpus` takes others, in any form of traces.

Each run is replayed as AIPerf runs it (kvarts.sim.traffic.agentic_replay), with the engine's options as published.
Options that kvarts lacks are named in RUNS. Printed is a table in Markdown, of predicted and published values. Lengths
of what was sent are in it: they are no answer of the engine, and where they differ, so did the sessions. `--seconds`:
of a replay; requests are stated per hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvarts import Trace, TraceRequest, load_trace
from kvarts.cli.replaying import all_sections
from kvarts.sim.config import make_config
from kvarts.sim.replay import replay_one
from kvarts.sim.traffic.agentic_replay import AgenticReplay
from kvarts.sim.traffic.trace_request import After

NS_PER_S = 1_000_000_000
BLOCK = 64
TURNS = (65, 330)
"""Of the main agent per session: median and 90th percentile, as of all pairs here."""
OUTPUT, OUTPUT_OF_AGENTS = (616, 3_300), (303, 1_620)
GAPS_S = ((0.0, 0.1), (0.5, 4.9), (0.9, 131.5), (0.955, 300.0), (0.986, 1_800.0), (0.99, 3_257.0), (1.0, 86_400.0))
"""Quantiles of the time from an answer to the next request."""
NEW = ((0.0, 64.0), (0.5, 1_664.0), (0.9, 5_500.0), (0.99, 46_722.0), (1.0, 100_000.0))
"""Quantiles of the tokens that a turn adds; the 90th percentile is the one that gives the stated mean of 3,792."""
SHARE_WITH_AGENTS = 0.445
GROUPS, GROUP_REQUESTS, CHAINS_PER_GROUP = (4, 22), (16, 53), 4.7
"""Sub-agents of a session that has any, their requests, and how many sequences of these run at once."""
PROMPT_OF_AGENTS = (64_000, 196_326)
LONGEST_GAP_OF_AGENTS_S = 60.0
"""Assumed: no statistic of it is published."""
FIRST_PROMPT = (20_000, 55_000)
LONGEST, SHORT_CONTEXT, SHARE_SHORT = 980_000, 170_000, 0.3
"""Contexts at which a session begins again with a summary, and the share of sessions with the shorter one."""


def log_normal(rng: np.random.Generator, of: tuple[float, float], most: float = np.inf) -> float:
    """Draw from the log-normal distribution with this median and 90th percentile."""
    return float(min(most, of[0] * np.exp(rng.normal() * np.log(of[1] / of[0]) / 1.2816)))


def quantile(rng: np.random.Generator, of: Sequence[tuple[float, float]]) -> float:
    """Draw from a distribution of which quantiles are known; between them, logarithms are linear."""
    shares, values = zip(*of, strict=True)
    return float(np.exp(np.interp(rng.random(), shares, np.log(values))))


class Made:
    """Makes sessions after the statistics of the corpus. Ids of prompts are those of blocks of BLOCK tokens."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._next_id = 0
        self._requests: list[TraceRequest] = []

    def corpus(self, num_sessions: int) -> Trace:
        """Return so many sessions, which all begin at 0."""
        for number in range(num_sessions):
            self._session(f"made-{number:04}")
        self._requests.sort(key=lambda request: request.arrival_ns)
        return Trace(self._requests, unit_tokens=BLOCK, name="corpus made from its statistics")

    def _session(self, name: str) -> None:
        rng = self._rng
        turns = max(1, round(log_normal(rng, TURNS, 4_000)))
        spawns: dict[int, int] = {}
        if rng.random() < SHARE_WITH_AGENTS:
            left = max(1, round(log_normal(rng, GROUPS, 60)))
            while left:
                burst = min(left, 1 + rng.poisson(1.5))
                turn = int(rng.integers(turns))
                spawns[turn] = spawns.get(turn, 0) + burst
                left -= burst
        longest = SHORT_CONTEXT if rng.random() < SHARE_SHORT else LONGEST
        time_ns = 0
        before: int | None = None
        joins: tuple[int, ...] = ()
        system = self._ids(round(log_normal(rng, FIRST_PROMPT, 200_000)) // BLOCK)
        self._of_agents = self._ids(LONGEST // BLOCK)[0]
        prompt = system
        for turn in range(turns):
            delay_ns = 0 if before is None else round(quantile(rng, GAPS_S) * NS_PER_S)
            time_ns += delay_ns
            waits = () if before is None else (After(before, delay_ns), *(After(row, delay_ns) for row in joins))
            if sum(map(len, prompt)) * BLOCK > longest:
                prompt = system
            before, num_output = self._turn(name, prompt, time_ns, waits)
            time_ns += self._api_ns(num_output)
            joins = ()
            if turn in spawns:
                ends = [self._group(name, f"{turn}-{each}", system, before, time_ns) for each in range(spawns[turn])]
                joins = tuple(row for rows, _ in ends for row in rows)
                time_ns = max(time_ns, *(end_ns for _, end_ns in ends))
            prompt = (*prompt, *self._ids(self._num_new()))

    def _group(
        self, name: str, number: str, system: tuple[range, ...], spawned_by: int, begin_ns: int
    ) -> tuple[list[int], int]:
        """Add the chains of a sub-agent, which run at once; return the last requests of each, and the last end."""
        rng = self._rng
        total = max(1, round(log_normal(rng, GROUP_REQUESTS, 400)))
        chains = min(total, 1 + rng.poisson(CHAINS_PER_GROUP - 1))
        last_rows, last_ns = [], begin_ns
        for chain in range(chains):
            count = total // chains + (chain < total % chains)
            time_ns, before = begin_ns, spawned_by
            goal = log_normal(rng, PROMPT_OF_AGENTS, LONGEST) / BLOCK
            new = [self._num_new() for _ in range(count)]
            first = max(1, round(goal - sum(new) / 2))
            prompt = (self._of_agents[:first], *self._ids(self._num_new()))
            for turn in range(count):
                delay_ns = 0 if not turn else round(min(LONGEST_GAP_OF_AGENTS_S, quantile(rng, GAPS_S)) * NS_PER_S)
                time_ns += delay_ns
                waits = (After(before, delay_ns),)
                session = f"{name}/{number}-{chain}"
                before, num_output = self._turn(session, prompt, time_ns, waits, OUTPUT_OF_AGENTS)
                time_ns += self._api_ns(num_output)
                prompt = (*prompt, *self._ids(new[turn]))
            last_rows.append(before)
            last_ns = max(last_ns, time_ns)
        return last_rows, last_ns

    def _turn(
        self,
        session: str,
        prompt: tuple[range, ...],
        time_ns: int,
        waits: tuple[After, ...],
        output: tuple[int, int] = OUTPUT,
    ) -> tuple[int, int]:
        """Add a request; return its row and its output tokens."""
        row = len(self._requests)
        num_output = max(1, round(log_normal(self._rng, output, 60_000)))
        num_tokens = sum(map(len, prompt)) * BLOCK
        self._requests.append(
            TraceRequest(
                row,
                time_ns,
                prompt,
                num_tokens,
                num_output,
                session_id=session,
                delay_ns=0 if waits else None,
                after=waits,
            )
        )
        return row, num_output

    def _num_new(self) -> int:
        """Return the blocks that a turn adds to its prompt."""
        return max(1, round(quantile(self._rng, NEW) / BLOCK))

    def _api_ns(self, num_output: int) -> int:
        """Return how long the recorded server took: some 2 s, and 70 tokens per second."""
        return round((2.0 + num_output / 70.0) * NS_PER_S)

    def _ids(self, num: int) -> tuple[range, ...]:
        first, self._next_id = self._next_id, self._next_id + num
        return (range(first, self._next_id),)


class Run(msgspec.Struct, frozen=True):
    """A published run. `options` are those of the engine; `values` what was published, by the names of NAMES."""

    lanes: int
    options: dict[str, Any]
    values: dict[str, str]


NAMES = (
    "requests/h",
    "hits %",
    "TTFT mean",
    "TTFT p50",
    "TTFT p90",
    "ITL mean",
    "ITL p50",
    "ITL p90",
    "input",
    "output",
)
DSV4 = {
    "model": "deepseek-ai/DeepSeek-V4-Pro",
    "data_parallel": 8,
    "expert_parallel": 8,
    "max_batched_tokens": 8192,
    "kv_dtype": "fp8",
    "page_size": 256,
    "router": "session",
    "speculative_tokens": 3,
    "acceptance": "0.689,0.475,0.327",
}
RUNS = {
    # vLLM 0.28. EAGLE3 with a mean of 2.78 accepted tokens. Answers in pieces of 20 tokens: not modelled.
    "MiniMax-M3, 4 B200, vLLM, no host memory": Run(
        15,
        {
            "model": "nvidia/MiniMax-M3-NVFP4",
            "device": "b200-180gb",
            "tensor_parallel": 4,
            "max_batched_tokens": 16384,
            "kv_dtype": "fp8",
            "engine": "vllm",
            "page_size": 128,
            "speculative_tokens": 3,
            "acceptance": "0.76,0.578,0.439",
        },
        {
            "requests/h": "2,467; 2,491; 2,498", "hits %": "93.8", "TTFT mean": "737; 787; 603",
            "TTFT p50": "468; 402; 416", "TTFT p90": "1,029; 1,005; 986", "ITL mean": "4.8; 4.2; 4.3",
            "ITL p50": "4.2; 4.0; 4.0", "ITL p90": "6.0; 5.6; 5.7", "input": "127,284", "output": "978",
        },
    ),
    # SGLang 0.5.18. EAGLE with a mean of 2.99 accepted tokens. First published with host memory, then twice without.
    "GLM-5.2, 8 B200, SGLang, no host memory": Run(
        4,
        {
            "model": "nvidia/GLM-5.2-NVFP4",
            "device": "b200-180gb",
            "tensor_parallel": 8,
            "max_batched_tokens": 8192,
            "kv_dtype": "fp8",
            "engine": "sglang",
            "page_size": 64,
            "memory_fraction": 0.83,
            "max_seqs": 8,
            "speculative_tokens": 3,
            "acceptance": "0.808,0.653,0.528",
        },
        {
            "requests/h": "608; 638; 635", "hits %": "98.2; 97.7", "TTFT p50": "389; 192; 202",
            "TTFT p90": "1,328; 690; 668", "ITL p50": "2.8; 2.9", "ITL p90": "3.9; 3.8; 3.7",
            "input": "183,323; 188,334", "output": "1,304; 1,296",
        },
    ),
    # SGLang of September 2026; here with vLLM's scheduler, since ranks in lock step do not go with SGLang's.
    "DeepSeek-V4-Pro, 8 B300, SGLang, no host memory": Run(
        32,
        {**DSV4, "device": "b300", "memory_fraction": 0.93, "max_seqs": 8, "kv_groups": "tails"},
        {
            "requests/h": "3,410; 3,423; 3,399", "hits %": "95.9; 96.9; 96.7", "TTFT p50": "1,836; 1,399; 1,429",
            "TTFT p90": "7,727; 3,380; 3,468", "ITL p90": "19.5; 23.7; 23.6", "input": "148,996", "output": "988",
        },
    ),
    # vLLM 0.28. Prompts in every eighth step only: not modelled for ranks in lock step.
    "DeepSeek-V4-Pro, 8 B200, vLLM, 1 TiB of host memory": Run(
        64,
        {
            **DSV4,
            "device": "b200-180gb",
            "max_seqs": 16,
            "prefix_cache_retention_interval": "32768",
            "long_prefill_token_threshold": 512,
            "offload": {"host_memory": "128GiB"},
        },
        {
            "requests/h": "6,608; 6,769; 6,756", "hits %": "94.1", "TTFT mean": "4,718; 4,696; 4,701",
            "TTFT p50": "1,982; 2,118; 2,108", "TTFT p90": "7,703; 8,075; 7,788", "ITL mean": "21.0; 19.8; 19.8",
            "ITL p50": "20.9; 19.3; 19.4", "ITL p90": "23.3; 22.0; 22.0", "input": "126,019", "output": "984",
        },
    ),
}  # fmt: skip
"""Published values: AgentX', then those of the repetitions, where they are stated. Times in milliseconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", default=list(RUNS), metavar="NAME", help="the beginnings of their names")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=150)
    arguments = parser.parse_args()
    made = arguments.corpus is None
    trace = Made(arguments.seed).corpus(arguments.sessions) if made else load_trace(arguments.corpus)
    print(f"{trace.name}: {len(trace.requests or ()):,} requests\n")
    for name, run in RUNS.items():
        if any(name.startswith(begin) for begin in arguments.runs):
            load = AgenticReplay(
                concurrency=run.lanes,
                trajectory_start_min_ratio=0.25,
                trajectory_start_max_ratio=0.75,
                warmup_requests_per_lane=10,
                trace_idle_gap_cap_seconds=300.0,
                benchmark_duration=arguments.seconds,
                random_seed=42,
            )
            print_run(name, run, predicted(trace, run, load, arguments.seconds))


def predicted(trace: Trace, run: Run, load: AgenticReplay, seconds: float) -> dict[str, float]:
    """Return the predictions of a run, by the names of NAMES."""
    report = replay_one(load.of(trace), make_config(run.options, sections=all_sections()))
    summary, columns = report.summary, report.request_columns
    ttft, itl = summary["ttft_ms"], summary["tpot_ms"]
    return {
        "requests/h": summary["num_completed"] * 3600.0 / seconds,
        "hits %": 100 * sum(summary["prefix_hit_ratio_by_tier"].values()),
        **{f"TTFT {name}": ttft[name] for name in ("mean", "p50", "p90")},
        **{f"ITL {name}": itl[name] for name in ("mean", "p50", "p90")},
        "input": float(np.mean(columns["input_tokens"])),
        "output": float(np.mean(columns["output_tokens"])),
    }


def print_run(name: str, run: Run, values: dict[str, float]) -> None:
    """Print a table of predicted and published values, and the error against the first published one."""
    print(f"| {name}, {run.lanes} lanes | predicted | published | |")
    print("|---|---:|---:|---:|")
    for each in NAMES:
        if each in run.values:
            first = float(run.values[each].partition(";")[0].replace(",", ""))
            error = values[each] - first if each == "hits %" else 100 * (values[each] / first - 1)
            digits = 1 if each.startswith(("hits", "ITL")) else 0
            unit = " points" if each == "hits %" else " %"
            print(f"| {each} | {values[each]:,.{digits}f} | {run.values[each]} | {error:+.1f}{unit} |")
    print(flush=True)


if __name__ == "__main__":
    main()
