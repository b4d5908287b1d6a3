"""All routes that do not generate: health, models, metrics, tokens, vLLM's information routes, and switches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qs

import msgspec

import kvarts
from kvarts.base.limits import brief
from kvarts.core.keys import Adapter
from kvarts.doors.openai.access import Access, Handler, Route
from kvarts.doors.openai.bodies import MAX_NAME_CHARS, ChatBody, CompletionBody, messages_of
from kvarts.doors.openai.budget import INLINE_BYTES
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.generation import Exchange, asks_of
from kvarts.doors.openai.served import Ask, Models, Served

if TYPE_CHECKING:
    from kvarts.doors.openai.meter import GoneEngines
    from kvarts.doors.openai.metrics import ServerMetrics

__all__ = ["TOKENIZED_BYTES", "Routes", "Row"]

TOKENIZED_BYTES = 4 * 1024 * 1024
"""Size limit of a text that is only tokenized."""
MOST_TOKENIZED = 500_000
"""Token limit of such a text: more than a context, so that a client learns by how much its text is too long."""
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
"""Texts of a query, as FastAPI reads them."""

Row: TypeAlias = "tuple[str, str, Handler, Access, dict[str, Any]]"
"""A route: method, path, handler, access and limits."""
MAX_ADAPTERS = 1024
encode = msgspec.json.encode


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize. A prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: Any = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class AdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter. `model`: the first by default."""

    lora_name: str
    lora_path: str | None = None
    model: str | None = None


class Routes:
    """Answers the routes that do not generate; a request that names no model concerns the first.

    `engines`: those whose metrics, configuration and caches the routes concern, by default those of `models`. `gone`:
    the counts of engines that were among them.
    """

    def __init__(
        self,
        models: Models,
        *,
        speedup: float | None = None,
        engines: Sequence[Served] | None = None,
        gone: Sequence[GoneEngines] = (),
    ) -> None:
        self._models = models
        self.engines = tuple(models) if engines is None else tuple(engines)
        self._gone = gone
        self._metrics: ServerMetrics | None = None
        """Created on first use, because the import takes longer than most of a mock's start."""
        self.speedup = speedup
        self.event_sources: list[dict[str, Any]] = []
        """The answer of /kv_event_sources: where the KV events of each rank are published."""

    def set_engines(self, engines: Sequence[Served]) -> None:
        """Let the routes concern other engines from now on."""
        self.engines = tuple(engines)
        self._metrics = None

    def table(self) -> list[Route]:
        """Return the routes: method, path, handler, access and limits."""
        of_text = {"max_body_bytes": TOKENIZED_BYTES}
        rows: list[Row] = [
            ("GET", "/health", self.health, Access.OPEN, {}),
            ("GET", "/ping", self.health, Access.OPEN, {}),
            ("POST", "/ping", self.health, Access.OPEN, {}),
            ("GET", "/metrics", self.metrics, Access.KEY, {}),
            ("GET", "/v1/models", self.models, Access.KEY, {}),
            ("GET", "/v1/models/{model}", self.model, Access.KEY, {}),
            ("POST", "/tokenize", self.tokenize, Access.KEY, {**of_text, "body": TokenizeBody}),
            ("POST", "/detokenize", self.detokenize, Access.KEY, {**of_text, "body": DetokenizeBody}),
            ("POST", "/v1/completions/render", self.render_completion, Access.KEY, {**of_text, "body": CompletionBody}),
            ("POST", "/v1/chat/completions/render", self.render_chat, Access.KEY, {**of_text, "body": ChatBody}),
            ("GET", "/kv_event_sources", self.tell_event_sources, Access.KEY, {"query": [("form", "map or list")]}),
            *self.of_engine(),
            ("POST", "/abort_requests", self.abort_requests, Access.ADMIN, {}),
            ("POST", "/v1/load_lora_adapter", self.load_adapter, Access.ADMIN, {"body": AdapterBody}),
            ("POST", "/v1/unload_lora_adapter", self.unload_adapter, Access.ADMIN, {"body": AdapterBody}),
        ]
        return [
            Route(method=method, path=path, handler=handler, access=access, **limits)
            for method, path, handler, access, limits in rows
        ]

    def of_engine(self) -> list[Row]:
        """Return the routes of servers of this engine: those of vLLM."""
        return [
            ("GET", "/version", self.version, Access.KEY, {}),
            ("GET", "/load", self.load, Access.KEY, {}),
            ("GET", "/server_info", self.server_info, Access.KEY, {}),
            ("GET", "/get_server_info", self.server_info, Access.KEY, {}),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache, Access.ADMIN, {}),
        ]

    def open_metrics(self) -> ServerMetrics:
        """Return the metrics of the engines, by the names of vLLM."""
        from kvarts.doors.openai.metrics import ServerMetrics

        return ServerMetrics(self.engines, self._gone)

    # Status -----------------------------------------------------------------------------------------------

    async def health(self, exchange: Exchange) -> None:
        """Answer 200 if requests are admitted, and 503 while the server starts or drains, or if its engine is dead."""
        served = self._models.first
        if not self._models.is_alive:
            raise ApiError(503, "the engine has stopped after an error")
        if served.is_starting or served.is_draining or served.is_leaving:
            raise ApiError(503, "the server is starting" if served.is_starting else "the server is shutting down")
        await exchange.response.whole(b"")

    async def version(self, exchange: Exchange) -> None:
        """Return the version of kvarts, and the version of vLLM that it follows."""
        await self.tell(exchange, {"version": "0.32.0", "kvarts": kvarts.__version__})

    async def load(self, exchange: Exchange) -> None:
        """Return the number of requests under way."""
        await self.tell(exchange, {"server_load": self._models.num_live})

    async def metrics(self, exchange: Exchange) -> None:
        """Return the metrics."""
        if self._metrics is None:
            of = self._metrics = await asyncio.to_thread(self.open_metrics)
        else:
            of = self._metrics
        # In turn, and off the event loop: a client that requests metrics continuously does not delay the others.
        payload, content_type = await exchange.work(of.exposition, num_bytes=INLINE_BYTES + 1)
        await exchange.response.whole(payload, content_type=content_type.encode())

    async def models(self, exchange: Exchange) -> None:
        """List the names of each model, and its adapters."""
        names = [name for served in self._models for name in (*served.names, *served.adapters)]
        await self.tell(exchange, {"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, exchange: Exchange) -> None:
        """Return one of these models."""
        name = exchange.request.path.removeprefix("/v1/models/")
        await self.tell(exchange, self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        served = self._models.of(name)
        is_adapter = name in served.adapters
        return {
            "id": name,
            "object": "model",
            "created": served.created_s,
            "owned_by": "kvarts",
            "root": name,
            "parent": served.names[0] if is_adapter else None,
            "max_model_len": None if is_adapter else served.limits.max_model_len,
            "permission": [],
        }

    async def server_info(self, exchange: Exchange) -> None:
        """Return the configuration of the engine; with several models, of each engine, and the first one twice."""
        told = [_facts_of(served) for served in self.engines]
        await self.tell(exchange, told[0] if len(told) == 1 else {**told[0], "models": told})

    async def tell_event_sources(self, exchange: Exchange) -> None:
        """Return where KV events are published: as a map by rank, like vLLM, or on request as a list.

        The list is for consumers other than vLLM's. With several models, each model has the rank of its position.
        """
        await self.tell(exchange, _sources_told(exchange, self.event_sources))

    # Tokens -----------------------------------------------------------------------------------------------

    async def tokenize(self, exchange: Exchange) -> None:
        """Return the tokens of a prompt or of a conversation."""

        def answer() -> bytes:
            body = exchange.take_body(TokenizeBody)
            served = self._models.of(body.model)
            if body.chat_template:
                raise ApiError(400, "chat_template is not supported: omit it", param="chat_template")
            if body.messages is not None:
                options = {
                    "add_generation_prompt": body.add_generation_prompt is not False,
                    "tools": body.tools,
                    "needs_tools": bool(body.tools),
                }
                text, adds = (
                    served.conversation(messages_of(body.messages, served.media()), options),
                    bool(body.add_special_tokens),
                )
            elif body.prompt is not None:
                text, adds = body.prompt, body.add_special_tokens is not False
            else:
                raise ApiError(400, "give a prompt or messages", param="prompt")
            tokens = served.encode(text, exchange.budget, add_special_tokens=adds, most_tokens=MOST_TOKENIZED).tolist()
            strings = [served.text.decode([token]) for token in tokens] if body.return_token_strs else None
            limit = served.limits.max_model_len
            return encode({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})

        await exchange.response.whole(await exchange.apart(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        """Return the text of tokens."""

        def answer() -> bytes:
            body = exchange.take_body(DetokenizeBody)
            served = self._models.of(body.model)
            if any(not 0 <= token < served.host.vocab_size for token in body.tokens):
                raise ApiError(400, f"token ids must be from 0 to {served.host.vocab_size - 1}", param="tokens")
            return encode({"prompt": served.text.decode(body.tokens)})

        await exchange.response.whole(await exchange.apart(answer))

    async def render_completion(self, exchange: Exchange) -> None:
        """Return the token ids of each prompt of a completion, and generate nothing."""
        await self._render(exchange, CompletionBody)

    async def render_chat(self, exchange: Exchange) -> None:
        """Return the token ids of the prompt of a conversation, and generate nothing."""
        await self._render(exchange, ChatBody)

    async def _render(self, exchange: Exchange, kind: type[CompletionBody] | type[ChatBody]) -> None:
        def answer() -> bytes:
            body: CompletionBody | ChatBody = exchange.take_body(kind)
            served = self._models.of(body.model)
            asks = asks_of(served, body, exchange)[:: body.num_choices]
            request_id = exchange.request_id
            if isinstance(body, ChatBody):
                return encode(_rendered(f"chatcmpl-{request_id}", served, body, asks[0]))
            return encode(
                [_rendered(f"cmpl-{request_id}-{number}", served, body, ask) for number, ask in enumerate(asks)]
            )

        await exchange.response.whole(await exchange.apart(answer))

    # Switches ---------------------------------------------------------------------------------------------

    async def reset_prefix_cache(self, exchange: Exchange) -> None:
        """Evict every cached page; with `reset_running_requests=true`, preempt running requests first.

        Return `{"success": false}`, and evict nothing, while pages of an engine are in use.
        """
        text = parse_qs(exchange.request.query).get("reset_running_requests", ["false"])[0].lower()
        if text not in BOOLEANS:
            raise ApiError(
                400, f"reset_running_requests must be true or false, got {text!r}", param="reset_running_requests"
            )
        done = [await served.reset_cache(preempts=BOOLEANS[text]) for served in self.engines]
        await self.tell(exchange, {"success": all(done)})

    async def abort_requests(self, exchange: Exchange) -> None:
        """End all requests that are under way."""
        self._models.abort_all()
        await exchange.response.whole(b"")

    async def load_adapter(self, exchange: Exchange) -> None:
        """Add an adapter to a model, by default the first; requests by its name have separate KV."""
        body = exchange.take_body(AdapterBody)
        name, adapters = body.lora_name, self._models.of(body.model).adapters
        adapter = Adapter(name, body.lora_path or "")
        if what := adapter.complaint():
            raise ApiError(400, what, param="lora_name" if adapter._replace(path="").complaint() else "lora_path")
        if any(name in (*served.names, *served.adapters) for served in self._models):
            raise ApiError(400, f"{name!r} is there already", param="lora_name")
        if len(name) > MAX_NAME_CHARS or len(adapters) >= MAX_ADAPTERS:
            raise ApiError(
                400, f"at most {MAX_ADAPTERS} adapters, with {MAX_NAME_CHARS} characters each", param="lora_name"
            )
        adapters[name] = adapter
        told = f"Success: LoRA adapter '{name}' added successfully.".encode()
        await exchange.response.whole(told, content_type=b"text/plain; charset=utf-8")

    async def unload_adapter(self, exchange: Exchange) -> None:
        """Remove such a name."""
        name = exchange.take_body(AdapterBody).lora_name
        for served in self._models:
            if name in served.adapters:
                del served.adapters[name]
                break
        else:
            raise ApiError(404, f"there is no adapter {name!r}", param="lora_name")
        told = f"Success: LoRA adapter '{name}' removed successfully.".encode()
        await exchange.response.whole(told, content_type=b"text/plain; charset=utf-8")

    async def tell(self, exchange: Exchange, told: Any) -> None:
        """Answer with `told` as JSON."""
        await exchange.response.whole(encode(told))


def _sources_told(exchange: Exchange, sources: Sequence[dict[str, Any]]) -> Any:
    """Return `sources` in the form that a request to /kv_event_sources asks for. Raise ApiError for another form."""
    form = parse_qs(exchange.request.query).get("form", ["map"])[0]
    if form not in ("map", "list"):
        raise ApiError(400, f"form must be map or list, got {brief(form)}", param="form")
    if form == "list":
        return sources
    return {source.get("worker", number): source for number, source in enumerate(sources)}


def _facts_of(served: Served) -> dict[str, Any]:
    config = served.host.config
    return {
        "model": served.names[0],
        "block_size": config.page_size,
        "num_gpu_blocks": served.host.num_gpu_blocks,
        "max_model_len": served.limits.max_model_len,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        **served.facts,
    }


def _rendered(request_id: str, served: Served, body: CompletionBody | ChatBody, ask: Ask) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "token_ids": list(ask.tokens),
        "sampling_params": msgspec.to_builtins(ask.params),
        "model": body.model or served.names[0],
        "stream": bool(body.stream),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "kv_transfer_params": body.kv_transfer_params,
    }
