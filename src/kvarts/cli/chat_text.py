"""Conversion between lines and tokens: with a model's tokenizer and chat template, or byte by byte."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from kvarts.errors import ConfigError, InputError, MissingFileError

__all__ = ["ByteText", "ModelText", "Text"]


class Text(Protocol):
    """Conversion between the text and the tokens of a chat."""

    eos_token_ids: tuple[int, ...]

    def tokens(self, line: str, *, is_first: bool, end: int | None) -> list[int]:
        """Return the tokens that a line adds to a history. `end`: the EOS token of the previous answer, if any."""

    def writer(self) -> Callable[[int], str]:
        """Return a decoder for the tokens of one answer, called per token; it withholds incomplete characters."""


class ByteText:
    """Token ids are UTF-8 bytes. Ids above 255 are written as numbers."""

    eos_token_ids: tuple[int, ...] = ()

    def tokens(self, line: str, *, is_first: bool, end: int | None) -> list[int]:
        """Return the bytes of a line and its newline."""
        return list(f"{line}\n".encode())

    def writer(self) -> Callable[[int], str]:
        """Return an incremental UTF-8 decoder."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def write(token: int) -> str:
            if token < 256:
                return decoder.decode(bytes([token]))
            return decoder.decode(b"", final=True) + f"<{token}>"

        return write


ANSWER = "kvarts-answer-5d41402a"
"""Placeholder for an answer, to find the text that a template renders after one."""


class ModelText:
    """The tokenizer in a model's directory, with its chat template if it has one.

    A template renders a whole conversation, but a session needs only the text that a turn adds. So a conversation with
    a placeholder for the answer is rendered; the addition is the text after the placeholder, without the end-of-turn
    token if the model generated that.
    """

    def __init__(self, directory: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"a model's tokenizer needs transformers ({error})",
                field="model",
                hint="pip install 'kvarts[torch]', or leave --model out.",
            ) from None
        if directory.startswith(("/", ".", "~")) and not Path(directory).exists():
            hint = "Give a directory with a model, or `kvarts model tiny`."
            raise MissingFileError("no such directory", path=directory, hint=hint)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"has no tokenizer: {reason}", path=directory, hint="Give the directory of a model."
            ) from None
        eos = self._tokenizer.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)

    def tokens(self, line: str, *, is_first: bool, end: int | None) -> list[int]:
        """Return the tokens of a turn."""
        if not self._tokenizer.chat_template:
            return self._encode(f"{line}\n", add_special_tokens=is_first)
        message = {"role": "user", "content": line}
        if is_first:
            return self._encode(self._render([message]), add_special_tokens=False)
        answer = {"role": "assistant", "content": ANSWER}
        _, is_there, addition = self._render([message, answer, message]).partition(ANSWER)
        if not is_there:
            raise ConfigError("the chat template leaves answers out", field="model", hint="Leave --model out.")
        if end is not None:
            addition = addition.removeprefix(self._tokenizer.decode([end]))
        return self._encode(addition, add_special_tokens=False)

    def writer(self) -> Callable[[int], str]:
        """Return an incremental decoder of the tokenizer."""
        from tokenizers.decoders import DecodeStream

        backend, stream = self._tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(backend, token) or ""

    def _render(self, messages: list[dict[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return tokens
