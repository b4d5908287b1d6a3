"""What a file system does stays with the files: an engine goes on, and what is on disk is counted."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random

import pytest

from kvarts.base.errors import ConfigError, OutputError
from kvarts.core.tiers.opening import prepare_tiers
from kvarts.core.tiers.pagefiles import MOST_KEY_BYTES, PageFiles, file_bytes

from builders.faults import without_inodes
from builders.serving import serve
from builders.tiered_toy import TieredToy, busy, check_outputs
from builders.tiers import offloader_of

SIZE = file_bytes(32, 100)


def key(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def fill(directory: Path, count: int) -> PageFiles:
    files = PageFiles(directory, max_bytes=1 << 20)
    for number in range(count):
        assert files.write(key(number), bytes(100))
    return files


def test_what_is_no_file_is_no_page(tmp_path: Path) -> None:
    """A link to a whole page is not followed, and a pipe that nobody writes does not block."""
    files = fill(tmp_path / "pages", 3)
    paths = [next((tmp_path / "pages").rglob(f"*{key(number).hex()[4:]}*")) for number in range(3)]
    moved = tmp_path / "elsewhere"
    paths[0].rename(moved)
    paths[0].symlink_to(moved)
    paths[1].unlink()
    os.mkfifo(paths[1])
    assert files.read(key(0)) is None
    assert files.read(key(1)) is None
    assert files.read(key(2)) == bytes(100)


def bytes_in(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())


def read_only(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is mounted read-only; permissions do not stop every user."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr("kvarts.core.tiers.pagefiles.write_whole", refuse)


def full(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    undo = monkeypatch.undo

    def restore() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        undo()

    monkeypatch.undo = restore  # type: ignore[method-assign]


def no_inodes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_inodes(monkeypatch)


def directory_in_place_of_files(directory: Path, _: pytest.MonkeyPatch) -> None:
    for path in [*directory.glob("*/*.kv")]:
        path.unlink()
        path.mkdir()
        (path / "inside").write_text("x")


def file_in_place_of_directories(directory: Path, _: pytest.MonkeyPatch) -> None:
    for path in [*directory.glob("*")]:
        shutil.rmtree(path)
        path.write_text("x")


def removed(directory: Path, _: pytest.MonkeyPatch) -> None:
    shutil.rmtree(directory)


def links_to_nowhere(directory: Path, _: pytest.MonkeyPatch) -> None:
    for path in [*directory.glob("*/*.kv")]:
        path.unlink()
        path.symlink_to(directory / "nowhere")


Edge = Callable[[Path, pytest.MonkeyPatch], None]
EDGES: list[Edge] = [
    read_only,
    full,
    no_inodes,
    directory_in_place_of_files,
    file_in_place_of_directories,
    removed,
    links_to_nowhere,
]


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """Undo what was patched before other fixtures clean up after themselves."""
    monkeypatch = pytest.MonkeyPatch()
    yield monkeypatch
    monkeypatch.undo()


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.__name__)
def test_no_edge_of_the_file_system_is_raised(tmp_path: Path, patch: pytest.MonkeyPatch, edge: Edge) -> None:
    files = fill(tmp_path / "pages", 5)
    edge(tmp_path / "pages", patch)
    try:
        for number in range(10):
            files.read(key(number))
            files.write(key(number), bytes(100))
            files.delete(key(number))
            files.delete(key(number))
    finally:
        patch.undo()
    assert 0 <= files.num_bytes <= 5 * SIZE
    if edge in (read_only, full, directory_in_place_of_files, file_in_place_of_directories):
        assert files.num_errors > 0


@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.__name__)
def test_an_engine_goes_on_whatever_becomes_of_its_files(
    tmp_path: Path, patch: pytest.MonkeyPatch, edge: Edge, policy: str
) -> None:
    arrivals, config, offload = busy(policy, disk_pages=5)
    files = PageFiles(tmp_path / "pages", max_bytes=1 << 20)
    num_steps = 0

    def interfere(step: int) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 20:
            edge(tmp_path / "pages", patch)

    try:
        check_outputs(arrivals, config, offload, Random(1), files=files, interfere=interfere)
    finally:
        patch.undo()
    assert num_steps > 20


def test_a_file_that_cannot_be_deleted_takes_room_and_is_no_page(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    files = fill(tmp_path, 2)
    read_only(tmp_path, patch)
    files.delete(key(0))
    patch.undo()
    assert (files.num_errors, files.num_bytes) == (1, 2 * SIZE)
    assert files.keys() == [key(1)]
    files.delete(key(0))
    assert files.num_bytes == SIZE == bytes_in(tmp_path)


def test_unfinished_files_are_found_and_removed(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    name = key(7).hex()
    for suffix in ("abc", "def"):
        path = tmp_path / name[:2] / f".kvarts-{suffix}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1000))
    (tmp_path / name[:2] / "of something else.kv").write_bytes(bytes(10))
    files = PageFiles(tmp_path, max_bytes=1 << 20)
    assert files.num_unfinished == 2
    assert sorted(files.keys()) == sorted(map(key, range(3)))
    assert files.num_bytes == 3 * SIZE == bytes_in(tmp_path) - 10


def test_unfinished_files_that_cannot_be_removed_are_counted(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    name = key(7).hex()
    (tmp_path / name[:2]).mkdir()
    (tmp_path / name[:2] / ".kvarts-abc").write_bytes(bytes(1000))
    read_only(tmp_path, patch)
    files = PageFiles(tmp_path, max_bytes=1 << 20)
    assert (files.num_unfinished, files.num_errors, files.num_bytes) == (1, 1, 1000)


def test_a_smaller_limit_evicts_the_oldest_down_to_it(tmp_path: Path) -> None:
    fill(tmp_path, 10)
    for number in range(10):
        name = key(number).hex()
        os.utime(tmp_path / name[:2] / f"{name}.kv", (number, number))
    files = PageFiles(tmp_path, max_bytes=4 * SIZE)
    assert files.keys() == [key(6), key(7), key(8), key(9)]
    assert bytes_in(tmp_path) == files.num_bytes == 4 * SIZE


@pytest.mark.parametrize("knows_keys", [True, False])
def test_a_smaller_limit_stores_again(tmp_path: Path, knows_keys: bool) -> None:
    """A directory that is full of pages of an earlier run makes way for new ones, whether a tier knows them or not."""
    arrivals, config, offload = busy(disk_pages=64)
    check_outputs(arrivals, config, offload, Random(1), files=PageFiles(tmp_path, max_bytes=1 << 20))
    size = file_bytes(32, 2 * config.page_size * 8)
    files = PageFiles(tmp_path, max_bytes=6 * size)
    before = set(files.directory.glob("*/*.kv"))
    assert len(before) == 6
    arrivals, config, offload = busy(disk_pages=6)
    other = [replace(a, prompt=[token + 7 for token in a.prompt]) for a in arrivals]
    executor = TieredToy(config, offload, Random(2), files)
    tiers = partial(prepare_tiers, offload, known_keys=files.keys() if knows_keys else (), namespace="toy")
    serve(other, config, executor, tiers=tiers)
    assert set(files.directory.glob("*/*.kv")) - before
    assert bytes_in(tmp_path) == files.num_bytes <= 6 * size


def test_a_file_in_place_of_the_directory_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    path.write_text("x")
    with pytest.raises(OutputError, match="cannot hold pages") as caught:
        PageFiles(path, max_bytes=1000)
    assert caught.value.path == path


def test_two_engines_without_a_namespace_read_none_of_each_others_pages(tmp_path: Path) -> None:
    """What one model computed is not what another would: without a name, pages are of the engine that wrote them."""
    arrivals, config, offload = busy(disk_pages=64)
    for index in range(2):
        files = PageFiles(tmp_path, max_bytes=1 << 20)
        executor = TieredToy(config, offload, Random(index), files)
        executor.fails = 0.0
        tiers = partial(prepare_tiers, offload, known_keys=files.keys())
        engine, _, _ = serve(arrivals[:1], config, executor, tiers=tiers)
        assert offloader_of(engine).counts.num_loads == 0
    assert len(files.keys()) > 0


WRITER = """
import sys
from hashlib import blake2b
from kvarts.core.tiers.pagefiles import PageFiles
files = PageFiles(sys.argv[1], max_bytes=40_000_000)
for number in range(10**9):
    key = blake2b(number.to_bytes(8, "little"), digest_size=32).digest()
    files.write(key, bytes(200_000))
    if number == 3:
        print("begun", flush=True)
    if number >= 30:
        files.delete(blake2b((number - 30).to_bytes(8, "little"), digest_size=32).digest())
"""


def kill_while_writing(directory: Path, rng: Random) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        time.sleep(rng.random() / 20)
        writer.send_signal(signal.SIGKILL)


def check_killed(directory: Path, num_kills: int) -> int:
    """Kill a writer again and again; return how many unfinished files were found after it."""
    rng = Random(3)
    num_unfinished = 0
    for _ in range(num_kills):
        kill_while_writing(directory, rng)
        files = PageFiles(directory, max_bytes=40_000_000)
        num_unfinished += files.num_unfinished
        assert not list(directory.glob("*/.*"))
        assert files.num_bytes == bytes_in(directory) <= 40_000_000
        for found in list(files.keys()):
            payload = files.read(found)
            assert payload is not None, "a page is written whole or not at all"
            assert len(payload) == 200_000
    return num_unfinished


def test_a_writer_that_was_killed_leaves_whole_pages(tmp_path: Path) -> None:
    check_killed(tmp_path, 2)


@pytest.mark.long
def test_a_writer_that_was_killed_fifty_times_leaves_whole_pages(tmp_path: Path) -> None:
    assert check_killed(tmp_path, 50) > 0


SHARING = """
import sys, time
from hashlib import blake2b
from kvarts.core.tiers.pagefiles import PageFiles
directory, seed, until = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
number = num_read = 0
while time.monotonic() < until:
    files = PageFiles(directory, max_bytes=1_000_000)  # begins again and again, next to the writes of the other
    for _ in range(60):
        number += 1
        payload = bytes([seed]) * 20_000
        key = blake2b(b"%d %d" % (seed, number), digest_size=32).digest()
        files.write(key, payload)
        for each in files.keys()[-3:]:
            found = files.read(each)
            num_read += found is not None
            assert found is None or (len(found) == 20_000 and len(set(found)) == 1), "a page of neither"
        if number % 3 == 0:
            files.delete(key)
    assert files.num_errors == 0, files.num_errors
print(num_read)
"""


@pytest.mark.slow
@pytest.mark.parametrize("duration_s", [0.5, pytest.param(10.0, marks=pytest.mark.long)])
def test_two_engines_at_once_in_one_directory_read_whole_pages_and_lose_no_write(
    duration_s: float, tmp_path: Path
) -> None:
    """Each counts only what it writes. Neither takes a file for a leftover that the other is writing."""
    command = [sys.executable, "-c", SHARING, str(tmp_path)]
    engines = [
        subprocess.Popen([*command, str(seed), str(duration_s)], stdout=subprocess.PIPE, text=True) for seed in (1, 2)
    ]
    for engine in engines:
        out, _ = engine.communicate(timeout=60)
        assert engine.returncode == 0 and int(out) > 0
    assert not list(tmp_path.glob("*/.*"))


@pytest.mark.parametrize("num_bytes", [1, 20, 32, 36, MOST_KEY_BYTES])
def test_keys_of_other_engines_are_pages_also_after_a_restart(tmp_path: Path, num_bytes: int) -> None:
    name = bytes(range(num_bytes))
    files = PageFiles(tmp_path, max_bytes=1000)
    assert files.write(name, b"payload") and files.read(name) == b"payload"
    again = PageFiles(tmp_path, max_bytes=1000)
    assert again.keys() == [name] and again.read(name) == b"payload"
    assert again.num_bytes == file_bytes(num_bytes, 7)
    again.delete(name)
    assert again.num_bytes == 0 and not list(tmp_path.glob("??/*"))


@pytest.mark.parametrize("num_bytes", [0, MOST_KEY_BYTES + 1])
def test_keys_of_other_lengths_are_refused(tmp_path: Path, num_bytes: int) -> None:
    files = PageFiles(tmp_path, max_bytes=1000)
    with pytest.raises(ConfigError, match="must have 1 to 64 bytes"):
        files.write(bytes(num_bytes), b"payload")
    with pytest.raises(ConfigError, match="must have 1 to 64 bytes"):
        files.read(bytes(num_bytes))
