"""A model directory without weights: a configuration, a byte-level tokenizer that knows the words of a mock, and a
chat template. Any front end can serve it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvarts.doors.openai.words import WORDS

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_characters() -> list[str]:
    """Return GPT-2's printable character of each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(code if code in kept else next(others)) for code in range(256)]


def tokenizer_json() -> dict[str, Any]:
    """Return a byte-level BPE as a tokenizer.json: bytes, words after a space, and the pieces that merge into words."""
    pieces = _byte_characters()
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges: list[list[str]] = []
    for word in WORDS:
        piece = pieces[ord(" ")]
        for letter in word:
            if piece + letter not in vocab:
                vocab[piece + letter] = len(vocab)
                merges.append([piece, letter])
            piece += letter
    specials = [
        {"id": len(vocab) + place, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": text.startswith("<|")}
        for place, text in enumerate(SPECIALS)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": merges},
    }  # fmt: skip


def tiny_model(directory: Path, **config: Any) -> Path:
    """Write the model into `directory`, with fields of its config.json changed, and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_json()
    num_tokens = len(tokenizer["model"]["vocab"]) + len(SPECIALS)
    end = next(each["id"] for each in tokenizer["added_tokens"] if each["content"] == "<|im_end|>")
    facts = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": num_tokens, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": True, "bos_token_id": end - 2,
        "eos_token_id": end,
    }  # fmt: skip
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>", "chat_template": TEMPLATE, "model_max_length": 131_072,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    for name, value in (
        ("tokenizer.json", tokenizer),
        ("config.json", facts | config),
        ("tokenizer_config.json", about),
    ):
        (directory / name).write_text(json.dumps(value))
    return directory
