"""Options of HTTP servers, and the function that serves."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import ConfigError
from kvarts.base.files import check_writable, is_replaceable
from kvarts.base.tenants import check_key
from kvarts.cli.options import INPUT, OUTPUT, GroupedOption, KeyOption
from kvarts.cli.process import collect_garbage
from kvarts.doors.exposure import is_loopback

if TYPE_CHECKING:
    from pathlib import Path

    from kvarts.base.tenants import Keys
    from kvarts.doors.openai.access import AccessLog
    from kvarts.doors.openai.opening import Opened

__all__ = [
    "address_of",
    "door_settings",
    "failure_options",
    "http_options",
    "keys_of",
    "need_http",
    "say",
    "serve_http",
]

Command = Callable[..., Any]


AT_LEAST_ZERO = click.FloatRange(min=0.0)


def http_options() -> list[click.Option]:
    """Return the options that every HTTP server has."""
    listening, keys, taking, recording = "Listening", "Keys and owners", "Requests", "Records"

    def option(group: str, *names: str, **attributes: Any) -> click.Option:
        return GroupedOption(list(names), group=group, **attributes)

    def key(group: str, *names: str, **attributes: Any) -> click.Option:
        return KeyOption(list(names), group=group, **attributes)

    return [
        option(listening, "--host", metavar="HOST", default="127.0.0.1", show_default=True,
               help="Address to listen on."),
        option(listening, "--port", metavar="N", type=click.IntRange(0, 65535), default=8000, show_default=True,
               help="0: a free one."),
        option(listening, "--tls-cert", metavar="FILE", type=INPUT, help="Certificate, PEM. With --tls-key: encrypt."),
        option(listening, "--tls-key", metavar="FILE", type=INPUT, help="Its key."),
        option(listening, "--insecure", is_flag=True,
               help="Allow an address that other machines reach, without TLS or without a key."),
        option(listening, "--served-model-name", "names", metavar="NAME", multiple=True,
               help="Name of the model for clients. May be repeated."),
        key(listening, "--lora", "adapters", metavar="NAME[=PATH]", multiple=True,
            help="One more model name, with separate KV, like a LoRA adapter. May be repeated."),
        key(listening, "--startup-delay", metavar="SECONDS", type=AT_LEAST_ZERO, default=0.0,
            help="Answer for this long that the server is starting."),
        key(listening, "--drain", "drain", metavar="SECONDS", type=AT_LEAST_ZERO, default=30.0, show_default=True,
            help="At SIGTERM, wait as long for requests under way."),
        key(listening, "--drain-delay", "drain_delay", metavar="SECONDS", type=AT_LEAST_ZERO, default=0.0,
            help="Before that, answer 503 to /health and accept requests for so long, for load balancers. [0]"),
        key(listening, "--ui", "has_page", type=click.BOOL, default=True, help="Serve a live page at /. [true]"),
        option(keys, "--api-key", "api_keys", metavar="KEY", multiple=True,
               help="Ask for one of these keys; each is another owner's. May be repeated; $VLLM_API_KEY is one more. "
               "Local users can read a key on a command line: --api-key-file hides it."),
        option(keys, "--api-key-file", metavar="FILE", type=INPUT,
               help="Keys, one per line, each optionally followed by owner=NAME, share=NUMBER and priority."),
        key(keys, "--admin-key", "admin_keys", metavar="KEY", multiple=True,
            help="Ask for this key where the server is changed. $KVARTS_ADMIN_KEY is one more."),
        key(keys, "--admin-key-file", metavar="FILE", type=INPUT, help="Keys of administrators, one per line."),
        key(keys, "--share-prefix-cache", is_flag=True,
            help="With several owners: let them hit each other's KV, which reveals prompts of others."),
        key(keys, "--allow-origin", "origins", metavar="ORIGIN", multiple=True,
            help="Without a key, let web pages of this origin ask: http://localhost:3000. May be repeated."),
        key(keys, "--allow-host", "hosts", metavar="NAME", multiple=True,
            help="Without a key: a host name that requests may use, besides addresses and localhost."),
        option(taking, "--max-model-len", key="max_model_len", metavar="TOKENS", type=click.IntRange(min=2),
               help="Most tokens of a prompt and its answer. [the model's limit, or the tokens of all pages]"),
        key(taking, "--max-queued", metavar="N", type=click.IntRange(min=0), default=1024, show_default=True,
            help="Requests beyond those that may run at once; more get 429."),
        key(taking, "--retry-after", metavar="SECONDS", type=AT_LEAST_ZERO, default=1.0, show_default=True,
            help="Their retry-after header."),
        key(taking, "--max-body-bytes", metavar="N", type=click.IntRange(min=1024), default=8 * 1024 * 1024,
            show_default=True, help="Refuse longer requests."),
        option(recording, "--record", metavar="FILE", type=OUTPUT,
               help="At the end, write the requests that arrived to FILE (.jsonl), for `kvarts replay`."),
        key(recording, "--kv-cache-metrics", is_flag=True,
            help="Measure how long KV blocks stay in memory: vllm:kv_block_lifetime_seconds and others."),
        key(recording, "--kv-cache-metrics-sample", metavar="SHARE", type=float,
            help="Share of the blocks to measure, above 0 and at most 1. [0.01]"),
        key(recording, "--access-log", metavar="FILE", type=OUTPUT,
            help="Append a line of JSON for each request; - is standard output."),
    ]  # fmt: skip


def need_http() -> None:
    """Raise ConfigError if the libraries of servers are not installed."""
    # The libraries are looked up, not imported: prometheus_client is imported only when /metrics needs it.
    missing = [name for name in ("httptools", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a server needs httptools and prometheus-client (there is no {', no '.join(missing)})",
            hint="pip install 'kvarts[serve]'.",
        )


def failure_options() -> list[click.Option]:
    """Return the options that make a server fail on purpose."""
    failing = "Failures on purpose"
    return [
        GroupedOption(["--fail"], group=failing, metavar="SCRIPT",
                      help="Script of failures. Such as 'first 2: 429 retry_after=1; every 10th: cut after 5 chunks'."),
        KeyOption(["--allow-failures"], group=failing, is_flag=True,
                      help="Permit requests to choose their failure, and /admin/config to set another script."),
    ]  # fmt: skip


def keys_of(values: dict[str, Any]) -> Keys | None:
    """Return the API keys; None without any. Raise ConfigError, MissingFileError or InputError."""
    from kvarts.base.tenants import Keys, read_keys

    keys: dict[str, list[str]] = {}
    named = {}
    kinds = (("api_key", "--api-key", "VLLM_API_KEY"), ("admin_key", "--set admin_key", "KVARTS_ADMIN_KEY"))
    for kind, flag, variable in kinds:
        keys[kind] = list(values[f"{kind}s"])
        if keys[kind]:
            say(f"other users can read {flag} in the list of processes: --{kind.replace('_', '-')}-file hides it")
        if variable in os.environ:
            keys[kind].append(os.environ[variable])
        for key in keys[kind]:
            check_key(key, flag if key in values[f"{kind}s"] else variable)
        path = values[f"{kind}_file"]
        if path is not None and kind == "api_key":
            named = read_keys(path)
        elif path is not None:
            keys[kind] += read_keys(path)
    if not (keys["api_key"] or named or keys["admin_key"]):
        return None
    is_named = not keys["api_key"] and all(owner.name for owner in named.values())
    if values.get("state_dir") is not None and len({*keys["api_key"], *named}) > 1 and not is_named:
        raise ConfigError(
            "sessions are kept for their owners, and owners without a name are told apart by their place only",
            field="state_dir",
            hint="Give --api-key-file, with owner=NAME after each key.",
        )
    return Keys.of(keys["api_key"], named, admin_keys=keys["admin_key"])


def door_settings(values: dict[str, Any], keys: Keys | None) -> dict[str, Any]:
    """Return the settings of a Door that concern keys and requests without a key."""
    asks = keys is not None and bool(keys.shares)
    if values["share_prefix_cache"] and not (keys is not None and keys.has_several_owners):
        raise ConfigError(
            "is of several owners", field="share_prefix_cache", hint="Give several keys, or leave it out."
        )
    # A page in a browser can reach this machine's loopback address by any host name, so names are checked there. Other
    # addresses are open by --insecure.
    checks_names = not asks and is_loopback(values["host"])
    return {
        "keys": keys,
        "shares_prefix_cache": values["share_prefix_cache"],
        "has_page": values["has_page"],
        "access_log": _access_log(values["access_log"]),
        "residency_share": _residency_share(values),
        "origins": values["origins"],
        "hosts": (values["host"], *values["hosts"]) if checks_names else None,
    }


def _residency_share(values: dict[str, Any]) -> float:
    """Return the share of blocks whose residency is measured. Raise ConfigError."""
    share = values["kv_cache_metrics_sample"]
    if not values["kv_cache_metrics"]:
        if share is not None:
            raise ConfigError("needs --set kv_cache_metrics=true", field="kv_cache_metrics_sample")
        return 0.0
    from kvarts.doors.openai.meter import DEFAULT_SHARE, Residency

    return Residency(DEFAULT_SHARE if share is None else share).share


def _access_log(path: Path | None) -> AccessLog | None:
    """Return the access log at `path`, if there is to be one. Raise OutputError."""
    if path is None:
        return None
    from kvarts.doors.openai.access import AccessLog

    check_writable(path)
    return AccessLog(path, say)


def address_of(values: dict[str, Any], keys: Keys | None) -> Any:
    """Return the address to listen on, after checking the paths to write. Raise ConfigError and OutputError."""
    from kvarts.doors.openai.server import Address

    if values["record"] is not None:
        check_writable(values["record"])
        if is_replaceable(values["record"]) and values["record"].suffix != ".jsonl":
            raise ConfigError("must end in .jsonl", field="record")
    return Address(
        host=values["host"],
        port=values["port"],
        has_keys=keys is not None and bool(keys.shares),
        tls_cert=values["tls_cert"],
        tls_key=values["tls_key"],
        insecure=values["insecure"],
    )


def say(line: str) -> None:
    """Print a line on standard error."""
    click.echo(f"kvarts: {line}", err=True)


def serve_http(opened: Opened, address: Any, values: dict[str, Any], *, what: str) -> None:
    """Serve until a signal arrives, then write the recorded requests."""
    from kvarts.doors.openai.server import serve_until_signal
    from kvarts.sim.report.run_directory import named

    async def serve() -> None:
        server = opened.server(address, say=say)

        def ready(url: str) -> None:
            say(f"{what} on {url}/v1")
            for name, of_worker in server.urls:
                say(f"{name} on {of_worker}/v1")

        await serve_until_signal(
            server,
            ready,
            startup_delay_s=values["startup_delay"],
            drain_s=values["drain"],
            drain_delay_s=values["drain_delay"],
            say=say,
        )

    collect_garbage()
    # Reference counting frees most objects of a request; a collection in a burst of tokens would delay it. Objects
    # that live a little longer are freed only by full collections: with too few of them, memory grows for half an hour.
    gc.set_threshold(10_000, 5, 2)
    sys.setswitchinterval(0.001)  # the engine's thread must be scheduled on time while the event loop's thread is busy
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
    else:  # one file per model, with a common time origin
        began_ns = [recorder.began_ns for recorder in recorders.values() if recorder.began_ns is not None]
        for name, recorder in recorders.items():
            path = named(values["record"], name)
            assert path is not None
            recorder.write(path, began_ns=min(began_ns, default=None))
