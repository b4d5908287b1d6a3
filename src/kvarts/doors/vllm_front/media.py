"""Media in prompts: the cache tells prompts with different images apart."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from kvarts.doors.vllm_front.protocol import MediaFeature

__all__ = ["with_media"]


def with_media(tokens: Sequence[int], features: Sequence[MediaFeature]) -> Sequence[int]:
    """Return `tokens` with those in the place of each medium replaced by ids that depend on its content."""
    if not features:
        return tokens
    ids = array("Q", tokens)
    for feature in features:
        first = int.from_bytes(sha256(feature.identifier.encode()).digest()[:7], "big") + (1 << 56)
        offset = int(feature.mm_position["offset"])
        for place in range(offset, min(len(ids), offset + int(feature.mm_position["length"]))):
            ids[place] = first + place - offset
    return ids
