#!/usr/bin/env bash
# A hit does not keep an entry of mlx-lm's LRUPromptCache: the oldest one is dropped, however often it was found.
#
# Guess: in a cache for two prompts, the one that has just been found stays when a third one comes.
# Seen: it is dropped, and the one that nobody asked for stays: only an insertion counts as use.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" "mlx[cpu]==0.32.4" mlx-lm==0.32.2

"$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON'
from importlib.metadata import version

import mlx.core
from mlx_lm.models.cache import KVCache, LRUPromptCache

print("mlx", version("mlx"), "mlx-lm", version("mlx-lm"))


def filled(count):
    cache = KVCache()
    cache.update_and_fetch(*(mlx.core.zeros((1, 1, count, 8)) for _ in range(2)))
    return [cache]


def found(tokens):
    return len(tokens) - len(prompts.fetch_nearest_cache("m", tokens)[1])


prompts = LRUPromptCache(max_size=2)
first, second, third = (list(range(start, start + 50)) for start in (1000, 2000, 3000))
prompts.insert_cache("m", first, filled(50))
prompts.insert_cache("m", second, filled(50))
hits = [found([*first, question]) for question in range(5)]
prompts.insert_cache("m", third, filled(50))
after = [found([*tokens, 7]) for tokens in (first, second, third)]
print("five questions about the first of two prompts find", hits, "; after a third prompt, all three find", after)
assert (hits, after) == ([50] * 5, [0, 50, 50])
PYTHON
