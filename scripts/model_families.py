"""Which families of transformers run in pages: each built small from its config, and compared with `generate`.

    python scripts/model_families.py                      # all, and print the table
    python scripts/model_families.py --write docs/models.md
    python scripts/model_families.py --only llama phi3
    python scripts/model_families.py --tenth 3            # those of the fourth tenth, of ten

A family is a name that AutoModelForCausalLM knows. Its config is made small, its weights are random numbers of a fixed
seed, wide enough that every token depends on all that was read. It is then refused, with a reason, or it runs: prompts
of many lengths, with prefixes that they share, in chunks, on a pool that is too small for all of them. Every token must
be that of `generate`, which runs each prompt by itself with the model's own attention and cache. Anything else is a
defect of kvarts, and ends the script with 1. Families with windows run once more with KV groups, and those whose layers
keep states run with KV groups only.

A family that cannot be built small, or does not generate by itself, is neither.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

"""Whether every page is looked at after every step: the room may be deleted."""

NUM_LAYERS = 4
VOCABULARY = 257
MOST_PARAMETERS = 20_000_000
PAGE_SIZE = 4
NUM_TOKENS = 12

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "model_dim", "embedding_size", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "expand_size"), 128),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), NUM_LAYERS
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "shared_intermediate_size", "mlp_hidden_size"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("qk_nope_head_dim",), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("v_head_dim",), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 24),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "window_size"), 16),
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "first_k_dense_replace": 1,
    "query_pre_attn_scalar": 16,
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    "type_vocab_size": 2,
    "hash_rounds": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dropout": 0.0,
    "tie_word_embeddings": False,
}
"""Numbers by the names that configs have for them, where they have them."""

NEEDED = ("head_dim", "num_key_value_heads", "num_experts_per_tok")
"""Those of them that are set also where a config leaves them open."""
SHARED = {
    "num_kv_shared_layers": 2,
    "intermediate_size": [128] * NUM_LAYERS,
    "activation_sparsity_pattern": [0.0] * NUM_LAYERS,
    "altup_num_inputs": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], **MAMBA},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "gemma3n_text": SHARED,
    "gemma4_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "falcon_h1": {"mamba_d_ssm": 128, **MAMBA},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, **MAMBA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2, "expert_ffn_hidden_size": 64},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "phi3": {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0 + place for place in range(8)],
            "original_max_position_embeddings": 64,
        },
    },
}
"""What a family needs besides."""


class Outcome(NamedTuple):
    """`kind`: exact, refused, wrong, or none where there is nothing to compare."""

    family: str
    kind: str
    reason: str = ""


def main() -> int:
    """Run the families that were asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FAMILY")
    parser.add_argument("--tenth", type=int, metavar="N", help="Every tenth family, from the Nth on.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="Put the table between the marks in FILE.")
    args = parser.parse_args()
    names = args.only or (families() if args.tenth is None else tenth(args.tenth))
    outcomes = []
    for name in names:
        start_s = perf_counter()
        outcomes.append(outcome_of(name))
        _, kind, reason = outcomes[-1]
        print(
            f"{name}: {kind}{reason and f': {reason}'} ({perf_counter() - start_s:.1f} s)", file=sys.stderr, flush=True
        )
    if args.write is None:
        print("\n".join(table(outcomes)))
    else:
        write_between_marks(args.write, table(outcomes))
    return 1 if any(outcome.kind == "wrong" for outcome in outcomes) else 0


def families() -> list[str]:
    """Return all names that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tenth(number: int) -> list[str]:
    """Return the families of one of ten parts, of which each has every tenth."""
    return families()[number % 10 :: 10]


def small_config(family: str) -> Any:
    """Return the config of a family, made small."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    return AutoConfig.for_model(family, **{**_shrunken(config.to_dict()), **OF_FAMILY.get(family, {})})


def _shrunken(values: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    if values.get("qk_rope_head_dim") is not None and "head_dim" in values:
        values = {name: value for name, value in values.items() if name != "head_dim"}
        small["head_dim"] = SMALL["qk_rope_head_dim"]
    if values.get("kv_lora_rank") is not None and "num_key_value_heads" in values:
        values = {name: value for name, value in values.items() if name != "num_key_value_heads"}
        small["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name, value in values.items():
        if name.endswith("_config") and isinstance(value, dict):
            small[name] = {**_shrunken(value), **({"model_type": value["model_type"]} if "model_type" in value else {})}
        elif name in SMALL and (value is not None or name in NEEDED):
            are_whole = isinstance(value, int) and isinstance(SMALL[name], int)
            small[name] = min(SMALL[name], value) if are_whole else SMALL[name]
        elif isinstance(value, list) and name in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types"):
            small[name] = spread(value)
    return small


def spread(kinds: list[str]) -> list[str]:
    """Return as many kinds of layers as a small model has, in their order, each kind at least once."""
    chosen = list(dict.fromkeys(kinds))[:NUM_LAYERS]
    return (chosen * NUM_LAYERS)[:NUM_LAYERS]


def build(family: str) -> Any:
    """Return a small model of a family in 32 bits."""
    import torch
    from transformers import AutoModelForCausalLM

    config = small_config(family)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"has {size:,} weights at the smallest")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if id(weight) in embeddings:
                weight.copy_(noise * 0.05)
            elif weight.dim() >= 2:
                weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5)
            else:
                weight.add_(noise * 0.1)
    model.requires_grad_(False)
    return model


def prompts(vocabulary: int) -> list[list[int]]:
    """Return prompts of many lengths, some with prefixes of others."""
    random = Random(1)
    most = min(vocabulary, VOCABULARY)
    made = [[random.randrange(3, most) for _ in range(length)] for length in (5, 40, 70, 9)]
    return [*made, [*made[2][:50], 3, 4], made[1]]


def outcome_of(family: str) -> Outcome:
    """Build a family, and run it."""
    try:
        model = build(family)
    except Exception as error:  # whatever its code raises
        return Outcome(family, "none", f"cannot be built small ({first_line(error)})")
    return compare(family, model)


def compare(family: str, model: Any) -> Outcome:
    """Run a model in pages, and compare it with `generate`."""
    from kvarts.base.errors import ConfigError
    from kvarts.core.config import EngineConfig
    from kvarts.core.sampling import SamplingParams
    from kvarts.run.torch.check import generated
    from kvarts.run.torch.llm import LLM

    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    asked = prompts(vocabulary)
    reference = copy.deepcopy(model)
    try:
        num_pages = 48 + 4 * state_pages(model)
        config = EngineConfig(num_pages=num_pages, page_size=PAGE_SIZE, max_num_batched_tokens=16, max_num_seqs=4)
        # By the backend that needs no compiler: tests hold all backends to the same numbers.
        keeps = "all" if num_pages > 48 else "off"
        llm = LLM(model, None, config, attention="sdpa", kv_groups=keeps, audit=True)
    except ConfigError as error:
        reason = str(error).partition("cannot run in pages: ")[2].partition(". `kvarts")[0]
        return Outcome(family, "refused", reason or str(error))
    except Exception as error:  # a defect, whatever it is
        return Outcome(family, "wrong", f"cannot be examined ({first_line(error)})")
    try:
        expected = [generated(reference, prompt, NUM_TOKENS) for prompt in asked]
    except Exception as error:  # whatever its code raises
        return Outcome(family, "none", f"does not generate by itself ({first_line(error)})")
    if len({token for one in expected for token in one}) < 6:
        return Outcome(family, "none", "always says the same, so that equal tokens prove nothing")
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

    def wrong(engine: Any) -> str:
        """Say what is wrong with what an engine says; nothing if all is well."""
        try:
            said = [list(completion.tokens) for completion in engine.generate(asked, params)]
        except Exception as error:  # a defect, whatever it is
            return f"fails ({first_line(error)})"
        places = [alike(one, two) for one, two in zip(said, expected, strict=True)]
        for prompt, one, two, place in zip(asked, said, expected, places, strict=True):
            if place < NUM_TOKENS and not are_even(reference, prompt + two[:place], one[place], two[place]):
                return f"tokens alike of {NUM_TOKENS}: {places}"
        return ""

    if reason := wrong(llm):
        return Outcome(family, "wrong", reason)
    if keeps == "all":
        return Outcome(family, "exact", "with states, with `--kv-groups`")
    if not has_windows(model):
        return Outcome(family, "exact")
    try:
        llm = LLM(model, None, config, attention="sdpa", kv_groups="all", audit=True)
    except ConfigError as error:
        return Outcome(family, "exact", f"with every layer keeping every token: {error.what}")
    if reason := wrong(llm):
        return Outcome(family, "wrong", f"with KV groups: {reason}")
    return Outcome(family, "exact", "with windows, also with `--kv-groups`")


def has_windows(model: Any) -> bool:
    """Return whether a layer of a model sees a window only."""
    from kvarts.run.torch.probe import examine

    return any(layer.window is not None for layer in examine(model).layers)


def state_pages(model: Any) -> int:
    """Return how many pages are as large as the state of a sequence, 0 for a model without states."""
    from kvarts.run.torch.pools import page_bytes_of
    from kvarts.run.torch.probe import examine

    facts = examine(model)
    page_bytes = page_bytes_of(facts.layers, page_size=PAGE_SIZE, dtype=model.dtype)
    return -(-sum(state.num_bytes for state in facts.states) // page_bytes)


def alike(one: list[int], other: list[int]) -> int:
    """Return how many tokens are the same before the first that is not."""
    return next((place for place, pair in enumerate(zip(one, other, strict=True)) if len({*pair}) > 1), len(one))


def are_even(reference: Any, tokens: list[int], one: int, other: int) -> bool:
    """Return whether two tokens are as likely, so that the last bit of a sum decides."""
    import torch

    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
    return float((logits[one] - logits[other]).abs() / logits.std()) < 1e-5


def first_line(error: BaseException) -> str:
    """Return an error in a line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:100]}"


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the lines of the table: exact families together, then the others with their reasons."""
    outcomes = list(outcomes)
    by_reason: dict[tuple[str, str], list[str]] = {}
    for family, kind, reason in outcomes:
        by_reason.setdefault((kind, reason), []).append(family)
    order = {"exact": 0, "wrong": 1, "refused": 2, "none": 3}
    said = {"exact": "exact", "wrong": "WRONG", "refused": "refused", "none": "not compared"}
    lines = ["| outcome | families | reason |", "|---|---|---|"]
    for (kind, reason), names in sorted(by_reason.items(), key=lambda item: (order[item[0][0]], item[1])):
        lines.append(f"| {said[kind]} ({len(names)}) | {', '.join(names)} | {reason.replace('|', '/')} |")
    return lines


def write_between_marks(path: Path, lines: list[str]) -> None:
    """Replace what is between the marks in a page."""
    before, _, rest = path.read_text().partition("<!-- families -->\n")
    _, _, after = rest.partition("<!-- end -->\n")
    path.write_text(f"{before}<!-- families -->\n" + "\n".join(lines) + f"\n<!-- end -->\n{after}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    raise SystemExit(main())
