"""Structured output as requests ask for it, over HTTP and gRPC: what reaches the engine, and what is refused, where."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from allspan.client.gateway.admission.grammar_check import GrammarCheck
from allspan.client.gateway.config import LimitsConfig
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import ConfigError, InvalidRequest
from allspan.protos.api.grammar import Grammar
from support.chat_tokenizer import VOCAB_SIZE, chat_tokenizer
from support.gateway import eventually, fake_engine, gateway, stub
from support.matching import schema

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
COMPACT = json.dumps(PERSON, separators=(",", ":"))
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def openai(of: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": of, **more}}}


ASKED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, Grammar("json_schema", COMPACT)),
    (openai(PERSON, strict=True), Grammar("json_schema", COMPACT)),
    (openai(PERSON, strict=False, description="d"), Grammar("json_schema", COMPACT)),
    (openai(PERSON), Grammar("json_schema", COMPACT)),
    ({"structured_outputs": {"json": PERSON}}, Grammar("json_schema", COMPACT)),
    ({"structured_outputs": {"json": COMPACT, "regex": None}}, Grammar("json_schema", COMPACT)),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": False}}, Grammar("json_object")),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["ja", "né"]}}, Grammar("choice", '["ja","né"]')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("grammar", 'root ::= "a"')),
    ({"guided_json": PERSON}, Grammar("json_schema", COMPACT)),
    ({"guided_json": COMPACT}, Grammar("json_schema", COMPACT)),
    ({"guided_regex": "(a+)+$"}, Grammar("regex", "(a+)+$")),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
    ({"guided_grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_way_to_ask_reaches_the_engine_as_a_grammar(path: str) -> None:
    async with gateway() as server:
        for fields, grammar in ASKED:
            prompt: dict[str, Any] = {"prompt": "x"} if path == "/v1/completions" else CHAT
            answer = await server.post(path, **prompt, **fields)
            assert answer.status_code == 200, answer.text
            assert server.engine.last.params.grammar == grammar, fields


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "response_format is 'json', must be an object"),
    ({"response_format": {}}, "response_format", "response_format.type is missing"),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format.type is 'xml', must be one of text"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing, must be an object"),
    (openai(None), "response_format", "response_format.json_schema.schema is missing, must be a JSON schema"),
    (openai([1]), "response_format", "response_format.json_schema.schema is [1], must be a JSON schema"),
    (openai({}, strict="yes"), "response_format", "response_format.json_schema.strict is 'yes', must be a boolean"),
    (openai({"type": "strin"}), "response_format", "Invalid type: strin"),
    (
        openai({"type": "object", "properties": {"a": {"not": {}}}}),
        "response_format",
        "$.properties.a.not: the keyword",
    ),
    (openai({"properties": {"b c": {"format": "iri"}}}), "response_format", "$.properties['b c'].format: the format"),
    (openai({"type": "string", "pattern": "("}), "response_format", "regex parse error"),
    (openai({"$ref": "#/$defs/a"}), "response_format", "'/$defs/a' does not exist"),
    (openai({"type": "integer", "minimum": 2, "maximum": 1}), "response_format", "minimum (2) is greater than"),
    ({"structured_outputs": {}}, "structured_outputs", "structured_outputs is empty, must have exactly one of json"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "has json and regex, must have exactly"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "structured_outputs.xml is not supported"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs", "is not supported"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs", "json_object is 1, must be true"),
    ({"guided_json": "{"}, "guided_json", "guided_json is no JSON"),
    ({"guided_json": "3"}, "guided_json", "must be a JSON object"),
    ({"guided_regex": ""}, "guided_regex", "guided_regex is '', must be a string that is not empty"),
    ({"guided_regex": "("}, "guided_regex", "guided_regex: grammar is no regex that can be followed"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"guided_regex": "(a)\\1"}, "guided_regex", "backreferences are not supported"),
    ({"guided_regex": "[^\\s\\S]"}, "guided_regex", "grammar is no regex that can be followed"),
    ({"guided_choice": []}, "guided_choice", "must be a list of at least one string"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "guided_choice[1] is 1, must be a non-empty string"),
    ({"guided_grammar": "start: ("}, "guided_grammar", "grammar is no grammar that can be followed"),
    ({"guided_grammar": "nothing"}, "guided_grammar", "no rule `start`"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json and guided_regex are given, at most one"),
    ({"guided_regex": "a", **openai({})}, "guided_regex", "response_format and guided_regex are given"),
]


async def test_what_cannot_be_followed_is_refused_by_field_keyword_and_path() -> None:
    async with gateway() as server:
        for fields, param, says in REFUSED:
            answer = await server.post("/v1/completions", prompt="x", **fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), fields
            assert says in error["message"], (fields, error["message"])
            assert "\n" not in error["message"]
            assert len(error["message"]) < 800
        assert not server.engine.asked


def structured(**kind: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(structured=pb.StructuredOutput(**kind))
    return pb.GenerateRequest(text="x", sampling=sampling)


async def test_grpc_asks_for_the_same() -> None:
    async with gateway() as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        for kind, grammar in (
            ({"json_object": True}, Grammar("json_object")),
            ({"json_object": False}, None),
            ({"json_schema": COMPACT}, Grammar("json_schema", COMPACT)),
            ({"regex": "a+"}, Grammar("regex", "a+")),
            ({"choice": pb.Texts(texts=["a", "b"])}, Grammar("choice", '["a","b"]')),
            ({"grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
        ):
            async for _ in stub(channel).Generate(structured(**kind)):
                pass
            assert server.engine.last.params.grammar == grammar
        count = len(server.engine.asked)
        for kind, says in (
            ({}, "sampling.structured is empty, must set one of"),
            ({"json_schema": ""}, "sampling.structured.json_schema"),
            ({"json_schema": "{"}, "sampling.structured.json_schema is no JSON"),
            ({"json_schema": '{"items": {"not": {}}}'}, "sampling.structured: $.items.not: the keyword 'not'"),
            ({"regex": "(?<=a)b"}, "sampling.structured: grammar is no regex"),
            ({"choice": pb.Texts()}, "sampling.structured.choice is []"),
            ({"grammar": "x"}, "sampling.structured: grammar is no grammar"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub(channel).Generate(structured(**kind)):
                    pass
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert says in str(caught.value.details())
        assert len(server.engine.asked) == count


DOUBLING = Grammar("grammar", "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "a"')
EXPLOSIVE: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {"enum": [f"v{i}" for i in range(10**6)]}}, "the body has 1000004 strings"),
    ({"guided_json": {"enum": [f"value {i}" for i in range(30_000)]}}, "more than 262144 characters"),
    ({"guided_regex": "|".join(f"w{i}" for i in range(100_000))}, "at most 262144"),
    ({"guided_regex": "a?" * 120_000}, "(--grammar-"),  # which of the two limits comes first is the machine's to say
    ({"guided_json": '{"items":' * 10_000 + "{}" + "}" * 10_000}, "guided_json"),
    ({"guided_grammar": DOUBLING.text}, ""),
    ({"guided_grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "too deeply nested"),
    ({"guided_regex": "(" * 50_000 + "a" + ")" * 50_000}, "guided_regex"),
]
HARMLESS: list[dict[str, Any]] = [
    {"guided_regex": "(a+)+$"},
    {"guided_regex": "(.{1,1000}){1,1000}"},
    {"guided_json": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}},
    {"guided_json": {"type": "string", "minLength": 10**9}},
    {"guided_json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}}, "$ref": "#/$defs/a"}},
]


async def test_explosive_grammars_fail_alone_while_others_stream_on() -> None:
    limits: dict[str, Any] = {"max_grammar_bytes": 262144, "grammar_timeout": 1.5}
    bodies = [json.dumps({"prompt": "x", **fields}) for fields, _ in EXPLOSIVE]
    engine = fake_engine(endless=True, step_s=0.005, max_model_len=100_000)
    async with gateway(engine, **limits) as server:
        gaps: list[float] = []

        async def watch() -> None:
            body = {"prompt": "x", "stream": True, "max_tokens": 90_000}
            async with server.http.stream("POST", "/v1/completions", json=body) as answer:
                last = time.monotonic()
                async for _ in answer.aiter_lines():
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()

        watching = asyncio.create_task(watch())
        await eventually(lambda: len(gaps) > 20)
        head = {"Content-Type": "application/json"}
        for (fields, says), body in zip(EXPLOSIVE, bodies, strict=True):
            gaps.clear()
            answer = await server.http.post("/v1/completions", content=body, headers=head, timeout=60)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) in ((400, next(iter(fields))), (400, None)), answer.text[:300]
            assert says in error["message"], error["message"]
            # Refusing a body of 11 MB takes the loop some 0.2 s; compiling for 1.5 s takes it nothing.
            assert max(gaps, default=0) < 1.2, f"nothing was streamed for {max(gaps):.2f} s"
        watching.cancel()
        for fields in HARMLESS:
            answer = await server.post("/v1/completions", prompt="x", max_tokens=1, **fields)
            assert answer.status_code == 200, answer.text


async def checked(limits: LimitsConfig, *grammars: Grammar) -> list[str]:
    """The refusals, "" for none."""
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, limits)
    found = []
    try:
        for grammar in grammars:
            try:
                await check.check(grammar, "field")
                found.append("")
            except InvalidRequest as error:
                found.append(error.message)
    finally:
        await check.close()
    return found


async def test_memory_has_a_limit() -> None:
    light = Grammar("regex", "a")
    found = await checked(LimitsConfig(grammar_memory_bytes=2**24), light, DOUBLING, light)
    assert "takes more than 16777216 bytes (--grammar-memory-bytes)" in found.pop(1)
    assert found == ["", ""]  # also after the child that died of it
    (found_with_room,) = await checked(LimitsConfig(), DOUBLING)
    assert "too big" in found_with_room  # the library's own limit


async def test_texts_have_a_limit_in_bytes() -> None:
    found = await checked(LimitsConfig(max_grammar_bytes=10), Grammar("regex", "é" * 6), Grammar("regex", "é" * 5))
    assert found == ["field: the regex has 12 bytes, at most 10", ""]


async def test_special_tokens_of_the_model_may_stand_in_a_grammar() -> None:
    tokenizer = chat_tokenizer()
    name = tokenizer.codec.piece(min(tokenizer.special_ids)).decode()
    limits = LimitsConfig()
    good, bad = await checked(
        limits, Grammar("grammar", f'start: "a" {name}'), Grammar("grammar", 'start: "a" <|nobody|>')
    )
    assert good == ""
    assert "unknown special token" in bad


async def test_a_second_request_for_the_same_grammar_asks_nobody() -> None:
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, LimitsConfig())
    try:
        with pytest.raises(InvalidRequest, match="followed"):
            await check.check(Grammar("regex", "("), "f")
        await check.check(Grammar("regex", "a"), "f")
        with patch.object(check._children, "ask", side_effect=AssertionError("a child is asked")):
            for _ in range(3):
                await check.check(Grammar("regex", "a"), "f")
    finally:
        await check.close()
    with pytest.raises(InvalidRequest, match=r"g: .*followed"):  # also with no child left
        await check.check(Grammar("regex", "("), "g")


async def test_whoever_leaves_while_a_grammar_is_compiled_takes_nobody_along() -> None:
    check = GrammarCheck(chat_tokenizer(), VOCAB_SIZE, LimitsConfig(max_grammar_bytes=262144))
    try:
        grammar = schema({"enum": [f"v{i}" for i in range(5_000)]})
        leaving = asyncio.create_task(check.check(grammar, "f"))
        staying = asyncio.create_task(check.check(grammar, "f"))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await staying
        assert leaving.cancelled()
    finally:
        await check.close()


@pytest.mark.parametrize(
    ("flag", "value"), [("max_grammar_bytes", 262145), ("grammar_timeout", 0.0), ("grammar_memory_bytes", 1)]
)
def test_limits_have_ranges(flag: str, value: float) -> None:
    with pytest.raises(ConfigError, match=flag.replace("_", "-")):
        LimitsConfig(**{flag: value})  # type: ignore[arg-type]
