"""Lines of a chat as tokens, and tokens as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
pytest.importorskip("transformers", reason="a model's tokenizer needs kvarts[torch]")
from kvarts.cli.chat import ByteText, ModelText
from kvarts.executor.torch.tiny import byte_tokenizer

Run = Callable[..., tuple[int, str, str]]


def test_bytes_as_text() -> None:
    text = ByteText()
    assert text.tokens("ä", is_first=True, end=None) == [0xC3, 0xA4, 10]
    write = text.writer()
    assert [write(token) for token in (0xC3, 0xA4, 0xC3, 300, 65)] == ["", "ä", "", "\ufffd<300>", "A"]


class TestTokenizers:
    """A model's tokenizer, with and without a chat template."""

    TEMPLATE = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )

    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> Any:
        tokenizer = byte_tokenizer()
        tokenizer.save_pretrained(tmp_path)
        return tokenizer

    def test_without_a_template_a_line_is_a_line(self, tokenizer: Any, tmp_path: Path) -> None:
        text = ModelText(str(tmp_path))
        assert text.eos_token_ids == (256,)
        tokens = text.tokens("hä", is_first=True, end=None)
        assert tokenizer.decode(tokens) == "hä\n"
        write = text.writer()
        assert "".join(write(token) for token in [*tokens, 256]) == "hä\n"

    def test_with_a_template_a_turn_adds_what_the_whole_conversation_has_more(
        self, tokenizer: Any, tmp_path: Path
    ) -> None:
        tokenizer.chat_template = self.TEMPLATE
        tokenizer.save_pretrained(tmp_path)
        text = ModelText(str(tmp_path))

        def added(line: str, **turn: Any) -> str:
            decoded: str = tokenizer.decode(text.tokens(line, **turn))
            return decoded

        first = added("hi", is_first=True, end=None)
        assert first == "<user>hi<end>\n<assistant>"
        rest = "\n<user>so<end>\n<assistant>"
        assert added("so", is_first=False, end=None) == f"<end>{rest}"
        assert added("so", is_first=False, end=256) == rest

    def test_a_directory_without_one_is_said_to_have_none(self, kvarts: Run, tmp_path: Path) -> None:
        code, _, errors = kvarts("chat", "--model", tmp_path)
        assert code == 4
        assert errors.startswith(f"kvarts: {tmp_path}: has no tokenizer: ")
        assert errors.count("\n") == 1
