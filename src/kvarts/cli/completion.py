"""`kvarts completion`: installs the completion of command lines in a shell."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from kvarts.base.errors import ConfigError, did_you_mean
from kvarts.base.files import make_directory, reading, write_whole
from kvarts.base.growing import GrowingFile
from kvarts.cli.options import Command

__all__ = ["completion_command"]

VARIABLE = "_KVARTS_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@click.command("completion", cls=Command)
@click.argument("shell", required=False)
@click.option("--print", "prints", is_flag=True, help="Print the script instead of installing it.")
@click.pass_context
def completion_command(ctx: click.Context, shell: str | None, prints: bool) -> None:
    """Install completion of commands, options and names in bash, zsh or fish.

    SHELL is that of $SHELL by default. The script is written to kvarts in $XDG_DATA_HOME (~/.local/share), and a line
    that reads it is added to ~/.bashrc or ~/.zshrc; for fish it is written to its folder of completions. New shells
    then complete models, devices, routers, samples, eviction orders and keys of --set.
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        hint = did_you_mean(name, SHELLS) or f"Give one of {', '.join(SHELLS)}."
        raise ConfigError(f"{name!r} is not a shell that is known", field="shell", hint=hint)
    make = get_completion_class(name)
    assert make is not None
    script = make(ctx.find_root().command, {}, "kvarts", VARIABLE).source()
    if prints:
        click.echo(script)
        return
    for path in _install(name, script):
        click.echo(path)
    click.echo(f"kvarts: installed; a new {name} completes command lines of kvarts", err=True)


def _install(shell: str, script: str) -> list[Path]:
    """Write the script, and the line that reads it; return the files that were written. Raise OutputError."""
    if shell == "fish":
        path = _home("XDG_CONFIG_HOME", ".config") / "fish" / "completions" / "kvarts.fish"
    else:
        path = _home("XDG_DATA_HOME", ".local/share") / "kvarts" / f"completion.{shell}"
    make_directory(path.parent)
    write_whole(path, script.encode())
    if shell == "fish":
        return [path]
    settings = Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc" if shell == "zsh" else Path.home() / ".bashrc"
    quoted = str(path).replace("'", r"'\''")
    line = os.fsencode(f"[ -r '{quoted}' ] && . '{quoted}'\n")
    with reading(settings):
        before = settings.read_bytes() if settings.exists() else b""
    if line in before:
        return [path]
    with GrowingFile(settings, keeps=True) as file:
        file.write((b"" if before.endswith(b"\n") or not before else b"\n") + line)
    return [path, settings]


def _home(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default)
