"""Choices of other projects' routers on random requests, as the cases of tests/sim/routers/test_named_choices.py.

    PYTHON benchmarks/named_routers.py production-stack SRC > tests/sim/routers/data/production-stack.json
    PYTHON benchmarks/named_routers.py dynamo > tests/sim/routers/data/dynamo-kv-1.6.1.json
    PYTHON benchmarks/named_routers.py vllm > tests/sim/routers/data/vllm-ranks-0.32.json

The first runs `PrefixAwareRouter` of vLLM's production stack, whose `src` is SRC (git archive HEAD src | tar x), in a
PYTHON with fastapi, requests, uhashring and xxhash. The third runs the choice of a rank of vLLM's front end
(`DPLBAsyncMPClient`), in a PYTHON with vLLM 0.32. The second replays
traces behind Dynamo's KV router 1.6.1. kvarts is not used. 20 sequences; in half of them each request ends before the
next, in the others they come or end in bursts; the production stack's rule knows no ends.
"""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

LETTERS = [chr(0x4E00 + token) * 4 for token in range(64)]


def prompts(draw: random.Random, count: int) -> list[list[int]]:
    """Return prompts of up to 140 tokens, most of which begin with one of three prefixes."""
    bases = [[draw.randrange(60) for _ in range(draw.choice([32, 64, 100]))] for _ in range(3)]
    found = []
    for _ in range(count):
        base = draw.choice(bases)
        tokens = base[: draw.choice([len(base), draw.randrange(len(base) + 1)])]
        found.append(tokens + [draw.randrange(60) for _ in range(draw.choice([0, 0, 3, 40]))] or [1])
    return found


def production_stack(source: str) -> list[dict]:
    """Sequences of (tokens, chosen worker, workers among which chance decided)."""
    sys.path.insert(0, source)
    discovery = ModuleType("vllm_router.service_discovery")  # of Kubernetes, which is not there
    discovery.EndpointInfo, discovery.get_service_discovery = SimpleNamespace, None
    sys.modules["vllm_router.service_discovery"] = discovery
    from vllm_router.routers import routing_logic
    from vllm_router.routers.routing_logic import PrefixAwareRouter

    found = []
    for number in range(20):
        draw = random.Random(number)
        PrefixAwareRouter._instances = {}
        router = PrefixAwareRouter()
        router.hashtrie = type(router.hashtrie)()
        urls = [f"http://{worker}" for worker in range(draw.choice([2, 4]))]
        endpoints = [SimpleNamespace(url=url) for url in urls]
        among: list[str] = []

        def choice(values, draw=draw, among=among):
            among[:] = sorted(values)
            return draw.choice(among)

        routing_logic.random = SimpleNamespace(choice=choice)
        rows = []
        for tokens in prompts(draw, 20):
            asked = {"prompt": "".join(LETTERS[token] for token in tokens)}
            chosen = asyncio.run(router.route_request(endpoints, {}, {}, None, asked))
            rows.append(
                ["".join(chr(48 + token) for token in tokens), urls.index(chosen), [urls.index(url) for url in among]]
            )
        found.append({"workers": len(urls), "rows": rows})
    return found


def vllm() -> list[dict]:
    """Sequences of events: loads per rank, a request that ended, or a chosen rank."""
    from collections import Counter

    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    found = []
    for number in range(20):
        draw = random.Random(number)
        is_burst = number >= 10
        ranks = draw.choice([2, 3, 4])
        client = DPLBAsyncMPClient.__new__(DPLBAsyncMPClient)
        client.client_count, client.eng_start_index = 1, 0
        client.reqs_in_flight, client.engine_inflight = {}, Counter()
        client.core_engines = [bytes([rank]) for rank in range(ranks)]
        client.lb_engines = [[0, 0, 0.0] for _ in range(ranks)]
        events, running = [], []
        for index in range(30):
            if draw.random() < 0.25:
                kinds = [0.0, 0.5, 0.75, 1.0]
                loads = [[draw.randrange(3), draw.randrange(5), draw.choice(kinds)] for _ in range(ranks)]
                client.lb_engines = [list(load) for load in loads]
                events.append(["loads", loads])
            asked = SimpleNamespace(request_id=str(index), data_parallel_rank=None, pooling_params=None)
            events.append(["chosen", client.core_engines.index(client.get_core_engine_for_request(asked))])
            running.append(index)
            while running and (not is_burst or draw.random() < 0.45):
                ended = running.pop(draw.randrange(len(running)))
                outputs = SimpleNamespace(finished_requests={str(ended)})
                asyncio.run(DPLBAsyncMPClient.process_engine_outputs(client, outputs))
                events.append(["ended", ended])
        found.append({"workers": ranks, "kind": "bursts" if is_burst else "alone", "events": events})
    return found


def dynamo() -> list[dict]:
    """Traces in Mooncake's form with blocks of 16 tokens, and the worker of each request."""
    import dynamo._core as core

    found = []
    engine = {"backend": "vllm", "num_gpu_blocks": 2000, "block_size": 16, "max_num_seqs": 64}
    for number in range(20):
        draw = random.Random(number)
        workers = draw.choice([2, 3, 4])
        rows, known = [], [[]]
        for index in range(16):
            base = draw.choice(known)
            ids = base[: draw.randrange(len(base) + 1)]
            ids = ids + [100 * index + each for each in range(draw.randrange(1, 12))]
            known.append(ids)
            at_ms = index // 8 * 40 if number >= 10 else index * 20_000
            length = 16 * len(ids) - draw.choice([0, 0, 5])
            rows.append({"timestamp": at_ms, "input_length": length, "output_length": index + 1, "hash_ids": ids})
        with tempfile.TemporaryDirectory() as folder:
            trace, out = Path(folder) / "trace.jsonl", Path(folder) / "out.jsonl"
            trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
            core.run_mocker_trace_replay(
                [str(trace)], extra_engine_args={"engine": engine | {"max_num_batched_tokens": 8192}},
                num_workers=workers, trace_block_size=16, router_mode="kv_router", router_config=core.KvRouterConfig(),
                report_jsonl_path=str(out), capture_per_request=True,
            )  # fmt: skip
            chosen = {row["output_length"]: row["decode_worker_idx"] for row in map(json.loads, out.open())}
        choices = "".join(str(chosen[row["output_length"]]) for row in rows)
        found.append({"workers": workers, "choices": choices, "rows": rows})
    return found


if __name__ == "__main__":
    rows = {"dynamo": dynamo, "vllm": vllm, "production-stack": lambda: production_stack(sys.argv[2])}[sys.argv[1]]()
    print("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]")
