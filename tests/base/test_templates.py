"""Chat templates render as transformers renders them, in bounds, and say which line writes what."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvarts.base.errors import ConfigError
from kvarts.base.templates import Template

pytest.importorskip("jinja2")

CALLS = """{%- macro tag(name) -%}[{{ name }}]{%- endmacro -%}
{%- if tools %}
{{ tag('tools') }}{{ tools | tojson(indent=2) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set text %}{{ message.content | trim }}{% endset %}
    {{- tag(message.role) + text }}
    {%- for call in message.tool_calls or [] %}
{{ call.function | tojson }}
    {%- endfor %}
    {%- generation %}{{ eos_token }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{ tag('assistant') }}{% endif %}
"""
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "  Was is' das?\n"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "see", "arguments": {"a": "<ü>"}}}]},
]
VALUES: dict[str, Any] = {
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": {"name": "see", "description": "Looks > 'once'."}}],
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
}


def test_it_renders_as_transformers_does() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    others = {name: value for name, value in VALUES.items() if name not in ("messages", "tools")}
    (theirs,), _ = utils.render_jinja_template([MESSAGES], tools=VALUES["tools"], chat_template=CALLS, **others)
    assert Template(CALLS).render(VALUES) == theirs


def test_lines_are_those_that_write_the_text() -> None:
    text = "A\n{{ messages[0].role }}\n{% for m in messages %}\n{{ m.role }}\n{% endfor %}\nB"
    found = Template(text)
    written = found.render(VALUES)
    places = [*found.lines_of(VALUES), (len(written), 0)]
    parts = [(written[start:end], line) for (start, line), (end, _) in pairwise(places)]
    assert "".join(part for part, _ in parts) == written
    assert [line for part, line in parts if part.strip() in ("system", "user", "assistant")] == [2, 4, 4, 4]
    assert Template("{% set x %}{{ 7 }}{% endset %}{{ x | length }}").lines_of(VALUES) == []


@pytest.mark.parametrize("text", ["{{ 'x' * 10**9 }}", "{{ 2 ** 10**6 }}", "{{ [1] | tojson(indent=10**8) }}"])
def test_what_would_be_too_large_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="too much"):
        Template(text).render(VALUES)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ 'x' * 20000000 * 20000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ [0] * 10**11 }}",
        "{{ '%c' % 55555555555 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages[7].content }}",
        "{{ messages * 'x' }}",
        "{{",
    ],
)
def test_a_template_that_fails_is_a_mistake_of_its_author(text: str) -> None:
    with pytest.raises(ConfigError):
        Template(text).render(VALUES)


def test_the_line_of_an_error_and_of_a_date() -> None:
    with pytest.raises(ConfigError) as error:
        Template("fine\n{% if %}")
    assert error.value.line == 2
    assert Template("a\n{{ strftime_now('%Y') }}").dated_line == 2
    assert Template("a").dated_line is None
