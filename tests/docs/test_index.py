"""The first page of the docs and the site: questions are answered where the page says, and no page is left out."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from docs_site import PARTS, generated_pages, llms_text, with_links
from kvarts.cli.commands import COMMANDS

NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="the site describes the room of PyTorch, too")
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


@NEEDS_TORCH
def test_every_page_is_in_the_table_of_contents() -> None:
    listed = [page for pages in PARTS.values() for page in pages]
    generated = {name for name, _ in generated_pages()}
    assert len(set(listed)) == len(listed)
    assert {page for page in listed if not (DOCS / page).exists()} <= generated
    assert {path.name for path in DOCS.glob("*.md")} - {*listed} == {"index.md"}


@NEEDS_TORCH
def test_generated_pages_cover_commands_names_and_metrics() -> None:
    pages = dict(generated_pages())
    assert {f"commands/{name}.md" for name in COMMANDS} <= {*pages}
    assert all(f"`{option}" in pages["commands/replay.md"] for option in ("--pages", "--host-memory", "--router NAME"))
    assert "::" in pages["python/replays-and-reports.md"]
    for metric in ("vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds", "kvarts:pages", "kvarts:transfers"):
        assert f"| `{metric}` |" in pages["metrics.md"]


def test_links_of_the_site_stay_inside_of_it() -> None:
    assert with_links("[a](../SECURITY.md) [b](../setup.py) [c](x.md#y) [d](decisions)", "docs") == (
        "[a](reporting.md) b [c](x.md#y) [d](decisions/index.md)"
    )
    assert with_links("[a](docs/x.md) [b](LICENSE) [c](https://x.org)", "") == "[a](x.md) b [c](https://x.org)"
    assert with_links("[a](../guide.md)", "docs/decisions") == "[a](../guide.md)"


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered_one_click_away(question: str) -> None:
    (row,) = [line for line in INDEX.splitlines() if line.startswith("|") and question in line.split("|")[1]]
    found = ""
    for page, anchor in LINK.findall(row):
        found += anchors(DOCS / page)[anchor] if anchor else (DOCS / page).read_text()
    for word in ANSWERS[question]:
        assert word in found


def test_a_text_for_language_models_lists_every_page_with_its_first_sentence() -> None:
    names = [name for part in PARTS.values() for name in part]
    texts = {name: f"# Title of {name}\n\nIt is [one](a.md) thing. And more.\n" for name in names}
    text = llms_text(texts)
    assert text.startswith("# kvarts\n\n> ") and [line[3:] for line in text.splitlines() if line[:3] == "## "] == [
        *PARTS
    ]
    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        f"- [Title of {name}]({name.removesuffix('.md')}.html): It is one thing." for name in names
    ]
