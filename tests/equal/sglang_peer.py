"""SGLang 0.5.23's own scheduler, tree and pools on a load, a step at a time, without a model or a GPU.

A Scheduler is made without its constructor, with the attributes that planning reads. Packages of SGLang that are not
installed get stand-ins, after those that look for others were imported: only modules that no finder knows. Results are
taken as its BatchResultProcessor takes those of plain requests. Importing it takes 10 s.
"""

# mypy: ignore-errors
from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
import warnings
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import MagicMock

from oracles.naive_sglang import SglangLoad, SglangStep

VOCABULARY = 1 << 40
"""Tokens outside the vocabulary end a request."""
FIRST = ("torch", "transformers", "transformers.image_utils", "transformers.image_processing_utils", "tvm_ffi",
         "xgrammar", "transformers.processing_utils", "transformers.modeling_utils")  # fmt: skip
"""Packages that look for others while they are imported, so that they must not find stand-ins."""
ABSENT = frozenset(
    (
        *("IPython", "sgl_kernel", "flashinfer", "decord2", "cuda", "pynvml", "xgrammar", "outlines", "modelscope"),
        *("deep_gemm", "deep_ep", "setproctitle", "uvloop", "torch_memory_saver", "cutlass", "quack", "smg_grpc_proto"),
        *("smg_grpc_servicer", "sglang_kernel", "tilelang", "watchfiles", "torchvision", "torchaudio", "torchcodec"),
        *("timm", "kernels", "gguf", "flash_attn", "torchao", "av", "decord", "soundfile"),
    )
)


class _Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=name)
        if name[:1].isupper():
            made = _Names(name, (), {"__init__": lambda self, *args, **more: None})
        setattr(self, name, made)
        return made


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        module.__version__ = "99.0"


def _import() -> None:
    for name in FIRST:
        with suppress(Exception):
            importlib.import_module(name)
    sys.meta_path.append(_StandIns())  # last: for what no other finder knows


warnings.filterwarnings("ignore", module="sglang")
_import()

import msgspec  # noqa: E402
import torch  # noqa: E402
from sglang.srt.disaggregation.kv_events import KVEventBatch  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
from sglang.srt.managers import schedule_policy  # noqa: E402
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch, split_cached_prefix_by_tier  # noqa: E402
from sglang.srt.managers.schedule_policy import SchedulePolicy  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.managers.scheduler_components.batch_result_processor import (  # noqa: E402
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker  # noqa: E402
from sglang.srt.managers.scheduler_components.recv_skipper import SchedulerRecvSkipper  # noqa: E402
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

from equal.sglang_host import CLOCK, close, host_settings, make_pool, num_stored, open_host, run_storage  # noqa: E402

logging.disable(logging.WARNING)
torch.Tensor.pin_memory = lambda tensor, *_: tensor
NOTHING = ("dllm_config", "prefill_delayer", "min_free_slots_delayer", "dynamic_chunk_sizer", "truncation_align_size",
           "decode_offload_manager", "_pending_chunked_abort_req", "hisparse_coordinator", "max_queued_requests",
           "lora_drainer", "scheduler_stage_metrics", "chunked_req", "last_batch")  # fmt: skip
NO = ("enable_hisparse", "require_mlp_sync", "enable_lora", "enable_hierarchical_cache",
      "enable_hicache_storage", "enable_lmcache", "is_mixed_chunk", "enable_unified_cache_external_linker",
      "enable_unified_memory", "abort_on_priority_when_disabled")  # fmt: skip
ZERO = ("max_prefill_bs", "processed_tokens_counter", "forward_ct", "_prefill_decode_interval_remaining",
        "prefill_decode_interval", "prefill_decode_interval_min_bs")  # fmt: skip


_NO_RESULT = SimpleNamespace(num_correct_drafts_per_req_cpu=None)


class _InOrder(dict):
    """A set that iterates in the order of insertion.

    Requests that are preempted together are queued again in that of a set of objects: the order of their addresses.
    """

    def __init__(self, items=()):
        super().__init__(dict.fromkeys(items))

    def add(self, item):
        self[item] = None


schedule_policy.set = _InOrder


class _Kv:
    """A pool without memory."""

    def __init__(self, size, page_size):
        self.size, self.page_size, self.dtype, self.device = size, page_size, torch.float16, "cpu"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _WindowKv(_Kv, BaseSWAKVPool):
    """The two pools of a model with sliding windows, without memory."""

    def register_mapping(self, full_to_swa_index_mapping):
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.full_to_swa_index_mapping[kv_indices]


_WindowKv.__abstractmethods__ = frozenset()


class _StatePool(HybridReqToTokenPool):
    """The slots of a model with states, without states."""

    def _init_mamba_pool(self, mamba_size, device, enable_mamba_extra_buffer, **more):
        self.mamba_pool = SimpleNamespace(
            size=mamba_size,
            replayssm_write_pos=None,
            replayssm_spec_write_pos=None,
            copy_from=lambda source, target: None,
        )
        self.mamba_allocator = MambaSlotAllocator(size=mamba_size, device=device)
        self.mamba_ckpt_pool, self.device = None, device
        num_rows = self.req_to_token.shape[0]
        self.req_index_to_mamba_index_mapping = torch.zeros(num_rows, dtype=torch.int32)
        num_buffers = self.mamba_ping_pong_track_buffer_size
        self.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros((num_rows, num_buffers), dtype=torch.int64)


def _pool_of(load: SglangLoad, longest: int) -> ReqToTokenPool:
    if not load.slots:
        return ReqToTokenPool(load.max_running, longest, "cpu", False)
    return _StatePool(
        size=load.max_running,
        mamba_size=load.slots,
        mamba_spec_state_size=0,
        max_context_len=longest,
        device="cpu",
        enable_memory_saver=False,
        cache_params=None,
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=load.buffers,
        enable_overlap_schedule=load.overlap,
    )


class _Scheduler(Scheduler):
    def __init__(self, load: SglangLoad) -> None:
        page_size, overlap = load.page_size, load.overlap
        kv = make_pool(load.size, page_size) if load.host_ratio else _Kv(load.size, page_size)
        components = (ComponentType.FULL,)
        self.is_hybrid_swa = load.window > 0
        if load.window:
            components = (ComponentType.FULL, ComponentType.SWA)
            kv = _WindowKv(load.size, page_size)
            allocator = SWATokenToKVPoolAllocator(
                load.size, load.window_size, page_size, torch.float16, "cpu", kv, need_sort=False
            )
        elif page_size == 1:
            allocator = TokenToKVPoolAllocator(load.size, torch.float16, "cpu", kv, need_sort=False)
        else:
            allocator = PagedTokenToKVPoolAllocator(load.size, page_size, torch.float16, "cpu", kv, need_sort=False)
        longest = max(len(ask.prompt) + len(ask.output) for ask in load.asks) + 2 * page_size
        pool = _pool_of(load, longest)
        if load.slots:
            components = (ComponentType.FULL, ComponentType.MAMBA)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            chunked_prefill_size=load.chunk,
            tree_components=components,
            sliding_window_size=load.window or None,
            eviction_policy=load.eviction,
            eviction_policy_config=load.eviction_config or None,
            tree_core_backend="rust",
            enable_kv_cache_events=load.has_events,
            enable_mamba_extra_buffer=load.slots > 0 and load.buffers,
        )
        tree = UnifiedRadixCache(params)
        for name in NOTHING:
            setattr(self, name, None)
        for name in NO:
            setattr(self, name, False)
        for name in ZERO:
            setattr(self, name, 0)
        if load.host_ratio:
            open_host(tree, params, load)
            self.enable_hierarchical_cache, self.enable_hicache_storage = True, bool(load.prefetch_policy)
        self.page_size, self.tree_cache, self.token_to_kv_pool_allocator = page_size, tree, allocator
        self.req_to_token_pool, self.device = pool, "cpu"
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.waiting_queue, self.result_queue = [], deque()
        self.chunked_prefill_size, self.max_prefill_tokens = load.chunk, load.max_prefill
        self.max_running_requests = load.max_running
        self.enable_priority_scheduling, self.schedule_low_priority_values_first = load.priorities, load.lower_first
        self.enable_priority_preemption = load.priorities and load.preempts
        self.policy = SchedulePolicy(load.policy, tree, False, load.priorities, load.lower_first)
        self.new_token_ratio_tracker = NewTokenRatioTracker.from_config()
        self.enable_overlap = self.enable_skip_finishing_decode = overlap
        self.priority_scheduling_preemption_threshold = load.threshold
        self.spec_algorithm, self.disaggregation_mode = SpeculativeAlgorithm.NONE, DisaggregationMode.NULL
        self.model_config = SimpleNamespace(
            is_encoder_decoder=False,
            vocab_size=VOCABULARY,
            num_key_value_heads=1,
            is_multimodal=False,
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(mamba_chunk_size=load.state_chunk),
        )
        self.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
        self.beam_coordinator = SimpleNamespace(pending_member_rows=lambda batch: 0, retire_group=lambda req: None)
        runner = SimpleNamespace(attn_backend=SimpleNamespace(), prefill_aware_swa=False)
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.load_inquirer = SimpleNamespace(_get_num_pending_tokens=lambda chunk_deduct: 0)
        self.dp_attn_adapter = SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        )
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, chunked_req=None: batch)
        self.metrics_reporter = MagicMock(enable_metrics=False)
        self.future_map = MagicMock()
        self.results = SchedulerBatchResultProcessor(
            **dict.fromkeys(SchedulerBatchResultProcessor.__dataclass_fields__)
            | {"tree_cache": tree, "req_to_token_pool": pool, "token_to_kv_pool_allocator": allocator}
        )
        self.retracted: list[int] = []
        self.aborted: list[int] = []

    def _abort_on_queued_limit(self, req):
        return False

    def send_abort_output(self, output, req):
        self.aborted.append(int(req.rid))

    def _add_request_to_queue(self, req, is_retracted=False):
        if req.is_retracted:
            self.retracted.append(int(req.rid))
        super()._add_request_to_queue(req, is_retracted=is_retracted)


def _request(load: SglangLoad, index: int) -> Req:
    ask = load.asks[index]
    params = SamplingParams(max_new_tokens=len(ask.output), ignore_eos=load.ignore_eos)
    params.normalize(None)
    req = Req(str(index), "", array("q", ask.prompt), params, vocab_size=VOCABULARY, eos_token_ids=set(),
              cache_salt=ask.salt)  # fmt: skip
    req.tokenizer, req.priority = None, ask.priority
    return req


def _num_of_host(req: Req) -> int:
    """Return the tokens that a request has loaded from host memory, and that were there before its prefetch."""
    return split_cached_prefix_by_tier(
        prefix_len=req.prefix_len,
        host_hit_len=req.materialized_host_hit_len(),
        storage_hit_len=req.storage_hit_length,
        storage_hit_start=req.storage_hit_start,
    )[1]


def _take(server: _Scheduler, load: SglangLoad, batch: ScheduleBatch, step: SglangStep) -> None:
    """Append the next token of each request of a batch, and publish or release what it has computed."""
    is_prefill = batch.forward_mode.is_extend()
    server.token_to_kv_pool_allocator.free_group_begin()
    for place, req in enumerate(batch.reqs):
        if is_prefill and req.inflight_middle_chunks > 0:
            req.inflight_middle_chunks -= 1
            continue
        if (is_prefill or server.enable_overlap) and (req.finished() or req.is_retracted):
            continue
        index = int(req.rid)
        req.output_ids.append(load.asks[index].output[len(req.output_ids)])
        req.update_finish_state()
        if load.slots and not is_prefill:
            server.results._handle_finish_state_updated_req(req, batch, _NO_RESULT, place, None)
            if req.finished():
                step.ended.append(index)
        elif req.finished():
            release_kv_cache(req, server.tree_cache, checkpoint=True)
            step.ended.append(index)
        elif is_prefill:
            checkpoint_kv_cache(req, server.tree_cache)
    server.token_to_kv_pool_allocator.free_group_end()
    server.tree_cache.flush_pending_backups()


def sglang_steps(load: SglangLoad) -> Iterator[SglangStep]:
    """Yield what SGLang does in each step, until all requests have ended."""
    settings = {
        "device": "cpu",
        "disable_radix_cache": False,
        "schedule_policy": load.policy,
        "radix_eviction_policy": load.eviction,
        "enable_priority_scheduling": load.priorities,
        "schedule_low_priority_values_first": load.lower_first,
        "disable_priority_preemption": not load.preempts,
        "retraction_policy": load.retraction,
        "max_running_requests": load.max_running,
        "chunked_prefill_size": load.chunk,
        "page_size": load.page_size,
        "attention_backend": "torch_native",
        "disable_overlap_schedule": not load.overlap,
        "schedule_conservativeness": load.conservativeness,
        "scheduler_recv_interval": load.recv_interval,
        "pp_max_micro_batch_size": load.max_running,
    }
    if load.host_ratio:
        settings |= host_settings(load)
    if load.slots:
        settings["mamba_radix_cache_strategy"] = "extra_buffer" if load.buffers else "no_buffer"
        settings |= {"mamba_track_interval": load.track_interval, "max_mamba_cache_size": load.slots}
    known = set(ServerArgs.__struct_fields__)
    override = get_context().override_server_args(
        **{name: settings[name] for name in settings if name in known},
        _mamba_cache_chunk_size=max(load.state_chunk, load.page_size),
    )
    override.install()
    try:
        yield from _steps(load)
    finally:
        override.restore()


def _steps(load: SglangLoad) -> Iterator[SglangStep]:
    server = _Scheduler(load)
    if load.has_events:
        assert msgspec.to_builtins(server.tree_cache.take_events()) == [{"type": "AllBlocksCleared"}]
    number = num_arrived = num_ended = 0
    skipper = SchedulerRecvSkipper.maybe_create()
    has_none = True
    continuing = None
    while num_ended < len(load.asks):
        CLOCK.now += 1
        receives = skipper is None or skipper.handle(server.last_batch)
        while not receives and has_none:  # it makes steps without work as fast as it can
            receives = skipper.handle(None)
        while receives and num_arrived < len(load.asks) and load.asks[num_arrived].step <= number:
            server._add_request_to_queue(_request(load, num_arrived))
            num_arrived += 1
        server.retracted, server.aborted = [], []
        run_storage()
        step = SglangStep()
        last = server.last_batch
        plan = server.get_next_batch_to_run(running_batch=server.running_batch, last_batch=last)
        server.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch is not None:
            is_prefill = batch.forward_mode.is_extend()
            step.kind = "prefill" if is_prefill else "decode"
            for req in batch.reqs:
                step.tokens[int(req.rid)] = req.extend_end - req.prefix_len if is_prefill else 1
                if is_prefill and req is not continuing:
                    step.admitted[int(req.rid)] = req.prefix_len
                    if req.host_hit_length and req.host_loaded_length:
                        step.loaded[int(req.rid)] = req.host_loaded_length
                        num_fetched = req.host_loaded_length - _num_of_host(req)
                        if num_fetched:
                            step.fetched[int(req.rid)] = num_fetched
            server.forward_ct += 1
            batch.input_ids = None
            if load.overlap:
                server.result_queue.append((batch.copy(), None))
        continuing = server.chunked_req
        if load.overlap:
            if last is not None:
                _take(server, load, server.result_queue.popleft()[0], step)
        elif batch is not None:
            _take(server, load, batch, step)
        server.last_batch = batch
        step.retracted, step.aborted = server.retracted, server.aborted
        num_ended += len(step.ended) + len(step.aborted)
        has_none = num_ended == num_arrived and not (load.overlap and batch)
        is_idle = batch is None and not (load.overlap and last) and server.running_batch.is_empty()
        if is_idle and not server.waiting_queue and server.chunked_req is None:
            server.new_token_ratio_tracker.reset()
        allocator, tree = server.token_to_kv_pool_allocator, server.tree_cache
        pool = server.req_to_token_pool
        step.fails = bool(load.window and is_idle and (server.waiting_queue or server.chunked_req))
        if load.window and batch is not None and is_prefill:
            parts = [req for req in batch.reqs if req.extend_end < len(req.full_untruncated_fill_ids)]
            step.fails |= any(req is not server.chunked_req for req in parts)
        step.free = allocator.full_available_size() if load.window else allocator.available_size()
        step.evictable, step.waiting = tree.full_evictable_size(), len(server.waiting_queue)
        if load.slots:
            step.slots_free, step.slots_evictable = pool.mamba_allocator.available_size(), tree.mamba_evictable_size()
        if load.window:
            step.window_free, step.window_evictable = allocator.swa_available_size(), tree.swa_evictable_size()
        if load.host_ratio:
            step.host_free = server.tree_cache.cache_controller.mem_pool_host.available_size()
        if load.prefetch_policy:
            step.stored = num_stored(server.tree_cache) * load.page_size
            step.reserved = server.tree_cache.cache_controller.prefetch_tokens_occupied
        if load.has_events:
            batch_of_events = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=server.tree_cache.take_events()))
            step.events = msgspec.msgpack.decode(batch_of_events)[1]
        yield step
        number += 1
    if load.host_ratio:
        close(server.tree_cache)
