"""Every command and every path of every command, found by looking: what it does to files that it is given."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvarts.cli.options import Command, role_of

from builders.calls import CALLS, PathParam, commands, path_params, snapshot, with_value

Run = Callable[..., tuple[int, bytes, str]]

DOCUMENTED = {0, 2, 3, 4, 5, 6, 7}
NOT_INSTALLED = set() if find_spec("matplotlib") else {"plan curve --set plot", "plan slo --set plot"}
OUTPUTS = [
    each
    for each in path_params("output", "derived")
    if str(each) not in NOT_INSTALLED and each.command != "serve model"  # which has its outputs from the lines of mock
]
INPUTS = path_params("input")
PATH_WORDS = {"FILE", "DIR", "OUT", "PATH", "FILE..."}
NOT_OF_A_PATH = {"generate --model", "profile --model", "serve sessions --model", "serve model --model"}
"""A directory, or a name: what reads it is not kvarts."""

IF_FAST = [pytest.param(each, marks=pytest.mark.long) if CALLS[each.command].is_slow else each for each in OUTPUTS]
FAST_INPUTS = [pytest.param(each, marks=pytest.mark.long) if CALLS[each.command].is_slow else each for each in INPUTS]


def skip_unless_installed(name: str) -> None:
    if not CALLS[name].needs:
        pytest.skip("what the command needs is not installed")


def name_for(param: PathParam) -> str:
    """A name that the option takes."""
    return "x.jsonl" if param.param.opts[0] in ("--kv-timeline", "--timeline", "--record") else "x.json"


def arguments_for(param: PathParam, value: str) -> list[str]:
    """A call with `value`; several models where the option is for them."""
    if param.param.opts[0] == "--loans":
        several = ["--device", "h100-80gb", "--model", "a=llama-3.1-8b", "--model", "b=qwen3-8b"]
        return ["replay", *several, "--trace", "a=trace.jsonl", "--trace", "b=other.jsonl", "--set", f"loans={value}"]
    arguments = with_value(param, value)
    if param.command == "calibrate" and param.param.opts[0] in ("--prompts", "--series", "--set prior"):
        arguments[1] = "measured.csv"
    if param.command == "serve sessions":
        arguments[arguments.index("nowhere")] = "127.0.0.1"
    pair = {"--tls-cert": "--tls-key", "--tls-key": "--tls-cert"}.get(param.param.opts[0])
    arguments += [pair, "token"] if pair else []
    if param.command == "mock":
        arguments[arguments.index("0.0.0.0")] = "127.0.0.1"
    return arguments


def outcome(param: PathParam) -> int:
    return 0 if param.command in ("serve sessions", "mock") else CALLS[param.command].code


# What there is -----------------------------------------------------------------------------------------------


def test_each_command_has_a_call_in_the_table() -> None:
    assert set(commands()) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_each_command_checks_its_paths_and_says_of_each_what_it_is_for(name: str) -> None:
    command = commands()[name]
    assert isinstance(command, Command)
    for param in command.params:
        metavar = getattr(param, "metavar", None)
        if metavar in PATH_WORDS and f"{name} {param.opts[0]}" not in NOT_OF_A_PATH:
            assert role_of(param) is not None, f"{name} {param.opts[0]}: say INPUT, OUTPUT, DERIVED or DIRECTORY"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if call.is_slow else name for name, call in CALLS.items()],
)
def test_each_call_of_the_table_ends_as_it_says(name: str, here: Path, call: Run) -> None:
    skip_unless_installed(name)
    if "tiny" in CALLS[name].arguments:
        assert call("model", "tiny", "tiny")[0] == 0
    code, out, err = call(*name.split(), *CALLS[name].arguments)
    assert code == CALLS[name].code, err
    assert bool(out) == CALLS[name].prints


# Outputs -----------------------------------------------------------------------------------------------------


def drain(path: Path) -> tuple[threading.Thread, list[bytes]]:
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()), daemon=True)
    reader.start()
    return reader, got


@pytest.mark.parametrize("param", IF_FAST, ids=str)
def test_a_pipe_a_socket_and_a_device_are_written_to_and_stay(param: PathParam, here: Path, call: Run) -> None:
    skip_unless_installed(param.command)
    name = name_for(param)
    assert call(*arguments_for(param, name))[0] == outcome(param)
    expected = Path(name).read_bytes()
    pipe = here / f"pipe-{name}"
    os.mkfifo(pipe)
    reader, got = drain(pipe)
    assert call(*arguments_for(param, str(pipe)))[0] == outcome(param)
    reader.join(10)
    assert got == [expected]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    for device, code in (("/dev/null", outcome(param)), ("/dev/full", 7 if expected else 0)):
        before = Path(device).stat()
        assert call(*arguments_for(param, device))[0] == code
        after = Path(device).stat()
        assert (after.st_rdev, after.st_ino, after.st_mode) == (before.st_rdev, before.st_ino, before.st_mode)


def test_a_socket_gets_what_is_written(here: Path, call: Run) -> None:
    assert call("replay", "trace.jsonl", "--report", "x.json")[0] == 0
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("there")
        listening.listen()
        assert call("replay", "trace.jsonl", "--report", "there")[0] == 0
        with listening.accept()[0] as connection, connection.makefile("rb") as file:
            assert file.read() == Path("x.json").read_bytes()
    assert stat.S_ISSOCK(Path("there").lstat().st_mode)


@pytest.mark.parametrize("param", IF_FAST, ids=str)
def test_a_link_is_followed_and_a_file_keeps_its_permissions(param: PathParam, here: Path, call: Run) -> None:
    skip_unless_installed(param.command)
    name = name_for(param)
    (here / "real").mkdir()
    (here / "real" / name).write_text("old")
    (here / "real" / name).chmod(0o640)
    (here / name).symlink_to(Path("real", name))
    (here / f"new-{name}").symlink_to(Path("real", f"new-{name}"))
    for link in (name, f"new-{name}"):
        assert call(*arguments_for(param, link))[0] == outcome(param)
        assert (here / link).is_symlink()
        assert (here / "real" / link).read_bytes() != b"old"
    assert stat.S_IMODE((here / "real" / name).stat().st_mode) == 0o640
    assert sorted(path.name for path in (here / "real").iterdir()) == sorted([name, f"new-{name}"])


@pytest.mark.parametrize("param", IF_FAST, ids=str)
def test_a_dash_is_standard_output_and_nothing_else_goes_there(param: PathParam, here: Path, call: Run) -> None:
    skip_unless_installed(param.command)
    name = name_for(param) if param.param.opts[0] != "--timeline" else "x.json"
    assert call(*arguments_for(param, name))[0] == outcome(param)
    code, out, _ = call(*arguments_for(param, "-"))
    assert (code, out) == (outcome(param), Path(name).read_bytes())
    assert not Path("-").exists()


@pytest.mark.parametrize("param", IF_FAST, ids=str)
def test_what_cannot_be_written_is_refused_before_any_work(param: PathParam, here: Path, call: Run) -> None:
    skip_unless_installed(param.command)
    name = name_for(param)
    (here / "folder").mkdir()
    (here / f"folder-{name}").mkdir()
    (here / "loop").symlink_to("loop")
    before = snapshot(here)
    for value in (f"nowhere/{name}", f"folder-{name}", "trace.jsonl/x.json", "x" * 300 + name, f"loop/{name}"):
        code, out, err = call(*arguments_for(param, value))
        assert (code, out) == (7, b""), (value, err)
        assert err.startswith("kvarts: ") and err.count("\n") == 1
    assert snapshot(here) == before
    longest = "x" * (255 - len(name)) + name
    assert call(*arguments_for(param, longest))[0] == outcome(param)
    assert Path(longest).is_file()


@pytest.mark.parametrize("param", IF_FAST, ids=str)
def test_no_output_is_an_input_or_another_output(param: PathParam, here: Path, call: Run) -> None:
    skip_unless_installed(param.command)
    arguments = arguments_for(param, name_for(param))
    read = [text for text in arguments if Path(text).is_file()] + [
        "trace.jsonl" for text in arguments if "=trace" in text
    ]
    if "run" in arguments:
        read += ["run/report.json", "run/requests.jsonl"]
    if param.command == "serve sessions":
        arguments += ["--token-file", "token"]
        read = ["token"]
    if not read:
        assert param.command in ("mock", "profile", "soak", "watch")  # it reads no files
        return
    (here / "link.jsonl").symlink_to(read[0])
    before = snapshot(here)
    for path in (*read, f"./{read[0]}", str(here / read[0]), "link.jsonl"):
        code, out, err = call(*(path if text == name_for(param) else text for text in arguments))
        assert (code, out) == (2, b""), err
        assert "is an input of this command" in err
    others = [each for each in OUTPUTS if each.command == param.command and each.param is not param.param]
    for other in others:
        if "--loans" in (other.param.opts[0], param.param.opts[0]):
            continue
        code, out, err = call(*arguments_for(param, "same.json"), other.param.opts[0], "./same.json")
        assert (code, out) == (2, b""), err
        assert "is another output of this command" in err
    assert snapshot(here) == before


def test_what_settings_name_is_an_input_too(here: Path, call: Run) -> None:
    Path("cost.toml").write_text('[cost]\nmodel = "linear"\nstep_ms = 1.0\n')
    Path("all.toml").write_text('trace = "trace.jsonl"\n')
    before = snapshot(here)
    for options in (
        ("trace.jsonl", "--cost", "cost.toml", "--report", "cost.toml"),
        ("trace.jsonl", "--model", "config.json", "--device", "h100-80gb", "--report", "config.json"),
        ("--config", "all.toml", "--report", "trace.jsonl"),
        ("--config", "all.toml", "--requests", "all.toml"),
    ):
        code, _, err = call("replay", *options)
        assert (code, "is an input of this command" in err) == (2, True), err
    assert snapshot(here) == before


def test_several_files_cannot_be_one_device(here: Path, call: Run) -> None:
    for flag in ("--timeline", "--events"):
        code, _, err = call("replay", "trace.jsonl", "--replicas", "2", flag, "/dev/null")
        assert (code, "is one output, and there are several files" in err) == (2, True), err
    assert not Path("/dev/null-r0").exists()


# Directories -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("param", path_params("directory"), ids=str)
def test_standard_output_is_no_directory(param: PathParam, here: Path, call: Run) -> None:
    skip_unless_installed(param.command)
    code, out, err = call(*with_value(param, "-"))
    assert (code, out) == (2, b"")
    assert "./-" in err
    assert not Path("-").exists()


def test_a_run_directory_is_new_or_empty_and_whole(here: Path, call: Run) -> None:
    assert call("replay", "trace.jsonl", "--run-dir", "fresh")[0] == 0
    names = sorted(path.name for path in Path("fresh").iterdir())
    assert names == sorted(path.name for path in Path("run").iterdir())
    Path("empty").mkdir()
    (here / "to-empty").symlink_to("empty")
    assert call("replay", "trace.jsonl", "--run-dir", "to-empty")[0] == 0
    assert sorted(path.name for path in Path("empty").iterdir()) == names
    before = snapshot(here)
    for arguments in (
        ("trace.jsonl", "--run-dir", "empty"),
        ("trace.jsonl", "--run-dir", "trace.jsonl"),
        ("trace.jsonl", "--run-dir", "a/b"),
        ("trace.jsonl", "--run-dir", "z" * 300),
        ("trace.jsonl", "--run-dir", "other", "--report", "nowhere/x.json"),
    ):
        assert call("replay", *arguments)[0] == 7
    code, _, err = call("replay", "trace.jsonl", "--run-dir", "other", "--report", "other/report.json")
    assert (code, "lies in the directory of the run" in err) == (2, True), err
    assert call("replay", "config.json", "--run-dir", "other")[0] == 4
    assert snapshot(here) == before


def test_what_a_killed_run_left_does_not_keep_its_directory(here: Path, call: Run) -> None:
    left = Path("again", ".kvarts-unfinished")
    left.mkdir(parents=True)
    (left / "requests.jsonl").write_text("half")
    assert call("replay", "trace.jsonl", "--run-dir", "again")[0] == 0
    assert sorted(path.name for path in Path("again").iterdir()) == sorted(path.name for path in Path("run").iterdir())


@pytest.mark.long
def test_a_directory_of_a_model_is_not_written_over(here: Path, call: Run) -> None:
    skip_unless_installed("model tiny")
    Path("mine").mkdir()
    Path("mine", "config.json").write_text("mine")
    code, _, err = call("model", "tiny", "mine")
    assert (code, "is not empty" in err) == (7, True), err
    assert Path("mine", "config.json").read_text() == "mine"


# Inputs ------------------------------------------------------------------------------------------------------

DEEP = b"[" * 100_000
BAD_FILES = {
    "empty": b"",
    "zeros": bytes(1000),
    "no UTF-8": b'{"\xff": "\xe9"}\n',
    "deep": DEEP,
    "deep in a table": b"a = " + DEEP,
    "deep object": b'{"a":' * 100_000,
    "a number": b"17",
    "a string": b'"x"',
    "a list": b"[1, 2]",
    "an object": b"{}",
    "a large number": b'{"timestamp": 1e400, "a": ' + b"9" * 5000 + b"}",
    "a digit for each": b"a = " + b"9" * 5000,
    "gzip that breaks off": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    "surrogates": b'{"a": "\\ud800"}',
}


SUFFIXES = (".json", ".jsonl", ".csv", ".toml")


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("param", FAST_INPUTS, ids=str)
def test_no_input_is_answered_by_a_traceback(param: PathParam, is_whole: bool, here: Path, call: Run) -> None:
    """`is_whole`: each bad file under every suffix, not under one of them, in turn."""
    skip_unless_installed(param.command)
    (here / "folder").mkdir()
    missing, _, err = call(*arguments_for(param, "missing.json"))
    assert missing == 3, err
    for value in ("folder", "x" * 300, "trace.jsonl/x", "/dev/null"):
        code, _, err = call(*arguments_for(param, value))
        assert code in DOCUMENTED - ({7} if value == "/dev/null" else {0, 7}), (value, err)
        assert "Usage" not in err
    if param.command == "verify":
        return  # timelines are damaged in tests/proof/verify
    first = INPUTS.index(param)
    for place, (name, data) in enumerate(BAD_FILES.items(), first):
        for suffix in SUFFIXES if is_whole else SUFFIXES[place % len(SUFFIXES) :][:1]:
            path = here / f"bad{suffix}"
            path.write_bytes(data)
            code, _, err = call(*arguments_for(param, path.name))
            assert code in DOCUMENTED - {7}, (name, err)
            assert len(err) < 2000, name
