"""A self-contained page of HTML with the charts of a plan; each point has the command that gives it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from kvarts.plan.series import charts_of
from kvarts.report.page import fill_page

__all__ = ["render_page"]


def render_page(values: dict[str, Any]) -> bytes:
    """Return the page of a plan, of how many users fit, or of a sweep."""
    assets = files("kvarts.plan") / "assets"
    template = (assets / "plan.html").read_text(encoding="utf-8")
    script = (assets / "plan.js").read_text(encoding="utf-8")
    data = {
        "title": values["trace"],
        "subtitle": _subtitle(values),
        "command": values.get("command", ""),
        "charts": charts_of(values),
        "options": values.get("latency", {}).get("options", []),
    }
    return fill_page(template, {"plan.js": script}, data)


def _subtitle(values: dict[str, Any]) -> str:
    if "subtitle" in values:
        return str(values["subtitle"])
    if "users" in values:
        return str(values["setting"])
    return (
        f"{values['num_requests']:,} requests, {values['num_prompt_tokens']:,} prompt tokens, "
        f"pages of {values['page_size']} tokens"
    )
