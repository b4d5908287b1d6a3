"""Runs the points of a sweep on a Ray cluster, which schedules them. Ray is imported only on use.

Workers import kvarts and read the trace by its path, so both must exist on every node.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvarts.errors import ConfigError

__all__ = ["results_on_ray"]

Values = dict[str, Any]
REACHED_WITHIN_S = 5.0


def results_on_ray(
    missing: Mapping[str, Values], run: Callable[[Values], Values], address: str
) -> Iterator[tuple[str, Values]]:
    """Yield the key and row of each point as it is done. Raise ConfigError if the cluster is not reachable."""
    try:
        import ray
    except ImportError:
        raise ConfigError("needs ray", field="--ray", hint="pip install 'kvarts[ray]'.") from None
    _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _unreachable(address, what) from error
    try:
        remote = ray.remote(num_cpus=1)(lambda point: run(point))  # noqa: PLW0108  (ray wants a function, not a partial)
        pending = {remote.remote(point): key for key, point in missing.items()}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1)
            yield pending.pop(done[0]), ray.get(done[0])
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ConfigError if nothing answers at host:port. Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACHED_WITHIN_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, str(error)) from error


def _unreachable(address: str, what: str) -> ConfigError:
    return ConfigError(
        f"{address!r} is not a Ray cluster that can be reached: {what}",
        field="--ray",
        hint="Give its address as host:port, or auto.",
    )
