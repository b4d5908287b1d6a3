"""Write the names of the options of `vllm serve` to src/kvarts/cli/vllm_options.json, for `--vllm-args`.

    PATH_TO_A_PYTHON_WITH_VLLM scripts/vllm_options.py

Options whose value may be left out count as having one.
"""

from __future__ import annotations

import json
from pathlib import Path

PATH = Path(__file__).parents[1] / "src" / "kvarts" / "cli" / "vllm_options.json"


def names() -> dict[str, object]:
    """Return the names without dashes: of flags, of options with a value, and of those with several."""
    import vllm
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found: dict[str, list[str]] = {"flags": [], "values": [], "several": []}
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        kind = "flags" if action.nargs == 0 else "several" if action.nargs == "+" else "values"
        found[kind] += [name.removeprefix("--") for name in action.option_strings if name.startswith("--")]
    return {"version": vllm.__version__, **{kind: sorted(set(each)) for kind, each in found.items()}}


if __name__ == "__main__":
    PATH.write_text(json.dumps(names(), indent=1) + "\n")
