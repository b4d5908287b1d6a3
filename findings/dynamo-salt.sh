#!/usr/bin/env bash
# Dynamo's index of vLLM's KV events and salts: only salts with a prefix of its own are followed.
#
# Guess: blocks that vLLM stored for a request with cache_salt "a" (its events name the salt in extra_keys) are found
#   for requests with that salt, and for no other.
# Seen: so only if the salt in the event begins with "dynamo-cache-salt:", as Dynamo's own front end writes it. A salt
#   that a client gave to vLLM is not read: all 4 blocks are found for a request without a salt, for which vLLM
#   computes everything, and none for one with it, for which vLLM has them. Two such salts share one place: when vLLM
#   evicts the blocks of one, those of the other are lost.
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
    tokens = list(range(64))
    seen = []
    for sequence, salt in enumerate(("a", "dynamo-cache-salt:a")):
        publish(2 * sequence, stored([1, 2, 3, 4], tokens, extra_keys=[(salt,), None, None, None]))
        seen.append([await found(service, tokens), await found(service, tokens, cache_salt="a")])
        print(f"4 blocks stored with salt {salt!r}; found without a salt: {seen[-1][0]}, with 'a': {seen[-1][1]}")
        publish(2 * sequence + 1, {"type": "AllBlocksCleared"})
    assert seen == [[4, 0], [0, 4]]

    publish(4, stored([1, 2, 3, 4], tokens, extra_keys=[("a",), None, None, None]))
    publish(5, stored([5, 6, 7, 8], tokens, extra_keys=[("b",), None, None, None]))
    publish(6, {"type": "BlockRemoved", "block_hashes": [1, 2, 3, 4], "medium": "GPU"})
    left = await found(service, tokens)
    print("4 blocks each with salts 'a' and 'b', those of 'a' removed; found without a salt:", left)
    assert left == 0


asyncio.run(main())
PYTHON
