"""CUDA graphs on a CPU: the operations of a capture are recorded, and repeated on the tensors that they had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["RecordedGraph", "record_graphs"]


class RecordedGraph(TorchDispatchMode):  # type: ignore[misc]
    """Records while it is active. `num_replays`: of all graphs."""

    num_replays = 0
    is_capturing = False

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        made_tensors = tree_leaves(made)
        if not all(isinstance(one, torch.Tensor) for one in made_tensors):
            raise RuntimeError(f"{func} reads the device's memory while it is captured")
        self._operations.append((func, args, kwargs or {}, made_tensors))
        return made

    def replay(self) -> None:
        """Repeat all operations: results are written to the memory of the first ones."""
        RecordedGraph.num_replays += 1
        for func, args, kwargs, kept in self._operations:
            for one, again in zip(kept, tree_leaves(func(*args, **kwargs)), strict=True):
                if one.data_ptr() != again.data_ptr():
                    one.copy_(again)

    def pool(self) -> None:
        """Return no memory pool."""


class _Stream:
    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, _: Any) -> None:
        """Do nothing: there is one."""


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let captures record."""

    @contextmanager
    def capturing(graph: RecordedGraph, **_: Any) -> Iterator[None]:
        RecordedGraph.is_capturing = True
        try:
            with graph:
                yield
        finally:
            RecordedGraph.is_capturing = False

    monkeypatch.setattr(RecordedGraph, "num_replays", 0)
    for name, stand_in in (
        ("CUDAGraph", RecordedGraph),
        ("graph", capturing),
        ("Stream", _Stream),
        ("current_stream", _Stream),
        ("stream", lambda _: nullcontext()),
        ("is_current_stream_capturing", lambda: RecordedGraph.is_capturing),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
