"""Where the gateway listens, what it lets in and what it tells: one dataclass a concern, each a group of flags."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from allspan.protos.api.errors import ConfigError
from allspan.protos.api.grammar import MAX_GRAMMAR_CHARS
from allspan.protos.api.sampling import MAX_LOGPROBS, MAX_STOP_STRINGS

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may ask."""

    insecure: bool = False
    """Listen on an address other than loopback although nothing is encrypted."""
    ssl_certfile: str = ""
    """The server's certificate (with its chain) in PEM form: HTTP and gRPC are TLS. Renewed files are taken up."""
    ssl_keyfile: str = ""
    """The certificate's private key in PEM form, without a passphrase; empty: it is in --ssl-certfile."""
    ssl_ca_certs: str = ""
    """Certificates of the authorities that clients' certificates must be from, in PEM form."""
    ssl_cert_reqs: int = 0
    """Clients' certificates: 0 not asked for, 1 checked where one is given (HTTP only), 2 required."""
    api_key: tuple[str, ...] | None = field(default=None, repr=False)
    """Keys of which every request must bring one (several: with commas, or the flag again). Whoever may list this
    machine's processes may see them: a file or the variable ALLSPAN_API_KEY is better."""
    api_key_file: str = ""
    """A file with such keys, one a line; `NAME KEY` gives a key a name for the log."""
    admin_api_key: str | None = field(default=None, repr=False)
    """The key of the admin endpoints (pause, sleep, abort …), which nobody may call without; it opens all else, too.
    Better a file or the variable ALLSPAN_ADMIN_API_KEY."""
    admin_api_key_file: str = ""
    """A file with that key."""
    open_metrics: bool = False
    """GET /metrics answers without a key although keys are set."""
    allowed_origins: tuple[str, ...] = ()
    """Origins (https://chat.example.com) whose pages may ask this server from a browser; * is any."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may call this server by where it listens on loopback without keys: a proxy's, say. Addresses
    and localhost always may."""

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"--allowed-origins has {origin!r}, must be like https://chat.example.com:8443, or *")


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """What one request, and all together, may take."""

    max_body_bytes: int = 16 * 2**20
    """Largest HTTP request body."""
    max_prompt_chars: int = 0
    """Longest prompt text, refused before it is tokenised; 0: 64 characters a token of context, at least 65536."""
    max_concurrent_requests: int = 1024
    """Most requests inside the gateway (each of n choices counts); one more is refused with 429."""
    body_timeout: float = 30.0
    """Seconds within which a request's body must arrive."""
    header_timeout: float = 15.0
    """Seconds within which a request's headers must arrive, and for which a new connection may be silent."""
    write_timeout: float = 60.0
    """Seconds for which a client may take nothing of its answer; its request is then cancelled."""
    keep_alive_timeout: float = 75.0
    """Seconds for which an HTTP connection may wait for its next request."""
    max_connections: int = 4096
    """Most HTTP connections; a new one then takes the place of the one that has been idle longest."""
    max_header_bytes: int = 65536
    """Largest headers of an HTTP request, all together."""
    max_prompts: int = 64
    """Most prompts of one request for completions."""
    max_n: int = 8
    """Most choices of one prompt (n)."""
    max_best_of: int = 8
    """Most candidates that the n choices are taken from (best_of)."""
    max_stop_sequences: int = MAX_STOP_STRINGS
    """Most stop strings of one request; at most 16."""
    max_logprobs: int = MAX_LOGPROBS
    """Most likeliest tokens told at each place (logprobs, top_logprobs, prompt_logprobs); at most 20."""

    max_grammar_bytes: int = 65536
    """Largest schema, regex, list of choices or grammar of a structured output; at most 262144."""
    grammar_timeout: float = 5.0
    """Seconds of a processor that compiling a grammar may take."""
    grammar_memory_bytes: int = 2**29
    """Memory that compiling a grammar may take."""

    def __post_init__(self) -> None:
        ranges = {
            "max_grammar_bytes": (1, MAX_GRAMMAR_CHARS),
            "grammar_timeout": (0.01, 600),
            "grammar_memory_bytes": (2**24, 2**36),
            "max_prompts": (1, 65536),
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
    """How conversations become prompts, and outputs messages."""

    chat_template: str = ""
    """A Jinja file (or the template itself) instead of the model's chat template."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "generic"] = "auto"
    """How the model writes tool calls; auto: as its chat template shows."""
    enable_auto_tool_choice: bool = True
    """The model may call tools when a request has some; off, only requests that require a call (or none) may have."""
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "generic"] = "auto"
    """How the model marks what it thinks, told apart from its answer; auto: as its chat template shows."""
    allow_chat_template_kwargs: tuple[str, ...] = ()
    """Variables of the chat template that a request may set (chat_template_kwargs), such as enable_thinking."""


@dataclass(frozen=True, slots=True)
class ResponsesConfig:
    """What /v1/responses keeps, so that a conversation can go on from one (previous_response_id)."""

    max_stored_responses: int = 1000
    """Most responses kept, in memory and 64 MiB at most; the oldest make room; 0 keeps none."""
    stored_response_ttl: float = 3600.0
    """Seconds for which a response is kept."""

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
    """Largest gRPC request; a larger one is refused with RESOURCE_EXHAUSTED."""
    grpc_min_ping_interval: float = 10.0
    """Clients may send keepalive pings this many seconds apart, also while nothing runs; more of them are cut off."""
    grpc_keepalive_time: float = 60.0
    """Seconds of silence after which the server asks whether a client is still there; 20 more end its requests."""
    grpc_max_connection_age: float = 0.0
    """Seconds after which a connection is asked to be made anew (for load balancers); its streams run on; 0: never."""
    grpc_stream_timeout: float = 60.0
    """Seconds that a client may leave its stream unread once all buffers are full; then it ends."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Flags of `allspan serve` that concern its listening side."""

    host: str = "127.0.0.1"
    """Address to listen on, for HTTP and gRPC; anything but loopback needs --ssl-certfile (or --insecure)."""
    port: int = 8000
    """HTTP port; 0 takes any free one and prints it."""
    grpc_port: int = 50051
    """gRPC port; 0 takes any free one and prints it."""
    served_model_name: str = ""
    """The name that requests use; empty: the model's own."""
    shutdown_timeout: float = 5.0
    """Seconds that running requests get to finish when the gateway stops."""
    security: SecurityConfig = SecurityConfig()
    limits: LimitsConfig = LimitsConfig()
    chat: ChatConfig = ChatConfig()
    responses: ResponsesConfig = ResponsesConfig()
    grpc: GrpcConfig = GrpcConfig()


GROUPS: dict[str, tuple[str, type]] = {
    "security": ("who may ask", SecurityConfig),
    "limits": ("limits of requests", LimitsConfig),
    "chat": ("conversations", ChatConfig),
    "responses": ("responses that are kept", ResponsesConfig),
    "grpc": ("gRPC", GrpcConfig),
}
"""By the field of GatewayConfig that holds them: a group's title in --help, and its flags."""
