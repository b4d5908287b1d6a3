"""Models that share memory, from `kvarts plan --share`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.errors import ConfigError
from kvarts.limits import MOST_BYTES_PER_TOKEN, brief

if TYPE_CHECKING:
    from kvarts.settings import Given

__all__ = ["Share", "ShareType", "divided"]

KEYS = ("model", "bytes", "weight")


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A model, its trace, and the bytes of one of its tokens, given by the model's name or as a number."""

    name: str
    trace: Path
    model: str | None = None
    token_bytes: int | None = None
    weight: float = 1.0


class ShareType(click.ParamType[Any]):
    """NAME=TRACE, then the bytes per token and a weight, separated by commas."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a Share."""
        if not isinstance(value, str):
            return value
        first, *rest = value.split(",")
        name, _, trace = first.partition("=")
        if not name or not trace:
            self.fail(f"{first!r} is not NAME=TRACE", param, ctx)
        values = dict(part.partition("=")[::2] for part in rest)
        if unknown := [key for key in values if key not in KEYS]:
            self.fail(f"{unknown[0]!r} is none of {', '.join(KEYS)}", param, ctx)
        if ("model" in values) == ("bytes" in values):
            self.fail("give either model=NAME or bytes=N, the bytes per token", param, ctx)
        token_bytes = values.get("bytes", "1")
        most = len(str(MOST_BYTES_PER_TOKEN)) - 1
        if not (token_bytes.isascii() and token_bytes.isdecimal() and len(token_bytes) <= most and int(token_bytes)):
            self.fail(f"bytes must be a whole number above 0, of at most {most} digits", param, ctx)
        try:
            weight = float(values.get("weight", "1"))
        except ValueError:
            weight = 0.0
        if not 1e-6 <= weight <= 1e6:
            self.fail(f"weight must be a number from 1e-6 to 1e6, got {brief(values['weight'])}", param, ctx)
        return Share(
            name=name,
            trace=Path(trace),
            model=values.get("model"),
            token_bytes=int(token_bytes) if "bytes" in values else None,
            weight=weight,
        )


def divided(shares: tuple[Share, ...], given: Given, page_size: int) -> dict[str, Any]:
    """Return the division of `--kv-memory` among these models, see `kvarts.plan.cache`."""
    from kvarts.plan.cache import CachePlan, ModelMemory, divide
    from kvarts.sim.hardware import DeviceSettings, kv_bytes_of
    from kvarts.traffic.formats import load_trace
    from kvarts.traffic.settings import reading_of

    names = [share.name for share in shares]
    if len(set(names)) < len(names):
        raise ConfigError("two models have the same name", field="--share", hint="Name each model differently.")
    size = kv_bytes_of(DeviceSettings(kv_memory=given["kv_memory"])) if "kv_memory" in given else None
    if not size or size < 1:
        raise ConfigError("is what is divided", field="--kv-memory", hint="Give it as a size: --kv-memory 40GiB.")
    models = [
        ModelMemory(
            name=share.name,
            plan=CachePlan(load_trace(share.trace, **reading_of(given)), page_size),
            kv_bytes_per_token=_token_bytes(share),
            weight=share.weight,
        )
        for share in shares
    ]
    return {"page_size": page_size, **divide(models, size)}


def _token_bytes(share: Share) -> int:
    from kvarts.hardware import load_geometry
    from kvarts.hardware.fit import local_kv_bytes_per_token

    if share.token_bytes is not None:
        return share.token_bytes
    assert share.model is not None
    return local_kv_bytes_per_token(load_geometry(share.model), 1, None)
