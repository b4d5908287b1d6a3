"""Converts conversations to prompts with a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvarts.errors import ConfigError

__all__ = ["render_chat"]


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of `messages`, each with `role` and `content`, up to the start of the model's answer.

    Raise ConfigError for a tokenizer without a template, and for messages that the template rejects.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "the model's tokenizer has no chat template", field="messages", hint="Give a prompt as text instead."
        )
    if not messages:
        raise ConfigError("there are none", field="messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError("each needs a `role` and `content`", field="messages")
    try:
        text = tokenizer.apply_chat_template(
            [dict(one) for one in messages], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program, and jinja2 may be missing
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"cannot be made a prompt: {reason}", field="messages") from error
    tokens: list[int] = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return tokens
