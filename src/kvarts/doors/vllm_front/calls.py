"""The calls of a front end to its core: sleep, pause, caches, adapters, and a channel for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvarts.base.errors import KvartsError

if TYPE_CHECKING:
    from kvarts.doors.vllm_front.core import FrontCore

__all__ = ["Calls"]

Answer = Callable[..., None]


class Calls:
    """Owner of the level of sleep, and of the loaded adapters of one core. For the engine's thread."""

    def __init__(self, core: FrontCore) -> None:
        self._core = core
        self._sleep_level = 0
        self._adapters: dict[int, str] = {}
        self._weights = ""
        self._calls: dict[str, Callable[..., Any]] = {
            "get_supported_tasks": lambda: [core.behind.task],
            "reset_prefix_cache": self._reset_prefix_cache,
            "reset_mm_cache": lambda: None,
            "reset_encoder_cache": lambda: None,
            "is_sleeping": lambda: self._sleep_level > 0,
            "is_scheduler_paused": lambda: core.pause is not None,
            "add_lora": self._add_lora,
            "remove_lora": lambda number: self._adapters.pop(number, None) is not None,
            "list_loras": lambda: sorted(self._adapters),
            "pin_lora": lambda number: number in self._adapters,
            "profile": lambda *_: None,
            "execute_dummy_batch": lambda: None,
            "release_kv_cache_memory": core.clear_cache,
            "set_weight_version": self._set_weights,
            "get_weight_version": lambda: self._weights,
            "collective_rpc": self._collective_rpc,
        }
        self._late: dict[str, Callable[..., None]] = {
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "pause_scheduler": self._pause,
            "pause_generation": self._pause,
            "resume_scheduler": self._resume,
            "resume_generation": self._resume,
        }
        """Calls that are answered once they have taken effect."""

    def call(self, name: str, arguments: Sequence[Any], answer: Answer) -> None:
        """Answer a call, with its result or with what is wrong with it."""
        late, call = self._late.get(name), self._calls.get(name)
        try:
            if late is not None:
                late(answer, *arguments)
            elif call is not None:
                answer(call(*arguments))
            else:
                answer(failure=f"{name} is not a call of this core, which is a mock by kvarts")
        except Exception as error:  # concerns this call only
            answer(failure=f"{name}: {error}")

    def _reset_prefix_cache(self, *_: Any) -> bool:
        self._core.clear_cache()
        return True

    def _sleep(self, answer: Answer, level: int = 1, mode: str = "abort") -> None:
        self._sleep_level = level
        self._pause(answer, mode, level > 0)

    def _wake_up(self, answer: Answer, tags: Sequence[str] | None = None) -> None:
        self._sleep_level = 0
        self._resume(answer)

    def _pause(self, answer: Answer, mode: str = "abort", clear_cache: bool = True) -> None:
        if mode not in ("abort", "wait", "keep"):
            answer(failure=f"mode must be abort, wait or keep, got {mode!r}")
            return

        def paused() -> None:
            if clear_cache:
                self._core.clear_cache()
            answer()

        self._core.set_pause(mode, then=paused)  # type: ignore[arg-type]  # checked above

    def _resume(self, answer: Answer) -> None:
        self._core.set_pause(None, then=answer)

    def _add_lora(self, adapter: Sequence[Any]) -> bool:
        name, number, *_ = adapter
        self._adapters[number] = name
        return True

    def _set_weights(self, version: str) -> None:
        self._weights = version

    def _collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of this core, and return a list of its result: `check`, or `fail` with a script."""
        methods: dict[str, Callable[..., Any]] = {"check": self._check, "fail": self._core.set_script}
        if method not in methods:
            raise KvartsError(f"{method} is not a method of this core; those are {', '.join(methods)}")
        return [partial(methods[method], *args, **(kwargs or {}))()]

    def _check(self) -> str:
        """Check the books of the engine: every page is accounted for."""
        self._core.host.core.scheduler.check()
        return "ok"
