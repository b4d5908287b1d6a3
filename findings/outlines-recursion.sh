#!/usr/bin/env bash
# outlines-core: a recursive schema is cut without a word, and a "." in a pattern ends the string.
#
# Guess, worded afterwards: a schema that refers to itself cannot be a regular expression, so it is refused; and
#   whatever the expression of a schema accepts is JSON.
# Seen: it is accepted, and trees of more than 3 levels cannot be written. The pattern ^a.c$ accepts "a"c", which is
#   not JSON: its dot is not kept off the quote.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" outlines-core==0.2.14

"$folder/venv/bin/python" - <<'PYTHON'
import json
import re
from importlib.metadata import version

from outlines_core.json_schema import build_regex_from_schema

print("outlines-core", version("outlines-core"))
NODE = {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "required": ["c"]}
tree = re.compile(build_regex_from_schema(json.dumps({"$defs": {"n": NODE}, "$ref": "#/$defs/n"})))
texts = ['{"c": []}']
for _ in range(5):
    texts.append('{"c": [%s]}' % texts[-1])
depths = [depth for depth, text in enumerate(texts) if tree.fullmatch(text)]
print("trees that a recursive schema accepts, by the number of levels below the first:", depths)
assert depths == [0, 1, 2]

pattern = re.compile(build_regex_from_schema(json.dumps({"type": "string", "pattern": "^a.c$"})))
print("pattern ^a.c$ accepts", [text for text in ('"abc"', '"a"c"') if pattern.fullmatch(text)])
assert pattern.fullmatch('"a"c"')
PYTHON
