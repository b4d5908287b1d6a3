"""`kvarts mock --front-end vllm`, and `kvarts engine`: the engine of a mock behind `vllm serve`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError, problem_of
from kvarts.base.files import check_writable
from kvarts.base.limits import brief, whole_number
from kvarts.base.settings import Given, given_in
from kvarts.cli import kv_events
from kvarts.cli.options import OUTPUT, Command, GroupedOption, KeyOption
from kvarts.cli.process import Terminated, collect_garbage, narrate, say, tell_whole_pages

if TYPE_CHECKING:
    from kvarts.core.event_log import EventReader
    from kvarts.doors.vllm_front.core import FrontCore
    from kvarts.doors.vllm_front.front_end import FrontEnd
    from kvarts.doors.vllm_front.opening import FrontSettings
    from kvarts.sim.config import ReplayConfig

__all__ = [
    "THEIRS",
    "MockCommand",
    "ServeArguments",
    "engine_given",
    "front_end_options",
    "own_options",
    "serve_alone",
    "serve_behind",
]

TITLE = "Behind vLLM's front end"
THEIRS = "kvarts.vllm_arguments"
POLL_S = 0.2
MOST_RANKS = 1024
DEAD_S = 10.0
"""How long a front end may take to end once its engine is dead."""
HTTP_ONLY = {
    "tls_cert": "--ssl-certfile", "tls_key": "--ssl-keyfile", "api_keys": "--api-key", "api_key_file": "--api-key",
    "adapters": "--lora-modules", "access_log": None, "startup_delay": None, "answers": None,
}  # fmt: skip
"""Settings of kvarts' own HTTP server, and the option of `vllm serve` in their place, if there is one."""


def own_options() -> list[click.Option]:
    """Return the options of an engine behind a front end, wherever that runs."""
    return [
        KeyOption(["--vllm-messages"], group=TITLE, metavar="VERSION",
                  help="Use the messages of this version of vLLM for one that is not known. [that of vllm serve]"),
        KeyOption(["--front-end-start"], group=TITLE, metavar="SECONDS", type=click.FloatRange(min=1.0), default=300.0,
                  help="How long the front end may take to come up. [300]"),
        KeyOption(["--parallel-config-hash"], group=TITLE, metavar="HEX",
                  help="Of a mixture of experts with several ranks: what vllm serve asks for in its error."),
    ]  # fmt: skip


def front_end_options() -> list[click.Option]:
    """Return the options that put a mock behind a front end."""
    return [
        GroupedOption(["--front-end"], group=TITLE, type=click.Choice(["kvarts", "vllm"]), default="kvarts",
                      help="Who answers HTTP: kvarts, or `vllm serve` with this engine behind it. Words after -- are "
                      "its arguments. [kvarts]"),
        KeyOption(["--vllm", "vllm_script"], group=TITLE, metavar="PATH", help="The script of vLLM. [vllm in PATH]"),
        KeyOption(["--front-end-log"], group=TITLE, metavar="FILE", type=OUTPUT,
                  help="Append what vllm serve prints to FILE."),
        *own_options(),
    ]  # fmt: skip


class MockCommand(Command):
    """A Command whose words after `--` are arguments of `vllm serve`, which are settings of the engine, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; arguments of `vllm serve` give way to options of kvarts."""
        own, theirs = args, []
        if "--" in args:
            place = args.index("--")
            own, theirs = args[:place], args[place + 1 :]
        ctx.meta[THEIRS] = theirs
        if not theirs:
            return super().parse_args(ctx, own)
        from kvarts.cli.argument_lines import settings_of_line
        from kvarts.cli.vllm_args import NAME

        given = settings_of_line(
            shlex.join(theirs),
            NAME,
            self.known_keys().__contains__,
            has_model=True,
            takes_unknown=True,
            say=lambda _: None,
        )
        return super().parse_args(ctx, [*(word for key, value in given for word in ("--set", f"{key}={value}")), *own])


class ServeArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What the arguments of `vllm serve` say about its engine. `num_ranks`: of data parallelism.

    `kept`: those that `vllm serve` receives.
    """

    kept: tuple[str, ...] = ()
    num_ranks: int = 1
    is_pooling: bool = False
    has_reasoning: bool = False
    kv_events: dict[str, Any] = {}

    @classmethod
    def of(cls, words: Sequence[str]) -> ServeArguments:
        """Read arguments. Raise ConfigError or UsageError for values that are not valid."""
        from kvarts.cli.argument_lines import options_in
        from kvarts.cli.vllm_args import SERVER

        kept: list[str] = []
        found: dict[str, Any] = {}
        for option, name, value, written in options_in(words, SERVER):
            if option == "data-parallel-size":
                num_ranks = found["num_ranks"] = whole_number(value) or 0
                if not 1 <= num_ranks <= MOST_RANKS:
                    raise ConfigError(f"must be from 1 to {MOST_RANKS}, got {brief(value)}", field=name)
                continue
            if option == "enable-sleep-mode":  # vLLM refuses it on a CPU, and needs it for memory that is not here
                say(f"kvarts: {name} is left out: this engine sleeps without it")
                continue
            kept += written
            if option == "runner":
                found["is_pooling"] = value == "pooling"
            elif option == "kv-events-config":
                found["kv_events"] = _events_of(value)
            elif option == "reasoning-parser":
                found["has_reasoning"] = True
        return cls(kept=tuple(kept), **found)


def _events_of(text: str) -> dict[str, Any]:
    """Return the options of KV events that vLLM's --kv-events-config asks for; none if they are off."""
    try:
        config = msgspec.json.decode(text, type=dict[str, Any])
    except UNDECODED as error:
        raise ConfigError(f"is no JSON object: {problem_of(error)}", field="--kv-events-config") from error
    if not config.get("enable_kv_cache_events") or config.get("publisher", "zmq") != "zmq":
        return {}
    return {
        "kv_events": str(config.get("endpoint", "tcp://*:5557")).replace("*", "127.0.0.1"),
        "kv_events_replay": config.get("replay_endpoint"),
        "kv_events_topic": config.get("topic", ""),
    }


def engine_given(given: Given, sections: Any, version: str, params: dict[str, Any]) -> Given:
    """Return `given` for an engine as vLLM `version` starts it on the device, where nothing else decides its blocks."""
    if "model" not in given or "engine" in given:
        return given
    if "cost" in given and "device" not in given:
        return given.without(["model"])  # it names the directory only
    values: dict[str, Any] = {}
    if "device" not in given:
        from kvarts.doors.openai.running import DEFAULT_DEVICE

        values["device"] = DEFAULT_DEVICE
    name = f"vllm=={'.'.join(version.split('.')[:2])}"
    from kvarts.sim.vllm_start import VERSIONS

    if name in VERSIONS and not any(key in given for key in ("kv_groups", "pages")):
        values["engine"] = name
        if params["max_model_len"] is not None:
            values["max_model_len"] = params["max_model_len"]
    return given.over(given_in(values, sections))


def serve_behind(
    given: Given, sections: Any, params: dict[str, Any], arguments: Sequence[str], resolve: Callable[[Given], Any]
) -> None:
    """Start `vllm serve` with engines behind it, and serve until a signal arrives or either of them has ended."""
    for name, instead in HTTP_ONLY.items():
        if params.get(name):
            hint = f"Give {instead} after --." if instead else "Leave it out."
            raise ConfigError("is of kvarts' own HTTP server", field=name, hint=hint)
    if "model" not in given:
        raise ConfigError("needs the directory of a model", field="--front-end", hint="Give --model DIR.")
    _need_zmq()
    from kvarts.doors.vllm_front.front_end import FrontEnd, FrontEndError, Installed
    from kvarts.doors.vllm_front.model import FrontModel
    from kvarts.doors.vllm_front.opening import open_core
    from kvarts.doors.vllm_front.protocol import protocol_of

    theirs = ServeArguments.of(arguments)
    directory = Path(str(given["model"]))
    model = FrontModel(directory)
    installed = Installed.at(params["vllm_script"])
    protocol = protocol_of(installed.version, as_version=params["vllm_messages"])
    config: ReplayConfig = resolve(engine_given(given, sections, installed.version, params))
    if params["record"] is not None:
        check_writable(params["record"])
    names = params["names"]
    extra = [*theirs.kept, *(["--served-model-name", *names] if names else [])]
    try:
        with ExitStack() as stack:
            front = stack.enter_context(
                FrontEnd(
                    installed,
                    directory,
                    host=params["host"],
                    port=params["port"],
                    num_ranks=theirs.num_ranks,
                    arguments=extra,
                    log=params["front_end_log"],
                )
            )
            front.limit_start(params["front_end_start"])
            settings = _settings(front.handshake, params, theirs)
            readers = kv_events.open_readers(stack, {**params, **theirs.kv_events})
            ranks = _Ranks(
                stack,
                lambda rank: readers.of_model(str(rank), config),
                lambda rank, own: open_core(
                    config, model, protocol, settings, rank=rank, readers=own, goes_on=front.check
                ),
            )
            say(f"kvarts: vllm {installed.version} starts; {_pages(config)} behind it")
            ranks.open(range(theirs.num_ranks))
            front.wait_until_up(ranks.check)
            say(f"kvarts: vllm {installed.version} on http://{params['host']}:{params['port']}/v1")
            try:
                _serve(ranks, front)
            finally:
                ranks.write(params["record"])
    except FrontEndError as error:
        for line in error.lines:
            say(f"  {line}")
        raise


def _settings(handshake: str, params: dict[str, Any], theirs: ServeArguments) -> FrontSettings:
    from kvarts.doors.vllm_front.core import Behind
    from kvarts.doors.vllm_front.opening import DEFAULT_TOKENS, FrontSettings

    return FrontSettings(
        handshake=handshake,
        behind=Behind(
            max_model_len=params["max_model_len"] or 1 << 40,
            default_tokens=params["output_tokens"] or DEFAULT_TOKENS,
            task="embed" if theirs.is_pooling else "generate",
            has_reasoning=theirs.has_reasoning,
            num_ranks=theirs.num_ranks,
        ),
        speedup=params["speedup"],
        seed=params["seed"],
        fail=params["fail"] or "",
        start_s=params["front_end_start"],
        parallel_config_hash=params["parallel_config_hash"],
        is_recording=params.get("record") is not None,
    )


class _Ranks:
    """The cores of all ranks, each with a thread that receives. They stop with `stack`."""

    def __init__(
        self,
        stack: ExitStack,
        readers_of: Callable[[int], Sequence[EventReader]],
        open_one: Callable[[int, Sequence[EventReader]], FrontCore],
    ) -> None:
        self._stack = stack
        self._readers_of = readers_of
        self._open_one = open_one
        self._opened: dict[int, FrontCore] = {}
        self._threads: list[Thread] = []
        self._errors: list[BaseException] = []

    def open(self, ranks: Sequence[int]) -> None:
        """Open these ranks at once: a front end waits for all of them. Raise the first error.

        Their readers are opened one after the other: publishers of KV events take the next port each.
        """
        opening = [Thread(target=self._open, args=(rank, self._readers_of(rank)), daemon=True) for rank in ranks]
        for thread in opening:
            thread.start()
        for thread in opening:
            while thread.is_alive():
                thread.join(POLL_S)
        if self._errors:
            raise self._errors[0]

    def _open(self, rank: int, readers: Sequence[EventReader]) -> None:
        try:
            core = self._open_one(rank, readers)
        except BaseException as error:  # raised in the thread that waits
            self._errors.append(error)
            return
        self._opened[rank] = core
        self._stack.callback(core.close)
        thread = Thread(target=core.serve, name=f"kvarts-rank-{rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def cores(self) -> list[FrontCore]:
        """The cores that are open, by rank, in whichever order they were opened."""
        return [core for _, core in sorted(self._opened.items())]

    @property
    def has_ended(self) -> bool:
        """Whether any rank no longer serves."""
        return not all(thread.is_alive() for thread in self._threads)

    @property
    def is_dead(self) -> bool:
        """Whether the engine of any rank has failed."""
        return any(core.is_dead for core in self.cores)

    def check(self) -> None:
        """Raise FrontEndError if any rank no longer serves."""
        from kvarts.doors.vllm_front.front_end import FrontEndError

        if self.has_ended:
            raise FrontEndError("the front end has ended, or one of its API servers", ())

    def write(self, path: Path | None) -> None:
        """Write what has arrived, if it was recorded: of several ranks one file each, with a common time origin."""
        from kvarts.sim.report.run_directory import named

        recorders = [core.recorder for core in self.cores if core.recorder is not None]
        began_ns = [recorder.began_ns for recorder in recorders if recorder.began_ns is not None]
        for rank, recorder in enumerate(recorders):
            to = path if len(recorders) == 1 else named(path, str(rank))
            assert to is not None, "it is recorded for a file"
            recorder.write(to, began_ns=min(began_ns, default=None))

    def abort(self) -> None:
        """End every request under way: vllm serve waits for open streams before it ends, and hears no engine then."""
        for core in self.cores:
            core.post(core.abort_all)
        sleep(POLL_S)

    def stop(self) -> None:
        """End all ranks."""
        for core in self.cores:
            core.stop()
        for thread in self._threads:
            thread.join()


def _serve(ranks: _Ranks, front: FrontEnd | None) -> None:
    """Wait until a signal arrives, or an engine or the front end has ended. Raise KvartsError for the latter."""
    collect_garbage()
    try:
        while not ranks.has_ended:
            if front is None:
                sleep(POLL_S)
            elif front.wait(POLL_S):
                front.check()
        _tell_end(ranks, front)
    except (Terminated, KeyboardInterrupt):
        say("kvarts: ends")
        if front is not None:
            ranks.abort()
            front.end()
    finally:
        ranks.stop()


def _tell_end(ranks: _Ranks, front: FrontEnd | None) -> None:
    from kvarts.run.llm_engine import EngineDeadError

    if ranks.is_dead:
        for core in ranks.cores:
            core.die()
        if front is not None:
            deadline_s = monotonic() + DEAD_S
            while monotonic() < deadline_s and not front.wait(POLL_S):
                pass
        raise EngineDeadError("the engine has failed, and the front end was told")
    if front is not None:
        front.wait(DEAD_S)
        front.check()
    ranks.check()


def _pages(config: ReplayConfig) -> str:
    return f"an engine with {config.num_pages:,} pages of {config.page_size} tokens"


def _need_zmq() -> None:
    """Raise ConfigError if pyzmq is not installed."""
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"a front end needs ZeroMQ ({error})", hint="pip install 'kvarts[serve]'.") from None
    narrate()


def serve_alone(config: ReplayConfig, params: dict[str, Any]) -> None:
    """Serve as one engine of a front end that someone else runs, until it ends or a signal arrives."""
    _need_zmq()
    from kvarts.doors.vllm_front.model import FrontModel
    from kvarts.doors.vllm_front.opening import open_core
    from kvarts.doors.vllm_front.protocol import protocol_of

    tell_whole_pages(config)
    protocol = protocol_of(params["vllm_version"], as_version=params["vllm_messages"])
    model = FrontModel(Path(params["model"]))
    theirs = ServeArguments(
        num_ranks=params["num_ranks"], is_pooling=params["task"] == "embed", has_reasoning=params["reasoning"]
    )
    with ExitStack() as stack:
        readers = kv_events.open_readers(stack, params)
        settings = _settings(params["handshake"], params, theirs)
        ranks = _Ranks(
            stack,
            lambda rank: readers.of_model(str(rank), config),
            lambda rank, own: open_core(config, model, protocol, settings, rank=rank, readers=own),
        )
        say(f"kvarts: {_pages(config)} waits for the front end at {params['handshake']}")
        ranks.open([params["rank"]])
        say("kvarts: the front end knows the engine")
        _serve(ranks, None)
