"""`vllm serve` as a child process, and its arguments, with a program in place of vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import click
import pytest

from kvarts.base.errors import ConfigError, MissingFileError, OutputError
from kvarts.cli import front_end as cli
from kvarts.cli import kv_events
from kvarts.cli.mock import mock_command
from kvarts.doors.vllm_front.front_end import FrontEnd, FrontEndError, Installed

from builders.fake_front_end import ENGINE
from builders.ports import free_port, free_ports
from builders.real_front_end import left_of, members
from builders.tiny_model import tiny_model

SERVES = """
import importlib.metadata, socket, subprocess, sys, time
print("arguments:", *sys.argv[1:], flush=True)
print("metadata:", importlib.metadata.version("vllm"), flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
"""
UP = """
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
"""
WAITS = """
time.sleep(300)
"""
DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a script in the place of vLLM's, of this version, and return its path."""

    def write(program: str, version: str = "0.33.0") -> Path:
        package = tmp_path / "packages" / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "_version.py").write_text(f"__version__ = version = '{version}'\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
        script = tmp_path / "vllm"
        script.write_text(f"#!{sys.executable}\n{program}")
        script.chmod(0o755)
        return script

    return write


def open_one(script: Path, directory: Path, **given: Any) -> FrontEnd:
    return FrontEnd(Installed.at(str(script)), directory, host="127.0.0.1", port=free_port(), **given)


def test_it_is_started_without_engines_and_with_the_metadata_of_a_cpu(fake: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = fake(SERVES + UP + WAITS)
    with open_one(script, tmp_path, num_ranks=2, arguments=["--max-model-len", "64"], log=log) as front:
        front.limit_start(30.0)
        front.wait_until_up()
        group = front._process.pid
        assert len(members(group)) == 2
    assert not left_of(group)
    text = log.read_text()
    assert "serve" in text
    assert "--max-model-len 64" in text
    assert "--data-parallel-size 2 --data-parallel-size-local 0 --data-parallel-address 127.0.0.1" in text
    assert "metadata: 0.33.0+cpu" in text


def test_it_is_killed_if_it_does_not_end(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarts.doors.vllm_front.front_end.TERM_S", 0.2)
    with open_one(fake(DEAF + SERVES + UP + WAITS), tmp_path) as front:
        front.wait_until_up()
        group = front._process.pid
    assert not left_of(group)


def test_its_end_and_its_lateness_are_errors_with_its_last_lines(fake: Any, tmp_path: Path) -> None:
    script = fake("print('first')\nraise SystemExit('no such model')")
    with open_one(script, tmp_path) as front:
        assert front.wait(30.0)
        with pytest.raises(FrontEndError, match="vllm serve has ended with status 1") as caught:
            front.check()
        assert list(caught.value.lines) == ["first", "no such model"]
    script.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(300)\n")
    with open_one(script, tmp_path) as front:
        front.limit_start(0.1)
        with pytest.raises(FrontEndError, match="did not come up in time"):
            front.wait_until_up()


@pytest.mark.parametrize("log", [".", "none/log"])
def test_log_that_cannot_be_written_leaves_nothing(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(OutputError):
        open_one(fake(SERVES), tmp_path, log=tmp_path / log)
    assert not list(folder.iterdir())


def test_last_lines_of_a_log_without_an_end(fake: Any, tmp_path: Path) -> None:
    with open_one(fake("raise SystemExit(3)"), tmp_path, log=Path("/dev/full")) as front:
        assert front.wait(30.0)
        with pytest.raises(FrontEndError, match="vllm serve has ended"):
            front.check()


def test_nothing_is_left_of_it_if_our_process_is_killed(fake: Any, tmp_path: Path) -> None:
    script = fake(SERVES + UP + WAITS)
    program = (
        "import sys, time; from pathlib import Path\n"
        "from kvarts.doors.vllm_front.front_end import FrontEnd, Installed\n"
        f"front = FrontEnd(Installed.at({str(script)!r}), Path('.'), host='127.0.0.1', port={free_port()})\n"
        "front.wait_until_up(); print(front._process.pid, front._own, flush=True); time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as ours:
        assert ours.stdout is not None
        pid, own = ours.stdout.readline().split()
        assert len(members(int(pid))) == 2
        ours.send_signal(signal.SIGKILL)
        ours.wait()
    assert not left_of(int(pid))
    deadline_s = monotonic() + 10.0
    while Path(own).exists() and monotonic() < deadline_s:
        sleep(0.02)
    assert not Path(own).exists()


def test_programs_that_are_no_vllm(tmp_path: Path, fake: Any) -> None:
    with pytest.raises(MissingFileError, match="is not a program"):
        Installed.at(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="is no script of vLLM"):
        Installed.at(sys.executable)
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\nexit 3\n")
    other.chmod(0o755)
    with pytest.raises(ConfigError, match="is no script of vLLM"):
        Installed.at(str(other))
    assert Installed.at(str(fake("", "0.41.2"))).version == "0.41.2"


@pytest.mark.parametrize("words", [["--port", "1"], ["--data-parallel-size-local=1"], ["--headless"], ["-dpl", "1"]])
def test_arguments_that_are_given_here_are_refused(fake: Any, tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="is set by kvarts"):
        open_one(fake(SERVES), tmp_path, arguments=words)


# Ranks ------------------------------------------------------------------------------------------------------


def test_recordings_are_named_by_rank_whichever_opens_first(tmp_path: Path) -> None:
    class Recorder:
        began_ns = None

        def __init__(self, rank: int) -> None:
            self._rank = rank

        def write(self, path: Path, **_: Any) -> None:
            path.write_text(str(self._rank))

    def open_one(rank: int, _: Any) -> Any:
        sleep(0.3 * (1 - rank))
        return SimpleNamespace(recorder=Recorder(rank), serve=lambda: None, close=lambda: None)

    with ExitStack() as stack:
        ranks = cli._Ranks(stack, lambda _: (), open_one)
        ranks.open([0, 1])
        ranks.write(tmp_path / "arrived.jsonl")
    assert [(tmp_path / f"arrived-{rank}.jsonl").read_text() for rank in (0, 1)] == ["0", "1"]


def test_ranks_that_end_before_the_front_end_is_up_are_an_error() -> None:
    with ExitStack() as stack:
        ranks = cli._Ranks(
            stack,
            lambda _: (),
            lambda *_: SimpleNamespace(serve=lambda: None, close=lambda: None),  # type: ignore[arg-type]
        )
        ranks.open([0])
        while not ranks.has_ended:
            sleep(0.01)
        with pytest.raises(FrontEndError, match="the front end has ended"):
            ranks.check()


def test_each_rank_publishes_kv_events_at_the_port_of_its_number() -> None:
    port = free_ports(3)
    values = {"kv_events": f"tcp://127.0.0.1:{port}", "kv_events_replay": None, "kv_events_topic": "",
              "kv_events_format": None, "insecure": 0}  # fmt: skip
    with ExitStack() as stack:
        readers = kv_events.open_readers(stack, values)
        ranks = cli._Ranks(
            stack,
            lambda rank: readers.of_model(str(rank), ENGINE),
            lambda *_: SimpleNamespace(serve=lambda: None, close=lambda: None),  # type: ignore[arg-type]
        )
        ranks.open(range(3))
        sources = [source for rank in range(3) for source in readers.sources_of(rank)]
    assert [(source["model_name"], source["endpoint"]) for source in sources] == [
        (str(rank), f"tcp://127.0.0.1:{port + rank}") for rank in range(3)
    ]


# Arguments --------------------------------------------------------------------------------------------------


def test_arguments_are_read_for_the_engine() -> None:
    events = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5600", "topic": "kv"}'
    read = cli.ServeArguments.of([
        "--data-parallel-size", "4", "--runner=pooling", "--reasoning-parser", "qwen3", "--enable-sleep-mode",
        "--kv-events-config", events, "--enable-lora",
    ])  # fmt: skip
    assert (read.num_ranks, read.is_pooling, read.has_reasoning) == (4, True, True)
    assert read.kv_events["kv_events"] == "tcp://127.0.0.1:5600"
    assert read.kv_events["kv_events_topic"] == "kv"
    assert read.kept == ("--runner=pooling", "--reasoning-parser", "qwen3", "--kv-events-config", events,
                              "--enable-lora")  # fmt: skip
    with pytest.raises(ConfigError, match="must be from 1 to 1024"):
        cli.ServeArguments.of(["-dp", "many"])
    for text in ("{", '{"a":' * 5000):
        with pytest.raises(ConfigError, match="is no JSON object"):
            cli.ServeArguments.of(["--kv-events-config", text])


def test_arguments_of_a_later_vllm_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["--an-option-of-tomorrow", "7", "--max-num-seqs=64"]
    assert cli.ServeArguments.of(line).kept == tuple(line)
    assert configured(["--pages", "64", "--cost", "linear:step_ms=5", "--", *line], monkeypatch).max_num_seqs == 64


def configured(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the engine that `kvarts mock --front-end vllm` would open."""
    found = []

    def serve(given: Any, sections: Any, params: Any, arguments: Any, resolve: Any) -> None:
        found.append(resolve(cli.engine_given(given, sections, "0.33.0+cpu", params)))

    monkeypatch.setattr(cli, "serve_behind", serve)
    mock_command.main(["--front-end", "vllm", *words], standalone_mode=False)
    return found[0]


def test_blocks_are_those_with_which_vllm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvarts.base.settings import given_in
    from kvarts.cli.replaying import all_sections
    from kvarts.sim.config import resolve_replay

    def planned(**settings: Any) -> Any:
        values = {"model": "llama-3.1-8b", "device": "h100-80gb", "engine": "vllm==0.33", **settings}
        sections = all_sections()
        return resolve_replay(given_in(values, sections), sections)

    model = ["--model", "llama-3.1-8b"]
    plain = configured(model, monkeypatch)
    expected = planned()
    assert plain.start is not None
    assert (plain.num_pages, plain.max_num_seqs) == (expected.num_pages, expected.max_num_seqs)
    assert plain.max_num_batched_tokens == expected.max_num_batched_tokens
    limits = ["--max-model-len", "8192", "--max-num-seqs", "64", "--gpu-memory-utilization", "0.7", "-tp", "2"]
    limited = configured([*model, "--", *limits], monkeypatch)
    expected = planned(max_model_len=8192, max_seqs=64, memory_fraction=0.7, tensor_parallel=2)
    assert (limited.num_pages, limited.max_num_seqs) == (expected.num_pages, 64)
    assert limited.num_pages != plain.num_pages
    fixed = configured([*model, "--", "--num-gpu-blocks-override", "500"], monkeypatch)
    assert fixed.num_pages == 500


def test_options_of_kvarts_go_before_arguments_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "llama-3.1-8b", "--set", "max_seqs=32", "--", "--max-num-seqs", "64"]
    assert configured(words, monkeypatch).max_num_seqs == 32


def test_words_after_dashes_need_the_front_end() -> None:
    with pytest.raises(click.UsageError, match="give --front-end vllm"):
        mock_command.main(["--", "--max-model-len", "64"], standalone_mode=False)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--tls-cert", "x"], "--ssl-certfile"),
        (["--api-key", "x"], "--api-key after --"),
        ([], "needs the directory of a model"),
    ],
)
def test_what_is_of_the_other_front_end_is_refused(options: list[str], match: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mock_command.main(["--front-end", "vllm", *options], standalone_mode=False)
    assert match in str(caught.value)


def test_unknown_version_is_refused_before_it_is_started(fake: Any, tmp_path: Path) -> None:
    words = ["--front-end", "vllm", "--model", str(tiny_model(tmp_path / "model")), "--pages", "64", "--cost", "linear",
             "--set", f"vllm={fake(SERVES, '0.41.2')}"]  # fmt: skip
    with pytest.raises(ConfigError, match=r"the messages of vLLM 0\.41\.2 are not known; those of 0\.32, 0\.33 are"):
        mock_command.main(words, standalone_mode=False)
