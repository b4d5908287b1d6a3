"""Reasoning of scripted answers: the amount that a request allows, and its place in the next turn's prompt.

A mock cuts the reasoning of a scripted answer to the budget of the request, as vLLM ends the reasoning of a model with
the tokens that close it, or leaves the reasoning out. The chat template decides how much of it the next turn's prompt
contains, and so how much the cache finds. The template of a mock follows Qwen3: reasoning stays in the messages after
the last one of the user, while an agent uses tools, and earlier reasoning is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvarts.limits import MOST_COUNT
from kvarts.openai_api.errors import ApiError

__all__ = ["CLOSE", "OPEN", "Thinking", "budget_of_messages", "reasoning_in", "spoken"]

OPEN, CLOSE = "<think>\n", "\n</think>\n\n"
"""The text before and after reasoning, as Qwen models write it."""
OFF = ("enable_thinking", "thinking")
"""Variables of chat templates that turn reasoning off if they are false."""
LEAST_BUDGET = 1024
"""The least budget of Anthropic's API."""


class Thinking(msgspec.Struct, frozen=True):
    """The reasoning that a request allows. `budget`: the most tokens of it; None: all. `is_off`: none."""

    budget: int | None = None
    is_off: bool = False

    @classmethod
    def of(cls, budgets: Sequence[int | None], effort: Any, variables: Mapping[str, Any] | None) -> Thinking:
        """Return the reasoning that a chat allows: by the least of `budgets`, an effort, and variables of its template.

        Of the efforts, only none has an effect: the others ask a model for more or less, and a script is fixed.
        Raise ApiError for a budget out of range.
        """
        given = [budget for budget in budgets if budget is not None]
        if any(budget < -1 for budget in given):
            raise ApiError(400, "must be at least 0, or -1 for no limit", param="thinking_token_budget")
        budget = min((min(each, MOST_COUNT) for each in given if each >= 0), default=None)
        is_off = effort == "none" or any((variables or {}).get(name) is False for name in OFF)
        return cls(budget, is_off or budget == 0)


NO_LIMIT = Thinking()


def budget_of_messages(thinking: Mapping[str, Any] | None, max_tokens: int | None) -> tuple[int | None, bool]:
    """Return the budget in `thinking` of Anthropic's API, and whether it turns reasoning off. Raise ApiError."""
    kind = None if thinking is None else thinking.get("type")
    if thinking is None or kind == "adaptive":
        return None, False
    if kind == "disabled":
        return None, True
    budget = thinking.get("budget_tokens")
    if kind != "enabled":
        raise ApiError(400, "must be enabled, disabled or adaptive", param="thinking.type")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < LEAST_BUDGET:
        raise ApiError(400, f"must be at least {LEAST_BUDGET}", param="thinking.budget_tokens")
    if max_tokens is not None and budget >= max_tokens:
        raise ApiError(400, "must be less than max_tokens", param="thinking.budget_tokens")
    return budget, False


def reasoning_in(message: Mapping[str, Any]) -> str:
    """Return the reasoning that a message of a conversation brings along; empty for none."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(told := message.get(name), str) and told:
            return told
    return ""


def spoken(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None) -> list[str]:
    """Return for each message of a conversation the reasoning to write before its content.

    `variables` of the template: with `preserve_thinking` true or `clear_thinking` false, reasoning of all turns stays.
    """
    given = variables or {}
    keeps_all = given.get("preserve_thinking") is True or given.get("clear_thinking") is False
    last_user = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        f"{OPEN}{reasoning}{CLOSE}"
        if message["role"] == "assistant" and (keeps_all or index > last_user) and (reasoning := reasoning_in(message))
        else ""
        for index, message in enumerate(messages)
    ]
