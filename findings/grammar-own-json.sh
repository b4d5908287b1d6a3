#!/usr/bin/env bash
# A pydantic model's own JSON is refused by the grammar of the model's own schema.
#
# Guess, worded afterwards: what model_dump_json writes is accepted by a grammar made from model_json_schema, in
#   xgrammar, llguidance and outlines-core; formats that they do not know are any string.
# Seen: a time or datetime without a zone, a duration of 400 days, and floats near 0 that must be above 0 are accepted
#   by neither xgrammar nor llguidance. llguidance refuses schemas with sets or paths, xgrammar's grammar refuses keys
#   that have a pattern, outlines-core a datetime with a zone other than Z.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" \
  xgrammar==0.2.9 llguidance==1.9.1 outlines-core==0.2.14 pydantic==2.13.5

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import datetime
import json
import pathlib
import re
from importlib.metadata import version
from typing import Annotated

import llguidance
import xgrammar
from outlines_core.json_schema import build_regex_from_schema
from pydantic import Field, StringConstraints, create_model

for name in ("xgrammar", "llguidance", "outlines-core", "pydantic"):
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


YES, NO, REFUSED = True, False, "refused"
EAST = datetime.timezone(datetime.timedelta(hours=2))
ROWS = (
    ("datetime without zone", datetime.datetime, datetime.datetime(2026, 2, 28, 23), [NO, NO, YES]),
    ("datetime in UTC", datetime.datetime, datetime.datetime(2026, 2, 28, 23, tzinfo=datetime.UTC), [YES, YES, YES]),
    ("datetime in +02:00", datetime.datetime, datetime.datetime(2026, 2, 28, 23, tzinfo=EAST), [YES, YES, NO]),
    ("time", datetime.time, datetime.time(12, 30), [NO, NO, YES]),
    ("90 minutes", datetime.timedelta, datetime.timedelta(minutes=90), [YES, YES, REFUSED]),
    ("400 days", datetime.timedelta, datetime.timedelta(days=400), [NO, NO, REFUSED]),
    ("float", float, 1e-7, [YES, YES, YES]),
    ("float above 0", Annotated[float, Field(gt=0)], 1e-7, [NO, NO, YES]),
    ("set", set[int], {1, 2}, [YES, REFUSED, YES]),
    ("path", pathlib.Path, "/srv/a", [YES, REFUSED, REFUSED]),
    ("keys with a pattern", dict[Annotated[str, StringConstraints(pattern="^x")], int], {"x1": 1}, [NO, YES, YES]),
)
failed = 0
for label, kind, value, expected in ROWS:
    model = create_model("Model", v=(kind, ...))
    text, schema = model(v=value).model_dump_json(), model.model_json_schema()
    model.model_validate_json(text)
    seen = [read(schema, text) for read in (in_xgrammar, in_llguidance, in_outlines)]
    print(f"{label:22} {text:38} {seen}")
    failed += [REFUSED if isinstance(answer, str) else answer for answer in seen] != expected
assert not failed
PYTHON
