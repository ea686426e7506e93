"""Where the gateway listens, what it lets in and what it tells: one dataclass a concern, each a group of flags."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may ask."""

    insecure: bool = False
    """Listen on an address other than loopback although nothing is encrypted and nobody is asked for a key."""


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


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """How conversations become prompts, and outputs messages."""

    chat_template: str = ""
    """A Jinja file (or the template itself) instead of the model's chat template."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Flags of `allspan serve` that concern its listening side."""

    host: str = "127.0.0.1"
    """Address to listen on, for HTTP and gRPC; anything but loopback needs --insecure."""
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


GROUPS: dict[str, tuple[str, type]] = {
    "security": ("who may ask", SecurityConfig),
    "limits": ("limits of requests", LimitsConfig),
    "chat": ("conversations", ChatConfig),
}
"""By the field of GatewayConfig that holds them: a group's title in --help, and its flags."""
