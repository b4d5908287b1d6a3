"""KV bytes of one request of ten models, as five planners and the tensors of transformers' cache have them.

    PYTHONPATH=src python benchmarks/kv_planners.py --planners PYTHON > table.md

PYTHON has aiconfigurator-core, llm-d-planner, hf-vram-calc, transformers and torch; no weights are read. Configs are
those of aiconfigurator-core. vLLM's column is its own planning of a start, as tests/cost/of_vllm/plans.json has it:
bytes for KV over the tokens that fit, times the length. A request has as many tokens as vLLM serves by default. Cache
tensors: a forward pass of 16 tokens on torch's meta device, its keys and values scaled to the length, or to a layer's
window. Writes the table of docs/beside-others.md.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

MODELS = (
    "meta-llama/Meta-Llama-3.1-8B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-235B-A22B",
    "openai/gpt-oss-120b",
    "google/gemma-4-26B-A4B",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "Qwen/Qwen3.5-35B-A3B",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "deepseek-ai/DeepSeek-V3",
    "XiaomiMiMo/MiMo-V2-Flash",
)
PLANS = Path(__file__).parents[1] / "tests/cost/of_vllm/plans.json"


def planned(name: str, length: int) -> dict[str, float | str | None]:
    """Bytes by each planner, in the environment that has them; a text where one refuses."""
    import aiconfigurator_core
    from transformers import AutoConfig

    configs = Path(aiconfigurator_core.__file__).parent / "model_configs"
    found = json.loads((configs / f"{name.replace('/', '--')}_config.json").read_text())
    folder = Path("/tmp/kv-planners") / name.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(found))
    out = {}

    def ask(planner, call):
        try:
            out[planner] = call()
        except Exception as error:  # a refusal is a cell of the table
            out[planner] = f"{type(error).__name__}: {error}"[:200]

    def aic():
        from aiconfigurator_core.sdk.memory import build_model_config, get_model

        ways = dict.fromkeys(("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"), 1)
        model = get_model(name, build_model_config(**ways, kvcache_quant_mode="bfloat16"), "vllm")
        return model.get_kvcache_bytes_per_sequence(length)

    def llm_d():
        from planner.capacity_planner import KVCacheDetail

        return KVCacheDetail(name, AutoConfig.from_pretrained(folder), length).per_request_kv_cache_bytes

    def vram():
        from hf_vram_calc.calculator import VRAMCalculator
        from hf_vram_calc.config import ConfigManager
        from hf_vram_calc.parser import ConfigParser

        config = ConfigParser.parse_config(str(folder / "config.json"), name)
        return VRAMCalculator(ConfigManager()).calculate_kv_cache_memory(config, "bf16", 1, length) * 2**30

    def tensors():
        import torch
        from transformers import AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        config = getattr(config, "text_config", None) or config
        config.quantization_config = None
        config._attn_implementation = "eager"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            cache = model(torch.zeros((1, 16), dtype=torch.long), use_cache=True).past_key_values
        total = 0
        for layer in cache.layers:
            window = getattr(layer, "sliding_window", None)
            for name_of, tensor in vars(layer).items():
                if torch.is_tensor(tensor):
                    size = tensor.numel() * tensor.element_size()
                    grows = name_of in ("keys", "values") and tensor.shape[-2] == 16
                    total += size * (min(length, window - 1) if window else length) // 16 if grows else size
        return total

    for planner, call in (("aic", aic), ("llm_d", llm_d), ("vram", vram), ("tensors", tensors)):
        ask(planner, call)
    return out


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planners", metavar="PYTHON")
    parser.add_argument("--ask", help="NAME=TOKENS,..: in the environment of the planners")
    arguments = parser.parse_args()
    if arguments.ask:
        for each in arguments.ask.split(","):
            print(json.dumps(planned(each.split("=")[0], int(each.split("=")[1]))), flush=True)
        return
    plans = json.loads(PLANS.read_text())
    print("| model | tokens | vLLM 0.33 | kvarts | AIConfigurator | llm-d-planner | hf-vram-calc | cache tensors |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    lengths = {name: plans[f"{name} h100-80gb 0.33 tp1 auto"][3] for name in MODELS}
    ask = [arguments.planners, __file__, "--ask", ",".join(f"{name}={length}" for name, length in lengths.items())]
    done = subprocess.Popen(ask, stdout=subprocess.PIPE, text=True)
    for name, length in lengths.items():
        bytes_of, _, tokens, *_ = plans[f"{name} h100-80gb 0.33 tp1 auto"][4][-1]
        show = [sys.executable, "-m", "kvarts", "model", "show", name, "--sequence-tokens", str(length), "--json"]
        own = json.loads(subprocess.run(show, capture_output=True, check=True).stdout)["sequence"]["num_bytes"]
        found = json.loads(done.stdout.readline())
        values = [bytes_of * length / tokens, own, *(found[each] for each in ("aic", "llm_d", "vram", "tensors"))]
        cells = [f"{value / 1e9:.2f}" if isinstance(value, int | float) else "-" for value in values]
        print(f"| {name.split('/')[1]} | {length:,} | {' | '.join(cells)} |", flush=True)
        for planner, value in found.items():
            if isinstance(value, str):
                print(f"{name}: {planner}: {value}", file=sys.stderr)


if __name__ == "__main__":
    main()
