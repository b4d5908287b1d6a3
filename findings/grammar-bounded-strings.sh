#!/usr/bin/env bash
# xgrammar: a bound on the length of a string, or a pattern, takes quotes, backslashes and line ends away.
#
# Guess: an escape such as \n or \" is one character of the string that maxLength counts, in xgrammar, llguidance and
#   outlines-core alike; a pattern sees the characters, not the escapes.
# Seen: xgrammar accepts no escape at all within a string that has maxLength, minLength or a pattern: a model that
#   should write code into such an argument cannot write a line end or a quote. It accepts \u00e9 in a free string
#   only; llguidance in none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" \
  xgrammar==0.2.9 llguidance==1.9.1 outlines-core==0.2.14

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import json
import re
from importlib.metadata import version

import llguidance
import xgrammar
from outlines_core.json_schema import build_regex_from_schema

for name in ("xgrammar", "llguidance", "outlines-core"):
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


def in_outlines(schema, text):
    try:
        return bool(re.fullmatch(build_regex_from_schema(json.dumps(schema)), text))
    except Exception as error:
        return "refused: " + str(error).splitlines()[0]


FREE, BOUNDED, LONG = {"type": "string"}, {"type": "string", "maxLength": 20}, {"type": "string", "minLength": 1}
PATTERN = {"type": "string", "pattern": r"^[\s\S]+$"}
READERS = (in_xgrammar, in_llguidance, in_outlines)
EXPECTED = {
    r'"a\nb"': ([True, True, True], [False, True, True], [False, True, True], [False, True, True]),
    r'"a\"b"': ([True, True, True], [False, True, True], [False, True, True], [False, True, True]),
    r'"\u00e9"': ([True, False, False], [False, False, False], [False, False, False], [False, False, True]),
    '"é"': ([True, True, True], [True, True, True], [True, True, True], [True, True, True]),
}
failed = 0
for text, expected in EXPECTED.items():
    seen = tuple([read(schema, text) for read in READERS] for schema in (FREE, BOUNDED, LONG, PATTERN))
    print(f"{text:9} free {seen[0]}, maxLength {seen[1]}, minLength {seen[2]}, pattern {seen[3]}")
    failed += seen != expected
assert not failed
PYTHON
