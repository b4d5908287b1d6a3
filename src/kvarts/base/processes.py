"""Processes that do tasks of one kind, such as replays of one trace. The results do not depend on their number.

A task is a call of a function of a module, given a value that all tasks share, which each process gets once, and a
value of its own. Processes are spawned, never forked: they import what they need, also the caller's script, so more
than one requires a script that can be imported. They end with the process that started them, however it ends.

Tasks of a search depend on the results of earlier ones. `Processes.searched` runs such a search as it is written, and
does the tasks that it may ask for next meanwhile. It foretells these by running the search on assumed results.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from heapq import heappop, heappush
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvarts.base.errors import ConfigError, KvartsError, OutputError
from kvarts.base.limits import MOST_WORKERS, check_number

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor
    from multiprocessing.connection import Connection

__all__ = ["Inquiry", "Processes", "likely", "num_cores"]

# Modules of processes are imported on use: most work is done before another process would have begun.

PAYS_S = 1.0
"""The time of tasks in this process after which others are started, unless a number was given. Starting them takes some
tenths of a second."""
COLLECT_S = 0.5
"""The time of tasks in this process after which their engines are collected."""
LOOKS_PER_WORKER = 16
"""Runs of a search on assumed results, per process, to foretell its next tasks. A run takes far less than a task, and
many find tasks that are needed whatever the results of the next ones."""

Case = TypeVar("Case", bound=Hashable)
Found = TypeVar("Found")
Run = Callable[[Any, Any], Any]
"""A task: a function of a module, of the shared value and the task's own."""


def num_cores() -> int:
    """Return the number of cores that this process may use, as far as they can be used."""
    num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, num)


class Inquiry(Generic[Case]):
    """Answers with the results of cases. `found`: those that were asked for, to which `look` adds new ones."""

    def __init__(self, look: Callable[[Sequence[Case]], Sequence[Any]], found: dict[Case, Any] | None = None) -> None:
        self._look = look
        self.found: dict[Case, Any] = {} if found is None else found

    def __call__(self, case: Case) -> Any:
        """Return the result of a case."""
        return self.all([case])[0]

    def all(self, cases: Sequence[Case]) -> list[Any]:
        """Return the results of several cases, of which none depends on another."""
        new = [case for case in dict.fromkeys(cases) if case not in self.found]
        if new:
            self.found.update(zip(new, self._look(new), strict=True))
        return [self.found[case] for case in cases]

    def __contains__(self, case: object) -> bool:
        return case in self.found


Search = Callable[[Inquiry[Case]], Found]
"""Asks for the results of cases, and depends on nothing else."""
Guess = Callable[[Case, Mapping[Case, Any]], Sequence[tuple[float, Any]]]
"""Returns the results that a case may have, each with its chance, given those of other cases: as many for each case."""


class _UnknownError(Exception):
    """A search has asked for cases without a result, known or assumed."""

    def __init__(self, cases: Sequence[Any]) -> None:
        super().__init__(cases)
        self.cases = cases


def likely(
    search: Search[Case, Any],
    known: Mapping[Case, Any],
    guess: Guess[Case],
    most_looks: int,
    found: Mapping[Case, Any] | None = None,
) -> list[Case]:
    """Return the cases that `search` may ask for next, the likeliest first, given the results of those `known`.

    `found`: results that were asked for before the search. It is run at most `most_looks` times.
    """
    shares: dict[Case, float] = {}
    num_paths = 1
    paths: list[tuple[float, int, dict[Case, Any]]] = [(-1.0, 0, {})]
    for _ in range(most_looks):
        if not paths:
            break
        share, _, assumed = heappop(paths)
        try:
            search(Inquiry(partial(_assumed, known, assumed), dict(found or {})))
        except _UnknownError as unknown:
            new: Sequence[Case] = unknown.cases
        else:
            continue  # the search would end
        for case in new:
            shares[case] = shares.get(case, 0.0) - share
        results = {**known, **assumed}
        for branch in zip(*(guess(case, results) for case in new), strict=True):
            chance = sum(each for each, _ in branch) / len(new)
            more = dict(zip(new, (result for _, result in branch), strict=True))
            heappush(paths, (share * chance, num_paths, {**assumed, **more}))
            num_paths += 1
    return sorted(shares, key=lambda case: -shares[case])


def _assumed(known: Mapping[Case, Any], assumed: Mapping[Case, Any], cases: Sequence[Case]) -> list[Any]:
    unknown = [case for case in cases if case not in known and case not in assumed]
    if unknown:
        raise _UnknownError(unknown)
    return [known[case] if case in known else assumed[case] for case in cases]


class Processes:
    """Processes that do tasks, `num_workers` at a time; with one, tasks run in this process.

    `num_workers`: None: as many as there are cores, as soon as tasks have taken long enough here to make up for the
    start of processes. `shared`: the value that all tasks get.
    """

    def __init__(self, num_workers: int | None = 1, shared: Any = None) -> None:
        self._is_asked = num_workers is not None
        self._num_workers = num_cores() if num_workers is None else num_workers
        check_number(self._num_workers, "workers", least=1, most=MOST_WORKERS)
        self._shared = shared
        self._spent_s = self._collected_s = 0.0
        self._pool: ProcessPoolExecutor | None = None
        self._lifelines: tuple[Connection, Connection] | None = None

    def results(self, run: Run, tasks: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the key and result of each task as it is done.

        Raise the error of a task; ConfigError if a task cannot be handed to a process, OutputError if one has ended.
        """
        left = iter(tasks.items())
        for key, task in left:
            if self._is_worth_it and len(tasks) > 1 and self._can_go(run, list(tasks.values())):
                futures = {self._submitted(run, task): key}
                futures |= {self._submitted(run, task): key for key, task in left}
                yield from self._as_done(futures)
            else:
                yield key, self._done_here(run, task)

    def in_order(self, run: Run, tasks: Sequence[Any]) -> Iterator[Any]:
        """Yield the results of tasks, in their order; errors are those of `results`."""
        found: dict[str, Any] = {}
        num_yielded = 0
        for key, result in self.results(run, {str(place): task for place, task in enumerate(tasks)}):
            found[key] = result
            while (next_key := str(num_yielded)) in found:
                num_yielded += 1
                yield found.pop(next_key)

    def all(self, run: Run, tasks: Sequence[Any]) -> list[Any]:
        """Return the results of tasks, in their order; errors are those of `results`."""
        return list(self.in_order(run, tasks))

    def searched(
        self,
        search: Search[Case, Found],
        run: Run,
        task_of: Callable[[Case], Any],
        guess: Guess[Case],
        *,
        found: dict[Case, Any],
        on_ask: Callable[[], object] | None = None,
    ) -> Found:
        """Return the result of `search`, which asks for the results of `run` for the tasks of cases.

        `found`: the results that were asked for before; new ones are added. `on_ask` is called for each of these.
        Tasks that are done for nothing, because `search` never asks for them, have no effect, nor have their errors.
        """
        before = dict(found)
        known = dict(found)
        under_way: dict[Case, Future[Any]] = {}

        def foresee() -> None:
            num_free = self._num_workers - sum(not future.done() for future in under_way.values())
            if num_free < 1:
                return
            for case in likely(search, known, guess, LOOKS_PER_WORKER * self._num_workers, before):
                if num_free and case not in under_way:
                    num_free -= 1
                    with suppress(KvartsError):  # raised if the case is asked for
                        under_way[case] = self._submitted(run, task_of(case))

        def look(cases: Sequence[Case]) -> list[Any]:
            for _ in cases:
                if on_ask is not None:
                    on_ask()
            while missing := [case for case in cases if case not in known]:
                if not (self._is_worth_it and self._can_go(run, [task_of(case) for case in missing])):
                    known[missing[0]] = self._done_here(run, task_of(missing[0]))
                    continue
                for case in missing:
                    if case not in under_way:
                        under_way[case] = self._submitted(run, task_of(case))
                foresee()
                if _has_failed(under_way[missing[0]]):
                    self._result(under_way[missing[0]])  # raises
                self._wait(under_way.values())
                for case, future in list(under_way.items()):
                    if future.done() and not _has_failed(future):
                        known[case] = under_way.pop(case).result()
            return [known[case] for case in cases]

        return search(Inquiry(look, found))

    # Tasks ----------------------------------------------------------------------------------------------------

    @property
    def _is_worth_it(self) -> bool:
        """Whether tasks go to other processes from now on."""
        return self._num_workers > 1 and (self._is_asked or self._spent_s >= PAYS_S)

    def _can_go(self, run: Run, tasks: Sequence[Any]) -> bool:
        """Return whether tasks can be handed to other processes; if not, and none were asked for, all stay here."""
        if self._pool is None and not self._is_asked:
            try:
                _packed((run, tasks)), _packed(self._shared)
            except ConfigError:
                self._num_workers = 1
        return self._num_workers > 1

    def _done_here(self, run: Run, task: Any) -> Any:
        begun_s = perf_counter()
        try:
            return run(self._shared, task)
        finally:
            self._spent_s += perf_counter() - begun_s
            if self._spent_s - self._collected_s > COLLECT_S:
                self._collected_s = self._spent_s
                gc.collect()  # as in other processes; commands turn the collector off

    def _submitted(self, run: Run, task: Any) -> Future[Any]:
        from concurrent.futures.process import BrokenProcessPool

        call = _packed((run, task))
        with _interrupts_blocked():
            if self._pool is None:
                self._pool = self._open()
            try:
                return self._pool.submit(_do, call)
            except BrokenProcessPool:
                raise _ended() from None

    def _open(self) -> ProcessPoolExecutor:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        context = get_context("spawn")
        shared = _packed(self._shared)
        self._lifelines = context.Pipe(duplex=False)
        return ProcessPoolExecutor(
            self._num_workers, mp_context=context, initializer=_begin, initargs=(self._lifelines[0], shared)
        )

    def _as_done(self, keys: Mapping[Future[Any], str]) -> Iterator[tuple[str, Any]]:
        """Yield the key and result of each task as it is done. Of several errors, raise that of the earliest task."""
        from concurrent.futures import as_completed

        order = list(keys)
        failed: Future[Any] | None = None
        for future in as_completed(keys):
            if not future.cancelled() and not _has_failed(future):
                yield keys[future], future.result()
            if failed is None and not future.cancelled() and _has_failed(future):
                failed = future
                place = order.index(future)
                for other in order[place:]:
                    other.cancel()
                del order[place + 1 :]
            if failed is not None and all(other.done() for other in order):
                self._result(next(filter(_has_failed, order)))  # raises

    def _wait(self, futures: Iterable[Future[Any]]) -> None:
        """Wait until one of `futures` is done that was not."""
        from concurrent.futures import FIRST_COMPLETED, wait

        wait([future for future in futures if not future.done()], return_when=FIRST_COMPLETED)

    def _result(self, future: Future[Any]) -> Any:
        from concurrent.futures.process import BrokenProcessPool

        try:
            return future.result()
        except BrokenProcessPool:
            raise _ended() from None

    # The end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all processes, also those with a task under way."""
        if self._lifelines is not None:
            for end in self._lifelines:
                end.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = self._lifelines = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _has_failed(future: Future[Any]) -> bool:
    return future.done() and future.exception() is not None


def _packed(value: Any) -> bytes:
    import pickle

    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"other processes cannot get a part of the settings: {error}",
            field="workers",
            hint="Use classes and functions that can be imported, or one worker.",
        ) from error


def _ended() -> OutputError:
    return OutputError(
        "a worker process has ended before its task was done",
        hint="Run the same command again, with fewer workers if memory ran out.",
    )


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes that SIGINT does not reach: a terminal sends it to all of them, and this one ends the others."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the other processes -------------------------------------------------------------------------------------------

_shared: list[Any] = []


def _begin(lifeline: Connection, shared: bytes) -> None:
    """Begin as a worker, which ends as soon as its parent ends, or closes its end of `lifeline`."""
    import pickle
    from multiprocessing import connection, parent_process
    from threading import Thread

    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel, lifeline])
        os._exit(1)

    Thread(target=watch, daemon=True).start()
    _shared.append(pickle.loads(shared))
    gc.freeze()


def _do(call: bytes) -> Any:
    import pickle

    run, task = pickle.loads(call)
    gc.collect()  # an engine refers to itself, and its few large arrays do not make the collector run
    return run(_shared[0], task)
