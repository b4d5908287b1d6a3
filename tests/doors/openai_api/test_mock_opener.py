"""One opener of mocks: of an engine, of several models on a device, of a fleet, and of what a dialect declares."""

from __future__ import annotations

from typing import Any

import pytest

import kvarts
from kvarts.base.errors import ConfigError
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig
from openai_api.sharing.test_several_parity import shared

from builders.http_client import call
from builders.live_fleet import small_pool

COST = LinearCost(step_ms=0.1)
ENGINE = ReplayConfig(num_pages=60, page_size=4, cost=COST)
PROMPT = list(range(1, 41))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (None, ["chat"]),
        (ENGINE, ["chat"]),
        (shared(200, 64, 8, has_host=False), ["chat", "code"]),
        (FleetConfig(pools=(small_pool("mixed", 2),), token_bytes=100), ["chat"]),
    ],
    ids=["fields", "engine", "several", "fleet"],
)
def test_a_mock_serves_what_its_configuration_describes(config: Any, names: list[str]) -> None:
    given: dict[str, Any] = {"pages": 60, "page_size": 4, "cost": COST} if config is None else {}
    with kvarts.mock(config, served_model_name="chat", api_key="secret", **given) as server:
        key = {"authorization": "Bearer secret"}
        assert call(server.url, "/v1/models").status == 401
        listed = [each["id"] for each in call(server.url, "/v1/models", headers=key).json["data"]]
        assert listed == names == [served.names[0] for served in server.opened.models]
        for name in names:
            asked = {"model": name, "prompt": PROMPT, "max_tokens": 3}
            usages = [call(server.url, "/v1/completions", asked, headers=key).json["usage"] for _ in range(2)]
            assert [usage["completion_tokens"] for usage in usages] == [3, 3]
            assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 0
        num_workers = len(server.server.urls)
        assert num_workers == (2 if isinstance(config, FleetConfig) else 0)
        assert len(server.opened.engines) == max(num_workers, len(names))
        assert len(server.requests) == 2 * len(names)
        server.settle()
        server.assert_conserved()
    assert server.stop()


def test_a_field_of_the_engine_beside_a_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_seqs"):
        kvarts.mock(ENGINE, max_seqs=3)


def test_sessions_of_a_mock_that_plans_ahead_are_refused() -> None:
    from kvarts.run.sessions.values import SessionsConfig

    config = ReplayConfig(num_pages=60, page_size=4, cost=COST, async_scheduling=True)
    with pytest.raises(ConfigError, match="planned before the tokens of the last one are known"):
        kvarts.mock(config, sessions=SessionsConfig())
