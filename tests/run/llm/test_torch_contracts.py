"""Real models keep the contracts of their seams: their executor, and the reader that reports on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch

from kvarts.core.event_log import EventReader
from kvarts.core.executor import Executor
from kvarts.run.torch.executor import TorchExecutor
from kvarts.run.torch.loading import load_model
from kvarts.run.torch.profile import Profile
from kvarts.run.torch.sampling import BatchSampler
from kvarts.run.torch.tiny import write_tiny

from builders.executor_contract import CONFIG, ExecutorContract
from builders.reader_contract import EventReaderContract

pytestmark = pytest.mark.laws


class Greedy:
    """A sampler that takes the largest logit and never stops."""

    def sample(self, request_indices: Sequence[int], logits: torch.Tensor) -> tuple[Any, Any]:
        tokens = logits.argmax(-1).cpu().numpy()
        return tokens, np.zeros(len(tokens), np.bool_)

    def sample_drafted(
        self, request_indices: Sequence[int], logits: torch.Tensor, drafts: Sequence[Sequence[int]]
    ) -> tuple[Any, Any, list[int]]:
        raise AssertionError("nothing is drafted here")

    num_scored = 0

    def num_to_score(self, request_index: int) -> int:
        return 0

    def score(self, request_index: int, start: int, logits: torch.Tensor) -> None:
        raise AssertionError("nothing is scored here")


@cache
def model(family: str) -> Any:
    with TemporaryDirectory() as path:
        write_tiny(family, Path(path))
        return load_model(path)


class TestTorchExecutor(ExecutorContract):
    def make(self) -> Executor:
        return TorchExecutor(model("llama"), CONFIG, cast(BatchSampler, Greedy()))


class TestProfile(EventReaderContract):
    takes_leaps = False

    def make(self, path: Path) -> EventReader:
        profile = Profile()
        profile.live = Passed()
        return profile

    def outcome(self, reader: EventReader, path: Path) -> object:
        assert isinstance(reader, Profile)
        assert isinstance(reader.live, Passed)
        log = reader._log
        columns = {name: column.tolist() for name, column in log.columns.items()} if len(log) else {}
        return columns, log.preemptions, reader.live.num_steps


class Passed:
    """Counts steps."""

    num_steps = 0

    def observe(self, events: Sequence[Any]) -> None:
        self.num_steps += sum(type(event).__name__ == "StepDone" for event in events)
