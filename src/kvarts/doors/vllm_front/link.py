"""The sockets between one engine and a front end: handshake, requests, outputs, coordinator.

The front end binds, the engine connects. Sockets to send with belong to the thread that has the engine, the others to
the thread that receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from time import monotonic
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError, problem_of
from kvarts.doors.vllm_front.protocol import ENGINE_CORE_DEAD

__all__ = ["Addresses", "Link"]

POLL_MS = 200
"""How soon a request to stop is noticed."""
LINGER_MS = 2000
SUBSCRIBE = b"\x01"
AT_ONCE = 256
"""Messages that are received before the engine is told of them."""


class Addresses(msgspec.Struct):
    """Where a front end listens: a pair of sockets for each of its API servers, and its coordinator's sockets."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class _Welcome(msgspec.Struct):
    addresses: Addresses


class Link:
    """Owner of the sockets of the engine with `rank`.

    `handshake`: the address where the front end waits for engines, tcp://HOST:PORT. Raises ConfigError if that is not
    an address.
    """

    def __init__(self, handshake: str, rank: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.rank = rank
        self._identity = rank.to_bytes(2, "little")
        self._handshake = self._socket(zmq.DEALER)
        try:
            self._handshake.connect(handshake)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{handshake!r} is not an address: {error.strerror}",
                field="handshake",
                hint="As tcp://127.0.0.1:29550.",
            ) from None
        self._inputs: list[zmq.Socket[bytes]] = []
        self._outputs: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._coordinator: zmq.Socket[bytes] | None = None
        self._published: zmq.Socket[bytes] | None = None
        self._lock = Lock()
        """Held to send, and to close."""
        self._is_closed = False
        self._linger_ms = LINGER_MS
        self.is_ordered_to_stop = False

    @property
    def has_coordinator(self) -> bool:
        """Whether there are several engines, whose load a coordinator follows."""
        return self._coordinator is not None

    # Handshake --------------------------------------------------------------------------------------------

    def greet(self, *, timeout_s: float, goes_on: Callable[[], object] = lambda: None) -> Addresses:
        """Announce the engine, and return the addresses of the front end.

        `goes_on` is called now and then, and may raise an error. Raise ConfigError if there is no answer in time.
        """
        self._say("HELLO")
        deadline_s = monotonic() + timeout_s
        while not self._handshake.poll(POLL_MS):
            goes_on()
            if monotonic() > deadline_s:
                raise ConfigError(
                    f"no front end has answered within {timeout_s:g} s",
                    field="handshake",
                    hint="Start `vllm serve` with --data-parallel-size-local 0, and give its "
                    "--data-parallel-address and --data-parallel-rpc-port.",
                )
        try:
            return msgspec.msgpack.decode(self._handshake.recv(), type=_Welcome).addresses
        except UNDECODED as error:
            raise ConfigError(f"is no handshake of vLLM: {problem_of(error)}", field="handshake") from error

    def connect(self, addresses: Addresses, ready: bytes) -> None:
        """Connect to the front end, and tell it that the engine is ready."""
        for address in addresses.inputs:
            socket = self._socket(zmq.DEALER)
            self._monitors.append(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            socket.connect(address)
            socket.send(ready)
            self._inputs.append(socket)
        for address in addresses.outputs:
            self._outputs.append(self._socket(zmq.PUSH))
            self._outputs[-1].connect(address)
        if addresses.coordinator_input is not None and addresses.coordinator_output is not None:
            self._published = self._socket(zmq.XSUB)
            self._published.connect(addresses.coordinator_input)
            self._published.send(SUBSCRIBE)
            self._coordinator = self._socket(zmq.PUSH)
            self._coordinator.connect(addresses.coordinator_output)

    def say_ready(self, facts: Mapping[str, Any], *, goes_on: Callable[[], object] = lambda: None) -> None:
        """End the handshake, once the coordinator knows the engine. `facts`: of the READY message."""
        while self._published is not None and not self._published.poll(POLL_MS):
            goes_on()
        if self._published is not None:
            self._published.recv()
        self._say("READY", **facts)
        self._handshake.close(linger=LINGER_MS)

    def _say(self, status: str, **facts: Any) -> None:
        self._handshake.send(msgspec.msgpack.encode({"status": status, "local": False, "headless": True, **facts}))

    # Messages ---------------------------------------------------------------------------------------------

    def received(self) -> Iterator[list[list[bytes]]]:
        """Yield the messages that have arrived, several at once, until the front end has ended or `stop` is called."""
        poller = zmq.Poller()
        for socket in (*self._inputs, *self._monitors):
            poller.register(socket, zmq.POLLIN)
        while not self.is_ordered_to_stop:
            ready = dict(poller.poll(POLL_MS))
            found: list[list[bytes]] = []
            for socket in self._inputs:
                while socket in ready and len(found) < AT_ONCE:
                    try:
                        found.append(socket.recv_multipart(zmq.NOBLOCK))
                    except zmq.Again:
                        break
            if found:
                yield found
            for monitor in self._monitors:
                if monitor in ready and recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                    self._linger_ms = 0
                    return

    def stop(self) -> None:
        """End `received` soon. May be called from any thread, and by a signal."""
        self.is_ordered_to_stop = True

    def send(self, client: int, payload: bytes) -> None:
        """Send a message to one API server, unless the sockets are closed."""
        with self._lock:
            if not self._is_closed and client < len(self._outputs):
                self._outputs[client].send(payload)

    def send_to_coordinator(self, payload: bytes) -> None:
        """Send a message to the coordinator, if there is one."""
        with self._lock:
            if not self._is_closed and self._coordinator is not None:
                self._coordinator.send(payload)

    def say_dead(self) -> None:
        """Tell the front end that the engine has ended: it ends, too."""
        for client in range(len(self._outputs)):
            self.send(client, ENGINE_CORE_DEAD)

    def close(self) -> None:
        """Close the sockets, once their last messages are sent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for socket in self._inputs:
            socket.disable_monitor()
        self._context.destroy(linger=self._linger_ms)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # vLLM listens long before its API servers have started
        if kind in (zmq.DEALER, zmq.PUSH):
            socket.setsockopt(zmq.IDENTITY, self._identity)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        return socket
