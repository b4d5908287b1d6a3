"""Build the documentation site: the pages of docs/, and generated ones, with every warning an error.

    pip install -e '.[dev,docs]' && python scripts/docs_site.py     # then open build/site/index.html

Needs no network. build/docs receives the pages of docs/, with links to files outside of it pointed to their pages, and
the generated ones: a page for each command, from the declarations of its options; one for each group of public names in
Python, from their docstrings; metrics, from the source that declares them; events; and the pages beside the README,
such as the changelog. Sphinx builds the site from there. PARTS is its table of contents: it names every page.
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import click

import kvarts
from kvarts.cli.commands import cli
from kvarts.cli.helps import EXAMPLES, GROUPS, SUMMARIES

ROOT = Path(__file__).resolve().parents[1]
METRICS = ROOT / "src" / "kvarts" / "doors" / "openai" / "metrics.py"

ROOT_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "THIRD_PARTY.md": "third-party.md",
    "src/kvarts/data/README.md": "data.md",
    "examples/traces/README.md": "traces-of-others.md",
    "findings/README.md": "findings.md",
}
"""Pages outside of docs/, with their names on the site."""

PYTHON = {
    "Replays and reports": (
        *("replay", "ReplayConfig", "Slo", "Report", "LinearCost", "OffloadConfig", "FleetConfig", "PoolConfig"),
        *("SharingConfig", "ModelShare"),
    ),
    "Traffic": ("load_trace", "trace_info", "Trace", "TraceRequest", "Workload"),
    "Plans and calibrations": ("plan", "sweep", "calibrate"),
    "Real models and mocks": ("LLM", "SamplingParams", "StructuredOutputs", "mock", "verify"),
    "Errors": ("KvartsError", "ConfigError"),
}
"""The public names, by the title of their page."""

MODULES = ("policies", "proof.evidence", "testing")
"""Public modules with further names."""

PARTS: dict[str, list[str]] = {
    "Start": [
        "start.md",
        "first-ten-minutes.md",
        "transcript-log-to-gpus.md",
        "transcript-small-model.md",
        "guide-notebook.md",
        "when-not.md",
    ],
    "How do I": [
        "how-log-to-plan.md",
        "how-much-memory.md",
        "how-host-memory.md",
        "how-vllm-or-sglang.md",
        "how-prefill-decode.md",
        "how-mock-in-ci.md",
        "how-router-test.md",
        "how-which-mock.md",
        "how-hit-ratio.md",
        "how-own-policy.md",
        "how-own-order.md",
        "how-own-calibration.md",
        "how-compiled-wheels.md",
    ],
    "Guides": [
        "guide-replay.md",
        "guide-plan.md",
        "guide-agents.md",
        "guide-offload.md",
        "guide-sharing.md",
        "guide-fleet.md",
        "guide-routers.md",
        "guide-policies.md",
        "guide-timelines.md",
        "guide-models.md",
        "guide-serving.md",
        "guide-sessions.md",
        "guide-soak.md",
        "guide-kv-events.md",
        "guide-vllm.md",
    ],
    "Reference": [
        "commands/index.md",
        "python/index.md",
        "reference.md",
        "metrics.md",
        "events.md",
        "limits.md",
        "models.md",
        "clients.md",
        "security.md",
        "glossary.md",
        "changelog.md",
    ],
    "Understand": [
        "concepts.md",
        "how-it-is-built.md",
        "walks.md",
        "equal-to-vllm.md",
        "equal-to-sglang.md",
        "accuracy.md",
        "accuracy-league.md",
        "performance.md",
        "beside-others.md",
        "mock-beside-others.md",
        "where-guesses-are-wrong.md",
        "decisions/index.md",
        "contributing.md",
        "reporting.md",
        "data.md",
        "traces-of-others.md",
        "findings.md",
        "third-party.md",
    ],
}
"""The table of contents. Pages of a folder are listed on the folder's index."""

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def main() -> int:
    """Stage the pages and build the site; return the exit code of Sphinx."""
    from sphinx.cmd.build import main as build

    staged = ROOT / "build" / "docs"
    stage(staged)
    # In a separate process: Sphinx must be the first to import the modules, with the names that are for types only.
    subprocess.run([sys.executable, ROOT / "scripts" / "docs_pictures.py", staged / "assets"], check=True)
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "docs")]
    site = ROOT / "build" / "site"
    code: int = build([*options, str(staged), str(site)])
    pages = {name: (staged / name).read_text() for names in PARTS.values() for name in names}
    _write(site / "llms.txt", llms_text(pages))
    return code


def llms_text(pages: Mapping[str, str]) -> str:
    """Return llms.txt: the parts of the table of contents, each page with its title and first sentence.

    `pages`: their texts, by name. The form is that of llmstxt.org.
    """
    lines = ["# kvarts", "", "> A KV-cache engine for LLM serving: replays, plans, mocks and real models.", ""]
    for part, names in PARTS.items():
        lines += [f"## {part}", ""]
        for name in names:
            title = re.search(r"^# (.+)$", pages[name], re.MULTILINE)
            paragraph = re.search(r"^# .+\n+((?:[^\n#`|<-].*\n?)*)", pages[name], re.MULTILINE)
            said = LINK.sub(r"\1", " ".join(paragraph[1].split()) if paragraph else "")
            first = re.split(r"(?<=[.?!:]) ", said, maxsplit=1)[0].rstrip(":")
            link = f"- [{title[1] if title else name}]({name.removesuffix('.md')}.html)"
            lines.append(f"{link}: {first}" if first else link)
        lines.append("")
    return "\n".join(lines)


def stage(folder: Path) -> None:
    """Write all pages of the site to `folder`, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        text = with_links(path.read_text(), posixpath.join("docs", posixpath.dirname(name)))
        _write(folder / name, f"{text}{contents()}" if name == "index.md" else text)
    for path in sorted((ROOT / "docs" / "examples").glob("*.py")):
        _write(folder / "examples" / path.name, path.read_text())
    for name, text in generated_pages():
        _write(folder / name, text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def contents() -> str:
    """Return the table of contents, as directives for the end of the first page."""
    return "".join(_toctree(names, caption=part) for part, names in PARTS.items())


def _toctree(names: Iterable[str], *, caption: str = "") -> str:
    lines = ["", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "", *names, "```", ""]
    return "\n".join(lines)


def with_links(text: str, folder: str) -> str:
    """Return the text of a page of `folder` with links to other folders than docs/ pointed to their pages on the site.

    A link to a file without a page is replaced by its words.
    """

    def on_site(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if path == "docs/decisions":
            path = "docs/decisions/index.md"
        elif path in ROOT_PAGES:
            path = f"docs/{ROOT_PAGES[path]}"
        elif not path.startswith("docs/"):
            return words
        home = folder if folder.startswith("docs") else "docs"
        return f"[{words}]({posixpath.relpath(path, home)}{anchor})"

    return LINK.sub(on_site, text)


# Pages ----------------------------------------------------------------------------------------------------


def generated_pages() -> Iterator[tuple[str, str]]:
    """Return the name and the Markdown of each generated page."""
    for source, name in ROOT_PAGES.items():
        yield name, with_links((ROOT / source).read_text(), posixpath.dirname(source))
    yield "commands/index.md", commands_page()
    for name in _commands():
        yield f"commands/{name}.md", command_page(name)
    _check_names()
    yield (
        "python/index.md",
        PYTHON_INDEX + _toctree([*(f"{_slug(title)}.md" for title in PYTHON), *(f"{name}.md" for name in MODULES)]),
    )
    for title, names in PYTHON.items():
        yield f"python/{_slug(title)}.md", python_page(title, names)
    for module in MODULES:
        yield f"python/{module}.md", module_page(module)
    yield "metrics.md", metrics_page(METRICS.read_text())
    yield "events.md", EVENTS
    yield "decisions/index.md", decisions_page()


def decisions_page() -> str:
    """Return the list of decisions."""
    lines = ["# Decisions", "", "Each page is a question, the decision, and the reasons.", ""]
    paths = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    for path in paths:
        number, _, title = path.read_text().partition("\n")[0].removeprefix("# ").partition(". ")
        lines.append(f"- {int(number)}: [{title}]({path.name})")
    return "\n".join(lines) + "\n" + _toctree(path.name for path in paths)


# Commands -------------------------------------------------------------------------------------------------


def _commands() -> list[str]:
    """Return the names of the commands below `kvarts`, by purpose."""
    return [name for names in GROUPS.values() for name in names]


def commands_page() -> str:
    """Return the list of all commands."""
    lines = ["# Commands", "", "`kvarts COMMAND -h` prints the usual options, `--help-all` all of them.", ""]
    for title, names in GROUPS.items():
        lines += [f"**{title}**", ""]
        lines += [f"- [`kvarts {name}`]({name}.md): {SUMMARIES[name]}" for name in names]
        lines.append("")
    return "\n".join(lines) + _toctree(f"{name}.md" for name in _commands())


def command_page(name: str) -> str:
    """Return the page of a command, and of the commands below it."""
    context = click.Context(cli, info_name="kvarts")
    command = cli.get_command(context, name)
    assert command is not None, name
    return "\n".join(_command_lines(command, name, context, level=1)) + "\n"


def _command_lines(command: click.Command, path: str, parent: click.Context, level: int) -> Iterator[str]:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"{'#' * level} kvarts {path}\n"
    yield f"{SUMMARIES[path]}\n"
    yield f"```text\nkvarts {path} {pieces}\n```\n"
    help_text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    if help_text:
        yield f"{_prose(help_text)}\n"
    if path in EXAMPLES:
        yield "```sh\n" + "\n".join(EXAMPLES[path]) + "\n```\n"
    yield from _option_lines(command, context, level)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None, name
            yield from _command_lines(below, f"{path} {name}", context, level + 1)


def _option_lines(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    """Return a table for each group of options."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(context):
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is not None and param.name != "help":
            groups.setdefault(getattr(param, "group", "Options"), []).append(record)
    for title, records in groups.items():
        yield f"{'#' * (level + 1)} {title}\n"
        yield "| option | |\n|---|---|"
        for names, text in records:
            quoted = names.replace("|", "\\|")
            yield f"| `{quoted}` | {_in_cell(_prose(text))} |"
        yield ""


def _prose(text: str) -> str:
    """Return the text of a help as Markdown: options become code, and nothing else is markup."""
    pieces = re.split(r"(`[^`]+`|(?<![\w-])--[a-z][\w-]*)", text)
    return "".join(
        piece if piece[:1] == "`" else f"`{piece}`" if number % 2 else re.sub(r"([*_\[\]<>])", r"\\\1", piece)
        for number, piece in enumerate(pieces)
    )


def _in_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# Python ---------------------------------------------------------------------------------------------------


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _check_names() -> None:
    """Raise if PYTHON lacks a public name, or has one that is not public."""
    listed = [name for names in PYTHON.values() for name in names]
    assert sorted(listed) == sorted(kvarts._HOMES), sorted(set(listed) ^ set(kvarts._HOMES))


def python_page(title: str, names: tuple[str, ...]) -> str:
    """Return the page of a group of public names."""
    parts = [f"# {title}", "", f"`from kvarts import {', '.join(names)}`", "", "```{eval-rst}"]
    for name in names:
        kind = "autoclass" if isinstance(getattr(import_module(kvarts._HOMES[name]), name), type) else "autofunction"
        parts += [f".. {kind}:: {kvarts._HOMES[name]}.{name}", ""]
    return "\n".join([*parts, "```", ""])


def module_page(name: str) -> str:
    """Return the page of a public module."""
    module = import_module(f"kvarts.{name}")
    summary = (module.__doc__ or "").partition("\n")[0]
    parts = [f"# kvarts.{name}", "", summary, "", "```{eval-rst}"]
    for each in module.__all__:
        value = getattr(module, each)
        if hasattr(value, "__qualname__"):
            kind = "autoclass" if isinstance(value, type) else "autofunction"
            parts += [f".. {kind}:: {value.__module__}.{value.__qualname__}", ""]
    return "\n".join([*parts, "```", ""])


PYTHON_INDEX = """# Python

Names are imported from `kvarts`, on first use, or from one of three modules: `kvarts.policies`,
`kvarts.proof.evidence` and `kvarts.testing`. Their types and docstrings are the source of these pages.

"""

EVENTS = """# Events

An engine emits events in order of occurrence, each once, to every reader ([how it is built](how-it-is-built.md)). A
[journal](reference.md#journals-stories-run-directories) contains one line of JSON for each.

## Events of an engine

```{eval-rst}
.. automodule:: kvarts.core.events
```

## Lines of a journal

```{eval-rst}
.. automodule:: kvarts.proof.journal
```
"""


# Metrics --------------------------------------------------------------------------------------------------

KINDS = {
    "_gauge": "gauge",
    "_gauges": "gauge",
    "_counter": "counter",
    "_counters": "counter",
    "_histogram": "histogram",
    "GaugeMetricFamily": "gauge",
}


def metrics_page(source: str) -> str:
    """Return the table of the metrics that `source`, the module of metrics, declares."""
    lines = [
        "# Metrics",
        "",
        "`/metrics` of [`kvarts mock`](commands/mock.md) and [`kvarts serve model`](commands/serve.md). Names that",
        "begin with `vllm:` have the meaning, labels and buckets that they have in vLLM; every metric has the labels",
        "`model_name` and `engine`. Counters end in `_total` when they are scraped. `process_*` is about the process.",
        "",
        "| metric | kind | further label | |",
        "|---|---|---|---|",
    ]
    for name, kind, label, text in sorted(declared_metrics(source)):
        lines.append(f"| `{name}` | {kind} | {f'`{label}`' if label else ''} | {text} |")
    return "\n".join(lines) + "\n"


def declared_metrics(source: str) -> Iterator[tuple[str, str, str, str]]:
    """Return the name, kind, label and text of each metric in the source of a module."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        constants = {
            node.targets[0].id: node.value.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                kind = KINDS.get(_called(node), "")
                words = [_text(argument, constants) for argument in node.args[:3]]
                if kind and len(words) > 1 and words[0] and words[1]:
                    label = words[2] if _called(node) in ("_gauges", "_counters") and len(words) > 2 else ""
                    yield words[0], kind, label, words[1]
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                for row in node.value.elts:
                    if isinstance(row, ast.Tuple) and len(row.elts) == 3:
                        name, text = _text(row.elts[0], constants), _text(row.elts[1], constants)
                        if name and text:
                            yield f"vllm:{name}", "histogram", "", text


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _text(node: ast.expr, constants: dict[str, Any]) -> str:
    """Return the string that an expression is, with the constants of its function filled in; empty if it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = [
            part.value
            if isinstance(part, ast.Constant)
            else constants.get(getattr(getattr(part, "value", None), "id", ""))
            for part in node.values
        ]
        return "" if None in parts else "".join(map(str, parts))
    return ""


if __name__ == "__main__":
    sys.exit(main())
