"""Random command lines, drawn from the declarations of commands and options: a new option is drawn at once."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import click

from kvarts.base.settings import INLINE, Setting, inline_settings, value_kind
from kvarts.cli.options import role_of
from kvarts.cli.replaying import all_sections
from kvarts.sim.eviction import ALL_POLICIES
from kvarts.sim.routers.policies import POLICIES

from builders.calls import CALLS, commands

__all__ = ["Line", "candidates", "draw_line", "mend", "write_trace"]

ELSEWHERE = ("--kv-events", "--open", "--insecure", "--set kv_events", "--set workers")
"""Options that reach beyond the files of a run: sockets, a browser, processes."""
RUN_FILES = ("--json", "--report", "--requests", "--html", "--run-dir", "--timeline", "--events", "--step-by-step",
             "--audit", "--set timeline_every", "--set loans")  # fmt: skip
"""Options of replays that the fuzzer gives by itself, or that change what is compared."""
OTHERS = tuple(
    name
    for name, call in CALLS.items()
    if call.code == 0 and call.needs and not call.is_slow and call.prints and name not in ("replay", "watch", "sweep")
)
MODELS = ("llama-3.1-8b", "qwen3-8b", "gemma-3-12b", "gpt-oss-20b", "deepseek-v3")
INTEGERS = (1, 1, 2, 2, 3, 4, 5, 8, 16, 16, 40, 64, 100, 300, 2000, 0, -1)
FLOATS = (0.0, 0.01, 0.05, 0.3, 0.5, 0.9, 1.0, 2.0, 5.0, 40.0, 300.0, -1.0)
WORDS: dict[str, tuple[str, ...]] = {
    "--model": MODELS, "--device": ("h100-80gb", "l4", "a100-80gb"), "--router": tuple(POLICIES),
    "--eviction": ALL_POLICIES, "--set acceptance": ("0.8", "0.9,0.5", "1,1,1"),
    "--set scaling.policy": ("script,0s=2:1,0.05s=1:3", "queue,target=1,every=0.03s,stable=0.1s", "llm-d,every=0.04s",
    "kv,target=40,every=0.05s", "dynamo,context=20,every=0.03s", "llm-d-v2,every=0.02s,most=3"),
    "--set faults.script": ("down:1=0.01s-0.05s", "cut:1=0.02s", "slow:1:10=0s-1s"),
    "--engine": ("none", "vllm", "vllm==0.32", "vllm==0.33", "vllm==0.19", "sglang", "sglang==0.5.12", "tensorrt-llm"),
    "--set prefix_cache_retention_interval": ("none", "0", "16", "64"),
    "--set health": ("a=dead@0.05", "b=degraded@0.02"), "--trace": ("a=trace.jsonl", "b=talks.jsonl"),
    "DTYPE": ("auto", "fp8", "bf16", "int8"), "SIZE": ("1MiB", "40MiB", "1GiB", "20GiB", "auto", "123456789"),
    "RATE": ("1GB/s", "50GB/s", "10MB/s"), "TIME": ("0", "5ms", "0.05s"), "PRICE": ("2.5", "host=1"),
    "MODEL": ("polynomial", "linear:step_ms=5", "linear:step_ms=5,chunk_token_ms=0.02,context_token_ms=0.001"),
    "--tier": ("a:pages=40", "host:pages=100,read=1GB/s", "disk:kind=files,pages=100"), "SIZE,..": ("8,16,64", "1GiB"),
    "TIME,..": ("0,5ms",), "NAME,..": ("prefix,round-robin",), "FIELDS": ("priority",), "UNIT": ("ms", "s"),
    "BYTES[@TOKENS]": ("1000@2",), "FIELD=NAME": ("arrival=t",),
    "LINE|@FILE": ("--max-num-seqs 4", "--no-enable-chunked"),
}  # fmt: skip
"""Values of text, by option or else by metavar; text that has no row here is a word that is most likely refused."""


@dataclass
class Line:
    """A command line: `words` of the command and its arguments, and `options`, each as the words that give it."""

    words: list[str]
    options: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        return [*self.words, *(word for option in self.options for word in option)]

    @property
    def names(self) -> set[str]:
        """Options as they are declared: keys of `--set` with it."""
        return {name_of(option) for option in self.options}


def name_of(option: tuple[str, ...]) -> str:
    """Return the declared name of an option that is given."""
    return f"--set {option[1].partition('=')[0]}" if option[0] == "--set" else option[0]


def candidates(command: str) -> list[click.Parameter]:
    """Return the options of a command that can be drawn."""
    left_out = RUN_FILES if command == "replay" else ()
    return [
        param
        for param in commands()[command].every
        if param.param_type_name == "option"
        and param.opts[0] not in ("--set", "--config", "--help", *left_out)
        and not param.opts[0].startswith(ELSEWHERE)
    ]


def draw_line(rng: Random) -> Line:
    """Return a line: most often of a replay, on a pool that is small for its trace."""
    if rng.random() < 0.1:
        name = rng.choice(OTHERS)
        line = Line([*name.split(), *CALLS[name].arguments])
    else:
        line = Line(["replay", rng.choice(["trace.jsonl", "trace.jsonl", "talks.jsonl", "plain.csv"])])
        name = "replay"
        if rng.random() < 0.1:
            line = Line(["replay"])
            for model, file in zip("ab", rng.sample(["trace.jsonl", "talks.jsonl"], 2), strict=True):
                line.options += [("--model", f"{model}={rng.choice(MODELS[:3])}"), ("--trace", f"{model}={file}")]
            line.options.append(("--device", "h100-80gb"))
            line.options.append(("--kv-memory", rng.choice(["40MiB", "200MiB", "1GiB"])))
        elif rng.random() < 0.8:
            line.options.append(("--pages", str(rng.choice([12, 20, 40, 80, 200]))))
    known = candidates(name)
    for param in rng.sample(known, min(len(known), rng.choice([0, 1, 2, 2, 3, 4, 6, 9]))):
        add(line, param, rng)
    return line


def add(line: Line, param: click.Parameter, rng: Random) -> None:
    """Give an option, unless it is given and cannot be given twice."""
    flag = param.opts[0]
    if flag in line.names and not param.multiple:
        return
    if getattr(param, "is_flag", False):
        line.options.append((flag,))
        return
    value = draw_value(flag, param, rng)
    line.options.append(("--set", f"{flag.removeprefix('--set ')}={value}") if " " in flag else (flag, value))


def draw_value(flag: str, param: click.Parameter, rng: Random) -> str:
    """Return a value of the type of an option."""
    kind = param.type
    if isinstance(kind, click.Choice):
        return str(rng.choice(list(kind.choices)))
    if kind is click.BOOL:
        return rng.choice(["true", "true", "false"])
    if isinstance(kind, click.types.IntParamType):
        return str(rng.choice(INTEGERS[: len(INTEGERS) // 2] if flag == "--replicas" else INTEGERS))
    if isinstance(kind, click.types.FloatParamType):
        return str(rng.choice(FLOATS))
    if (role := role_of(param)) is not None:
        return rng.choice(["trace.jsonl", "run", "config.toml"]) if role == "input" else f"out-{rng.randrange(10**6)}"
    inline = inline_settings(all_sections()).get(flag)
    if inline is not None:
        chosen = rng.sample(sorted(inline), min(len(inline), rng.randrange(1, 4)))
        if "replicas" in inline and "replicas" not in chosen:
            chosen.append("replicas")
        return ",".join(f"{name}={_of_setting(inline[name], rng)}" for name in chosen)
    return rng.choice(WORDS.get(flag) or WORDS.get(getattr(param, "metavar", None) or "") or ("a", "1", "auto"))


def _of_setting(setting: Setting, rng: Random) -> str:
    kind = value_kind(setting.kind)
    if isinstance(kind, tuple):
        return str(rng.choice(kind))
    if kind is int or isinstance(kind, range):
        return str(rng.choice(INTEGERS[: len(INTEGERS) // 2] if "replicas" in setting.key else INTEGERS))
    if kind is float:
        return str(rng.choice(FLOATS))
    name = (setting.flag or "").partition(INLINE)[2]
    return rng.choice(WORDS.get(f"--{name}") or WORDS.get(setting.metavar or "") or ("a", "1"))


def mend(line: Line, said: str, rng: Random) -> bool:
    """Change a line that was refused: give an option that the message asks for, or drop one that it names.

    Return False if nothing is left to change.
    """
    by_name = {param.opts[0]: param for param in candidates(" ".join(_command_of(line)))}
    named = re.findall(r"--set [\w.]+|--[\w-]+", said.replace("=", " "))
    asked = [name for name in named if name in by_name and name not in line.names]
    if asked and rng.random() < 0.6:
        add(line, by_name[rng.choice(asked)], rng)
        return True
    if not line.options:
        return False
    mentioned = [option for option in line.options if name_of(option) in named]
    line.options.remove(rng.choice(mentioned or line.options))
    return True


def _command_of(line: Line) -> list[str]:
    return line.words[:2] if " ".join(line.words[:2]) in commands() else line.words[:1]


def write_trace(folder: Path, rng: Random) -> None:
    """Write random traces of a few requests that share prefixes: trace.jsonl, talks.jsonl with sessions, plain.csv."""
    block = 512
    for name, has_sessions in (("trace.jsonl", False), ("talks.jsonl", True)):
        rows: list[str] = []
        is_odd = rng.random() < 0.3  # fractions, pauses, identical rows, names and longer answers
        ages: dict[str, list[int]] = {}
        arrival: float = 0
        for index in range(rng.randrange(1, 14)):
            arrival += rng.choice([0, 0, 1, 10, 200, *((0.25, 3e5) if is_odd else ())])
            row: dict[str, object] = {"timestamp": arrival}
            ids = [rng.randrange(3) for _ in range(rng.randrange(3))]
            if has_sessions:
                row["session_id"] = session = f"s{rng.randrange(3)}"
                ids = ages[session] = [*ages.get(session, []), *ids][:6]
                if len(ages[session]) > 1 and rng.random() < 0.5:
                    row["delay"] = rng.choice([0, 5, 300])
            last = rng.randrange(1, block + 1)
            row |= {"input_length": len(ids) * block + last, "output_length": rng.choice([1, 2, 20, 90, 400])}
            row["hash_ids"] = [*ids, 100 + index]
            if is_odd and rows and rng.random() < 0.2:
                row |= {name: json.loads(rows[-1])[name] for name in ("input_length", "hash_ids")}
            if is_odd and rng.random() < 0.2:
                row |= {"request_id": rng.choice([f"r{index}", f"a b\n{index}", f"'{index}", f"\u202e{index}"])}
            if is_odd and rng.random() < 0.05:
                row["output_length"] = rng.choice([0, 1500])
            if rng.random() < 0.15:
                row["priority"] = rng.randrange(-2, 3)
            if rng.random() < 0.1:
                row["cancel_after_ms"] = rng.choice([0, 7, 300])
            rows.append(json.dumps(row) + "\n")
        (folder / name).write_text("".join(rows))
    lines = [
        f"2024-05-10 00:00:0{second}.{rng.randrange(10**6):06d}+00:00,{rng.randrange(1, 900)},{rng.randrange(1, 90)}"
        for second in range(rng.randrange(1, 9))
    ]
    (folder / "plain.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
