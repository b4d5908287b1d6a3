"""What the door costs a real model: sequences through HTTP, streamed, beside the same in process.

    python benchmarks/serve_real.py --layers 8 --sequences 32 --tokens 32 --repeat 3

A model of random weights (Qwen3's form, hidden size 1024) is written to a temporary folder. `kvarts.LLM` runs the
sequences in this process; then the same engine serves them over HTTP to a client in a thread of this process, which
reads streams. Runs alternate; the fastest of each is compared, and the median of the CPU time of all threads, which
other work on the machine changes less. The client's CPU time is in that of HTTP. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Any

from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.doors.openai.opening import Door, open_model
from kvarts.doors.openai.server import Address, OpenAIServer
from kvarts.run.torch.llm import LLM


def write_model(directory: str, layers: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=8192,
        eos_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def serve(directory: str, config: EngineConfig) -> tuple[str, Any]:
    """Serve in a thread; return the address, and what stops it."""
    opened = open_model(directory, Door(names=("real",)), config=config)
    started: Future[tuple[str, Any]] = Future()

    async def run() -> None:
        server = OpenAIServer(opened.app, opened.models, Address(port=0))
        await server.start()
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        started.set_result((server.url, lambda: loop.call_soon_threadsafe(stopping.set)))
        await stopping.wait()
        await server.stop(1.0)

    threading.Thread(target=lambda: asyncio.run(run())).start()
    return started.result()


def stream(address: str, prompt: list[int], tokens: int) -> int:
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    payload = connection.getresponse().read()
    connection.close()
    return payload.count(b"data: ") - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    config = EngineConfig(num_pages=2048, page_size=16, max_num_batched_tokens=2048, max_num_seqs=64)
    prompts = [[number % 8000 + 1, *range(1, 32)] for number in range(arguments.sequences)]
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    total = arguments.sequences * arguments.tokens
    inside: list[float] = []
    outside: list[float] = []
    inside_cpu: list[float] = []
    outside_cpu: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        write_model(directory, arguments.layers)
        llm = LLM(directory, config=config)
        address, stop = serve(directory, config)
        with ThreadPoolExecutor(arguments.sequences) as pool:
            for turn in range(arguments.repeat + 1):
                # Each run has prompts of its own, so that nothing is found in the cache.
                own = [[turn + 1, *prompt] for prompt in prompts]
                began, began_cpu = time.perf_counter(), time.process_time()
                llm.generate(own, params)
                inside.append(time.perf_counter() - began)
                inside_cpu.append(time.process_time() - began_cpu)
                began, began_cpu = time.perf_counter(), time.process_time()
                counts = pool.map(lambda prompt: stream(address, prompt, arguments.tokens), own)
                assert sum(counts) == total
                outside.append(time.perf_counter() - began)
                outside_cpu.append(time.process_time() - began_cpu)
        stop()
    best_inside, best_outside = min(inside[1:]), min(outside[1:])  # the first compiles
    print(
        json.dumps(
            {
                "in_process_tokens_per_s": round(total / best_inside, 1),
                "http_tokens_per_s": round(total / best_outside, 1),
                "http_over_in_process": round(best_inside / best_outside, 3),
                "overhead_us_per_token": round((best_outside - best_inside) / total * 1e6, 1),
                "cpu_http_over_in_process": round(median(outside_cpu[1:]) / median(inside_cpu[1:]), 3),
                "cpu_overhead_us_per_token": round((median(outside_cpu[1:]) - median(inside_cpu[1:])) / total * 1e6, 1),
                "in_process_s": [round(value, 2) for value in inside],
                "http_s": [round(value, 2) for value in outside],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
