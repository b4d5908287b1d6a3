"""The cost limit of one request. Code whose work grows with a request draws on it first."""

from __future__ import annotations

from kvarts.openai_api.errors import ApiError

__all__ = ["INLINE_BYTES", "MOST_MADE_BYTES", "MOST_MADE_VALUES", "MOST_VALUES", "Budget", "num_values"]

INLINE_BYTES = 16 * 1024
"""Up to this size, bodies are read and answers built in the event loop, within a few milliseconds; beyond it, off it.
"""
MOST_VALUES = 1_000_000
"""JSON values and prompt tokens of a request: about 100 MB while they are Python objects."""
MOST_MADE_VALUES = 20_000
"""JSON values that a mock makes for the schemas of a request, over all choices: about 20 ms."""
MOST_MADE_BYTES = 4 * 1024 * 1024
VALUE_BYTES = 64
"""Bytes whose reading takes as long as making one value."""

OBJECT_VALUES = 6
"""Values whose memory equals that of one object."""


def num_values(payload: bytes) -> int:
    """Return an upper bound of the values in JSON text, keys included; an object counts as `OBJECT_VALUES`.

    Marks within strings are counted as well, which is much faster: prose has one in fifty characters.
    """
    return 1 + sum(map(payload.count, (b",", b":", b"["))) + OBJECT_VALUES * payload.count(b"{")


class Budget:
    """The remaining budget of one request. `values`: JSON values and prompt tokens. `sequences`: prompts times choices.

    Every `draw` raises ApiError, before the work is done, if too little remains. A negative count draws nothing.
    """

    __slots__ = ("num_made", "num_made_bytes", "num_sequences", "num_values")

    def __init__(self, *, values: int = MOST_VALUES, sequences: int) -> None:
        self.num_values = values
        self.num_sequences = sequences
        self.num_made = MOST_MADE_VALUES
        self.num_made_bytes = MOST_MADE_BYTES

    @property
    def cost_bytes(self) -> int:
        """The cost of values made for JSON schemas, as the bytes of a body that take as long to read."""
        return VALUE_BYTES * (MOST_MADE_VALUES - self.num_made) + MOST_MADE_BYTES - self.num_made_bytes

    def draw_json(self, payload: bytes) -> None:
        """Draw the values of JSON text."""
        self.draw_values(num_values(payload), None)

    def draw_values(self, count: int, param: str | None) -> None:
        """Draw `count` values or tokens."""
        self.num_values -= max(0, count)
        if self.num_values < 0:
            raise ApiError(
                400, f"a request has at most {MOST_VALUES:,} JSON values and prompt tokens together", param=param
            )

    def draw_sequences(self, num_prompts: int, num_choices: int) -> None:
        """Draw the answers to `num_prompts` prompts."""
        count = num_prompts * num_choices
        if count > self.num_sequences:
            raise ApiError(
                400,
                f"{num_prompts:,} prompts with {num_choices} choices are {count:,} requests at once, and there is room "
                f"for {self.num_sequences:,} in all",
                param="n" if num_choices > 1 else "prompt",
            )
        self.num_sequences -= count

    def draw_made(self, count: int, num_bytes: int, param: str) -> None:
        """Draw values that are made for a JSON schema, and their bytes."""
        self.num_made -= max(0, count)
        self.num_made_bytes -= max(0, num_bytes)
        if self.num_made < 0 or self.num_made_bytes < 0:
            raise ApiError(
                400,
                f"its answer would be more than {MOST_MADE_VALUES:,} values or {MOST_MADE_BYTES:,} bytes of JSON, all "
                "choices together",
                param=param,
            )
