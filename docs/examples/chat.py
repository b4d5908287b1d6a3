"""A chat in the terminal: each line of standard input is a turn, answers go to standard output, figures to the other.

python chat.py                                    # with a mock in this process
python chat.py http://127.0.0.1:8000              # with a server of OpenAI's API, and the key $OPENAI_API_KEY
python chat.py 127.0.0.1:50051 --model smollm2    # with a session over gRPC, and the tokenizer of its model
"""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

from kvarts.base.terminal import plain
from kvarts.doors.client import Session, Sessions
from kvarts.run.sessions.values import Done, StopReason, Token

ANSWER = "kvarts-answer-5d41402a"
"""Placeholder for an answer, to find the text that a chat template renders after one."""


def tell(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr, flush=True)


def chat_with_server(url: str, lines: Iterable[str], *, temperature: float, max_tokens: int) -> None:
    """Send the whole conversation with each line, and stream the answer of the server's first model."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        messages: list[Any] = []
        for line in lines:
            messages.append({"role": "user", "content": line})
            texts: list[str] = []
            start_s, first_s, usage, reason = perf_counter(), None, None, None
            for chunk in client.chat.completions.create(
                model=model, messages=messages, temperature=temperature, max_tokens=max_tokens, stream=True,
                stream_options={"include_usage": True},
            ):  # fmt: skip
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    if choice.delta.content:
                        first_s = first_s or perf_counter()
                        texts.append(choice.delta.content)
                        print(plain(choice.delta.content), end="", flush=True)
            print()
            if reason is None:
                messages.pop()
                tell("the stream ended before the answer did: ask again")
                continue
            messages.append({"role": "assistant", "content": "".join(texts)})
            if usage is not None and first_s is not None:
                details = usage.prompt_tokens_details
                cached = 0 if details is None else details.cached_tokens or 0
                ttft_ms = 1e3 * (first_s - start_s)
                tell(f"TTFT {ttft_ms:.0f} ms, {usage.completion_tokens} tokens, {cached} of {usage.prompt_tokens} "
                     "prompt tokens found")  # fmt: skip


class ByteText:
    """Token ids are UTF-8 bytes, which any vocabulary of 256 or more has."""

    eos_ids: tuple[int, ...] = ()

    def tokens(self, line: str, *, is_first: bool, end: int | None) -> list[int]:
        """Return the tokens that a turn adds. `end`: the end-of-turn token that the model has generated, if any."""
        return list(f"{line}\n".encode())

    def writer(self) -> Callable[[int], str]:
        """Return an incremental decoder."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: decoder.decode(bytes([token])) if token < 256 else f"<{token}>"


class ModelText(ByteText):
    """The tokenizer of a model that kvarts reads, and its chat template.

    A template renders a whole conversation, but a session needs only what a turn adds: the text after a placeholder for
    the answer, without the end-of-turn token if the model has generated it.
    """

    def __init__(self, directory: str) -> None:
        from kvarts.run.torch.loading import load_tokenizer

        self._tokenizer: Any = load_tokenizer(directory)
        eos = self._tokenizer.eos_token_id
        self.eos_ids = () if eos is None else (eos,)

    def tokens(self, line: str, *, is_first: bool, end: int | None) -> list[int]:
        """Return the tokens that a turn adds."""
        tokenizer, message = self._tokenizer, {"role": "user", "content": line}
        if not tokenizer.chat_template:
            return list(tokenizer(f"{line}\n", add_special_tokens=is_first)["input_ids"])
        before = [] if is_first else [message, {"role": "assistant", "content": ANSWER}]
        text = tokenizer.apply_chat_template([*before, message], tokenize=False, add_generation_prompt=True)
        added = text if is_first else text.partition(ANSWER)[2]
        if end is not None:
            added = added.removeprefix(tokenizer.decode([end]))
        return list(tokenizer(added, add_special_tokens=False)["input_ids"])

    def writer(self) -> Callable[[int], str]:
        """Return an incremental decoder."""
        from tokenizers.decoders import DecodeStream

        backend, stream = self._tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(backend, token) or ""


def chat_in_session(
    session: Session, text: ByteText, lines: Iterable[str], *, temperature: float, max_tokens: int
) -> None:
    """Append each line to the session, which has the conversation so far, and stream the answer."""
    end: int | None = None
    for number, line in enumerate(lines):
        session.append(text.tokens(line, is_first=not number, end=end))
        write, last, start_s, num_tokens = text.writer(), None, perf_counter(), 0
        for update in session.generate(max_tokens, temperature=temperature):
            match update:
                case Token(token_id):
                    last, num_tokens = token_id, num_tokens + 1
                    print(plain(write(token_id)), end="", flush=True)
                case Done(stop_reason=reason):
                    end = last if reason == StopReason.EOS else None
        print()
        info, duration_s = session.info(), perf_counter() - start_s
        tell(f"{num_tokens} tokens, {num_tokens / duration_s:.1f} tokens/s; {info.kv_live_bytes:,} bytes of KV, "
             f"{info.num_retained:,} of {info.history_length:,} tokens")  # fmt: skip


@contextmanager
def mock() -> Iterator[str]:
    """Yield the URL of a mock in this process."""
    import kvarts

    with kvarts.mock() as server:
        yield server.url


def main(arguments: Sequence[str]) -> None:
    """Chat with the server at the address, or with a mock if none is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("--model", help="of a session: the directory or name of its model [tokens are bytes]")
    parser.add_argument("--window", type=int, help="of a session: keep the KV of so many last tokens [all]")
    parser.add_argument("--temperature", type=float, default=0.0, help="[%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer [%(default)s]")
    args = parser.parse_args(arguments)
    address: str = args.address
    sampling = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    lines = (line for line in map(str.strip, sys.stdin) if line)
    with ExitStack() as stack:
        if address and not address.startswith(("http://", "https://")):
            text = ModelText(args.model) if args.model else ByteText()
            sessions = stack.enter_context(Sessions(address))
            session = stack.enter_context(sessions.create(label="chat", window=args.window, eos_token_ids=text.eos_ids))
            chat_in_session(session, text, lines, **sampling)
        else:
            chat_with_server(address.rstrip("/").removesuffix("/v1") or stack.enter_context(mock()), lines, **sampling)


if __name__ == "__main__":
    main(sys.argv[1:])
