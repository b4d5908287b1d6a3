"""A call of every command that works, on small files; what the command line has, found by looking."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import click

from kvarts.cli.commands import cli
from kvarts.cli.main import main
from kvarts.cli.options import Command, role_of

__all__ = ["CALLS", "Call", "PathParam", "commands", "make_files", "path_params", "snapshot", "with_value"]

HAS_TORCH = find_spec("torch") is not None and find_spec("transformers") is not None
HAS_GRPC = find_spec("grpc") is not None
HAS_ZMQ = find_spec("zmq") is not None
HAS_SCIPY = find_spec("scipy") is not None

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}
ON = ("--model", "llama-3.1-8b", "--device", "h100-80gb")


@dataclass(frozen=True)
class Call:
    """Arguments after the name of a command, for the folder of `make_files`. `code`: how it ends.

    `needs`: whether what it needs is installed. `is_slow`: it takes seconds. `prints`: on standard output.
    """

    arguments: tuple[str, ...]
    code: int = 0
    needs: bool = True
    is_slow: bool = False
    prints: bool = True


CALLS: dict[str, Call] = {
    "calibrate": Call(("steps.jsonl", *ON), needs=HAS_SCIPY),
    "compare": Call(("run", "measured.csv")),
    "generate": Call(("--model", "tiny", "--prompt", "a", "--max-tokens", "2"), needs=HAS_TORCH, is_slow=True),
    "model check": Call(("tiny", "--prompts", "1", "--max-tokens", "2"), needs=HAS_TORCH, is_slow=True),
    "completion": Call(("bash", "--print")),
    "engine": Call(("--handshake", "nowhere", "--model", "config.json"), code=3, needs=HAS_ZMQ, prints=False),
    "model get": Call(("nothing",), code=2, prints=False),
    "model list": Call(()),
    "model show": Call(("config.json",)),
    "model tiny": Call(("new",), needs=HAS_TORCH, is_slow=True, prints=False),
    "plan curve": Call(("trace.jsonl",)),
    "plan fleet": Call(("trace.jsonl", "--model", "llama-3.1-8b", "--device", "h100-80gb", "--gpus", "1",
                        "--slo-ttft-ms", "500")),
    "plan policies": Call(("trace.jsonl", "--policy", "auto", "--at", "4")),
    "plan routers": Call(("trace.jsonl", "--cost", "linear:step_ms=5", "--pages", "200", "--replicas", "2",
                          "--routers", "prefix")),
    "plan slo": Call(("trace.jsonl", "--cost", "linear:step_ms=5")),
    "plan users": Call(("talks.jsonl", "--cost", "linear:step_ms=5", "--pages", "200", "--users", "1..2")),
    "profile": Call(
        ("--model", "tiny", "--prompts", "prompts.jsonl", "--max-tokens", "2"), needs=HAS_TORCH, is_slow=True
    ),
    "replay": Call(("trace.jsonl",)),
    "report": Call(("run",)),
    "mock": Call(("--host", "0.0.0.0"), code=2, prints=False),
    "serve model": Call(("--model", "nowhere", "--host", "0.0.0.0"), code=2, prints=False),
    "serve sessions": Call(("--mock", "--host", "nowhere"), code=2, needs=HAS_GRPC, prints=False),
    "soak": Call(("--virtual", "--duration", "1m"), code=6),
    "story": Call(("run", "--hits")),
    "sweep": Call(("sweep.toml", "-o", "swept", "--workers", "1")),
    "trace anonymize": Call(("trace.jsonl",)),
    "trace convert": Call(("trace.jsonl",)),
    "trace forms": Call(()),
    "trace info": Call(("trace.jsonl",)),
    "trace list": Call(()),
    "trace merge": Call(("trace.jsonl",)),
    "trace scale": Call(("trace.jsonl",)),
    "trace slice": Call(("trace.jsonl",)),
    "verify": Call(("timeline.json",)),
    "watch": Call(
        ("tcp://127.0.0.1:1", "--duration", "0.2", "--metrics", "http://127.0.0.1:1/",
        "--set", "quiet=true"), code=6, needs=HAS_ZMQ
    ),
    "why": Call(("trace.jsonl",)),
}  # fmt: skip
"""A command without a line here fails test_edge_tables."""


@cache
def commands() -> dict[str, Command]:
    """Every command, by the words that call it."""
    return dict(_commands(cli, ()))


def _commands(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[str, Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, (*words, name))
        else:
            assert isinstance(command, Command)
            yield " ".join((*words, name)), command


@dataclass(frozen=True)
class PathParam:
    """A parameter that is a path: of which command, which, and what is done with it."""

    command: str
    param: click.Parameter
    role: str

    def __str__(self) -> str:
        return f"{self.command} {self.param.opts[0]}"


def path_params(*roles: str) -> list[PathParam]:
    """Return the parameters of all commands with one of `roles`."""
    return [
        PathParam(name, param, role)
        for name, command in commands().items()
        for param in command.params
        if (role := role_of(param)) in roles and role is not None
    ]


def with_value(param: PathParam, value: str) -> list[str]:
    """Return the call of its command, with `value` for one of its parameters."""
    arguments = list(CALLS[param.command].arguments)
    if param.param.param_type_name == "option":
        flag = param.param.opts[0]
        if flag in arguments:
            arguments[arguments.index(flag) + 1] = value
        elif (param.command, flag) == ("calibrate", "--points"):
            return ["calibrate", flag, value]  # it stands in place of a run
        else:
            arguments += [flag, value]
    else:
        places = [each for each in commands()[param.command].params if each.param_type_name == "argument"]
        arguments[places.index(param.param)] = value
    return [*param.command.split(), *arguments]


def make_files(folder: Path, run: Callable[[Sequence[object]], int]) -> None:
    """Write what the calls read to `folder`, which is the working directory of `run`."""
    rows = [{**GOOD, "timestamp": index * 50, "hash_ids": [index, index + 1]} for index in range(6)]
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    talks = [{**row, "session_id": f"s{place % 3}"} for place, row in enumerate(rows)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    (folder / "config.toml").write_text("pages = 100\n")
    (folder / "sweep.toml").write_text('trace = "trace.jsonl"\n[grid]\npages = [50, 100]\n')
    (folder / "prompts.jsonl").write_text('{"prompt": "ab"}\n')
    (folder / "token").write_text("secret\n")
    values = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
        "intermediate_size": 128,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "series.csv").write_text("t,running,waiting,kv_cache_pct\n0,1,0,1\n1,1,0,2\n")
    step = {"num_decodes": 4, "chunks": []}
    steps = [
        {**step, "duration_ns": 10**7 + place * 1000, "decode_known_tokens": 100 * place + 4} for place in range(6)
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    assert run(["replay", "trace.jsonl", "--run-dir", "run", "--timeline", "timeline.json", "--json"]) == 0
    lines = ["request_id,arrival,first_token,last_token,prompt_tokens,output_tokens"]
    for line in (folder / "run" / "requests.jsonl").read_text().splitlines():
        row = json.loads(line)
        times = ",".join(str(row[name] / 1e3) for name in ("arrival_ms", "first_token_ms", "last_token_ms"))
        lines.append(f"{row['request_id']},{times},{row['input_tokens']},{row['output_tokens']}")
    (folder / "measured.csv").write_text("\n".join(lines) + "\n")


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Return what is in a folder: the bytes of each regular file by its path, None for all else."""
    found: dict[str, bytes | None] = {}
    for root, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(root, name)
            is_file = path.is_file() and not path.is_symlink()
            found[str(path.relative_to(folder))] = path.read_bytes() if is_file else None
    return found


__all__ += ["main"]
