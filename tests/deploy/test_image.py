"""The image is built and started: by buildah, above this machine's own Python, since no registry need be in reach."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
OF_WHEELS = (
    "libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6", "libutil.so.1", "libresolv.so.2", "libnss_dns.so.2",
    "libnss_files.so.2", "libstdc++.so.6", "libgcc_s.so.1",
)  # fmt: skip
"""What wheels for manylinux may be linked to."""
BASE, IMAGE = "localhost/kvarts-test-python", "localhost/kvarts-test"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("buildah") is None or os.geteuid() != 0, reason="needs buildah, and root"),
]


def buildah(*words: str | Path, check: bool = True) -> str:
    env = os.environ | {"BUILDAH_ISOLATION": "chroot"}  # namespaces may be forbidden here
    done = subprocess.run(
        ["buildah", *map(str, words)], check=False, capture_output=True, text=True, env=env, timeout=600
    )
    assert done.returncode == 0 or not check, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


def libraries_of(programs: list[Path]) -> set[Path]:
    done = subprocess.run(["ldd", *programs], check=False, capture_output=True, text=True)
    return {Path(path) for path in re.findall(r"(/\S+\.so[.\d]*) ?\(", done.stdout)}


def put(path: Path, root: Path, at: Path | None = None) -> None:
    to = root / (path if at is None else at).relative_to("/")
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, to)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image of this Python with pip, a shell, and their shared libraries."""
    root, prefix = tmp_path_factory.mktemp("root"), Path(sys.base_prefix)
    python = Path(f"python{sys.version_info.major}.{sys.version_info.minor}")
    leave_out = shutil.ignore_patterns("__pycache__", "test", "tests", "site-packages", "*.a", "idlelib", "tkinter")
    library = prefix / "lib" / python
    shutil.copytree(library, root / library.relative_to("/"), ignore=leave_out)
    binary = (prefix / "bin" / python).resolve()
    put(binary, root, Path("/usr/bin/python3"))
    put(Path("/bin/sh"), root)
    put(Path(shutil.which("rm") or "/bin/rm"), root, Path("/bin/rm"))
    put(BUNDLE, root)
    linked = libraries_of([binary, Path("/bin/sh"), Path("/bin/rm"), *library.glob("lib-dynload/*.so")])
    (libc,) = (path for path in linked if path.name == "libc.so.6")
    for path in linked | {libc.parent / name for name in OF_WHEELS}:
        put(path, root)
    (root / "tmp").mkdir(mode=0o1777)
    container = buildah("from", "scratch")
    try:
        buildah("add", "-q", container, root, "/")
        buildah("config", "--env", f"PYTHONHOME={prefix}", "--env", f"PIP_CERT={BUNDLE}", container)
        buildah("config", "--env", f"PATH={prefix}/bin:/usr/local/bin:/usr/bin:/bin", container)
        buildah("run", container, "--", "python3", "-m", "ensurepip", "--default-pip")
        buildah("commit", "-q", container, BASE)
    finally:
        buildah("rm", container)
    yield BASE
    buildah("rmi", "-f", BASE, check=False)


@pytest.fixture(scope="module")
def image(base: str) -> Iterator[str]:
    """The image of deploy/Containerfile."""
    buildah("build", "-q", "--build-arg", f"PYTHON={base}", "-f", ROOT / "deploy" / "Containerfile", "-t", IMAGE, ROOT)
    yield IMAGE
    buildah("rmi", "-f", IMAGE, check=False)


def test_a_mock_answers_from_the_image_without_rights_and_ends_on_sigterm(image: str) -> None:
    container = buildah("from", "--pull-never", image)
    env = os.environ | {"BUILDAH_ISOLATION": "chroot"}
    command = ["buildah", "run", container, "--", "kvarts", "mock", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stderr is not None
        found, said = None, ""
        while found is None and (line := process.stderr.readline()):
            said += line
            found = re.search(r"http://[\d.:]+", line)
        assert found is not None, said
        body = b'{"prompt": "hello", "max_tokens": 2}'
        request = urllib.request.Request(
            f"{found[0]}/v1/completions", body, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 200 and b'"completion_tokens":2' in answer.read()
        (pid,) = [pid for pid in pids_under(process.pid) if not pids_under(pid)]
        assert b"kvarts" in words_of(pid) and owner_of(pid) == 65532
        os.kill(pid, 15)
        deadline = time.monotonic() + 20
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
        buildah("rm", container)


def pids_under(parent: int) -> list[int]:
    """The processes below a process."""
    below = [pid for task in Path(f"/proc/{parent}/task").iterdir() for pid in (task / "children").read_text().split()]
    return [pid for each in map(int, below) for pid in (each, *pids_under(each))]


def words_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def owner_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid
