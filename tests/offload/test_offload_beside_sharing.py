"""Tiers below a device that several models share: not yet."""

from __future__ import annotations

import pytest

from kvarts import ConfigError, ModelShare, OffloadConfig, ReplayConfig, SharingConfig
from kvarts.cli.replay import all_sections
from kvarts.sharing.config import resolve_shares

from builders.command_line import parsed


def test_tiers_below_a_shared_device_are_refused() -> None:
    models = {"a": ModelShare(cost="polynomial", kv_bytes_per_token=4)}
    with pytest.raises(ConfigError, match=r"^offload: is for a replay of one model: a shared device has no tiers"):
        SharingConfig(models=models, kv_memory="1MiB", each=ReplayConfig(offload=OffloadConfig(host_pages=3)))
    given = parsed("--model", "a=:cost=polynomial,kv_bytes_per_token=4", "--kv-memory", "1MiB", "--host-pages", "3")
    with pytest.raises(ConfigError, match=r"^--host-pages: is for a replay of one model: a shared device has no tiers"):
        resolve_shares(given, all_sections())
