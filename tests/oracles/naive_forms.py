"""What the example files of forms say, read with json, csv and loops: lengths, and contents as one label per token."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import pairwise, product
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
    if path.name == "litellm.csv":
        return _of_columns(path, "prompt_tokens", "completion_tokens", {"status": "success", "cache_hit": "False"})
    if path.name == "columns.csv":
        return _of_columns(path, "Prompt Tokens", "completion_tokens", {})
    if path.suffix == ".csv":
        return _of_table(path)
    if name in EXPORTS:
        return EXPORTS[name](path.read_text())
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


# Exports --------------------------------------------------------------------------------------------------


def lengths(pairs: list[tuple[int, int]]) -> list[NaiveRequest]:
    """Requests of which only lengths are known; those without output are left out."""
    return [NaiveRequest(own(i, prompt), output) for i, (prompt, output) in enumerate(pairs) if output]


def conversation(turns: list[tuple[int, int, int]]) -> list[NaiveRequest]:
    """Prompt, cached and output tokens of the turns of one conversation: prompts as their lengths imply them."""
    requests: list[NaiveRequest] = []
    for turn, (num_prompt, num_cached, num_output) in enumerate(turns):
        kept: list[Hashable] = [("common", place) for place in range(num_cached)]
        if requests:
            before = requests[-1]
            whole = before.prompt + before.output
            kept = whole if num_prompt >= len(whole) else whole[:num_cached]
            if len(before.prompt) <= num_prompt < len(whole):
                kept = before.prompt
        answer: list[Hashable] = [("answer", turn, place) for place in range(num_output)]
        requests.append(NaiveRequest(kept + own(turn, num_prompt - len(kept)), num_output, answer))
    return requests


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def _of_columns(path: Path, prompt: str, output: str, only: dict[str, str]) -> list[NaiveRequest]:
    rows = csv.DictReader(path.read_text().splitlines())
    return lengths(
        [(int(row[prompt]), int(row[output])) for row in rows if all(row[name] == only[name] for name in only)]
    )


def _of_codex(text: str) -> list[NaiveRequest]:
    usages = {}
    for row in _lines(text):
        info = row["payload"].get("info")
        if info:
            usages[info["total_token_usage"]["total_tokens"]] = info["last_token_usage"]
    names = ("input_tokens", "cached_input_tokens", "output_tokens")
    return conversation([tuple(usage[name] for name in names) for usage in usages.values()])


def _of_gemini(text: str) -> list[NaiveRequest]:
    found = [message["tokens"] for message in json.loads(text)["messages"] if message["type"] == "gemini"]
    return conversation([(t["input"] + t["tool"], t["cached"], t["output"] + t["thoughts"]) for t in found])


def _of_stream(text: str) -> list[NaiveRequest]:
    messages = {row["message"]["id"]: row["message"] for row in _lines(text) if row["type"] == "assistant"}
    turns = []
    for message in messages.values():
        usage = message["usage"]
        num_cached = usage["cache_read_input_tokens"]
        num_prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + num_cached
        turns.append([num_prompt, num_cached, usage["output_tokens"], message["stop_reason"] is None])
    for turn, following in pairwise(turns):
        if turn[3]:
            turn[2] = following[0] - turn[0]
    return conversation([(turn[0], turn[1], turn[2]) for turn in turns])


def _of_spans(text: str) -> list[NaiveRequest]:
    pairs = []
    for row in _lines(text):
        for span in row["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            facts = {each["key"]: each["value"] for each in span["attributes"]}
            name = facts.get("gen_ai.operation.name", {}).get("stringValue")
            if name in ("chat", "text_completion") and "gen_ai.usage.output_tokens" in facts:
                counts = [int(facts[f"gen_ai.usage.{way}_tokens"]["intValue"]) for way in ("input", "output")]
                pairs.append((counts[0], counts[1]))
    return lengths(pairs)


def _of_langfuse(text: str) -> list[NaiveRequest]:
    usages = [row["usage_details"] for row in _lines(text) if row["type"] == "GENERATION"]
    return lengths(
        [
            tuple(sum(count for name, count in usage.items() if name.startswith(way)) for way in ("input", "output"))
            for usage in usages
        ]
    )


def _of_pages(text: str) -> list[NaiveRequest]:
    """Of Helicone and LiteLLM, whose rows have the same names of lengths."""
    pairs = {}
    for row in json.loads(text)["data"]:
        is_cached = row.get("cache_hit") == "True" or not row.get("cache_reference_id", "0000").startswith("0000")
        if row.get("response_status", 200) == 200 and not is_cached:
            pairs[row["request_id"]] = (row["prompt_tokens"], row["completion_tokens"])
    return lengths(list(pairs.values()))


def _of_inference_perf(text: str) -> list[NaiveRequest]:
    pairs = []
    for row in json.loads(text):
        if row["error"] is None:
            metrics = row["info"]["response_metrics"]
            usage = metrics["server_usage"] or {"prompt_tokens": row["info"]["input_tokens"]}
            pairs.append((usage["prompt_tokens"], usage.get("completion_tokens", metrics["output_tokens"])))
    return lengths(pairs)


EXPORTS: dict[str, Callable[[str], list[NaiveRequest]]] = {
    "codex": _of_codex,
    "gemini": _of_gemini,
    "claude-stream": _of_stream,
    "otlp": _of_spans,
    "langfuse": _of_langfuse,
    "helicone": _of_pages,
    "litellm-page": _of_pages,
    "inference-perf": _of_inference_perf,
    "sglang-runs": lambda text: _of_object(_lines(text)[1]),
    "columns": lambda text: lengths(
        [(row["usage"]["prompt_tokens"], row["usage"]["completion_tokens"]) for row in _lines(text)]
    ),
}
