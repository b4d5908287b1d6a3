"""One page of metrics from those of several processes."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["merged"]

HELP = "# HELP "
STARTED = "process_start_time_seconds"
NUM_WORKERS = """\
# HELP kvarts:workers Processes behind this port whose metrics are here.
# TYPE kvarts:workers gauge
kvarts:workers """


def merged(pages: Sequence[bytes]) -> bytes:
    """Return one page with the samples of all `pages`, in the text format of Prometheus.

    Each family is there once, with its type and help. Series of engines differ by the label `engine`. Series of
    the process lack that label: they are added, and so describe the server as if it were one process.
    """
    heads: dict[str, str] = {}
    samples: dict[str, dict[str, str]] = {}
    for page in pages:
        # Labels may contain any character except a line feed.
        for family in f"\n{page.decode()}".split(f"\n{HELP}")[1:]:
            lines = family.removesuffix("\n").split("\n")
            name = lines[0].split(" ", 1)[0]
            heads.setdefault(name, f"{HELP}{lines[0]}\n{lines[1]}\n")
            of_family = samples.setdefault(name, {})
            for line in lines[2:]:
                series, _, value = line.rpartition(" ")
                of_family[series] = value if series not in of_family else _combined(name, of_family[series], value)
    families = [
        head + "".join(f"{series} {value}\n" for series, value in samples[name].items()) for name, head in heads.items()
    ]
    return "".join([*families, f"{NUM_WORKERS}{float(len(pages))}\n"]).encode()


def _combined(name: str, before: str, value: str) -> str:
    """Combine the values of a series on two pages: for a process the sum, or the earlier start; else the larger one."""
    values = float(before), float(value)
    if name == STARTED:
        return repr(min(values))
    return repr(sum(values) if name.startswith("process_") else max(values))
