"""Where an agent listens, the certificates that it and its clients show, and what went wrong when they do not meet."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.tls import TlsFiles, is_loopback

if TYPE_CHECKING:
    import grpc

PEER_NAME = "allspan agent"
"""The common name in the agent.pem of `allspan certs`: the certificates of HTTP clients, which are from the same
authority, must not run commands."""
ENVIRONMENT = "ALLSPAN_"
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


@dataclass(frozen=True)
class AgentConfig:
    """The settings that agents and their clients share; each is also read from $ALLSPAN_… in capitals."""

    agent_port: int = 7077
    """Sets the TCP port of agents."""
    agent_ssl_ca_certs: str = ""
    """Names the PEM file of the authority that agents' and clients' certificates must be from (ca.pem of allspan
    certs)."""
    agent_ssl_certfile: str = ""
    """Names the PEM certificate that both show each other (agent.pem of allspan certs)."""
    agent_ssl_keyfile: str = ""
    """Names the PEM file of its private key (agent.key of allspan certs)."""
    agent_peer_name: str = PEER_NAME
    """Sets the common name that a client's certificate must have to run commands."""
    host_timeout: float = 3.0
    """Sets the seconds without a heartbeat after which the other host is taken for lost, and what runs there for it is
    ended."""

    @property
    def tls(self) -> TlsFiles:
        return TlsFiles(self.agent_ssl_ca_certs, self.agent_ssl_certfile, self.agent_ssl_keyfile)


LIMITS: dict[str, tuple[float, float]] = {"agent_port": (0, 65535), "host_timeout": (0.5, 3600)}


def from_environment(unused: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the values of $ALLSPAN_AGENT_PORT and so on, by field name, as texts; but for the field `unused`."""
    names = [field.name for field in fields(AgentConfig) if field.name != unused]
    return {name: environ[ENVIRONMENT + name.upper()] for name in names if environ.get(ENVIRONMENT + name.upper())}


def target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(server: grpc.Server, host: str, config: AgentConfig) -> int:
    """Binds the server and returns its port. ConfigError for an open address without certificates, or one in use."""
    address = target(host, config.agent_port)
    if not config.tls.is_given and not is_loopback(host):
        raise ConfigError(
            f"--agent-host is {host}, which other hosts reach, and whoever reaches an agent runs commands: give "
            "--agent-ssl-ca-certs, --agent-ssl-certfile and --agent-ssl-keyfile (allspan certs makes them), or take "
            "127.0.0.1"
        )
    import grpc

    try:
        if not config.tls.is_given:
            return int(server.add_insecure_port(address))
        ca, certificate, key = config.tls.read()
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise ConfigError(f"the agent cannot listen on {address}: {_bind_error(host, config.agent_port)}") from error


def connect(host: str, config: AgentConfig) -> grpc.Channel:
    """Returns a channel to a host's agent; it is dialled at the first call."""
    import grpc  # not with this module: it reads how much it may log when it is loaded

    address = target(host, config.agent_port)
    if not config.tls.is_given:
        if not is_loopback(host):
            raise ConfigError(
                f"the agent of {host} is reached with TLS only: give --agent-ssl-ca-certs, --agent-ssl-certfile and "
                "--agent-ssl-keyfile, or $ALLSPAN_AGENT_SSL_CA_CERTS and so on"
            )
        return grpc.insecure_channel(address, options=OPTIONS)
    ca, certificate, key = config.tls.read()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=OPTIONS)


def explain(host: str, config: AgentConfig, otherwise: str) -> str:
    """Returns why nothing came of a connection: tries it again, step by step, without gRPC."""
    address = target(host, config.agent_port)
    limit = config.host_timeout
    try:
        with socket.create_connection((host, config.agent_port), limit) as plain:
            return _explain_tls(plain, host, config) or f"{address}: {otherwise}"
    except ConnectionRefusedError:
        return f"no agent listens on {address}: start `allspan agent` on that host, or give its --agent-port"
    except socket.gaierror as error:
        return f"the host name {host!r} is not known here: {error.strerror}"
    except TimeoutError:
        return f"{address} does not answer within {limit:g} s: the host is off, cut off, or a firewall drops packets"
    except OSError as error:
        return f"{address} is not reached: {error.strerror or error}"


def _explain_tls(plain: socket.socket, host: str, config: AgentConfig) -> str:
    """Returns what is wrong with the two certificates, or ""."""
    address = target(host, config.agent_port)
    if not config.tls.is_given:
        return ""
    context = ssl.create_default_context(cafile=config.agent_ssl_ca_certs)
    context.load_cert_chain(config.agent_ssl_certfile, config.agent_ssl_keyfile)
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain, server_hostname=host) as wrapped:
            # In TLS 1.3 the other end judges our certificate after the handshake. A gRPC server speaks first.
            if not wrapped.recv(1):
                return _refused(address, config, "it ends the connection")
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate that {address} shows is refused: {error.verify_message}. It must be valid by this host's "
            f"clock, from {config.agent_ssl_ca_certs} and for the name {host}: allspan certs FOLDER --hosts {host},…"
        )
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" in reason:
            return _refused(address, config, reason)
        return f"what listens on {address} is no allspan agent with TLS ({reason}): check --agent-port"
    except (TimeoutError, ConnectionResetError):
        return f"what listens on {address} does not answer as an allspan agent does: check --agent-port"
    return ""


def _refused(address: str, config: AgentConfig, reason: str) -> str:
    return (
        f"the agent at {address} refuses the certificate {config.agent_ssl_certfile} ({reason}): it must be valid by "
        "that host's clock and from that agent's authority"
    )


def _bind_error(host: str, port: int) -> str:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return "the port was in use a moment ago"
