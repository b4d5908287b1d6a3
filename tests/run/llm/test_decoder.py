"""A Decoder computes what transformers' code computes, bit by bit, and needs nothing of transformers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("gguf", reason="GGUF files need gguf")

import torch

from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.run.sessions.values import SessionsConfig, SessionSettings
from kvarts.run.torch.attention import attending
from kvarts.run.torch.check import check_model
from kvarts.run.torch.decoder import Decoder
from kvarts.run.torch.gguf_file import GgufFile
from kvarts.run.torch.gguf_model import read_model
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.loading import fingerprint
from kvarts.run.torch.probe import examine
from kvarts.run.torch.recorded_calls import Packed

from builders.gguf_files import small_model, write_gguf
from builders.sessions import OWNER, say, sessions_on

STANDARD = ("llama", "qwen2", "qwen3")
SCALED: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    "another base": {"rope.freq_base": 500_000.0},
}


def both(path: Path, dtype: torch.dtype, more: dict[str, Any]) -> tuple[Any, Any]:
    """The model of a file as it is read, and in transformers' code."""
    file = GgufFile(path)
    file.values |= {f"{file.architecture}.{key}": value for key, value in more.items()}
    return read_model(file, dtype), read_model(file, dtype, model_impl="transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", STANDARD)
@pytest.mark.parametrize("scaled", SCALED)
def test_logits_are_those_of_transformers(architecture: str, scaled: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write_gguf(small_model(architecture), architecture, tmp_path / "model.gguf")
    mine, theirs = both(tmp_path / "model.gguf", dtype, SCALED[scaled])
    assert isinstance(mine, Decoder) == (scaled != "yarn")
    assert (mine.dtype, mine.generation_config.eos_token_id) == (theirs.dtype, theirs.generation_config.eos_token_id)
    assert examine(mine) == examine(theirs)
    sequences, positions = torch.tensor([0] * 30 + [1] * 20), torch.tensor([*range(30), *range(100, 120)])
    ids = torch.randint(260, (50,), generator=torch.Generator().manual_seed(2))
    logits = []
    for model in (mine, theirs):
        with torch.inference_mode(), attending(Packed(sequences, positions, examine(model).layers)):
            logits.append(model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits)
    assert torch.equal(*logits)
    assert {name: weight.shape for name, weight in mine.named_parameters()} == {
        name: weight.shape for name, weight in theirs.named_parameters()
    }


def test_factors_of_a_rotation_and_a_shared_head(tmp_path: Path) -> None:
    import gguf

    written = small_model("llama")
    written.lm_head.weight = written.model.embed_tokens.weight
    written.config.tie_word_embeddings = True
    factors = torch.linspace(1.0, 8.0, 16).numpy()
    whole = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", factors)
        whole(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        write_gguf(written, "llama", tmp_path / "model.gguf")
    mine, theirs = both(tmp_path / "model.gguf", torch.float32, {})
    assert isinstance(mine, Decoder) and mine.lm_head.weight is mine.model.embed_tokens.weight
    assert torch.equal(mine.model.rotary_emb.inv_freq, theirs.model.rotary_emb.inv_freq)
    check = check_model(mine, theirs, num_prompts=4)
    assert check.is_exact and check.num_alike == check.num_tokens


def test_a_row_alone_and_batches_of_rows(tmp_path: Path) -> None:
    """Outside of an engine, as quantizing runs it."""
    write_gguf(small_model("qwen3"), "qwen3", tmp_path / "model.gguf")
    mine, theirs = both(tmp_path / "model.gguf", torch.float32, {})
    ids = torch.randint(260, (3, 40), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        torch.testing.assert_close(mine(ids, logits_to_keep=2).logits, theirs(ids, logits_to_keep=2).logits)
    assert fingerprint(mine) != fingerprint(read_model(GgufFile(tmp_path / "model.gguf"), torch.bfloat16))


@pytest.mark.parametrize("layers", ["model", "compiled"])
def test_an_engine_of_one_says_what_generate_says(layers: str, tmp_path: Path) -> None:
    write_gguf(small_model("qwen3"), "qwen3", tmp_path / "model.gguf")
    check = check_model(*both(tmp_path / "model.gguf", torch.float32, {}), layers=layers)
    assert check.is_exact and check.num_alike == check.num_tokens and check.layers == layers


def test_sessions_rotate_keys_late(tmp_path: Path) -> None:
    """Positions among retained tokens, which need the rotation of the model, are those of transformers' code."""
    write_gguf(small_model("qwen3"), "qwen3", tmp_path / "model.gguf")
    said = []

    async def talk(model: Any) -> None:
        config = EngineConfig(num_pages=100, page_size=4, max_num_batched_tokens=32, max_num_seqs=4)
        sessions = sessions_on(LLM(model, None, config).host(), SessionsConfig(chunk_tokens=16))
        session = await sessions.create(OWNER, SessionSettings(sink=3, window=9, positions="cache"))
        said.append([await say(sessions, session, list(range(first, first + 11)), 6) for first in (5, 60, 90)])
        await sessions.shut_down()

    for model in both(tmp_path / "model.gguf", torch.float32, {}):
        asyncio.run(talk(model))
    assert said[0] == said[1]


@pytest.mark.long
def test_nothing_of_transformers_is_imported(tmp_path: Path) -> None:
    write_gguf(small_model("llama"), "llama", tmp_path / "model.gguf")
    code = (
        "import sys; from kvarts.run.torch.llm import LLM; from kvarts.core.sampling import SamplingParams\n"
        f"print(LLM({str(tmp_path)!r}, kv_memory='1MiB').generate('hello', SamplingParams(max_tokens=4))[0].tokens)\n"
        "sys.exit('transformers' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    (told,) = LLM(tmp_path, kv_memory="1MiB").generate("hello", SamplingParams(max_tokens=4))
    assert ran.stdout.strip() == str(told.tokens)


def test_a_note_is_given_only_if_something_is_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    numba = pytest.importorskip("numba")
    from kvarts.run.torch.numba_backend import emitting

    code = tmp_path / "double.py"
    code.write_text("def double(number):\n    return number * 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from double import double  # type: ignore[import-not-found]

    caplog.set_level("INFO", logger="kvarts.attention")
    for number in range(2):  # the second finds the code on disk
        with emitting(f"compiling, number {number}"):
            assert numba.njit("int64(int64)", cache=True)(double)(21) == 42
    assert caplog.messages == ["compiling, number 0"]
