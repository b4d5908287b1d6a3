"""A running model: prompts in, text out, with accounting of every page of its KV memory."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from kvarts.base.clock import Clock, WallClock
from kvarts.base.errors import ConfigError, first_line
from kvarts.core.build import Planning, Storage, Watching, build_engine, preparation_of
from kvarts.core.config import EngineConfig, EngineOptions
from kvarts.core.event_log import EventReader
from kvarts.core.executor import Executor
from kvarts.core.kv.eviction import EvictionOrder, LruOrder
from kvarts.core.kv.transfer import TransferTotals
from kvarts.core.parts.combines import check_combination
from kvarts.core.request import Request
from kvarts.core.sampling import SamplingParams
from kvarts.core.sched.drafts import DraftTotals
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.opening import open_page_files
from kvarts.proof.audit.opening import audit_of
from kvarts.run.engine_loop import EngineLoop, ModelHost
from kvarts.run.llm_engine import LLMEngine
from kvarts.run.speculation import CarefulDrafter, NgramDrafter, SpeculativeConfig, TimesByTokens
from kvarts.run.text import Completion, DetokenizingExecutor, Generation
from kvarts.run.torch.executor import TorchExecutor
from kvarts.run.torch.loading import load_model, load_tokenizer
from kvarts.run.torch.room import KVRoom, latent_token_bytes, open_room, token_bytes
from kvarts.run.torch.sampling import BatchSampler, Grammars, processors_of
from kvarts.run.wrappers import MeasuredCost, MeasuringExecutor

__all__ = ["LLM", "render_chat"]

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]

TIMED_STEPS = (1, 2, 4, 8, 16, 32)
"""Sizes of the steps that are timed at the start of an engine with speculation, in tokens."""
TIMED_CHUNKS = (1, 128)
"""The same for an engine with a bound on inter-token latency."""


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of `messages`, each with `role` and `content`, up to the start of the model's answer.

    Raise ConfigError for a tokenizer without a template, and for messages that the template rejects.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "the model's tokenizer has no chat template", field="messages", hint="Give a prompt as text instead."
        )
    if not messages:
        raise ConfigError("there are none", field="messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError("each needs a `role` and `content`", field="messages")
    try:
        text = tokenizer.apply_chat_template(
            [dict(one) for one in messages], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program, and jinja2 may be missing
        raise ConfigError(f"cannot be made a prompt: {first_line(error)}", field="messages") from error
    tokens: list[int] = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return tokens


class LLM:
    """A transformers model, its tokenizer, and the engine that runs it.

    `model`: a directory, a GGUF file, or a name in the hub's cache, loaded with `dtype` on `device` by `load_model`; or
    a loaded model with its `tokenizer`, which from then on attends through pages. Without a tokenizer, prompts are
    token ids.

    `options`: the memory, the batch and how the model is computed; `given` are fields of it, as `kv_memory="2GiB"`.
    `config`: replaces the options of pages, page size, batch and latency. `offload`: host memory and files below the
    pages; `disk_path`: the directory of the files, which a later run of the same model reads again.

    `eviction`: makes the order in which cached pages are evicted, see kvarts.core.kv.eviction.

    `speculative_config`: enables speculative decoding, where guessed tokens are computed in the same step and accepted
    if they are right: a SpeculativeConfig, a mapping of its fields, or `ngram`. It changes no token.

    `clock`: gives arrival times and durations. `readers` and `audit`: as for kvarts.core.build.build_engine. `wrap`:
    wraps the model's executor, for example to record its steps.

    Every method may be called from any thread. While `generate` or a stream waits, one thread of the LLM runs the steps
    for all callers; `submit`, `step` and `cancel` are for code that runs the steps itself. An error in a step reaches
    every waiting caller, and every later call raises EngineDeadError.

    Raises ConfigError for a model that cannot run in pages (kvarts.run.torch.probe), for a memory size below one
    page or beyond the device's, and for settings that exclude each other; also raises the errors of `load_model`.

    >>> from kvarts import LLM, SamplingParams
    >>> from kvarts.run.torch.tiny import write_tiny
    >>> write_tiny("qwen3", "tiny")
    >>> llm = LLM("tiny", kv_memory="1MiB")
    >>> (answer,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=4, ignore_eos=True))
    >>> len(answer.tokens)
    4
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        options: EngineOptions | None = None,
        offload: OffloadConfig | None = None,
        disk_path: str | Path | None = None,
        eviction: Callable[[], EvictionOrder] = LruOrder,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        clock: Clock | None = None,
        readers: Sequence[EventReader] = (),
        audit: bool | Literal["laws"] = False,
        wrap: Callable[[Executor], Executor] | None = None,
        **given: Any,
    ) -> None:
        options = structs.replace(EngineOptions() if options is None else options, **given)
        speculation = SpeculativeConfig.of(speculative_config)
        model, tokenizer = _loaded(model, tokenizer, options)
        page_size = options.page_size if config is None else config.page_size
        self.offload = None if offload is None else offload.for_model(token_bytes(model, options.kv_dtype))
        room = open_room(
            model,
            page_size,
            options.kv_groups,
            lambda room: _tiers_of(self.offload, room, page_size),
            kv_dtype=options.kv_dtype,
        )
        if room.whole_pages:
            logger.info("pages are whole, though layers of the model keep less: %s", room.whole_pages)
        if config is None:
            config = options.engine_config(room.num_pages(options.kv_memory))
        if config.snapshots != "ends" and not room.has_states:
            raise ConfigError("has no effect without layers with a state", field="snapshots", hint="Leave it out.")
        room.check(config.num_pages)
        self.config, self.tokenizer = config, tokenizer
        self.tiers: dict[str, int] = _tiers_of(self.offload, room, page_size)
        """Number of pages of each tier below the device, by name; of blocks with KV groups."""
        _check_tiers(self.offload, disk_path)
        files = None
        memory = None if room.cut is None else room.cut.memory
        if disk_path is not None and self.offload is not None:
            files = open_page_files(self.offload, disk_path, config.page_size, memory)
        clock = WallClock() if clock is None else clock
        self._grammars = Grammars(tokenizer, model.config.get_text_config(decoder=True).vocab_size, _eos_ids(model))
        sampler = BatchSampler(model.device, self._grammars)
        self._executor = TorchExecutor(
            model,
            config,
            sampler,
            options=options,
            num_host_pages=next(iter(self.tiers.values()), 0),
            files=files,
            cut=room.cut,
            num_blocks=room.num_blocks(config.num_pages),
            clock=clock,
        )
        detokenizing = DetokenizingExecutor(self._executor, max_num_seqs=config.max_num_seqs, clock=clock)
        executor: Executor = detokenizing if wrap is None else wrap(detokenizing)
        planning = Planning()
        if config.max_itl_ms is not None:
            cost = MeasuredCost(self._executor.time_steps(TIMED_CHUNKS))
            executor, planning = MeasuringExecutor(executor, cost), Planning(step_ns=cost.step_ns)
        of_files = {}
        if files is not None:
            of_files = {"known_keys": files.keys(), "namespace": self._executor.fingerprint()}
        if speculation is not None:
            planning = _drafting(planning, speculation, config, self._executor)
        self._core = build_engine(
            config,
            executor,
            Storage(
                memory=memory,
                num_blocks=room.num_blocks(config.num_pages),
                make_order=eviction,
                tiers=preparation_of(self.offload, **of_files),
            ),
            planning,
            Watching(readers, audit=audit_of(audit)),
        )
        self._model, self._room, self._memory, self._clock = model, room, memory, clock
        engine = LLMEngine(
            self._core,
            sampler,
            detokenizing,
            clock,
            page_size=config.page_size,
            tokenizer=tokenizer,
            eos_ids=_eos_ids(model),
            switch_length=self._executor.switch_length,
        )
        self._loop = EngineLoop(engine)
        text = model.config.get_text_config(decoder=True)
        self._vocab_size = text.vocab_size
        self._max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self._max_tokens = self._max_positions or 1 << 62

    @property
    def kv_groups(self) -> str:
        """Retention rule of the layers; `off` if they keep every token."""
        return self._room.kv_groups

    @property
    def whole_pages(self) -> str:
        """The refusal of KV groups where they are the default; empty if they were not refused."""
        return self._room.whole_pages

    @property
    def kv_blocks(self) -> dict[str, Any]:
        """The bytes of a block, and the KV groups; empty without groups."""
        return {} if self._memory is None else self._memory.to_builtins()

    @property
    def latent_token_bytes(self) -> int | None:
        """Bytes per token of a model's latents, stored as they are or expanded; None without latents."""
        return latent_token_bytes(self._model)

    @classmethod
    def from_pretrained(cls, path: str | Path, **settings: Any) -> LLM:
        """Load the model in `path`. Settings are those of the constructor."""
        return cls(path, **settings)

    def host(self) -> ModelHost:
        """Return the interface for the rooms above this one."""
        pools = self._executor.pools
        return ModelHost(
            loop=self._loop,
            core=self._core,
            config=self.config,
            clock=self._clock,
            slots=self._executor.slots,
            rotate_late=self._executor.rotation.enable,
            kv=pools,
            token_bytes=pools.page_bytes // pools.page_size,
            vocab_size=self._vocab_size,
            max_positions=self._max_positions,
            fingerprint=self._executor.fingerprint,
            tokenizer=self.tokenizer,
            eos_ids=_eos_ids(self._model),
            kv_groups=self.kv_groups,
            memory=self._memory,
            check_params=self.check_params,
            scores_attention=(self._memory is None or self._memory.has_one_table)
            and all(layer.window is None for layer in pools.layers),
        )

    # Requests ---------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run prompts, each text or token ids, in batches until all have ended. Return completions in the prompts'
        order.

        A single text is also a prompt. `params`: one for all prompts, or a list with one per prompt. Raise ConfigError,
        before any runs, if a prompt cannot run. An error in one prompt after that is the `error` of its completion.
        """
        several: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        pairs = zip(several, _params_of_each(params, len(several)), strict=True)
        return self._loop.generate([(self.encode(prompt, own), own) for prompt, own in pairs])

    def encode(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Return the token ids of a prompt. Raise ConfigError if the model cannot run it."""
        self.check_params(params)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError(
                    "is text, and the model came without a tokenizer", field="prompt", hint="Give token ids."
                )
            tokens: list[int] = list(self.tokenizer(prompt)["input_ids"])
        else:
            tokens = list(prompt)
        if not tokens:
            raise ConfigError("has no tokens", field="prompt")
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise ConfigError(f"token {token} is not in the vocabulary of {self._vocab_size}", field="prompt")
        if len(tokens) + params.max_tokens > self._max_tokens:
            raise ConfigError(
                f"{len(tokens)} prompt tokens and {params.max_tokens} to generate are more than the {self._max_tokens} "
                "that the model knows places for",
                field="prompt",
                hint="Shorten the prompt, or lower max_tokens.",
            )
        return tokens

    def check_params(self, params: SamplingParams) -> None:
        """Raise ConfigError for parameters that the model cannot satisfy.

        May take as long as compiling a grammar, or the import of what sampling needs, so that no step waits for it.
        """
        processors_of(params)
        if params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams) -> list[int]:
        """Return the token ids of a conversation, by the tokenizer's chat template, up to the start of an answer.

        Raise ConfigError for a model without a template, and for messages that its template rejects.
        """
        return self.encode(render_chat(self.tokenizer, messages), params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer a conversation, or several: each a list of messages with `role` and `content`.

        The tokenizer's chat template converts them to prompts. `params`: one for all, or a list with one per
        conversation. Raises ConfigError as `encode_chat` does.
        """
        several: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        pairs = zip(several, _params_of_each(params, len(several)), strict=True)
        return self._loop.generate([(self.encode_chat(one, own), own) for one, own in pairs])

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGenerator[str, None]:
        """Return the text of one prompt as it is generated. Streams may run concurrently; closing one cancels it."""
        params = params or SamplingParams()
        return self._loop.stream(self.encode(prompt, params), params, priority=priority)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> int:
        """Queue a prompt, text or token ids, and return its index, for `step` and `cancel`.

        Raise ConfigError for a prompt that is empty, has ids outside the vocabulary, or is too long for the model or
        the memory; the engine continues.
        """
        params = params or SamplingParams()
        return self._loop.submit(self.encode(prompt, params), params, priority=priority)

    def cancel(self, index: int) -> Completion | None:
        """End a request between steps, and return its completion; None if it has ended. Its pages are free at once."""
        return self._loop.cancel(index)

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute or return anything."""
        return self._loop.has_work

    def step(self) -> list[Completion]:
        """Run one step. Return the requests of `submit` that have ended since the last call."""
        return self._loop.step()

    def generation(self, index: int) -> Generation:
        """Return the tokens and the text so far of an active request."""
        generation = self._loop.generation(index)
        if generation is None:
            raise KeyError(index)
        return generation

    def request(self, index: int) -> Request:
        """Return an active request, as the scheduler knows it."""
        return self.generation(index).request

    # Facts ------------------------------------------------------------------------------------------------

    @property
    def attention(self) -> str:
        """The name of the attention backend, chosen by `auto` or by the caller."""
        return self._executor.attention

    @property
    def layers(self) -> str:
        """The implementation of the model's layers: `compiled` calls, or the `model`'s own code."""
        return self._executor.layers

    @property
    def layers_reason(self) -> str:
        """The reason for that choice."""
        return self._executor.layers_reason

    @property
    def device(self) -> str:
        """The device of the model, as PyTorch names it."""
        return str(self._model.device)

    @property
    def dtype(self) -> str:
        """The number format of the model."""
        return str(self._model.dtype).removeprefix("torch.")

    # Totals -----------------------------------------------------------------------------------------------

    @property
    def num_evicted_pages(self) -> int:
        """Number of cached pages that were overwritten; blocks with KV groups."""
        return self._core.scheduler.cache.num_evicted

    @property
    def num_evicted_parts(self) -> tuple[int, ...]:
        """Number of cached parts of pages that were overwritten, per KV group; empty without groups."""
        return self._core.scheduler.num_evicted_parts()

    @property
    def transfers(self) -> tuple[TransferTotals, ...]:
        """Transfers between the tiers so far; empty without tiers."""
        return () if self._core.tiers is None else (self._core.tiers.totals(),)

    @property
    def drafts(self) -> DraftTotals | None:
        """Number of drafted and accepted tokens so far; None without speculation."""
        totals = self._core.scheduler.draft_totals
        return None if totals is None else totals()

    # Memory -----------------------------------------------------------------------------------------------

    def kv_bytes(self) -> int:
        """Return the bytes of the allocated KV tensors."""
        return self._executor.pools.num_bytes

    @property
    def num_pages(self) -> int:
        """Number of pages of the KV memory; blocks with KV groups."""
        return self._executor.pools.num_pages

    def kv_live_bytes(self) -> int:
        """Return the bytes of the pages that requests use, those that a window passed in the last step included."""
        return self._core.scheduler.cache.num_used * self._executor.pools.page_bytes

    def check(self) -> None:
        """Assert the laws of page accounting, between steps."""
        self._loop.call(lambda _: self._core.scheduler.check())


def _params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts. Raise ConfigError if a list has another length."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params)
    if len(each) != count:
        raise ConfigError(
            f"there are {len(each)} for {count} prompts", field="params", hint="Give one for all, or one for each."
        )
    return each


def _tiers_of(offload: OffloadConfig | None, room: KVRoom, page_size: int) -> dict[str, int]:
    """Return the pages or blocks of each tier below the device. Raise ConfigError for what a room cannot have."""
    if offload is None:
        return {}
    return offload.sizes(page_size, None if room.cut is None else room.cut.memory)


def _eos_ids(model: Any) -> frozenset[int]:
    """Return the end tokens of a model."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    ids = model.config.get_text_config(decoder=True).eos_token_id if ids is None else ids
    return frozenset([ids] if isinstance(ids, int) else ids or [])


def _loaded(model: Any, tokenizer: Any, options: EngineOptions) -> tuple[Any, Any]:
    """Return the model and its tokenizer, loaded if `model` is a path."""
    if isinstance(model, str | Path):
        if tokenizer is None:
            tokenizer = load_tokenizer(model, trust_remote_code=options.trust_remote_code)
        model = load_model(
            model,
            dtype=options.dtype,
            device=options.device,
            quantization=options.quantization,
            trust_remote_code=options.trust_remote_code,
        )
    elif options.quantization is not None:
        raise ConfigError("is for a model that is loaded here", field="quantization", hint="Give its directory.")
    return model, tokenizer


def _check_tiers(offload: OffloadConfig | None, disk_path: str | Path | None) -> None:
    """Raise ConfigError for tiers that a model cannot run above."""
    if offload is not None and offload.load_overlap == "layers":
        check_combination({"layers": "offload.load_overlap", "model": "model"})
    if offload is not None and offload.load_kv != "placed":
        check_combination({f"{offload.load_kv}_loads": "offload.load_kv", "model": "model"})
    are_files = () if offload is None else offload.are_files
    if are_files not in ((), (False,), (False, True)):
        what = "a model runs above one tier of memory, and one of files below that at most"
        raise ConfigError(what, field="offload", hint="Leave out the other tiers.")
    if any(are_files) != (disk_path is not None):
        raise ConfigError(
            "a tier of files needs both its size and its directory",
            field="disk_path",
            hint="Give a size of files in offload, and disk_path.",
        )


def _drafting(
    planning: Planning, speculation: SpeculativeConfig, config: EngineConfig, executor: TorchExecutor
) -> Planning:
    """Return `planning` with drafts, whose lengths depend on how long steps of `executor` take."""
    times = TimesByTokens(executor.time_steps(TIMED_STEPS, are_drafted=True))
    return planning._replace(
        drafter=CarefulDrafter(NgramDrafter(speculation, config.max_num_seqs, times)),
        num_draft_slots=speculation.num_speculative_tokens if speculation.draft_order == "first" else 0,
    )
