"""Assembly of a server over HTTP with the model and the sessions of a session runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvarts.openai_api.meter import Meter
from kvarts.openai_api.mock import mock_model
from kvarts.openai_api.opening import DEFAULT_TOKENS, Door, Opened, make_served, open_app
from kvarts.openai_api.prompts import HubText, TextModel, WordText
from kvarts.openai_api.served import Served
from kvarts.openai_api.sessions.door import SessionsDoor
from kvarts.session.opening import mock_host, sessions_on
from kvarts.session.sessions import Sessions
from kvarts.session.table import memory_of
from kvarts.session.values import SessionsConfig

__all__ = ["open_beside", "open_own", "word_mock"]


def word_mock(config: Any, **settings: Any) -> Any:
    """Return a model for `open_sessions` that writes words; the bytes per token are those of the sessions' mock."""
    of_mock = mock_host(config)
    cost = settings.pop("cost", None)
    if cost is None:
        from kvarts.executor.roofline import RooflineCost

        cost = RooflineCost(llm="llama-3.1-8b", device="h100-80gb")
    return mock_model(config, cost, token_bytes=of_mock.token_bytes, **settings)


def open_beside(sessions: Sessions, door: Door, *, model: str) -> Opened:
    """Return a server of the model of `sessions`; requests can name a session, and continue it."""
    host = sessions.host
    is_mock = host.tokenizer is None and host.fingerprint().startswith("mock")
    most = host.core.scheduler.most_tokens(min(door.limits.max_model_len, host.max_positions or 1 << 62))
    limits = msgspec.structs.replace(
        door.limits,
        max_model_len=most,
        default_tokens=DEFAULT_TOKENS if is_mock and door.limits.default_tokens is None else door.limits.default_tokens,
    )
    meter = Meter(max_model_len=limits.max_model_len)
    host.core.log.add_reader(meter)
    text: TextModel = WordText() if is_mock else HubText(host.tokenizer, host.eos_ids)
    served = make_served(
        host, text, door.names or (model,), door, limits=limits, meter=meter, facts={"mock": is_mock, "sessions": True}
    )
    served.sessions = SessionsDoor(sessions, served)
    return open_app([served], door)


def open_own(
    served: Served,
    config: SessionsConfig,
    *,
    shares: Mapping[str, float] | None = None,
    state_dir: Path | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> SessionsDoor:
    """Return sessions of a served model, in memory or in `state_dir`. Raise ConfigError.

    Sessions that reserve pages get at most half of the pages, unless `config` sets a limit, so that requests without a
    session can run as well.
    """
    host = served.host
    if config.memory_bytes is None and config.max_pages is None:
        config = msgspec.structs.replace(config, max_pages=max(1, memory_of(host).total // 2))
    return SessionsDoor(sessions_on(host, config, shares=shares, state_dir=state_dir, say=say), served, is_own=True)
