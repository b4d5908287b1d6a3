"""The messages between vLLM's front end and an engine core, by version of vLLM.

Messages are msgpack. A request, an output and a batch of outputs are arrays without names, so the order of their fields
is data of each version; parameters, statistics and the ready response are maps. Every array may end early, before
fields that have their defaults.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.decoders import UNDECODED, convert
from kvarts.base.errors import ConfigError, InputError, problem_of

__all__ = [
    "ABORT",
    "ADD",
    "ENGINE_CORE_DEAD",
    "UTILITY",
    "Finish",
    "FrontCall",
    "FrontRequest",
    "Protocol",
    "array_of",
    "known_versions",
    "protocol_of",
    "tensor_of",
    "with_media",
]

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
"""Types of messages to a core. START_DP_WAVE, 02, concerns lockstep engines only."""
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""The message after which a front end ends."""
RAW_BYTES = 3
"""The msgpack extension of the bytes of an array."""
PRESET = {"new_token_ids": (), "num_nans_in_logits": 0, "outputs": (), "engine_index": 0, "timestamp": 0.0}
"""Defaults of fields that cannot be null."""


class Finish(IntEnum):
    """Why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


class MediaFeature(msgspec.Struct):
    """An image or other medium of a prompt. `identifier`: hash of its content; `mm_position`: its offset and length."""

    identifier: str
    mm_position: dict[str, Any]


def with_media(tokens: Sequence[int], features: Sequence[MediaFeature]) -> Sequence[int]:
    """Return `tokens` with those in the place of each medium replaced by ids that depend on its content."""
    if not features:
        return tokens
    ids = array("Q", tokens)
    for feature in features:
        first = int.from_bytes(sha256(feature.identifier.encode()).digest()[:7], "big") + (1 << 56)
        offset = int(feature.mm_position["offset"])
        for place in range(offset, min(len(ids), offset + int(feature.mm_position["length"]))):
            ids[place] = first + place - offset
    return ids


class AdapterRequest(msgspec.Struct, array_like=True):
    """An adapter of a request: the first fields of vLLM's LoRARequest."""

    name: str
    number: int
    path: str


class FrontCall(msgspec.Struct, array_like=True):
    """A call of a core. `client`: the API server that receives the answer to call `number`."""

    client: int
    number: int
    name: str
    arguments: list[Any]


class FrontRequest(msgspec.Struct):
    """A request to compute. Fields are those of vLLM's EngineCoreRequest; `priority`: the lower, the earlier.

    `sampling_params`: a map without the fields that have defaults.
    """

    request_id: str
    prompt_token_ids: list[int] | None = None
    mm_features: list[MediaFeature] | None = None
    sampling_params: dict[str, Any] | None = None
    pooling_params: list[Any] | None = None
    lora_request: AdapterRequest | None = None
    cache_salt: str | None = None
    client_index: int = 0
    priority: int = 0
    resumable: bool = False
    external_req_id: str | None = None
    abort_immediately: bool = False


class Protocol:
    """The messages of one version of vLLM."""

    def __init__(self, version: str, fields: Mapping[str, Sequence[str]]) -> None:
        self.version = version
        self.ready_fields = tuple(fields["ready"])
        """Fields without which a front end refuses to start."""
        self._ready_optional = frozenset(fields["ready_optional"])
        self._request = tuple(fields["request"])
        self._output = tuple((name, PRESET.get(name)) for name in fields["output"])
        self._outputs = tuple((name, PRESET.get(name)) for name in fields["outputs"])
        self.has_error = "error" in fields["output"]
        """Whether an output may contain an error with a status of its own."""
        self._encoder = msgspec.msgpack.Encoder()

    def request(self, payload: bytes) -> FrontRequest:
        """Decode a request. Raise InputError if it is not one."""
        with self._decoding("request"):
            values = msgspec.msgpack.decode(payload, type=list[Any])
            known = set(FrontRequest.__struct_fields__)
            named = {name: value for name, value in zip(self._request, values, strict=False) if name in known}
            return msgspec.convert(named, FrontRequest)

    def aborted(self, payload: bytes) -> list[str]:
        """Decode the ids of requests to abort. Raise InputError for anything else."""
        with self._decoding("list of aborted requests"):
            return msgspec.msgpack.decode(payload, type=list[str])

    def call(self, payload: bytes) -> FrontCall:
        """Decode a call. Raise InputError if it is not one."""
        with self._decoding("call"):
            return msgspec.msgpack.decode(payload, type=FrontCall)

    @contextmanager
    def _decoding(self, what: str) -> Iterator[None]:
        """Raise InputError for errors in the decoding of `what`."""
        try:
            yield
        except UNDECODED as error:
            raise InputError(
                f"is no {what} of vLLM {self.version}: {problem_of(error)}",
                path="front end",
                hint="Give the version of the front end.",
            ) from error

    def output(self, **given: Any) -> list[Any]:
        """Return an output of one request."""
        return _array(self._output, given)

    def encode(self, **given: Any) -> bytes:
        """Return the message with the outputs of a step, or the answer to a call."""
        return self._encoder.encode(_array(self._outputs, given))

    def ready(self, facts: Mapping[str, Any]) -> bytes:
        """Return the message of a core that is ready, of the facts that this version knows.

        A missing required fact is a bug.
        """
        missing = [name for name in self.ready_fields if name not in facts]
        assert not missing, f"a ready core of vLLM {self.version} states {', '.join(missing)}"
        known = self._ready_optional.union(self.ready_fields)
        return self._encoder.encode({name: value for name, value in facts.items() if name in known})


def _array(fields: Sequence[tuple[str, Any]], given: Mapping[str, Any]) -> list[Any]:
    """Return the values of `fields` up to the last given one."""
    values: list[Any] = []
    num_left = len(given)
    for name, preset in fields:
        if not num_left:
            break
        if name in given:
            num_left -= 1
            values.append(given[name])
        else:
            values.append(preset)
    assert not num_left, f"{sorted(given)} are not all fields of this version"
    return values


@cache
def _fields() -> dict[str, dict[str, tuple[str, ...]]]:
    path = Path(__file__).with_name("versions.json")
    return convert(msgspec.json.decode(path.read_bytes()), dict[str, dict[str, tuple[str, ...]]])


def known_versions() -> tuple[str, ...]:
    """Return the versions of vLLM whose messages are known, in ascending order."""
    return tuple(_fields())


def protocol_of(version: str, *, as_version: str | None = None) -> Protocol:
    """Return the messages of vLLM `version`, such as 0.33.0+cpu; `as_version`: use those of this version instead.

    Raise ConfigError for an unknown version.
    """
    name = ".".join((as_version or version).split(".")[:2])
    fields = _fields().get(name)
    if fields is None:
        known = known_versions()
        raise ConfigError(
            f"the messages of vLLM {as_version or version} are not known; those of {', '.join(known)} are",
            field="vllm_messages" if as_version else "vllm",
            hint=f"Install one of these, or try --set vllm_messages={known[-1]}.",
        )
    return Protocol(version, fields)


def array_of(values: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], msgspec.msgpack.Ext]:
    """Return an array as vLLM encodes NumPy's."""
    return values.dtype.str, values.shape, msgspec.msgpack.Ext(RAW_BYTES, values.tobytes())


def tensor_of(values: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], msgspec.msgpack.Ext]:
    """Return an array as vLLM encodes PyTorch's tensors."""
    return np.dtype(values.dtype).name, values.shape, msgspec.msgpack.Ext(RAW_BYTES, values.tobytes())
