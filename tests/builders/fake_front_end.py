"""The front end's side of vLLM's protocol, without vLLM: sockets, the handshake, and messages by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, Self

import msgspec
import zmq

from kvarts.core.event_log import EventReader
from kvarts.cost.polynomial import LinearCost
from kvarts.doors.vllm_front.core import Behind, FrontCore
from kvarts.doors.vllm_front.model import FrontModel
from kvarts.doors.vllm_front.opening import FrontSettings, open_core
from kvarts.doors.vllm_front.protocol import protocol_of
from kvarts.sim.config import ReplayConfig

from builders.tiny_model import tiny_model

WAIT_MS = 20_000
ENGINE = ReplayConfig(
    num_pages=64, page_size=16, max_num_seqs=8, max_num_batched_tokens=256, cost=LinearCost(step_ms=1.0), audit=True
)


class FakeFrontEnd:
    """A front end of one API server. `told`: the ready response that the engine sent."""

    def __init__(self, version: str, *, has_coordinator: bool = False) -> None:
        self.protocol = protocol_of(version)
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets = {name: self._bound(kind) for name, kind in (
            ("handshake", zmq.ROUTER), ("input", zmq.ROUTER), ("output", zmq.PULL), ("loads", zmq.PULL),
            ("waves", zmq.XPUB))}  # fmt: skip
        self._has_coordinator = has_coordinator
        self._identity = b""
        self._next_call = 7
        self.hello: dict[str, Any] = {}
        self.ready: dict[str, Any] = {}
        self.told: dict[str, Any] = {}
        self.handshake = self._address("handshake")

    def _bound(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.bind("tcp://127.0.0.1:0")
        return socket

    def _address(self, name: str) -> str:
        return self._sockets[name].getsockopt_string(zmq.LAST_ENDPOINT)

    def shake_hands(self) -> None:
        """Do the front end's part of the handshake."""
        handshake = self._sockets["handshake"]
        self._identity, hello = handshake.recv_multipart()
        self.hello = msgspec.msgpack.decode(hello)
        waves = self._address("waves") if self._has_coordinator else None
        loads = self._address("loads") if self._has_coordinator else None
        addresses = {
            "inputs": [self._address("input")], "outputs": [self._address("output")], "coordinator_input": waves,
            "coordinator_output": loads, "frontend_stats_publish_address": None,
        }  # fmt: skip
        welcome = msgspec.msgpack.encode({"addresses": addresses, "parallel_config": {}})
        handshake.send_multipart((self._identity, welcome))
        _, told = self._sockets["input"].recv_multipart()
        self.told = msgspec.msgpack.decode(told)
        if self._has_coordinator:
            assert self._sockets["waves"].recv() == b"\x01"
            self._sockets["waves"].send(b"READY")
        self.ready = msgspec.msgpack.decode(handshake.recv_multipart()[1])

    # Messages ---------------------------------------------------------------------------------------------

    def send(self, kind: bytes, payload: bytes) -> None:
        """Send a message to the engine."""
        self._sockets["input"].send_multipart((self._identity, kind, payload))

    def add(self, request_id: str, prompt: Sequence[int], **fields: Any) -> None:
        """Send a request; `fields`: of EngineCoreRequest."""
        values: dict[str, Any] = {
            "request_id": request_id, "prompt_token_ids": list(prompt), "arrival_time": 0.0,
            "sampling_params": {"max_tokens": 4, "ignore_eos": True}, "client_index": 0, "current_wave": 0,
            "priority": 0, "resumable": False, "abort_immediately": False, **fields,
        }  # fmt: skip
        order = self.protocol._request
        self.send(b"\x00", msgspec.msgpack.encode([values.get(name) for name in order]))

    def abort(self, *ids: str) -> None:
        """Abort requests."""
        self.send(b"\x01", msgspec.msgpack.encode(ids))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the engine; return the result, or raise the failure. Outputs before the answer are dropped."""
        number = self._next_call = self._next_call + 1
        self.send(b"\x03", msgspec.msgpack.encode([0, number, name, arguments]))
        while True:
            outputs = self.outputs()
            answer = outputs.get("utility_output")
            if answer is not None and answer[0] == number:
                if answer[1] is not None:
                    raise RuntimeError(answer[1])
                return answer[2][1]

    def outputs(self, wait_ms: int = WAIT_MS) -> dict[str, Any]:
        """Return the engine's next message, with its fields and outputs by name. Raise zmq.Again if none arrives."""
        socket = self._sockets["output"]
        socket.setsockopt(zmq.RCVTIMEO, wait_ms)
        payload = socket.recv()
        if payload == b"ENGINE_CORE_DEAD":
            return {"dead": True}
        values = msgspec.msgpack.decode(payload)
        named = dict(zip((name for name, _ in self.protocol._outputs), values, strict=False))
        order = [name for name, _ in self.protocol._output]
        named["outputs"] = [dict(zip(order, each, strict=False)) for each in named.get("outputs", ())]
        return named

    def answers(self, *ids: str) -> dict[str, list[dict[str, Any]]]:
        """Return the outputs of requests, until all have ended."""
        found: dict[str, list[dict[str, Any]]] = {each: [] for each in ids}
        left = set(ids)
        while left:
            for output in self.outputs()["outputs"]:
                found[output["request_id"]].append(output)
                if output.get("finish_reason") is not None:
                    left.discard(output["request_id"])
        return found

    def stats_when(self, holds: Any, timeout_s: float = 10.0) -> dict[str, Any]:
        """Return the first statistics for which `holds` is true."""
        deadline_s = monotonic() + timeout_s
        while monotonic() < deadline_s:
            stats = self.outputs().get("scheduler_stats")
            if stats is not None and holds(stats):
                return dict(stats)
        raise AssertionError("no such statistics in time")

    def load(self) -> dict[str, Any]:
        """Return the next message to the coordinator."""
        values = msgspec.msgpack.decode(self._sockets["loads"].recv())
        return dict(zip((name for name, _ in self.protocol._outputs), values, strict=False))

    def close(self) -> None:
        """Close all sockets, as a front end that has ended."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def front_end(
    directory: Path,
    version: str = "0.33.0",
    config: ReplayConfig = ENGINE,
    *,
    behind: Behind = Behind(max_model_len=1024),  # noqa: B008  # frozen
    has_coordinator: bool = False,
    readers: Sequence[EventReader] = (),
    **settings: Any,
) -> Iterator[tuple[FakeFrontEnd, FrontCore]]:
    """Yield a front end and the core behind it; the books of the engine are checked at the end."""
    model = FrontModel(tiny_model(directory / "model"))
    with FakeFrontEnd(version, has_coordinator=has_coordinator) as front:
        opened: list[FrontCore] = []

        def opens() -> None:
            given = FrontSettings(handshake=front.handshake, behind=behind, start_s=20.0, **settings)
            opened.append(open_core(config, model, front.protocol, given, readers=readers))

        opening = Thread(target=opens)
        opening.start()
        front.shake_hands()
        opening.join()
        (core,) = opened
        serving = Thread(target=core.serve)
        serving.start()
        try:
            yield front, core
        finally:
            core.stop()
            serving.join()
            core.close()
            core.host.core.scheduler.check()
