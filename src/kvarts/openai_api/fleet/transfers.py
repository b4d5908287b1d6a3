"""`kv_transfer_params`: a client computes a prompt on one worker, and lets another one continue with its pages.

The fields are those of vLLM's connector for NIXL. A request with `do_remote_decode` computes its prompt; its answer
names the worker that holds the pages. A request with these fields, and `do_remote_prefill`, fetches them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import ceil
from typing import Any

import msgspec

from kvarts.decoders import convert
from kvarts.fleet.faults import Fault
from kvarts.fleet.worker import Worker
from kvarts.llm.loop import EngineLoop
from kvarts.openai_api.answer import Choice
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.fleet.paced import PacedFleet
from kvarts.openai_api.served import Ask
from kvarts.traffic.trace_request import DirectRequest

__all__ = ["KvTransfers", "engine_id_of"]

PARAM = "kv_transfer_params"
TICK_S = 0.01


def engine_id_of(seed: int, worker: int) -> str:
    """Return the name of a worker's engine, which is the same in every run."""
    return f"kvarts-{seed}-{worker}"


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request. Others are ignored."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[Any] | None = None
    remote_host: str | None = None
    remote_port: int | str | None = None

    @property
    def names_holder(self) -> bool:
        """Whether it names the holder of the pages; vLLM fetches none if a field is missing."""
        names = self.remote_engine_id, self.remote_request_id, self.remote_host, self.remote_port
        return bool(self.remote_block_ids) and None not in names


class KvTransfers:
    """The WorkerDoor of the door of `worker`. `address`: its host and port, once it listens.

    `loop` owns the engines of `fleet`. `hold_s`: how long the worker holds pages, in real time. `faults`: those of the
    fleet; requests are refused while the worker is down.
    """

    def __init__(
        self,
        fleet: PacedFleet,
        loop: EngineLoop,
        worker: Worker,
        *,
        seed: int,
        tensor_parallel: int,
        hold_s: float,
        faults: Sequence[Fault] = (),
    ) -> None:
        self._downs = [fault for fault in faults if fault.kind == "down" and fault.worker == worker.index]
        self.address = ("127.0.0.1", 0)
        self._fleet = fleet
        self._loop = loop
        self._hold_s = hold_s
        self._worker = worker
        self._seed = seed
        self._tensor_parallel = tensor_parallel

    def check(self, asks: Sequence[Ask]) -> None:
        """Raise ApiError for requests that cannot be sent to a worker, or whose fields have wrong types."""
        self._check_up()
        params = _params_of(asks[0])
        if not (params.do_remote_decode or params.do_remote_prefill):
            return
        if params.do_remote_decode and params.do_remote_prefill:
            raise ApiError(400, "has do_remote_decode and do_remote_prefill: a request is one of them", param=PARAM)
        if len(asks) > 1:
            raise ApiError(400, "is of one prompt and one choice", param=PARAM)
        if params.do_remote_decode and asks[0].params.max_tokens != 1:
            told = (
                f"with do_remote_decode, only the prompt is computed: max_tokens is 1, got {asks[0].params.max_tokens}"
            )
            raise ApiError(400, told, param="max_tokens")

    def _check_up(self) -> None:
        """Raise ApiError if a scaler has taken the worker away, or if it is down now.

        In the second case it may be tried again when the fault ends, in whole seconds.
        """
        if not self._fleet.fleet.takes_requests(self._worker):
            raise ApiError(503, f"worker {self._worker.index} was taken away")
        if not self._downs:
            return
        clock = self._fleet.clock
        now_ns = clock.now_ns()
        for fault in self._downs:
            if fault.start_ns <= now_ns and (fault.end_ns is None or now_ns < fault.end_ns):
                left_s = None if fault.end_ns is None else float(ceil((fault.end_ns - now_ns) / 1e9 / clock.speedup))
                raise ApiError(503, f"worker {self._worker.index} is down", retry_after_s=left_s)

    def assign(self, index: int, ask: Ask) -> None:
        """Send request `index` to this worker. In the engine's thread."""
        params = _params_of(ask)
        fetches = self._fetched(params) if params.do_remote_prefill and params.names_holder else None
        self._fleet.direct[index] = DirectRequest(self._worker.index, bool(params.do_remote_decode), fetches)

    def clear_cache(self) -> None:
        """Drop every cached page of the worker that is not in use."""
        self._fleet.catch_up()
        self._fleet.fleet.clear_cache(self._worker)

    def _fetched(self, params: KvTransferParams) -> int | None:
        """Return the request whose pages are named; None if no worker of this fleet holds them."""
        name, _, number = str(params.remote_request_id).rpartition("-")
        if not (number.isascii() and number.isdecimal() and len(number) <= 18):
            return None
        holder = self._fleet.fleet.holder(int(number))
        if holder is None or (holder.decode.request_id or "") != name:
            return None
        is_there = params.remote_engine_id == engine_id_of(self._seed, holder.source)
        return int(number) if is_there else None

    def told(self, asked: dict[str, Any] | None, choices: Sequence[Choice]) -> dict[str, Any] | None:
        """Return the fields of an answer: where the pages of its prompt are held, if it asked for that; else None."""
        request = choices[0].request
        if request is None or not (asked or {}).get("do_remote_decode"):
            return None
        # Nothing else may happen until then, and nothing moves an idle fleet.
        asyncio.get_running_loop().call_later(self._hold_s + TICK_S, self._catch_up)
        num_pages = -(-request.num_prompt_tokens // request.content.page_size)
        host, port = self.address
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(range(num_pages)),
            "remote_engine_id": engine_id_of(self._seed, self._worker.index),
            "remote_request_id": f"{request.request_id or ''}-{request.index}",
            "remote_host": host,
            "remote_port": port,
            "tp_size": self._tensor_parallel,
            "remote_num_tokens": request.num_prompt_tokens,
        }

    def _catch_up(self) -> None:
        self._loop.post(lambda _: self._fleet.catch_up())


def _params_of(ask: Ask) -> KvTransferParams:
    """Return the fields of a request. Raise ApiError if one has the wrong type."""
    try:
        return convert(ask.kv_transfer_params or {}, KvTransferParams)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error), param=PARAM) from error
