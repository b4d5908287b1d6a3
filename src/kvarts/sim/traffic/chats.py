"""Requests in logs with messages: where each form has its messages, tools, answer, time and usage.

A row is a request body (OpenAI's chats, completions and Responses, Anthropic's Messages), a line of a log that has the
body in a field and the response in another, a line of a batch, or a whole conversation (ShareGPT, WildChat, LMSYS), of
which every answer is a request. The tables below are the forms; all of them are tried on each row.

Messages become those of OpenAI's chats, with text as content. An image becomes a mark with its number of tokens, by the
formula of the model's family, and a hash of its data or URL; audio counts as a second per 32 kB.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from kvarts.base.errors import InputError
from kvarts.base.limits import MOST_COUNT, brief
from kvarts.base.media import FAMILIES, UNKNOWN_PIXELS, family_of, size_of
from kvarts.base.units import to_ns
from kvarts.sim.traffic.bounds import MOST_DATE_NS
from kvarts.sim.traffic.prompts import Chat
from kvarts.sim.traffic.trace_file import date_ns

__all__ = ["FAILED", "NO_MESSAGES", "chats_of"]

FAILED, NO_MESSAGES, STORED = "failed", "without messages", "continuing what the server stores"
NO_LOAD = tuple(
    (name, re.compile(pattern), reason)
    for name, pattern, reason in (
        ("status", "(?i)fail(ed|ure)?|error", FAILED),
        ("cache_hit", "(?i)true", "answered by a proxy cache"),
        ("call_type", ".*embedding.*", "embeddings"),
    )
)
"""Fields of logs of gateways, and what their values say of a row."""
BODY = ("body", "request_body", "requestBody", "request", "payload", "params")
RESPONSE = ("response_body", "responseBody", "response", "completion")
CONVERSATION = ("conversations", "conversation")
MESSAGES = ("messages", *CONVERSATION, "prompt", "input")
TOOLS = ("tools", "functions")
TIME = (
    "timestamp", "time", "ts", "start_time", "startTime", "request_time", "request_ts", "requested_at", "created",
    "created_at", "datetime", "date",
)  # fmt: skip
SESSION = ("session_id", "sessionId", "conversation_id", "conversation_hash", "thread_id", "chat_id")
REQUEST_ID = ("request_id", "requestId", "custom_id", "id")
PROMPT_TOKENS, OUTPUT_TOKENS = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")
OF_REQUEST = {"max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "stream", "stop"}
"""Fields of which one shows that a row is a request, not a conversation with its answers."""
ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "developer": "system", "observation": "tool", "function": "tool",
}  # fmt: skip
TEXTS = {"text", "input_text", "output_text", "refusal", "summary_text"}
IMAGES = {"image_url", "input_image", "image"}
AUDIO = {"input_audio", "audio_url", "audio"}
BYTES_PER_S = 32_000
_DATA = re.compile(r"data:[\w.+/;=-]*?;base64,")
_HEAD_CHARS = 1 << 16
"""Characters of an image's data that are decoded for its size."""
Row = Mapping[str, Any]
encode = msgspec.json.encode


def chats_of(row: Any, file: str, line: int, answers: Mapping[str, Any]) -> Iterator[Chat | str]:
    """Yield the requests of a row, or why it is none. `answers`: responses of a batch by custom_id.

    Raise InputError, with the field, for a row that is not of a known form.
    """
    if not isinstance(row, dict):
        raise InputError("is not an object")
    if isinstance(payloads := row.get("payloads"), list):
        for place, payload in enumerate(payloads):
            for chat in _within(payload, f"payloads[{place}]", file, line, answers):
                if isinstance(chat, Chat):
                    chat.session = chat.session or _name(row, SESSION) or f"{file}:{line}"
                yield chat
        return
    if isinstance(data := row.get("data"), list):
        for place, session in enumerate(data):
            yield from _within(session, f"data[{place}]", file, line, answers)
        return
    body = next((each for name in BODY if isinstance(each := _decoded(row.get(name)), dict) and _has(each)), row)
    response = next((each for name in RESPONSE if (each := _decoded(row.get(name))) is not None), None)
    if body is row and response is None and ("choices" in row or "output" in row):
        response = row
    if response is None and isinstance(answers, dict):
        response = answers.get(str(row.get("custom_id")))
    yield from _of_body(row, body, response, file, line)


def _within(row: Any, where: str, file: str, line: int, answers: Mapping[str, Any]) -> Iterator[Chat | str]:
    try:
        yield from chats_of(row, file, line, answers)
    except InputError as error:
        raise InputError(
            error.what, field=f"{where}.{error.field}" if error.field else where, hint=error.hint
        ) from error


def _of_body(row: Row, body: Row, response: Any, file: str, line: int) -> Iterator[Chat | str]:
    if isinstance(response, dict) and isinstance(inner := response.get("body"), dict):
        if isinstance(status := response.get("status_code"), int) and status >= 400:
            yield FAILED
            return
        response = inner
    if row.get("error") or (isinstance(response, dict) and response.get("error")):
        yield FAILED
        return
    for name, pattern, reason in NO_LOAD:
        if pattern.fullmatch(str(row.get(name))):
            yield reason
            return
    if not _has(body):
        yield NO_MESSAGES
        return
    usage = next(
        (each for of in (response, row) if isinstance(of, dict) and isinstance(each := of.get("usage"), dict)), row
    )
    model = _name(body, ("model",)) or _name(row, ("model",))
    chat = Chat(
        tools=_tools(next((body[name] for name in TOOLS if body.get(name)), None)),
        variables=_variables(body),
        model=model,
        salt=_name(body, ("cache_salt",)),
        session=_name(row, SESSION) or _name(body, SESSION) or _name(body.get("metadata"), SESSION),
        request_id=_name(row, REQUEST_ID),
        time_ns=next((each for of in (row, body, response) if (each := _time_ns(of)) is not None), None),
        num_prompt_tokens=_prompt_tokens(usage),
        num_output_tokens=_number(usage, OUTPUT_TOKENS),
        cached_tokens=_cached_tokens(usage),
        file=file,
        line=line,
    )
    if body.get("previous_response_id") or isinstance(body.get("conversation"), str):
        yield STORED
        return
    name = next(name for name in MESSAGES if body.get(name))
    if name == "prompt" and not _is_list_of_messages(body[name]):
        yield from _completions(chat, body[name], response)
        return
    given = _decoded(body[name])
    if isinstance(given, str) and name in ("input", "prompt"):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InputError(f"is a list of messages, not {brief(given)}", field=name)
    chat.messages = _messages(body, given, name, family_of(model or ""))
    if not chat.messages:
        yield NO_MESSAGES
        return
    ends_with_answer = chat.messages[-1]["role"] == "assistant"
    if response is None and (name in CONVERSATION or (ends_with_answer and not OF_REQUEST & body.keys())):
        yield from _turns(chat, given, _name(row, REQUEST_ID) or f"{file}:{line}")
        return
    chat.continues = ends_with_answer
    chat.answer = _answer(response)
    yield chat


def _turns(chat: Chat, given: Sequence[Any], name: str) -> Iterator[Chat | str]:
    """Yield a request for each answer of a conversation."""
    places = [place for place, message in enumerate(chat.messages) if message["role"] == "assistant" and place]
    if not places:
        yield "without an answer"
    aligned = len(given) == len(chat.messages)
    for place in places:
        time_ns = _time_ns(given[place - 1]) if aligned else None
        yield msgspec.structs.replace(
            chat,
            messages=chat.messages[:place],
            answer=chat.messages[place],
            session=chat.session or name,
            request_id=None,
            time_ns=chat.time_ns if time_ns is None else time_ns,
            num_prompt_tokens=None,
            num_output_tokens=None,
            cached_tokens=None,
        )


def _completions(chat: Chat, prompt: Any, response: Any) -> Iterator[Chat | str]:
    """Yield the requests of a prompt: a text, token ids, or a list of these."""
    if isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt):
        for each in prompt:
            yield from _completions(msgspec.structs.replace(chat, num_prompt_tokens=None), each, response)
        return
    is_ids = isinstance(prompt, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in prompt)
    if not (is_ids or isinstance(prompt, str)):
        raise InputError(f"is a text or token ids, not {brief(prompt)}", field="prompt")
    if isinstance(prompt, str):
        prompt = _clean(prompt)
    yield msgspec.structs.replace(chat, prompt=prompt, answer=_answer(response))


def _messages(body: Row, given: Sequence[Any], where: str, family: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    system = body.get("system") or body.get("instructions")
    if system:
        found.append({"role": "system", "content": _text(system, "system", family)})
    for place, message in enumerate(given):
        found += _message(message, f"{where}[{place}]", family)
    return found


def _message(message: Any, where: str, family: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat that a message or an item of any API stands for."""
    if not isinstance(message, dict):
        raise InputError(f"is not a message: {brief(message)}", field=where)
    kind = message.get("type")
    if kind == "function_call":
        yield {"role": "assistant", "content": "", "tool_calls": [_call(message, message.get("call_id"))]}
        return
    if kind == "function_call_output":
        result = _text(message.get("output"), f"{where}.output", family)
        yield {"role": "tool", "tool_call_id": message.get("call_id"), "content": result}
        return
    if isinstance(kind, str) and kind != "reasoning" and not {"role", "from"} & message.keys():
        yield {"role": "assistant", "content": _clean(encode(message).decode())}  # such as a call of a server's tool
        return
    if kind == "reasoning" and "role" not in message:
        if text := _text(message.get("summary") or message.get("content"), where, family):
            yield {"role": "assistant", "content": "", "reasoning_content": text}
        return
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise InputError(f"has no role, such as user: {brief(role)}", field=where)
    content: Any = message.get("content", message.get("value", message.get("text")))
    own: dict[str, Any] = {"role": ROLES.get(role, role)}
    given = message.get("tool_calls") or []
    if not isinstance(given, list):
        raise InputError(f"is a list of calls, not {brief(given)}", field=f"{where}.tool_calls")
    calls = [_call(each.get("function", each), each.get("id")) for each in given if isinstance(each, dict)]
    thoughts = [message.get(name) for name in ("reasoning_content", "reasoning")]
    reasoning = [each for each in thoughts if isinstance(each, str)][:1]
    kept: Any = content
    if isinstance(content, list):
        kept = []
        for part in content:
            sort = part.get("type") if isinstance(part, dict) else None
            if sort == "tool_use":
                calls.append(_call({"name": part.get("name"), "arguments": part.get("input") or {}}, part.get("id")))
            elif sort == "tool_result":
                text = _text(part.get("content"), f"{where}.content", family)
                yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text}
            elif sort in ("thinking", "redacted_thinking"):
                reasoning.append(str(part.get("thinking") or ""))
            else:
                kept.append(part)
        if not kept and content and not (calls or any(reasoning)):
            return  # only results of tools
    own["content"] = _text(kept, f"{where}.content", family)
    if any(reasoning):
        own["reasoning_content"] = "".join(reasoning)
    if calls:
        own["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            own[name] = message[name]
    yield own


def _call(function: Any, call_id: Any) -> dict[str, Any]:
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": str(function.get("name")), "arguments": "{}" if arguments is None else arguments},
    }


def _text(content: Any, where: str, family: str) -> str:
    """Return a content as text, with marks for its images."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _clean(content)
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise InputError(f"is not text: {brief(content)}", field=where)
    texts = []
    for part in content:
        kind = str(part.get("type", "text")) if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(_clean(part))
        elif kind in TEXTS:
            texts.append(_clean(str(part.get("text") or part.get("refusal") or "")))
        elif kind in IMAGES or kind in AUDIO:
            texts.append(_mark(part, kind, family))
        else:
            texts.append(_clean(encode(part).decode()))
    return "".join(texts)


def _clean(text: str) -> str:
    return text.replace("\x00", "\ufffd") if "\x00" in text else text


def _mark(part: Row, kind: str, family: str) -> str:
    """Return the mark of an image or audio: the number of its tokens, and a hash of what it is."""
    source: Any = part.get(kind, part.get("source", part.get("image_url")))
    detail = str(part.get("detail") or "auto")
    if isinstance(source, dict):
        detail = str(source.get("detail") or detail)
        source = source.get("url") or source.get("data") or encode(source).decode()
    text = str(source)
    base64 = _DATA.sub("", text, count=1)
    if kind in AUDIO:
        count = max(1, round(len(base64) * 3 / 4 / BYTES_PER_S * FAMILIES[family].audio_per_s))
    else:
        size = None
        if not text.startswith(("http:", "https:")):
            try:
                size = size_of(b64decode(base64[:_HEAD_CHARS]))
            except (Error, ValueError):
                size = None
        count = FAMILIES[family].image(*(size or (UNKNOWN_PIXELS, UNKNOWN_PIXELS)), detail)
    return f"\x00{count}:{blake2b(text.encode(errors='surrogatepass'), digest_size=8).hexdigest()}\x00"


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return tools as those of chats, whichever API they are of."""
    if not isinstance(tools, list):
        return None
    found = []
    for place, tool in enumerate(tools):
        if isinstance(tool, dict) and not isinstance(tool.get("function", {}), dict):
            raise InputError(f"is not a function: {brief(tool['function'])}", field=f"tools[{place}].function")
        if isinstance(tool, dict) and "function" not in tool and "name" in tool:
            named = {name: tool[name] for name in ("name", "description") if name in tool}
            function = named | {"parameters": tool.get("input_schema", tool.get("parameters"))}
            found.append({"type": "function", "function": function})
        elif isinstance(tool, dict):
            found.append(tool)
    return found or None


def _variables(body: Row) -> dict[str, Any]:
    """Return the variables of the template that a request sets."""
    given = body.get("chat_template_kwargs")
    found: dict[str, Any] = dict(given) if isinstance(given, dict) else {}
    thinking, reasoning = body.get("thinking"), body.get("reasoning")
    if isinstance(thinking, dict):
        found.setdefault("enable_thinking", thinking.get("type") != "disabled")
    effort = body.get("reasoning_effort") or (reasoning.get("effort") if isinstance(reasoning, dict) else None)
    if effort:
        found.setdefault("reasoning_effort", effort)
    return found


def _answer(response: Any) -> dict[str, Any] | None:
    """Return the message of a response of any API; None if it has no text."""
    if isinstance(response, str):
        return {"role": "assistant", "content": _clean(response)} if response else None
    if not isinstance(response, dict | list):
        return None
    items: Any = response if isinstance(response, list) else response.get("choices") or response.get("output")
    if isinstance(items, list) and items and isinstance(first := items[0], dict):
        if "text" in first and "message" not in first:
            return {"role": "assistant", "content": _clean(str(first["text"]))}
        items = [first["message"]] if "message" in first else items
    elif isinstance(response, dict) and "content" in response:
        items = [{**response, "role": "assistant"}]
    else:
        return None
    made = [each for item in items for each in _message(item, "response", "openai")]
    if not made:
        return None
    answer: dict[str, Any] = {"role": "assistant", "content": "".join(each["content"] for each in made)}
    if reasoning := "".join(each.get("reasoning_content", "") for each in made):
        answer["reasoning_content"] = reasoning
    if calls := [call for each in made for call in each.get("tool_calls", ())]:
        answer["tool_calls"] = calls
    return answer


def _has(body: Row) -> bool:
    return any(body.get(name) for name in MESSAGES)


def _is_list_of_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _decoded(value: Any) -> Any:
    """Return a body or messages that a log has as text of JSON as their value; another value as it is."""
    if isinstance(value, str) and value[:2] in ('{"', "[{"):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value


def _name(of: Any, names: Sequence[str]) -> str | None:
    for name in names if isinstance(of, dict) else ():
        if isinstance(value := of.get(name), str | int) and value != "":
            return str(value)
    return None


def _number(usage: Row, names: Sequence[str]) -> int | None:
    for name in names:
        value = usage.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= MOST_COUNT:
            raise InputError(f"is not a number of tokens: {brief(value)}", field=f"usage.{name}")
        return value
    return None


def _cached_tokens(usage: Row) -> int | None:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    of = details if isinstance(details, dict) else usage
    return _number(of, ("cached_tokens", "cache_read_input_tokens"))


def _prompt_tokens(usage: Row) -> int | None:
    """Return the tokens of the prompt; Anthropic's counts leave out what was read from or written to the cache."""
    found = _number(usage, PROMPT_TOKENS)
    parts = [_number(usage, (name,)) or 0 for name in ("cache_read_input_tokens", "cache_creation_input_tokens")]
    return None if found is None else found + sum(parts)


def _time_ns(of: Any) -> int | None:
    """Return the time of a row in ns; None if it has none. A number is in the unit that makes it a date since 2001.

    Smaller numbers are seconds.
    """
    if not isinstance(of, dict):
        return None
    for name in TIME:
        value: Any = of.get(name)
        if isinstance(value, str) and value:
            return date_ns(value, name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            scale = next((scale for most, scale in ((1e11, 10**9), (1e14, 10**6), (1e17, 10**3)) if value < most), 1)
            if not 0 <= value * scale < MOST_DATE_NS:
                raise InputError(f"is not a time: {brief(value)}", field=name)
            return to_ns(value, scale)
    return None
