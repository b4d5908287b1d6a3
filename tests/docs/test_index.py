"""The first page of the docs: every question on it is answered where it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
INDEX = (DOCS / "index.md").read_text()
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
ANSWERS = {
    "how much host memory": ("--host-memory", "--slo-ttft-ms"),
    "request 17 slow": ("kvarts story",),
    "my own router": ("def choose", "ReplayConfig(router="),
    "in pytest": ("kvarts_server",),
    "H200 in fp8": ("measured", "extrapolated", "unknown", "H200 in fp8"),
}
"""Words of a question, and words of the section, or page, that answers it."""


def anchors(page: Path) -> dict[str, str]:
    """The sections of a page by their anchors."""
    text = page.read_text()
    parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)[1:]
    slugs = [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in parts[::2]]
    return dict(zip(slugs, parts[1::2], strict=True))


@pytest.mark.parametrize(("page", "anchor"), sorted(set(LINK.findall(INDEX))))
def test_every_link_leads_somewhere(page: str, anchor: str) -> None:
    target = DOCS / page
    assert target.exists()
    assert not anchor or anchor in anchors(target)


def test_no_page_is_left_out() -> None:
    linked = {page for page, _ in LINK.findall(INDEX)}
    assert {path.name for path in DOCS.glob("*.md")} - linked == {"index.md"}


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered_one_click_away(question: str) -> None:
    (row,) = [line for line in INDEX.splitlines() if line.startswith("|") and question in line.split("|")[1]]
    found = ""
    for page, anchor in LINK.findall(row):
        found += anchors(DOCS / page)[anchor] if anchor else (DOCS / page).read_text()
    for word in ANSWERS[question]:
        assert word in found
