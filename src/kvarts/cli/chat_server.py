"""A chat in the terminal with a server of OpenAI's API, or with a mock in this process."""

from __future__ import annotations

import http.client
import re
import ssl
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec

from kvarts.errors import ConfigError
from kvarts.limits import brief
from kvarts.rooms import from_room

__all__ = ["ServerChat", "is_http", "mock_server"]

TIMEOUT_S = 600.0
MAX_LINE_BYTES = 1 << 22
MAX_ANSWER_BYTES = 1 << 26
_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")


def is_http(address: str) -> bool:
    """Return whether `address` is a URL of HTTP, rather than HOST:PORT."""
    return address.startswith(("http://", "https://"))


@contextmanager
def mock_server() -> Iterator[str]:
    """Yield the URL of a mock of llama-3.1-8b on an h100-80gb, in this process. Raise ConfigError without its room."""
    start = from_room("openai_api.running", "RunningServer", field="mock")
    cost = from_room("executor.roofline", "RooflineCost", field="mock")(llm="llama-3.1-8b", device="h100-80gb")
    with start(cost=cost, has_page=False) as server:
        yield server.url


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


class ServerChat:
    """A conversation with the server at `url`, with or without `/v1`. `model`: by default the server's first.

    `token`: a key. `tls_ca`: a file of certificates to trust. Raises ConfigError.
    """

    def __init__(
        self, url: str, *, model: str | None, token: str | None, tls_ca: Path | None, fields: dict[str, Any]
    ) -> None:
        try:
            is_url = _URL.fullmatch(url) is not None and urlsplit(url).port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise ConfigError(f"is not a URL of HTTP: {brief(url)}", field="address", hint="Give http://HOST:PORT.")
        self._url = urlsplit(url.rstrip("/").removesuffix("/v1"))
        self._context = None
        if self._url.scheme == "https":
            try:
                self._context = ssl.create_default_context(cafile=tls_ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"cannot be read: {error}", field="tls_ca") from None
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._messages: list[dict[str, str]] = []
        self._fields = {"model": model or self._first_model(), "stream": True, **fields}
        self._fields["stream_options"] = {"include_usage": True}

    def run(self, lines: Iterable[str]) -> None:
        """Run a turn for each line; print answers on standard output, and figures on standard error."""
        for line in lines:
            self._messages.append({"role": "user", "content": line})
            answer: list[str] = []
            try:
                self._answer(answer)
            except KeyboardInterrupt:
                click.echo("\nkvarts: cancelled", err=True)
            except BaseException:
                click.echo()
                raise
            self._messages.append({"role": "assistant", "content": "".join(answer)})

    def _answer(self, answer: list[str]) -> None:
        """Stream one answer to standard output, and add its texts to `answer`."""
        start_s = time.perf_counter()
        first_s, usage, reason, is_thinking = None, None, None, False
        for chunk in self._chunks({**self._fields, "messages": self._messages}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                delta, reason = choice.delta, choice.finish_reason or reason
                if (delta.content or delta.reasoning_content) and first_s is None:
                    first_s = time.perf_counter()
                if delta.reasoning_content:
                    click.secho(delta.reasoning_content, nl=False, err=True, dim=True)
                    is_thinking = True
                if delta.content:
                    if is_thinking:
                        click.echo(err=True)
                        is_thinking = False
                    click.echo(delta.content, nl=False)
                    answer.append(delta.content)
        click.echo()
        end_s = time.perf_counter()
        told = [] if first_s is None else [f"TTFT {1e3 * (first_s - start_s):.0f} ms"]
        if usage is not None:
            told.append(f"{usage.completion_tokens} tokens")
            if first_s is not None and usage.completion_tokens > 1 and end_s > first_s:
                told.append(f"{(usage.completion_tokens - 1) / (end_s - first_s):.1f} tokens/s")
            cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
            told.append(f"{cached or 0:,} of {usage.prompt_tokens:,} prompt tokens found")
        if reason not in (None, "stop"):
            told.append(f"ended by {reason}")
        click.echo(f"kvarts: {', '.join(told) or 'an empty answer'}", err=True)

    def _chunks(self, body: dict[str, Any]) -> Iterator[_Chunk]:
        """Yield the events of a streamed answer. Raise ConfigError for an error of the server."""
        with closing(self._connection()) as connection:
            response = self._request(connection, "POST", "/v1/chat/completions", msgspec.json.encode(body))
            num_bytes = 0
            try:
                while line := response.readline(MAX_LINE_BYTES):
                    num_bytes += len(line)
                    if num_bytes > MAX_ANSWER_BYTES:
                        raise ConfigError(f"has more than {MAX_ANSWER_BYTES:,} bytes", field="answer")
                    if not line.startswith(b"data:") or (event := line[5:].strip()) == b"[DONE]":
                        continue
                    chunk = msgspec.json.decode(event, type=_Chunk)
                    if chunk.error is not None:
                        raise ConfigError(str(chunk.error.get("message", chunk.error)), field=self._url.netloc)
                    yield chunk
            except (OSError, http.client.HTTPException, msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"the answer broke off: {error}", field=self._url.netloc) from None

    def _first_model(self) -> str:
        with closing(self._connection()) as connection:
            payload = self._request(connection, "GET", "/v1/models").read(MAX_LINE_BYTES)
        try:
            return str(msgspec.json.decode(payload)["data"][0]["id"])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, UnicodeDecodeError):
            raise ConfigError("lists no models at /v1/models", field=self._url.netloc, hint="Give --model.") from None

    def _connection(self) -> http.client.HTTPConnection:
        host, port = str(self._url.hostname), self._url.port
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=self._context)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        """Return an answer whose status is 200. Raise ConfigError."""
        where = self._url.netloc
        try:
            connection.request(method, f"{self._url.path}{path}", body, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            payload = response.read(MAX_LINE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"cannot be reached: {error}", field=where) from None
        try:
            told = msgspec.json.decode(payload)["error"]["message"]
        except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError):
            told = payload[:200].decode(errors="replace")
        raise ConfigError(f"answers {response.status}: {told}", field=where)
