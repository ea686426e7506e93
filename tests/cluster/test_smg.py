"""The router SMG in front of a served cluster: the same tokens as without it, and a worker that dies and comes back."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from allspan.protos import vllm_worker_pb2 as pb
from support.serving import Served, runtime_folder
from support.smg import free_port, smg
from support.waiting import wait_until
from support.worker_client import SERVICE

pytestmark = pytest.mark.timeout(600)

MODEL = "tiny"
BODIES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 5},
    {"temperature": 0.8, "seed": 7, "n": 2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 0, "repetition_penalty": 1.2, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0, "stop": ["the"]},
    {"temperature": 0, "min_tokens": 4, "ignore_eos": True},
    {"temperature": 0, "response_format": {"type": "json_object"}},
    {"temperature": 0, "regex": "[a-z ]{3,9}", "guided_regex": "[a-z ]{3,9}"},  # the router's name and ours
]


@dataclass
class Pair:
    """A server, the router in front of it, and how to start the server again at the same address."""

    served: Served
    router: str
    words: list[str]
    metrics: int
    """The port of the router's own metrics."""


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    port = free_port()
    words = ["--ranks=1", "--threads=1", "--max-model-len=512", f"--served-model-name={MODEL}", f"--worker-port={port}"]
    words += ["--generation-config=neutral"]
    with runtime_folder() as runtime:
        served = Served(model, *words, runtime=runtime)
        made = Pair(served, "", words, free_port())
        try:
            served.wait_ready()
            with smg(f"127.0.0.1:{port}", tmp_path_factory.mktemp("smg") / "log", made.metrics) as url:
                made.router = url
                yield made
        finally:
            made.served.kill()


def body(question: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 12, **fields}


def answered(url: str, request: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Text, end and log-probabilities of each choice, and the usage."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=60)
    assert answer.status_code == 200, answer.text
    return choices_of(answer.json())


def choices_of(told: dict[str, Any]) -> list[tuple[Any, ...]]:
    choices = sorted(told["choices"], key=lambda choice: choice["index"])
    return [
        (choice["message"]["content"], choice["finish_reason"], round_logprobs(choice.get("logprobs")))
        for choice in choices
    ] + [(told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"])]


def round_logprobs(told: dict[str, Any] | None) -> list[tuple[str, float]]:
    entries = (told or {}).get("content") or []
    return [(entry["token"], round(entry["logprob"], 4)) for entry in entries if entry["token"] != "<|im_end|>"]


def streamed(url: str, request: dict[str, Any], client: httpx.Client | None = None) -> tuple[dict[int, str], float]:
    """The text of each choice, and the seconds to the first of it."""
    texts: dict[int, str] = {}
    started, first = time.perf_counter(), 0.0
    open_stream = (client or httpx).stream
    with open_stream("POST", f"{url}/v1/chat/completions", json=request | {"stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                if text := choice["delta"].get("content"):
                    first = first or time.perf_counter() - started
                    texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts, first


@pytest.mark.parametrize("fields", BODIES, ids=lambda fields: ",".join(fields))
def test_the_answer_is_the_one_without_the_router(pair: Pair, fields: dict[str, Any]) -> None:
    request = body("What is the capital of France?", **fields)
    direct, routed = answered(pair.served.http, request), answered(pair.router, request)
    assert routed == direct
    assert streamed(pair.router, request)[0] == streamed(pair.served.http, request)[0]


def test_the_routers_index_holds_the_pages_that_the_worker_tells_it(pair: Pair) -> None:
    def counted(name: str) -> float:
        told = httpx.get(f"http://127.0.0.1:{pair.metrics}/metrics", timeout=10).text
        return sum(float(line.split()[-1]) for line in told.splitlines() if line.startswith(name + "{"))

    before = counted("smg_kv_index_blocks")
    answered(pair.router, body("Tell the story of a router and its worker. " * 8, temperature=0))
    wait_until(lambda: counted("smg_kv_index_blocks") >= before + 3, 10, "the new prompt's pages in the router's index")
    assert counted("smg_kv_event_gaps_total") == counted("smg_kv_event_resyncs_total") == 0


def test_a_logit_bias_is_followed_on_the_workers_port(pair: Pair) -> None:
    """The router does not send it: it is not among the fields that the router fills in."""
    params = pb.SamplingParams(temperature=0.0, max_tokens=4, logit_bias={300: 100.0})
    request = pb.GenerateRequest(text="Hello", sampling_params=params)
    (address,) = [word.partition("=")[2] for word in pair.words if word.startswith("--worker-port=")]
    with grpc.insecure_channel(f"127.0.0.1:{address}") as channel:
        generate = channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        (answer,) = generate(request, timeout=60)
    assert list(answer.complete.output_ids) == [300] * 4
    biased = body("Hello", temperature=0, logit_bias={"300": 100})
    routed = answered(pair.router, biased)
    assert routed == answered(pair.router, body("Hello", temperature=0)) != answered(pair.served.http, biased)


def test_a_worker_that_was_killed_serves_again_when_it_is_back(pair: Pair, model: Path) -> None:
    request = body("Count to five.", temperature=0)
    before = answered(pair.router, request)
    pair.served.kill()
    failed = httpx.post(f"{pair.router}/v1/chat/completions", json=request, timeout=60)
    assert failed.status_code >= 500
    with runtime_folder() as runtime:
        pair.served = Served(model, *pair.words, runtime=runtime)
        try:
            pair.served.wait_ready()

            def is_back() -> bool:
                return httpx.post(f"{pair.router}/v1/chat/completions", json=request, timeout=60).status_code == 200

            wait_until(is_back, 60, "an answer of the worker that is back")
            assert answered(pair.router, request) == before
            measure(pair)
        finally:
            pair.served.kill()


def measure(pair: Pair, count: int = 20) -> None:
    """Prints what the router adds to the time to the first token: both sides in turn, over kept connections, with
    prompts that no cache has seen."""
    took: dict[str, list[float]] = {pair.router: [], pair.served.http: []}
    with httpx.Client() as client:
        for i in range(count + 1):
            for side, (url, times) in enumerate(took.items()):
                request = body(f"{100 + 2 * i + side} is a number.", temperature=0, max_tokens=4)
                times.append(streamed(url, request, client)[1])
    routed, direct = (times[1:] for times in took.values())
    added = statistics.quantiles((1000 * (a - b) for a, b in zip(routed, direct, strict=True)), n=4)
    print(
        f"first token: {1000 * statistics.median(routed):.2f} ms through the router, "
        f"{1000 * statistics.median(direct):.2f} ms without; added in {count} pairs: "
        f"{added[1]:.2f} ms (quartiles {added[0]:.2f} to {added[2]:.2f})"
    )


@pytest.mark.nightly
def test_a_thousand_requests_through_the_router_whose_worker_dies_and_comes_back(model: Path, tmp_path: Path) -> None:
    port = free_port()
    words = ["--ranks=1", "--max-model-len=512", f"--served-model-name={MODEL}", f"--worker-port={port}"]
    words += ["--generation-config=neutral"]
    requests = [body(f"Say the number {i}.", temperature=0, max_tokens=4) for i in range(1000)]
    with runtime_folder() as runtime, runtime_folder() as later:
        served = Served(model, *words, runtime=runtime)
        try:
            served.wait_ready()
            with smg(f"127.0.0.1:{port}", tmp_path / "log") as url, ThreadPoolExecutor(16) as pool:
                first = list(pool.map(partial(patiently_answered, url), requests[:400]))
                open_ones = [pool.submit(patiently_answered, url, request) for request in requests[400:]]
                served.kill()
                served = Served(model, *words, runtime=later)
                served.wait_ready()
                routed = first + [each.result(300) for each in open_ones]
                direct = list(pool.map(partial(answered, served.http), requests[::20]))
                assert routed[::20] == direct
        finally:
            served.kill()


def patiently_answered(url: str, request: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The answer once there is one: while the worker is away the router says that there is none."""
    end = time.monotonic() + 200
    while True:
        answer = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=60)
        if answer.status_code == 200:
            return choices_of(answer.json())
        assert answer.status_code >= 500, answer.text
        assert time.monotonic() < end, answer.text
        time.sleep(0.5)
