"""The loop that owns an LLMEngine and serves every thread and every stream.

The engine is used by one thread at a time. Requests of other threads are tasks in a queue, which the thread that has
the engine runs between steps. A request either has a listener, which receives its text and its end, or its completion
is stored for the next manual call of `step`. While there are listeners, a thread of the loop runs the steps; it exits
soon after the last of them ends, so an idle loop holds no thread and needs no closing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Condition, Lock, Thread
from typing import Any, TypeVar

from kvarts.base.clock import Clock
from kvarts.base.errors import KvartsError, with_type
from kvarts.core.config import EngineConfig
from kvarts.core.engine import Engine
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.sampling import SamplingParams
from kvarts.run.llm_engine import EngineDeadError, Gone, Held, Listener, LLMEngine, RequestFailedError
from kvarts.run.page_bytes import PageBytes, PageSlots
from kvarts.run.text import Completion, Generation

__all__ = ["EngineLoop", "ModelHost"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

LINGER_S = 0.02
"""How long an idle loop's thread waits for another task, since starting a thread takes longer than most tasks."""
Prompt = tuple[Sequence[int], SamplingParams]


class EngineLoop:
    """Owner of an LLMEngine. Every method may be called from any thread.

    An error in a step is raised in every waiting caller and closes the loop: from then on every call raises
    EngineDeadError. A user's error, such as a prompt that is too long, is raised in its caller only, like any error in
    the text, the sampling or the listener of one request.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._lock = Lock()
        self._has_task = Condition(self._lock)
        """Guards `_tasks` and `_is_taken`; held only briefly, never during a step."""
        self._tasks: deque[_Task] = deque()
        self._is_taken = False
        """Whether a thread has the engine. The fields below belong to that thread."""
        self._listeners: dict[int, Listener] = {}
        self._unclaimed: list[Completion] = []
        self._error: BaseException | None = None
        self.held: list[Held] = []
        """Buffers held while listeners receive a step, so that the reading thread does not compete with this one."""

    # Manual -----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute or return anything."""
        return bool(self._unclaimed) or (self._error is None and self._engine.has_work)

    @property
    def is_alive(self) -> bool:
        """Whether no step has failed so far."""
        return self._error is None

    def submit(self, tokens: Sequence[int], params: SamplingParams, *, priority: int = 0) -> int:
        """Queue a prompt, and return its index."""
        return self.call(lambda engine: engine.submit(tokens, params, priority=priority))

    def step(self) -> list[Completion]:
        """Run one step. Return the requests of `submit` that have ended since the last call."""

        def step(engine: LLMEngine) -> list[Completion]:
            if engine.has_work:
                self._step()
            unclaimed, self._unclaimed = self._unclaimed, []
            return unclaimed

        return self.call(step)

    def generation(self, index: int) -> Generation | None:
        """Return an active request; None if the index is not active."""
        return self._engine.generation(index)

    def cancel(self, index: int) -> Completion | None:
        """End a request between steps, and return its completion; None if it has ended."""
        return self.call(lambda _: self._cancel(index))

    def call(self, task: Callable[[LLMEngine], T]) -> T:
        """Run `task` between steps, and return its result. Runs it in this thread unless another has the engine."""
        future: Future[T] = Future()
        self._post([_Task(task, future)], in_thread=False)
        return future.result()

    # Requests with a listener ------------------------------------------------------------------------------

    def start(self, begin: Callable[[LLMEngine], int | None], listener: Listener) -> None:
        """Have `begin` start a request between steps; `listener` receives its progress.

        `begin` returns the index of the request, or None if it started none. The listener also receives exceptions from
        `begin`, except Gone.
        """
        self.start_all([(begin, listener)])

    def start_all(self, begun: Sequence[tuple[Callable[[LLMEngine], int | None], Listener]]) -> None:
        """Start several requests as `start` does, all of them before the next step."""
        self._post([_Task(partial(self._start, *each), _Failures(each[1])) for each in begun], in_thread=True)

    def _start(self, begin: Callable[[LLMEngine], int | None], listener: Listener, engine: LLMEngine) -> None:
        with suppress(Gone):
            index = begin(engine)
            if index is not None:
                self._listeners[index] = listener

    def end(self, index: int) -> None:
        """End a request now, and notify its listener. For tasks, which have the engine."""
        self._cancel(index)

    def post(self, task: Callable[[LLMEngine], T]) -> Future[T]:
        """Have `task` run between steps, and return at once a future for its result."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # the task runs even if the caller stops waiting
        self._post([_Task(task, future)], in_thread=True)
        return future

    def wait_for_task(self, timeout_s: float) -> bool:
        """Wait until a task is queued, at most for `timeout_s`; return whether one is. For the thread with the engine.

        An engine that waits here, instead of sleeping through its step, lets tasks run in the middle of it.
        """
        with self._lock:
            return self._has_task.wait_for(lambda: bool(self._tasks), max(0.0, timeout_s))

    # Requests of waiting callers --------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Run prompts until all have ended, and return their completions in the order of the prompts.

        If one of them cannot run, none does.
        """
        listeners = [_Waiter() for _ in prompts]
        indices: list[int] = []

        def submit(engine: LLMEngine) -> None:
            try:
                for tokens, params in prompts:
                    indices.append(engine.submit(tokens, params))  # recorded one by one, to cancel them on an error
            except KvartsError:
                for index in indices:
                    engine.cancel(index)
                indices.clear()
                raise
            self._listeners.update(zip(indices, listeners, strict=True))

        try:
            self.call(submit)
            return [listener.future.result() for listener in listeners]
        except BaseException:
            # An interrupt must leave no request behind. The submission may still be queued, and precedes this task.
            with suppress(EngineDeadError):
                self.call(lambda _: [self._cancel(index) for index in indices])
            raise

    async def stream(
        self, tokens: Sequence[int], params: SamplingParams, *, priority: int = 0
    ) -> AsyncGenerator[str, None]:
        """Yield the text of one prompt as it is generated. Closing the generator cancels the request."""
        listener = _StreamListener(asyncio.get_running_loop())

        def submit(engine: LLMEngine) -> None:
            listener.index = engine.submit(tokens, params, priority=priority)
            self._listeners[listener.index] = listener

        def cancel(_: LLMEngine) -> None:
            # The submission precedes this task in the same queue.
            if listener.index is not None:
                self._cancel(listener.index)

        self._post([_Task(submit, listener)], in_thread=True)
        try:
            while not listener.is_done:
                if text := await listener.next_text():
                    yield text
        finally:
            if not listener.is_done:
                self._post([_Task(cancel, listener)], in_thread=True)
                with suppress(Exception):  # the request is cancelled, so its errors do not matter
                    while not listener.is_done:
                        await listener.next_text()

    # The thread that has the engine -----------------------------------------------------------------------

    def _post(self, tasks: Sequence[_Task], *, in_thread: bool) -> None:
        """Have tasks run by the thread that has the engine, or else by this or a new thread."""
        with self._lock:
            self._tasks.extend(tasks)
            if self._is_taken:
                self._has_task.notify()
                return
            self._is_taken = True
        try:
            if in_thread or self._run_tasks():
                Thread(target=self._serve, name="kvarts-engine-loop").start()
        except BaseException as error:  # an interrupt, or no more threads
            self._abandon(error)
            raise

    def _serve(self) -> None:
        """Run tasks and steps as long as there are any."""
        try:
            while self._run_tasks(wait_s=LINGER_S):
                self._step()
        except BaseException as error:  # raised in every waiting caller
            self._abandon(error)

    def _run_tasks(self, wait_s: float = 0.0) -> bool:
        """Run the queued tasks. Return whether there are listeners; if not, release the engine.

        `wait_s`: how long to wait for more tasks before that.
        """
        while True:
            with self._lock:
                if wait_s and not self._tasks and not self._listeners:
                    self._has_task.wait(wait_s)
                if not self._tasks and not self._listeners:
                    self._is_taken = False
                    return False
                # Only these: tasks queued meanwhile must not delay the step.
                num_tasks = len(self._tasks)
            for _ in range(num_tasks):
                self._run(self._tasks.popleft())
            if self._listeners:
                return True

    def _run(self, task: _Task) -> None:
        if self._error is not None:
            task.fail(self._dead())
            return
        try:
            result = task.function(self._engine)
        except KvartsError as error:
            task.fail(error)
        except BaseException as error:
            self._close(error)
            task.fail(error)
            if not isinstance(error, Exception):
                raise  # an interrupt belongs to this thread, not to the task
        else:
            task.succeed(result)

    def _cancel(self, index: int) -> Completion | None:
        completion = self._engine.cancel(index)
        listener = self._listeners.get(index)
        if listener is not None:
            assert completion is not None, "a request with a listener is under way"
            self._tell_end(listener, completion)
        return completion

    def _tell_end(self, listener: Listener, completion: Completion) -> None:
        """Pass the completion to a listener; if it raises, pass it the failure."""
        del self._listeners[completion.index]
        try:
            listener.end(completion)
        except Gone:
            pass
        except Exception as error:
            _tell_failure(listener, completion.index, error)

    def _step(self) -> None:
        """Run one step, and notify listeners."""
        try:
            completions = self._engine.step()
        except BaseException as error:
            self._close(error)
            raise
        for held in self.held:
            held.hold()
        try:
            self._emit(completions)
        finally:
            for held in self.held:
                held.release()

    def _emit(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            listener = self._listeners.get(completion.index)
            if listener is None:
                self._unclaimed.append(completion)
            else:
                self._tell_end(listener, completion)
        gone: list[int] = []
        failed: list[tuple[int, Exception]] = []
        generation_of = self._engine.generation
        for index, listener in self._listeners.items():
            generation = generation_of(index)
            assert generation is not None, "a request with a listener is under way"
            try:
                listener.update(generation)
            except Gone:
                gone.append(index)
            except Exception as error:
                failed.append((index, error))
        for index in gone:
            self._cancel(index)
        for index, failure in failed:
            self._engine.cancel(index, failure)
            _tell_failure(self._listeners.pop(index), index, failure)

    def _abandon(self, error: BaseException) -> None:
        """Close the loop, fail the queued tasks and release the engine."""
        self._close(error)
        with self._lock:
            tasks, self._tasks = self._tasks, deque()
            self._is_taken = False
        for task in tasks:
            task.fail(self._dead())

    def _dead(self) -> EngineDeadError:
        assert self._error is not None
        dead = EngineDeadError(
            f"the engine has stopped after an error: {with_type(self._error)}", hint="Make a new one."
        )
        dead.__cause__ = self._error
        return dead

    def _close(self, error: BaseException) -> None:
        """Pass every listener an error that leaves the state of the engine unknown."""
        if self._error is None:
            self._error = error
            if isinstance(error, Exception):  # not an interrupt
                _log.error("the engine has stopped after an error: %s", with_type(error))
        listeners = list(self._listeners.values())
        self._listeners.clear()
        for listener in listeners:
            with suppress(Gone):
                listener.fail(error)


def _tell_failure(listener: Listener, index: int, error: Exception) -> None:
    """Pass a listener an error that concerns only it or its request."""
    _log.error("request %d: what came of it cannot be handed on", index, exc_info=error)
    failed = RequestFailedError(f"the answer cannot be handed on: {type(error).__name__}: {error}")
    failed.__cause__ = error
    with suppress(Exception):  # it has failed once already
        listener.fail(failed)


class _Failures:
    """The outcome of a task that starts a request: passes its failure to the listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def set_result(self, result: None) -> None:
        """Do nothing: the listener is notified when the request ends."""

    def set_exception(self, error: BaseException) -> None:
        """Pass the error to the listener."""
        with suppress(Gone):
            self._listener.fail(error)


class _Task:
    """A function to run between steps, and the receiver of its result."""

    def __init__(
        self, function: Callable[[LLMEngine], Any], outcome: Future[Any] | _Failures | _StreamListener
    ) -> None:
        self.function = function
        self._outcome = outcome

    def succeed(self, result: Any) -> None:
        """Deliver the result."""
        self._outcome.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Deliver the error."""
        self._outcome.set_exception(error)


class _Waiter:
    """The listener of a thread that waits for a completion."""

    def __init__(self) -> None:
        self.future: Future[Completion] = Future()

    def update(self, generation: Generation) -> None:
        """Do nothing: only the end matters."""

    def end(self, completion: Completion) -> None:
        """Wake the thread."""
        self.future.set_result(completion)

    def fail(self, error: BaseException) -> None:
        """Wake the thread with an error."""
        self.future.set_exception(error)


class _StreamListener:
    """The listener of a stream: passes text to a coroutine in its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.index: int | None = None
        self.is_done = False
        self._loop = loop
        self._queue: asyncio.Queue[str | BaseException | None] = asyncio.Queue()
        self._num_sent = 0

    async def next_text(self) -> str:
        """Return new text, or "" at the end. Raise the error that ended the request, if any."""
        item = await self._queue.get()
        if item is None:
            self.is_done = True
            return ""
        if isinstance(item, BaseException):
            self.is_done = True
            raise item
        return item

    def update(self, generation: Generation) -> None:
        """Send the text that is final."""
        self._send_text(generation.final_text)

    def end(self, completion: Completion) -> None:
        """Send the rest of the text, and the end."""
        self._send_text(completion.text)
        self._send(
            None if completion.error is None else RequestFailedError(completion.error, asked=completion.error_field)
        )

    def fail(self, error: BaseException) -> None:
        """Send an error."""
        self._send(error)

    def set_result(self, result: None) -> None:
        """Do nothing: the text arrives through `update`."""

    def set_exception(self, error: BaseException) -> None:
        """Send the error of a task."""
        with suppress(Gone):
            self._send(error)

    def _send_text(self, text: str) -> None:
        if len(text) > self._num_sent:
            self._send(text[self._num_sent :])
            self._num_sent = len(text)

    def _send(self, item: str | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError as error:  # the event loop is closed
            raise Gone from error


@dataclass(frozen=True)
class ModelHost:
    """A model and the loop that owns its engine. Access `core` only between steps, from a task of the loop.

    `token_bytes`: bytes of KV per token, over all layers. `max_positions`: the positions it was trained for, or None.
    `fingerprint` returns a hash of everything that its KV depends on except tokens. `tokenizer`: a transformers
    tokenizer, or None. `eos_ids`: the model's end tokens. `kv_groups`: as for LLM; `memory`: the KV groups, or None.
    With groups, pages are blocks, and `token_bytes` is the size of a token in a block. `check_params` raises
    ConfigError for parameters that the model cannot satisfy, and may take a second; None for a model without grammars.
    `scores_attention`: whether steps return how much attention pages received, in one page table for all layers.
    `why_no_sessions`: the reason why the model has no sessions; empty if it can have them.
    """

    loop: EngineLoop
    core: Engine
    config: EngineConfig
    clock: Clock
    slots: PageSlots
    rotate_late: Callable[[], None]
    kv: PageBytes
    token_bytes: int
    vocab_size: int
    max_positions: int | None
    fingerprint: Callable[[], str]
    tokenizer: Any = None
    eos_ids: frozenset[int] = frozenset()
    kv_groups: str = "off"
    memory: GroupMemory | None = None
    check_params: Callable[[SamplingParams], None] | None = None
    scores_attention: bool = False
    why_no_sessions: str = ""

    @property
    def num_gpu_blocks(self) -> int:
        """The number of blocks that vLLM reports: with a start of vLLM, the null block included."""
        start = getattr(self.config, "start", None)
        return self.core.scheduler.cache.pool.total if start is None else int(start.num_blocks)
