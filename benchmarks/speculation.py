"""Decoding with and without speculation by n-grams: random weights in the shape of Qwen3-0.6B, bfloat16, on a CPU.

    python benchmarks/speculation.py

Needs kvarts[torch]. Two engines share one model in one process, and take turns: a round asks the one, then the other,
and the next round the other first. What is guessed in a round depends on what was right in those before. Tokens a
second from where all sequences decode until they have made as many tokens as `--tokens` says, on average; medians of
rounds. Ratios are medians of the ratios within a round.

`repeats`: greedy, and the prompt is a phrase over and over, which a model with random weights goes on with in loops of
its own. `varies`: drawn at temperature 1, which never says the same twice with such weights. `misled`: greedy, with
guesses that are found in every step and are never right: the worst that a text can do.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any, NamedTuple
from unittest.mock import patch

from msgspec.structs import replace

from decode_speed import write_model

VOCABULARY = 150_000


class Text(NamedTuple):
    """Prompts of `length` tokens, how they go on, and whether guesses are found where there are none."""

    name: str
    phrase: int
    temperature: float
    is_misled: bool = False

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        random = Random(seed)
        phrases = [[random.randrange(VOCABULARY) for _ in range(self.phrase or length)] for _ in range(count)]
        return [(phrase * (length // len(phrase) + 1))[:length] for phrase in phrases]


TEXTS = (Text("repeats", 16, 0.0), Text("varies", 0, 1.0), Text("misled", 0, 0.0, is_misled=True))


def never_right(tokens: Any, least: int, most: int) -> tuple[int, int]:
    """A place in the prompt, which is what no model with random weights goes on with."""
    return int(tokens[-1]) % (len(tokens) - 1) + 1, most


class Measured(NamedTuple):
    """`guessed` and `right`: tokens, of all sequences."""

    rate: float
    tokens_per_step: float
    guessed: int
    right: int


def measure(llm: Any, text: Text, prompts: list[list[int]], num_tokens: int, clock: Callable[[], float]) -> Measured:
    """Let all sequences decode, make `num_tokens` tokens of each on average, and end them."""
    from kvarts.core.sampling import SamplingParams

    count = len(prompts)
    params = SamplingParams(max_tokens=4 * num_tokens, temperature=text.temperature, ignore_eos=True)
    indices = [llm.submit(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(prompts)]
    generations = [llm.generation(index) for index in indices]
    while any(not generation.tokens for generation in generations):
        llm.step()
    before = (0, 0) if llm.drafts is None else (llm.drafts.num_drafted_tokens, llm.drafts.num_accepted_tokens)
    first = sum(len(generation.tokens) for generation in generations)
    num_steps = made = 0
    start = clock()
    # None ends before all have their tokens, on average: no sequence is alone in the end.
    while made < num_tokens * count:
        llm.step()
        num_steps += 1
        made = sum(len(generation.tokens) for generation in generations) - first
    taken = clock() - start
    after = (0, 0) if llm.drafts is None else (llm.drafts.num_drafted_tokens, llm.drafts.num_accepted_tokens)
    for index in indices:
        llm.cancel(index)
    return Measured(made / taken, made / num_steps / count, after[0] - before[0], after[1] - before[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="Of each sequence.")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--texts", nargs="+", default=[text.name for text in TEXTS])
    parser.add_argument("--speculative-config", default="ngram")
    parser.add_argument("--dtype", default="bfloat16", help="float32 for CPUs without bfloat16. [bfloat16]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="Of this process, instead of the time that passes: for "
                        "a machine with other work, with --threads 1.")  # fmt: skip
    parser.add_argument("--model-dir", type=Path, help="Where the model is kept from run to run. [a temporary one]")
    args = parser.parse_args()

    import torch

    from kvarts.core.config import EngineConfig
    from kvarts.run.torch.llm import LLM
    from kvarts.run.torch.loading import load_model

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.model_dir or Path(temporary)
        if not (directory / "config.json").exists():
            write_model(directory)
        model = load_model(directory, dtype=args.dtype)
    most = max(args.sequences)
    pages = most * -(-(args.prompt + 4 * args.tokens) // 16)
    config = EngineConfig(num_pages=pages, page_size=16, max_num_batched_tokens=4096, max_num_seqs=most)
    clock = process_time if args.cpu_time else perf_counter
    print("| text | sequences | without, tokens/s | with, tokens/s | with / without | least | tokens a step | right |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for text in TEXTS:
        if text.name in args.texts:
            # What is known of guesses is that of this text.
            pair = LLM(model, None, config), LLM(model, None, config, speculative_config=args.speculative_config)
            for count in args.sequences:
                print(row(pair, text, count, args, clock), flush=True)


def row(pair: tuple[Any, Any], text: Text, count: int, args: argparse.Namespace, clock: Callable[[], float]) -> str:
    rounds: list[list[Measured]] = []
    with patch("kvarts.run.speculation.find_ngram", never_right) if text.is_misled else nullcontext():
        for number in range(args.rounds):
            prompts = text.prompts(count, args.prompt, number)
            order = (0, 1) if number % 2 else (1, 0)
            measured = {place: measure(pair[place], text, prompts, args.tokens, clock) for place in order}
            rounds.append([measured[0], measured[1]])
    without, guessing = (statistics.median(one[place].rate for one in rounds) for place in (0, 1))
    ratios = [with_.rate / plain.rate for plain, with_ in rounds]
    guessed, right = sum(one[1].guessed for one in rounds), sum(one[1].right for one in rounds)
    a_step = statistics.median(one[1].tokens_per_step for one in rounds)
    return (
        f"| {text.name} | {count} | {without:.1f} | {guessing:.1f} | {statistics.median(ratios):.2f} "
        f"| {min(ratios):.2f} | {a_step:.2f} | {right:,} of {guessed:,} |"
    )


if __name__ == "__main__":
    main()
