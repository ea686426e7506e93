"""Drafts on a GPU: at every position the sampler draws what the host draws without drafts, and counts none that was not
kept; a step of decodes with drafts is one of decodes, and the engine's tokens are those without."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allspan import Engine, SamplingParams
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.results import Output, TokenLogprob
from allspan.protos.config.speculation import Speculation
from allspan.worker.backend.cuda import sampling
from allspan.worker.backend.cuda.sampling import DeviceSampling
from allspan.worker.engine.steps import step_times
from allspan.worker.models.model import Model
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.grammar_cache import Grammars
from allspan.worker.sampling.sampler import Sampler
from allspan.worker.scheduler.drafting.table import DRAFTERS
from allspan.worker.scheduler.request import Request
from allspan.worker.step.inputs import StepInputs
from support.byte_tokenizer import byte_tokenizer
from support.drafters import Guesses
from support.tiny_models import prompt, reference_logits, save_tiny

V, EOS, PROMPT, OUTPUT = 300, 299, 4, 14
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"repetition_penalty": 1.4, "top_k": 20, "logprobs": 3},
    {"presence_penalty": 1.9, "frequency_penalty": 0.7, "temperature": 0.0},
    {"frequency_penalty": 1.1, "logit_bias": {4: 3.0}, "allowed_token_ids": tuple(range(9)), "logprobs": 0},
    {"no_repeat_ngram_size": 2, "bad_words_ids": ((5,), (6, 1)), "temperature": 0.7},
    {"min_tokens": 8, "stop_token_ids": tuple(range(4)), "top_p": 0.8},
    {"grammar": Grammar("regex", "[a-d]{2,9}[0-9]?x{20}"), "logprobs": 2, "frequency_penalty": 0.9},
    {"grammar": Grammar("regex", "(ab){9}"), "allowed_token_ids": tuple(b"ab")},
]
Told = tuple[list[list[int]], dict[int, list[TokenLogprob]]]


class Rows:
    """A sampler's rows, whose logits depend on the tokens before them."""

    def __init__(self, sampling: Sampling | None, where: str) -> None:
        grammars = Grammars("-", V)
        grammars.load_tokenizer = byte_tokenizer
        self.tokens = np.ones((len(ASKED), 64), dtype=np.int32)
        self.lengths = np.full(len(ASKED), PROMPT)
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self._sampler, self._where = Sampler(len(ASKED), (V,), LocalCollectives(), (EOS,), sampling), where
        for row, asked in enumerate(ASKED):
            params = SamplingParams(**{"seed": row, **asked})
            grammar = params.grammar and grammars.compiled(params.grammar)
            self._sampler.add(row, params, PROMPT, self.tokens[row], grammar)

    def outputs(self) -> Told:
        found = [self.tokens[row, PROMPT:length].tolist() for row, length in enumerate(self.lengths)]
        return found, self.logprobs

    def step(self, drafts: dict[int, list[int]]) -> int:
        """One step of the rows in `drafts`; returns how many of these are kept."""
        rows, positions = [], []
        for row, proposed in drafts.items():
            length = int(self.lengths[row])
            self.tokens[row, length : length + len(proposed)] = proposed
            if proposed:
                self._sampler.begin_drafts(row, length)
            rows += [row] * (1 + len(proposed))
            positions += range(length, length + len(proposed) + 1)
        at = np.array(rows), np.array(positions)
        self._sampler.prepare(*at, None)
        logits = torch.stack([self._logits(*each) for each in zip(rows, positions, strict=True)])
        sampled = self._sampler.launch(logits.to(self._where), *at).result()
        return sum(self._take(row, proposed, sampled.tokens[at[0] == row].tolist(), sampled.logprobs)
                   for row, proposed in drafts.items())  # fmt: skip

    def _logits(self, row: int, position: int) -> torch.Tensor:
        """Of few tokens, which come again, and which those before decide about."""
        last = int(self.tokens[row, position - 1])
        logits = torch.randn(V, generator=torch.Generator().manual_seed(1000 * row + position + 7919 * (last % 5)))
        logits[:8] += 4
        logits[list(b"abcdx")] += 2
        return logits

    def _take(self, row: int, proposed: list[int], made: list[int], logprobs: Any) -> int:
        kept = next(
            (i for i, (draft, token) in enumerate(zip(proposed, made, strict=False)) if draft != token), len(proposed)
        )
        length = int(self.lengths[row])
        self.tokens[row, length : length + len(made)] = made
        self.lengths[row] += kept + 1
        self.logprobs.setdefault(row, []).extend(logprobs.get(row, ())[: kept + 1])
        if proposed:
            self._sampler.retract(row, int(self.lengths[row]) - 1)
        return kept


def on_device(device: str, small: dict[str, int]) -> Rows:
    return Rows(Sampling(device=DeviceSampling(len(ASKED), V, torch.device(device), small)), device)


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
def test_every_position_gets_the_token_that_the_host_draws_without_drafts(
    kind: str, device: str, small: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_MOST_ROWS", 7 if kind == "mixed" else 64)  # so that a request's are cut apart
    plain, rng = Rows(None, "cpu"), np.random.default_rng(5)
    while plain.lengths.max() < PROMPT + OUTPUT + 8:
        plain.step({row: [] for row in range(len(ASKED))})
    wanted, wanted_logprobs = plain.outputs()
    ours, kept, drafted = on_device(device, small), 0, 0
    while ours.lengths.min() < PROMPT + OUTPUT:
        drafts: dict[int, list[int]] = {}
        for row in rng.permutation(len(ASKED)).tolist():
            done = int(ours.lengths[row]) - PROMPT
            if done < OUTPUT:
                right = wanted[row][done : done + int(rng.integers(0, 5))]
                is_wrong = {"right": 0.0, "wrong": 1.0, "mixed": 0.3}[kind]
                drafts[row] = [int(rng.integers(V)) if rng.random() < is_wrong else token for token in right]
        kept, drafted = kept + ours.step(drafts), drafted + sum(map(len, drafts.values()))
    found, logprobs = ours.outputs()
    for row, tokens in enumerate(found):
        assert tokens == wanted[row][: len(tokens)], ASKED[row]
        assert logprobs.get(row, []) == wanted_logprobs.get(row, [])[: len(logprobs.get(row, []))]
    assert {"right": kept == drafted, "wrong": kept < 0.1 * drafted, "mixed": 0 < kept < drafted}[kind]


VOCAB = 104
HEADS = {"head_dim": 64, "hidden_size": 144, "num_attention_heads": 6, "num_key_value_heads": 2}
FOUR_HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "qwen2": {**FOUR_HEADS, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen2_moe": {**FOUR_HEADS, "num_key_value_heads": 4},
}
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 16,
    "kv_cache_bytes": 4_000_000,
    "speculative_config": "{}",
}
NEAR = 2**-6
"""Logits that are nearer than that may change places where the rows of a step are others."""


class Remembering(Guesses):
    """Drafts what each prompt got before, while it gets the same again; every fifth time, other tokens."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[int, ...], Output] = {}
        self._asked = 0

    def guess(self, request: Request, most: int) -> Sequence[int]:
        at = len(request.output_token_ids)
        output = self.outputs.get(tuple(request.prompt_token_ids), Output()).token_ids
        known = output[at : at + most] if output[:at] == tuple(request.output_token_ids) else ()
        self._asked += bool(known)
        return [(token + 1) % VOCAB for token in known] if self._asked % 5 == 0 else known


class Random(Guesses):
    """Drafts any of three tokens."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(2)

    def guess(self, request: Request, most: int) -> Sequence[int]:
        return [THREE[each] for each in self._random.integers(0, 3, min(most, 2))]


THREE = (7, 40, 99)


def drafting_engine(folder: Path, drafter: Guesses, patch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    """An engine that runs up to three drafts of a request, whether they pay or not."""
    patch.setitem(DRAFTERS, "toy", lambda asked: (drafter,))
    patch.setattr(step_times, "MOST_SECONDS", 0.0)
    engine = Engine(folder, **SETTINGS | settings)
    engine._loaded.core.draft_with(Speculation("toy", 3))
    return engine


def assert_alike(drafted: Output, plain: Output) -> None:
    """Greedy tokens are the same up to a place where, without drafts, the two likeliest are near each other."""
    pairs = zip(drafted.token_ids, plain.token_ids, plain.logprobs or (), strict=True)
    first = next((entry for one, other, entry in pairs if one != other), None)
    if first is not None:
        (_, likeliest), (_, second) = first.top
        assert likeliest - second < NEAR


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Grows with every step: the size that it is padded to, its rows of logits and its requests that decode."""
    noted: list[tuple[int, int, int]] = []
    forward = Model.forward

    def noting(model: Model, inputs: StepInputs) -> torch.Tensor:
        noted.append((inputs.bucket, inputs.num_rows, inputs.num_decodes))
        return forward(model, inputs)

    monkeypatch.setattr(Model, "forward", noting)
    return noted


@pytest.mark.parametrize("is_eager", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.gpu) for name in MODELS if name != "llama")]
)
def test_steps_with_drafts_are_decodes_and_give_the_tokens_of_those_without(
    name: str,
    is_eager: bool,
    tmp_path: Path,
    on: dict[str, Any],
    buckets: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_tiny(tmp_path, name, torch.bfloat16, vocab_size=VOCAB, **MODELS[name])
    asked = [prompt(9 + 5 * seed, VOCAB, seed) for seed in range(3)]
    count = 60 if on["device"] == "cuda" else 9
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=2)
    drafter = Remembering()
    with drafting_engine(tmp_path, drafter, monkeypatch, **on, enforce_eager=is_eager) as engine:
        core = engine._loaded.core
        plain = engine.generate(asked, params)
        assert not core.statistics().drafts
        drafter.outputs = {tuple(one): output for one, output in zip(asked, plain, strict=True)}
        buckets.clear()
        drafted = engine.generate(asked, params)
        counted = core.statistics()
    for one, other in zip(drafted, plain, strict=True):
        assert_alike(one, other)
    assert counted.accepted_tokens > 0.3 * counted.draft_tokens
    with_drafts = [(bucket, decodes) for bucket, rows, decodes in buckets if rows > len(asked)]
    assert len(with_drafts) >= 2
    assert all(bucket == decodes in (4, 8, 16) for bucket, decodes in with_drafts)


def test_a_step_with_drafts_and_a_prompt_gives_both_their_tokens(
    tmp_path: Path, on: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama", torch.bfloat16, vocab_size=VOCAB, **HEADS)
    asked = [prompt(5, VOCAB, 1), prompt(70, VOCAB, 2)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)
    drafter = Remembering()
    with drafting_engine(tmp_path, drafter, monkeypatch, **on) as engine:
        plain = [engine.generate([one], params)[0] for one in asked]
        drafter.outputs = {tuple(one): output for one, output in zip(asked, plain, strict=True)}
        assert engine.reset_prefix_cache() is None
        for one, other in zip(engine.generate(asked, params), plain, strict=True):
            assert_alike(one, other)
        assert engine._loaded.core.statistics().accepted_tokens


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("top_k", "farthest"), [(0, 61.7), (2, 29.9)])
def test_what_is_sampled_with_drafts_comes_as_often_as_the_model_says(
    where: str, top_k: int, farthest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pearson's chi-square over all outputs of a few tokens, of which there are three; on a CPU, too, where bits are
    compared elsewhere, so that the test itself is run. Of right samplers one in 10,000 is farther away."""
    length, count, temperature = 3, 3000 if where == "cuda" else 600, 2.0
    reference = save_tiny(tmp_path, "llama", torch.bfloat16, vocab_size=VOCAB, **HEADS).float()
    asked = prompt(3, VOCAB, 1)
    expected: dict[tuple[int, ...], float] = {}
    for output in itertools.product(THREE, repeat=length):
        rows = reference_logits(reference, [*asked, *output])[len(asked) - 1 : -1][:, list(THREE)] / temperature
        if top_k:
            rows[rows < rows.topk(top_k, dim=1).values[:, -1:]] = -torch.inf
        chances = rows.log_softmax(dim=1)
        expected[output] = float(sum(chances[i, THREE.index(token)] for i, token in enumerate(output)).exp())
    params = [
        SamplingParams(
            max_tokens=length,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            allowed_token_ids=THREE,
            ignore_eos=True,
        )
        for seed in range(count)
    ]
    with drafting_engine(tmp_path, Random(), monkeypatch, device=where) as engine:
        outputs = engine.generate([asked] * count, params)
        counted = engine._loaded.core.statistics()
    assert counted.accepted_tokens > 0.2 * counted.draft_tokens > 0
    seen = Counter(output.token_ids for output in outputs)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert all(expected[output] > 0 for output in seen)
    pairs = [(seen[output], count * chance) for output, chance in expected.items() if chance > 0]
    assert min(often for _, often in pairs) > 3, "too seldom for this statistic"
    assert sum((found - often) ** 2 / often for found, often in pairs) < farthest
