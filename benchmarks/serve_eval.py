"""Runs lm_eval, unchanged, on a real model: by transformers, and by `kvarts serve` over HTTP; compares every sample.

    python benchmarks/serve_eval.py --lm-eval /venvs/lm-eval/bin/lm_eval --model ./smollm2 --limit 12

`--model`: a Hugging Face folder, with its tokenizer. Tasks are made here, without a download, from docstrings of the
standard library: which sentence goes on (multiple choice, whose score is a log-likelihood), the perplexity of texts
(rolling log-likelihoods), and greedy continuations. The model runs in float32 on the CPU on both sides. Prints one JSON
object: per task the number of samples, the largest difference of a log-likelihood, and how many answers are equal.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from serve_router import stop

MODULES = (
    "argparse",
    "asyncio",
    "collections",
    "decimal",
    "email",
    "fractions",
    "logging",
    "random",
    "typing",
    "zipfile",
)
TASKS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{start}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{whole}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "go_on": {
        "output_type": "generate_until",
        "doc_to_text": "{{start}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def main() -> None:
    """Run both, and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lm-eval", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--tasks", default=",".join(TASKS))
    options = parser.parse_args()
    model = options.model.resolve()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_tasks(folder)
        command = [sys.executable, "-m", "kvarts", "serve", "--model", str(model), "--port", "0", "--dtype", "float32"]
        server = subprocess.Popen([*command, "--served-model-name", "real"], stderr=subprocess.PIPE, text=True)
        stack.callback(stop, server)
        assert server.stderr is not None
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
        over_http = f"model=real,base_url={url}/v1/completions,tokenizer={model},num_concurrent=4,max_length=2048"
        sides = {
            "transformers": ["hf", f"pretrained={model},dtype=float32,max_length=2048"],
            "kvarts": ["local-completions", over_http],
        }
        samples, seconds = {}, {}
        for side, (kind, arguments) in sides.items():
            started = time.monotonic()
            samples[side] = run(options, folder, side, kind, arguments)
            seconds[side] = round(time.monotonic() - started, 1)
            print(side, seconds[side], "s", file=sys.stderr)
    result: dict[str, Any] = {"seconds": seconds}
    for task in options.tasks.split(","):
        pairs = list(zip(samples["transformers"][task], samples["kvarts"][task], strict=True))
        result[task] = compare(pairs, is_text=TASKS[task]["output_type"] == "generate_until")
    print(json.dumps(result, indent=1))


def write_tasks(folder: Path) -> None:
    """Write the tasks and their documents."""
    texts = []
    for name in MODULES:
        module = importlib.import_module(name)
        for value in (module, *vars(module).values()):
            told = getattr(value, "__doc__", None)
            text = " ".join(told.split()) if isinstance(told, str) else ""
            if 200 < len(text) < 800 and text not in texts:
                texts.append(text)
    rng = random.Random(0)
    rng.shuffle(texts)
    halves = [(text[: len(text) // 2].rsplit(" ", 1)[0], text) for text in texts]
    rows = []
    for number, (start, text) in enumerate(halves):
        choices = [text[len(start) :][:120]]
        choices += [
            other[len(before) :][:60] for before, other in rng.sample(halves[:number] + halves[number + 1 :], 3)
        ]
        answer = rng.randrange(4)
        choices[0], choices[answer] = choices[answer], choices[0]
        rows.append({"start": start, "choices": choices, "answer": answer, "whole": text})
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        of_data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(documents)}}}
        whole = {"task": name, "test_split": "test", "target_delimiter": "", **of_data, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))


def run(options: argparse.Namespace, folder: Path, side: str, kind: str, arguments: str) -> dict[str, list[Any]]:
    """Run lm_eval. Return the samples of each task, in the order of documents."""
    out = folder / side
    command = [
        options.lm_eval, "--model", kind, "--model_args", arguments, "--include_path", folder, "--tasks",
        options.tasks, "--output_path", out, "--log_samples", "--limit", str(options.limit), "--batch_size", "1",
    ]  # fmt: skip
    if kind == "hf":
        command += ["--device", "cpu"]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    samples = {}
    for task in options.tasks.split(","):
        (path,) = out.rglob(f"samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        samples[task] = sorted(rows, key=lambda row: row["doc_id"])
    return samples


def compare(pairs: list[tuple[Any, Any]], *, is_text: bool) -> dict[str, Any]:
    """Return how the samples of two sides differ: in their texts, or in log-likelihoods."""
    answers = [(one["filtered_resps"], other["filtered_resps"]) for one, other in pairs]
    if is_text:
        return {"samples": len(pairs), "equal": sum(one == other for one, other in answers)}
    values = [
        [float(each[0] if isinstance(each, list) else each) for each in side]
        for side in ([each for answer in answers for each in answer[number]] for number in range(2))
    ]
    differences = [abs(one - other) for one, other in zip(*values, strict=True)]
    return {
        "samples": len(pairs),
        "log-likelihoods": len(differences),
        "largest": round(max(map(abs, values[0])), 1),
        "largest difference": max(differences),
    }


if __name__ == "__main__":
    main()
