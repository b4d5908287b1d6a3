"""What a completion or a chat asks for: constraints on the text, the shape of the message, and a mock's answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import problem_of
from kvarts.base.limits import brief
from kvarts.core.sampling import StructuredOutputs
from kvarts.doors.openai.answers import Answers, Question
from kvarts.doors.openai.bodies import ChatBody, CompletionBody, GenerationBody, messages_of
from kvarts.doors.openai.budget import Budget
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.http import HttpRequest
from kvarts.doors.openai.prompts import Thinking
from kvarts.doors.openai.scripted import ScriptedAnswer
from kvarts.doors.openai.served import Served
from kvarts.doors.openai.shapes import Segments, Shape, schema_of_format
from kvarts.doors.openai.tool_calls import NamedCall, RequiredCalls, ToolCallsInText, calls_schema

__all__ = ["IN_WORDS", "Wanted", "constraint_of", "distinct", "wanted_of"]

ANSWER_HEADER = "x-kvarts-answer"
CONSTRAINTS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
               "response_format", "tools")  # fmt: skip


class Wanted(msgspec.Struct, frozen=True):
    """Constraints on the text of an answer, and the shape of its message; each None for plain text.

    `scripted`: the choices of a mock, if it knows them beforehand.
    """

    structured: StructuredOutputs | None = None
    shape: Shape | None = None
    keeps_special_tokens: bool = False
    scripted: Sequence[ScriptedAnswer] = ()

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that it changes."""
        changes: dict[str, Any] = {}
        if self.structured is not None:
            changes["structured_outputs"] = self.structured
        if self.keeps_special_tokens:
            changes["skip_special_tokens"] = False
        return changes


IN_WORDS = Wanted()


class _Tools(msgspec.Struct, frozen=True):
    """The tools of a chat. `allowed`: those that its answer may call. `is_free`: it may be a text as well.

    `named`: the one that it has to call.
    """

    known: Sequence[dict[str, Any]] = ()
    allowed: Sequence[dict[str, Any]] = ()
    is_free: bool = True
    named: dict[str, Any] | None = None
    in_parallel: bool = True


def wanted_of(served: Served, body: GenerationBody, request: HttpRequest, budget: Budget) -> Wanted:
    """Return what a body asks for. Raise ApiError if it is not available."""
    answers = served.answers
    if (
        answers is not None
        and answers.has_words_alone
        and body.is_plain
        and not body.is_costly
        and not body.asks_more
        and not request.has_header(ANSWER_HEADER)
    ):
        return IN_WORDS
    tools = _tools_of(body) if isinstance(body, ChatBody) else _Tools()
    schema = schema_of_format(body.response_format) if isinstance(body, ChatBody | CompletionBody) else None
    if not tools.is_free:
        if body.structured(None) is not None:
            raise ApiError(400, "calls of tools have a form already", param=constraint_of(body))
        schema = None  # a format applies to texts, and this answer is a call
    structured = body.structured(schema)
    if structured is not None and answers is not None and schema is None:
        raise ApiError(
            400, "a mock keeps to no grammar: omit it, or ask for response_format", param=constraint_of(body)
        )
    asked = _asked(served, body, request)
    if answers is not None:
        return _of_mock(served, answers, body, tools, schema, asked, budget)
    if body.thinking_token_budget is not None:
        raise ApiError(400, "is of mocks: the reasoning of a model is not bounded; omit it",
                       param="thinking_token_budget")  # fmt: skip
    if tools.is_free:
        if structured is not None or not tools.allowed:
            return Wanted(structured)
        form = served.text.call_format
        return Wanted(None, ToolCallsInText(form, [one["name"] for one in tools.allowed]), form.has_special_tokens)
    if tools.named is not None:
        parameters = tools.named.get("parameters") or {"type": "object"}
        return Wanted(StructuredOutputs(json=parameters), NamedCall(tools.named["name"]))
    calls = calls_schema(tools.allowed, in_parallel=tools.in_parallel)
    return Wanted(StructuredOutputs(json=calls), RequiredCalls())


def constraint_of(body: GenerationBody) -> str:
    """Return the field of a body that constrains the text."""
    return next((name for name in CONSTRAINTS if getattr(body, name, None) is not None), "tools")


def distinct(scripted: Sequence[ScriptedAnswer]) -> Iterable[ScriptedAnswer]:
    """Return each object once: the answer that a request brings is the same for all of its choices."""
    return {id(each): each for each in scripted}.values()


def _tools_of(body: ChatBody) -> _Tools:
    choice, tools = body.tool_choice, body.tools or []
    functions = [tool.get("function") for tool in tools]
    known = [function for function in functions if isinstance(function, dict) and isinstance(function.get("name"), str)]
    if len(known) < len(tools):
        raise ApiError(400, "a tool is a function with a name", param="tools")
    for index, function in enumerate(known):
        if not isinstance(function.get("parameters"), dict | None):
            raise ApiError(400, "is a JSON schema, as an object", param=f"tools[{index}].function.parameters")
    if choice in (None, "auto", "none"):
        return _Tools(known, [] if choice == "none" else known)
    allowed, is_named = known, isinstance(choice, dict)
    if isinstance(choice, dict):
        named = choice.get("function") or {}
        name = named.get("name") if isinstance(named, dict) else None
        allowed = [function for function in known if function["name"] == name]
    elif choice != "required":
        raise ApiError(400, f"must be none, auto, required or a function, got {brief(choice)}", param="tool_choice")
    if not allowed:
        raise ApiError(400, "names no tool that is there", param="tool_choice")
    return _Tools(known, allowed, False, allowed[0] if is_named else None, body.parallel_tool_calls is not False)


def _asked(served: Served, body: GenerationBody, request: HttpRequest) -> ScriptedAnswer | None:
    """Return the answer in the request's own `kvarts_answer` field or header, or None."""
    value, param = body.kvarts_answer, "kvarts_answer"
    header = request.header(ANSWER_HEADER)
    if value is None and header is not None:
        param = ANSWER_HEADER
        try:
            value = msgspec.json.decode(header.encode("latin-1"))
        except UNDECODED as error:
            raise ApiError(400, f"is not JSON: {problem_of(error)}", param=param) from error
    if value is None:
        return None
    if served.answers is None:
        raise ApiError(400, "is of mocks: a model writes its own answers", param=param)
    return served.answers.asked(value, param)


def _of_mock(
    served: Served,
    answers: Answers,
    body: GenerationBody,
    tools: _Tools,
    schema: dict[str, Any] | None,
    asked: ScriptedAnswer | None,
    budget: Budget,
) -> Wanted:
    """Return the choices of a mock: what was `asked`, what a rule says, or what its tools and `schema` allow."""
    question = _question(served, body, tools.known)
    if asked is None and question is not None:
        asked = answers.find(question)
    thinking = (
        Thinking.of([body.thinking_token_budget, body.thinking_budget_tokens], body.reasoning_effort,
                    body.chat_template_kwargs)
        if isinstance(body, ChatBody)
        else Thinking.of([body.thinking_token_budget], None, None)
    )  # fmt: skip
    if asked is not None:
        asked = asked.limited(thinking, served.text)
    if question is None:
        if schema is not None:
            raise ApiError(400, "of a mock, it is of prompts that are one text", param="response_format")
        scripted = [asked] * body.num_choices if asked is not None else []
    else:
        names = [tool["name"] for tool in tools.allowed]
        scripted = [
            one
            for copy in range(body.num_choices)
            if (one := asked or _drawn(answers, question, copy, schema, names, budget, is_free=tools.is_free))
        ]
    if not scripted:
        return IN_WORDS
    segments = {id(each): each.segments() for each in distinct(scripted)}
    return Wanted(None, Segments([segments[id(each)] for each in scripted]), scripted=scripted)


def _question(served: Served, body: GenerationBody, tools: Sequence[dict[str, Any]]) -> Question | None:
    """Return the properties of a request that rules match; None for prompts that are not one text.

    Replaces the content of messages by text.
    """
    model, seed = body.model or served.names[0], body.seed or 0
    if isinstance(body, CompletionBody):
        return Question(model=model, message=body.prompt, seed=seed) if isinstance(body.prompt, str) else None
    assert isinstance(body, ChatBody)
    body.messages = messages_of(body.messages, served.media())
    roles = Counter(message["role"] for message in body.messages)
    last = next((message["content"] for message in reversed(body.messages) if message["role"] == "user"), "")
    return Question(
        model=model,
        message=last,
        tools={tool["name"]: tool for tool in tools},
        turn=1 + roles["assistant"],
        num_results=roles["tool"],
        seed=seed,
    )


def _drawn(
    answers: Answers,
    question: Question,
    copy: int,
    schema: dict[str, Any] | None,
    names: Sequence[str],
    budget: Budget,
    *,
    is_free: bool,
) -> ScriptedAnswer | None:
    """Return a drawn tool call or JSON answer, or None for an answer in words."""
    if not is_free:
        return answers.call(names, question, copy, budget)
    scripted = answers.call_or_text(names, question, copy, budget) if names else None
    return scripted if scripted is not None or schema is None else answers.json(schema, question, copy, budget)
