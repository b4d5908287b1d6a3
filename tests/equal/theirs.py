"""vLLM's side: its own scheduler and KV cache manager on a workload, step by step. No model runs."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import math
import os
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"

import msgspec
from vllm import envs
from vllm.config import CacheConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from equal import planning
from equal.ours import usage_of
from equal.published import note_blocks
from equal.ranks import run_ranks
from equal.vllm_setup import cache_config, model_config
from equal.workload import NEVER, STOP, Step, Workload
from kvarts.cost.hardware.device import load_device
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.cost.vllm.start import StartSettings, start

MAX_MODEL_LEN = 262_144


def make_config() -> Any:
    """Return a configuration of vLLM; each workload sets its own pages, budgets and policy in it."""
    scheduler = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    return VllmConfig(
        model_config=model_config(MAX_MODEL_LEN),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        scheduler_config=scheduler,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )


class Vllm:
    """vLLM's schedulers, all with one configuration."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._config = make_config()
        # Exempt imported objects from garbage collection, and let vLLM cache its environment variables.
        envs.enable_envs_cache()
        gc.collect()
        gc.freeze()

    def steps(self, workload: Workload) -> Iterator[Step]:
        """Yield what vLLM does in each step; one that fails for lack of blocks is the last."""
        steps = run_vllm(workload, self._config)
        if workload.num_ranks > 1:
            configs = iter([copy.deepcopy(self._config) for _ in range(workload.num_ranks)])
            steps = run_ranks(workload, lambda each: run_vllm(each, next(configs)), TheirFrontEnd(workload))
        try:
            yield from steps
        except ValueError as error:
            if "free blocks from the pool" not in str(error):
                raise
            yield Step(fails=True)


def run_vllm(workload: Workload, config: Any) -> Iterator[Step]:
    """Yield what vLLM does in each step, until every request has ended."""
    page_size = workload.page_size
    num_blocks = workload.num_blocks + 1  # its block 0 stands for blocks that are not there
    config.cache_config.block_size = page_size
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.max_num_seqs = workload.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = workload.max_num_batched_tokens
    config.scheduler_config.policy = workload.policy
    config.scheduler_config.long_prefill_token_threshold = workload.long_prefill_token_threshold
    config.scheduler_config.prefill_schedule_interval = workload.prefill_schedule_interval
    config.scheduler_config.watermark = workload.watermark
    config.scheduler_config.async_scheduling = workload.is_async
    config.cache_config.enable_prefix_caching = workload.finds_prefixes
    has_states, aligns = (("states", None) in workload.groups), (("aligned", None) in workload.groups)
    config.cache_config.mamba_cache_mode = "align" if aligns else "all" if has_states else "none"
    config.kv_events_config.enable_kv_cache_events = workload.with_events
    if workload.started is None:
        kv = cache_config(
            workload.groups,
            num_blocks,
            page_size,
            state_tokens=MAX_MODEL_LEN,
            saves_inside=workload.saves_inside,
            num_drafts=workload.num_drafts,
        )
        kv.prefix_cache_retention_interval = workload.retention
        if workload.is_eagle:  # as with MTP, whose layers are in the full group
            whole = [place for place, (kind, _) in enumerate(workload.groups) if kind in ("full", "latent")]
            kv.kv_cache_groups[whole[0]].is_eagle_group = True
    else:
        kv = planned_config(workload, num_blocks)
        if kv.has_mamba_layers:
            config.cache_config.mamba_cache_mode = "align"
    config.speculative_config = None
    if workload.num_draft_slots:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=workload.num_draft_slots,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    if workload.num_drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=workload.num_drafts,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        if workload.is_eagle:
            config.speculative_config.method = "eagle"  # as if there were a model for it
    make = _WatchedAsync if workload.is_async else _Watched
    unit, hash_size = page_size, page_size
    if workload.started is not None:
        unit, hash_size = resolve_kv_cache_block_sizes(kv, config)
    if ("state", None) in workload.groups:
        unit = math.lcm(page_size, MAX_MODEL_LEN)  # without a prefix cache, a state is a block of all tokens
        hash_size = unit
    scheduler = make(config, kv, StructuredOutputManager(config), block_size=unit, hash_block_size=hash_size)
    if workload.most_tokens:
        scheduler.max_model_len = scheduler.kv_cache_manager.max_model_len = workload.most_tokens
    more = {"num_hash_lookahead_tokens": workload.lookahead} if workload.lookahead else {}
    hasher = get_request_block_hasher(page_size, sha256, **more)
    generated: Counter[str] = Counter()
    requests: dict[str, Any] = {}
    num_arrived = 0
    copies: Counter[tuple[int, str]] = Counter()
    sizes = [] if workload.started is None else [group.kv_cache_spec.block_size for group in kv.kv_cache_groups]
    in_flight: tuple[Any, Any] | None = None
    """The plan whose result is not known when the next one is made, as in vLLM's engine, and its result."""
    connector = None if workload.load_kv is None else Connector(workload)
    if connector is not None:
        scheduler.connector = connector
    publisher = scheduler.kv_event_publisher = Publisher()
    cached: dict[int, int] = {}
    preempted: set[int] = set()
    step = 0
    while (
        num_arrived < len(workload.asks)
        or workload.is_open
        or requests
        or in_flight is not None
        or (connector is not None and connector.has_loads)
    ):
        while num_arrived < len(workload.asks) and workload.asks[num_arrived].step <= step:
            ask = workload.asks[num_arrived]
            most = len(ask.output) + 10 * ask.stops
            params = SamplingParams(max_tokens=most, ignore_eos=True, stop_token_ids=[STOP] if ask.stops else [])
            request = VllmRequest(
                str(num_arrived),
                ask.prompt,
                params,
                None,
                arrival_time=float(ask.step if workload.has_ties else num_arrived),
                priority=ask.priority,
                block_hasher=hasher,
            )
            requests[request.request_id] = request
            scheduler.add_request(request)
            num_arrived += 1
        given_up = [name for name in requests if workload.asks[int(name)].gives_up == step]
        if not workload.is_async:
            give_up(scheduler, requests, given_up)
        done = Step()
        if connector is not None:
            connector.step = step
        plan = scheduler.schedule()
        done.uncomputed = frozenset(scheduler.uncomputed)
        done.tokens = {int(name): number for name, number in plan.num_scheduled_tokens.items()}
        done.admitted = {int(new.req_id): new.num_computed_tokens for new in plan.scheduled_new_reqs}
        resumed = plan.scheduled_cached_reqs
        for name, num_computed in zip(resumed.req_ids, resumed.num_computed_tokens, strict=True):
            if name in resumed.resumed_req_ids:
                done.admitted[int(name)] = num_computed
        for name, ids in plan.scheduled_spec_decode_tokens.items():
            if ids[0] == -1 and int(name) in done.admitted:
                done.tokens[int(name)] -= len(ids)  # a request that was admitted takes the room of a draft
        done.preempted = sorted(int(name) for name in plan.preempted_req_ids or ())
        result = None
        if plan.total_num_scheduled_tokens:
            if workload.num_drafts:
                result = foreseen(plan, requests, workload, generated, set(done.admitted))
            else:
                result = sampled(plan, requests, workload)
        if connector is not None and (loaded := connector.take_ended()) is not None:
            result = result or ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[])
            result.kv_connector_output = loaded
        note_blocks(done, scheduler.kv_cache_manager.take_events(), copies, publishes=workload.publishes, sizes=sizes)
        if workload.is_async:
            # As in vLLM's engine, which looks for them when the result of a step is there.
            give_up(scheduler, requests, given_up)
            if in_flight is not None:
                note_cached(cached, scheduler.update_from_output(*in_flight))
            in_flight = None if result is None else (plan, result)
            note_blocks(done, publisher.take_events(), copies, publishes=workload.publishes, sizes=sizes)
        done.num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if not workload.is_async and result is not None:
            note_cached(cached, scheduler.update_from_output(plan, result))
            note_blocks(done, publisher.take_events(), copies, publishes=workload.publishes, sizes=sizes)
            if workload.num_draft_slots:
                scheduler.update_draft_token_ids(drafted(plan, requests, workload))
            if workload.num_drafts:
                names = [name for name in plan.num_scheduled_tokens if not requests[name].is_finished()]
                scheduler.update_draft_token_ids(DraftTokenIds(names, [[1] * workload.num_drafts for _ in names]))
        for name in [name for name, request in requests.items() if request.is_finished()]:
            done.ended.append(int(name))
            del requests[name]
        preempted.update(done.preempted)
        ended = {index for index in done.ended if workload.asks[index].num_good == NEVER}
        done.cached = {index: cached[index] for index in ended - preempted}
        if workload.is_open:
            num_running, num_waiting = scheduler.get_request_counts()
            num_used = workload.num_blocks - scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            done.load = num_waiting, num_running, num_used
        yield done
        step += 1


def planned_config(workload: Workload, num_blocks: int) -> Any:
    """Return the configuration that vLLM's own planning makes for the layers of a started model."""
    started = workload.started
    placement = started.placement
    device = load_device(placement.device)
    settings = StartSettings(
        version=started.engine.partition("==")[2],
        tensor_parallel=started.cost.tensor_parallel,
        max_model_len=max(len(ask.prompt) + len(ask.output) for ask in workload.asks),
        max_num_batched_tokens=started.max_num_batched_tokens,
        max_num_seqs=started.max_num_seqs,
        has_async_scheduling=started.async_scheduling,
        num_drafts=workload.num_drafts,
        has_draft_layers=workload.is_eagle,
    )
    geometry = load_geometry(placement.model).on(device)
    decided = start(geometry, device, settings)
    (layers,) = decided.specs
    planner = planning.Vllm()
    specs = {name: planner.spec(_with_sizes(layer)) for name, layer in layers.items()}
    for name, spec in specs.items():
        if isinstance(spec, MambaSpec):
            grid = 1 if spec.num_prefill_checkpoint_blocks else None  # divides every block, as the real grids do
            specs[name] = dataclasses.replace(
                spec, mamba_cache_mode=decided.settings.state_mode, prefill_checkpoint_alignment=grid
            )
        elif planner.version != "0.32" and name.partition(".")[0] == str(geometry.num_layers):
            specs[name] = dataclasses.replace(spec, is_draft=True)
    config = planner.config(msgspec.structs.replace(decided.settings, num_blocks_override=num_blocks))
    if workload.num_drafts:
        config.speculative_config = SimpleNamespace(
            method="mtp", use_eagle=lambda: workload.is_eagle, use_eagle_block_drop=lambda: workload.is_eagle
        )
    planner.layout_of(config, [list(decided.settings.layouts)], list(specs.values()))
    more = () if planner.version == "0.32" else (planner.planning.get_global_kv_cache_groups(config, [specs]),)
    configs = planner.planning.get_kv_cache_configs(config, [specs], [1 << 40], *more)
    return planner.utils.generate_scheduler_kv_cache_config(configs)


def _with_sizes(layer: Any) -> Any:
    """Return a layer whose cell holds the sizes of keys and values, as `planning.Vllm.spec` reads them."""
    if layer.kind == "state":
        return layer
    if layer.kind in ("mla", "window_mla"):
        return msgspec.structs.replace(layer, cell=f"{layer.entry_bytes} 0 uint8", form="auto|")
    numbers, _ = layer.cell.split()
    return msgspec.structs.replace(layer, cell=f"{int(numbers) // 2} {int(numbers) // 2} bfloat16")


class Connector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The same tier as a connector of vLLM, which supports several KV groups."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._num_below = [ask.num_below for ask in workload.asks]
        self._has_failed: set[int] = set()
        self._loads: list[tuple[int, str, set[int]]] = []
        self._last_step = 0
        self.step = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the tokens after those on the device that it has."""
        size = self._workload.page_size
        num_pages = min(self._num_below[int(request.request_id)], (request.num_tokens - 1) // size)
        num_tokens = max(0, num_pages * size - num_computed_tokens)
        return num_tokens, self._workload.load_kv == "async" and num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin a load."""
        if not num_external_tokens or self._workload.load_kv == "sync":
            return
        index, size = int(request.request_id), self._workload.page_size
        ask, tables = self._workload.asks[index], blocks.get_block_ids()
        num_pages = num_external_tokens // size
        start = len(tables[0]) - num_pages
        bad: set[int] = set()
        if index not in self._has_failed and ask.num_good < num_pages:
            self._has_failed.add(index)
            self._num_below[index] = start + ask.num_good
            bad = set(tables[0][start + ask.num_good :])
        end = self.step + ask.load_steps + self._workload.is_async
        self._loads.append((end, request.request_id, bad))
        self._last_step = max(self._last_step, end)

    @property
    def has_loads(self) -> bool:
        """Whether the next plan comes before all loads are known to have ended, also of requests given up."""
        return self.step < self._last_step

    def take_ended(self) -> Any:
        """Return what a worker reports about the loads that the next plan knows to have ended; None without any."""
        known = self.step + 1 + self._workload.is_async
        ended = [load for load in self._loads if load[0] <= known]
        if not ended:
            return None
        self._loads = [load for load in self._loads if load[0] > known]
        bad = set().union(*(blocks for _, _, blocks in ended))
        return KVConnectorOutput(finished_recving={name for _, name, _ in ended}, invalid_block_ids=bad)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Let the blocks of a request be free: nothing is stored."""
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Do the same."""
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return nothing for a worker."""

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return all groups."""
        return tuple(range(len(self._workload.groups)))

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = build_connector_meta


def give_up(scheduler: Any, requests: dict[str, Any], names: list[str]) -> None:
    """Abort requests."""
    for name in names:
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del requests[name]


class TheirFrontEnd:
    """vLLM's client of several engines, without processes."""

    def __init__(self, workload: Workload) -> None:
        self._num_blocks = workload.num_blocks
        ranks = [bytes([rank]) for rank in range(workload.num_ranks)]
        loads = [[0, 0, 0.0] for _ in ranks]
        self._client: Any = SimpleNamespace(
            client_count=1,
            reqs_in_flight={},
            engine_inflight=Counter(),
            core_engines=ranks,
            eng_start_index=0,
            lb_engines=loads,
        )

    def place(self, index: int) -> int:
        """Return the rank of a request."""
        asked: Any = SimpleNamespace(request_id=str(index), data_parallel_rank=None, pooling_params=None)
        rank: int = self._client.core_engines.index(DPLBAsyncMPClient.get_core_engine_for_request(self._client, asked))
        return rank

    def ended(self, indices: list[int]) -> None:
        """Record that requests have ended."""
        outputs: Any = SimpleNamespace(finished_requests={str(index) for index in indices})
        asyncio.run(DPLBAsyncMPClient.process_engine_outputs(self._client, outputs))

    def report(self, loads: list[tuple[int, int, int]]) -> None:
        """Record what the ranks report."""
        self._client.lb_engines = [
            [waiting, running, usage_of(num_used, self._num_blocks)] for waiting, running, num_used in loads
        ]


class Watched:
    """Notes the full pages of preempted requests that vLLM finds and has not computed.

    vLLM makes a page findable when it plans the token that fills it. A request of a lower priority that is preempted
    later in the same step never computes that token.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.uncomputed: set[tuple[int, str]] = set()

    def _preempt_request(self, request: Any, *args: Any, **more: Any) -> None:
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        groups = manager.kv_cache_config.kv_cache_groups
        for group, blocks in zip(groups, manager.get_blocks(request.request_id).blocks, strict=True):
            planned = blocks[request.num_computed_tokens // group.kv_cache_spec.block_size :]
            names = [block.block_hash for block in planned if block.block_hash is not None]
            self.uncomputed |= {(get_group_id(name), get_block_hash(name).hex()) for name in names}
        super()._preempt_request(request, *args, **more)  # type: ignore[misc]


class _Watched(Watched, Scheduler):  # type: ignore[misc]
    pass


class _WatchedAsync(Watched, AsyncScheduler):  # type: ignore[misc]
    pass


class Publisher:
    """Takes the place of vLLM's publisher of KV events."""

    def __init__(self) -> None:
        self._events: list[Any] = []

    def publish(self, batch: Any) -> None:
        """Keep the events of the end of a step."""
        self._events += batch.events

    def take_events(self) -> list[Any]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def sampled(plan: Any, requests: dict[str, Any], workload: Workload) -> Any:
    """Return what a model runner answers: the next token of each request whose known tokens are all computed."""
    names = list(plan.num_scheduled_tokens)
    tokens = []
    for name in names:
        request = requests[name]
        if workload.num_draft_slots:
            ask, place = workload.asks[int(name)], request.num_output_tokens
            ids = plan.scheduled_spec_decode_tokens.get(name, [])
            num_right = ask.drafts[place - 1][1] if ids and ids[0] != -1 else 0
            is_last = request.num_computed_tokens - len(ids) == request.num_tokens
            tokens.append(ask.output[place : place + num_right + 1] if is_last else [])
            continue
        num_in_flight = max(0, request.num_output_placeholders - 1)  # without the token of this step
        is_last = request.num_computed_tokens == request.num_tokens + num_in_flight
        place, output = request.num_output_tokens + num_in_flight, workload.asks[int(name)].output
        token = output[place] if place < len(output) else STOP  # after the one that ends it, which is not known yet
        tokens.append([token] if is_last else [])
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: place for place, name in enumerate(names)}, sampled_token_ids=tokens
    )


def foreseen(
    plan: Any, requests: dict[str, Any], workload: Workload, generated: Counter[str], admitted: set[int]
) -> Any:
    """Return what a model runner answers if every decode has a draft, of which as much is right as foreseen.

    `generated`: by request, the tokens that it has generated in all steps so far. Those in `admitted` have none.
    """
    names = list(plan.num_scheduled_tokens)
    tokens: list[list[int]] = []
    for name in names:
        if requests[name].is_prefill_chunk:
            tokens.append([])
            continue
        ask, place = workload.asks[int(name)], generated[name]
        num_drafted = 0 if int(name) in admitted else len(plan.scheduled_spec_decode_tokens.get(name, ()))
        num_right = min(ask.drafts[place - 1][1], num_drafted, max(0, len(ask.output) - place - 1))
        tokens.append(ask.output[place : place + num_right + 1] or [STOP])  # a request that has ended computes one more
        generated[name] += num_right + 1
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: place for place, name in enumerate(names)}, sampled_token_ids=tokens
    )


def drafted(plan: Any, requests: dict[str, Any], workload: Workload) -> Any:
    """Return what a drafter answers after a step: right tokens, then wrong ones, for each request with a new token."""
    names, tokens = [], []
    for name in plan.num_scheduled_tokens:
        request = requests[name]
        if request.is_finished() or not request.num_output_tokens:
            continue
        ask, place = workload.asks[int(name)], request.num_output_tokens
        num_drafted, num_right = ask.drafts[place - 1]
        names.append(name)
        tokens.append([*ask.output[place : place + num_right], *[1] * (num_drafted - num_right)])
    return DraftTokenIds(names, tokens)


def note_cached(cached: dict[int, int], outputs: Any) -> None:
    """Note the cached tokens of requests, which vLLM reports with the first token."""
    for each in outputs.values():
        for output in each.outputs:
            if output.prefill_stats is not None:
                cached[int(output.request_id)] = output.prefill_stats.num_cached_tokens
