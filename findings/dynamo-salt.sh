#!/usr/bin/env bash
# Dynamo's index of vLLM's KV events and cache salts: found without the salt, lost with it.
#
# Guess: blocks that vLLM stored for a request with cache_salt "a" (its events name it in extra_keys) are found for
#   requests with that salt, and for no other.
# Seen: the index does not read the salt of an event. It finds all 4 blocks for a request without a salt, for which
#   vLLM computes everything, and none for one that gives the cache_salt, for which vLLM has them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
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
    tokens = list(range(64))
    publish(0, stored([1, 2, 3, 4], tokens, extra_keys=[("a",), None, None, None]))
    salts = ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    without, same, other = [await found(service, tokens, **salt) for salt in salts]
    print("4 blocks stored with salt a; found without a salt:", without, "with a:", same, "with b:", other)
    assert (without, same, other) == (4, 0, 0)


asyncio.run(main())
PYTHON
