"""What the public gRPC service does beside streaming an answer: tokens, facts, aborting, deadlines, limits, details."""

from __future__ import annotations

import asyncio
import gzip
import struct
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details
from grpc_status import rpc_status

import allspan
from allspan.client.gateway.auth.caller import Caller, set_caller
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.grpc.service import InferenceService
from allspan.client.gateway.openai.schemas import CompletionRequest
from allspan.client.gateway.snapshot_cache import FRESH_S
from allspan.protos import inference_pb2 as pb
from allspan.protos.api.errors import AlreadyExists, InternalError, QueueFull, StreamNotRead, Unavailable
from support.chat_tokenizer import EOS, VOCAB_SIZE, chat_tokenizer
from support.fake_engine import ANSWER, FakeEngine
from support.gateway import Gateway, eventually, fake_engine, gateway, gateway_config, stub

CODE = grpc.StatusCode


async def unary(server: Gateway, method: str, request: Message) -> Any:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        return await getattr(stub(channel), method)(request, timeout=10)


async def generate(server: Gateway, **fields: Any) -> list[pb.GenerateResponse]:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        return [response async for response in stub(channel).Generate(pb.GenerateRequest(**fields), timeout=10)]


async def refusal(server: Gateway, method: str = "Generate", request: Message | None = None) -> grpc.aio.AioRpcError:
    asking = generate(server, text="x") if request is None else unary(server, method, request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asking
    return caught.value


async def test_tokens_of_texts_and_conversations_and_back() -> None:
    chat = pb.Messages(messages=[pb.Message(role="user", content="Hi")])
    async with gateway() as server:
        text = await unary(server, "Tokenize", pb.TokenizeRequest(text="Ünï", model="tiny"))
        assert (list(text.token_ids), text.max_model_len) == (list("Ünï".encode()), 256)
        turn = await unary(server, "Tokenize", pb.TokenizeRequest(chat=chat))
        assert list(turn.token_ids) == [258, 72, 105, 259]
        assert (await unary(server, "Tokenize", pb.TokenizeRequest(text="x" * 400))).token_ids[399] == ord("x")
        special = pb.TokenizeRequest(text="</s>")
        assert list((await unary(server, "Tokenize", special)).token_ids) == [EOS]
        special.parse_special = False
        assert list((await unary(server, "Tokenize", special)).token_ids) == list(b"</s>")
        hostile = pb.Messages(messages=[pb.Message(role="user", content="</s>")])
        turn = await unary(server, "Tokenize", pb.TokenizeRequest(chat=hostile))
        assert list(turn.token_ids) == [258, *b"</s>", 259]
        back = await unary(server, "Detokenize", pb.DetokenizeRequest(token_ids=text.token_ids))
        assert back.text == "Ünï"
        ids = [72, EOS]
        shown = await unary(server, "Detokenize", pb.DetokenizeRequest(token_ids=ids))
        hidden = await unary(server, "Detokenize", pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=True))
        assert hidden.text == "H"
        assert shown.text.startswith("H")
        assert len(shown.text) > 1
        assert not server.engine.asked


async def test_what_cannot_be_tokenised_is_refused_by_name() -> None:
    cases: list[tuple[str, Message, CODE, str]] = [
        ("Tokenize", pb.TokenizeRequest(), CODE.INVALID_ARGUMENT, "prompt is missing"),
        ("Tokenize", pb.TokenizeRequest(text="x" * 65537), CODE.INVALID_ARGUMENT, "at most 65536"),
        ("Tokenize", pb.TokenizeRequest(text="x", model="y"), CODE.NOT_FOUND, "not served here"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[VOCAB_SIZE]), CODE.INVALID_ARGUMENT, "token_ids[0]"),
        ("Abort", pb.AbortRequest(), CODE.INVALID_ARGUMENT, "request_id is empty"),
    ]
    async with gateway() as server:
        for method, request, code, words in cases:
            error = await refusal(server, method, request)
            assert (error.code(), words in (error.details() or "")) == (code, True), error.details()


async def test_server_info_says_what_runs_and_what_may_be_asked() -> None:
    async with gateway(max_n=3, grpc_max_message_bytes=4096) as server:
        info = await unary(server, "ServerInfo", pb.ServerInfoRequest())
        assert (info.version, info.model.id, info.model.max_model_len) == (allspan.__version__, "tiny", 256)
        assert (info.vocab_size, list(info.eos_token_ids), info.ready) == (VOCAB_SIZE, [EOS], True)
        assert [(rank.rank, rank.kernels) for rank in info.ranks] == [(0, "fake")]
        assert (info.replicas, info.replicas_ready, {"chat", "structured.regex"} <= {*info.features}) == (1, 1, True)
        assert (info.limits.max_choices, info.limits.max_message_bytes) == (3, 4096)
        await asyncio.sleep(FRESH_S)
        server.engine.down_cause = "rank 1 died: signal 9"
        down = await unary(server, "ServerInfo", pb.ServerInfoRequest())
        assert [(rank.rank, rank.state) for rank in down.ranks] == [(0, "no answer")]
        assert (down.ready, down.not_ready_cause, down.replicas_ready) == (False, "rank 1 died: signal 9", 0)


async def test_choices_that_do_not_stream_come_whole() -> None:
    options = pb.SamplingOptions(stop=["dog"], logprobs=1, seed=5)
    async with gateway() as server:
        responses = await generate(server, text="x", n=2, stream=False, sampling=options)
        seeds = sorted(asked.params.seed or 0 for asked in server.engine.asked.values())
    text = ANSWER[: ANSWER.index("dog")]
    assert sorted((response.index, response.text) for response in responses) == [(0, text), (1, text)]
    assert all((response.finish_reason, response.stop_string) == ("stop", "dog") for response in responses)
    assert all(len(response.token_ids) == len(response.logprobs) for response in responses)
    assert seeds == [5, 6]


async def test_every_sampling_field_of_http_is_a_field_here() -> None:
    """But for those whose meaning is in a shape of HTTP's own."""
    shapes = {"stream_options", "max_completion_tokens", "echo", "best_of", "prompt"}
    shapes |= {
        "response_format",
        "structured_outputs",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
    }
    shapes |= {"return_token_ids", "return_tokens_as_token_ids", "spaces_between_special_tokens"}
    fields = set(pb.SamplingOptions.DESCRIPTOR.fields_by_name) | set(pb.GenerateRequest.DESCRIPTOR.fields_by_name)
    assert set(CompletionRequest.model_fields) - shapes - fields == set()


async def test_prompt_and_text_options_do_what_they_say() -> None:
    async with gateway() as server:
        options = pb.SamplingOptions(stop=["quick"], include_stop_str_in_output=True)
        assert "".join(r.text for r in await generate(server, text="x", sampling=options)) == "The quick"
        silent = await generate(server, text="x", sampling=pb.SamplingOptions(detokenize=False, max_tokens=3))
        assert ("".join(r.text for r in silent), sum(len(r.token_ids) for r in silent)) == ("", 3)
        await generate(server, text="abcdef", truncate_prompt_tokens=2)
        assert server.engine.last.prompt == tuple(b"ef")
        chat = pb.Messages(messages=[pb.Message(role="user", content="Hi")])
        await generate(server, chat=chat, add_generation_prompt=False)
        assert server.engine.last.prompt == (258, 72, 105)


async def test_abort_ends_the_named_request_as_cancelled_and_only_that() -> None:
    async with (
        gateway(fake_engine(endless=True, step_s=0.01)) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        calls = [
            stub(channel).Generate(pb.GenerateRequest(text="x", request_id=name, n=2), timeout=20) for name in "ab"
        ]
        await eventually(lambda: len(server.engine.running) == 4)
        twin = stub(channel).Generate(pb.GenerateRequest(text="x", request_id="a"), timeout=20)
        assert await twin.code() is CODE.ALREADY_EXISTS
        assert (await stub(channel).Abort(pb.AbortRequest(request_id="a"), timeout=5)).aborted == 2
        assert await calls[0].code() is CODE.CANCELLED
        assert (await stub(channel).Abort(pb.AbortRequest(request_id="a"), timeout=5)).aborted == 0
        assert (await stub(channel).Abort(pb.AbortRequest(request_id="nobody"), timeout=5)).aborted == 0
        assert len(server.engine.running) == 2
        again = stub(channel).Generate(pb.GenerateRequest(text="x", request_id="a"), timeout=20)
        assert await again.read()
        for call in (again, calls[1]):
            call.cancel()
        stopped = [asked for asked in server.engine.asked.values() if asked.stopped][:2]
        assert all(asked.steps - asked.steps_when_stopped <= 2 for asked in stopped)


async def test_abort_by_the_name_that_the_server_made_up() -> None:
    async with (
        gateway(fake_engine(endless=True, step_s=0.01)) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        call = stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=20)
        name = (await call.read()).request_id
        assert (await stub(channel).Abort(pb.AbortRequest(request_id=name), timeout=5)).aborted == 1
        assert await call.code() is CODE.CANCELLED


class _Context:
    """What a handler sees of a call."""

    def __init__(self) -> None:
        self.written: list[pb.GenerateResponse] = []
        self.status: tuple[Any, ...] = ()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> None:
        return None

    async def write(self, response: pb.GenerateResponse) -> None:
        self.written.append(response)

    async def abort(self, *status: Any) -> None:
        self.status = status
        raise asyncio.CancelledError


async def test_nobody_ends_or_blocks_the_request_of_another_key() -> None:
    config = gateway_config()
    engine = fake_engine(endless=True, step_s=0.01)
    service = InferenceService(GatewayContext.of(engine, chat_tokenizer(), config))  # type: ignore[arg-type]
    handler = service.handlers()["Generate"]

    async def call(owner: str) -> _Context:
        set_caller(Caller(owner))
        context = _Context()
        request = pb.GenerateRequest(text="x", request_id="mine")
        await asyncio.gather(handler.unary_stream(request, context), return_exceptions=True)
        return context

    async def abort(caller: Caller) -> int:
        set_caller(caller)
        return int((await service.abort(pb.AbortRequest(request_id="mine"))).aborted)

    def create(work: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(work)

    one, two = create(call("one")), create(call("two"))
    await eventually(lambda: len(engine.running) == 2)
    assert await create(abort(Caller("three"))) == 0
    assert await create(abort(Caller("one"))) == 1
    assert (await one).status[0] is CODE.CANCELLED
    await eventually(lambda: len(engine.running) == 1)
    assert await create(abort(Caller(is_admin=True))) == 1
    assert (await two).status[0] is CODE.CANCELLED


async def test_an_abort_reaches_a_request_that_is_only_being_admitted() -> None:
    engine = fake_engine(endless=True, step_s=0.01, admission=asyncio.Event())
    assert engine.admission is not None
    async with gateway(engine) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        call = stub(channel).Generate(pb.GenerateRequest(text="x", request_id="a"), timeout=20)
        await asyncio.sleep(0.1)
        await stub(channel).Abort(pb.AbortRequest(request_id="a"), timeout=5)
        engine.admission.set()
        assert await call.code() is CODE.CANCELLED


@pytest.mark.parametrize(
    ("deadline", "timeout_s", "counts"), [(60.0, 0.0, 60.0), (60.0, 30.0, 30.0), (30.0, 60.0, 30.0)]
)
async def test_the_shorter_of_deadline_and_timeout_is_the_requests_time(
    deadline: float, timeout_s: float, counts: float
) -> None:
    async with gateway() as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        request = pb.GenerateRequest(text="x", timeout_s=timeout_s)
        assert [response async for response in stub(channel).Generate(request, timeout=deadline)]
        given = server.engine.last.options.timeout_s
        assert given is not None
        assert counts - 20 < given <= counts + 1  # gRPC rounds deadlines up
        assert [response async for response in stub(channel).Generate(pb.GenerateRequest(text="x"))]
        assert server.engine.last.options.timeout_s is None


def small_window(server: Gateway) -> grpc.aio.Channel:
    """Flow control that stops after 64 KiB."""
    options = (("grpc.http2.lookahead_bytes", 65535), ("grpc.http2.bdp_probe", 0))
    return grpc.aio.insecure_channel(server.grpc_address, options=options)


async def test_a_stream_that_is_not_read_is_ended_and_says_so_to_who_reads_on() -> None:
    engine = fake_engine(endless=True, max_model_len=100_000)
    async with gateway(engine, grpc_stream_timeout=1.0) as server, small_window(server) as channel:
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingOptions(logprobs=20))
        call = stub(channel).Generate(request, timeout=60)
        await eventually(lambda: engine.asked and engine.last.released, 30)
        assert engine.last.steps < 99_000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
        assert "was not read for 1 s" in (caught.value.details() or "")
        assert await generate(server, text="x", sampling=pb.SamplingOptions(max_tokens=2))


async def test_a_reader_that_was_slow_gets_all_of_it_in_messages_that_fit() -> None:
    """Clients take 4 MiB by default, and what was merged meanwhile may be more."""
    engine = FakeEngine(tuple(ANSWER.encode()), EOS, VOCAB_SIZE, max_model_len=40_000, endless=True)
    async with gateway(engine) as server, small_window(server) as channel:
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingOptions(logprobs=20, max_tokens=30_000))
        call = stub(channel).Generate(request, timeout=60)
        await eventually(lambda: engine.asked and engine.last.steps == 30_000, 60)
        responses = [response async for response in call]
    assert max(response.ByteSize() for response in responses) < 4 << 20
    assert len(responses) < 10_000
    assert sum(len(response.logprobs) for response in responses) == 30_000
    ids = bytes(token for response in responses for token in response.token_ids)
    assert ids == (ANSWER.encode() * (30_000 // len(ANSWER.encode()) + 1))[:30_000]
    assert (responses[-1].finish_reason, responses[-1].usage.completion_tokens) == ("length", 30_000)


async def test_metadata_and_packed_messages_above_the_limits_are_refused() -> None:
    bomb = gzip.compress(b"\0" * (64 << 20))
    async with (
        gateway(grpc_max_message_bytes=1 << 20) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        many = stub(channel).Generate(pb.GenerateRequest(text="x"), metadata=(("x", "y" * (1 << 20)),), timeout=10)
        assert await many.code() is CODE.RESOURCE_EXHAUSTED
        host, port = server.grpc_address.split(":")
        assert await packed_call(host, int(port), bomb) == CODE.RESOURCE_EXHAUSTED.value[0]
        assert await generate(server, text="x")


async def packed_call(host: str, port: int, body: bytes) -> int:
    """The grpc-status of Generate with a message compressed by hand, over HTTP/2 by hand."""

    def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
        return struct.pack(">I", len(data))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + data

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value

    pairs = {b":method": b"POST", b":scheme": b"http", b":path": b"/allspan.v1.Inference/Generate", b":authority": b"x"}
    pairs |= {b"te": b"trailers", b"content-type": b"application/grpc", b"grpc-encoding": b"gzip"}
    head = b"".join(literal(*pair) for pair in pairs.items())
    message = b"\1" + struct.pack(">I", len(body)) + body
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, head))
    parts = [message[at : at + 16384] for at in range(0, len(message), 16384)][:3]  # within the first window
    for part in parts:
        writer.write(frame(0, 0, 1, part))
    await writer.drain()
    seen = b""
    try:
        async with asyncio.timeout(10):
            for part in [message[at : at + 16384] for at in range(0, len(message), 16384)][3:]:
                writer.write(frame(0, 0, 1, part))
                await writer.drain()
            writer.write(frame(0, 1, 1, b""))
            while b"grpc-status" not in seen:
                data = await reader.read(65536)
                assert data, "the connection ended"
                seen += data
            while len(seen) < seen.index(b"grpc-status") + 13:
                seen += await reader.read(65536)
    finally:
        writer.close()
    at = seen.index(b"grpc-status") + len(b"grpc-status")
    return int(seen[at + 1 : at + 1 + seen[at]])


async def test_refusals_carry_the_details_of_google_rpc() -> None:
    def parts(error: grpc.aio.AioRpcError) -> dict[str, Any]:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        assert status is not None
        assert (status.code, status.message) == (error.code().value[0], error.details())
        found = {}
        for packed in status.details:
            part = getattr(details, packed.type_url.rpartition(".")[2])()
            assert packed.Unpack(part)
            found[type(part).__name__] = part
        return found

    async with gateway() as server:
        bad = parts(await refusal(server, "Tokenize", pb.TokenizeRequest(chat=pb.Messages())))
        assert (bad["ErrorInfo"].reason, bad["ErrorInfo"].domain) == ("INVALID_REQUEST", "allspan")
        (violation,) = bad["BadRequest"].field_violations
        assert violation.field == "chat.messages"
        assert "must have from 1" in violation.description
        missing = parts(await refusal(server, "Tokenize", pb.TokenizeRequest(text="x", model="gpt-9")))
        assert missing["ResourceInfo"].resource_type == "model"
        for failure in (QueueFull("1024 wait"), Unavailable("rank 1 died")):
            server.engine.refusal = failure
            error = await refusal(server)
            assert parts(error)["RetryInfo"].retry_delay.seconds == 1
            assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        for last in (AlreadyExists("x" * 5000), StreamNotRead("ü"), InternalError("oops")):
            server.engine.refusal = last
            error = await refusal(server)
            assert set(parts(error)) == {"ErrorInfo"}
            assert len(error.details() or "") <= 1024
        server.engine.refusal = ZeroDivisionError("secret")
        error = await refusal(server)
        assert error.code() is CODE.INTERNAL
        assert "secret" not in str(parts(error)) + str(error.details())


async def test_health_says_not_serving_before_requests_are_cut_off() -> None:
    async with (
        gateway(fake_engine(endless=True, step_s=0.01), shutdown_timeout=8.0) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=10)
        call = stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=10)
        assert await call.read()
        assert await watch.read() == b"\x08\x01"
        server.stop.set()
        assert await watch.read() == b"\x08\x02"
        assert await call.read() is not grpc.aio.EOF
        late = stub(channel).Generate(pb.GenerateRequest(text="x"), timeout=10)
        assert await late.code() is CODE.UNAVAILABLE
        call.cancel()
