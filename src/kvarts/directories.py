"""Output directories, written completely or not at all and by one process at a time; also private files."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvarts.errors import OutputError
from kvarts.files import shown, writing

__all__ = ["UNFINISHED", "make_private", "new_directory", "open_private", "own_directory"]

UNFINISHED = ".kvarts-unfinished"
"""Subdirectory that collects the contents of a directory being written. A killed process leaves it behind."""


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
        os.close(number)


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
        os.close(number)


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


def _lock(number: int, path: Path) -> None:
    """Lock an open directory until it is closed. File systems without locks are accepted."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError("is being written by another process", path=shown(path)) from None
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK):
            raise
    if not os.path.samestat(os.fstat(number), os.stat(path)):  # noqa: PTH116
        raise OutputError("is being written by another process", path=shown(path))


def _remove_tree(path: Path) -> None:
    """Remove a file or directory made by this module, as far as possible."""
    import shutil  # needed only after failures

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
