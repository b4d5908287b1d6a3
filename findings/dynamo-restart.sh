#!/usr/bin/env bash
# Dynamo's index of vLLM's KV events after a restart of vLLM: old blocks stay, new ones are dropped for a while.
#
# Guess: sequence numbers that begin again at 0 are read as another life of the engine: its old blocks go, or at least
#   its new ones are taken.
# Seen: batches are dropped without an error until their number passes the last one before the restart; the blocks of
#   the old engine stay found. Registering the worker once more changes nothing; deleting it first does.
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


async def restart():
    global publisher
    publisher.close(0)
    await asyncio.sleep(1)
    publisher = zmq.Context.instance().socket(zmq.PUB)
    publisher.bind(f"tcp://127.0.0.1:{port}")
    await asyncio.sleep(3)


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
    before = [list(range(100 * i, 100 * i + 16)) for i in range(10)]
    for i, tokens in enumerate(before):
        publish(i, stored([1000 + i], tokens))
    print("before the restart:", [await found(service, tokens) for tokens in (before[0], before[9])])

    await restart()
    after = [list(range(5000 + 100 * i, 5000 + 100 * i + 16)) for i in range(12)]
    for i, tokens in enumerate(after):
        publish(i, stored([2000 + i], tokens))
    old, new = await found(service, before[0]), [await found(service, tokens) for tokens in after]
    print("after it, of the old engine:", old, "and of the new, by batch:", new)
    assert old == 1 and new == [0] * 10 + [1] * 2

    await service.upsert_worker(WORKER)
    again = await found(service, before[0])
    await service.delete_worker(1)
    await service.upsert_worker(WORKER)
    print("of the old engine, registered again:", again, "deleted and registered:", await found(service, before[0]))
    assert again == 1 and await found(service, before[0]) == 0


asyncio.run(main())
PYTHON
