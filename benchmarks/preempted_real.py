"""Preempted and idle work of a real model: computed again, or kept in host memory and loaded.

    python benchmarks/preempted_real.py [--rounds 3]

Needs kvarts[torch], gguf, and the model that `kvarts model get smollm2` downloads; it runs on this CPU. Two loads, each
in all modes in turn, once per round:

- preempted: requests whose KV needs about twice the pages of the device, so that running ones are preempted;
- idle: conversations of several turns, taken in turn, whose KV needs about three times the pages of the device.

Tokens must equal those of an engine with enough pages. Seconds and processor seconds are medians over rounds; `again`
are the tokens that are computed for a second time, of all that are computed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from random import Random
from time import perf_counter, process_time
from typing import Any

from kv_quality import model_path
from kvarts.core.config import EngineConfig
from kvarts.core.events import Event, StepDone
from kvarts.core.sampling import SamplingParams
from kvarts.core.tiers.config import OffloadConfig

PAGE_SIZE = 16
MODES: dict[str, Any] = {
    "computed again": None,
    "host memory, eager": OffloadConfig(host_pages=4096, policy="eager"),
    "host memory, lazy": OffloadConfig(host_pages=4096, policy="lazy"),
}


class Counts:
    """A reader that counts preemptions, and the tokens that steps compute."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.num_tokens = 0

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, StepDone):
                self.num_preemptions += len(event.preemptions)
                self.num_tokens += event.num_tokens


def preempted(llm: Any, args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the tokens of requests that all begin at once."""
    random = Random(7)
    prompts = [[random.randrange(100, 40_000) for _ in range(args.prompt)] for _ in range(args.requests)]
    params = [
        SamplingParams(max_tokens=random.randrange(args.output // 2, args.output), ignore_eos=True) for _ in prompts
    ]
    return [one.tokens for one in llm.generate(prompts, params)]


def idle(llm: Any, args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the tokens of conversations, the turns of which are taken in turn."""
    random = Random(8)
    params = SamplingParams(max_tokens=args.output // 4, ignore_eos=True)
    histories: list[list[int]] = [
        [random.randrange(100, 40_000) for _ in range(args.prompt)] for _ in range(args.requests)
    ]
    said = []
    for _ in range(args.turns):
        for history in histories:
            history.extend(random.randrange(100, 40_000) for _ in range(32))
            (one,) = llm.generate([history], params)
            history.extend(one.tokens)
            said.append(one.tokens)
    return said


def main() -> None:
    """Measure, and print a table for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--output", type=int, default=300)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--loads", nargs="+", choices=["preempted", "idle"], default=["preempted", "idle"])
    args = parser.parse_args()
    from kvarts.run.torch.llm import LLM

    enough = EngineConfig(num_pages=2048, page_size=PAGE_SIZE, max_num_batched_tokens=256, max_num_seqs=16)
    first = LLM(model_path(), config=enough)
    most = args.requests * (args.prompt + args.output) // PAGE_SIZE
    for name, load, num_pages in (("preempted", preempted, most // 2), ("idle", idle, most // 3)):
        if name not in args.loads:
            continue
        expected = load(first, args)
        config = EngineConfig(num_pages=num_pages, page_size=PAGE_SIZE, max_num_batched_tokens=256, max_num_seqs=16)
        rows: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in MODES}
        for _ in range(args.rounds):
            for mode, offload in MODES.items():
                counts = Counts()
                llm = LLM(first._model, first.tokenizer, config, offload=offload, readers=[counts])
                start, start_cpu = perf_counter(), process_time()
                same = load(llm, args) == expected
                took = perf_counter() - start, process_time() - start_cpu
                assert same, f"{name}, {mode}: tokens differ from those of an engine with enough pages"
                rows[mode].append((*took, counts.num_preemptions, counts.num_tokens, _loaded(llm)))
        print(f"{name}: {args.requests} sequences, {num_pages} pages; tokens equal in every mode")
        print(f"{'':22}{'s':>8}{'CPU s':>8}{'ratio':>8}{'preempted':>11}{'computed':>10}{'loaded':>9}")
        base = statistics.median(row[0] for row in rows["computed again"])
        for mode, measured in rows.items():
            took, cpu, num_preemptions, computed, loaded = map(statistics.median, zip(*measured, strict=True))
            print(
                f"{mode:22}{took:8.2f}{cpu:8.2f}{took / base:8.3f}"
                f"{num_preemptions:11.0f}{computed:10,.0f}{loaded:9,.0f}",
                flush=True,
            )


def _loaded(llm: Any) -> int:
    """Return the tokens that came back from host memory."""
    token_bytes = llm.host().token_bytes
    num_bytes = sum(totals.num_bytes["h2d"] for totals in llm.transfers)
    return int(num_bytes // token_bytes)


if __name__ == "__main__":
    main()
