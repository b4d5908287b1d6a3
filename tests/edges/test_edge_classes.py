"""Values that no command takes, whichever command and option: text that is none, NaN, ports, work without bound.

Each rule stands in one place of the command line; the tests walk over all commands, also those that serve and talk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from kvarts.cli.options import NEVER, role_of

from builders.calls import CALLS, commands

Call = Callable[..., tuple[int, bytes, str]]

EVERY = [name for name, call in CALLS.items() if call.needs]
NO_TEXT = "\udcff"
"""An argument with a byte that is not UTF-8, as Python hands it on."""
ALSO = {
    "mock": ("--host", "127.0.0.1", "--port", "0"),
    "plan slo": ("--slo-ttft-ms", "300"),
    "serve sessions": ("--mock", "--host", "nowhere"),
    "watch": ("tcp://127.0.0.1:1", "--duration", "0.1"),
}
"""What goes before a value, where the call of the table is another mode."""


def takes_text(param: click.Parameter) -> bool:
    """Whether any text is handed to the command: no number, no choice, no flag, no path."""
    is_open = isinstance(param.type, click.types.StringParamType) or type(param.type).__module__.startswith("kvarts")
    return is_open and role_of(param) is None and not getattr(param, "is_flag", False)


def takes_float(param: click.Parameter) -> bool:
    return isinstance(param.type, click.types.FloatParamType)


def calls(wanted: Callable[[click.Parameter], bool]) -> list[Any]:
    return [
        pytest.param(name, param, id=f"{name} {param.opts[0]}")
        for name in EVERY
        for param in commands()[name].params
        if wanted(param)
    ]


def given(name: str, param: click.Parameter, value: str) -> list[str]:
    """Return the call of a command with `value` for one of its parameters."""
    if param.param_type_name == "argument":
        return [*name.split(), value]
    return [*name.split(), *ALSO.get(name, CALLS[name].arguments), param.opts[0], value]


@pytest.mark.parametrize(("name", "param"), calls(takes_text))
def test_text_that_is_not_utf8_is_refused(name: str, param: click.Parameter, here: Path, call: Call) -> None:
    code, _, said = call(*given(name, param, NO_TEXT))
    assert code in (2, 3), said
    assert "Traceback" not in said and len(said) < 3000


@pytest.mark.parametrize(("name", "param"), calls(takes_float))
def test_no_number_is_nan_or_infinite(name: str, param: click.Parameter, here: Path, call: Call) -> None:
    for value in ("nan", "-inf") if param.opts[0] in NEVER else ("nan", "inf", "-inf"):
        code, _, said = call(*given(name, param, value))
        assert code == 2 and param.opts[0] in said, (value, said)


def ports() -> list[Any]:
    """Calls with an address of which the port is left open, and whether 0, any free port, is one."""
    return [
        pytest.param(name, words, is_any, id=f"{name} {words[0]}")
        for name, words, is_any in (
            ("mock", ("--port", "{}"), True),
            ("mock", ("--port", "0", "--kv-events", "tcp://127.0.0.1:{}"), True),
            (
                "mock",
                ("--port", "0", "--set", "kv_events_replay=tcp://127.0.0.1:{}", "--kv-events", "tcp://127.0.0.1:*"),
                True,
            ),
            ("replay", ("trace.jsonl", "--kv-events", "tcp://127.0.0.1:{}"), True),
            ("serve model", ("--model", "tiny", "--port", "{}"), True),
            ("serve sessions", ("--mock", "--port", "{}"), True),
            ("soak", ("--port", "{}", "--duration", "1s"), False),
            ("watch", ("tcp://127.0.0.1:{}", "--duration", "0.1"), False),
            ("watch", ("tcp://127.0.0.1:1", "--replay", "tcp://127.0.0.1:{}", "--duration", "0.1"), False),
            ("watch", ("tcp://127.0.0.1:1", "--metrics", "http://127.0.0.1:{}/metrics", "--duration", "0.1"), False),
        )
        if name in EVERY
    ]


@pytest.mark.parametrize(("name", "words", "is_any"), ports())
def test_a_port_is_one(name: str, words: tuple[str, ...], is_any: bool, here: Path, call: Call) -> None:
    for port in ("99999", "65536", "-1", "x", *(() if is_any else ("0",))):
        code, _, said = call(*name.split(), *(word.replace("{}", port) for word in words))
        assert code == 2, (port, said)
        assert "Traceback" not in said and len(said) < 1000
