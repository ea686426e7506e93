"""One contract, two engines: what `Engine` and a `ClientEngine` of two ranks both do, call by call."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from allspan import ClientEngine, Engine, RequestOptions, SamplingParams
from allspan.protos.api.engine import EngineProtocol, EngineStatistics
from allspan.protos.api.errors import (
    AllspanError,
    AlreadyExists,
    CheckpointError,
    DeadlineExceeded,
    InvalidRequest,
    Unavailable,
)
from allspan.protos.api.results import RequestState
from allspan.worker.process.release_memory import resident_bytes
from support.byte_tokenizer import write_byte_tokenizer
from support.tiny_models import save_tiny
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

PROMPT = list(range(40, 140))
GREEDY = SamplingParams(max_tokens=8, do_sample=False, ignore_eos=True)
ENDLESS = GREEDY.with_(max_tokens=3000)
SIZES = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 2048}


class Checkpoint:
    """A folder of its own for each engine, whose weights the tests replace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_tiny(
            folder, "llama2", vocab_size=256, eos_token_id=255, bos_token_id=None, max_position_embeddings=4096, **SIZES
        )
        config = (folder / "config.json").read_text()
        write_byte_tokenizer(folder)
        (folder / "config.json").write_text(config)
        self.file = folder / "model.safetensors"
        self.first = load_file(self.file)

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """As files are to be replaced: by another one of the same name."""
        beside = self.folder / "new.tmp"
        save_file(tensors, beside)
        beside.rename(self.file)

    def changed(self) -> dict[str, torch.Tensor]:
        """Other weights of the same shapes."""
        return {name: tensor.flip(0) if tensor.ndim == 2 else tensor for name, tensor in self.first.items()}

    def greedy(self, tensors: dict[str, torch.Tensor]) -> tuple[int, ...]:
        """The tokens that transformers continues PROMPT with."""
        self.model.load_state_dict(tensors)
        ids = list(PROMPT)
        for _ in range(GREEDY.max_tokens):
            with torch.no_grad():
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return tuple(ids[len(PROMPT) :])


def open_engine(folder: Path) -> Engine:
    return Engine(folder, threads=1, max_num_seqs=8)


def open_cluster(folder: Path) -> ClientEngine:
    return ClientEngine(folder, ranks=2, threads=1, max_num_seqs=8, startup_timeout=120.0)


@pytest.fixture(scope="module", params=[open_engine, open_cluster], ids=["engine", "cluster"])
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineProtocol, Checkpoint]]:
    checkpoint = Checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    engine = request.param(checkpoint.folder)
    yield engine, checkpoint
    here, held = isinstance(engine, Engine), resident_bytes()
    engine.close()
    assert not here or held - resident_bytes() > 20e6, "a closed engine keeps its memory"
    with pytest.raises(Unavailable):
        engine.start_request(PROMPT, GREEDY)


@pytest.fixture
def engine(opened: tuple[EngineProtocol, Checkpoint]) -> EngineProtocol:
    return opened[0]


@pytest.fixture
def checkpoint(opened: tuple[EngineProtocol, Checkpoint]) -> Checkpoint:
    return opened[1]


@pytest.fixture
def stopped(engine: EngineProtocol, checkpoint: Checkpoint) -> Iterator[EngineProtocol]:
    """Stopped for one test; afterwards the first weights are back."""
    engine.stop_model(30.0)
    yield engine
    checkpoint.write(checkpoint.first)
    engine.stop_model(30.0)
    engine.reload_weights(60.0)
    engine.start_model()


def tokens(engine: EngineProtocol) -> tuple[int, ...]:
    return engine.generate(PROMPT, GREEDY)[0].token_ids


def resident(statistics: EngineStatistics) -> int:
    """What the ranks' processes hold now."""
    return sum(int(Path(f"/proc/{rank.pid}/statm").read_text().split()[1]) * mmap.PAGESIZE for rank in statistics.ranks)


def test_a_request_starts_streams_and_ends(engine: EngineProtocol, checkpoint: Checkpoint) -> None:
    handle, queue = engine.start_request(PROMPT, GREEDY, "ab" * 16)
    assert handle.request_id == "ab" * 16
    engine.sync_request(handle, 30.0)
    output = queue.get()
    assert output is not None
    assert output.token_ids == checkpoint.greedy(checkpoint.first)
    assert (queue.state, queue.num_tokens, output.finish_reason) == (RequestState.FINISHED, 8, "length")
    assert queue.get(0.1) is None
    engine.release_request(handle)
    engine.stop_request(handle)  # neither is an error after the end


def test_text_becomes_a_completion_of_text(engine: EngineProtocol) -> None:
    completion = engine.generate("ab", GREEDY)[0]
    assert completion.prompt_token_ids == tuple(b"ab")
    assert completion.text == bytes(completion.token_ids).decode(errors="replace")


def test_a_conversation_is_answered_by_the_chat_template(engine: Any) -> None:
    plain = engine.tokenizer
    with pytest.raises(InvalidRequest, match="no chat template"):
        engine.chat("b")
    engine._tokenizer = plain.with_chat_template("{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}")
    try:
        assert engine.chat("b", GREEDY).prompt_token_ids == tuple(b"ub")
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "b"}]
        answer = engine.chat(messages)
    finally:
        engine._tokenizer = plain
    assert answer.prompt_token_ids == tuple(b"sxub")
    assert 1 <= len(answer.token_ids) <= engine.default_sampling_params.max_tokens == 128


async def test_generate_has_an_asynchronous_twin(engine: EngineProtocol) -> None:
    both = await engine.agenerate([PROMPT, PROMPT[:50]], GREEDY, RequestOptions(priority=1))
    alone = engine.generate([PROMPT, PROMPT[:50]], GREEDY)
    assert [one.token_ids for one in both] == [one.token_ids for one in alone]


def test_vectors_are_the_final_hidden_states_of_last_tokens(engine: Any, checkpoint: Checkpoint) -> None:
    checkpoint.model.load_state_dict(checkpoint.first)
    prompts = [PROMPT[:7], PROMPT]
    with torch.no_grad():
        rows = [checkpoint.model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts]
    expected = torch.nn.functional.normalize(torch.stack(rows), dim=1)
    torch.testing.assert_close(torch.from_numpy(engine.embed(prompts)), expected, atol=1e-5, rtol=0)
    assert engine.score("one", ["one", "two"])[0] == pytest.approx(1.0)


def test_a_stopped_request_keeps_its_tokens_and_a_released_one_ends(engine: EngineProtocol) -> None:
    handle, queue = engine.start_request(PROMPT, ENDLESS)
    wait_until(lambda: queue.num_tokens > 2, what="tokens")
    engine.stop_request(handle)
    engine.sync_request(handle, 30.0)
    assert queue.state is RequestState.CANCELLED
    assert sum(len(output.token_ids) for output in queue) == queue.num_tokens > 2
    handle, queue = engine.start_request(PROMPT, ENDLESS)
    engine.release_request(handle)
    engine.sync_request(timeout=30.0)
    assert queue.state is RequestState.CANCELLED
    wait_until(lambda: engine.statistics().running == 0, what="an idle engine")


def test_a_request_tells_its_times_and_counts(engine: EngineProtocol) -> None:
    handle, queue = engine.start_request(PROMPT, GREEDY)
    engine.sync_request(handle, 30.0)
    timings = queue.timings
    assert timings is not None
    assert timings.arrived_at > 1.7e9
    assert 0 <= timings.queue_s <= timings.ttft_s <= timings.total_s
    assert (timings.prompt_tokens, timings.output_tokens) == (len(PROMPT), 8)
    assert 0 <= timings.host_cached_tokens <= timings.cached_tokens < len(PROMPT)
    assert timings.prefill_tokens_per_s > 0
    assert timings.decode_tokens_per_s > 0
    assert engine.generate(PROMPT, GREEDY)[0].timings is not None


def test_statistics_count_what_was_done(engine: EngineProtocol) -> None:
    before = engine.statistics()
    engine.generate([PROMPT, PROMPT[:30]], GREEDY)
    now = engine.statistics()
    assert (now.running, now.waiting, now.pages_used) == (0, 0, 0)
    assert now.pages_free + now.pages_cached == now.pages_total > 0
    assert now.free_tokens == now.pages_total * now.page_size
    assert now.prompt_tokens - before.prompt_tokens == len(PROMPT) + 30
    assert now.generated_tokens - before.generated_tokens == 16
    assert now.finished_requests - before.finished_requests == 2
    assert now.prefix_query_tokens - before.prefix_query_tokens >= len(PROMPT) + 30 - 2
    assert now.generated_tokens_per_s > 0
    assert now.kv_bytes == sum(rank.kv_bytes for rank in now.ranks) > 0
    assert all(rank.state == "running" and rank.weight_bytes > 0 for rank in now.ranks)
    assert (now.weights_loaded, now.replicas, now.replicas_ready) == (True, 1, 1)


def test_the_prefix_cache_is_used_declined_and_reset(engine: EngineProtocol) -> None:
    def cached(**options: Any) -> int:
        return engine.generate(PROMPT, GREEDY, RequestOptions(**options))[0].cached_tokens

    engine.reset_prefix_cache()
    assert [cached(), cached(), cached(prefix_cache=False), cached(cache_salt="mine")] == [0, 96, 0, 0]
    assert engine.statistics().pages_cached > 0
    engine.reset_prefix_cache()
    assert engine.statistics().pages_cached == 0
    assert cached() == 0


def test_every_op_is_timed_while_profiling_is_on(engine: EngineProtocol) -> None:
    engine.start_profile()
    tokens(engine)
    engine.stop_profile()
    profile = {op.op: op for op in engine.op_profile()}
    assert profile.keys() >= {"packed_linear", "attention", "rotary_append", "packed_embedding"}
    assert sum(op.share for op in profile.values()) == pytest.approx(1.0)
    for op in profile.values():
        assert 0 < op.min_ms <= op.max_ms <= op.total_ms
    tokens(engine)
    assert {op.op: op for op in engine.op_profile()} == profile, "it has been stopped"


def test_a_stopped_model_refuses_and_a_started_one_serves(engine: EngineProtocol) -> None:
    handle, _ = engine.start_request(PROMPT, ENDLESS)
    with pytest.raises(DeadlineExceeded) as late:
        engine.stop_model(0.01)
    assert late.value.status == 5
    with pytest.raises(Unavailable, match="start_model") as refused:
        engine.start_request(PROMPT, GREEDY)
    assert refused.value.status == 12
    engine.stop_request(handle)
    engine.stop_model(30.0)
    assert engine.statistics().ranks[0].state == "stopped"
    engine.start_model()
    assert len(tokens(engine)) == 8


def test_unloaded_weights_give_their_memory_back_and_come_again(
    stopped: EngineProtocol, checkpoint: Checkpoint
) -> None:
    before = stopped.statistics()
    held, weights = resident(before), sum(rank.weight_bytes for rank in before.ranks)
    stopped.unload_weights(30.0)
    gone = stopped.statistics()
    assert held - resident(gone) > 0.9 * weights > 20e6
    assert not gone.weights_loaded
    assert [(rank.weight_bytes, rank.kv_bytes) for rank in gone.ranks] == [(0, 0)] * len(gone.ranks)
    with pytest.raises(Unavailable, match="reload_weights"):
        stopped.start_model()
    stopped.reload_weights(60.0)
    with pytest.raises(Unavailable, match="start_model"):
        stopped.start_request(PROMPT, GREEDY)
    stopped.start_model()
    assert tokens(stopped) == checkpoint.greedy(checkpoint.first)
    now = stopped.statistics()
    assert (now.weights_loaded, now.weights_version) == (True, before.weights_version + 1)


@pytest.mark.parametrize("unload", [True, False], ids=["unloaded", "in place"])
def test_changed_weights_are_served_and_what_was_cached_is_void(
    stopped: EngineProtocol, checkpoint: Checkpoint, unload: bool
) -> None:
    other = checkpoint.greedy(checkpoint.changed())
    assert other != checkpoint.greedy(checkpoint.first)
    checkpoint.write(checkpoint.changed())
    if unload:
        stopped.unload_weights(30.0)
    stopped.reload_weights(60.0)
    stopped.start_model()
    completion = stopped.generate(PROMPT, GREEDY)[0]
    assert (completion.token_ids, completion.cached_tokens) == (other, 0)


def truncate(checkpoint: Checkpoint) -> str:
    data = checkpoint.file.read_bytes()
    beside = checkpoint.folder / "new.tmp"
    beside.write_bytes(data[: len(data) // 2])
    beside.rename(checkpoint.file)
    return "model.safetensors: truncated"


def remove(checkpoint: Checkpoint) -> str:
    checkpoint.file.unlink()
    return r"no \*\.safetensors and no"


def widen(checkpoint: Checkpoint) -> str:
    config = json.loads((checkpoint.folder / "config.json").read_text())
    (checkpoint.folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 99}))
    return "intermediate_size is 99, was 2048"


@pytest.mark.parametrize("spoil", [truncate, remove, widen])
def test_a_reload_that_cannot_be_is_refused_and_the_weights_stay(
    stopped: EngineProtocol, checkpoint: Checkpoint, spoil: Callable[[Checkpoint], str]
) -> None:
    config = (checkpoint.folder / "config.json").read_text()
    words = spoil(checkpoint)
    with pytest.raises(CheckpointError, match=words) as refused:
        stopped.reload_weights(60.0)
    assert refused.value.status == 3
    (checkpoint.folder / "config.json").write_text(config)
    assert stopped.statistics().weights_loaded
    stopped.start_model()
    assert tokens(stopped) == checkpoint.greedy(checkpoint.first)


def test_a_refused_reload_after_an_unload_can_be_tried_again(stopped: EngineProtocol, checkpoint: Checkpoint) -> None:
    stopped.unload_weights(30.0)
    words = truncate(checkpoint)
    with pytest.raises(CheckpointError, match=words):
        stopped.reload_weights(60.0)
    with pytest.raises(Unavailable, match="reload_weights"):
        stopped.start_model()
    checkpoint.write(checkpoint.first)
    stopped.reload_weights(60.0)
    stopped.start_model()
    assert tokens(stopped) == checkpoint.greedy(checkpoint.first)


def test_what_is_known_of_the_model_its_files_and_versions(engine: EngineProtocol, checkpoint: Checkpoint) -> None:
    model, files = engine.model_info(), engine.file_info()
    assert model["spec"]["hidden_size"] == 512
    assert model["parameters"] == sum(tensor.numel() for tensor in checkpoint.first.values())
    ranks = engine.statistics().ranks
    assert [rank["weight_bytes"] for rank in model["ranks"]] == [rank.weight_bytes for rank in ranks]
    heads = [rank["query_heads"] for rank in model["ranks"]]
    assert heads == ([[0, 8]] if len(ranks) == 1 else [[0, 4], [4, 8]])
    by_name = {file["name"]: file["bytes"] for file in files["files"]}
    assert by_name["model.safetensors"] == checkpoint.file.stat().st_size
    assert (files["format"], files["dtype"]) == ("safetensors", "float32")
    assert files["made_by"].startswith("transformers ")
    for word in ("allspan 0", "kernels cpu", "torch ", "Python 3."):
        assert word in engine.version()


REFUSALS: dict[str, tuple[Callable[[EngineProtocol], Any], type[AllspanError], int]] = {
    "an empty prompt": (lambda engine: engine.start_request([], GREEDY), InvalidRequest, 2),
    "a token that is none": (lambda engine: engine.start_request([256], GREEDY), InvalidRequest, 2),
    "a prompt as long as the context": (lambda engine: engine.start_request([1] * 4096, GREEDY), InvalidRequest, 2),
    "an id that is none": (lambda engine: engine.start_request([1], GREEDY, "xyz"), InvalidRequest, 2),
    "options that are none": (
        lambda engine: engine.start_request(PROMPT, GREEDY, options={"priority": 1}),  # type: ignore[arg-type]
        InvalidRequest,
        2,
    ),
    "one parameter for all": (lambda engine: engine.generate(PROMPT, 8), InvalidRequest, 2),  # type: ignore[arg-type]
    "weights of a running model": (lambda engine: engine.unload_weights(5.0), Unavailable, 12),
    "new weights for a running model": (lambda engine: engine.reload_weights(5.0), Unavailable, 12),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_is_refused_says_why_with_its_number(engine: EngineProtocol, what: str) -> None:
    call, kind, status = REFUSALS[what]
    with pytest.raises(kind) as refused:
        call(engine)
    assert refused.value.status == status
    assert "\n" not in refused.value.message


def test_an_id_in_use_is_refused(engine: EngineProtocol) -> None:
    handle, _ = engine.start_request(PROMPT, ENDLESS, "cd" * 16)
    with pytest.raises(AlreadyExists) as refused:
        engine.start_request(PROMPT, GREEDY, "cd" * 16)
    assert refused.value.status == 10
    engine.release_request(handle)


def test_a_request_that_is_late_fails_and_says_so(engine: EngineProtocol) -> None:
    _, queue = engine.start_request(PROMPT, ENDLESS, options=RequestOptions(timeout_s=0.02))
    with pytest.raises(DeadlineExceeded) as late:
        list(queue)
    assert late.value.status == 5
    assert queue.state is RequestState.FAILED
