#!/usr/bin/env bash
# The prefix cache of transformers' continuous batching forgets all prompts at once, that of the request included.
#
# Guess, worded afterwards: of 20 blocks, three prompts take 15; a fourth of 5 and a bit drops the one that was used
#   least recently, and the other three are found again. A prompt that leaves one block free is found by its repetition.
# Seen: when less than 15 % of the blocks are free before a step, whoever holds them, every block that no running
#   request holds is given up, before the step looks for prefixes. So the fourth prompt costs all four, and a prompt of
#   19 of 20 blocks is computed each time; of 18, it is found.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" torch==2.13.0 transformers==5.24.0 numpy==2.4.2

"$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON' || { tail -n 20 "$folder/log" >&2; exit 1; }
import random
from importlib.metadata import version

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

print("torch", version("torch"), "transformers", version("transformers"))
torch.manual_seed(0)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=200, **SIZES)).eval()
forward, computed = model.forward, []


def counted(*arguments, **named):
    computed.append(named["input_ids"].numel())
    return forward(*arguments, **named)


model.forward = counted
generation = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)


def told(num_tokens, names):
    """Return how many tokens of each named prompt are computed, asked in turn in a cache of 20 blocks of 16."""
    settings = ContinuousBatchingConfig(
        page_size=16, num_blocks=20, max_batch_tokens=512, use_cuda_graph=False, use_async_batching=False
    )
    draw = random.Random(0)
    tokens = {name: [draw.randrange(1, 200) for _ in range(num_tokens)] for name in "abcd"}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings
    ) as manager:

        def asked(name):
            computed.clear()
            manager.add_request(tokens[name], max_new_tokens=2)
            next(each for each in manager if each.is_finished())
            return sum(computed) - 1  # the second token of the answer has a step of its own

        return [asked(name) for name in names]


four, large, fits = told(81, "abcabcdabcd"), told(289, "aa"), told(273, "aa")
print("four prompts of 81 tokens, computed:", four)
print("one of 289 tokens, twice:", large, "one of 273:", fits)
assert four == [81] * 3 + [1] * 3 + [81] * 5
assert (large, fits) == ([289, 289], [273, 1])
PYTHON
