"""`kvarts mock --workers`: processes behind one port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvarts.cli.http_options import OneOfSeveral, say
from kvarts.cli.options import GroupedOption
from kvarts.combines import check_combination
from kvarts.errors import ConfigError

if TYPE_CHECKING:
    from kvarts.openai_api.answers import Rule
    from kvarts.settings import Given

__all__ = ["server_options", "start_if_several"]


def server_options() -> list[click.Option]:
    """Return `--workers`."""
    return [
        GroupedOption(
            ["--workers"], group="Listening", metavar="N", type=click.IntRange(min=1), default=1, show_default=True,
            help="Processes behind the port, each with an engine, and so with a device and a cache.",
        )
    ]  # fmt: skip


def start_if_several(params: dict[str, Any], given: Given, rules: Sequence[Rule], address: Any) -> OneOfSeveral | None:
    """Return in each of the workers that `--workers` asks for; None without several. The parent exits when all ended.

    Raise ConfigError for options that several workers cannot have.
    """
    if params["workers"] == 1:
        return None
    asked = {
        "workers": "workers",
        **({"live_fleet": "fleet"} if params["fleet"] is not None else {}),
        **({"several": "--model"} if given.names("models") else {}),
        **({"record": "record"} if params["record"] is not None else {}),
        **({"scripts": "fail"} if params["fail"] else {}),
        **({"uses": "answers"} if any(rule.times is not None for rule in rules) else {}),
        **({"record_from": "record_from"} if params["record_from"] is not None else {}),
        **({"state_dir": "state_dir"} if params["state_dir"] is not None else {}),
    }
    check_combination(asked)
    _check_events(params)
    from kvarts.openai_api.workers.processes import WorkersEndedError, start_workers

    num_workers = params["workers"]
    try:
        worker = start_workers(
            num_workers,
            address,
            ready=lambda url, what: say(f"{num_workers} workers, each {what} on {url}/v1"),
            say=say,
        )
    except WorkersEndedError as error:
        raise click.exceptions.Exit(error.code) from None
    from kvarts.openai_api.workers.together import joined

    return OneOfSeveral(worker.rank, worker.listening, lambda opened: joined(opened, worker), worker.report_ready)


def _check_events(params: dict[str, Any]) -> None:
    """Raise ConfigError if the KV events of one worker and the replay of another would have one port."""
    events, replay = params["kv_events"], params["kv_events_replay"]
    if events is None or replay is None:
        return
    ports = [port for endpoint in (events, replay) if (port := endpoint.rpartition(":")[2]).isdecimal()]
    if len(ports) == 2 and 0 < abs(int(ports[0]) - int(ports[1])) < params["workers"] and "0" not in ports:
        raise ConfigError(
            f"would have a port of another worker's: each has the next port after {replay}",
            field="kv_events_replay",
            hint="Let --kv-events and --kv-events-replay be further apart: tcp://127.0.0.1:5557 and :5657.",
        )
