"""Generate the stubs of `src/kvarts/doors/proto` from its `.proto` files. Needs grpcio-tools in the version that `dev`
pins.

    python scripts/generate_protos.py

Generated modules import each other below `kvarts.doors.proto`, so that no package of ours is called `kakeya`.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "kvarts" / "doors" / "proto"
IMPORT = re.compile(r"^from (kakeya|kvarts)\.v1 import ", re.MULTILINE)


def generated() -> dict[Path, str]:
    """Return the text of each generated file, by its path relative to `src/kvarts/doors/proto`."""
    from grpc_tools import protoc  # type: ignore[import-untyped]

    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi")]
        code = protoc.main(["protoc", f"--proto_path={ROOT}", *outputs, *sources])
        if code != 0:
            sys.exit(code)
        written = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {
            path.relative_to(folder): IMPORT.sub(r"from kvarts.doors.proto.\1.v1 import ", path.read_text())
            for path in written
        }


if __name__ == "__main__":
    for path, text in generated().items():
        (ROOT / path).write_text(text)
        sys.stderr.write(f"{ROOT / path}\n")
