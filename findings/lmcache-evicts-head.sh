#!/usr/bin/env bash
# LMCache's host memory evicts a prompt that was stored and not looked up from its head, so that all of it is lost.
#
# Guess, worded afterwards: of ten chunks, a prompt of eight and then one of four are stored: the last two chunks of the
#   first make room, and a lookup finds its first six.
# Seen: the first two chunks are gone, so a lookup finds none, and six chunks that no lookup can reach stay in memory.
#   Chunks enter the LRU order from the head on; only a lookup that pins them, as vLLM's does, turns the order round.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONHASHSEED=0
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" torch==2.13.0 transformers==5.24.0 \
  numpy==2.2.6 numba==0.68.1 psutil==7.2.2 py-cpuinfo==9.0.0 pyyaml==6.0.4 pyzmq==27.3.0 msgspec==0.23.0 \
  blake3==1.0.11 nvtx==0.2.17 prometheus_client==0.24.1 opentelemetry-sdk==1.40.0 \
  opentelemetry-exporter-otlp==1.40.0 opentelemetry-exporter-prometheus==0.61b0 aiofile==3.12.3 aiofiles==25.1.0 \
  aiohttp==3.14.5 httpx==0.28.1 cachetools==8.0.2 cryptography==50.0.2 fastapi==0.141.1 redis==8.1.0 \
  requests==2.34.2 sortedcontainers==2.4.0 uvicorn==0.54.0
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" --no-deps lmcache==0.5.6

"$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON' > "$folder/told" || { tail -n 20 "$folder/log" >&2; exit 1; }
from importlib.metadata import version

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.token_database import ChunkedTokenDatabase

# 16 layers of keys and values, 8 heads of 64, 16 bits: 8 MiB per chunk of 256 tokens.
metadata = LMCacheMetadata(
    model_name="m", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0, kv_dtype=torch.float16,
    kv_shape=(16, 2, 256, 8, 64),
)  # fmt: skip
config = LMCacheEngineConfig.from_defaults(chunk_size=256, local_cpu=True, max_local_cpu_size=80 / 1024)
PinMonitor.GetOrCreate(config)
memory, tokens = LocalCPUBackend(config, metadata, dst_device="cpu"), ChunkedTokenDatabase(config, metadata)


def keys(name, num_chunks):
    return [key for _, _, key in tokens.process_tokens(tokens=[name, *range(num_chunks * 256 - 1)])]


def store(prompt):
    for key in prompt:
        chunk = memory.allocate(torch.Size([2, 16, 256, 512]), torch.float16)
        memory.batched_submit_put_task([key], [chunk])
        chunk.ref_count_down()


def here(prompt):
    return "".join("x" if memory.contains(key) else "." for key in prompt)


def looked_up(prompt):
    """Look a prompt up as the connector to vLLM does: chunks that are found are pinned, until they have been read."""
    found = [key for key in prompt if memory.contains(key, pin=True)]
    memory.touch_cache()
    for key in found:
        memory.unpin(key)


print("torch", version("torch"), "lmcache", version("lmcache"), "policy", config.cache_policy)
first, second, third = keys(1, 8), keys(2, 4), keys(3, 4)
store(first)
store(second)
print("stored, then four chunks more:", here(first))
seen = here(first)
memory.clear()
store(first)
looked_up(first)
store(third)
print("stored and looked up, then four chunks more:", here(first))
assert (seen, here(first)) == ("..xxxxxx", "xxxxxx..")
PYTHON
grep -a "lmcache\|chunks more" "$folder/told" | grep -av INFO
