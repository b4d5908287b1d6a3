"""`kvarts --version`: the version, and whether the engine is compiled."""

from __future__ import annotations

from importlib.util import find_spec

import click

from kvarts import __version__

__all__ = ["how_built", "version_option"]


def how_built() -> str:
    """Return `compiled` if the engine is a compiled library, else `interpreted`."""
    engine = find_spec("kvarts.engine")
    assert engine is not None and engine.origin is not None
    return "interpreted" if engine.origin.endswith(".py") else "compiled"


def _tell(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(f"kvarts, version {__version__} ({how_built()})")
        ctx.exit()


version_option = click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, help="Show the version and exit.", callback=_tell
)
