"""The files that the cases of `same_bytes.py` read: copies from BEFORE for both sides, and traffic made from a seed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

__all__ = ["SAMPLE", "write_inputs"]

SAMPLE = "mooncake-conversation-1000.jsonl"
PROGRAMS = Path(__file__).with_name("programs")


def write_inputs(before: Path, folder: Path) -> None:
    """Fill the new `folder`."""
    folder.mkdir()
    data = before / "src" / "kvarts" / "data"
    lines = (data / SAMPLE).read_text().splitlines(keepends=True)
    shutil.copy(data / SAMPLE, folder / SAMPLE)
    shutil.copy(data / SAMPLE, folder / "trace.jsonl")
    (folder / "slice.jsonl").write_text("".join(lines[:400]))
    (folder / "small.jsonl").write_text("".join(lines[:120]))
    shutil.copy(data / "azure-conv-1000.csv", folder / "chat.csv")
    shutil.copy(data / "azure-code-1000.csv", folder / "code.csv")
    for name in ("chat", "code"):
        rows = (folder / f"{name}.csv").read_text().splitlines(keepends=True)
        for count in (200, 400):
            (folder / f"{name}-{count}.csv").write_text("".join(rows[: count + 1]))
    shutil.copytree(data / "vllm-rtx4090", folder / "vllm-rtx4090")
    for name in ("requests", "prompts"):
        rows = (data / "vllm-rtx4090" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"measured-{name}.jsonl").write_text("".join(rows[:40]))
    shutil.copytree(PROGRAMS, folder / "programs", ignore=shutil.ignore_patterns("__pycache__"))
    _write_rows(folder / "sessions.jsonl", _sessions(random.Random(11)))
    _write_rows(folder / "priorities.jsonl", _priorities(random.Random(12)))
    _write_rows(folder / "steps.jsonl", _steps(random.Random(13)))
    _write_rows(folder / "prompts.jsonl", [{"prompt": "once upon a time"}, {"prompt": "once upon a hill"}])
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    _write_bad(folder, lines)


MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _sessions(rng: random.Random) -> list[dict[str, Any]]:
    """Conversations whose turns repeat what was said, with generated tokens, delays, priorities and names. Blocks of
    4 tokens."""
    rows: list[dict[str, Any]] = []
    next_id = 1000
    for session in range(60):
        blocks = list(range(session % 3 * 10, session % 3 * 10 + 8))
        start_ms = rng.randrange(0, 4000)
        for turn in range(rng.randrange(1, 6)):
            blocks = blocks + list(range(next_id, next_id + rng.randrange(1, 30)))
            next_id = blocks[-1] + 1
            outputs = rng.randrange(1, 60)
            row: dict[str, Any] = {
                "request_id": f"s{session}-{turn}",
                "session_id": f"s{session}",
                "input_length": 4 * len(blocks) - rng.randrange(4),
                "output_length": outputs,
                "hash_ids": blocks,
            }
            if turn == 0:
                row["timestamp"] = start_ms
            else:
                row["delay"] = rng.choice([0, 0.5, 20, 300])
            if session % 2:
                row["output_token_ids"] = [next_id + place for place in range(outputs)]
                next_id += outputs
            if session % 5 == 0:
                row["priority"] = 2
            rows.append(row)
    return rows


def _priorities(rng: random.Random) -> list[dict[str, Any]]:
    """A crowd of requests of four priorities that share prefixes, some of them too long for small pools."""
    rows = []
    for index in range(300):
        shared = rng.randrange(0, 12)
        blocks = [*range(shared), *range(1000 + 40 * index, 1000 + 40 * index + rng.randrange(1, 40))]
        rows.append(
            {
                "timestamp": index * 7,
                "input_length": 16 * len(blocks),
                "output_length": rng.randrange(1, 200),
                "hash_ids": blocks,
                "priority": rng.choice([-1, 0, 0, 3]),
            }
        )
    rows.append({"timestamp": 100, "input_length": 16_000, "output_length": 5, "hash_ids": list(range(5000, 6000))})
    return rows


def _steps(rng: random.Random) -> list[dict[str, Any]]:
    """Measured steps: what each did, and a duration that is nearly linear in it."""
    rows = []
    for _ in range(400):
        decodes, chunks = rng.randrange(1, 150), []
        known = decodes * rng.randrange(1, 2000)
        if rng.random() < 0.4:
            chunks = [[0, rng.randrange(16, 2048), 2048]]
        took_ms = 18 + 0.01 * decodes + 1.4e-4 * known + 0.12 * sum(chunk[1] for chunk in chunks) + rng.random()
        rows.append(
            {
                "duration_ns": round(took_ms * 1e6),
                "num_decodes": decodes,
                "decode_known_tokens": known,
                "chunks": chunks,
            }
        )
    return rows


def _write_bad(folder: Path, lines: list[str]) -> None:
    """Files that cannot be read, each in its own way."""
    good = lines[0]
    bad = {
        "empty.jsonl": "",
        "blank.jsonl": "\n\n",
        "no-json.jsonl": good + "{oops\n" + good,
        "no-field.jsonl": good + '{"timestamp": 1, "input_length": 5, "output_length": 2}\n',
        "no-number.jsonl": good + good.replace("6758", '"many"'),
        "negative.jsonl": good + good.replace("6758", "-6758"),
        "no-output.jsonl": good + good.replace('"output_length": 500', '"output_length": 0'),
        "short-ids.jsonl": good.replace("[0, 1, 2, 3, ", "["),
        "big-id.jsonl": good.replace("[0, 1, ", "[0, 18446744073709551616, "),
        "early.jsonl": good.replace('"timestamp": 0', '"timestamp": -3'),
        "no-time.jsonl": good.replace('"timestamp": 0, ', ""),
        "no-first-time.jsonl": good.replace('"timestamp": 0', '"session_id": "a", "delay": 3'),
        "bad-delay.jsonl": good.replace('"timestamp": 0', '"timestamp": 0, "session_id": "a", "delay": -3'),
        "bad.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,ten\n",
        "head.csv": "when,in,out\n2023-11-16 18:17:03.97,4808,10\n",
        "when.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,4808,10\n",
    }
    for name, text in bad.items():
        (folder / name).write_text(text)
    (folder / "no-text.jsonl").write_bytes(b"\xff\xfe\x00")
