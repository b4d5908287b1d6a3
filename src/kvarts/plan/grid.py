"""Runs the points of a grid in processes. A killed sweep can be resumed: no point runs twice.

The journal has one line per finished point, in order of completion; a point whose line is incomplete or has changed
is run again. The table has one row per point, in the order of the points, so it does not depend on the number of
processes or restarts.

On a Ray cluster, workers import kvarts and read the trace by its path, so both must exist on every node. Ray, and what
starts processes, is imported only on use.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec

from kvarts.base.errors import ConfigError, InputError, OutputError
from kvarts.base.files import reading
from kvarts.base.growing import GrowingFile
from kvarts.base.limits import whole_number
from kvarts.base.processes import Processes
from kvarts.base.user_code import name_apart
from kvarts.sim.traffic.settings import READING

if TYPE_CHECKING:
    from kvarts.base.settings import Section

__all__ = [
    "Row",
    "UserCode",
    "Values",
    "fronts",
    "load_of",
    "pareto",
    "points_of",
    "results_on_ray",
    "run_sweep",
    "with_changes",
]

LOAD = ("trace", *READING, "workload", "speedup", "concurrency")

MOST_POINTS = 100_000

Values = dict[str, Any]
"""Settings by their keys, nested as in a file."""
Row = dict[str, Any]
REACHED_WITHIN_S = 5.0


def points_of(values: Values, path: Path | None) -> list[Values]:
    """Return the changes of each point, by dotted keys: the product of `[grid]`, then each of `[[points]]`.

    Removes both from `values`. Raise InputError, with `path` if given, if they are malformed.
    """
    grid, points = values.pop("grid", {}), values.pop("points", [])
    if not isinstance(grid, dict) or not isinstance(points, list) or not all(isinstance(p, dict) for p in points):
        raise InputError("[grid] is a table of lists, and each of [[points]] a table", path=path)
    lists = _dotted(grid)
    for key, choices in lists.items():
        if not isinstance(choices, list) or not choices:
            raise InputError("must be a list with at least one value", path=path, field=f"grid.{key}")
    num_points = (prod(map(len, lists.values())) if lists else 0) + len(points)
    if num_points > MOST_POINTS:  # checked before any point is built
        raise InputError(
            f"has {num_points:,} points, and {MOST_POINTS:,} are run at most",
            path=path,
            field="grid",
            hint="Take fewer values, or several files.",
        )
    product = [dict(zip(lists, chosen, strict=True)) for chosen in itertools.product(*lists.values())] if lists else []
    found = product + [_dotted(point) for point in points]
    if not found:
        raise InputError("has no points", path=path, hint="Give a table [grid] of lists, or tables [[points]].")
    return found


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any], sections: Sequence[Section] = ()) -> Values:
    """Return a copy of `values` with `changes`, by dotted keys, applied.

    `sections`: the lists of tables that may lack names of their own.
    """
    changed: Values = json.loads(json.dumps(values))
    names_of = {section.table: section.name_of for section in sections if section.name_of is not None}
    for key, value in changes.items():
        *tables, name = key.split(".")
        table: Any = changed
        for inner in tables:
            if isinstance(table, list):
                table = _named(table, inner, key, names_of.get(tables[0]))
            else:
                table = table.setdefault(inner, {})
        table[name] = value
    return changed


def _named(tables: list[Any], name: str, key: str, name_of: Callable[[Values], str] | None) -> Values:
    """Return the table with a name of a list, such as `[[tier]]`. Raise ConfigError without one."""
    known = {}
    for table in tables:
        if isinstance(table, dict):
            known[table.get("name", "" if name_of is None else name_of(table))] = table
    if name in known:
        found: Values = known[name]
        return found
    hint = f"There are: {', '.join(map(str, filter(None, known)))}." if any(known) else "Give the table a name."
    raise ConfigError(f"has no table with the name {name!r} in its list", field=key, hint=hint)


def run_sweep(
    points: Sequence[Values],
    run: Callable[[Values], Row],
    journal: Path,
    *,
    workers: int,
    ray_address: str | None = None,
    on_done: Callable[[int, int], object] | None = None,
) -> list[Row]:
    """Run every point that is missing from `journal`, and return one row per point, in order.

    `run` must be importable by other processes. `ray_address`: a Ray cluster that runs the points instead. `on_done`
    receives the number of finished points and the total.
    """
    keys = [_key(point) for point in points]
    done = _read(journal)
    missing = {key: point for key, point in zip(keys, points, strict=True) if key not in done}

    def tell() -> None:
        if on_done is not None:
            on_done(len(set(keys) & done.keys()), len(set(keys)))

    tell()
    with GrowingFile(journal, keeps=True) as file:
        if not _ends_whole(journal):
            file.write(b"\n")
        for key, row in _results(missing, run, workers, ray_address):
            done[key] = row
            file.write(_line(key, row))
            file.sync()
            tell()
    return [done[key] for key in keys]


def _results(
    missing: Mapping[str, Values], run: Callable[[Values], Row], workers: int, ray_address: str | None
) -> Iterator[tuple[str, Row]]:
    if ray_address is not None and missing:
        yield from results_on_ray(missing, run, ray_address)
        return
    with Processes(max(1, min(workers, len(missing))), run) as processes:
        yield from processes.results(_called, missing)


def _called(run: Callable[[Values], Row], point: Values) -> Row:
    return run(point)


def pareto(rows: Sequence[Row], smaller: Sequence[str], larger: Sequence[str] = ()) -> list[bool]:
    """Return, per row, whether it is on the Pareto front: no other row is as good in all columns and better in one.

    A row with a missing value in one of the columns is not on the front.
    """
    costs = [
        None
        if any(row[name] is None for name in (*smaller, *larger))
        else (*(row[name] for name in smaller), *(-row[name] for name in larger))
        for row in rows
    ]
    known = [cost for cost in costs if cost is not None]
    return [
        cost is not None
        and not any(other != cost and all(a <= b for a, b in zip(other, cost, strict=True)) for other in known)
        for cost in costs
    ]


def fronts(
    rows: Sequence[Row], changes: Sequence[Values], smaller: Sequence[str], larger: Sequence[str] = ()
) -> list[Row]:
    """Return the rows with `pareto`, membership in the front of the points with the same load, and `same_as`.

    Points with different loads do not compete: half the rate has lower latencies on any memory. `changes`: the settings
    that each point changes. `same_as`: the index of an earlier point of the load with equal values in all other
    columns, or None; a point with `same_as` is not on the front.
    """
    by_load: dict[str, list[int]] = {}
    for place, changed in enumerate(changes):
        by_load.setdefault(_key({key: changed[key] for key in load_of(changed)}), []).append(place)
    on_front = [False] * len(rows)
    same_as: list[int | None] = [None] * len(rows)
    for places in by_load.values():
        first: dict[str, int] = {}
        for place in places:
            measured = {key: value for key, value in rows[place].items() if key not in changes[place]}
            earlier = first.setdefault(_key(measured), place)
            same_as[place] = None if earlier == place else earlier
        for place, is_on in zip(places, pareto([rows[place] for place in places], smaller, larger), strict=True):
            on_front[place] = is_on and same_as[place] is None
    return [{**row, "pareto": is_on, "same_as": same} for row, is_on, same in zip(rows, on_front, same_as, strict=True)]


def load_of(changed: Iterable[str]) -> list[str]:
    """Return the settings among `changed` that define the load: the requests, and when they arrive."""
    return [key for key in changed if key.partition(".")[0] in LOAD]


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Values:
    found: Values = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _dotted(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _key(point: Values) -> str:
    from hashlib import sha256

    text = json.dumps(point, sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()


class _Line(msgspec.Struct):
    """A finished point. `checksum`: of its key and its row, as JSON."""

    key: str
    row: msgspec.Raw
    checksum: int


def _checksum(key: str, row: bytes) -> int:
    return crc32(row, crc32(key.encode()))


def _line(key: str, row: Row) -> bytes:
    text = json.dumps(row).encode()
    return msgspec.json.encode(_Line(key, msgspec.Raw(text), _checksum(key, text))) + b"\n"


def _read(journal: Path) -> dict[str, Row]:
    """Return the finished points. Lines that are not as they were written are skipped."""
    try:
        lines = journal.read_bytes().split(b"\n")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=journal) from error
    found = {}
    for line in lines:
        try:
            read = msgspec.json.decode(line, type=_Line)
            row = bytes(read.row)
            if read.checksum == _checksum(read.key, row):
                found[read.key] = msgspec.json.decode(row, type=Row)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return found


def _ends_whole(journal: Path) -> bool:
    """Return whether the last line has an end, or there is none."""
    with reading(journal), journal.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")


def results_on_ray(
    missing: Mapping[str, Values], run: Callable[[Values], Values], address: str
) -> Iterator[tuple[str, Values]]:
    """Yield the key and row of each point as it is done.

    Raise ConfigError if the cluster is not reachable, OutputError if a worker ends, again and again, before its point.
    """
    try:
        import ray
        from ray.exceptions import RayError, RayTaskError
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
    except RayTaskError:
        raise  # the error of a point, which it is an instance of
    except RayError as error:
        # Ray has run the point again, three times, on other workers.
        raise OutputError(
            f"a worker of the Ray cluster has ended before its point was done: {type(error).__name__}",
            hint="Run the same command again: points that are done are kept. Its workers may lack memory.",
        ) from error
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ConfigError if nothing answers at host:port. Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or whole_number(port) is None:
        return
    from socket import create_connection

    try:
        create_connection((host, int(port)), timeout=REACHED_WITHIN_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, str(error)) from error


def _unreachable(address: str, what: str) -> ConfigError:
    return ConfigError(
        f"{address!r} is not a Ray cluster that can be reached: {what}",
        field="--ray",
        hint="Give its address as host:port, or auto.",
    )


# Code of a user ---------------------------------------------------------------------------------------------------

FIELDS = ("admission", "cost", "eviction", "router")
"""Settings that take a class or an object where they take a name."""


class UserCode:
    """Owner of the classes and objects of one grid. `objects`: by their names in rows, which kvarts does not use."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def named(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of a sweep, with a name in place of each class and object."""
        found = self._table(config)
        if isinstance(found.get("grid"), Mapping):
            grid = found["grid"]
            found["grid"] = {
                key: [self._name(key, each) for each in choices] if isinstance(choices, list | tuple) else choices
                for key, choices in grid.items()
            }
        if isinstance(found.get("points"), list | tuple):
            found["points"] = [self._table(each) if isinstance(each, Mapping) else each for each in found["points"]]
        return found

    def used_by(self, values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return the names that `values` use, by setting, each with a digest that changes with the code."""
        return {
            key: (values[key], _digest(self.objects[values[key]]))
            for key in FIELDS
            if isinstance(values.get(key), str) and values[key] in self.objects
        }

    def check_sendable(self, workers: int) -> None:
        """Raise ConfigError for what cannot be sent to the processes of a sweep, if there are several."""
        for name, made in self.objects.items() if workers > 1 else ():
            try:
                pickle.dumps(made)
            except Exception as error:
                raise ConfigError(
                    f"{name} cannot be sent to other processes: {error}",
                    field="workers",
                    hint="Define it at the top of a module, or give workers=1.",
                ) from error

    def _table(self, table: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._name(key, value) for key, value in table.items()}

    def _name(self, key: str, value: Any) -> Any:
        is_code = key in FIELDS and (key == "admission" or not isinstance(value, str | Mapping))
        if not is_code:
            return value
        for name, known in self.objects.items():
            if known is value:
                return name
        own = value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)
        name = name_apart(own, {*self.objects, *_names_of_kvarts()})
        self.objects[name] = value
        return name


def _names_of_kvarts() -> set[str]:
    """Return the names that a grid may have without code of a user."""
    from kvarts.sim.eviction import ALL_POLICIES  # most grids have names alone
    from kvarts.sim.routers.policies import POLICIES

    return {*ALL_POLICIES, *POLICIES, "polynomial"}


def _digest(made: Any) -> str:
    """Return a digest of the source of a class or a function, and of the state of an object."""
    from hashlib import sha256

    kind = made if hasattr(made, "__qualname__") else type(made)
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        source = kind.__qualname__
    try:
        state = pickle.dumps(made)
    except Exception:
        state = repr(made).encode()
    return sha256(source.encode() + state).hexdigest()
