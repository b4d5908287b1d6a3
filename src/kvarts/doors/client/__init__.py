"""A client of session servers: blocking (`Sessions`) and for asyncio (`AsyncSessions`).

    from kvarts.doors.client import Sessions

    with Sessions("127.0.0.1:50051") as sessions, sessions.create(window=1024) as session:
        session.append([1, 2, 3])
        for update in session.generate(max_tokens=64):
            print(update)

It requires grpcio and protobuf (`pip install 'kvarts[grpc]'`), and imports nothing of the server.
"""

from kvarts.doors.client.sessions import (
    AsyncSession,
    AsyncSessions,
    CallCancelledError,
    NotAuthenticatedError,
    ServerError,
    ServerUnreachableError,
    Session,
    Sessions,
)

__all__ = [
    "AsyncSession",
    "AsyncSessions",
    "CallCancelledError",
    "NotAuthenticatedError",
    "ServerError",
    "ServerUnreachableError",
    "Session",
    "Sessions",
]
