"""Options of servers over HTTP, and the loop that serves."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from kvarts.cli.options import GroupedOption
from kvarts.cli.paths import INPUT, OUTPUT
from kvarts.errors import ConfigError
from kvarts.files import check_writable, is_replaceable

if TYPE_CHECKING:
    from kvarts.openai_api.opening import Opened
    from kvarts.owners.keys import Keys

__all__ = ["address_of", "http_options", "keys_of", "need_http", "say", "serve_http"]

Command = Callable[..., Any]
AT_LEAST_ZERO = click.FloatRange(min=0.0)


def http_options() -> list[click.Option]:
    """Return the options that every server over HTTP has."""
    listening, taking, failing = "Listening", "Requests", "Failures on purpose, and records"

    def option(group: str, *names: str, **attributes: Any) -> click.Option:
        return GroupedOption(list(names), group=group, **attributes)

    return [
        option(listening, "--host", metavar="HOST", default="127.0.0.1", show_default=True,
               help="Address to listen on."),
        option(listening, "--port", metavar="N", type=click.IntRange(0, 65535), default=8000, show_default=True,
               help="0: a free one."),
        option(listening, "--api-key", "api_keys", metavar="KEY", multiple=True,
               help="Ask for one of these keys. May be repeated; $VLLM_API_KEY is one more. Local users can read a key "
               "on a command line: --api-key-file hides it."),
        option(listening, "--api-key-file", metavar="FILE", type=INPUT,
               help="Keys, one a line."),
        option(listening, "--tls-cert", metavar="FILE", type=INPUT, help="Certificate, PEM. With --tls-key: encrypt."),
        option(listening, "--tls-key", metavar="FILE", type=INPUT, help="Its key."),
        option(listening, "--insecure", count=True,
               help="Given twice: allow an address that other machines reach, without TLS or without a key."),
        option(listening, "--served-model-name", "names", metavar="NAME", multiple=True,
               help="What clients call the model. May be repeated."),
        option(listening, "--lora", "adapters", metavar="NAME", multiple=True,
               help="One more model name, with KV of its own, as a LoRA adapter has. May be repeated."),
        option(listening, "--startup-delay", metavar="SECONDS", type=AT_LEAST_ZERO, default=0.0,
               help="Answer that the server is starting for so long."),
        option(listening, "--drain", "drain", metavar="SECONDS", type=AT_LEAST_ZERO, default=30.0, show_default=True,
               help="At SIGTERM, wait as long for requests under way."),
        option(taking, "--max-model-len", metavar="TOKENS", type=click.IntRange(min=2),
               help="Tokens of a prompt and its answer. [those of the model, or what the pages hold]"),
        option(taking, "--max-queued", metavar="N", type=click.IntRange(min=0), default=1024, show_default=True,
               help="Requests beyond those that may run at once; more get 429."),
        option(taking, "--retry-after", metavar="SECONDS", type=AT_LEAST_ZERO, default=1.0, show_default=True,
               help="What these are told."),
        option(taking, "--max-body-bytes", metavar="N", type=click.IntRange(min=1024), default=32 * 1024 * 1024,
               show_default=True, help="Refuse longer requests."),
        option(taking, "--trust-request-chat-template", is_flag=True,
               help="Render the chat templates that requests bring, which may compute for ever."),
        option(failing, "--fail", metavar="SCRIPT",
               help="What goes wrong: 'first 2: 429 retry_after=1; every 10th: cut after 5 chunks'."),
        option(failing, "--record", metavar="FILE", type=OUTPUT,
               help="At the end, write what arrived to FILE (.jsonl), for `kvarts replay`."),
    ]  # fmt: skip


def need_http() -> None:
    """Raise ConfigError where the libraries of servers are not installed."""
    # They are looked for, not imported: what only /metrics needs can wait for that.
    missing = [name for name in ("httptools", "prometheus_client", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a server needs uvicorn, httptools and prometheus-client (there is no {', no '.join(missing)})",
            hint="pip install 'kvarts[serve]'.",
        )


def keys_of(values: dict[str, Any]) -> Keys | None:
    """Return the API keys that were given; None for none. Raise ConfigError, MissingFileError or InputError."""
    from kvarts.owners.keys import Keys, read_keys

    given = [*values["api_keys"], *filter(None, [os.environ.get("VLLM_API_KEY")])]
    named = {} if values["api_key_file"] is None else read_keys(values["api_key_file"])
    return Keys.of(given, named) if given or named else None


def address_of(values: dict[str, Any], keys: Keys | None) -> Any:
    """Return where to listen, and check what is to be written. Raise ConfigError and OutputError."""
    from kvarts.openai_api.server import Address

    if values["record"] is not None:
        check_writable(values["record"])
        if is_replaceable(values["record"]) and values["record"].suffix != ".jsonl":
            raise ConfigError("must end in .jsonl", field="record")
    return Address(
        host=values["host"],
        port=values["port"],
        has_keys=keys is not None,
        tls_cert=values["tls_cert"],
        tls_key=values["tls_key"],
        insecure=values["insecure"],
    )


def say(line: str) -> None:
    """Tell something on standard error."""
    click.echo(f"kvarts: {line}", err=True)


def serve_http(opened: Opened, address: Any, values: dict[str, Any], *, what: str) -> None:
    """Serve until a signal, and write what was to be recorded."""
    from kvarts.openai_api.server import OpenAIServer, serve_until_signal
    from kvarts.report.run_directory import named

    async def serve() -> None:
        server = OpenAIServer(opened.app, opened.models, address)
        await serve_until_signal(
            server,
            opened.models,
            lambda url: say(f"{what} on {url}/v1"),
            startup_delay_s=values["startup_delay"],
            drain_s=values["drain"],
            say=say,
        )

    # The script of kvarts never collects garbage, for commands that end. This one goes on.
    gc.freeze()
    gc.enable()
    # Most of what a request makes goes without the collector; in the midst of a burst of tokens it would be late. What
    # lives a little longer goes only with a full collection: too few of these, and memory grows for half an hour.
    gc.set_threshold(10_000, 5, 2)
    sys.setswitchinterval(0.001)  # the engine's thread has to be on time beside that of the event loop
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve())
    else:
        uvloop.run(serve())
    recorders = {served.names[0]: served.recorder for served in opened.models if served.recorder is not None}
    if len(recorders) == 1:
        (recorder,) = recorders.values()
        recorder.write(values["record"])
    else:  # a file for each, all with one beginning
        began_ns = [recorder.began_ns for recorder in recorders.values() if recorder.began_ns is not None]
        for name, recorder in recorders.items():
            path = named(values["record"], name)
            assert path is not None
            recorder.write(path, began_ns=min(began_ns, default=None))
