#!/usr/bin/env bash
# Dynamo's index and engines that name blocks differently: only the first to store a prefix can remove it.
#
# Guess, worded afterwards: block hashes are the engine's own and opaque to the index, which matches by content: two
#   vLLM with hash seeds of their own store the same prefix under different hashes, and each removes it under its own.
# Seen: the second engine's removals change nothing, and no error is raised: its blocks stay found after it removed
#   them. vLLM 0.32 has a random seed with --prefix-caching-hash-algo xxhash, unless PYTHONHASHSEED is set; engines of
#   two makers differ anyway.
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


def publisher():
    socket = zmq.Context.instance().socket(zmq.PUB)
    return socket, socket.bind_to_random_port("tcp://127.0.0.1")


def publish(socket, sequence, event):
    batch = msgspec.msgpack.encode([time.time(), [event], 0])
    socket.send_multipart([b"", struct.pack(">q", sequence), batch])


def stored(hashes, tokens):
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens}
    return {**event, "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None}


def removed(hashes):
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}


async def found(service, tokens):
    await asyncio.sleep(0.5)
    scores = await service.overlap_scores({"model_name": "model", "token_ids": tokens})
    return {worker["worker_id"]: worker["device_blocks"] for worker in scores["workers"]}


async def main():
    service = SelectionService(indexer_threads=1)
    sockets = []
    for worker in (1, 2):
        socket, port = publisher()
        sockets.append(socket)
        record = {"worker_id": worker, "model_name": "model", "block_size": 16, "total_kv_blocks": 1000}
        record |= {"data_parallel_start_rank": 0, "data_parallel_size": 1, "max_num_batched_tokens": 8192}
        record |= {"endpoint": f"http://127.0.0.1:{worker}", "kv_events_endpoint": f"tcp://127.0.0.1:{port}"}
        await service.upsert_worker(record)
    await asyncio.sleep(1)
    tokens = list(range(64))
    publish(sockets[0], 0, stored([11, 12, 13, 14], tokens))
    await found(service, tokens)
    publish(sockets[1], 0, stored([21, 22, 23, 24], tokens))
    print("both workers have stored 4 blocks:", await found(service, tokens))
    publish(sockets[0], 1, removed([13, 14]))
    publish(sockets[1], 1, removed([23, 24]))
    after = await found(service, tokens)
    print("both have removed the last 2:", after)
    assert after == {1: 2, 2: 4}


asyncio.run(main())
PYTHON
