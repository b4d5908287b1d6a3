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
