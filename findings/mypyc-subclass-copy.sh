#!/usr/bin/env bash
# A copy of an object whose base class is compiled with mypyc loses what its own class, which is not compiled, adds.
#
# Guess: allow_interpreted_subclasses makes a compiled class a base class like any other: copy, deepcopy and pickle give
#   the same object.
# Seen: the base class brings a __getstate__ that lists its own attributes, so a copy has those and nothing else: no
#   error when it is made, an AttributeError when it is used. An engine that copies a user's eviction order for each
#   worker works from its sources and fails from its wheel.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mypy==2.4.0 setuptools==80.9.0

cd "$folder"
cat > bases.py <<'PYTHON'
from mypy_extensions import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Order:
    def __init__(self) -> None:
        self.runs: list[int] = []
PYTHON
cat > seen.py <<'PYTHON'
import copy
import pickle
import sys
from importlib.metadata import version

import bases


class Mine(bases.Order):
    def __init__(self, depth):
        super().__init__()
        self.depth = depth


made = Mine(3)
ways = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda each: pickle.loads(pickle.dumps(each))}
seen = {name: [hasattr(way(made), field) for field in ("runs", "depth")] for name, way in ways.items()}
kind = "compiled" if bases.__file__.endswith(".so") else "interpreted"
print(f"mypy {version('mypy')}, base class {kind}: [has runs, has depth] after", seen)
assert (kind, list(seen.values())) == (sys.argv[1], [[True, sys.argv[1] == "interpreted"]] * 3)
PYTHON
"$folder/venv/bin/python" seen.py interpreted
"$folder/venv/bin/mypyc" bases.py > /dev/null
"$folder/venv/bin/python" seen.py compiled
