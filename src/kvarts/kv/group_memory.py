"""The KV groups of a model as a cache accounts for them, and the memory from which their parts are taken."""

from __future__ import annotations

from math import gcd
from typing import Any, Literal, get_args

import msgspec

from kvarts.errors import ConfigError
from kvarts.hardware.kv_groups import KvLayer
from kvarts.limits import MOST_BYTES, MOST_LAYERS, check_whole

__all__ = ["GroupMemory", "PartGroup", "Retention"]

Retention = Literal["all", "tails"]
"""The parts of windows and chunks that are kept: `all`, as in vLLM, or the `tails`, to which the token after the last
full page of a marked end, or of the whole sequence, attends."""


class PartGroup(msgspec.Struct, frozen=True):
    """A KV group as a cache accounts for it.

    `layer`: the retention of its layers; `part_bytes`: the bytes of a page, or of a state, in all `num_layers` of them.

    Raises ConfigError for layers that keep nothing themselves, and for parts without bytes.
    """

    layer: KvLayer
    part_bytes: int
    num_layers: int = 1

    def __post_init__(self) -> None:
        check_whole(self.part_bytes, "part_bytes", most=MOST_BYTES)
        check_whole(self.num_layers, "num_layers", most=MOST_LAYERS)
        if not (self.layer.keeps_tokens or self.is_state):
            raise ConfigError(f"{self.layer.kind} keeps nothing", field="layer")

    @property
    def is_state(self) -> bool:
        """Whether its parts are states."""
        return self.layer.kind == "state"

    @property
    def is_bounded(self) -> bool:
        """Whether its parts are released while their sequence runs."""
        return self.layer.kind in ("window", "chunk")


class GroupMemory(msgspec.Struct, frozen=True):
    """The KV groups of one model, and the parts of their windows that are kept.

    All parts are whole *blocks*: the largest size that divides the parts of every group, in `divisor` pieces. A page
    with all its parts has `page_bytes`; states are not part of a page. Raises ConfigError if no group keeps tokens, and
    for a divisor that leaves no whole blocks.
    """

    groups: tuple[PartGroup, ...]
    keeps: Retention = "all"
    divisor: int = 1

    def __post_init__(self) -> None:
        if not any(group.layer.keeps_tokens for group in self.groups):
            raise ConfigError("there is none that keeps tokens", field="groups")
        if self.keeps not in get_args(Retention):
            raise ConfigError(f"{self.keeps!r} is not known", field="keeps", hint=f"Use {_choice()}.")
        check_whole(self.divisor, "divisor", most=MOST_BYTES)
        if self._largest % self.divisor:
            raise ConfigError(f"{self.divisor} does not divide {self._largest:,} bytes", field="divisor")

    @property
    def block_bytes(self) -> int:
        """The bytes of a block."""
        return self._largest // self.divisor

    @property
    def _largest(self) -> int:
        return gcd(*(group.part_bytes for group in self.groups))

    @property
    def has_states(self) -> bool:
        """Whether layers keep a state."""
        return any(group.is_state for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """The bytes of a page with its parts in every group."""
        return sum(group.part_bytes for group in self.groups if not group.is_state)

    def num_blocks(self, num_pages: int) -> int:
        """Return the number of blocks in the memory of `num_pages` pages with all their parts."""
        return num_pages * self.page_bytes // self.block_bytes

    def to_builtins(self) -> dict[str, Any]:
        """Return its form in reports and timelines: the bytes of a block, and the groups in their order."""
        groups = []
        for group in self.groups:
            said: dict[str, Any] = {"kind": group.layer.kind, "layers": group.num_layers}
            if group.layer.span is not None:
                said["tokens"] = group.layer.span
            if group.layer.sink:
                said["sink"] = group.layer.sink
            groups.append({**said, "part_blocks": group.part_bytes // self.block_bytes})
        return {"block_bytes": self.block_bytes, "kv_groups": groups}


def _choice() -> str:
    return " or ".join(get_args(Retention))
