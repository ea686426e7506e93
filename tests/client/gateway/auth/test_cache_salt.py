"""Callers with different keys share no cached prefix: `cached_tokens` would tell how another's prompts begin."""

from __future__ import annotations

import hashlib

import grpc
import pytest

from allspan.client.gateway.auth.caller import ANYONE, set_caller
from allspan.client.gateway.auth.keys import Keys
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos import inference_pb2 as pb
from support.gateway import Gateway, gateway, stub

KEY, OTHER, ADMIN = "sk-first-0123456789abcdef", "sk-second-0123456789abcdef", "sk-admin-0123456789abcdef"
ENDPOINTS = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 1},
}


async def salt(server: Gateway, key: str, endpoint: str = "/v1/completions", **fields: object) -> str:
    """Returns the salt that the engine is given for a request with this key."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = await server.http.post(endpoint, json=ENDPOINTS[endpoint] | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return server.engine.last.options.cache_salt


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_every_key_has_a_salt_of_its_own(endpoint: str) -> None:
    async with gateway(api_key=(KEY, OTHER), admin_api_key=ADMIN) as server:
        salts = [await salt(server, key, endpoint) for key in (KEY, OTHER, ADMIN)]
        assert len(set(salts)) == 3
        assert "" not in salts
        assert await salt(server, KEY, endpoint) == salts[0]


async def test_grpc_calls_have_the_salt_of_their_key_too() -> None:
    async with (
        gateway(api_key=(KEY, OTHER)) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        wanted = await salt(server, KEY)
        request = pb.GenerateRequest(text="hello", sampling=pb.SamplingOptions(max_tokens=1))
        call = stub(channel).Generate(request, metadata=(("x-api-key", KEY),), timeout=10)
        assert [response async for response in call]
        assert server.engine.last.options.cache_salt == wanted


async def test_a_salt_that_is_asked_for_separates_the_requests_of_one_key() -> None:
    async with gateway(api_key=(KEY, OTHER)) as server:
        mine = await salt(server, KEY, cache_salt="tenant")
        assert mine != await salt(server, KEY)
        assert mine == await salt(server, KEY, cache_salt="tenant")
        assert mine != await salt(server, OTHER, cache_salt="tenant")


async def test_no_salt_that_a_caller_can_ask_for_is_another_key_s() -> None:
    async with gateway(api_key=(KEY, OTHER)) as server:
        others = await salt(server, OTHER)
        assert await salt(server, KEY, cache_salt=others) != others


@pytest.mark.parametrize(
    "options", [{"api_key": (KEY, OTHER), "share_prefix_cache": True}, {}], ids=["asked", "no keys"]
)
async def test_salts_are_as_asked_for_where_sharing_is_wanted_or_nobody_has_a_key(options: dict[str, object]) -> None:
    async with gateway(**options) as server:
        assert await salt(server, KEY) == await salt(server, OTHER) == ""
        assert await salt(server, OTHER, cache_salt="tenant") == "tenant"


@pytest.mark.parametrize("owner", ["admin", "key-1234abcd"])
async def test_a_caller_without_a_key_can_ask_for_no_key_s_salt(owner: str) -> None:
    """Names of keys stand in logs: no salt is made of them."""
    guesses = [hashlib.sha256(f"{owner}{between}".encode()).hexdigest() for between in ("", "\0", "cache")]
    async with gateway(admin_api_key=ADMIN) as server:
        wanted = await salt(server, ADMIN)
        for guess in guesses:
            assert await salt(server, "", cache_salt=guess) == guess != wanted


def test_neither_a_caller_nor_its_origin_shows_the_secret_of_its_key() -> None:
    caller = Keys({KEY: "first"}).caller(KEY)
    set_caller(caller)
    origin = Origin("GET /")
    set_caller(ANYONE)
    assert caller.cache_key == origin.cache_key != Keys({OTHER: "first"}).caller(OTHER).cache_key
    assert KEY.encode() not in caller.cache_key
    assert repr(caller.cache_key) not in f"{caller!r}{origin!r}"
