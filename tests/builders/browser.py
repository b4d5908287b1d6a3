"""A page in a browser."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def ready(driver: Any, page: Path) -> float:
    """Opens the page, and answers how long it took until all was drawn, in seconds."""
    start = time.monotonic()
    driver.get(page.as_uri())
    while not driver.execute_script("return document.documentElement.dataset.ready"):
        assert time.monotonic() - start < 60
        time.sleep(0.02)
    driver.execute_script("return document.body.offsetHeight")
    return time.monotonic() - start


def inks(driver: Any, selector: str) -> int:
    """How many different colours a canvas shows."""
    count: int = driver.execute_script(
        """const canvas = document.querySelector(arguments[0]);
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const seen = new Set();
        for (let i = 0; i < data.length; i += 4)
          if (data[i + 3] > 200) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
        return seen.size;""",
        selector,
    )
    return count


def commands(driver: Any) -> list[str]:
    """The commands that clicks on a page have brought up."""
    boxes = driver.find_elements("css selector", ".chosen pre")
    return [box.text for box in boxes if box.is_displayed()]


def click_at(driver: Any, chart: int, x: float, y: float) -> None:
    """Clicks on the plot of one chart, `x` and `y` as shares of its width and height from its upper left corner."""
    from selenium.webdriver import ActionChains

    over = driver.find_elements("css selector", ".u-over")[chart]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    across, down = (x - 0.5) * over.size["width"], (y - 0.5) * over.size["height"]
    ActionChains(driver).move_to_element_with_offset(over, int(across), int(down)).click().perform()


def as_phone(driver: Any) -> None:
    """Makes the page 420 pixels wide."""
    size = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def scrolls_sideways(driver: Any) -> bool:
    """Whether the page is wider than its window."""
    wide: bool = driver.execute_script("return document.documentElement.scrollWidth > innerWidth")
    return wide
