"""The gateway's settings: one dataclass a concern, each a group of flags."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from allspan.protos.api.errors import ConfigError
from allspan.protos.api.grammar import MAX_GRAMMAR_CHARS
from allspan.protos.api.sampling import MAX_LOGPROBS
from allspan.protos.api.sampling_fields import MAX_STOP_STRINGS
from allspan.protos.config.generation import AUTOMATIC, GenerationConfig

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """The settings of access: keys, certificates, and allowed hosts and origins."""

    insecure: bool = False
    """Allows listening on an address other than loopback without TLS."""
    ssl_certfile: str = ""
    """Serves HTTP and gRPC over TLS with this certificate (and its chain) in PEM form. The server takes up a renewed
    file without a restart."""
    ssl_keyfile: str = ""
    """Names the file of the certificate's private key in PEM form, without a passphrase; empty reads it from
    --ssl-certfile."""
    ssl_ca_certs: str = ""
    """Names a PEM file with the authorities that clients' certificates must be from."""
    ssl_cert_reqs: int = 0
    """Says what is asked of clients: 0 no certificate, 1 a certificate is checked where one is given (HTTP only), 2 a
    certificate is required."""
    api_key: tuple[str, ...] | None = field(default=None, repr=False)
    """Requires one of these keys of every request. Give several with commas or by repeating the flag. Other users of
    this machine can see the command line: --api-key-file or the variable ALLSPAN_API_KEY is safer."""
    api_key_file: str = ""
    """Reads such keys from a file, one on each line; `NAME KEY` gives a key a name for the log."""
    admin_api_key: str | None = field(default=None, repr=False)
    """Sets the key of the admin endpoints (pause, sleep, abort …), which are closed without one. It opens all other
    endpoints too. --admin-api-key-file or the variable ALLSPAN_ADMIN_API_KEY is safer."""
    admin_api_key_file: str = ""
    """Reads the admin key from a file."""
    share_prefix_cache: bool = False
    """Lets requests with different API keys share cached prefixes. Callers can then find out, by `cached_tokens` and by
    timing, how other callers' prompts begin."""
    open_metrics: bool = False
    """Answers GET /metrics without a key although keys are set."""
    allowed_origins: tuple[str, ...] = ()
    """Allows browser pages from these origins (https://chat.example.com) to call this server; * allows any."""
    allowed_hosts: tuple[str, ...] = ()
    """Allows requests that call this server by these host names, such as a proxy's, where it listens on loopback
    without keys. Addresses and localhost are always allowed."""

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"--allowed-origins has {origin!r}, must be like https://chat.example.com:8443, or *")


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """The limits of one request, and of all together."""

    max_body_bytes: int = 16 * 2**20
    """Limits the bytes of an HTTP request body."""
    max_prompt_chars: int = 0
    """Limits the characters of a prompt; a longer one is refused before it is tokenised. 0 takes 64 for each token of
    the context, at least 65536."""
    max_concurrent_requests: int = 1024
    """Limits the requests inside the gateway, where each of n choices counts; a further one is refused with 429."""
    body_timeout: float = 30.0
    """Sets the seconds within which the body of a request must arrive."""
    header_timeout: float = 15.0
    """Sets the seconds within which a TLS handshake must end and the headers of a request must arrive, and for which a
    new connection may be silent."""
    write_timeout: float = 60.0
    """Sets the seconds that a client may read nothing of its response before its request is cancelled."""
    keep_alive_timeout: float = 75.0
    """Sets the seconds that an idle HTTP connection is kept open for its next request."""
    max_connections: int = 2048
    """Limits the HTTP connections, TLS handshakes included; beyond it, a new connection closes one that has no request:
    the oldest that has never sent one, or the one that has been idle longest."""
    max_header_bytes: int = 65536
    """Limits the bytes of all headers of an HTTP request together."""
    max_prompts: int = 64
    """Limits the prompts of one completions request."""
    max_embedding_inputs: int = 2048
    """Limits the texts of one request for embeddings or scores."""
    max_n: int = 8
    """Limits the choices of one prompt (n)."""
    max_best_of: int = 8
    """Limits the candidates from which the n choices are taken (best_of)."""
    max_stop_sequences: int = MAX_STOP_STRINGS
    """Limits the stop strings of one request; 16 at most."""
    max_logprobs: int = MAX_LOGPROBS
    """Limits the most likely tokens reported at each position (logprobs, top_logprobs, prompt_logprobs); 20 at most."""

    max_grammar_bytes: int = 65536
    """Limits the bytes of a structured output's schema, regular expression, choices or grammar; 262144 at most."""
    grammar_timeout: float = 5.0
    """Sets the seconds of processor time that compiling a grammar may take."""
    grammar_memory_bytes: int = 2**29
    """Limits the bytes of memory that compiling a grammar may take."""
    strict: bool = False
    """Refuses requests with fields that this server does not know; by default such fields are ignored, with one line in
    the log for each name."""

    def __post_init__(self) -> None:
        ranges = {
            "max_grammar_bytes": (1, MAX_GRAMMAR_CHARS),
            "grammar_timeout": (0.01, 600),
            "grammar_memory_bytes": (2**24, 2**36),
            "max_connections": (1, 1 << 20),
            "max_prompts": (1, 65536),
            "max_embedding_inputs": (1, 65536),
            "max_n": (1, 65536),
            "max_best_of": (1, 65536),
            "max_stop_sequences": (0, MAX_STOP_STRINGS),
            "max_logprobs": (0, MAX_LOGPROBS),
        }
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is {getattr(self, name)}, must be from {low} to {high}")


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """The settings of chat: templates, tool calls and reasoning."""

    chat_template: str = ""
    """Uses this Jinja file (or the template itself) instead of the model's chat template."""
    rerank_template: str = ""
    """Uses this text file instead of a reranker's own prompt; it has the places {query}, {document} and perhaps
    {instruction}."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "granite", "harmony", "generic"] = "auto"
    """Sets how the model writes tool calls; auto finds it out from the chat template."""
    enable_auto_tool_choice: bool = True
    """Lets the model decide whether to call tools that a request offers. Switched off, only requests that require a
    call, or forbid calls, may offer tools."""
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "harmony", "generic"] = "auto"
    """Sets how the model marks its reasoning, which is reported apart from its answer; auto finds it out from the chat
    template."""
    allow_chat_template_kwargs: tuple[str, ...] = ("enable_thinking", "thinking")
    """Allows requests to set these variables of the chat template (chat_template_kwargs)."""


@dataclass(frozen=True, slots=True)
class ResponsesConfig:
    """The settings of the store of /v1/responses, from which a conversation can be continued (previous_response_id)."""

    max_stored_responses: int = 1000
    """Limits the responses kept in memory for previous_response_id (64 MiB at most); the oldest are dropped first. 0
    keeps none."""
    stored_response_ttl: float = 3600.0
    """Sets the seconds for which a response is kept."""

    def __post_init__(self) -> None:
        if min(self.max_stored_responses, self.stored_response_ttl) < 0:
            raise ConfigError(
                f"--max-stored-responses is {self.max_stored_responses} and --stored-response-ttl "
                f"{self.stored_response_ttl:g}, both must be at least 0"
            )


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """Connections and streams of gRPC."""

    grpc_max_message_bytes: int = 16 * 2**20
    """Limits the bytes of a gRPC request; a larger one is refused with RESOURCE_EXHAUSTED."""
    grpc_min_ping_interval: float = 10.0
    """Sets the least seconds between keepalive pings of a client, also while nothing runs; a client that pings more
    often is disconnected."""
    grpc_keepalive_time: float = 60.0
    """Sets the seconds of silence after which the server pings a client; a client that does not answer within another
    20 loses its requests."""
    grpc_max_connections: int = 1024
    """Limits the gRPC connections, TLS handshakes included; further ones are closed at once."""
    grpc_max_connection_age: float = 0.0
    """Sets the seconds after which a client is asked to reconnect (for load balancers), while its streams run on; 0
    never asks."""
    grpc_stream_timeout: float = 60.0
    """Sets the seconds that a client may leave its stream unread once all buffers are full; then the stream ends."""


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """The settings of KV events over ZeroMQ, in vLLM's formats."""

    kv_events_endpoint: str = ""
    """Publishes the changes of the prefix cache on this ZeroMQ address, such as tcp://127.0.0.1:5557; a second replica
    takes the next port. Empty publishes none. The events tell the tokens of prompts: an address beyond this host needs
    --insecure."""
    kv_events_replay_endpoint: str = ""
    """Answers on this address what was published from a sequence number on; empty answers nothing."""
    kv_events_topic: str = ""
    """Sets the topic of the messages, such as kv@POD_IP@MODEL for llm-d."""
    kv_events_format: Literal["arrays", "maps"] = "arrays"
    """Says how events are written: arrays as vLLM's releases do, or maps with a type."""
    kv_events_buffer_steps: int = 10_000
    """Limits the messages that are kept for a replay."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Flags of `allspan serve` that concern its listening side."""

    host: str = "127.0.0.1"
    """Sets the address on which HTTP and gRPC listen. Any address but loopback needs --ssl-certfile (or --insecure)."""
    port: int = 8000
    """Sets the HTTP port; 0 takes any free one and prints it."""
    grpc_port: int = 50051
    """Sets the gRPC port; 0 takes any free one and prints it."""
    worker_port: int | None = None
    """Serves the gRPC service vllm.grpc.engine.VllmEngine, by which the router SMG drives this server as a worker, on
    this port too; 0 takes any free one and logs it."""
    served_model_name: tuple[str, ...] = ()
    """Sets the model name that requests use; empty takes the model's own. Of several, separated by commas, requests may
    use any, and answers have the first."""
    shutdown_timeout: float = 5.0
    """Sets the seconds that running requests get to finish when the gateway stops."""
    metrics_names: Literal["vllm", "allspan"] = "vllm"
    """Says which names GET /metrics has beside allspan:…; vllm adds those of vLLM's metrics that the Gateway API's
    inference extension, llm-d and autoscalers read, summed over the replicas."""
    otlp_traces_endpoint: str = ""
    """Exports an OpenTelemetry span of each request and of its phases over OTLP to this URL, such as
    http://localhost:4318/v1/traces (or http://localhost:4317 for gRPC); empty exports none."""
    security: SecurityConfig = SecurityConfig()
    limits: LimitsConfig = LimitsConfig()
    generation: GenerationConfig = AUTOMATIC
    chat: ChatConfig = ChatConfig()
    responses: ResponsesConfig = ResponsesConfig()
    grpc: GrpcConfig = GrpcConfig()
    kv_events: KvEventsConfig = KvEventsConfig()


GROUPS: dict[str, tuple[str, type]] = {
    "security": ("who may ask", SecurityConfig),
    "limits": ("limits of requests", LimitsConfig),
    "generation": ("defaults of sampling fields", GenerationConfig),
    "chat": ("conversations", ChatConfig),
    "responses": ("responses that are kept", ResponsesConfig),
    "grpc": ("gRPC", GrpcConfig),
    "kv_events": ("KV events", KvEventsConfig),
}
"""The title of each group in --help and its flags, by the field of GatewayConfig that holds them."""
