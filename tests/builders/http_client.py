"""A client of HTTP that shows the bytes: no SDK mends or hides anything."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

__all__ = ["OpenStream", "Reply", "call", "events_of", "raw"]


class Reply:
    """What a server answered."""

    def __init__(self, status: int, headers: dict[str, str], payload: bytes) -> None:
        self.status = status
        self.headers = headers
        self.payload = payload

    @property
    def json(self) -> Any:
        return json.loads(self.payload)

    @property
    def error(self) -> dict[str, Any]:
        """What the envelope holds, which is all that there is."""
        assert self.headers["content-type"] == "application/json", self.payload
        (error,) = self.json.values()
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["code"] == self.status
        assert "Traceback" not in error["message"]
        if error["param"] and "maximum context length" not in error["message"]:  # those are vLLM's words
            assert error["param"] in error["message"], error  # many clients show the message alone
        return dict(error)


def call(url: str, path: str, body: Any = None, *, method: str | None = None, headers: Any = None) -> Reply:
    """Ask once."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    payload = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        of_body = {} if body is None else {"content-type": "application/json"}
        connection.request(method or ("GET" if body is None else "POST"), path, payload, {**of_body, **(headers or {})})
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def events_of(payload: bytes) -> list[Any]:
    """The events of a stream, which ends with [DONE]."""
    assert payload.endswith(b"data: [DONE]\n\n"), payload[-200:]
    lines = [line for line in payload.decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]


class OpenStream:
    """An answer that is read only when asked. Closes when the test is done with it."""

    def __init__(self, url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> None:
        host, _, port = urlsplit(url).netloc.partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        payload = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", f"host: {host}", "connection: close", "content-type: application/json"]
        head += [f"content-length: {len(payload)}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        self._socket.sendall("\r\n".join([*head, "", ""]).encode() + payload)

    def begin(self) -> bytes:
        """The first part that comes, with the head."""
        return self._socket.recv(65536)

    def read(self) -> bytes:
        """All that comes, head included, until the server closes."""
        parts = []
        while part := self._socket.recv(65536):
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> OpenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def raw(url: str, payload: bytes, *, shut: bool = True) -> bytes:
    """Send bytes, and return all that comes back."""
    host, _, port = urlsplit(url).netloc.partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(payload)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)
