"""Names of models that no client could ask for are refused before a server starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    ("flag", "given"), [("--served-model-name", ("--served-model-name", "")), ("--set lora", ("--set", "lora="))]
)
def test_an_empty_name_is_refused(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], flag: str, given: tuple[str, str]
) -> None:
    assert run_command("mock", "--port", 0, *given) == 2
    assert f"kvarts: {flag}: is empty, and no client could ask for it".encode() in capsysbinary.readouterr().err
