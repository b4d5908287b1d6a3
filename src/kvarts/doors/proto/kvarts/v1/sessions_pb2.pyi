from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as _runtime_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateSessionRequest(_message.Message):
    __slots__ = ("client_label", "eos_token_ids", "sink", "window", "positions", "past_max_positions", "retention", "ttl_s", "keep", "heavy")
    CLIENT_LABEL_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PAST_MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    HEAVY_FIELD_NUMBER: _ClassVar[int]
    client_label: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sink: int
    window: int
    positions: str
    past_max_positions: bool
    retention: str
    ttl_s: float
    keep: str
    heavy: int
    def __init__(self, client_label: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., sink: _Optional[int] = ..., window: _Optional[int] = ..., positions: _Optional[str] = ..., past_max_positions: _Optional[bool] = ..., retention: _Optional[str] = ..., ttl_s: _Optional[float] = ..., keep: _Optional[str] = ..., heavy: _Optional[int] = ...) -> None: ...

class AppendTokensRequest(_message.Message):
    __slots__ = ("session_id", "token_ids", "expected_length", "queue")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    expected_length: int
    queue: bool
    def __init__(self, session_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., expected_length: _Optional[int] = ..., queue: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("session_id", "max_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "queue")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    max_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    queue: bool
    def __init__(self, session_id: _Optional[str] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., queue: _Optional[bool] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    def __init__(self, cancelled: _Optional[bool] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("session_id", "client_label", "queue")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_LABEL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    client_label: str
    queue: bool
    def __init__(self, session_id: _Optional[str] = ..., client_label: _Optional[str] = ..., queue: _Optional[bool] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("session_id", "length", "queue")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    length: int
    queue: bool
    def __init__(self, session_id: _Optional[str] = ..., length: _Optional[int] = ..., queue: _Optional[bool] = ...) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ("history_length",)
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    history_length: int
    def __init__(self, history_length: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class SessionSettings(_message.Message):
    __slots__ = ("sink", "window", "positions", "past_max_positions", "retention", "ttl_s", "eos_token_ids", "label", "keep", "heavy")
    SINK_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PAST_MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    HEAVY_FIELD_NUMBER: _ClassVar[int]
    sink: int
    window: int
    positions: str
    past_max_positions: bool
    retention: str
    ttl_s: float
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    label: str
    keep: str
    heavy: int
    def __init__(self, sink: _Optional[int] = ..., window: _Optional[int] = ..., positions: _Optional[str] = ..., past_max_positions: _Optional[bool] = ..., retention: _Optional[str] = ..., ttl_s: _Optional[float] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., label: _Optional[str] = ..., keep: _Optional[str] = ..., heavy: _Optional[int] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session_id", "label", "settings", "state", "history_length", "num_retained", "num_dropped", "kv_live_bytes", "kv_allocated_bytes", "kv_peak_bytes", "kv_bound_bytes", "inv1_violations", "inv2_violations", "idle_s", "num_turns", "num_computed_tokens", "restored")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HISTORY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_RETAINED_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    KV_LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BOUND_BYTES_FIELD_NUMBER: _ClassVar[int]
    INV1_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    INV2_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    label: str
    settings: SessionSettings
    state: str
    history_length: int
    num_retained: int
    num_dropped: int
    kv_live_bytes: int
    kv_allocated_bytes: int
    kv_peak_bytes: int
    kv_bound_bytes: int
    inv1_violations: int
    inv2_violations: int
    idle_s: float
    num_turns: int
    num_computed_tokens: int
    restored: str
    def __init__(self, session_id: _Optional[str] = ..., label: _Optional[str] = ..., settings: _Optional[_Union[SessionSettings, _Mapping]] = ..., state: _Optional[str] = ..., history_length: _Optional[int] = ..., num_retained: _Optional[int] = ..., num_dropped: _Optional[int] = ..., kv_live_bytes: _Optional[int] = ..., kv_allocated_bytes: _Optional[int] = ..., kv_peak_bytes: _Optional[int] = ..., kv_bound_bytes: _Optional[int] = ..., inv1_violations: _Optional[int] = ..., inv2_violations: _Optional[int] = ..., idle_s: _Optional[float] = ..., num_turns: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., restored: _Optional[str] = ...) -> None: ...
