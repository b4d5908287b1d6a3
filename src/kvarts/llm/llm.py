"""An engine that runs a real model: prompts in, text out, every page accounted for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvarts.build import build_engine
from kvarts.config import EngineConfig
from kvarts.content import Content
from kvarts.errors import ConfigError
from kvarts.event_log import EventReader
from kvarts.executor.base import Executor
from kvarts.executor.torch.executor import TorchExecutor
from kvarts.executor.torch.loading import load_model
from kvarts.executor.torch.pools import page_bytes_of
from kvarts.executor.torch.probe import layer_shapes
from kvarts.executor.torch.sampling import SamplingParams
from kvarts.llm.text import Completion, Generation
from kvarts.offload.config import OffloadConfig
from kvarts.request import Request
from kvarts.units import parse_bytes

__all__ = ["Engine"]

MOST_AUTO_BYTES = 4 << 30


class Engine:
    """A model, its tokenizer, and the control plane that runs it. See `from_pretrained`.

    `readers` and `audit`: see kvarts.build.build_engine. `wrap`: puts something between the core and the executor
    of the model, for a record. `offload`: host memory below the pages. `attention`: who reads pages, see
    kvarts.executor.torch.reader.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig,
        *,
        readers: Sequence[EventReader] = (),
        audit: bool = False,
        wrap: Callable[[Executor], Executor] | None = None,
        offload: OffloadConfig | None = None,
        attention: str = "auto",
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._model = model
        tiers = {} if offload is None else offload.tiers(config.page_size)
        if "disk" in tiers or (tiers and model.device.type != "cpu"):
            raise ConfigError("a real model has host memory below a CPU's pages, and no files", field="offload")
        self._executor = TorchExecutor(model, config, self, num_host_pages=tiers.get("host", 0), attention=attention)
        executor = self._executor if wrap is None else wrap(self._executor)
        self._core = build_engine(config, executor, readers=readers, audit=audit, offload=offload)
        self._generations: dict[int, Generation] = {}
        self._num_submitted = 0
        self._began_ns = perf_counter_ns()
        self._turn = asyncio.Lock()
        text = model.config.get_text_config(decoder=True)
        self._vocab_size = text.vocab_size
        self._max_tokens = getattr(text, "max_position_embeddings", None) or 1 << 62
        ends = getattr(model.generation_config, "eos_token_id", None)
        ends = text.eos_token_id if ends is None else ends
        self._eos = frozenset([ends] if isinstance(ends, int) else ends or [])

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        kv_memory: str | int = "auto",
        page_size: int = 16,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 64,
        dtype: str = "auto",
        device: str = "auto",
        **kwargs: Any,
    ) -> Engine:
        """The model in `path`, see `load_model`, with `kv_memory` bytes of KV: a size, or `auto`, a quarter of the
        memory that is free, and 4 GiB at most. The other arguments are those of Engine.

        Raises ConfigError for a size that holds no page, and see `load_model`.
        """
        from transformers import AutoTokenizer

        model = load_model(path, dtype=dtype, device=device)
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError):
            tokenizer = None  # prompts are token ids then
        page_bytes = page_bytes_of(layer_shapes(model), page_size=page_size, dtype=model.dtype)
        if kv_memory == "auto":
            num_bytes = min(_free_bytes(model.device) // 4, MOST_AUTO_BYTES)
        else:
            num_bytes = parse_bytes(kv_memory) if isinstance(kv_memory, str) else kv_memory
        if num_bytes < page_bytes:
            raise ConfigError(f"{num_bytes:,} bytes hold no page of {page_bytes:,} bytes", field="kv_memory")
        config = EngineConfig(
            num_pages=num_bytes // page_bytes,
            page_size=page_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
        )
        return cls(model, tokenizer, config, **kwargs)

    # Requests ---------------------------------------------------------------------------------------------

    def submit(self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, priority: int = 0) -> int:
        """Queues a prompt, text or token ids; returns its index.

        Raises ConfigError for a prompt that is empty, has ids that the vocabulary lacks, or is too long for the model
        or for the memory there is; the engine goes on.
        """
        params = params or SamplingParams()
        tokens = self._tokens_of(prompt)
        if len(tokens) + params.max_tokens > self._max_tokens:
            raise ConfigError(
                f"{len(tokens)} prompt tokens and {params.max_tokens} to generate are more than the {self._max_tokens} "
                "that the model knows places for",
                field="prompt",
                hint="Shorten the prompt, or lower max_tokens.",
            )
        index = self._num_submitted
        content = Content.from_tokens(tokens, page_size=self.config.page_size, owner=index)
        request = Request(
            index,
            content,
            num_prompt_tokens=len(tokens),
            max_tokens=params.max_tokens,
            arrival_ns=self._now_ns(),
            priority=priority,
        )
        reason = self._core.submit(request, request.arrival_ns)
        if reason is not None:
            raise ConfigError(reason, field="prompt", hint="Give the engine more kv_memory, or lower max_tokens.")
        self._num_submitted += 1
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        device = self._model.device
        self._generations[index] = Generation(request, tokens, params, self.tokenizer, stop_ids, device)
        return index

    def cancel(self, index: int) -> Completion | None:
        """Ends a request between steps, and says what it had; its pages are free at once. None if it has ended."""
        generation = self._generations.pop(index, None)
        if generation is None:
            return None
        self._core.cancel(generation.request)
        generation.finish("cancelled")
        return generation.completion()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._core.has_work

    def step(self) -> list[Completion]:
        """Does one step; who ended with it."""
        ended = []
        for request in self._core.step(self._now_ns()):
            generation = self._generations.pop(request.index)
            generation.finish("length")
            ended.append(generation.completion())
        return ended

    def generate(
        self, prompts: Iterable[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Runs prompts, each text or token ids, batched as they fit, until all have ended; in their order.

        Raises ConfigError for a prompt that cannot be run, before anything is.
        """
        indices: list[int] = []
        try:
            for prompt in prompts:
                indices.append(self.submit(prompt, params))  # noqa: PERF401  # those submitted before an error count
        except ConfigError:
            for index in indices:
                self.cancel(index)
            raise
        done: dict[int, Completion] = {}
        own = set(indices)
        while len(done) < len(own):
            done.update((completion.index, completion) for completion in self.step() if completion.index in own)
        return [done[index] for index in indices]

    async def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> AsyncIterator[str]:
        """The text of one prompt, as it comes; many may be under way at once. Who stops listening cancels."""
        async with self._turn:
            generation = self._generations[self.submit(prompt, params)]
        told = 0
        try:
            while True:
                if len(text := generation.told) > told:
                    yield text[told:]
                    told = len(text)
                if generation.finish_reason is not None:
                    return
                num_tokens = len(generation.tokens)
                async with self._turn:
                    # Whoever waited for the turn may have had its token from the step of another.
                    if generation.finish_reason is None and len(generation.tokens) == num_tokens:
                        await asyncio.to_thread(self.step)
        finally:
            if generation.finish_reason is None:
                async with self._turn:
                    self.cancel(generation.request.index)

    def request(self, index: int) -> Request:
        """A request under way, as the scheduler knows it."""
        return self._generations[index].request

    @property
    def num_evicted_pages(self) -> int:
        """Cached pages that were overwritten."""
        return self._core.scheduler.cache.num_evicted

    # Memory -----------------------------------------------------------------------------------------------

    def kv_bytes(self) -> int:
        """Of the KV tensors that are allocated."""
        return self._executor.pools.num_bytes

    def kv_live_bytes(self) -> int:
        """Of the pages of these that requests use now."""
        return self._core.scheduler.cache.num_used * self._executor.pools.page_bytes

    def check(self) -> None:
        """Asserts the laws of page accounting, between steps."""
        self._core.scheduler.check()

    # Inside -----------------------------------------------------------------------------------------------

    def choose(self, requests: list[int], logits: torch.Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """See TokenChooser."""
        generations = [self._generations[index] for index in requests]
        tokens = _likeliest(logits)
        ends = []
        for place, generation in enumerate(generations):
            if not generation.params.is_plain:
                tokens[place] = generation.choose(logits[place])
            ends.append(generation.take(tokens[place]))
        return np.array(tokens, np.int64), np.array(ends, np.bool_)

    def _tokens_of(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError(
                    "is text, and the model came without a tokenizer", field="prompt", hint="Give token ids."
                )
            tokens = self.tokenizer(prompt)["input_ids"]
        else:
            tokens = list(prompt)
        if not tokens:
            raise ConfigError("has no tokens", field="prompt")
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise ConfigError(f"token {token} is not in the vocabulary of {self._vocab_size}", field="prompt")
        return list(tokens)

    def _now_ns(self) -> int:
        return perf_counter_ns() - self._began_ns


def _likeliest(logits: torch.Tensor) -> list[int]:
    """Of each row. On a CPU, NumPy finds them several times as fast as PyTorch does in 16 bits."""
    tokens = logits.float().numpy().argmax(axis=-1) if logits.device.type == "cpu" else logits.argmax(dim=-1)
    likeliest: list[int] = tokens.tolist()
    return likeliest


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
