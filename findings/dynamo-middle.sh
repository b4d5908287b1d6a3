#!/usr/bin/env bash
# Dynamo's radix tree: a block that comes back in the middle of a prefix does not bring back what follows it.
#
# Guess: blocks 1 to 4 stored, 2 removed and stored again under the same hash: all 4 are found, since 3 and 4 were
#   never removed.
# Seen: 2 of 4, and a later removal of block 4 is refused. Blocks that follow a removed one are lost to the index for
#   as long as the engine keeps them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" ai-dynamo-runtime==1.6.1

DYN_LOG=off "$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

from dynamo._core import RadixTree, compute_block_hash_for_seq

print("ai-dynamo-runtime", version("ai-dynamo-runtime"))
CONTENTS = compute_block_hash_for_seq(list(range(64)), 16)


def apply(tree, worker, data):
    tree.apply_event(worker, json.dumps({"event_id": 0, "data": data, "dp_rank": 0}).encode())


def store(tree, worker, hashes, contents, parent=None):
    blocks = [{"block_hash": name, "tokens_hash": content} for name, content in zip(hashes, contents)]
    apply(tree, worker, {"stored": {"parent_hash": parent, "blocks": blocks}})


def remove(tree, worker, *hashes):
    apply(tree, worker, {"removed": {"block_hashes": hashes}})


def blocks(tree):
    return {worker: count for (worker, _), count in sorted(tree.find_matches(CONTENTS).scores.items())}


tree = RadixTree()
store(tree, 1, [11, 12, 13, 14], CONTENTS)
seen = [blocks(tree)]
remove(tree, 1, 12)
seen.append(blocks(tree))
store(tree, 1, [12], CONTENTS[1:2], parent=11)
seen.append(blocks(tree))
print("4 blocks stored, the second removed, the second stored again: found", seen)
assert seen == [{1: 4}, {1: 1}, {1: 2}]
try:
    remove(tree, 1, 14)
except RuntimeError as error:
    print("removal of the fourth:", error)
else:
    raise AssertionError("the fourth block was still known")
PYTHON
