"""Pages of other origins, and names that lead here although they should not."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import httpx
import pytest

from allspan.client.gateway.config import SecurityConfig
from allspan.client.gateway.http.origin import host_name
from allspan.protos.api.errors import ConfigError
from support.gateway import Gateway, gateway

CLIENT = Path(__file__).resolve().parents[4] / "client"
COMPLETIONS = "/v1/completions"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


async def ask(server: Gateway, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await server.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, headers=named)


async def test_by_default_no_other_origin_hears_anything() -> None:
    async with gateway() as server:
        answer = await ask(server, Origin="https://evil.example")
        before = await server.http.options(COMPLETIONS, headers=PREFLIGHT | {"Origin": "https://evil.example"})
    for response in (answer, before):
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert before.status_code == 405


@pytest.mark.parametrize("keys", [{}, {"api_key": ("sk-0123456789",)}])
async def test_allowed_origins_may_ask_and_read_and_need_a_key_all_the_same(keys: dict[str, Any]) -> None:
    good, bad = "https://chat.example.com", "https://evil.example"
    async with gateway(allowed_origins=(good,), **keys) as server:
        before = await server.http.options(COMPLETIONS, headers=PREFLIGHT | {"Origin": good})
        assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, good)
        assert "authorization" in before.headers["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in before.headers
        assert (await server.http.options(COMPLETIONS, headers=PREFLIGHT | {"Origin": bad})).status_code == 400
        answer = await ask(server, Origin=good, Authorization="Bearer sk-0123456789")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, good)
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        other = await ask(server, Origin=bad, Authorization="Bearer sk-0123456789")
        assert "access-control-allow-origin" not in other.headers
        keyless = await ask(server, Origin=good)
        assert keyless.status_code == (401 if keys else 200)
        assert keyless.headers["access-control-allow-origin"] == good


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a.example/", "https://a.example/path", "https://u@a"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        SecurityConfig(allowed_origins=(origin,))


async def test_on_loopback_without_keys_a_strangers_name_is_refused() -> None:
    async with gateway(allowed_hosts=("Llm.example.com",)) as server:
        for host in (
            "127.0.0.1",
            "localhost:8000",
            "[::1]:8000",
            "192.0.2.7:80",
            "app.localhost",
            "gpu-box",
            "LLM.example.com:9",
        ):
            assert (await ask(server, Host=host)).status_code == 200, host
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80"):
            answer = await ask(server, Host=host)
            assert (answer.status_code, "--allowed-hosts" in answer.json()["error"]["message"]) == (403, True), host
            assert (await server.http.get("/", headers={"Host": host})).status_code == 403


async def test_with_keys_the_name_does_not_matter() -> None:
    async with gateway(api_key=("sk-0123456789",)) as server:
        assert (await ask(server, Host="llm.example.com", Authorization="Bearer sk-0123456789")).status_code == 200
        assert (await ask(server, Host="evil.example")).status_code == 401


def test_a_hosts_port_and_brackets_are_no_part_of_its_name() -> None:
    names = {"A.b:80": "a.b", "a.b": "a.b", "[::1]:80": "::1", "[::1]": "::1", "::1": ":", "": ""}
    assert {header: host_name(header) for header in names} == names


async def test_a_form_or_text_that_a_page_could_send_unasked_is_no_request() -> None:
    async with gateway() as server:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            answer = await server.http.post(
                COMPLETIONS, content=b'{"prompt":"x"}', headers={"Content-Type": kind, "Origin": "https://evil.example"}
            )
            assert answer.status_code == 415


FETCHERS = {
    "aiohttp",
    "ftplib",
    "h2",
    "http.client",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "requests",
    "urllib",
    "urllib3",
}
ALLOWED = {"urllib.parse"}
DRIVERS = ("bench/", "transport/public_http.py")
"""Parts of client/ that call a server of the user's choice: never in the server's process."""


def test_nothing_in_the_servers_process_fetches_what_a_caller_names() -> None:
    found = []
    for file in CLIENT.rglob("*.py"):
        if str(file.relative_to(CLIENT)).startswith(DRIVERS):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if (name in FETCHERS or name.split(".")[0] in FETCHERS) and not name.startswith(tuple(ALLOWED)):
                    found.append(f"{file.relative_to(CLIENT)}: {name}")
            if isinstance(node, ast.Attribute) and node.attr in ("open_connection", "urlopen", "create_connection"):
                found.append(f"{file.relative_to(CLIENT)}:{node.lineno} {node.attr}")
    assert found == []
