"""Directories that are read without transformers give its model, its tokens and its texts; others are left to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvarts.core.sampling import SamplingParams
from kvarts.run.torch.check import check_model
from kvarts.run.torch.decoder import Decoder
from kvarts.run.torch.llm import LLM, render_chat
from kvarts.run.torch.loading import load_model, load_tokenizer
from kvarts.run.torch.standard_directory import QWEN2_SPLIT, read_standard, read_standard_tokenizer

from builders.gguf_files import MERGES, small_model
from builders.real_model import real_model

STANDARD = ("llama", "qwen2", "qwen3")
IDS = torch.tensor([[5, 99, 201, 7, 7, 42, 259, 130, 17, 77] * 5])
TEXTS = (
    "", "Hello the world 1234 \u00e9t\u00e9 e\u0301 \U0001f600\n\n  two  spaces\tTab don't I'LL x=3.14;", "  leading",
    "\u4e2d\u6587 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 123,456 \r\n\r\n", "<|im_end|>a</s> <s>x",
)  # fmt: skip
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"


def written(directory: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """The directory of a small model with a tokenizer. `changes` of config.json; None takes a setting out."""
    model = small_model(kind).to(dtype)
    model.save_pretrained(directory)
    tokenizer(kind).save_pretrained(directory)
    change(directory / "config.json", **changes)
    return directory


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Bytes and a few merges; for Qwen, what its class makes of these."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    alphabet = ["<pad>", "<s>", "</s>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [(first, second) for first, second in (merge.split(" ") for merge in MERGES)]
    vocab = {token: index for index, token in enumerate([*alphabet, *map("".join, pairs)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind.startswith("qwen"):
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in alphabet[:4]])
    whole = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<|im_end|>"
    )
    whole.chat_template = TEMPLATE
    return whole


def change(path: Path, **changes: Any) -> None:
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("kind", STANDARD)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_standard_decoder_is_that_of_transformers(kind: str, stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    written(tmp_path, kind, stored)
    mine, theirs = load_model(tmp_path, dtype=dtype), load_model(tmp_path, dtype=dtype, model_impl="transformers")
    assert isinstance(mine, Decoder) and not isinstance(theirs, Decoder)
    assert mine.dtype == theirs.dtype == (stored if dtype == "auto" else torch.float32)
    assert mine.generation_config.eos_token_id == theirs.generation_config.eos_token_id == 2
    check = check_model(mine, theirs, num_prompts=3, num_tokens=8)
    assert check.is_exact and (stored == torch.bfloat16 or check.num_alike == check.num_tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"torch_dtype": "bfloat16", "dtype": None},
        {"dtype": None},
        {"rope_parameters": None, "rope_theta": 500_000.0, "rope_scaling": None},
        {"num_attention_heads": 8, "head_dim": 16, "num_key_value_heads": 4},
        {"head_dim": None, "hidden_size": 64},
        {"eos_token_id": [2, 3]},
    ],
)
def test_settings_mean_what_they_mean_to_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, "llama", **changes)
    (tmp_path / "generation_config.json").unlink()
    mine = read_standard(tmp_path, "auto")
    if changes.get("head_dim", 0) is None:
        assert mine is None  # its matrices are of another size
        return
    theirs = load_model(tmp_path, model_impl="transformers")
    assert mine is not None and mine.dtype == theirs.dtype
    theirs.set_attn_implementation("sdpa")
    assert torch.equal(logits_of(mine), logits_of(theirs)) or mine.dtype == torch.bfloat16
    mine_ends, their_ends = mine.generation_config.eos_token_id, theirs.generation_config.eos_token_id
    assert mine_ends == their_ends


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"anything": 1}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}}),
        ("llama", {"rms_norm_eps": None}),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}),
        ("llama", {"intermediate_size": 32}),
        ("llama", {"num_hidden_layers": 8}),
        ("llama", {"num_hidden_layers": 3}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"vocab_size": "many"}),
        ("llama", {"num_hidden_layers": "many"}),
        ("llama", {"model_type": ["llama"]}),
        ("llama", {"rope_parameters": "default"}),
        ("qwen3", {"head_dim": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}),
        ("qwen3", {"layer_types": ["sliding_attention"] * 7}),
    ],
)
def test_anything_else_is_left_to_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert read_standard(written(tmp_path, kind), "auto") is not None
    change(tmp_path / "config.json", **changes)
    assert read_standard(tmp_path, "auto") is None


def test_so_are_damaged_weights_and_adapters(tmp_path: Path) -> None:
    written(tmp_path, "llama")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert read_standard(tmp_path, "auto") is None
    (tmp_path / "adapter_config.json").unlink()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert read_standard(tmp_path, "auto") is None
    weights.unlink()
    assert read_standard(tmp_path, "auto") is None


def test_weights_in_several_files(tmp_path: Path) -> None:
    model = small_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert not (tmp_path / "model.safetensors").exists()
    mine = read_standard(tmp_path, "auto")
    assert mine is not None
    for name, weight in model.state_dict().items():
        assert torch.equal(mine.state_dict()[name], weight), name


# Tokenizers ---------------------------------------------------------------------------------------------------


def compare(directory: Path) -> None:
    mine, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert not isinstance(mine, type(theirs)) and mine.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        for adds in (True, False):
            tokens = mine(text, add_special_tokens=adds)["input_ids"]
            assert tokens == theirs(text, add_special_tokens=adds)["input_ids"]
        for skips in (True, False):
            texts = {one.decode(tokens, skip_special_tokens=skips) for one in (mine, theirs)}
            assert len(texts) == 1
    messages = [{"role": "user", "content": text} for text in TEXTS]
    assert render_chat(mine, messages) == render_chat(theirs, messages)


@pytest.mark.parametrize("kind", STANDARD)
@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer"])
def test_tokens_and_texts_are_those_of_transformers(kind: str, named: str, tmp_path: Path) -> None:
    written(tmp_path, kind)
    if named == "Qwen2Tokenizer" and kind == "llama":
        pytest.skip("no such model")
    change(tmp_path / "tokenizer_config.json", tokenizer_class=named)
    compare(tmp_path)
    if named == "Qwen2Tokenizer":
        change(tmp_path / "tokenizer_config.json", add_bos_token=False, add_prefix_space=False)
        compare(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_real_tokenizer(kind: str, tmp_path: Path) -> None:
    """SmolLM2's splits digits one by one, which is kept where a class takes the file as it is, and only there."""
    path = real_model()
    from kvarts.run.torch.gguf_file import GgufFile, read_tokenizer

    written(tmp_path, kind)
    real = read_tokenizer(GgufFile(path))
    PreTrainedTokenizerFast(
        tokenizer_object=real.backend_tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>"
    ).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(real.chat_template)
    compare(tmp_path)
    change(tmp_path / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    assert read_standard_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"anything": 1},
        {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}},
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"tokenizer_class": None},
        {"add_bos_token": True},
        {"add_eos_token": True},
        {"eos_token": "<not there>"},
        {"pad_token": "a"},
        {"extra_special_tokens": ["<not there>"]},
        {"clean_up_tokenization_spaces": True},
        {"chat_template": {"default": "a", "tool_use": "b"}},
        {"added_tokens_decoder": {"2": {"content": "</s>", "lstrip": True, "special": True}}},
        {"added_tokens_decoder": {"first": {"content": "</s>", "special": True}}},
        {"added_tokens_decoder": {"900": {"content": "<new>", "special": True}}},
    ],
)
def test_other_tokenizers_are_left_to_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, "llama")
    (tmp_path / "chat_template.jinja").unlink()
    assert read_standard_tokenizer(tmp_path) is not None
    change(tmp_path / "tokenizer_config.json", **changes)
    assert read_standard_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}},
        {"model": None},
        {"normalizer": 5},
        {"normalizer": {"type": "unknown"}},
        {"post_processor": "none"},
    ],
)
def test_so_are_files_with_more(changes: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, "llama")
    change(tmp_path / "tokenizer.json", **changes)
    assert read_standard_tokenizer(tmp_path) is None


def test_no_token_needs_transformers(tmp_path: Path) -> None:
    written(tmp_path, "llama")
    code = (
        "import sys; from kvarts.run.torch.llm import LLM; from kvarts.core.sampling import SamplingParams\n"
        f"print(LLM({str(tmp_path)!r}, kv_memory='1MiB').generate('hello', SamplingParams(max_tokens=4))[0].tokens)\n"
        "sys.exit('transformers' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    model = load_model(tmp_path, model_impl="transformers")
    (told,) = LLM(model, load_tokenizer(tmp_path), kv_memory="1MiB").generate("hello", SamplingParams(max_tokens=4))
    assert ran.stdout.strip() == str(told.tokens)
