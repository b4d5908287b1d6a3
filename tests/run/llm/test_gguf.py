"""Models of GGUF files are those that were written, and what llama.cpp reads from the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("gguf", reason="GGUF files need gguf")

import numpy as np
import torch

from kvarts.base.errors import ConfigError, InputError, KvartsError, MissingFileError
from kvarts.core.sampling import SamplingParams
from kvarts.run.torch import gguf_file
from kvarts.run.torch.gguf_file import SPLITS, GgufFile, read_tokenizer
from kvarts.run.torch.gguf_model import read_model
from kvarts.run.torch.llm import LLM

from builders.gguf_files import ARCHITECTURES, small_model, write_gguf
from builders.real_models import undisturbed

IDS = [5, 99, 201, 7, 7, 42, 260 - 1, 130, 17, 77] * 5
TEXTS = (
    "Hello world 1234 \u00e9t\u00e9 \U0001f600\n\n  two  spaces\tTab don't I'LL x=3.14;",
    "  leading", "\u4e2d\u6587 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 123,456 \r\n\r\n", "<|im_end|>a</s>",
)  # fmt: skip


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0].float()
    return logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_is_the_model_that_was_written(architecture: str, tmp_path: Path) -> None:
    written = small_model(architecture)
    write_gguf(written, architecture, tmp_path / "model.gguf")
    model = read_model(GgufFile(tmp_path / "model.gguf"), None)
    for name, weight in written.state_dict().items():
        assert torch.allclose(model.state_dict()[name], weight, atol=1e-6), name
    assert torch.allclose(logits_of(model), logits_of(written), atol=1e-4)
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == [2, 3]
    llm = LLM(tmp_path, kv_memory="1MiB")
    assert llm.tokenizer.chat_template is not None
    (told,) = llm.generate([IDS], SamplingParams(max_tokens=20, ignore_eos=True))
    assert list(told.tokens) == undisturbed(written, IDS, 20)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_llama_cpp_reads_the_same_model_from_the_file(architecture: str, tmp_path: Path) -> None:
    """The order of rows, norms, windows and rotations are as llama.cpp understands them."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="compares with llama-cpp-python")
    path = tmp_path / "model.gguf"
    write_gguf(small_model(architecture), architecture, path)
    other = llama_cpp.Llama(str(path), n_ctx=128, logits_all=True, verbose=False)
    other.eval(IDS)
    expected = torch.log_softmax(torch.tensor(np.array(other.scores[: len(IDS)])), -1)
    mine = torch.log_softmax(logits_of(read_model(GgufFile(path), None)), -1)
    differences = (mine - expected).abs()  # its keys and values have 16 bits
    assert float(differences.mean()) < 0.01 and float(differences.max()) < 0.1


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("stretch", [1, 256, 1000, 1 << 20])
def test_stretches_give_the_numbers_of_the_whole(name: str, stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    monkeypatch.setattr(gguf_file, "STRETCH", stretch)
    kind = gguf.GGMLQuantizationType[name]
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = 6 * 512 // num_values * num_bytes
    data = np.random.default_rng(0).integers(0, 60, count, np.uint8)  # no scale is infinite
    stored = gguf_file.StoredTensor("x", (6, 512), int(kind), data)
    whole = gguf.quants.dequantize(data.reshape(6, -1), kind)
    assert np.array_equal(stored.numbers(), whole)
    target = np.zeros((6, 512), np.float32)
    stored.read_into(target)
    assert np.array_equal(target, whole)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_llama_cpp_has_the_same_tokens(pre: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="compares with llama-cpp-python")
    path = tmp_path / "model.gguf"
    write_gguf(small_model("qwen3"), "qwen3", path, pre=pre)
    other = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    tokenizer = read_tokenizer(GgufFile(path))
    for text in TEXTS:
        tokens = tokenizer(text)["input_ids"]
        assert tokens == other.tokenize(text.encode(), add_bos=False, special=True)
        assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("quantized", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "F16", "BF16"])
def test_quantized_numbers_are_those_that_gguf_makes_of_them(quantized: str, tmp_path: Path) -> None:
    import gguf

    written = small_model("qwen3")
    write_gguf(written, "qwen3", tmp_path / "model.gguf", quantized=quantized)
    model = read_model(GgufFile(tmp_path / "model.gguf"), torch.float32)
    kind = gguf.GGMLQuantizationType[quantized]
    for name in ("model.layers.3.mlp.up_proj.weight", "model.embed_tokens.weight"):
        blocks = gguf.quants.quantize(written.state_dict()[name].numpy(), kind)
        expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
        assert torch.equal(model.state_dict()[name], expected.float())
    as_stored = read_model(GgufFile(tmp_path / "model.gguf"), None).dtype
    assert as_stored == {"F16": torch.float16, "BF16": torch.bfloat16}.get(quantized, torch.float32)


def test_what_cannot_be_read_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = small_model("qwen3")
    write_gguf(model, "qwen3", path, pre="other")
    with pytest.raises(ConfigError, match="splits text in a way that is not known"):
        read_tokenizer(GgufFile(path))
    write_gguf(model, "falcon", path)
    with pytest.raises(ConfigError, match="architecture 'falcon' is not read from GGUF; known: llama, "):
        LLM(path)
    write_gguf(model, "qwen3", path)
    whole = path.read_bytes()
    for length in (0, 3, 20, 200, len(whole) // 8, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            LLM(path)
    path.write_bytes(b"PK" + whole)
    with pytest.raises(InputError, match="is not GGUF"):
        LLM(path)
    (tmp_path / "other.gguf").write_bytes(whole)
    with pytest.raises(ConfigError, match="has 2 GGUF files"):
        LLM(tmp_path)
    with pytest.raises(MissingFileError):
        LLM(tmp_path / "none.gguf")
    assert set(SPLITS) >= {"gpt-2", "smollm", "llama-bpe", "qwen2"}


def test_damaged_files_are_refused_and_nothing_else(tmp_path: Path) -> None:
    """Whatever byte is changed, there is a model or an error of ours."""
    path = tmp_path / "model.gguf"
    write_gguf(small_model("qwen2"), "qwen2", path)
    whole = bytearray(path.read_bytes())
    for place in range(0, 1500, 37):
        changed = bytearray(whole)
        changed[place] ^= 0xFF
        path.write_bytes(changed)
        try:
            file = GgufFile(path)
            for tensor in file.tensors():
                assert tensor.shape
        except KvartsError:
            continue
