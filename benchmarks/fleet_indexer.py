"""A mock fleet's KV events against an index that shares no code with kvarts: `python -m dynamo.indexer` of ai-dynamo.

    python -m venv ORACLE && ORACLE/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    ORACLE/bin/pip install pydantic
    python benchmarks/fleet_indexer.py --oracle ORACLE/bin/python [--requests 400]

`kvarts mock --fleet` serves two prefill and two decode workers with small pools; requests with shared prefixes go to
its router, and some prompts to a worker, from where another one fetches them. The indexer reads the events of all
workers. At rest, it must have as many blocks of each worker as the worker has cached pages, by its metrics.

The indexer binds all interfaces, so the script puts itself in a network namespace of its own (`unshare -rn`).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dynamo_indexer import call, enter_own_network

INDEXER, ROUTER, EVENTS = 18390, 18400, 15560
PAGE_SIZE = 16
FLEET = f"""
pages = 120
page_size = {PAGE_SIZE}
[transfer]
rate = "1GB/s"
token_bytes = 1000
[[pool]]
role = "prefill"
replicas = 2
router = "dynamo-kv"
[[pool]]
role = "decode"
replicas = 2
"""
NUM_WORKERS = 4


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            call(port, "/health")
        except OSError:
            assert time.monotonic() < deadline, f"nothing answers at port {port}"
            time.sleep(0.1)
        else:
            return


def blocks_of(dump: str) -> dict[int, set[int]]:
    """Return the blocks of each worker in the indexer's dump."""
    found: dict[int, set[int]] = {worker: set() for worker in range(NUM_WORKERS)}
    for model in json.loads(dump).values():
        for event in model["events"]:
            blocks = event["event"]["data"]["stored"]["blocks"]
            found[event["worker_id"] - 1].update(block["block_hash"] for block in blocks)
    return found


def cached_pages(worker: int) -> int:
    """Return the pages of a worker at rest that can be found, by its metrics."""
    text = call(ROUTER + 1 + worker, "/metrics")
    match = re.search(r'^kvarts:pages\{[^}]*state="cached"[^}]*\} ([0-9.e+]+)$', text, re.MULTILINE)
    assert match is not None, [line for line in text.splitlines() if "pages" in line]
    return int(float(match[1]))


def load(numbers: range) -> None:
    """Send requests with shared prefixes. No prompt comes twice: a worker may have two copies of its last page."""
    rng = random.Random(1)
    prefixes = [" ".join(rng.choices(["one", "two", "red", "sea", "sky"], k=rng.randrange(20, 300))) for _ in range(12)]
    rng.seed(numbers.start)
    for number in numbers:
        prompt = f"{rng.choice(prefixes)} number{number} " + "and more " * rng.randrange(1, 40)
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randrange(1, 40)}
        if number % 4:
            call(ROUTER, "/v1/completions", body)
            continue
        source, target = ROUTER + 1 + rng.randrange(2), ROUTER + 3 + rng.randrange(2)
        asked = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        held = json.loads(call(source, "/v1/completions", asked))["kv_transfer_params"]
        call(target, "/v1/completions", {**body, "kv_transfer_params": held})


def run(arguments: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "fleet.toml").write_text(FLEET)
    log = (folder / "indexer.log").open("w")
    indexer = subprocess.Popen(
        [arguments.oracle, "-m", "dynamo.indexer", "--port", str(INDEXER)], stdout=log, stderr=subprocess.STDOUT
    )
    options = ["--fleet", folder / "fleet.toml", "--port", ROUTER, "--kv-events", f"tcp://127.0.0.1:{EVENTS}"]
    mock = subprocess.Popen([sys.executable, "-m", "kvarts", "mock", *map(str, options)], stderr=log)
    try:
        wait_for(INDEXER)
        wait_for(ROUTER)
        for worker in range(NUM_WORKERS):
            body = {"instance_id": worker + 1, "endpoint": f"tcp://127.0.0.1:{EVENTS + worker}", "model_name": "m"}
            call(INDEXER, "/register", {**body, "dp_rank": 0, "block_size": PAGE_SIZE})
        time.sleep(2)
        num_sent = arguments.requests // 4
        for part in range(4):
            load(range(part * num_sent, (part + 1) * num_sent))
            here = {worker: cached_pages(worker) for worker in range(NUM_WORKERS)}
            found, deadline = dict[int, int](), time.monotonic() + 20
            while found != here and time.monotonic() < deadline:
                time.sleep(0.2)
                found = {worker: len(blocks) for worker, blocks in blocks_of(call(INDEXER, "/dump")).items()}
            print(f"after {(part + 1) * num_sent:,} requests: {found} of the indexer, {here} cached")
            if found != here:
                sys.exit("they differ")
        print("equal throughout")
    finally:
        for process in (mock, indexer):
            process.terminate()
            process.wait()


def main() -> None:
    """Parse the command line, enter a namespace, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oracle", required=True, metavar="PYTHON", help="A Python with ai-dynamo.")
    parser.add_argument("--requests", type=int, default=400)
    arguments = parser.parse_args()
    enter_own_network()
    run(arguments)


if __name__ == "__main__":
    main()
