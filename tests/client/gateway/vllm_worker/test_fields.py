"""Each field of the contract's sampling parameters at the engine, or in the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest

from allspan.protos import vllm_worker_pb2 as pb
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.sampling import SamplingParams
from support.gateway import fake_engine, gateway
from support.worker_client import WorkerClient, tokenized

HI = [72, 105]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0.7, {"temperature": 0.7}),
    "top_p": (0.9, {"top_p": 0.9}),
    "top_k": (40, {"top_k": 40}),
    "min_p": (0.05, {"min_p": 0.05}),
    "frequency_penalty": (0.3, {"frequency_penalty": 0.3}),
    "presence_penalty": (-0.4, {"presence_penalty": -0.4}),
    "repetition_penalty": (1.2, {"repetition_penalty": 1.2}),
    "max_tokens": (5, {"max_tokens": 5}),
    "min_tokens": (3, {"min_tokens": 3}),
    "stop": (["quick"], {"stop": ("quick",)}),
    "stop_token_ids": ([33], {"stop_token_ids": (33,)}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "logprobs": (2, {"logprobs": 2}),
    "prompt_logprobs": (1, {"prompt_logprobs": 1}),
    "seed": (11, {"seed": 11}),
    "logit_bias": ({65: -1.5, 66: 2.0}, {"logit_bias": {65: -1.5, 66: 2.0}}),
    "json_schema": ('{"type": "object"}', {"grammar": Grammar("json_schema", '{"type": "object"}')}),
    "regex": ("a+", {"grammar": Grammar("regex", "a+")}),
    "grammar": ('start: "a"', {"grammar": Grammar("grammar", 'start: "a"')}),
    "json_object": (True, {"grammar": Grammar("json_object")}),
    "choice": (pb.ChoiceConstraint(choices=["a", "b"]), {"grammar": Grammar("choice", '["a", "b"]')}),
    # of the text, which the router makes, and of where a grammar begins, which is always the first token here
    "skip_special_tokens": (True, {}),
    "spaces_between_special_tokens": (True, {}),
    "grammar_from_first_token": (True, {}),
}
ELSEWHERE = {"n", "include_stop_str_in_output", "truncate_prompt_tokens", "structural_tag"}
"""Fields of the tests below."""


def test_every_field_of_the_contract_has_a_test() -> None:
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == set(CASES) | ELSEWHERE


async def test_each_field_reaches_the_engine_and_changes_no_other() -> None:
    async with (
        gateway(fake_engine(), worker_port=0) as server,
        grpc.aio.insecure_channel(server.worker_address) as channel,
    ):
        client = WorkerClient(channel)

        async def asked(**fields: Any) -> SamplingParams:
            await client.Generate(tokenized(HI, **fields), timeout=10).read()
            return server.engine.last.params

        plain = await asked()
        for name, (value, changes) in CASES.items():
            assert await asked(**{name: value}) == replace(plain, **changes), name
        assert (await asked(n=2, seed=3)).seed in (3, 4)
        assert len(server.engine.asked) == 1 + len(CASES) + 2


@pytest.mark.parametrize("kept", [True, False])
async def test_the_tokens_of_the_stop_string_are_sent_as_the_router_cuts_the_text(kept: bool) -> None:
    async with (
        gateway(worker_port=0) as server,
        grpc.aio.insecure_channel(server.worker_address) as channel,
    ):
        request = tokenized(HI, stop=["quick"], include_stop_str_in_output=kept)
        answer = await WorkerClient(channel).Generate(request, timeout=10).read()
    assert bytes(answer.complete.output_ids).endswith(b"quick")
    assert answer.complete.matched_stop_str == "quick"


async def test_a_prompt_is_cut_to_its_last_tokens_and_a_structural_tag_is_refused() -> None:
    async with (
        gateway(worker_port=0) as server,
        grpc.aio.insecure_channel(server.worker_address) as channel,
    ):
        client = WorkerClient(channel)
        await client.Generate(tokenized([1, 2, *HI], truncate_prompt_tokens=2), timeout=10).read()
        assert server.engine.last.prompt == tuple(HI)
        await client.Generate(tokenized([1, 2, *HI], truncate_prompt_tokens=-1), timeout=10).read()
        assert server.engine.last.prompt == (1, 2, *HI)
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling_params\.structural_tag is not supported"):
            await client.Generate(tokenized(HI, structural_tag="{}"), timeout=10).read()
