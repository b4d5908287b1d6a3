"""Runs a tiny random model in vLLM; started by tests/doors/inside_vllm/test_inside_vllm.py with a Python that has vLLM.

Reads rounds of prompts from standard input, one JSON object a line: `prompts`, `max_tokens`. Prints for each round the
tokens generated and the prompt tokens that were found; last of all the counts of kvarts' tiers. `ports`: of its KV
events, of their replays, and of its metrics, if they are to be watched.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig, KVTransferConfig

    folder = Path(settings["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3, **settings.get("model", {})}))
    transfer = None
    if settings.get("tiers") is not None:
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "KvartsOffloadingSpec",
                "spec_module_path": "kvarts.doors.vllm",
                **settings["tiers"],
            },
        )
    events = None
    if settings.get("ports") is not None:
        from prometheus_client import start_http_server

        published, replayed, metrics = settings["ports"]
        host = "tcp://127.0.0.1"
        events = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"{host}:{published}",
            replay_endpoint=f"{host}:{replayed}",
        )
        start_http_server(metrics, "127.0.0.1")
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        block_size=32,
        num_gpu_blocks_override=settings.get("blocks", 40),
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=False,
        kv_transfer_config=transfer,
        kv_events_config=events,
        disable_log_stats=False,
        seed=1,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(max_tokens=asked["max_tokens"], temperature=0, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": tokens} for tokens in asked["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        told = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }
        if transfer is not None and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            told |= tiers_of(llm)
        print(json.dumps(told), flush=True)
    llm.llm_engine.engine_core.shutdown()


def tiers_of(llm: Any) -> dict[str, Any]:
    """Return what kvarts' tiers counted, once their laws were checked and nothing is pinned any more."""
    import msgspec

    core = llm.llm_engine.engine_core.engine_core
    store = core.scheduler.connector.connector_scheduler.manager.store
    if store.files is not None:
        store._page_io.drain()
        store.poll()
        store.files.check()
    store.host.check()
    from prometheus_client import generate_latest

    counts = {"counts": msgspec.to_builtins(store.counts), "used": store.host.num_used, "stored": len(store.host)}
    return {**counts, "metrics": generate_latest().decode()}


if __name__ == "__main__":
    main()
