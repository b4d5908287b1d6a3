"""Sessions over gRPC: each call is parsed, asked of the runtime, and its answer sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from kvarts.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.proto.kvarts.v1 import sessions_pb2 as added
from kvarts.serve.messages import bytes_of_update, given, info_message, params_of, parsed, settings_of
from kvarts.serve.owners import OWNER
from kvarts.serve.statuses import refuse
from kvarts.session.runtime import SessionRuntime

__all__ = ["CONTRACT", "SERVICE", "SessionsDoor"]

CONTRACT = contract.DESCRIPTOR.services_by_name["RuntimeService"].full_name
SERVICE = added.DESCRIPTOR.services_by_name["Sessions"].full_name

INFOS_AT_ONCE = 100
"""Of a list, what is rendered before others have a turn on the loop: about a millisecond."""

Call = Callable[[str, Any], Awaitable[Message]]


class SessionsDoor:
    """Both services on one runtime, a method for each call. For one event loop.

    Requests and answers are bytes to grpc: so bytes that are no message are refused like any other bad value, and a
    token costs one message and no second copy. A stream is written, not yielded, so that a client that vanishes
    cancels the very coroutine that holds the runtime's generator, which is then closed at once.
    """

    def __init__(self, runtime: SessionRuntime) -> None:
        self._runtime = runtime
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_closing = False

    def handlers(self) -> list[Any]:
        """Return what a server needs to answer both services."""
        calls: dict[str, tuple[type[Message], Call]] = {
            "CreateSession": (added.CreateSessionRequest, self._create),
            "AppendTokens": (added.AppendTokensRequest, self._append),
            "CloseSession": (contract.CloseSessionRequest, self._close),
            "GetSessionInfo": (contract.GetSessionInfoRequest, self._counters),
        }
        new_calls: dict[str, tuple[type[Message], Call]] = {
            "Cancel": (added.CancelRequest, self._cancel),
            "Fork": (added.ForkRequest, self._fork),
            "Rollback": (added.RollbackRequest, self._rollback),
            "List": (added.ListRequest, self._list),
            "Info": (added.InfoRequest, self._info),
        }
        old = {name: self._unary(kind, call) for name, (kind, call) in calls.items()}
        new = {name: self._unary(kind, call) for name, (kind, call) in new_calls.items()}
        generate = grpc.unary_stream_rpc_method_handler
        return [
            grpc.method_handlers_generic_handler(CONTRACT, {**old, "Generate": generate(self._generate_by_contract)}),
            grpc.method_handlers_generic_handler(SERVICE, {**old, **new, "Generate": generate(self._generate)}),
        ]

    async def close(self, grace_s: float) -> None:
        """Refuse calls from now on, shut the runtime down, and give calls under way `grace_s` to send their last."""
        self._is_closing = True
        await self._runtime.shut_down()
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace_s)

    def _unary(self, kind: type[Message], call: Call) -> Any:
        async def answer(data: bytes, context: Any) -> bytes:
            await self._begin(context)
            try:
                return (await call(OWNER.get(), parsed(kind, data))).SerializeToString()
            except (Exception, asyncio.CancelledError) as error:
                await _give_up(context, error)

        return grpc.unary_unary_rpc_method_handler(answer)

    async def _begin(self, context: Any) -> None:
        if self._is_closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _create(self, owner: str, request: added.CreateSessionRequest) -> Message:
        settings = settings_of(request, self._runtime.defaults)
        return contract.CreateSessionResponse(session_id=await self._runtime.create(owner, settings))

    async def _append(self, owner: str, request: added.AppendTokensRequest) -> Message:
        length = await self._runtime.append(
            owner,
            request.session_id,
            list(request.token_ids),
            expected_length=given(request, "expected_length"),
            queue=request.queue,
        )
        return contract.AppendTokensResponse(history_length=length)

    async def _close(self, owner: str, request: contract.CloseSessionRequest) -> Message:
        length = await self._runtime.close(owner, request.session_id)
        return contract.CloseSessionResponse(final_history_length=length)

    async def _counters(self, owner: str, request: contract.GetSessionInfoRequest) -> Message:
        info = await self._runtime.info(owner, request.session_id)
        return contract.GetSessionInfoResponse(
            history_length=info.history_length,
            kv_live_bytes=info.kv_live_bytes,
            cache_invariant_inv1_violations=info.inv1_violations,
            cache_invariant_inv2_violations=info.inv2_violations,
            idle_seconds=info.idle_s,
        )

    async def _cancel(self, owner: str, request: added.CancelRequest) -> Message:
        return added.CancelResponse(cancelled=await self._runtime.cancel(owner, request.session_id))

    async def _fork(self, owner: str, request: added.ForkRequest) -> Message:
        session_id = await self._runtime.fork(
            owner, request.session_id, label=request.client_label, queue=request.queue
        )
        return added.ForkResponse(session_id=session_id)

    async def _rollback(self, owner: str, request: added.RollbackRequest) -> Message:
        length = await self._runtime.rollback(owner, request.session_id, request.length, queue=request.queue)
        return added.RollbackResponse(history_length=length)

    async def _list(self, owner: str, _: added.ListRequest) -> Message:
        infos = await self._runtime.list(owner)
        response = added.ListResponse()
        for begin in range(0, len(infos), INFOS_AT_ONCE):
            response.sessions.extend(info_message(info) for info in infos[begin : begin + INFOS_AT_ONCE])
            await asyncio.sleep(0)
        return response

    async def _info(self, owner: str, request: added.InfoRequest) -> Message:
        return info_message(await self._runtime.info(owner, request.session_id))

    async def _generate_by_contract(self, data: bytes, context: Any) -> None:
        # There, tokens end a generation only if they were given when the session was made.
        await self._stream(data, context, ignore_eos=True)

    async def _generate(self, data: bytes, context: Any) -> None:
        await self._stream(data, context, ignore_eos=False)

    async def _stream(self, data: bytes, context: Any, *, ignore_eos: bool) -> None:
        await self._begin(context)
        try:
            request = parsed(added.GenerateRequest, data)
            request.ignore_eos |= ignore_eos
            params = params_of(request)
            updates = self._runtime.generate(OWNER.get(), request.session_id, params, queue=request.queue)
            async with aclosing(updates):
                async for update in updates:
                    await context.write(bytes_of_update(update))
        except grpc.aio.BaseError:
            raise asyncio.CancelledError from None  # it could not be sent: the client has gone
        except (Exception, asyncio.CancelledError) as error:
            await _give_up(context, error)


async def _give_up(context: Any, error: BaseException) -> NoReturn:
    """Refuse a call. If it was the call itself that was cancelled, nothing can be sent: raise that on."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
    await refuse(context, error)
