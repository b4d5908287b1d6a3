"""Prompts of messages: their text, by a chat template or as ChatML, and the ids of its blocks.

An id is a hash of a block of tokens and of all blocks before it: two prompts share as many blocks as their ids agree.
Without a template, prompts are ChatML that only grows: tools first, every message as it is, reasoning included, so that
two prompts part where their messages do. With a template they also part where it does.

The tokenizer `words` needs no file: a token is a word of up to 8 letters with the space before it, up to three digits
or signs (`<` begins a token), a run of white space, or three bytes of other characters. English has some 4.5 characters
per token so, code and other languages fewer. Anything else is a tokenizer of Hugging Face.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvarts.base.errors import ConfigError, InputError, first_line
from kvarts.base.files import read_text
from kvarts.base.templates import Template
from kvarts.core.content import UNIT_BYTES

__all__ = ["BLOCK_TOKENS", "WORDS", "Chat", "Ids", "Prompts", "reasoning_of"]

BLOCK_TOKENS = 16
WORDS = "words"
KEPT_BYTES = 32 << 20
"""Texts and ids of known beginnings that are kept while prompts are read; then they are forgotten and found again."""

_TOKEN = (
    rb"<\|\w+\|>| ?[A-Za-z]{1,8}| ?[0-9]{1,3}|[ \t]+|[\r\n]+|[\x80-\xff]{1,3}"
    rb"|[^\sA-Za-z0-9\x80-\xff<]{1,3}|<[^\sA-Za-z0-9\x80-\xff<]{0,2}|\s"
)
_IMAGE = re.compile(r"\x00(\d+):([0-9a-f]{16})\x00")
_PARTS = re.compile(r"(\x00\d+:[0-9a-f]{16}\x00)|(?=<[|\uff5c]|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_turn>)")
"""Where a rendered text is cut, so that what many prompts begin with is computed once: at images and special tokens."""


class Chat(msgspec.Struct, kw_only=True):
    """One request as a prompt is made of it. `prompt`: text or token ids in place of messages.

    Messages have a role and a `content` that is text; images in it are marks. `continues`: the answer continues the
    last message. `answer`: the message that was generated, if the log has it. `time_ns`: since any epoch. `num_...`: as
    its usage says. `line`: of the file.
    """

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}
    prompt: str | list[int] | None = None
    continues: bool = False
    answer: dict[str, Any] | None = None
    model: str | None = None
    salt: str | None = None
    session: str | None = None
    request_id: str | None = None
    time_ns: int | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    cached_tokens: int | None = None
    file: str = ""
    line: int = 0


class Ids(msgspec.Struct, frozen=True):
    """The ids of a prompt's blocks, 8 bytes each, the last of fewer tokens perhaps; and the number of its tokens."""

    units: bytes
    num_tokens: int


class _Tokenizer(Protocol):
    name: str

    def cut(self, text: str, first: int, size: int) -> tuple[list[bytes], int]:
        """Cut the tokens of `text` into `first` and then `size` at a time; return them, and how many the last has."""


class _Words:
    """The tokenizer without a file. `size`: the usual size of a block, for which its patterns are compiled."""

    name = WORDS

    def __init__(self, size: int) -> None:
        self._tokens = re.compile(_TOKEN)
        self._runs = {length: re.compile(b"(?:%b){1,%d}+" % (_TOKEN, length)) for length in range(1, size + 1)}

    def cut(self, text: str, first: int, size: int) -> tuple[list[bytes], int]:
        data = text.encode("utf-8", "surrogatepass")
        if first == size:
            chunks = self._runs[size].findall(data)
        else:
            head = self._runs[first].match(data)
            chunks = [] if head is None else [head[0], *self._runs[size].findall(data, head.end())]
        return chunks, len(self._tokens.findall(chunks[-1])) if chunks else 0


class _Hub:
    """A tokenizer of Hugging Face, by its file. `backend`: of the package tokenizers."""

    def __init__(self, name: str, backend: Any) -> None:
        self.name = name
        self._backend = backend

    def cut(self, text: str, first: int, size: int) -> tuple[list[bytes], int]:
        return _cut(self._backend.encode(text, add_special_tokens=False).ids, first, size)


def _cut(tokens: Iterable[int], first: int, size: int) -> tuple[list[bytes], int]:
    ids = array("Q", tokens)
    edges = [0, *range(min(first, len(ids)), len(ids), size), len(ids)] if len(ids) else []
    chunks = [ids[start:end].tobytes() for start, end in pairwise(edges) if start < end]
    return chunks, len(chunks[-1]) // UNIT_BYTES if chunks else 0


class _State:
    """A beginning of prompts: the ids of its whole blocks, the hash of the last, and the tokens after it."""

    __slots__ = ("children", "digest", "ids", "num_tail", "tail")

    def __init__(self, ids: bytes = b"", digest: bytes = b"", tail: bytes = b"", num_tail: int = 0) -> None:
        self.ids = ids
        self.digest = digest
        self.tail = tail
        self.num_tail = num_tail
        self.children: dict[str, _State] = {}


class Prompts:
    """Makes prompts of chats. `tokenizer`: `words`, a directory or a name; `chat_template`: a file of jinja2.

    A directory's own template is used if none is given. Raise ConfigError for what cannot be loaded.
    """

    def __init__(
        self, tokenizer: str = WORDS, chat_template: Path | str | None = None, *, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self.block_tokens = block_tokens
        self._roots: dict[str | None, _State] = {}
        self._num_kept = 0
        self._specials = {"bos_token": "<s>", "eos_token": "</s>"}
        source: str | None = None
        self._tokenizer: _Tokenizer
        if tokenizer == WORDS:
            self._tokenizer = _Words(block_tokens)
        else:
            backend, source, self._specials = _hub_tokenizer(tokenizer)
            self._tokenizer = _Hub(Path(tokenizer).name, backend)
        named = "its own template"
        if chat_template is not None:
            path = Path(chat_template)
            source = read_text(path, hint="Check the path of the chat template.")
            named = path.name
        try:
            self.template = Template(source) if source else None
        except ConfigError as error:
            raise ConfigError(error.what, path=chat_template or tokenizer, line=error.line, hint=error.hint) from error
        self.described = f"tokens of {self._tokenizer.name}, " + (
            f"prompts by {named}" if self.template else "prompts as ChatML, without a chat template"
        )

    def parts(self, chat: Chat, *, is_open: bool = True) -> list[str]:
        """Return the text of a prompt, in parts. `is_open`: the answer follows. Raise InputError if it has no text."""
        if isinstance(chat.prompt, str):
            return [chat.prompt]
        if self.template is None:
            return list(_chatml(chat, is_open=is_open))
        return [part for part in _PARTS.split(self._rendered(chat, is_open=is_open)) if part]

    def answered(self, chat: Chat, answer: Mapping[str, Any]) -> list[str]:
        """Return the text of a prompt and its answer, as it was generated, in parts.

        The answer is what the template writes for it; if that rewrites the prompt, it is its content as it is.
        """
        before = self.parts(chat)
        if self.template is not None and chat.prompt is None:
            prompt = "".join(before)
            whole = msgspec.structs.replace(chat, messages=[*chat.messages, dict(answer)], continues=False)
            text = self._rendered(whole, is_open=False)
            if text.startswith(prompt) and answer["content"] in text[len(prompt) :]:
                return [*before, *(part for part in _PARTS.split(text[len(prompt) :]) if part)]
        return [*before, _spoken(answer)]

    def ids(self, parts: Sequence[str], model: str | None = None) -> Ids:
        """Return the ids of a text, which no other `model` has."""
        if self._num_kept > KEPT_BYTES:
            self._roots, self._num_kept = {}, 0
        state = self._root_of(model)
        for part in parts:
            known = state.children.get(part)
            if known is None:
                known = state
                for piece in _PARTS.split(part) if "\x00" in part else (part,):
                    known = self._extended(known, piece) if piece else known
                state.children[part] = known
                self._num_kept += len(part) + len(known.ids) + 400
            state = known
        return self._ended(state)

    def ids_of(self, chat: Chat) -> Ids:
        """Return the ids of the prompt of `chat`."""
        if isinstance(chat.prompt, list):
            cut = _cut(chat.prompt, self.block_tokens, self.block_tokens)
            return self._ended(self._hashed(self._root_of(chat.model), *cut))
        return self.ids(self.parts(chat), chat.model)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        chunks, num_last = self._tokenizer.cut(text, self.block_tokens, self.block_tokens)
        return max(0, len(chunks) - 1) * self.block_tokens + num_last

    def lines_of(self, chat: Chat) -> list[tuple[int, int]]:
        """Return where each line of the template begins to write, see Template; empty without one."""
        if self.template is None or chat.prompt is not None:
            return []
        return self.template.lines_of(self._specials | _values(chat))

    def _root_of(self, model: str | None) -> _State:
        root = self._roots.get(model)
        if root is None:
            digest = b"" if model is None else blake2b(model.encode(), digest_size=UNIT_BYTES).digest()
            root = self._roots[model] = _State(digest=digest)
        return root

    def _rendered(self, chat: Chat, *, is_open: bool) -> str:
        assert self.template is not None
        try:
            text = self.template.render(self._specials | _values(chat, is_open=is_open))
        except ConfigError as error:
            raise InputError(error.what, field="messages", hint="Give the template of the model.") from error
        if chat.continues and is_open and (last := chat.messages[-1]["content"]):
            place = text.rfind(last)
            return text[: place + len(last)] if place >= 0 else text
        return text

    def _extended(self, state: _State, text: str) -> _State:
        first, size = self.block_tokens - state.num_tail, self.block_tokens
        if image := _IMAGE.fullmatch(text):
            number = int(image[2], 16) >> 1
            return self._hashed(state, *_cut([number ^ place for place in range(int(image[1]))], first, size))
        return self._hashed(state, *self._tokenizer.cut(text, first, size))

    def _hashed(self, state: _State, chunks: list[bytes], num_last: int) -> _State:
        if not chunks:
            return state
        if state.num_tail and len(chunks) == 1:
            num_last += state.num_tail
        chunks[0] = state.tail + chunks[0]
        tail = b"" if num_last == self.block_tokens else chunks.pop()
        digest, ids = state.digest, [state.ids]
        for chunk in chunks:
            digest = blake2b(digest + chunk, digest_size=UNIT_BYTES).digest()
            ids.append(digest)
        return _State(b"".join(ids), digest, tail, num_last if tail else 0)

    def _ended(self, state: _State) -> Ids:
        num_tokens = len(state.ids) // UNIT_BYTES * self.block_tokens + state.num_tail
        last = blake2b(state.digest + state.tail, digest_size=UNIT_BYTES).digest() if state.num_tail else b""
        return Ids(state.ids + last, num_tokens)


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning that a message brings along; empty for none."""
    return str(message.get("reasoning_content") or "")


def _spoken(message: Mapping[str, Any]) -> str:
    """Return a message as a model generates it: reasoning, content and calls."""
    reasoning = reasoning_of(message)
    parts = [f"<think>\n{reasoning}\n</think>\n\n"] if reasoning else []
    parts.append(message["content"])
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        parts.append(f'\n<tool_call>\n{{"name": "{function["name"]}", "arguments": {text}}}\n</tool_call>')
    return "".join(parts)


def _chatml(chat: Chat, *, is_open: bool) -> Iterable[str]:
    if chat.tools:
        yield "<|im_start|>tools\n"
        yield f"{msgspec.json.encode(chat.tools).decode()}<|im_end|>\n"
    last = len(chat.messages) - 1 if chat.continues and is_open else -1
    for place, message in enumerate(chat.messages):
        end = "" if place == last else "<|im_end|>\n"
        yield f"<|im_start|>{message['role']}\n"  # apart from the content, as it is when the content is generated
        yield f"{_spoken(message)}{end}"
    if is_open and last < 0:
        yield "<|im_start|>assistant\n"


def _values(chat: Chat, *, is_open: bool = True) -> dict[str, Any]:
    """Return the variables of a template: calls have their arguments as objects, as engines give them."""
    return {
        "messages": [_with_arguments(message) for message in chat.messages],
        "tools": chat.tools,
        "add_generation_prompt": is_open and not chat.continues,
        **chat.variables,
    }


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    made = []
    for call in calls:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            with suppress(msgspec.DecodeError, RecursionError):  # then a template writes the text of the model
                arguments = msgspec.json.decode(arguments or "{}")
        made.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": made}


def _hub_tokenizer(name: str) -> tuple[Any, str | None, dict[str, str]]:
    """Return the tokenizer of a directory, or of a name that transformers knows, its chat template, and its tokens."""
    try:
        path = Path(name)
        if path.is_dir():
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path / "tokenizer.json")), *_settings_in(path)
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise ConfigError(
            f"needs a package that is not installed ({error})",
            field="tokenizer",
            hint="pip install tokenizers (for a name: transformers), or use --tokenizer words.",
        ) from error
    except Exception as error:  # tokenizers raises its own, transformers many kinds
        raise ConfigError(
            f"{name} is not a tokenizer that can be loaded: {first_line(error)}",
            field="tokenizer",
            hint="Give a directory with tokenizer.json, a name on Hugging Face, or words.",
        ) from error
    template = found.chat_template
    specials = {"bos_token": str(found.bos_token or ""), "eos_token": str(found.eos_token or "")}
    return found.backend_tokenizer, template if isinstance(template, str) else None, specials


def _settings_in(path: Path) -> tuple[str | None, dict[str, str]]:
    """Return the chat template of a model's directory, None if it has none, and its first and last token."""
    settings: dict[str, Any] = {}
    if (path / "tokenizer_config.json").is_file():
        settings = msgspec.json.decode((path / "tokenizer_config.json").read_bytes(), type=dict[str, Any])
    specials = {}
    for name in ("bos_token", "eos_token"):
        token = settings.get(name)
        specials[name] = str((token.get("content") if isinstance(token, dict) else token) or "")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        template = next((each.get("template") for each in template if each.get("name") == "default"), None)
    own = path / "chat_template.jinja"
    if own.is_file():
        template = own.read_text(encoding="utf-8")
    return template if isinstance(template, str) else None, specials
