"""The cheapest purchase: what a brute force over devices, shapes, host memory and policies finds; and prices."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvarts.base.errors import InputError
from kvarts.plan.purchases import FEW, GIB, NEAR, Prices, Purchase, load_prices, with_host_memory

SIZES = [4 * GIB, 16 * GIB, 64 * GIB, 256 * GIB]
POLICIES = ("eager", "lazy", "exclusive")


@pytest.mark.laws
@given(
    steps=st.lists(st.integers(1, 3), min_size=1, max_size=3, unique=True),
    most=st.integers(1, 9),
    worths=st.lists(st.integers(0, 40), min_size=9, max_size=9),
    enough=st.integers(1, 60),
    host_price=st.sampled_from([1 / 1024, 1 / 64, 1 / 8]),
    hurt=st.just(set()) | st.sets(st.integers(FEW + 1, 9)),
)
@example([1], 9, [20] * 9, 60, 1 / 1024, set(range(FEW + 1, 10)))
def test_the_search_finds_the_cheapest_of_all(
    steps: list[int], most: int, worths: list[int], enough: int, host_price: float, hurt: set[int]
) -> None:
    """The worth of a purchase grows with devices, and with host memory, by a factor of its shape and policy.

    `hurt`: lines of each shape, after the first FEW, that are never enough; then the cheapest is that of the first FEW,
    or one that is cheaper.
    """
    prices = Prices(host_gib=host_price)
    shapes = [[Purchase(num, shape) for num in range(step, most + 1, step)] for shape, step in enumerate(steps)]
    asked: list[Purchase] = []

    def keeps(bought: Purchase) -> bool:
        if bought.num_devices // steps[bought.shape] in hurt:
            return False
        place = SIZES.index(bought.host_bytes) + 1 if bought.host_bytes else 0
        factor = worths[3 * bought.shape + POLICIES.index(bought.policy)] if place else 0
        return bought.num_devices * (5 + bought.shape) + factor * place >= enough

    def ask(bought: Purchase) -> float:
        asked.append(bought)
        return 0.0 if keeps(bought) else 1.0

    alone = [bought for lines in shapes for bought in lines if keeps(bought)]
    limit = min((bought.price(prices) for bought in alone), default=float("inf"))
    found = with_host_memory(shapes, SIZES, POLICIES, prices, ask, limit)
    grid = [
        Purchase(line.num_devices, line.shape, size, policy)
        for lines in shapes
        for line, size, policy in product(lines[:FEW] if hurt else lines, SIZES, POLICIES)
    ]
    cheaper = [bought.price(prices) for bought in grid if keeps(bought) and bought.price(prices) < limit]
    assert [bought.price(prices) for bought in found] == sorted(
        {bought.price(prices) for bought in found}, reverse=True
    )
    assert all(map(keeps, found))
    least, least_of_grid = (
        min(each, default=float("inf")) for each in ([bought.price(prices) for bought in found], cheaper)
    )
    assert least <= least_of_grid if hurt else least == least_of_grid


@given(
    far=st.integers(0, 20),
    lacking=st.lists(st.floats(-0.05, NEAR), min_size=1, max_size=20),
    price=st.sampled_from([1 / 1024, 1 / 64]),
)
@example(5, [0.0, 0.01, NEAR, 0.01, 0.01], 1 / 1024)
def test_where_more_memory_loses_a_few_requests_the_cheapest_is_found(
    far: int, lacking: list[float], price: float
) -> None:
    """Sizes that miss the SLO by far, larger ones of which some lack a few, and one that keeps it."""
    lacks = [0.5] * far + lacking + [0.0]
    sizes = [(place + 1) * GIB for place in range(len(lacks))]
    prices = Prices(host_gib=price)
    found = with_host_memory(
        [[Purchase(1)]], sizes, ["lazy"], prices, lambda bought: lacks[sizes.index(bought.host_bytes)], float("inf")
    )
    kept = [size for size, lack in zip(sizes, lacks, strict=True) if lack <= 0]
    assert [bought.host_bytes for bought in found][-1:] == kept[:1]


def test_a_file_of_prices_has_a_date_and_names_the_device(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('date = "2026-11-01"\ncurrency = "EUR"\n[per_hour]\nhost_gib = 0.004\nh100-80gb = 2.5\n')
    prices = load_prices(path, "h100-80gb")
    assert prices.of(2, 100 * GIB) == pytest.approx(2 * (2.5 + 0.4))
    assert "EUR 2.5 per GPU" in prices.sentence() and "2026-11-01" in prices.sentence()
    with pytest.raises(InputError, match="no price for h200-141gb"):
        load_prices(path, "h200-141gb")
    path.write_text('date = "2026-11-01"\ncurrency = "EUR"\n[per_hour]\nhost_gib = 0\ndevice = 1\n')
    with pytest.raises(InputError, match="above 0"):
        load_prices(path, "h100-80gb")
    path.write_text('currency = "EUR"\n')
    with pytest.raises(InputError, match="date"):
        load_prices(path, None)


def test_default_prices_are_relative() -> None:
    assert Prices().of(1, 86 * GIB) < Prices().of(2)
    assert Prices().of(1, 1388 * GIB) > Prices().of(2)
    assert "not a quotation" in Prices().sentence()
