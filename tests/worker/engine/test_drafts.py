"""Speculative decoding with the compiled kernels: whatever is drafted, tokens and log-probabilities are the very same
bits, on one to three ranks, in chunks, preempted, resumed, and in pages that others find."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from allspan.kernels.table import op_set
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.protos.config.speculation import Speculation
from allspan.worker.engine.setup import load_engine
from allspan.worker.engine.steps.step_times import step_times
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.scheduler.drafting import table
from allspan.worker.scheduler.request import Request
from support.cores import request
from support.drafted import PAGE, VOCAB, asked, play, told
from support.drafters import Guesses
from support.tiny_models import save_tiny

pytest.importorskip("allspan.kernels.cpu._native", reason="the compiled kernels promise it; they are not built")


class Adversary(Guesses):
    """Proposes what `outputs` has for a request, changed as its `kind` says."""

    def __init__(self, kind: str, outputs: dict[bytes, Output]) -> None:
        self._kind = kind
        self._outputs = outputs
        self._random = random.Random(3)

    def guess(self, request: Request, most: int) -> Sequence[int]:
        at = len(request.output_token_ids)
        right = list(self._outputs[request.request_id].token_ids[at : at + most])
        if self._kind == "right":
            found = right
        elif self._kind == "wrong":
            found = [(token + 1) % 256 for token in right] + [5] * most
        elif self._kind == "impossible":
            found = [*right[:1], -1, VOCAB, 2**31 - 1]
        else:
            found = [token if self._random.random() < 0.8 else self._random.randrange(VOCAB) for token in right]
            found += [self._random.randrange(VOCAB) for _ in range(3 * most)]
        return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "llama", eos_token_id=None, bos_token_id=None, head_dim=16, hidden_size=72, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def plain(tiny: Path) -> dict[int, dict[bytes, Output]]:
    """What everyone gets without drafts, by the number of ranks."""
    return {size: play(tiny, size=size)[0] for size in (1, 2, 3)}


@pytest.mark.parametrize(
    ("size", "num_pages", "budget"), [(1, 400, 64), (1, 6, 64), (1, 400, 7), (2, 400, 64), (3, 6, 20)]
)
@pytest.mark.parametrize("kind", ["right", "wrong", "random", "impossible"])
def test_tokens_and_logprobs_are_the_same_bits(
    tiny: Path, plain: dict[int, dict[bytes, Output]], kind: str, size: int, num_pages: int, budget: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(table.DRAFTERS, "toy", lambda asked: (Adversary(kind, plain[size]),))
        outputs, counters = play(tiny, Speculation("toy", 9), size=size, num_pages=num_pages, budget=budget)
    assert told(outputs) == told(plain[size])
    assert {each.finish_reason for each in outputs.values()} == {"stop", "length"}
    assert counters.drafts
    assert counters.preemptions if num_pages < 20 else not counters.preemptions
    if kind == "right" and num_pages > 20:
        assert counters.accepted_tokens > 0.9 * counters.draft_tokens
    if kind == "wrong":
        assert counters.accepted_tokens < 0.1 * counters.draft_tokens


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_the_drafters_change_no_bit_and_some_drafts_are_kept(
    tiny: Path, plain: dict[int, dict[bytes, Output]], method: str
) -> None:
    outputs, counters = play(tiny, Speculation(method, 7, 1, 4))
    assert told(outputs) == told(plain[1])
    assert counters.accepted_tokens
    assert sum(counters.accepted_per_position) == counters.accepted_tokens


def test_requests_that_another_world_began_go_on_with_the_same_bits(
    tiny: Path, plain: dict[int, dict[bytes, Output]]
) -> None:
    requests = [each for each in asked() if each.params.prompt_logprobs is None]
    for each in requests:
        tokens = plain[1][each.request_id].token_ids
        each.num_resumed = len(tokens) // 2
        each.output_token_ids = list(tokens[: each.num_resumed])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(table.DRAFTERS, "toy", lambda asked: (Adversary("random", plain[1]),))
        outputs, _ = play(tiny, Speculation("toy", 9), requests)
    for each in requests:
        whole, rest = plain[1][each.request_id], outputs[each.request_id]
        assert (rest.token_ids, rest.logprobs) == (
            whole.token_ids[each.num_resumed :],
            (whole.logprobs or ())[each.num_resumed :],
        )


def test_no_page_that_others_find_has_the_keys_of_rejected_drafts(
    tiny: Path, plain: dict[int, dict[bytes, Output]]
) -> None:
    first = request(1, range(30), max_tokens=60, temperature=1.0)
    alone, _ = play(tiny, requests=[first])
    answer = alone[first.request_id].token_ids
    then = request(2, (*range(30), *answer[:-1]), max_tokens=4, logprobs=5)
    expected, _ = play(tiny, requests=[then])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(table.DRAFTERS, "toy", lambda asked: (Adversary("random", alone | expected),))
        outputs, counters = play(tiny, Speculation("toy", 9), [first], later=[then])
    assert outputs[first.request_id].token_ids == answer
    assert told(outputs)[then.request_id] == told(expected)[then.request_id]
    assert counters.prefix_hit_tokens >= 64


def test_a_request_can_opt_out(tiny: Path, plain: dict[int, dict[bytes, Output]]) -> None:
    one = request(1, [1, 2, 3, 1, 2, 3, 1, 2], max_tokens=20)
    one.options = RequestOptions(speculation=False)
    assert not play(tiny, Speculation(), [one])[1].drafts


def test_experts_have_had_no_tokens_when_the_first_request_comes(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2_moe", eos_token_id=None, bos_token_id=None, vocab_size=VOCAB)
    config = WorkerConfig(
        ModelConfig(str(tmp_path), "tiny", max_model_len=64),
        ServiceConfig("-"),
        CacheConfig(page_size=PAGE, kv_cache_bytes=2**20),
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, speculative_config="{}"),
    )
    loads = load_engine(config, op_set("cpu", 1), LocalCollectives()).model.expert_loads()
    assert loads
    assert not any(sum(load.tokens) for load in loads)


TWO_LAYERS = {"num_hidden_layers": 2}
WINDOWED = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}


@pytest.mark.parametrize(
    ("family", "more", "size", "settings"),
    [
        ("qwen2_moe", {}, 2, {}),
        ("deepseek_v2", TWO_LAYERS, 1, {}),
        ("deepseek_v2", TWO_LAYERS, 2, {"data_parallel_attention": True}),
        ("qwen2", WINDOWED | TWO_LAYERS, 1, {}),
    ],
)
def test_other_blocks_and_windows_draft_as_they_are_asked(
    tmp_path: Path,
    family: str,
    more: dict[str, object],
    size: int,
    settings: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's own switch, with steps run for their times at the start: experts, latents, and pages behind a
    window."""
    timed: list[dict[int, float]] = []

    def cheap_rows(*arguments: Any) -> dict[int, float]:
        timed.append(step_times(*arguments))
        return {1: 1.0, 64: 1.1}  # so that drafts pay whatever else the machine does

    monkeypatch.setattr("allspan.worker.engine.core.step_times", cheap_rows)
    save_tiny(tmp_path, family, eos_token_id=None, bos_token_id=None, vocab_size=VOCAB, **more)  # type: ignore[arg-type]
    rng = random.Random(2)
    phrase = [rng.randrange(256) for _ in range(12)]
    prompts = [phrase * 3 + [number] + phrase[:5] for number in range(3)]
    requests = [request(number, prompt, max_tokens=25) for number, prompt in enumerate(prompts)]
    again = [request(10 + number, prompt, max_tokens=25) for number, prompt in enumerate(prompts)]
    expected, _ = play(tmp_path, requests=requests, size=size, later=again, **settings)
    asks = {"speculative_config": "{}", **settings}
    outputs, counters = play(tmp_path, requests=requests, size=size, later=again, **asks)  # type: ignore[arg-type]
    assert told(outputs) == told(expected)
    assert counters.drafts
    assert timed
