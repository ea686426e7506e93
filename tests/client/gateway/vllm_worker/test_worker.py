"""The worker front as a router sees it."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from allspan.client.gateway.app import bind
from allspan.client.gateway.vllm_worker.sampling import sampling_fields
from allspan.protos import vllm_worker_pb2 as pb
from allspan.protos.api.errors import ConfigError, InvalidRequest, Unavailable
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.sampling import SamplingParams
from support.chat_tokenizer import EOS
from support.fake_engine import ANSWER, FakeEngine
from support.gateway import Gateway, eventually, fake_engine, gateway, gateway_config
from support.worker_client import SERVICE, WorkerClient, tokenized

HI = [72, 105]
OUTPUT = [*ANSWER.encode(), EOS]


@asynccontextmanager
async def worker(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[tuple[Gateway, WorkerClient]]:
    async with (
        gateway(engine, worker_port=0, **settings) as server,
        grpc.aio.insecure_channel(server.worker_address) as channel,
    ):
        yield server, WorkerClient(channel)


async def generated(client: WorkerClient, ids: list[int], **fields: Any) -> list[pb.GenerateResponse]:
    return [response async for response in client.Generate(tokenized(ids, **fields), timeout=10)]


async def test_chunks_bring_the_tokens_once_and_the_last_message_all_of_them() -> None:
    async with worker() as (server, client):
        *chunks, last = await generated(client, HI, stream=True, request_id="chatcmpl-1", logprobs=1, prompt_logprobs=1)
        assert server.engine.last.prompt == tuple(HI)
    assert [token for each in chunks for token in each.chunk.token_ids] == OUTPUT == list(last.complete.output_ids)
    assert {each.WhichOneof("response") for each in chunks} == {"chunk"}
    assert sum(each.chunk.completion_tokens for each in chunks) == len(OUTPUT) == last.complete.completion_tokens
    assert (last.complete.finish_reason, last.complete.prompt_tokens, last.complete.cached_tokens) == ("stop", 2, 2)
    assert last.complete.WhichOneof("matched_stop") is None
    first = chunks[0].chunk
    assert list(first.input_logprobs.token_ids) == HI
    assert [each.HasField("value") for each in first.input_logprobs.token_logprobs] == [False, True]
    assert not any(each.chunk.HasField("input_logprobs") for each in chunks[1:])
    assert list(first.output_logprobs.token_ids) == list(first.token_ids)
    assert list(first.output_logprobs.top_logprobs[0].token_ids) == [first.token_ids[0]]


async def test_an_answer_that_is_not_streamed_is_one_message_a_choice() -> None:
    async with worker() as (server, client):
        responses = await generated(client, HI, n=3, seed=7, logprobs=0)
        seeds = sorted(asked.params.seed or 0 for asked in server.engine.asked.values())
    assert sorted(each.complete.index for each in responses) == [0, 1, 2]
    assert all(list(each.complete.output_ids) == OUTPUT for each in responses)
    assert all(list(each.complete.output_logprobs.token_ids) == OUTPUT for each in responses)
    assert not responses[0].complete.output_logprobs.top_logprobs
    assert seeds == [7, 8, 9]


async def test_choices_are_streamed_side_by_side() -> None:
    async with worker(fake_engine(step_s=0.001)) as (_, client):
        order = [each.chunk.index for each in await generated(client, HI, n=2, stream=True) if each.HasField("chunk")]
    assert order != sorted(order)


async def test_ends_name_the_string_or_the_token_that_was_asked_for() -> None:
    async with worker() as (server, client):
        (by_text,) = await generated(client, HI, stop=["brown"])
        (by_id,) = await generated(client, HI, stop_token_ids=[ord("q")])
        (by_length,) = await generated(client, HI, max_tokens=3)
        (clamped,) = await generated(client, HI, max_tokens=100_000)
        assert server.engine.last.params.max_tokens == server.engine.max_model_len - len(HI)
    assert (by_text.complete.finish_reason, by_text.complete.matched_stop_str) == ("stop", "brown")
    assert bytes(by_text.complete.output_ids).endswith(b"brown")
    assert (by_id.complete.finish_reason, by_id.complete.matched_token_id) == ("stop", ord("q"))
    assert (by_length.complete.finish_reason, by_length.complete.completion_tokens) == ("length", 3)
    assert clamped.complete.finish_reason == "stop"


def test_zeros_of_proto3_mean_no_filter_and_numbers_are_as_written() -> None:
    assert SamplingParams(**sampling_fields(pb.SamplingParams(), 20)) == SamplingParams(max_tokens=20)
    given = pb.SamplingParams(
        temperature=0.7, top_p=0.95, top_k=2**32 - 1, min_p=0.05, repetition_penalty=1.1, frequency_penalty=-0.3,
        presence_penalty=0.1, max_tokens=9, min_tokens=2, stop=["x"], stop_token_ids=[3], ignore_eos=True, seed=-1,
        logprobs=2, prompt_logprobs=0, logit_bias={5: -1.3},
    )  # fmt: skip
    assert SamplingParams(**sampling_fields(given, 20)) == SamplingParams(
        temperature=0.7, top_p=0.95, top_k=2**31 - 1, min_p=0.05, repetition_penalty=1.1, frequency_penalty=-0.3,
        presence_penalty=0.1, max_tokens=9, min_tokens=2, stop=("x",), stop_token_ids=(3,), ignore_eos=True,
        logprobs=2, prompt_logprobs=0, logit_bias={5: -1.3},
    )  # fmt: skip
    assert sampling_fields(pb.SamplingParams(temperature=0.0, seed=3), 20)["temperature"] == 0.0
    assert sampling_fields(pb.SamplingParams(seed=-2), 20)["seed"] == 2**64 - 2


@pytest.mark.parametrize(
    ("constraint", "grammar"),
    [
        ({"json_schema": '{"type": "object"}'}, Grammar("json_schema", '{"type": "object"}')),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
        ({"json_object": True}, Grammar("json_object")),
        ({"json_object": False}, None),
        ({"choice": pb.ChoiceConstraint(choices=["é", "b"])}, Grammar("choice", '["é", "b"]')),
    ],
)
def test_constraints_become_grammars(constraint: dict[str, Any], grammar: Grammar | None) -> None:
    assert sampling_fields(pb.SamplingParams(**constraint), 20)["grammar"] == grammar


@pytest.mark.parametrize("constraint", [{"structural_tag": "{}"}, {"regex": ""}, {"choice": pb.ChoiceConstraint()}])
def test_a_constraint_that_cannot_be_followed_is_refused_by_name(constraint: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"sampling_params.{next(iter(constraint))}"):
        sampling_fields(pb.SamplingParams(**constraint), 20)


async def test_what_cannot_be_served_is_an_invalid_argument_that_names_the_field() -> None:
    tokens = pb.TokenizedInput(input_ids=HI)
    cases = [
        (pb.GenerateRequest(), "input is missing"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "tokenized.input_ids"),
        (pb.GenerateRequest(tokenized=tokens, mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (pb.GenerateRequest(tokenized=tokens, kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (pb.GenerateRequest(tokenized=tokens, data_parallel_rank=1), "data_parallel_rank is 1"),
        (tokenized(HI, logprobs=-1), "logprobs is -1"),
        (tokenized(HI, n=99), "n is 99"),
        (tokenized(HI, max_tokens=0), "max_tokens is 0"),
    ]
    async with worker() as (_, client):
        for request, words in cases:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.Generate(request, timeout=10).read()
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert words in (caught.value.details() or "")


async def test_an_abort_ends_the_request_and_so_does_a_broken_stream() -> None:
    async with worker(fake_engine(endless=True, step_s=0.002)) as (server, client):
        call = client.Generate(tokenized(HI, request_id="a", stream=True), timeout=10)
        stream = aiter(call)
        await anext(stream)
        await client.Abort(pb.AbortRequest(request_ids=["a", "unknown"]), timeout=10)
        *_, last = [each async for each in stream]
        assert last.complete.finish_reason == "abort"
        call = client.Generate(tokenized(HI, request_id="b", stream=True), timeout=10)
        await call.read()
        call.cancel()
        await eventually(lambda: not server.engine.running)


async def test_health_follows_the_engine_and_a_world_that_is_down_is_unavailable() -> None:
    async with worker() as (server, client):
        health = health_pb2_grpc.HealthStub(grpc.aio.insecure_channel(server.worker_address))  # type: ignore[no-untyped-call]
        for cause, status in (("", health_pb2.HealthCheckResponse.SERVING), ("rank 1 died", 2)):
            server.engine.down_cause = cause
            told = await client.HealthCheck(pb.HealthCheckRequest(), timeout=10)
            assert (told.healthy, cause in told.message) == (not cause, True)
            for service in ("", SERVICE):
                check = health_pb2.HealthCheckRequest(service=service)
                assert (await health.Check(check, timeout=10)).status == status
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generated(client, HI)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_model_server_and_load_are_described() -> None:
    async with worker(served_model_name=("shown",)) as (server, client):
        model = await client.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
        told = await client.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
        loads = await client.GetLoads(pb.GetLoadsRequest(include=["core"]), timeout=10)
        assert (model.served_model_name, model.max_context_length, model.is_generation) == ("shown", 256, True)
        assert (list(model.eos_token_ids), model.vocab_size) == ([EOS], server.engine.vocab_size)
    assert (told.server_type, told.block_size, told.data_parallel_size) == ("vllm-grpc", 16, 1)
    (load,) = loads.loads
    assert (load.dp_rank, load.num_running_reqs, load.max_total_num_tokens) == (0, 0, 64 * 16)
    assert (load.gen_throughput, round(load.cache_hit_rate, 2)) == (845.0, 0.63)


async def test_operations_need_the_admin_key_where_there_are_keys() -> None:
    admin = (("authorization", "Bearer the-admin-key"),)
    async with worker() as (server, client):
        assert (await client.FlushCache(pb.FlushCacheRequest(), timeout=10)).success
        assert (await client.StartProfile(pb.StartProfileRequest(), timeout=10)).success
        assert (await client.StopProfile(pb.StopProfileRequest(), timeout=10)).success
        done = [name for name, _ in server.engine.controls]
        assert done == ["reset_prefix_cache", "start_profile", "stop_profile"]
        with pytest.raises(grpc.aio.AioRpcError, match="num_steps is not supported"):
            await client.StartProfile(pb.StartProfileRequest(num_steps=3), timeout=10)
    async with worker(admin_api_key="the-admin-key") as (_, client):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.FlushCache(pb.FlushCacheRequest(), timeout=10)
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert (await client.FlushCache(pb.FlushCacheRequest(), metadata=admin, timeout=10)).success
    async with worker(api_key=("a-users-key",)) as (_, client):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generated(client, HI)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


class _Folder(FakeEngine):
    """A fake engine whose model lies in a folder."""

    folder: Path

    @property
    def cluster(self) -> Any:
        from dataclasses import replace

        return replace(super().cluster, model_path=str(self.folder))


async def test_the_tokenizer_is_a_zip_archive_whose_last_chunk_has_its_digest(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bytes(range(256)) * 2000)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_text("large")
    base = fake_engine()
    engine = _Folder(base.tokens, base.eos, base.vocab_size)
    engine.folder = tmp_path
    async with worker(engine) as (_, client):
        chunks = [each async for each in client.GetTokenizer(pb.GetTokenizerRequest(), timeout=10)]
        model = await client.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    data = b"".join(each.data for each in chunks)
    assert [bool(each.sha256) for each in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert sorted(archive.namelist()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert "<|assistant|>" in json.loads(archive.read("tokenizer_config.json"))["chat_template"]
    assert (model.model_type, list(model.architectures)) == ("llama", ["LlamaForCausalLM"])


async def test_reflection_shows_the_service_under_its_public_name() -> None:
    async with worker() as (server, _), grpc.aio.insecure_channel(server.worker_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
        ask = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, file = [each async for each in stub.ServerReflectionInfo(iter(ask), timeout=10)]
    assert SERVICE in [each.name for each in listed.list_services_response.service]
    (data,) = file.file_descriptor_response.file_descriptor_proto
    described = FileDescriptorProto.FromString(data)
    assert described.service[0].method[0].input_type == ".vllm.grpc.engine.GenerateRequest"


def test_the_port_is_refused_where_others_could_read_it_and_named_where_it_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"--host is '0\.0\.0\.0', must be a loopback"):
        bind(gateway_config(host="0.0.0.0", worker_port=0))
    first = bind(gateway_config(worker_port=0))
    try:
        port = int(first.worker_address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"port {port} \(--worker-port\)"):
            bind(gateway_config(worker_port=port))
    finally:
        first.close()


async def test_a_failed_engine_is_unavailable() -> None:
    async with worker(fake_engine(refusal=Unavailable("rank 1 died"))) as (_, client):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generated(client, HI)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
