"""Drafts that take what a step has left, and drafts before prompts as in vLLM: which ends sooner?

    python benchmarks/draft_orders.py --workloads 150

Random requests with shared prefixes on small pools. A step takes 10 ms and 20 us per token; every decode drafts as many
tokens as it may, and each is right with the same probability, given that those before it are.
"""

from __future__ import annotations

import argparse
from collections import Counter
from random import Random
from typing import Any

import msgspec
import numpy as np

from kvarts.build import build_engine
from kvarts.config import EngineConfig
from kvarts.content import Content
from kvarts.request import Request
from kvarts.sched.plan import Batch, StepPlan, StepResult

STEP_NS, TOKEN_NS = 10_000_000, 20_000
WRONG = 99


class Ask(msgspec.Struct):
    """A request: when it arrives, its prompt, its output, and how many of the tokens drafted next are right."""

    arrival_ns: int
    prompt: list[int]
    output: list[int]
    num_right: list[int]


def draw(seed: int, rate: float) -> tuple[EngineConfig, int, list[Ask]]:
    """Return an engine, the most tokens of a draft, and requests. `rate`: the share of right tokens."""
    rng = Random(f"drafts {seed}")
    size, slots, seqs = rng.choice([4, 8, 16]), rng.choice([2, 4, 7]), rng.choice([2, 4, 8, 32])
    stems = [[rng.randrange(50) for _ in range(rng.randint(1, 24 * size))] for _ in range(5)]
    asks: list[Ask] = []
    arrival_ns = 0
    for _ in range(rng.randint(5, 60)):
        arrival_ns += rng.choice([0, 0, 0, 1, 4]) * STEP_NS
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(0, len(stem))] + [rng.randrange(50) for _ in range(rng.randint(1, 8 * size))]
        output = [rng.randrange(50) for _ in range(rng.randint(1, 80))]
        num_right = []
        for _ in output:
            count = 0
            while count < slots and rng.random() < rate:
                count += 1
            num_right.append(count)
        asks.append(Ask(arrival_ns, prompt[: 40 * size], output, num_right))
    most = max(-(-(len(ask.prompt) + len(ask.output)) // size) for ask in asks)
    config = EngineConfig(
        num_pages=most + rng.choice([1, 3, 8, 20, 60, 200]),
        page_size=size,
        max_num_batched_tokens=max(seqs * (1 + slots), rng.choice([32, 64, 128, 512])),
        max_num_seqs=seqs,
    )
    return config, slots, asks


class Sampler:
    """An executor and a drafter of known tokens, in virtual time."""

    needs_page_ids = True

    def __init__(self, config: EngineConfig, slots: int, asks: list[Ask]) -> None:
        self._config = config
        self._slots = slots
        self._asks = asks
        self._request_of: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the tokens of the requests."""
        tokens = np.zeros(self._config.max_num_seqs, np.uint64)
        accepted = []
        for chunk in plan.batch.chunks:
            self._request_of[chunk.row] = chunk.request_index
            if chunk.is_last:
                output = self._asks[chunk.request_index].output
                tokens[chunk.row] = output[chunk.num_known_tokens - chunk.num_prompt_tokens]
        if plan.decodes is not None:
            num_drafted: Counter[int] = Counter() if plan.drafts is None else Counter(plan.drafts.rows.tolist())
            for row, position in zip(plan.decodes.rows.tolist(), plan.decodes.positions.tolist(), strict=True):
                ask = self._asks[self._request_of[row]]
                place = position + 1 - len(ask.prompt)
                num_right = min(num_drafted[row], ask.num_right[place - 1])
                if num_right:
                    accepted.append((row, num_right))
                tokens[row] = ask.output[place + num_right]
        return StepResult(STEP_NS + TOKEN_NS * plan.batch.num_tokens, tokens, accepted=tuple(accepted))

    def draft(self, request: Request, num_most: int, batch: Batch) -> Any:
        """Return right tokens, then wrong ones."""
        ask = self._asks[request.index]
        place = request.content.num_known_tokens - len(ask.prompt)
        num_drafted = min(self._slots, num_most)
        num_right = min(num_drafted, ask.num_right[place - 1])
        return np.array([*ask.output[place : place + num_right], *[WRONG] * (num_drafted - num_right)], np.uint64)

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn nothing."""


def run(config: EngineConfig, slots: int, asks: list[Ask], *, is_first: bool) -> tuple[int, list[Request], Any]:
    """Return when the last request ended, the requests, and the totals of drafts."""
    sampler = Sampler(config, slots, asks)
    engine = build_engine(config, sampler, drafter=sampler, num_draft_slots=slots if is_first else 0)
    requests: list[Request] = []
    now_ns = 0
    while len(requests) < len(asks) or engine.has_work:
        while len(requests) < len(asks) and (asks[len(requests)].arrival_ns <= now_ns or not engine.has_work):
            ask = asks[len(requests)]
            now_ns = max(now_ns, ask.arrival_ns)
            content = Content.from_tokens(ask.prompt, page_size=config.page_size, owner=len(requests))
            requests.append(Request(len(requests), content, len(ask.prompt), len(ask.output), ask.arrival_ns))
            assert engine.submit(requests[-1], now_ns) is None
        engine.step(now_ns)
        now_ns = max(now_ns, engine.now_ns)
    assert engine.scheduler.drafts is not None
    return now_ns, requests, engine.scheduler.drafts.totals()


def main() -> None:
    """Print the totals of both orders, by the share of drafted tokens that are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=150)
    args = parser.parse_args()
    for rate in (0.3, 0.6, 0.9):
        sooner: Counter[str] = Counter()
        totals: dict[str, Counter[str]] = {"last": Counter(), "first": Counter()}
        for seed in range(args.workloads):
            config, slots, asks = draw(seed, rate)
            ends = {}
            for order, counts in totals.items():
                ends[order], requests, drafts = run(config, slots, asks, is_first=order == "first")
                counts["ms"] += round(ends[order] / 1e6)
                counts["requests"] += len(requests)
                counts["TTFT ms"] += round(sum(each.first_token_ns - each.arrival_ns for each in requests) / 1e6)
                counts["preemptions"] += sum(each.num_preemptions for each in requests)
                counts["accepted"] += drafts.num_accepted_tokens
                counts["drafted"] += drafts.num_drafted_tokens
            difference = ends["first"] - ends["last"]
            sooner["last" if difference > 0 else "first" if difference else "neither"] += 1
        print(f"{rate:.0%} right: {dict(sooner)} sooner", flush=True)
        for order, counts in totals.items():
            said = ", ".join(f"{count:,} {name}" for name, count in counts.items())
            print(f"  {order:<6}{said}", flush=True)


if __name__ == "__main__":
    main()
