"""The trace of a command: the given one, or the bundled sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvarts.cli.progress import Progress
from kvarts.samples import PREFIX, SAMPLES
from kvarts.settings import Flags, Given, Section
from kvarts.traffic.settings import load_given

if TYPE_CHECKING:
    from kvarts.traffic.trace import Trace

__all__ = ["load_traffic", "over_sample_settings"]

SAMPLE = "agents"
SAMPLE_SETTINGS = {"model": "llama-3.1-8b", "device": "h100-80gb"}
"""By their keys. With these, the pages nearly suffice for the prefixes that the sessions return to."""


def load_traffic(given: Given, trace: Path | None) -> Trace:
    """Load the trace named on the command line, else the traffic that the settings file describes, else the sample."""
    with Progress("reading the trace" if trace is None else f"reading {trace}"):
        found = load_given(given, trace)
    if found is None:
        click.echo(f"kvarts: replaying {SAMPLES[SAMPLE].what}; give a TRACE to replay your own", err=True)
        found = load_given(given, f"{PREFIX}{SAMPLE}")
    assert found is not None
    return found


def over_sample_settings(given: Given, sections: Sequence[Section]) -> Given:
    """Return the given settings, with the sample's model and device for those that are missing.

    If `cost` is given, nothing is added: it determines the time of steps without a model and device.
    """
    sample = Given()
    spellings = Flags({key: f"{key} of the sample" for key in SAMPLE_SETTINGS})
    if "cost" not in given:
        for setting in (setting for section in sections if not section.is_named for setting in section.settings):
            if setting.key in SAMPLE_SETTINGS:
                sample.add(setting, SAMPLE_SETTINGS[setting.key], spellings)
    return given.over(sample)
