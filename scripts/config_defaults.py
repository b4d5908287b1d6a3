"""Defaults of configuration classes: what transformers assumes of a config.json that leaves a field out.

`python scripts/config_defaults.py --write` writes src/kvarts/cost/hardware/presets/defaults.json from the installed
transformers; without --write, it exits with 1 if that file is another. PyTorch is not needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvarts.cost.hardware.config_layers import FAMILIES, ConfigFields, like

PATH = Path(__file__).parents[1] / "src/kvarts/cost/hardware/presets/defaults.json"
FIELDS = set(ConfigFields.__struct_encode_fields__) - {"model_type", "dtype", "torch_dtype", "quantization_config"}


def table() -> dict[str, Any]:
    """Return the defaults by family, other names of fields, and the text models of multimodal families."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    families, names, text = {}, {}, {}
    for family in sorted({name for one in FAMILIES for name in (one, like(one))} & set(CONFIG_MAPPING_NAMES)):
        if "sub_configs" in vars(CONFIG_MAPPING[family]) and CONFIG_MAPPING[family].sub_configs:
            continue
        fields = dataclasses.fields(CONFIG_MAPPING[family])
        values = {
            field.name: field.default
            for field in fields
            if field.name in FIELDS and field.default is not dataclasses.MISSING and field.default is not None
        }
        kinds = getattr(CONFIG_MAPPING[family](), "mlp_layer_types", None) or []
        if "dense" in kinds and "sparse" in kinds:  # the first layers have no experts, unless the config lists them
            values.setdefault("first_k_dense_replace", kinds.index("sparse"))
        families[family] = {key: values[key] for key in sorted(values)}
        own = getattr(CONFIG_MAPPING[family], "attribute_map", {})
        names[family] = {one: other for one, other in sorted(own.items()) if {one, other} & FIELDS}
    for family in sorted(CONFIG_MAPPING_NAMES):
        try:
            inner = (getattr(CONFIG_MAPPING[family], "sub_configs", None) or {}).get("text_config")
        except (ImportError, AttributeError, ValueError):
            continue
        if (found := getattr(inner, "model_type", None)) in FAMILIES and found != family:
            text[family] = found
    return {
        "source": f"transformers {transformers.__version__}",
        "families": families,
        "names": {family: own for family, own in names.items() if own},
        "text": text,
    }


def main() -> int:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    made = msgspec.json.format(msgspec.json.encode(table(), order="deterministic"), indent=1) + b"\n"
    if parser.parse_args().write:
        PATH.write_bytes(made)
        return 0
    if made != PATH.read_bytes():
        print(f"{PATH} is another than the installed transformers has: write it again with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
