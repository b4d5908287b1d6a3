"""Which reader a trace is for."""

from __future__ import annotations

from pathlib import Path

from kvarts.errors import ConfigError
from kvarts.files import reading
from kvarts.traffic.mooncake import load_mooncake
from kvarts.traffic.trace import Trace

__all__ = ["load_trace"]

HEAD_BYTES = 1 << 16


def load_trace(path: Path | str, *, trace_block_size: int | None = None, skip_bad_lines: bool = False) -> Trace:
    """Read a trace of any form that is known, by its name.

    .csv: Azure's traces of 2023. .json, .json.gz, or a directory of these: sessions of kv-cache-tester. All else:
    Mooncake's JSON lines, also in a .json that has them. Raise MissingFileError, or InputError with file and place.

    `trace_block_size`: tokens a hash id stands for, 512 unless given; Mooncake's form only.
    `skip_bad_lines`: leave out and count lines that cannot be read; not for kv-cache-tester's form, which has none.
    """
    path = Path(path)
    if path.suffix == ".csv":
        from kvarts.traffic.azure import load_azure

        if trace_block_size is not None:
            raise ConfigError("is given, and the trace has no hash ids", path=path, field="trace_block_size")
        return load_azure(path, skip_bad_lines=skip_bad_lines)
    if not _is_kv_cache_tester(path):
        return load_mooncake(path, trace_block_size=trace_block_size or 512, skip_bad_lines=skip_bad_lines)
    from kvarts.traffic.kv_cache_tester import load_kv_cache_tester

    if trace_block_size is not None:
        raise ConfigError(
            "is given, and the trace says it itself", path=path, field="trace_block_size", hint="Leave it out."
        )
    if skip_bad_lines:
        raise ConfigError(
            "a session without one of its turns is another session",
            path=path,
            field="skip_bad_lines",
            hint="Leave it out, and mend or remove the file.",
        )
    return load_kv_cache_tester(path)


def _is_kv_cache_tester(path: Path) -> bool:
    """Return whether this is a directory, or a JSON file that does not begin with a row of Mooncake's."""
    with reading(path):
        if path.name.endswith(".json.gz") or path.is_dir():
            return True
    if path.suffix != ".json":
        return False
    if path.is_fifo():
        return False  # what is read here would be lost
    try:
        with path.open("rb") as file:
            return b'"input_length"' not in file.read(HEAD_BYTES)
    except OSError:
        return True  # and the reader says what is wrong
