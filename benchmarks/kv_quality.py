"""What KV in 8 bits costs a real model in quality: perplexity, and agreement of the likeliest tokens.

    python benchmarks/kv_quality.py

Needs kvarts[torch], gguf, and the model that `kvarts model get smollm2` downloads. Texts are files of this repository,
cut into pieces of `--length` tokens; each piece is scored alone, by the log-probabilities of its tokens after the
first.
"""

from __future__ import annotations

import argparse
from math import exp
from pathlib import Path
from time import process_time
from typing import Any

from kvarts.core.config import EngineConfig
from kvarts.run.model_files import located_model
from kvarts.run.torch.pools import KV_DTYPES

ROOT = Path(__file__).parent.parent
TEXTS = ("LICENSE", "docs/concepts.md", "docs/security.md")


def model_path() -> Path:
    """The GGUF file of the model."""
    return next(located_model("smollm2").glob("*.gguf"))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--texts", nargs="+", default=list(TEXTS))
    args = parser.parse_args()
    from kvarts.run.torch.llm import LLM

    config = EngineConfig(num_pages=256, page_size=16, max_num_batched_tokens=256, max_num_seqs=1)
    first = LLM(model_path(), config=config)
    engines = {name: LLM(first._model, first.tokenizer, config, kv_dtype=name) for name in KV_DTYPES}
    for name, llm in engines.items():
        print(f"{name}: {llm.host().token_bytes:,} bytes of KV per token")
    print(f"{'text':20}{'tokens':>8}{'format':>8}{'perplexity':>12}{'ratio':>9}{'same':>9}{'CPU s':>8}")
    for text in args.texts:
        tokens = list(first.tokenizer((ROOT / text).read_text())["input_ids"])
        pieces = [tokens[start : start + args.length] for start in range(0, len(tokens), args.length)]
        plain, likeliest = 0.0, []
        for name, llm in engines.items():
            start = process_time()
            values, best = scored(llm, [piece for piece in pieces if len(piece) > 1])
            seconds, perplexity = process_time() - start, exp(-sum(values) / len(values))
            if not plain:
                plain, likeliest = perplexity, best
            same = sum(one == other for one, other in zip(likeliest, best, strict=True)) / len(best)
            print(
                f"{text:20}{len(tokens):8,}{name:>8}"
                f"{perplexity:12.4f}{perplexity / plain:9.4f}{same:9.2%}{seconds:8.1f}",
                flush=True,
            )


def scored(llm: Any, pieces: list[list[int]]) -> tuple[list[float], list[int]]:
    """The log-probability of each token after the first of each piece, and the likeliest token in its place."""
    from kvarts.core.sampling import SamplingParams

    values, best = [], []
    for one in llm.generate(pieces, SamplingParams(max_tokens=0, prompt_logprobs=1)):
        values += one.prompt_logprobs.values[1:]
        best += [top[0][0] for top in one.prompt_logprobs.top[1:]]
    return values, best


if __name__ == "__main__":
    main()
