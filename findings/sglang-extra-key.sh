#!/usr/bin/env bash
# SGLang's events: prefixes kept apart by extra_key are published under one hash, and one removal is for both.
#
# Guess: a request's extra_key goes into the hashes of its pages, as cache_salt does: the same 64 tokens under a key
#   and without one are 8 pages, that are stored and removed under 8 hashes.
# Seen: cache_salt does, and is named in the event. extra_key does not, and is not: 4 hashes are stored twice, and
#   removed once when the tree evicts the pages without a key, while it still finds the others. A reader of the events
#   sees hits across keys that the tree never gives, and loses pages that it still has.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" \
  transformers==5.24.0 xgrammar==0.2.9 compressed-tensors==0.20.1 sentencepiece==0.2.3 msgspec==0.22.0 pyzmq==27.3.0 \
  orjson==3.13.0 psutil==7.2.2 pybase64==1.5.1 pillow==13.0.0 starlette==1.10.0 aiohttp==3.14.5 dill==0.4.1 \
  requests==2.34.2 gguf==0.19.0
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" --no-deps sglang==0.5.23

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from array import array
from importlib.metadata import version
from unittest.mock import MagicMock

import torch
import transformers.image_utils
import transformers.modeling_utils
import transformers.processing_utils
import xgrammar

# The tree is SGLang's own and runs on a CPU. What its package imports for devices and pictures is not called here.
DEVICES = {"IPython", "decord2", "flash_attn", "flashinfer", "pynvml", "sgl_kernel", "torch_memory_saver"}
PICTURES = {"torchcodec", "torchvision"}


class Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Unused(types.ModuleType):
    __path__ = []
    __version__ = "99.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(name, (), {}) if name[0].isupper() else MagicMock()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        unused = name.split(".")[0] in DEVICES | PICTURES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if unused else None

    def create_module(self, spec):
        return Unused(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
logging.disable(logging.WARNING)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

print("sglang", version("sglang"))
TOKENS = array("q", range(64))
allocator = MagicMock(device="cpu")


def store(tree, **key):
    tree.insert(InsertParams(key=RadixKey(TOKENS, **key), value=torch.arange(64)))
    return [event for event in tree.take_events() if type(event).__name__ == "BlockStored"]


def found(tree, **key):
    return tree.match_prefix(MatchPrefixParams(key=RadixKey(TOKENS, **key))).device_prefix_len


def hashes(events):
    return [name for event in events for name in event.block_hashes]


tree = RadixCache.create_simulated(page_size=16, enable_kv_cache_events=True, mock_allocator=allocator)
plain, keyed, salted = store(tree), store(tree, extra_key="a"), store(tree, cache_salt="a")
counts = [len(hashes(plain)), len({*hashes(plain + keyed)}), len({*hashes(plain + keyed + salted)})]
print("hashes without a key, with pages under an extra_key, with pages under a cache_salt:", counts)
print("salt in the event:", salted[0].cache_salt, "- fields that hold the key:", "'a'" in repr(keyed[0]))
assert counts == [4, 4, 8] and salted[0].cache_salt == "a" and "'a'" not in repr(keyed[0])

found(tree, extra_key="a")
tree.evict(EvictParams(num_tokens=64))
removed = hashes(tree.take_events())
left = {"without": found(tree), "extra_key a": found(tree, extra_key="a")}
print("after 64 tokens were evicted, removed the same hashes:", removed == hashes(keyed), "- tokens found:", left)
assert sorted(removed) == sorted(hashes(keyed)) and left == {"without": 0, "extra_key a": 64}
PYTHON
