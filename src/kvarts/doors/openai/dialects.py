"""OpenAI's completions and chat completions as dialects."""

from __future__ import annotations

from kvarts.doors.openai.bodies import ChatBody, CompletionBody
from kvarts.doors.openai.forms import ChatForm, CompletionForm, Echo
from kvarts.doors.openai.generation import Dialect, Reading

__all__ = ["CHAT", "COMPLETIONS"]


def _completion_form(body: CompletionBody, read: Reading) -> CompletionForm:
    text, prompts = read.served.text, [ask.tokens for ask in read.asks]
    echoes: list[Echo] = []
    if body.echo:
        given = body.prompts()
        texts = [each if isinstance(each, str) else text.decode(each) for each in given]
        read.exchange.budget.draw_made(0, body.num_choices * sum(map(len, texts)), "echo")
        echoes = [Echo(texts[number // body.num_choices], tokens) for number, tokens in enumerate(prompts)]
    return CompletionForm(
        body.model or read.served.names[0],
        text,
        echoes,
        prompts=prompts if body.prompt_logprobs is not None else (),
        has_logprobs=body.asked_logprobs is not None,
        ids_of=prompts if body.return_token_ids else (),
        skips_special_tokens=body.skip_special_tokens is not False,
    )


def _chat_form(body: ChatBody, read: Reading) -> ChatForm:
    prompt = read.asks[0].tokens
    return ChatForm(
        body.model or read.served.names[0],
        read.served.text,
        shape=read.wanted.shape,
        prompt=prompt if body.prompt_logprobs is not None else (),
        ids_of=prompt if body.return_token_ids else (),
    )


COMPLETIONS = Dialect(
    path="/v1/completions",
    about="Continue each prompt.",
    body=CompletionBody,
    read=lambda body, *_: body,
    form=_completion_form,
)
CHAT = Dialect(
    path="/v1/chat/completions",
    about="Answer a conversation, as OpenAI's chat API.",
    body=ChatBody,
    read=lambda body, *_: body,
    form=_chat_form,
)
