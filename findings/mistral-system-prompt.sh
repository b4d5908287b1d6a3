#!/usr/bin/env bash
# Mistral's tokenizers of versions 2 and 3: with a system prompt, a turn does not begin with the turn before.
#
# Guess: without tools, the prompt of a turn begins with all tokens of the turn before, so that everything but the new
#   question is a hit.
# Seen: so for versions 1 and 7. Versions 2 and 3 (Mixtral 8x22B, Nemo) put the system prompt into the last question:
#   it moves with every turn, and two turns share 2 tokens, <s>[INST]. Version 2 also drops calls of tools and their
#   results once the user speaks again: the next prompt is shorter than the one before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" "mistral-common[sentencepiece]==1.13.1"

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import pathlib

import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

print("mistral-common", mistral_common.__version__)
data = pathlib.Path(mistral_common.__file__).parent / "data"
TOKENIZERS = {
    "1": MistralTokenizer.v1(),
    "2": MistralTokenizer.from_file(str(data / "mistral_instruct_tokenizer_240216.model.v2")),
    "3": MistralTokenizer.v3(),
    "3, tekken": MistralTokenizer.v3(is_tekken=True),
    "7": MistralTokenizer.v7(),
}
SYSTEM = {"role": "system", "content": "You are a helpful assistant who answers briefly."}
HELLO = [{"role": "user", "content": "Hello, who are you?"}, {"role": "assistant", "content": "I am a bot."}]
WEATHER = {"role": "user", "content": "And what is the weather in Rome?"}
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}


def encode(version, messages, tools=None):
    request = ChatCompletionRequest.from_openai(messages=messages, tools=tools)
    return TOKENIZERS[version].encode_chat_completion(request).tokens


def shared(first, second):
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


seen = {}
for version in TOKENIZERS:
    first, second = encode(version, [SYSTEM, HELLO[0]]), encode(version, [SYSTEM, *HELLO, WEATHER])
    seen[version] = (len(first), shared(first, second))
    print(f"version {version}: {len(second)} tokens after {len(first)}, of which {shared(first, second)} are shared")
assert seen == {"1": (25, 25), "2": (20, 2), "3": (20, 2), "3, tekken": (18, 2), "7": (20, 20)}

with_result = [
    WEATHER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"t":20}'},
]
thanks = [{"role": "assistant", "content": "20 degrees."}, {"role": "user", "content": "Thanks."}]
tools = [{"type": "function", "function": TOOL}]
for version, shrinks in (("2", True), ("3", False)):
    lengths = [len(encode(version, [SYSTEM, *turn], tools)) for turn in (with_result, with_result + thanks)]
    print(f"version {version}, with the result of a tool and a turn later: {lengths} tokens")
    assert (lengths[1] < lengths[0]) == shrinks
PYTHON
