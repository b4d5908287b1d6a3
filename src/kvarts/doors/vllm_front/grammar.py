"""Text that a grammar allows, or that a script states, as tokens of the model's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError, problem_of
from kvarts.doors.openai.prompts import CLOSE, OPEN

__all__ = ["Writer"]

FIELD = "structured_outputs"
SPACES = r"[ ]?"
"""White space in JSON."""
QUOTE = '"'
CLOSING = ("}", "]", QUOTE, ",", ":", " ", "{", "[", "0", "1")
"""Texts of tokens in the order in which they end a JSON value soonest."""
MOST_WORDS = 4
"""Words in a row, where a grammar allows any text."""
REASONING_WORDS = 16
LONG = 512
"""Tokens after which a text no longer varies."""
MOST_IN_XML = 4096
"""Tokens of an object that is written as XML, however few of its tokens the answer has room for."""


class Writer:
    """Writes tokens. `tokenizer`: a tokenizer.json; `words`: ids of words, for texts where a grammar allows any.

    Raises ConfigError without llguidance.
    """

    def __init__(self, tokenizer: str, size: int, end_ids: Sequence[int], words: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                "schemas, tools and scripted answers need llguidance, which is not installed",
                field=FIELD,
                hint="pip install llguidance.",
            ) from error
        self._llguidance: Any = llguidance
        self._end_ids = frozenset(end_ids)
        self._tokens = llguidance.LLTokenizer(tokenizer, n_vocab=size, eos_token=sorted(end_ids) or None)
        self._words = np.array(words, np.int64)
        self._quote = self._tokens.tokenize_str(QUOTE)[0]
        self._closing = [ids[0] for text in CLOSING if len(ids := self._tokens.tokenize_str(text)) == 1]

    def tokens(self, text: str) -> Sequence[int]:
        """Return the tokens of `text`."""
        return list(self._tokens.tokenize_str(text, parse_special=True))

    def reasoning(self, seed: int, *, is_open: bool) -> Sequence[int]:
        """Return the tokens of some words of reasoning with its end, and its beginning unless the prompt has that."""
        chance = Random(seed)
        words = [int(self._words[chance.randrange(len(self._words))]) for _ in range(REASONING_WORDS)]
        return [*(() if is_open else self.tokens(OPEN)), *words, *self.tokens(CLOSE)]

    def obeying(self, structured: Mapping[str, Any], seed: int, most: int) -> Sequence[int]:
        """Return at most `most` tokens of a text that a constraint allows, without the end.

        `structured`: vLLM's StructuredOutputsParams. Raise ConfigError if it cannot be compiled.
        """
        tag = structured.get("structural_tag")
        if tag is not None:
            form = _form_of(tag)
            return self._formed(form, Random(seed), most)[:most]
        matcher = self._matcher(structured)
        chance = Random(seed)
        written: list[int] = []
        num_words, run = 0, chance.randint(1, MOST_WORDS)
        while len(written) < most and not matcher.is_stopped():
            forced = matcher.compute_ff_tokens()
            if not forced:
                if matcher.is_accepting():
                    break
                allowed = self._allowed(matcher)
                words = self._words[allowed[self._words]]
                if len(words) and (num_words < run or not allowed[self._quote]) and len(written) < LONG:
                    num_words += 1
                    forced = [int(words[chance.randrange(len(words))])]
                else:
                    num_words, run = 0, chance.randint(1, MOST_WORDS)
                    is_in_text = len(words) and allowed[self._quote]  # where } is one more character
                    forced = [self._quote if is_in_text else self._soonest(allowed)]
            forced = forced[: most - len(written)]
            if not forced or forced[0] in self._end_ids or not matcher.consume_tokens(forced):
                break
            written += forced
        return written

    def _formed(self, form: Mapping[str, Any], chance: Random, most: int) -> list[int]:
        """Return tokens of a format of a structural tag: of each choice one, of a list its least length."""
        kind, inner = form.get("type"), form.get("content")
        if kind == "const_string":
            return list(self.tokens(form["value"]))
        if kind == "any_text":
            return [int(self._words[chance.randrange(len(self._words))]) for _ in range(MOST_WORDS)]
        if kind == "regex":
            return list(self.obeying({"regex": form["pattern"]}, chance.randrange(1 << 30), most))
        if kind in ("json_schema", "qwen_xml_parameter"):
            schema = {"type": "object"} if form["json_schema"] is True else form["json_schema"]
            is_xml = kind == "qwen_xml_parameter" or form.get("style") == "qwen_xml"
            most = max(most, MOST_IN_XML) if is_xml else most  # only a complete object can be written as XML
            made = self.obeying({"json": schema}, chance.randrange(1 << 30), most)
            return list(self.tokens(_as_xml(self._tokens.decode_str(made)))) if is_xml else list(made)
        if kind == "tag" and isinstance(inner, Mapping):
            begin, end = form.get("begin", ""), form.get("end", "")
            end = end[0] if isinstance(end, list) else end
            return [*self.tokens(begin), *self._formed(inner, chance, most), *self.tokens(end)]
        if kind == "sequence":
            return [token for each in form["elements"] for token in self._formed(each, chance, most)]
        if kind in ("or", "triggered_tags", "tags_with_separator"):
            choices = form["elements" if kind == "or" else "tags"]
            if kind != "or" and not form.get("at_least_one"):
                return []
            return self._formed(choices[chance.randrange(len(choices))], chance, most)
        if kind in ("star", "optional"):
            return []
        if kind == "plus" and isinstance(inner, Mapping):
            return self._formed(inner, chance, most)
        raise ConfigError(f"a structural tag of the type {kind!r} is not known", field=FIELD)

    def _allowed(self, matcher: Any) -> Any:
        """Return whether each token may be next, bool of the size of the vocabulary."""
        return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").astype(bool)

    def _soonest(self, allowed: Any) -> int:
        """Return the token after which a value ends soonest."""
        for token in (*self._end_ids, *self._closing):
            if allowed[token]:
                return int(token)
        return int(np.flatnonzero(allowed)[0])

    def _matcher(self, structured: Mapping[str, Any]) -> Any:
        of = self._llguidance
        try:
            if structured.get("json") is not None or structured.get("json_object"):
                schema = structured.get("json") or {"type": "object"}
                text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
                grammar = of.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": SPACES})
            elif structured.get("choice"):
                grammar = of.grammar_from("choice", msgspec.json.encode(structured["choice"]).decode())
            elif structured.get("regex") is not None:
                grammar = of.grammar_from("regex", structured["regex"])
            else:
                grammar = of.grammar_from("grammar", structured.get("grammar") or "")
            matcher = of.LLMatcher(self._tokens, grammar, log_level=0)
        except ValueError as error:
            raise ConfigError(f"cannot be compiled: {str(error).splitlines()[0][:300]}", field=FIELD) from error
        if matcher.is_error():
            raise ConfigError(f"cannot be compiled: {matcher.get_error().splitlines()[0][:300]}", field=FIELD)
        return matcher


def _form_of(tag: Any) -> Mapping[str, Any]:
    """Return the format of a structural tag, as text or an object; its first form has structures and triggers."""
    try:
        read = msgspec.json.decode(tag, type=dict[str, Any]) if isinstance(tag, str) else dict(tag)
        if "structures" not in read:
            return read["format"]  # type: ignore[no-any-return]
        tags = [
            {"type": "tag", "begin": each["begin"], "end": each["end"],
             "content": {"type": "json_schema", "json_schema": each.get("schema", True)}}
            for each in read["structures"]
        ]  # fmt: skip
    except (*UNDECODED, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"is no structural tag: {problem_of(error)}", field=FIELD) from error
    return {"type": "triggered_tags", "tags": tags, "at_least_one": True}


def _as_xml(text: str) -> str:
    """Return the arguments of a call, a JSON object, as Qwen's models write them in XML."""
    parts = []
    for name, value in msgspec.json.decode(text, type=dict[str, Any]).items():
        written = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        parts.append(f"<parameter={name}>\n{written}\n</parameter>")
    return "\n".join(parts)
