"""Which reader a trace is for."""

from __future__ import annotations

from pathlib import Path

from kvarts.errors import ConfigError
from kvarts.traffic.mooncake import load_mooncake
from kvarts.traffic.trace import Trace

__all__ = ["load_trace"]


def load_trace(path: Path | str, *, trace_block_size: int | None = None, skip_bad_lines: bool = False) -> Trace:
    """Reads a .csv of Azure's 2023 traces, or else Mooncake's JSON lines; see the readers for what they raise.

    `trace_block_size`: tokens a hash id stands for, 512 unless given; a .csv has none.
    """
    path = Path(path)
    if path.suffix != ".csv":
        return load_mooncake(path, trace_block_size=trace_block_size or 512, skip_bad_lines=skip_bad_lines)
    from kvarts.traffic.azure import load_azure

    if trace_block_size is not None:
        raise ConfigError("is given, and the trace has no hash ids", path=path, field="trace_block_size")
    return load_azure(path, skip_bad_lines=skip_bad_lines)
