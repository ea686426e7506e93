"""HEAD, and paths without the version."""

from __future__ import annotations

import pytest

from support.gateway import gateway

KEY = "sk-first-0123456789abcdef"


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/v1/models", "/metrics"])
async def test_head_has_the_headers_of_get_and_no_body(path: str) -> None:
    async with gateway() as server:
        got, head = await server.http.get(path), await server.http.head(path)
        assert head.status_code == got.status_code == 200
        assert head.headers["content-type"] == got.headers["content-type"]
        assert int(head.headers["content-length"]) > 0
        assert head.content == b""


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/v1/models", 401), ("/nothing", 401)])
async def test_head_needs_the_key_that_get_needs(path: str, status: int) -> None:
    async with gateway(api_key=(KEY,)) as server:
        assert (await server.http.head(path)).status_code == status


async def test_head_of_what_takes_no_get_is_refused() -> None:
    async with gateway() as server:
        assert (await server.http.head("/v1/completions")).status_code == 405


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/models", "/responses"])
async def test_a_base_url_without_the_version_is_told_so(path: str) -> None:
    async with gateway() as server:
        answer = await server.http.post(path, json={})
        assert answer.status_code == 404
        assert f"it is /v1{path}: the client's base URL must end in /v1" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/v1/messages", "it is /v1/messages: the client's base URL must not contain /v1"),
        ("/v1/api/chat", "it is /api/chat: the client's base URL must not contain /v1"),
        ("/api/v1/chat/completions", "it is /v1/chat/completions: the client's base URL must not contain /api"),
        ("/v1/chat/completions/chat/completions", "it is /v1/chat/completions: the client's base URL must end in /v1"),
    ],
)
async def test_a_base_url_with_too_much_is_told_so(path: str, hint: str) -> None:
    async with gateway() as server:
        assert hint in str((await server.http.post(path, json={})).json()["error"])


async def test_a_path_that_no_version_has_gets_no_hint() -> None:
    async with gateway() as server:
        assert (await server.http.get("/nothing")).json()["error"]["message"] == "GET /nothing: no such endpoint"
