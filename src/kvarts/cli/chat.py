"""`kvarts chat`: with a session of this process or of a server, or with a server of OpenAI's API."""

from __future__ import annotations

import codecs
import http.client
import os
import re
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import msgspec

from kvarts.cli.llm import SAMPLING
from kvarts.cli.options import INPUT, WINDOW, Command
from kvarts.cli.process import need_grpc
from kvarts.errors import ConfigError, InputError, MissingFileError
from kvarts.files import read_text
from kvarts.limits import brief
from kvarts.session.values import Done, StopReason, Token, Truncated

if TYPE_CHECKING:
    from kvarts.client import Session

__all__ = ["ByteText", "ModelText", "ServerChat", "chat_command", "is_http", "mock_server"]

NOTES = {
    StopReason.CANCELLED: "cancelled",
    StopReason.TRUNCATED: "the session cannot go on: the model was not trained for later positions",
}
TIMEOUT_S = 600.0
MAX_LINE_BYTES = 1 << 22
MAX_ANSWER_BYTES = 1 << 26
_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")


def is_http(address: str) -> bool:
    """Return whether `address` is a URL of HTTP, rather than HOST:PORT."""
    return address.startswith(("http://", "https://"))


@contextmanager
def mock_server() -> Iterator[str]:
    """Yield the URL of a mock of llama-3.1-8b on an h100-80gb, in this process."""
    from kvarts.executor.roofline import RooflineCost  # a chat with a server needs none
    from kvarts.openai_api.running import RunningServer

    cost = RooflineCost(llm="llama-3.1-8b", device="h100-80gb")
    with RunningServer(cost=cost, has_page=False) as server:
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
        payload = msgspec.json.encode(body)
        # A response that ends with its connection has the socket to itself: it is closed as well.
        with (
            closing(self._connection()) as connection,
            closing(self._request(connection, "POST", "/v1/chat/completions", payload)) as response,
        ):
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
        with (
            closing(self._connection()) as connection,
            closing(self._request(connection, "GET", "/v1/models")) as response,
        ):
            payload = response.read(MAX_LINE_BYTES)
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
            with closing(response):
                payload = response.read(MAX_LINE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"cannot be reached: {error}", field=where) from None
        try:
            told = msgspec.json.decode(payload)["error"]["message"]
        except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError):
            told = payload[:200].decode(errors="replace")
        raise ConfigError(f"answers {response.status}: {told}", field=where)


class ByteText:
    """Token ids are UTF-8 bytes. Ids above 255 are written as numbers."""

    eos_token_ids: tuple[int, ...] = ()

    def tokens(self, line: str, *, is_first: bool, end: int | None) -> list[int]:
        """Return the bytes of a line and its newline."""
        return list(f"{line}\n".encode())

    def writer(self) -> Callable[[int], str]:
        """Return an incremental UTF-8 decoder."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def write(token: int) -> str:
            if token < 256:
                return decoder.decode(bytes([token]))
            return decoder.decode(b"", final=True) + f"<{token}>"

        return write


ANSWER = "kvarts-answer-5d41402a"
"""Placeholder for an answer, to find the text that a template renders after one."""


class ModelText:
    """The tokenizer in a model's directory, with its chat template if it has one.

    A template renders a whole conversation, but a session needs only the text that a turn adds. So a conversation with
    a placeholder for the answer is rendered; the addition is the text after the placeholder, without the end-of-turn
    token if the model generated that.
    """

    def __init__(self, directory: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"a model's tokenizer needs transformers ({error})",
                field="model",
                hint="pip install 'kvarts[torch]', or leave --model out.",
            ) from None
        if directory.startswith(("/", ".", "~")) and not Path(directory).exists():
            hint = "Give a directory with a model, or `kvarts model tiny`."
            raise MissingFileError("no such directory", path=directory, hint=hint)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"has no tokenizer: {reason}", path=directory, hint="Give the directory of a model."
            ) from None
        eos = self._tokenizer.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)

    def tokens(self, line: str, *, is_first: bool, end: int | None) -> list[int]:
        """Return the tokens of a turn."""
        if not self._tokenizer.chat_template:
            return self._encode(f"{line}\n", add_special_tokens=is_first)
        message = {"role": "user", "content": line}
        if is_first:
            return self._encode(self._render([message]), add_special_tokens=False)
        answer = {"role": "assistant", "content": ANSWER}
        _, is_there, addition = self._render([message, answer, message]).partition(ANSWER)
        if not is_there:
            raise ConfigError("the chat template leaves answers out", field="model", hint="Leave --model out.")
        if end is not None:
            addition = addition.removeprefix(self._tokenizer.decode([end]))
        return self._encode(addition, add_special_tokens=False)

    def writer(self) -> Callable[[int], str]:
        """Return an incremental decoder of the tokenizer."""
        from tokenizers.decoders import DecodeStream

        backend, stream = self._tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(backend, token) or ""

    def _render(self, messages: list[dict[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return tokens


def _sampling_options(command: Any) -> Any:
    command = click.option("--ignore-eos", is_flag=True, help="The model's own end is a token like any other.")(command)
    for name, kind, text in reversed(SAMPLING):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, default=None, help=text)(command)
    return command


@click.command("chat", cls=Command)
@click.option("--address", metavar="ADDRESS", default="127.0.0.1:50051", show_default=True,
              help="Server: HOST:PORT for sessions over gRPC, http://HOST:PORT for OpenAI's API.")  # fmt: skip
@click.option("--mock", is_flag=True, help="Talk to a mock in this process.")
@click.option("--model", metavar="NAME", help="Over HTTP, the name of the model; over gRPC, a directory whose "
              "tokenizer and chat template are used. [the server's first; bytes are tokens]")  # fmt: skip
@click.option("--sink", metavar="N", type=click.IntRange(min=0), help="Keep the KV of the first N tokens,")
@click.option(
    "--window", metavar="N", type=WINDOW, help="and of the last N; all: of all tokens. [the server's setting]"
)
@click.option("--token-file", metavar="FILE", type=INPUT, help="File with the bearer token.")
@click.option("--tls", is_flag=True, help="Encrypt, and trust the certificates that the system trusts.")
@click.option("--tls-ca", metavar="FILE", type=INPUT, help="Encrypt, and trust the certificates in this file.")
@_sampling_options
def chat_command(**values: Any) -> None:
    """Talk to a server in the terminal: each line of standard input is a turn.

    After each turn, the speed and the retained KV, or the prompt tokens found in the cache, are printed on standard
    error. The end of the input closes the session; Ctrl-C ends an answer.
    """
    if values["mock"] or is_http(values["address"]):
        _chat_over_http(values)
        return
    need_grpc()
    from kvarts.client import Sessions

    token = None if values["token_file"] is None else _token_in(values["token_file"])
    sampling = {name: values[name] for name, _, _ in SAMPLING if values[name] is not None}
    sampling["ignore_eos"] = values["ignore_eos"]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    text = ByteText() if values["model"] is None else ModelText(values["model"])
    settings: dict[str, Any] = {"label": "kvarts chat", "eos_token_ids": text.eos_token_ids}
    if values["sink"] is not None:
        settings["sink"] = values["sink"]
    if values["window"] is not None:
        settings["window"] = values["window"] or None
    with (
        Sessions(values["address"], token=token, tls=values["tls"], tls_ca=values["tls_ca"]) as sessions,
        sessions.create(**settings) as session,
    ):
        _Chat(session, text, sampling).run()


def _chat_over_http(values: dict[str, Any]) -> None:
    for name in ("sink", "window"):
        if values[name] is not None:
            raise ConfigError("is of sessions over gRPC", field=name, hint="Leave it out, or give HOST:PORT.")
    fields = {name: values[name] for name, _, _ in SAMPLING if values[name] is not None}
    if values["ignore_eos"]:
        fields["ignore_eos"] = True
    token = None if values["token_file"] is None else _token_in(values["token_file"])
    with mock_server() if values["mock"] else nullcontext(values["address"]) as url:
        ServerChat(url, model=values["model"], token=token, tls_ca=values["tls_ca"], fields=fields).run(_lines())


class _Chat:
    """A conversation: reads lines and prints answers until the input ends."""

    def __init__(self, session: Session, text: ByteText | ModelText, sampling: dict[str, Any]) -> None:
        self._session = session
        self._text = text
        self._sampling = sampling
        self._end: int | None = None

    def run(self) -> None:
        """Run the turns."""
        is_first = True
        for line in _lines():
            # After Ctrl-C, the cancelled answer may still be ending: `queue` makes these calls wait for it.
            self._session.append(self._text.tokens(line, is_first=is_first, end=self._end), queue=True)
            is_first = False
            start_s = time.perf_counter()
            num_tokens = 0
            try:
                num_tokens = self._answer()
            except KeyboardInterrupt:
                click.echo("\nkvarts: cancelled", err=True)
                self._end = None
                continue
            self._say_figures(num_tokens, time.perf_counter() - start_s)

    def _answer(self) -> int:
        """Stream an answer to standard output; return its number of tokens."""
        write, last, done = self._text.writer(), None, None
        with closing(self._session.generate(queue=True, **self._sampling)) as updates:
            for update in updates:
                match update:
                    case Truncated(num_dropped):
                        click.echo(f"kvarts: {num_dropped:,} tokens are no longer attended to", err=True)
                    case Token(token_id):
                        last = token_id
                        click.echo(write(token_id), nl=False)
                    case Done():
                        done = update
        click.echo()
        assert done is not None
        self._end = last if done.stop_reason == StopReason.EOS else None
        if done.stop_reason in NOTES:
            click.echo(f"kvarts: {NOTES[done.stop_reason]}", err=True)
        return done.num_tokens

    def _say_figures(self, num_tokens: int, duration_s: float) -> None:
        info = self._session.info()
        click.echo(
            f"kvarts: {num_tokens} tokens, {num_tokens / duration_s:.1f} tokens/s; {info.kv_live_bytes:,} bytes of KV, "
            f"{info.num_retained:,} of {info.history_length:,} tokens",
            err=True,
        )


def _lines() -> Iterator[str]:
    """Yield the lines of standard input except empty ones; in a terminal, show a prompt for each."""
    try:
        for line in _typed_lines() if sys.stdin.isatty() else sys.stdin:
            if stripped := line.rstrip("\n"):
                stripped.encode()
                yield stripped
    except UnicodeError:
        raise ConfigError("is not text in UTF-8", field="standard input") from None


def _typed_lines() -> Iterator[str]:
    """Yield the lines typed in a terminal."""
    with suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited, and called back
    while True:
        try:
            line = input("> ")
        except EOFError:
            click.echo()
            return
        if line:
            yield line


def _token_in(path: Path) -> str:
    token = read_text(path, hint="Check the path of the token.").strip()
    if not token or len(token.split()) > 1 or not token.isascii():
        raise InputError("is not a token", path=path, hint="The file has one token, printable ASCII without spaces.")
    return token
