"""Draw the pictures of the docs, as SVG, into docs/assets or a given folder.

    python scripts/docs_pictures.py [FOLDER]

`scripts/docs_site.py` draws them again for the site. The same versions of kvarts and matplotlib write the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import kvarts

ROOT = Path(__file__).parents[1]
SIZES_GIB = (8, 16, 32, 64, 128, 256, 512, 1024)
BYTES_PER_TOKEN = 131_072
PAGE_TOKENS = 512


def draw_host_memory(path: Path) -> None:
    """Draw hits by the size of host memory, under each store policy: replays of the bundled conversation trace."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "kvarts"
    from matplotlib.figure import Figure

    trace = kvarts.load_trace("sample:mooncake")
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for policy in ("eager", "lazy", "exclusive"):
        hits = []
        for size in SIZES_GIB:
            offload = kvarts.OffloadConfig(host_memory=f"{size}GiB", policy=policy, kv_bytes_per_token=BYTES_PER_TOKEN)
            config = kvarts.ReplayConfig(num_pages=1_024, page_size=PAGE_TOKENS, offload=offload)
            by_tier = kvarts.replay(trace, config).summary["prefix_hit_ratio_by_tier"]
            hits.append(100 * sum(by_tier.values()))
        axes.plot(SIZES_GIB, hits, marker="o", label=policy)
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES_GIB, [str(size) for size in SIZES_GIB])
    axes.axvline(64, color="0.6", linestyle=":", label="KV memory of the device")
    axes.set_xlabel("host memory, GiB")
    axes.set_ylabel("prompt tokens found, %")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, format="svg", metadata={"Date": None})


def draw(folder: Path) -> None:
    """Draw all pictures into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_host_memory(folder / "hits-by-host-memory.svg")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "assets")
