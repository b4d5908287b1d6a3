"""Who owes whom, of several models that share the memory of a device.

Only what is used is lent: cached pages are free, whoever's they are. A model owes what it uses beyond its guarantee,
less its part of the memory that is guaranteed to nobody; every model lends in proportion to what it leaves unused of
its guarantee, and every borrower owes in proportion to its excess, in whole bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["Loan", "debts"]


class Loan(msgspec.Struct, frozen=True):
    """`borrower` owes `lender` `num_bytes`, and something without a pause since `since_ns`."""

    lender: str
    borrower: str
    num_bytes: int
    since_ns: int


def debts(num_bytes: int, guaranteed: Mapping[str, int], used: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Bytes by lender and borrower; what is 0 is left out.

    `num_bytes`: of the device. `guaranteed`, `used`: bytes by model. All that is owed adds up to what is used beyond
    guarantees and beyond the memory guaranteed to nobody.
    """
    excess = {model: used[model] - part for model, part in guaranteed.items() if used[model] > part}
    unused = {model: part - used[model] for model, part in guaranteed.items() if used[model] < part}
    owed = sum(excess.values()) - (num_bytes - sum(guaranteed.values()))
    if owed <= 0:
        return {}
    total_excess, total_unused = sum(excess.values()), sum(unused.values())
    found: dict[tuple[str, str], int] = {}
    # The product of both shares of every pair, laid end to end and cut at whole bytes, adds up exactly.
    position, before = 0, 0
    for lender, lent in unused.items():
        for borrower, borrowed in excess.items():
            position += lent * borrowed
            after = owed * position // (total_excess * total_unused)
            if after > before:
                found[lender, borrower] = after - before
            before = after
    return found
