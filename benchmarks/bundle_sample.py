"""Make src/kvarts/data/coding-agents from a checkout of kv-cache-tester: `python benchmarks/bundle_sample.py DIR`.

DIR is the folder `traces` of https://github.com/callanjfox/kv-cache-tester with the public files trace_0002.json and so
on, and the LICENSE is in it or one level up. Unpacked, each file is the public file, byte for byte.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

SESSIONS = ("0002", "0011", "0015", "0016", "0019", "0021", "0028", "0044", "0068", "0085", "0099", "0100")
"""Twelve sessions of 12 to 66 requests that last from 8 to 52 minutes, with prompts of at most 118,755 tokens."""
DATA = Path(__file__).parents[1] / "src" / "kvarts" / "data"


def main(source: Path) -> None:
    target = DATA / "coding-agents"
    target.mkdir(exist_ok=True)
    for name in SESSIONS:
        data = (source / f"trace_{name}.json").read_bytes()
        # Without a time in the head, the same input gives the same bytes.
        (target / f"trace_{name}.json.gz").write_bytes(gzip.compress(data, mtime=0))
    licence = next(place / "LICENSE" for place in (source, source.parent) if (place / "LICENSE").exists())
    (DATA / "LICENSE-kv-cache-tester").write_bytes(licence.read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
