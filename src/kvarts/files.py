"""Reading text files, and writing result files whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvarts.errors import InputError, MissingFileError, OutputError

__all__ = ["check_writable", "read_text", "read_toml", "whole_file", "write_whole"]


def check_writable(path: Path) -> None:
    """Refuse a path that cannot become a file, before any work is done. Raise OutputError."""
    if path.is_dir():
        raise OutputError("is a directory", path=path, hint="Give the path of a file.")
    parent = path.parent
    if not parent.is_dir():
        raise OutputError(f"there is no directory {parent}", path=path, hint="Create it first.")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"the directory {parent} cannot be written to", path=path)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file beside `path` and move it there on success. Raise OutputError; `path` is then unchanged."""
    import tempfile  # takes longer to import than a small replay

    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            yield file
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
        temporary = None
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", path=path) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` through `whole_file`."""
    with whole_file(path) as file:
        file.write(data)


def read_text(path: Path, *, hint: str) -> str:
    """Return the text of a file. Raise MissingFileError with `hint`, or InputError for a file that is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingFileError("no such file", path=path, hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", path=path) from error


def read_toml(path: Path, *, hint: str) -> dict[str, Any]:
    """Return the tables of a TOML file. Raise MissingFileError with `hint`, or InputError for invalid TOML."""
    import tomllib  # imported only if such a file is given

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError("no such file", path=path, hint=hint) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"is no readable TOML: {error}", path=path) from error
