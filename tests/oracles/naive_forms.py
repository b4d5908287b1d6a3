"""What the example files of forms say, read with json, csv and loops: lengths, and contents as one label per token."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any


@dataclass
class NaiveRequest:
    prompt: list[Hashable]
    num_output: int
    output: list[Hashable] = field(default_factory=list)
    """Empty where it is not known."""


def own(row: object, count: int) -> list[Hashable]:
    return [("own", row, place) for place in range(count)]


def blocks(ids: list[Any], size: int, count: int, row: object) -> list[Hashable]:
    """Tokens of ids of `size` tokens each; those after the last id belong to nothing else."""
    tokens: list[Hashable] = []
    tokens.extend(product(ids, range(size)))
    tokens = tokens[:count]
    return tokens + own(row, count - len(tokens))


def naive_requests(path: Path) -> list[NaiveRequest]:
    """The requests of one of the example files that are not left out, in the order of the file."""
    name = path.stem
    if path.suffix == ".csv":
        return _of_table(path)
    if path.suffix == ".json":
        return _of_object(json.loads(path.read_text()))
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    read: dict[str, Callable[[int, Any], NaiveRequest | None]] = {
        "mooncake": lambda i, r: _ids(i, r, 512),
        "mooncake-no-ids": lambda i, r: NaiveRequest(own(i, r["input_length"]), r["output_length"]),
        "bailian": lambda i, r: _ids(i, r, 16),
        "dynamo": _of_dynamo,
        "aiperf": _of_aiperf,
        "aiperf-2025": _of_aiperf,
        "openai": lambda i, r: (
            NaiveRequest(own(i, r["usage"]["prompt_tokens"]), r["usage"]["completion_tokens"])
            if r["usage"]["completion_tokens"]
            else None
        ),
        "litellm": lambda i, r: (
            NaiveRequest(own(i, r["prompt_tokens"]), r["completion_tokens"]) if r["status"] == "success" else None
        ),
        "servegen": _of_servegen,
        "lmcache": lambda i, r: NaiveRequest(blocks(r["chunk_hashes"], r["chunk_size"], r["seq_len"], i), 1),
        "tair-tokens": lambda i, r: NaiveRequest(list(r["token_ids"]), 1),
        "tair": lambda i, r: NaiveRequest(blocks(r["keys"], 16, r["input_len"], i), max(1, r["output_len"])),
    }
    if name == "sglang":
        return _of_object(rows[0])
    if name == "mooncake-deltas":
        return _of_deltas(rows)
    if name == "llmservingsim":
        return _of_llmservingsim(rows)
    found = [read[name](index, row) for index, row in enumerate(rows)]
    return [request for request in found if request is not None]


def _ids(index: int, row: dict[str, Any], size: int) -> NaiveRequest:
    return NaiveRequest(blocks(row["hash_ids"], size, row["input_length"], index), row["output_length"])


def _of_dynamo(index: int, row: dict[str, Any]) -> NaiveRequest | None:
    if row["event_type"] != "request_end":
        return None
    replayed = row["request"]["replay"]
    num_whole = replayed["input_length"] // replayed["trace_block_size"]
    ids = replayed["input_sequence_hashes"][:num_whole]
    tokens = blocks(ids, replayed["trace_block_size"], replayed["input_length"], index)
    return NaiveRequest(tokens, row["request"]["output_tokens"])


def _of_aiperf(index: int, row: dict[str, Any]) -> NaiveRequest | None:
    phase = row["metadata"].get("benchmark_phase") or row["metadata"].get("credit_phase")
    if row["error"] or phase != "profiling":
        return None
    metrics = row["metrics"]
    num_prompt = int(metrics["input_sequence_length"]["value"])
    return NaiveRequest(own(index, num_prompt), int(metrics["output_sequence_length"]["value"]))


def _of_servegen(index: int, row: dict[str, Any]) -> NaiveRequest | None:
    data = row["data"]
    num_prompt = data.get("input_tokens", data.get("text_tokens", 0) + sum(data.get("image_tokens", [])))
    return NaiveRequest(own(index, num_prompt), data["output_tokens"]) if data["output_tokens"] else None


def _of_object(value: dict[str, Any]) -> list[NaiveRequest]:
    if "benchmarks" in value:
        rows = [row for benchmark in value["benchmarks"] for row in benchmark["requests"]["successful"]]
        return [NaiveRequest(own(i, row["prompt_tokens"]), row["output_tokens"] or 1) for i, row in enumerate(rows)]
    lengths = zip(value["input_lens"], value["output_lens"], value["errors"], strict=True)
    return [NaiveRequest(own(i, n), m) for i, (n, m, error) in enumerate(lengths) if not error]


def _of_table(path: Path) -> list[NaiveRequest]:
    columns = {"azure": (1, 2), "burstgpt": (2, 3), "burstgpt-sessions": (4, 5), "vidur": (1, 2), "splitwise": (5, 6)}
    at = columns.get(path.stem.removesuffix("-2024"), (0, 1))
    rows = list(csv.reader(path.read_text().splitlines()))[1:]
    lengths = [(int(row[at[0]]), int(row[at[1]])) for row in rows]
    return [NaiveRequest(own(i, num_prompt), num) for i, (num_prompt, num) in enumerate(lengths) if num]


def _of_deltas(rows: list[dict[str, Any]]) -> list[NaiveRequest]:
    known: dict[str, list[Hashable]] = {}
    requests = []
    for index, row in enumerate(rows):
        new = blocks(row["hash_ids"], 512, row["input_length"], index)
        prompt = known.get(row["session_id"], []) + new
        answer: list[Hashable] = [("answer", index, place) for place in range(row["output_length"])]
        requests.append(NaiveRequest(prompt, row["output_length"], answer))
        known[row["session_id"]] = prompt + answer
    return requests


def _of_llmservingsim(rows: list[dict[str, Any]]) -> list[NaiveRequest]:
    calls = [call for row in rows for call in row.get("sub_requests", [row])]
    return [
        NaiveRequest(
            list(call.get("input_tok_ids", own(index, call["input_toks"]))),
            call["output_toks"],
            list(call.get("output_tok_ids", [])),
        )
        for index, call in enumerate(calls)
    ]


def naive_hits(requests: list[NaiveRequest], page_size: int) -> int:
    """Prompt tokens that one request after the other finds in a cache that nothing is evicted from."""
    seen: set[tuple[Hashable, ...]] = set()
    num_hits = 0
    for index, request in enumerate(requests):
        num_most = (len(request.prompt) - 1) // page_size
        num_pages = 0
        while num_pages < num_most and tuple(request.prompt[: (num_pages + 1) * page_size]) in seen:
            num_pages += 1
        num_hits += num_pages * page_size
        answer = request.output or own((index, "answer"), request.num_output)
        computed = (request.prompt + answer)[: len(request.prompt) + request.num_output - 1]
        for end in range(page_size, len(computed) + 1, page_size):
            seen.add(tuple(computed[:end]))
    return num_hits
