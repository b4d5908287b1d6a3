#!/usr/bin/env bash
# xgrammar: "required" without a property, or "anyOf" next to properties, turns the schema around.
#
# Guess, worded afterwards: a required key that has no entry in "properties" may have any value; "anyOf" next to
#   "properties" applies to the same object. Texts that the schema allows are accepted, others are not.
# Seen: xgrammar, with its default strict_mode, accepts what the schema forbids and refuses what it demands: {} is
#   accepted and {"z": 1} is not, where z is required; of "properties" and "anyOf", only the latter is read. There is
#   no error. llguidance agrees with the schema each time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" \
  xgrammar==0.2.9 llguidance==1.9.1 jsonschema==4.25.1

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import json
from importlib.metadata import version

import jsonschema
import llguidance
import xgrammar

for name in ("xgrammar", "llguidance", "jsonschema"):
    print(name, version(name))

# A vocabulary of 256 bytes and an end token: what is accepted does not depend on a tokenizer.
VOCABULARY = [*(bytes([i]) for i in range(256)), b"<end>"]
END = 256

compiler = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
)


def in_xgrammar(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return matcher.accept_string(text.encode()) and matcher.accept_token(END)


class Bytes:
    eos_token_id, bos_token_id, special_token_ids, tokens = END, None, [END], VOCABULARY

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def in_llguidance(schema, text):
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    if matcher.is_error():
        return "refused: " + matcher.get_error().splitlines()[0]
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}}
ROWS = (
    ({"type": "object", "required": ["z"]}, {"{}": (False, True), '{"z": 1}': (True, False)}),
    ({**A, "required": ["a", "z"]}, {'{"a": 1}': (False, True), '{"a": 1, "z": 1}': (True, False)}),
    (
        {**A, "required": ["a"], "anyOf": [{"required": ["b"], "properties": {"b": INTEGER}}]},
        {'{"b": 1}': (False, True), '{"a": 1, "b": 1}': (True, False)},
    ),
)
failed = 0
for schema, texts in ROWS:
    print(json.dumps(schema))
    for text, expected in texts.items():
        allowed = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        seen = in_xgrammar(schema, text)
        print(f"  {text:18} schema {allowed}, llguidance {in_llguidance(schema, text)}, xgrammar {seen}")
        failed += (allowed, seen) != expected or in_llguidance(schema, text) != allowed
assert not failed
PYTHON
