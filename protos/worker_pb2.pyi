from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartRequestMessage(_message.Message):
    __slots__ = ("request_id", "client_id", "model", "prompt_token_ids", "sampling", "adapter", "cache_salt", "priority", "epoch", "timeout_s", "no_prefix_cache", "output_token_ids", "pooling", "adapter_digest", "no_speculation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    NO_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NO_SPECULATION_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    client_id: str
    model: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: bytes
    adapter: str
    cache_salt: str
    priority: int
    epoch: int
    timeout_s: float
    no_prefix_cache: bool
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pooling: str
    adapter_digest: int
    no_speculation: bool
    def __init__(self, request_id: _Optional[bytes] = ..., client_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[bytes] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., epoch: _Optional[int] = ..., timeout_s: _Optional[float] = ..., no_prefix_cache: bool = ..., output_token_ids: _Optional[_Iterable[int]] = ..., pooling: _Optional[str] = ..., adapter_digest: _Optional[int] = ..., no_speculation: bool = ...) -> None: ...

class RequestIds(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ResultsSubscription(_message.Message):
    __slots__ = ("client_id", "heartbeat_ms", "page_events")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    PAGE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    heartbeat_ms: int
    page_events: int
    def __init__(self, client_id: _Optional[str] = ..., heartbeat_ms: _Optional[int] = ..., page_events: _Optional[int] = ...) -> None: ...

class ResendPagesRequest(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    def __init__(self, client_id: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("request_id", "token_ids", "logprobs", "finish_reason", "stop_token_id", "has_stop_token_id", "error_code", "error_message", "timings", "prompt_logprobs", "vector")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: str
    stop_token_id: int
    has_stop_token_id: bool
    error_code: str
    error_message: str
    timings: RequestTimings
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    vector: bytes
    def __init__(self, request_id: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., has_stop_token_id: bool = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., timings: _Optional[_Union[RequestTimings, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., vector: _Optional[bytes] = ...) -> None: ...

class RequestTimings(_message.Message):
    __slots__ = ("queue_s", "ttft_s", "total_s", "prompt_tokens", "cached_tokens", "output_tokens", "arrived_at", "host_cached_tokens", "preemptions")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_AT_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    arrived_at: float
    host_cached_tokens: int
    preemptions: int
    def __init__(self, queue_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., total_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., arrived_at: _Optional[float] = ..., host_cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("step", "epoch", "outputs", "progress", "refusal", "load", "page_events", "adapters")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PAGE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    outputs: _containers.RepeatedCompositeFieldContainer[RequestOutput]
    progress: int
    refusal: str
    load: EngineLoad
    page_events: _containers.RepeatedCompositeFieldContainer[PageEvents]
    adapters: AdapterList
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[RequestOutput, _Mapping]]] = ..., progress: _Optional[int] = ..., refusal: _Optional[str] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ..., page_events: _Optional[_Iterable[_Union[PageEvents, _Mapping]]] = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("running", "waiting", "queued_tokens", "pages_used", "pages_total", "cached_pages")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    queued_tokens: int
    pages_used: int
    pages_total: int
    cached_pages: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., cached_pages: _Optional[int] = ...) -> None: ...

class PageEvents(_message.Message):
    __slots__ = ("sequence", "cleared", "stored", "removed", "page_tokens", "weights_version", "prompt_lengths")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    cleared: bool
    stored: _containers.RepeatedCompositeFieldContainer[PageStored]
    removed: _containers.RepeatedScalarFieldContainer[int]
    page_tokens: int
    weights_version: int
    prompt_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., cleared: bool = ..., stored: _Optional[_Iterable[_Union[PageStored, _Mapping]]] = ..., removed: _Optional[_Iterable[int]] = ..., page_tokens: _Optional[int] = ..., weights_version: _Optional[int] = ..., prompt_lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class PageStored(_message.Message):
    __slots__ = ("key", "parent", "token_ids", "medium", "lora_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    key: int
    parent: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    medium: str
    lora_id: int
    def __init__(self, key: _Optional[int] = ..., parent: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., medium: _Optional[str] = ..., lora_id: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("rank", "world_size", "epoch", "pid", "host", "state", "progress", "progress_age_s", "model", "model_path", "max_model_len", "vocab_size", "statistics", "kernels", "eos_token_ids", "device", "numa_nodes", "threads", "experts", "adapters", "lora_dir")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_AGE_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LORA_DIR_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    epoch: int
    pid: int
    host: str
    state: str
    progress: int
    progress_age_s: float
    model: str
    model_path: str
    max_model_len: int
    vocab_size: int
    statistics: Statistics
    kernels: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    device: str
    numa_nodes: str
    threads: int
    experts: _containers.RepeatedCompositeFieldContainer[ExpertLoad]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    lora_dir: str
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., epoch: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., state: _Optional[str] = ..., progress: _Optional[int] = ..., progress_age_s: _Optional[float] = ..., model: _Optional[str] = ..., model_path: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ..., kernels: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., device: _Optional[str] = ..., numa_nodes: _Optional[str] = ..., threads: _Optional[int] = ..., experts: _Optional[_Iterable[_Union[ExpertLoad, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., lora_dir: _Optional[str] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "base_model_name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    base_model_name: str
    digest: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., base_model_name: _Optional[str] = ..., digest: _Optional[int] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("version", "adapters")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, version: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("adapter", "timeout_s")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    timeout_s: float
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "timeout_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    timeout_s: float
    def __init__(self, name: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class AdapterReply(_message.Message):
    __slots__ = ("adapters", "num_requests")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    adapters: AdapterList
    num_requests: int
    def __init__(self, adapters: _Optional[_Union[AdapterList, _Mapping]] = ..., num_requests: _Optional[int] = ...) -> None: ...

class ExpertLoad(_message.Message):
    __slots__ = ("layer", "tokens", "groups")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, layer: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[float]] = ...) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("counters", "load_s", "peak_rss_bytes", "rss_bytes", "weight_bytes", "kv_bytes")
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    counters: bytes
    load_s: float
    peak_rss_bytes: int
    rss_bytes: int
    weight_bytes: int
    kv_bytes: int
    def __init__(self, counters: _Optional[bytes] = ..., load_s: _Optional[float] = ..., peak_rss_bytes: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("operation", "timeout_s")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    operation: str
    timeout_s: float
    def __init__(self, operation: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("what",)
    WHAT_FIELD_NUMBER: _ClassVar[int]
    what: str
    def __init__(self, what: _Optional[str] = ...) -> None: ...

class InspectReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
