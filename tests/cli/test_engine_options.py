"""Every option of an engine on the command line reaches the engine: one struct carries them all."""

from __future__ import annotations

import click
import pytest
from msgspec import structs

from kvarts.cli.llm import engine_options, engine_options_of, kv_groups_option, snapshots_option
from kvarts.cli.options import Command
from kvarts.core.config import EngineOptions

GIVEN = {
    "kv_memory": ("--kv-memory 1MiB", "1MiB"),
    "page_size": ("--set page_size=8", 8),
    "max_num_batched_tokens": ("--set max_batched_tokens=99", 99),
    "max_num_seqs": ("--set max_seqs=3", 3),
    "max_itl_ms": ("--set max_itl_ms=7.5", 7.5),
    "dtype": ("--dtype float16", "float16"),
    "device": ("--device cuda", "cuda"),
    "attention": ("--set attention=sdpa", "sdpa"),
    "layers": ("--set layers=model", "model"),
    "quantization": ("--set quantization=int4", "int4"),
    "trust_remote_code": ("--set trust_remote_code=true", True),
    "kv_groups": ("--set kv_groups=all", "all"),
    "snapshots": ("--set snapshots=branches", "branches"),
    "kv_dtype": ("--set kv_dtype=fp8", "fp8"),
    "enforce_eager": ("--set enforce_eager=true", True),
}
"""By field: words of a command line, and the value that they give the field."""


@click.command(cls=Command)
@engine_options
@kv_groups_option
@snapshots_option
def command(**values: object) -> EngineOptions:
    return engine_options_of(values)


def parsed(words: str) -> EngineOptions:
    options: EngineOptions = command.main(words.split(), standalone_mode=False)
    return options


def test_without_options_an_engine_has_the_defaults_of_python() -> None:
    assert parsed("") == EngineOptions()


@pytest.mark.parametrize("field", EngineOptions.__struct_fields__)
def test_an_option_reaches_its_field(field: str) -> None:
    words, value = GIVEN[field]
    assert parsed(words) == structs.replace(EngineOptions(), **{field: value})


def test_no_option_is_without_a_field() -> None:
    assert len(command.every) == len(EngineOptions.__struct_fields__) + 1, "those of fields, and --set"
