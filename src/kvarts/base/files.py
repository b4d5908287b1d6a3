"""Reading files, and writing result files and directories completely or not at all.

All commands and rooms read and write through this module, which guarantees:

- Only a regular file is replaced, atomically, by a complete new one with the same permissions. Links are followed.
  Devices, pipes and sockets are written to directly. `-` and `/dev/stdout` are standard output.
- A failure to write an output is an OutputError with its path. The old file, or its absence, is preserved.
- A failure to read an input is a MissingFileError or an InputError with its path.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from kvarts.base.errors import ConfigError, InputError, MissingFileError, OutputError, did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "PREFIX",
    "SAMPLES",
    "UNFINISHED",
    "BundledTrace",
    "NumberedFile",
    "check_outputs",
    "check_writable",
    "is_replaceable",
    "is_standard_output",
    "located",
    "make_directory",
    "make_private",
    "new_directory",
    "open_private",
    "open_stream",
    "own_directory",
    "place_of",
    "read_bytes",
    "read_text",
    "read_toml",
    "reading",
    "sample_of",
    "shown",
    "spelled",
    "temporary_file",
    "toml_text",
    "where_samples_are",
    "whole_file",
    "write_all",
    "write_private",
    "write_whole",
    "writing",
]

STANDARD_OUTPUT = 1
MOST_LINKS = 40
DATA_SUFFIXES = (".csv", ".gz", ".json", ".jsonl", ".parquet", ".safetensors", ".toml")
"""Suffixes of the files that are read if a directory is given."""
PREFIX = "sample:"
DATA = f"{os.path.dirname(os.path.dirname(__file__))}/data"  # noqa: PTH120  # pathlib takes longer to import than a short replay
UNFINISHED = ".kvarts-unfinished"
"""Subdirectory that collects the contents of a directory being written. A killed process leaves it behind."""


class BundledTrace:
    """A bundled trace: its file or folder in `data`, a description, and the tokens per hash id if not 512."""

    def __init__(self, file: str, what: str, trace_block_size: int | None = None) -> None:
        self.file = file
        self.what = what
        self.trace_block_size = trace_block_size


SAMPLES = {
    "agents": BundledTrace("coding-agents", "twelve sessions of coding agents from kv-cache-tester (Apache-2.0)"),
    "mooncake": BundledTrace(
        "mooncake-conversation-1000.jsonl", "the first 1,000 requests of Mooncake's conversation trace (Apache-2.0)"
    ),
    "azure-chat": BundledTrace(
        "azure-conv-1000.csv", "the first 1,000 requests of Azure's chat trace of 2023 (CC BY 4.0)"
    ),
    "azure-code": BundledTrace(
        "azure-code-1000.csv", "the first 1,000 requests of Azure's code trace of 2023 (CC BY 4.0)"
    ),
    "vllm-rtx4090": BundledTrace(
        "vllm-rtx4090/prompts.jsonl",
        "the 300 ShareGPT requests of a run of vLLM 0.19.0 on an RTX 4090, from LLMServingSim (MIT)",
        trace_block_size=16,
    ),
}
"""The bundled traces by name; `sample:NAME/FILE` stands for another file of the sample's folder."""


def located(path: Path | str) -> Path:
    """Return the file that `path` stands for: a bundled one for `sample:NAME`, else `path` itself.

    Raise MissingFileError for an unknown sample.
    """
    from pathlib import Path

    return Path(place_of(path))


def place_of(path: Path | str) -> str:
    """Return the file of `located` as text."""
    text = spelled(path)
    if not text.startswith(PREFIX):
        return text
    name, _, inner = text.removeprefix(PREFIX).partition("/")
    sample = SAMPLES.get(name)
    if sample is None:
        names = [PREFIX + each for each in SAMPLES]
        hint = did_you_mean(text, names) or f"Bundled are {', '.join(names)}."
        raise MissingFileError("is not bundled", path=text, hint=hint)
    if not inner:
        return f"{DATA}/{sample.file}"
    from pathlib import Path

    folder = Path(DATA, sample.file.partition("/")[0])
    inside = folder / inner
    if ".." in inside.parts or not inside.is_file():
        files = ", ".join(sorted(f"{PREFIX}{name}/{file.name}" for file in folder.iterdir())) if folder.is_dir() else ""
        raise MissingFileError("is not bundled", path=text, hint=f"Bundled are {files or PREFIX + name}.")
    return str(inside)


def spelled(path: Path | str) -> str:
    """Return a path as `Path` spells it."""
    text = str(path)
    if text and not text.startswith("./") and not text.endswith(("/", "/.")) and "//" not in text and "/./" not in text:
        return text
    from pathlib import Path

    return str(Path(text))


def sample_of(path: Path | str) -> BundledTrace | None:
    """Return the bundled trace that `path` names; None for a user's file."""
    text = str(path)
    return SAMPLES.get(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else None


def where_samples_are(path: Path | str) -> str:
    """Return a hint for a trace that does not exist: the sample of that name, or how to list all samples."""
    name = os.path.basename(path)  # noqa: PTH119
    for known, sample in SAMPLES.items():
        if name in (sample.file, known):
            return f"A trace of that name is bundled: {PREFIX}{known}."
    return "Check the path of the trace; `kvarts trace list` lists the bundled ones."


def shown(path: Path | str) -> str:
    """Return a path as text that any Unicode encoding can represent; bytes that are not UTF-8 become question marks."""
    return os.fsencode(path).decode("utf-8", "replace")


# Reading --------------------------------------------------------------------------------------------------


@contextmanager
def reading(path: Path | str, *, hint: str | None = None) -> Iterator[None]:
    """Add the path to an OSError: raise MissingFileError with `hint` for a missing file, else InputError."""
    try:
        yield
    except FileNotFoundError:
        raise MissingFileError("no such file", path=shown(path), hint=hint) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", path=shown(path)) from error
    except ValueError as error:
        if "null byte" not in str(error):
            raise
        raise InputError("cannot be read: a path has no NUL", path=shown(path).replace("\0", "?")) from None


def read_bytes(path: Path, *, hint: str | None = None) -> bytes:
    """Return the contents of a file or a bundled file. Raise MissingFileError with `hint`, or InputError."""
    with reading(path, hint=hint):
        return located(path).read_bytes()


def read_text(path: Path, *, hint: str) -> str:
    """Return the text of a file. Raise MissingFileError with `hint`, or InputError if it is not text."""
    try:
        # Line ends are normalised, as in Path.read_text.
        return io.TextIOWrapper(io.BytesIO(read_bytes(path, hint=hint)), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise InputError(f"cannot be read: {error}", path=path) from error


def read_toml(path: Path, *, hint: str) -> dict[str, Any]:
    """Return the tables of a TOML file. Raise MissingFileError with `hint`, or InputError for invalid TOML."""
    import tomllib  # imported only when needed

    text = read_text(path, hint=hint)
    try:
        return tomllib.loads(text)
    except ValueError as error:  # a syntax error, or a number with thousands of digits
        raise InputError(f"is no readable TOML: {error}", path=path) from error
    except RecursionError:
        raise InputError("is no readable TOML: it is nested too deeply", path=path) from None


def toml_text(head: Sequence[str], tables: Mapping[str, Any]) -> str:
    """Return tables as TOML, below comment lines; values that are None are left out, as TOML has no null."""
    import tomli_w  # imported only when needed

    comments = ("".join(char if char.isprintable() else "?" for char in line) for line in head)
    return "".join(f"# {line}\n" for line in comments) + tomli_w.dumps(_without_none(tables))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value


# Destinations of results ----------------------------------------------------------------------------------


def _descriptor_of(path: Path) -> int | None:
    """Return the open descriptor that a path such as `-`, /dev/stdout or /dev/fd/3 refers to; None for a file."""
    if str(path) == "-":
        return STANDARD_OUTPUT
    own = f"/proc/{os.getpid()}/fd"
    for _ in range(MOST_LINKS):
        parent = os.path.realpath(path.parent)
        if parent in (own, "/dev/fd") and re.fullmatch("[0-9]{1,9}", path.name):
            return int(path.name)
        if not path.is_symlink():
            break
        path = type(path)(parent, path.readlink())
    return None


def is_standard_output(path: Path | None) -> bool:
    """Return whether a result is written to standard output, which must then contain nothing else."""
    if path is None:
        return False
    with writing(path):
        return _descriptor_of(path) == STANDARD_OUTPUT


def is_replaceable(path: Path) -> bool:
    """Return whether a result is a regular file, which may be written again, rather than a device or pipe."""
    with writing(path):
        return _descriptor_of(path) is None and (_mode_of(path) is None or path.is_file())


def _mode_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode  # noqa: PTH116  # follows links, as Path.stat does, and is faulted in tests
    except FileNotFoundError:
        return None


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Convert an OSError to an OutputError with the path."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", path=shown(path)) from error
    except ValueError as error:
        if "null byte" not in str(error):
            raise
        raise OutputError("cannot be written: a path has no NUL", path=shown(path).replace("\0", "?")) from None


def check_writable(path: Path) -> None:
    """Raise OutputError for a path that cannot be written to. To be called before any work is done."""
    with writing(path):
        descriptor = _descriptor_of(path)
        if descriptor is not None:
            os.fstat(descriptor)
            return
        target = type(path)(os.path.realpath(path))
        if not target.parent.is_dir():
            raise OutputError(
                f"there is no directory {shown(target.parent)}", path=shown(path), hint="Create it first."
            )
        mode = _mode_of(target)
        if mode is not None and stat.S_ISDIR(mode):
            raise OutputError("is a directory", path=shown(path), hint="Give the path of a file.")
        if mode is not None and not os.access(target, os.W_OK):
            raise OutputError("is write-protected", path=shown(path))
        if mode is not None and not stat.S_ISREG(mode):
            return
        if not os.access(target.parent, os.W_OK):
            raise OutputError(f"the directory {shown(target.parent)} cannot be written to", path=shown(path))


def check_outputs(outputs: Iterable[Path], inputs: Iterable[Path] = (), *, run_dir: Path | None = None) -> None:
    """Raise ConfigError for outputs that would overwrite inputs, each other, or files in `run_dir`.

    Files are compared by identity, not by name. A directory among `inputs` stands for the data files in it.
    """
    taken: dict[object, str] = {}
    for path in inputs:
        for file in _files_of(path):
            for key in _keys_of(file):
                taken.setdefault(key, f"is an input of this command: {shown(file)}")
    for path in outputs:
        with writing(path):
            keys = _keys_of(path)
            inside = (
                run_dir is not None
                and type(path)(os.path.realpath(run_dir)) in type(path)(os.path.realpath(path)).parents
            )
        if inside:
            raise ConfigError(
                f"lies in the directory of the run, {run_dir}", path=shown(path), hint="Give another path."
            )
        for key in keys:
            if key in taken:
                raise ConfigError(taken[key], path=shown(path), hint="Give another path.")
        taken.update(dict.fromkeys(keys, f"is another output of this command: {shown(path)}"))


def _files_of(path: Path) -> Iterator[Path]:
    yield path
    with suppress(OSError, ValueError):
        if path.is_dir():
            yield from (file for file in path.iterdir() if file.name.endswith(DATA_SUFFIXES))


def _keys_of(path: Path) -> list[object]:
    """Return the identities of a file; empty for a device, which may have several users."""
    try:
        descriptor = _descriptor_of(path)
        if descriptor is not None:
            return [descriptor]
        found = path.stat()
    except (OSError, ValueError):
        return [os.path.realpath(path).replace("\0", "")] if "\0" not in str(path) else []
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        return []
    return [(found.st_dev, found.st_ino), os.path.realpath(path)]


# Writing --------------------------------------------------------------------------------------------------


class NumberedFile(io.FileIO):
    """A file by its descriptor, which it closes. `path`: its errors are OutputErrors that name it.

    It is written and closed by functions of `os`, in which tests cause faults.
    """

    def __init__(self, number: int, mode: str = "wb", *, path: Path | str | None = None) -> None:
        super().__init__(number, mode, closefd=False)
        self._path = path

    def write(self, data: Any) -> int:
        """Write some of `data`, as FileIO does. Raise OutputError, or OSError without a path."""
        if self._path is None:
            return os.write(self.fileno(), data)
        with writing(self._path):
            return os.write(self.fileno(), data)

    def close(self) -> None:
        """Close the file and its descriptor. Raise OutputError, or OSError without a path."""
        if self.closed:
            return
        number = self.fileno()
        super().close()
        if self._path is None:
            os.close(number)
            return
        with writing(self._path):
            os.close(number)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for a result that replaces `path` on success, as described above. Raise OutputError.

    If anything fails, `path` is unchanged.
    """
    with writing(path):
        descriptor = _descriptor_of(path)
        target = type(path)(os.path.realpath(path))
        mode = _mode_of(target) if descriptor is None else None
    if descriptor is not None or (mode is not None and not stat.S_ISREG(mode)):
        with _spooled(path, lambda: _open_special(target, descriptor, mode)) as file:
            yield file
        return
    from kvarts.base.leftovers import create, remove_leftovers

    remove_leftovers(os.path.dirname(target))  # noqa: PTH120
    # Hidden, and short even if the file's own name is long.
    temporary = target.with_name(f".kvarts-{os.urandom(8).hex()}")
    is_left = True  # set before the file exists, since a signal may arrive right after its creation
    try:
        with writing(path):
            number = create(temporary)
        file = io.BufferedWriter(NumberedFile(number, path=path), 1 << 16)
        try:
            yield file
            with writing(path):
                file.flush()
                if mode is not None:
                    os.fchmod(number, stat.S_IMODE(mode))
            file.close()  # a disk in a network may refuse what was written only now
        finally:
            # Data that could not be flushed is discarded with the file.
            with suppress(OSError, OutputError):
                file.close()
        with writing(path):
            os.replace(temporary, target)  # noqa: PTH105
        is_left = False
    finally:
        if is_left:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108


@contextmanager
def _spooled(path: Path, open_target: Callable[[], IO[bytes]]) -> Iterator[IO[bytes]]:
    """Collect the output, and pass it on once it is complete."""
    with temporary_file() as spool:
        yield spool
        with writing(path):
            spool.seek(0)
            target = open_target()
            try:
                while block := spool.read(1 << 20):
                    write_all(target, block)
                target.flush()
            finally:
                if target is not sys.stdout.buffer:
                    target.close()


def temporary_file() -> IO[bytes]:
    """Return a file without a name, which is gone when it is closed. Its errors are OutputErrors with its folder."""
    import tempfile  # importing it takes longer than a small replay

    with writing("temporary files"):
        folder = tempfile.gettempdir()
    with writing(folder), tempfile.TemporaryFile(buffering=0) as made:
        return io.BufferedRandom(NumberedFile(os.dup(made.fileno()), "r+b", path=folder))


def make_directory(path: Path) -> None:
    """Make a directory with its parents, if it does not exist. Raise OutputError."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def _open_special(target: Path, descriptor: int | None, mode: int | None) -> IO[bytes]:
    if descriptor == STANDARD_OUTPUT:
        return sys.stdout.buffer
    if descriptor is not None:
        return os.fdopen(os.dup(descriptor), "wb", buffering=0)
    if mode is not None and stat.S_ISSOCK(mode):
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(target))
            made: Any = connection.makefile("wb", buffering=0)
            opened: IO[bytes] = made
            return opened
    return os.fdopen(os.open(target, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC), "wb", buffering=0)


def open_stream(path: Path) -> IO[bytes]:
    """Open a device, a pipe or a socket, unbuffered, for incremental output. Raise OutputError."""
    with writing(path):
        descriptor = _descriptor_of(path)
        if descriptor is not None:
            return os.fdopen(os.dup(descriptor), "wb", buffering=0)
        return _open_special(path, None, _mode_of(path))


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` through `whole_file`."""
    with whole_file(path) as file:
        file.write(data)


def write_all(file: IO[bytes], data: bytes) -> None:
    """Write all of `data` to an unbuffered file, which may accept less per call."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


@contextmanager
def own_directory(path: Path) -> Iterator[None]:
    """Lock a directory for this process, creating it if needed. Raise OutputError if another process holds it."""
    with writing(path):
        path.mkdir(exist_ok=True)
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with writing(path):
            _lock(number, path)
        yield
    finally:
        _unlock(number)


@contextmanager
def new_directory(path: Path, *, last: str) -> Iterator[Path]:
    """Lock a new or empty directory for this process; yield a folder for its contents.

    On success, the contents are moved to the directory, `last` as the very last. If anything fails, the directory is
    restored. Raise OutputError if it is not empty, or is held by another process.
    """
    with writing(path):
        is_new = not path.exists()
        path.mkdir(exist_ok=True)
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    folder = path / UNFINISHED
    is_taken = False
    names: set[str] = set()
    moved: list[str] = []
    try:
        with writing(path):
            _lock(number, path)
            is_taken = True
            names = {file.name for file in path.iterdir()}
            if names - {UNFINISHED}:
                is_new = False
                raise OutputError(
                    "is not empty", path=shown(path), hint="Give a new directory, so that two runs are never mixed."
                )
            if names:
                _remove_tree(folder)
            folder.mkdir()
        yield folder
        with writing(path):
            for name in sorted((file.name for file in folder.iterdir()), key=lambda name: (name == last, name)):
                moved.append(name)  # recorded before the rename, since a signal may arrive right after it
                os.rename(folder / name, path / name)  # noqa: PTH104
            folder.rmdir()
    except BaseException:
        if is_taken:
            for name in moved:
                _remove_tree(path / name)
            if names <= {UNFINISHED}:
                _remove_tree(folder)
            if is_new:
                with suppress(OSError):
                    path.rmdir()
        raise
    finally:
        _unlock(number)


def make_private(directory: Path, is_ours: Callable[[str], bool]) -> None:
    """Create a directory that only this user can read, with its parents. Raise OSError.

    An existing directory loses the permissions of others if this user owns it and `is_ours` holds for every name in it,
    since then it serves only this purpose. Files in other directories are protected by their own modes.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        found = directory.stat()
        is_shared = found.st_mode & 0o1077
        if found.st_uid == os.geteuid() and is_shared and all(is_ours(path.name) for path in directory.iterdir()):
            directory.chmod(0o700)


def open_private(path: Path, flags: int) -> int:
    """Open a regular file that only this user can read, created if `flags` ask for it; return its descriptor.

    Raise OSError for a symbolic link, a file with several names, or one of another user: someone else could have
    planted it.
    """
    number = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid not in (os.geteuid(), 0):
            raise OSError(errno.EPERM, "not a file of this user alone")
        if found.st_mode & 0o077:
            os.fchmod(number, 0o600)
    except BaseException:
        os.close(number)
        raise
    return number


def write_private(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Replace a file that only this user can read, or create it. It is on disk on return. Raise OSError.

    A killed process leaves `.STEM.tmp` behind, which the next call removes.
    """
    temporary = path.with_name(f".{path.stem}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with io.BufferedWriter(NumberedFile(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    number = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)  # its name
    finally:
        os.close(number)


def _lock(number: int, path: Path) -> None:
    """Lock an open directory until it is closed. File systems without locks are accepted."""
    import fcntl

    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError("is being written by another process", path=shown(path)) from None
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK):
            raise
    if not os.path.samestat(os.fstat(number), os.stat(path)):  # noqa: PTH116
        raise OutputError("is being written by another process", path=shown(path))


def _unlock(number: int) -> None:
    """Close a directory that `_lock` has locked. Nothing is lost if that fails."""
    with suppress(OSError):
        os.close(number)


def _remove_tree(path: Path) -> None:
    """Remove a file or directory made by this module, as far as possible."""
    import shutil  # needed only after failures

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
