#!/usr/bin/env bash
# GuideLLM's Mooncake traces: a hash id keeps the length that its first prompt left it.
#
# Guess, worded afterwards: a row of 600 tokens with ids [0, 1] of 512 tokens, then one of 1,024 tokens with the same
#   ids: prompts of 600 and 1,024 tokens, of which the second begins with the first.
# Seen: both prompts have 600 tokens, and the second row still counts 1,024. The order matters: with the long row first
#   both have 1,024. A trace in which prompts end within a shared block is replayed shorter or longer than it is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" guidellm==0.8.1 tokenizers==0.23.3

"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from datasets import Dataset
from faker import Faker
from guidellm.data.deserializers.trace_mooncake import MooncakeTraceFormat
from guidellm.schemas.data.deserializers import MooncakeTraceFormatArgs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

print("guidellm", version("guidellm"))
# A tokenizer whose tokens are bytes, so that the tokens of a prompt are its characters.
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
processor = PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def prompts(*lengths):
    """The length that each row counts, and the tokens of its prompt."""
    rows = [
        {"timestamp": float(at), "input_length": length, "output_length": 1, "hash_ids": [0, 1]}
        for at, length in enumerate(lengths)
    ]
    path = Path(sys.argv[1]) / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = MooncakeTraceFormatArgs(source={"kind": "json_file", "path": str(path)})
    reader = MooncakeTraceFormat(config, Dataset.from_list(rows))
    faker, found = Faker(), []
    faker.seed_instance(1)
    for row in reader:
        columns = reader.build_conversation_graph(row, processor, faker).turns[0].columns
        found.append((columns["prompt_tokens_count_column"][0], len(processor.encode(columns["text_column"][0]))))
    return found


seen = prompts(600, 1024), prompts(1024, 600)
print("rows of 600 and 1,024 tokens, counted and sent:", seen[0])
print("the same in the other order:", seen[1])
assert seen == ([(600, 600), (1024, 600)], [(1024, 1024), (600, 1024)])
PYTHON
