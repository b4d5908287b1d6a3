#!/usr/bin/env bash
# SGLang 0.5.23: --num-continuous-decode-steps and two other options of its server are read by no code.
#
# Guess: num-continuous-decode-steps 8 computes 8 steps of decodes before prompts are looked at, as its help says, at
#   the price of the time to first token.
# Seen: the name is in the list of fields and in their order, and nowhere else in the package; so are
#   triton_attention_reduce_in_fp32 and spec_trace_dir. scheduler_recv_interval, which is read, is the one that lets
#   steps of decodes pass before requests are received.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-deps sglang==0.5.23

"$folder/venv/bin/python" - <<'PYTHON'
import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

print("sglang", version("sglang"))
package = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
texts = {str(path): path.read_text("latin-1") for path in files}


def places(option):
    word = re.compile(rf"\b{option}\b")
    return {name.rsplit("srt/", 1)[-1]: len(word.findall(text)) for name, text in texts.items() if option in text}


for option, group in (
    ("num_continuous_decode_steps", "schedule"),
    ("triton_attention_reduce_in_fp32", "exec_"),
    ("spec_trace_dir", "spec"),
):
    found = places(option)
    print(option, found)
    assert found == {"arg_groups/field_order.py": 1, f"arg_groups/fields/{group}.py": 1}, found
read = places("scheduler_recv_interval")
print("scheduler_recv_interval", read)
assert any("recv_skipper" in name for name in read)
PYTHON
