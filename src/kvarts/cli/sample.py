"""What `kvarts replay` replays when it is told nothing: which traffic, on what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvarts.traffic.trace import Trace

__all__ = ["SAMPLE_SETTINGS", "load_sample", "sample_settings"]

SAMPLE = "coding-agents"
SAMPLE_SOURCE = "twelve sessions of coding agents from kv-cache-tester (Apache-2.0)"
SAMPLE_SETTINGS: dict[str, Any] = {"model": ("llama-3.1-8b",), "device": "h100-80gb"}
"""As given on the command line. With these, the pages nearly suffice for what the sessions come back to."""


def sample_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return what is `given` on the command line on top of the sample's own settings.

    A given `cost` stands alone: how long steps take is then not a matter of model and device.
    """
    return dict(given) if "cost" in given else {**SAMPLE_SETTINGS, **given}


def load_sample(**reading: Any) -> Trace:
    """Return the bundled traffic, and say on standard error what it is."""
    from importlib.resources import as_file, files

    from kvarts.traffic.formats import load_trace

    click.echo(f"kvarts: replaying {SAMPLE_SOURCE}; give a TRACE to replay your own", err=True)
    with as_file(files("kvarts") / "data" / SAMPLE) as directory:
        return load_trace(directory, **reading)
