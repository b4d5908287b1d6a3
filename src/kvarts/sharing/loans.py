"""Loans between models that share the memory of a device.

Only used memory counts as lent: cached pages are free, whichever model they belong to. A model owes its use beyond its
guarantee, minus its part of the memory that is not guaranteed to any model. Every model lends in proportion to the
unused part of its guarantee, and every borrower owes in proportion to its excess, in whole bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["Loan", "debts"]


class Loan(msgspec.Struct, frozen=True):
    """`borrower` owes `lender` `num_bytes` now, and has owed some without interruption since `since_ns`."""

    lender: str
    borrower: str
    num_bytes: int
    since_ns: int


def debts(num_bytes: int, guaranteed: Mapping[str, int], used: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Return bytes owed by lender and borrower, without entries of 0.

    `num_bytes`: memory of the device. `guaranteed`, `used`: bytes by model. The sum is the use beyond guarantees,
    minus the memory that is not guaranteed to any model.
    """
    excess = {model: used[model] - part for model, part in guaranteed.items() if used[model] > part}
    unused = {model: part - used[model] for model, part in guaranteed.items() if used[model] < part}
    owed = sum(excess.values()) - (num_bytes - sum(guaranteed.values()))
    if owed <= 0:
        return {}
    total_excess, total_unused = sum(excess.values()), sum(unused.values())
    found: dict[tuple[str, str], int] = {}
    # A pair's part is the product of two shares. The parts are laid end to end and cut at whole bytes, so they add up
    # exactly.
    position, before = 0, 0
    for lender, lent in unused.items():
        for borrower, borrowed in excess.items():
            position += lent * borrowed
            after = owed * position // (total_excess * total_unused)
            if after > before:
                found[lender, borrower] = after - before
            before = after
    return found
