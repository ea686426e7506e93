"""Keys from variables and the command line do not stay where others can read them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from allspan.client.gateway.config import GatewayConfig, SecurityConfig
from allspan.launch.secrets import secret_spans, take_secrets
from allspan.launch.settings import serve_parser, serve_settings
from allspan.protos.api.errors import ConfigError

PROGRAM = """
import os
from allspan.client.gateway.config import GatewayConfig
from allspan.launch.secrets import take_secrets
config = take_secrets(GatewayConfig())
print(config.security.api_key, config.security.admin_api_key)
for name in ("cmdline", "environ"):
    print(open(f"/proc/{os.getpid()}/{name}").read())
os.system("env")
os.execvp("env", ["env"])
"""


def test_neither_ps_nor_proc_nor_a_child_shows_a_key() -> None:
    words = ["serve", "--api-key", "sk-word", "--admin-api-key=sk-joined", "--api-key-file", "names", "--port=1"]
    variables = {"ALLSPAN_API_KEY": "sk-var1,sk-var2", "ALLSPAN_API_KEYS": "sk-var3", "ALLSPAN_ADMIN_API_KEY": "sk-adm"}
    kept = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "OTHER": "stays"}
    program = [sys.executable, "-u", "-c", PROGRAM, *words]
    done = subprocess.run(program, env=kept | variables, capture_output=True, text=True, timeout=60, check=True)
    first, *rest = done.stdout.splitlines()
    assert first == "('sk-var1', 'sk-var2', 'sk-var3') sk-adm"
    shown = "\n".join(rest)
    assert "sk-" not in shown
    assert "--api-key\0xxxxxxx\0--admin-api-key=xxxxxxxxx\0--api-key-file\0names\0--port=1" in shown
    assert shown.count("OTHER=stays") == 3


def test_only_the_keys_own_bytes_are_taken_out() -> None:
    area = b"allspan\0--api-key=a\0--api-key\0aa\0--api-key-file\0a\0ALLSPAN_API_KEY=aaa\0X=--api-key\0a\0"
    assert [area[start : start + length] for start, length in secret_spans(area)] == [b"a", b"aa", b"aaa"]


def test_flags_and_variables_add_up_and_a_flag_may_be_given_again() -> None:
    parsed = serve_settings(serve_parser().parse(["--api-key", "a,b", "--api-key", "c"])).gateway
    assert parsed is not None
    environ = {"ALLSPAN_API_KEY": "d", "HOME": "/"}
    assert take_secrets(parsed, environ).security.api_key == ("a", "b", "c", "d")
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize(
    ("security", "environ"),
    [
        (SecurityConfig(), {"ALLSPAN_API_KEY": ""}),
        (SecurityConfig(), {"ALLSPAN_API_KEYS": " , "}),
        (SecurityConfig(), {"ALLSPAN_ADMIN_API_KEY": ""}),
        (SecurityConfig(api_key=()), {}),
        (SecurityConfig(admin_api_key="a"), {"ALLSPAN_ADMIN_API_KEY": "b"}),
    ],
)
def test_an_empty_or_ambiguous_key_stops_the_start(security: SecurityConfig, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        take_secrets(GatewayConfig(security=security), environ)
