#!/usr/bin/env bash
# Dynamo's index and block hashes of 32 bytes: a batch that has one is lost, with all else that is in it.
#
# Guess: vLLM's two forms of a block hash, 64-bit numbers and (with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0) bytes, are
#   both read, as both are opaque.
# Seen: only numbers are. A batch with bytes is dropped as a whole: also a removal in it, so that a block stays found
#   that vLLM has removed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" ai-dynamo-runtime==1.6.1 \
  msgspec==0.22.0 pyzmq==27.3.0

DYN_LOG=off "$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import struct
import time
from importlib.metadata import version

import msgspec
import zmq
from dynamo._core import SelectionService

print("ai-dynamo-runtime", version("ai-dynamo-runtime"), "with events in the layout of vLLM 0.32")
publisher = zmq.Context.instance().socket(zmq.PUB)
port = publisher.bind_to_random_port("tcp://127.0.0.1")
WORKER = {
    "worker_id": 1,
    "model_name": "model",
    "block_size": 16,
    "endpoint": "http://127.0.0.1:9",
    "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
    "data_parallel_start_rank": 0,
    "data_parallel_size": 1,
    "max_num_batched_tokens": 8192,
    "total_kv_blocks": 1000,
}


def publish(sequence, *events):
    batch = msgspec.msgpack.encode([time.time(), events, 0])
    publisher.send_multipart([b"", struct.pack(">q", sequence), batch])


def stored(hashes, tokens, **more):
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens}
    return {**event, "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None, **more}


async def found(service, tokens, **request):
    await asyncio.sleep(0.5)
    scores = await service.overlap_scores({"model_name": "model", "token_ids": tokens, **request})
    return scores["workers"][0]["device_blocks"]


async def main():
    service = SelectionService(indexer_threads=1)
    await service.upsert_worker(WORKER)
    await asyncio.sleep(1)
    numbers, texts = list(range(16)), list(range(100, 116))
    publish(0, stored([1], numbers))
    first = await found(service, numbers)
    publish(1, stored([bytes(range(32))], texts), {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"})
    second = [await found(service, tokens) for tokens in (numbers, texts)]
    print("stored under a number:", first, "then in one batch removed, and another stored under bytes:", second)
    assert first == 1 and second == [1, 0]


asyncio.run(main())
PYTHON
