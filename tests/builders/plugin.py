"""How a pytest inside a test gets the fixture `kvarts_server`."""

from __future__ import annotations

from importlib.metadata import entry_points

__all__ = ["PLUGIN"]

PLUGIN = () if entry_points(group="pytest11", name="kvarts_server") else ("-p", "kvarts.doors.openai.pytest_plugin")
"""Options; none where the plugin is installed, and is there by itself."""
