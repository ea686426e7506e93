"""Engine on a tiny random Llama: the same methods as the client's facade, in one process."""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import subprocess
import sys
import threading

import pytest
import torch

from allspan.protos.api.engine import EngineProtocol
from allspan.protos.api.errors import (
    AdapterNotFound,
    AlreadyExists,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    Unavailable,
)
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import RequestState
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.engine.engine import Engine
from support.byte_tokenizer import write_byte_tokenizer
from support.tiny_models import save_tiny
from support.waiting import wait_until

VOCAB = 256
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_tiny(folder, "llama", vocab_size=VOCAB, eos_token_id=255, bos_token_id=None)


@pytest.fixture(scope="module")
def texts(tiny):
    """The same checkpoint with a tokenizer whose ids are bytes."""
    config = (tiny[0] / "config.json").read_text()
    write_byte_tokenizer(tiny[0])
    (tiny[0] / "config.json").write_text(config)
    return tiny[0]


@pytest.fixture(scope="module")
def on(pytestconfig):
    """Settings of an engine, by --device; on a GPU float32 is torch's, so that tokens can be compared."""
    if pytestconfig.getoption("--device") == "cuda":
        return {"device": "cuda", "dtype": "float32", "kv_cache_bytes": 64 << 20}
    return {"kernels": "reference", "threads": 1}


@pytest.fixture(scope="module")
def engine(texts, on):
    with Engine(texts, **on, max_num_seqs=8) as engine:
        yield engine


def prompts(count, longest=60, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def reference(model, ids, count):
    """Greedy continuation by transformers, one whole forward pass a token; also the gap between the best two logits."""
    tokens, closest = list(ids), float("inf")
    for _ in range(count):
        with torch.no_grad():
            best = torch.topk(model(torch.tensor([tokens])).logits[0, -1].float(), 2)
        closest = min(closest, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tuple(tokens[len(ids) :]), closest


def test_greedy_tokens_equal_those_of_transformers(tiny, engine):
    for ids in prompts(4, seed=5):
        expected, closest = reference(tiny[1], ids, 12)
        assert closest > 1e-4, "choose other prompts: this one ends in a tie"
        assert engine.generate(ids, GREEDY)[0].token_ids == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 64},
        pytest.param({"max_num_batched_tokens": 4, "max_num_seqs": 4}, marks=pytest.mark.nightly),
        pytest.param({"max_num_batched_tokens": 2048}, marks=pytest.mark.nightly),
        pytest.param({"kv_cache_bytes": 1}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_batch_of_mixed_lengths_gives_the_tokens_of_one_by_one(tiny, on, engine, settings):
    """The smallest cache holds one context and a little: everything is preempted."""
    asked = prompts(16)
    params = [GREEDY.with_(max_tokens=30, seed=i, temperature=i % 2, logprobs=2) for i in range(16)]
    alone = [engine.generate(ids, entry)[0] for ids, entry in zip(asked, params, strict=True)]
    page_bytes = engine.statistics().ranks[0].kv_bytes // engine.statistics().pages_total // 2
    if "kv_cache_bytes" in settings:
        settings = {"kv_cache_bytes": page_bytes * 16, "max_num_seqs": 8}
    with Engine(tiny[0], **{**on, "page_size": 16, "max_model_len": 256, **settings}) as other:
        together = other.generate(asked, params)
        counters = other.statistics()
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    for one, before in zip(together, alone, strict=True):
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in before.logprobs], abs=1e-4
        )
    assert counters.pages_used == 0
    assert (counters.preemptions > 0) == ("kv_cache_bytes" in settings)


def test_it_has_every_method_of_the_protocol():
    for name, method in inspect.getmembers(EngineProtocol, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(Engine, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters), name


def test_tokens_arrive_in_the_queue_as_they_are_made(engine):
    handle, queue = engine.start_request([1, 2, 3], GREEDY)
    outputs = list(queue)
    assert sum(len(output.token_ids) for output in outputs) == 12
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].timings.output_tokens == 12
    assert outputs[-1].timings.prompt_tokens == 3
    assert 0 < outputs[-1].timings.ttft_s <= outputs[-1].timings.total_s
    engine.release_request(handle)


def test_text_goes_in_and_comes_out(engine):
    (one,) = engine.generate("hello", GREEDY)
    assert one.prompt_token_ids == tuple(b"hello")
    assert one.text == bytes(one.token_ids).decode("utf-8", "replace")
    assert one.finish_reason == "length"
    assert one.total_s >= one.ttft_s >= one.queue_s >= 0


def test_several_prompts_come_back_in_order(engine):
    asked = ["a", [1, 2], "abc"]
    several = engine.generate(asked, [GREEDY, GREEDY.with_(max_tokens=3), GREEDY])
    assert [len(one.token_ids) for one in several] == [12, 3, 12]
    assert [one.prompt_token_ids for one in several] == [(97,), (1, 2), (97, 98, 99)]
    assert engine.generate([], GREEDY) == []


def test_a_stop_string_ends_the_text_before_it(engine):
    whole = engine.generate("hello", GREEDY)[0]
    cut = next(i for i in range(3, 10) if whole.token_ids[i] < 128 and whole.token_ids[i] not in whole.token_ids[:i])
    stop = chr(whole.token_ids[cut])
    (one,) = engine.generate("hello", GREEDY.with_(stop=(stop,)))
    assert one.text == whole.text[: whole.text.index(stop)]
    assert one.finish_reason == "stop"
    assert one.token_ids == whole.token_ids[: cut + 1]
    assert one.total_s > 0
    wait_until(lambda: engine.statistics().pages_used == 0, what="its pages")


def test_a_stop_token_ends_the_output_and_is_not_part_of_the_text(engine):
    whole = engine.generate("hello", GREEDY)[0]
    cut = next(i for i in range(3, 10) if whole.token_ids[i] not in whole.token_ids[:i])
    (one,) = engine.generate("hello", GREEDY.with_(stop_token_ids=(whole.token_ids[cut],)))
    assert one.token_ids == whole.token_ids[: cut + 1]
    assert one.finish_reason == "stop"
    assert one.text == bytes(one.token_ids[:-1]).decode("utf-8", "replace")


def test_stop_request_keeps_what_was_generated_and_frees_the_pages(engine):
    handle, queue = engine.start_request([1] * 40, GREEDY.with_(max_tokens=200))
    first = queue.get(timeout=30)
    engine.stop_request(handle)
    engine.stop_request(handle)
    engine.sync_request(handle, timeout=30)
    rest = list(queue)
    assert queue.state is RequestState.CANCELLED
    assert rest[-1].finish_reason == "cancelled"
    assert 0 < len(first.token_ids) + sum(len(output.token_ids) for output in rest) < 200
    assert engine.statistics().pages_used == 0


def test_releasing_a_running_request_stops_it(engine):
    handle, queue = engine.start_request([1], GREEDY.with_(max_tokens=200))
    engine.release_request(handle)
    engine.release_request(handle)
    assert queue.wait_finished(30)
    wait_until(lambda: engine.statistics().running == 0, what="its end")


def test_sync_request_waits_for_all_and_gives_up_in_time(engine):
    started = [engine.start_request([i], GREEDY.with_(max_tokens=60)) for i in range(3)]
    with pytest.raises(DeadlineExceeded, match="after timeout"):
        engine.sync_request(timeout=0.0)
    engine.sync_request(timeout=30)
    assert all(queue.state is RequestState.FINISHED for _, queue in started)
    for handle, _ in started:
        engine.release_request(handle)


def test_a_chosen_request_id_is_kept_and_refused_twice(engine):
    chosen = "0123456789abcdef0123456789abcdef"
    handle, queue = engine.start_request([1], GREEDY.with_(max_tokens=200), request_id=chosen)
    assert handle.request_id == chosen
    with pytest.raises(AlreadyExists):
        engine.start_request([1], GREEDY, request_id=chosen)
    assert queue.wait_finished(30)
    engine.release_request(handle)
    with pytest.raises(InvalidRequest, match="request_id is 'nonsense'"):
        engine.start_request([1], GREEDY, request_id="nonsense")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([1, 256], r"prompt\[1\] is token id 256"),
        ([1, -1], r"prompt\[1\] is token id -1"),
        ([1, 2.5], r"prompt\[1\] is 2.5"),
        ([1] * 256, "256 tokens.*255"),
        (7, "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_engine_goes_on(engine, prompt, words):
    with pytest.raises(InvalidRequest, match=words):
        engine.start_request(prompt, GREEDY)
    assert len(engine.generate([5], GREEDY)[0].token_ids) == 12


def test_one_bad_prompt_among_many_stops_nothing_half_way(engine):
    before = engine.statistics().finished_requests
    with pytest.raises(InvalidRequest):
        engine.generate([[1], [999]], GREEDY)
    assert engine.statistics().finished_requests == before


def test_more_prompts_than_the_queue_takes_all_come_through(tiny, on):
    with Engine(tiny[0], **on, max_num_seqs=2, max_queued_requests=3) as engine:
        asked = prompts(25, longest=6)
        assert len(engine.generate(asked, GREEDY.with_(max_tokens=3))) == 25
        assert len(asyncio.run(engine.agenerate(asked, GREEDY.with_(max_tokens=3)))) == 25
        with pytest.raises(QueueFull, match="max_queued_requests is 3"):
            _ = [engine.start_request([number], GREEDY.with_(max_tokens=200)) for number in range(10)]


async def test_agenerate_gives_what_generate_gives(engine):
    asked = prompts(4)
    together = await asyncio.gather(*(engine.agenerate(ids, GREEDY) for ids in asked))
    assert [one.token_ids for (one,) in together] == [one.token_ids for one in engine.generate(asked, GREEDY)]


async def test_cancelling_agenerate_stops_its_requests(engine):
    task = asyncio.create_task(engine.agenerate([[1], [2]], GREEDY.with_(max_tokens=250)))
    while engine.statistics().running < 2:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_until(lambda: engine.statistics().running == 0, what="the end of its requests")
    assert engine.statistics().pages_used == 0


def test_a_model_that_is_stopped_refuses_and_starts_again(engine):
    engine.stop_model(10)
    with pytest.raises(Unavailable, match="stopped"):
        engine.generate([1], GREEDY)
    engine.start_model()
    assert len(engine.generate([1], GREEDY)) == 1


def test_without_a_tokenizer_ids_work_and_text_is_refused(tiny, on, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in ("config.json", "model.safetensors"):
        (bare / file).symlink_to(tiny[0] / file)
    with Engine(bare, **on) as engine:
        assert engine.generate([1], GREEDY)[0].text == ""
        with pytest.raises(Exception, match="give tokenizer=PATH"):
            engine.generate("text", GREEDY)
        with pytest.raises(Exception, match="give tokenizer=PATH"):
            engine.generate([1], GREEDY.with_(stop=("x",)))


def test_an_engine_that_is_closed_refuses_and_fails_what_runs(tiny, on):
    engine = Engine(tiny[0], **on)
    _, queue = engine.start_request([1], GREEDY.with_(max_tokens=200))
    engine.close()
    engine.close()
    assert queue.state in (RequestState.FAILED, RequestState.FINISHED)
    with pytest.raises(Unavailable):
        engine.start_request([1], GREEDY)


def test_an_engine_nobody_holds_ends_its_thread(tiny, on):
    before = {thread for thread in threading.enumerate() if thread.name == "allspan-engine"}
    engine = Engine(tiny[0], **on)
    engine.generate([1], GREEDY)
    del engine
    gc.collect()
    wait_until(
        lambda: {thread for thread in threading.enumerate() if thread.name == "allspan-engine"} == before,
        what="the end of its thread",
    )


def test_an_adapter_that_is_not_loaded_is_not_found_and_leaves_nothing_behind(engine):
    with pytest.raises(AdapterNotFound, match="adapter is 'sql', which is not served here; no adapters are served"):
        engine.start_request([1, 2], GREEDY, options=RequestOptions(adapter="sql"))
    with pytest.raises(AdapterNotFound):
        engine.generate([1, 2], GREEDY, RequestOptions(adapter="sql"))
    engine.sync_request(timeout=10)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"max_model_len": 10_000}, ConfigError, "max_model_len"),
        ({"kv_cache_bytes": 20_000}, ConfigError, "max_model_len to at most"),
        ({"kernels": "abacus"}, ConfigError, "kernels is 'abacus'"),
        ({"max_num_seqs": 100, "max_num_batched_tokens": 50}, ConfigError, "max_num_batched_tokens is 50"),
        ({"wings": 2}, ConfigError, "unknown setting 'wings'"),
        ({"lora_modules": ["a"]}, ConfigError, "must be NAME=PATH"),
        ({"lora_modules": "a=/x"}, ConfigError, "must be a list of texts"),
        ({"max_lora_rank": 1000}, ConfigError, "from 1 to 256"),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny, on, settings, error, words):
    with pytest.raises(error, match=words):
        Engine(tiny[0], **on | settings)


def test_a_model_that_is_not_here_is_refused():
    with pytest.raises(ModelNotFound, match="allspan pull nobody-s-model"):
        Engine("nobody-s-model")


def test_engine_needs_neither_mpi_nor_grpc(tiny):
    program = (
        "import sys; from allspan import Engine, SamplingParams\n"
        f"engine = Engine({str(tiny[0])!r}, kernels='reference', threads=1)\n"
        "engine.generate([1], SamplingParams(max_tokens=2)); engine.close()\n"
        "print(sorted({'mpi4py', 'grpc'} & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
