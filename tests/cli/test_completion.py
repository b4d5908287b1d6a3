"""Completion in shells: one command installs it, and bash completes names and options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import kvarts
from kvarts.base.errors import ConfigError
from kvarts.cli.commands import cli
from kvarts.cli.completed import complete_in_shells

SCRIPT = Path(sys.executable).parent / "kvarts"
needs_bash = pytest.mark.skipif(
    shutil.which("bash") is None or not SCRIPT.exists(), reason="needs bash, and kvarts installed"
)


def words_of(line: str) -> list[str]:
    """The words into which bash divides a line: at `:` and `=` as well."""
    return line.replace(":", " : ").replace("=", " = ").split(" ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("place", [None, "", " ", "x", "-1", "1.5", "9" * 5000, str(10**12)])
def test_variables_that_no_shell_sets_are_refused(
    shell: str, place: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete_in_shells()
    for name, value in {
        "_KVARTS_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "kvarts replay",
        "COMP_CWORD": place,
    }.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    is_odd = place in (None, " ") if shell == "fish" else place != str(10**12) and (shell, place) != ("zsh", "-1")
    with pytest.raises(ConfigError if is_odd else SystemExit) as raised:
        cli.main([], prog_name="kvarts", standalone_mode=False)
    assert not is_odd or "COMP_CWORD" in str(raised.value)


@needs_bash
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("kvarts comp", ["compare", "completion"]),
        ("kvarts replay --model llama-4", ["llama-4-scout", "llama-4-maverick"]),
        ("kvarts replay --model=llama-4", ["llama-4-scout", "llama-4-maverick"]),
        ("kvarts model show Qwen/qwen3-8", ["Qwen/Qwen3-8B"]),
        ("kvarts generate --model smo", ["smollm2"]),
        ("kvarts model get s", ["smollm2"]),
        ("kvarts plan --device h200", ["h200-141gb"]),
        ("kvarts replay --router dy", ["dynamo-kv"]),
        ("kvarts plan routers --routers prefix,dy", ["prefix,dynamo-kv"]),
        ("kvarts plan policies --policy soon", ["soonest-return"]),
        ("kvarts replay --set evic", ["eviction="]),
        ("kvarts replay --set eviction=l", ["lru"]),
        ("kvarts replay sam", ["sample:agents", "sample:mooncake", "sample:azure-chat", "sample:azure-code",
                               "sample:vllm-rtx4090", "same.jsonl"]),
        ("kvarts replay sample:az", ["azure-chat", "azure-code"]),
        ("kvarts trace info sample:moo", ["mooncake"]),
    ],
)  # fmt: skip
def test_bash_completes_names(line: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "same.jsonl").touch()
    words = words_of(line)
    program = f"""
        source <(kvarts completion bash --print)
        COMP_WORDS=("$@"); COMP_CWORD={len(words) - 1}
        _kvarts_completion kvarts
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    sources = str(Path(kvarts.__file__).parents[1])
    environment = {**os.environ, "PATH": f"{SCRIPT.parent}:{os.environ['PATH']}", "PYTHONPATH": sources}
    ended = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", *words],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    printed = ended.stdout.split()
    assert [name for name in printed if name in found] == found, ended.stderr
    assert len(printed) < 12


@pytest.mark.parametrize(
    ("shell", "script", "settings"),
    [
        ("bash", ".local/share/kvarts/completion.bash", ".bashrc"),
        ("zsh", ".local/share/kvarts/completion.zsh", ".zshrc"),
        ("fish", ".config/fish/completions/kvarts.fish", None),
    ],
)
def test_one_command_installs_it_once(
    shell: str,
    script: str,
    settings: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    if settings is not None:
        (tmp_path / settings).write_text("alias k=kvarts")
    assert run_command("completion") == run_command("completion") == 0
    printed = capsys.readouterr().out.split()
    assert "_KVARTS_COMPLETE" in (tmp_path / script).read_text()
    if settings is None:
        assert printed == [str(tmp_path / script)] * 2
        return
    assert printed == [str(tmp_path / script), str(tmp_path / settings), str(tmp_path / script)]
    path = tmp_path / script
    assert (tmp_path / settings).read_text() == f"alias k=kvarts\n[ -r '{path}' ] && . '{path}'\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", ["o'brien", "a$(touch ran) b", 'say "hi"', "caf\udce9"])
def test_a_shell_reads_the_script_in_a_folder_of_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., int]
) -> None:
    home = tmp_path / name
    home.mkdir()
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    assert run_command("completion", "bash") == 0
    program = '. "$HOME/.bashrc" && complete -p kvarts'
    ended = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "_kvarts_completion" in ended.stdout, ended.stderr
    assert not (tmp_path / "ran").exists()


def test_names_that_no_line_of_text_can_have_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (b"same.jsonl", b"sa\xff.jsonl", b"sa\n.jsonl"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    monkeypatch.chdir(tmp_path)
    context = click.Context(cli)
    command = cli.get_command(context, "replay")
    assert command is not None
    param = next(each for each in command.params if each.name == "trace")
    found = [item.value for item in param.type.shell_complete(context, param, "sa")]
    assert found[-1] == "same.jsonl" and all(each.startswith("sample:") for each in found[:-1])
    (asked,) = param.type.shell_complete(context, param, "x\udcff")
    assert asked.type == "file" and asked.value.encode()


def test_an_unknown_shell_is_refused(run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("completion", "bsh") == 2
    assert "Did you mean bash?" in capsys.readouterr().err
