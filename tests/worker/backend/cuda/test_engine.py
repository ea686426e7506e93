"""The engine on the CUDA kernels: the tokens of transformers' model, whatever runs beside them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan import Engine, RequestOptions, SamplingParams
from allspan.kernels.cuda.attention import cascade_rule
from allspan.worker.backend.cuda.event_wait import EventWaiter
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers
from allspan.worker.models.model import Model
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.row_inputs import PromptEmbeddings
from support.byte_tokenizer import write_byte_tokenizer
from support.tiny_models import prompt, reference_logits, save_tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64, "hidden_size": 144, "num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64},
}
PROMPTS = [3, 1, 70]
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "kv_cache_bytes": 4_000_000,
}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A random checkpoint in bfloat16, and transformers' model of it in float32."""
    reference = save_tiny(tmp_path / "model", request.param, torch.bfloat16, **FAMILIES[request.param])
    return tmp_path / "model", reference.float()


def assert_likely(output: tuple[int, ...], asked: list[int], reference: Any, slack: float = 0.05) -> None:
    """Each token is the reference's best after those before it, or as good but for what 16 bits round away."""
    logits = reference_logits(reference, [*asked, *output])[len(asked) - 1 : -1]
    for i, (token, row) in enumerate(zip(output, logits, strict=True)):
        miss = float(row.max() - row[token])
        assert miss <= slack * float(row.std()), f"token {i} of {len(output)}: {miss} below the best"


@pytest.fixture
def were_shared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with every step, by whether its rows shared tokens."""
    noted: list[bool] = []
    forward = Model.forward

    def noting(model: Model, inputs: StepInputs) -> torch.Tensor:
        noted.append(inputs.shared is not None)
        return forward(model, inputs)

    monkeypatch.setattr(Model, "forward", noting)
    return noted


def test_rows_that_share_a_prefix_decode_as_a_cascade(
    tmp_path: Path, on: dict[str, Any], were_shared: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade_rule, "READ_AGAIN", 1e6)
    monkeypatch.setattr(cascade_rule, "LAUNCHES", 0)
    reference = save_tiny(tmp_path / "model", "llama", torch.bfloat16, **FAMILIES["llama"]).float()
    vocab = reference.config.vocab_size
    prefix = prompt(53, vocab)
    asked = [prefix + prompt(length, vocab, 1 + length) for length in (2, 17, 1)]  # padded to four rows
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for is_disabled in (False, True):
        were_shared.clear()
        with Engine(tmp_path / "model", **on, **SETTINGS, disable_cascade_attn=is_disabled) as engine:
            engine.generate([prefix], SamplingParams(max_tokens=1))  # its three whole pages stay in the cache
            outputs = engine.generate(asked, params)
        assert any(were_shared) is not is_disabled
        for one, output in zip(asked, outputs, strict=True):
            assert output.timings.cached_tokens == 48
            assert_likely(output.token_ids, one, reference)


def test_embedding_rows_of_the_same_ids_give_equal_tokens(tmp_path: Path, on: dict[str, Any]) -> None:
    sizes = {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    reference = save_tiny(tmp_path, "qwen3", torch.bfloat16, **sizes)
    table, ids = reference.get_input_embeddings().weight.detach().float().numpy(), prompt(19, 97)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with Engine(tmp_path, **on, **SETTINGS) as engine:
        (expected,) = engine.generate([ids], params)
        queue = engine.start_with_embeddings([0] * 19, PromptEmbeddings(0, table[ids]), params)[1]
        assert tuple(token for output in queue for token in output.token_ids) == expected.token_ids


def test_vectors_are_the_pooled_states_of_transformers_beside_requests_that_decode(
    tmp_path: Path, on: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, and as prompts of one token in steps of nothing but rows with one."""
    waited: list[int] = []
    to_host = EventWaiter.to_host

    def noting(waiter: EventWaiter, tensor: torch.Tensor) -> torch.Tensor:
        waited.append(len(tensor))
        return to_host(waiter, tensor)

    monkeypatch.setattr(EventWaiter, "to_host", noting)
    sizes = {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_byte_tokenizer(tmp_path)
    reference = save_tiny(tmp_path, "qwen3", torch.bfloat16, vocab_size=256, **sizes).float()
    asked = [[5], prompt(22, 256, 3), [9]]
    with torch.no_grad():
        states = [reference.model(torch.tensor([ids])).last_hidden_state[0] for ids in asked]
    with Engine(tmp_path, **on, **SETTINGS | {"max_num_batched_tokens": 16}) as engine:
        handle, _ = engine.start_request([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
        for pooling, pool in (("last", lambda rows: rows[-1]), ("mean", lambda rows: rows.mean(0))):
            waited.clear()
            found = engine.embed(asked, normalize=False, options=RequestOptions(pooling=pooling))
            expected = torch.stack([pool(rows) for rows in states])
            torch.testing.assert_close(torch.tensor(found), expected, rtol=0.05, atol=0.05)
            assert sum(waited) >= (3 if pooling == "last" else 24), "every wait for the device has a limit"
        assert engine.score("a", "a")[0] == pytest.approx(1.0, abs=1e-4)
        engine.release_request(handle)


def test_layers_with_a_window_keep_its_pages_alone(
    tmp_path: Path, on: dict[str, Any], were_shared: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cache groups, of which the one that keeps all tokens shares a prefix."""
    monkeypatch.setattr(cascade_rule, "READ_AGAIN", 1e6)
    monkeypatch.setattr(cascade_rule, "LAUNCHES", 0)
    sizes = {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    windows = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    reference = save_tiny(tmp_path / "model", "qwen3", torch.bfloat16, **sizes, **windows).float()
    vocab = reference.config.vocab_size
    prefix = prompt(53, vocab)
    asked = [prefix + prompt(length, vocab, 1 + length) for length in (2, 27, 1)]
    with Engine(tmp_path / "model", **on, **SETTINGS) as engine:
        engine.generate([prefix], SamplingParams(max_tokens=1))
        outputs = engine.generate(asked, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        groups = [group.cache.device for group in engine._loaded.core._planner.scheduler.memory.groups]
    assert any(were_shared)
    assert [group.num_used for group in groups] == [0, 0]
    assert groups[1].total < groups[0].total
    for one, output in zip(asked, outputs, strict=True):
        assert output.timings.cached_tokens == 48
        assert_likely(output.token_ids, one, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", ["auto", "int8"])
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_a_long_prefix_of_many_rows_pays(
    pages: str, is_eager: bool, tmp_path: Path, were_shared: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if pages == "int8":  # it takes more rows
        monkeypatch.setattr(cascade_rule, "READ_AGAIN", 1.0)
    sizes = FAMILIES["qwen3"] | {"max_position_embeddings": 8192}
    reference = save_tiny(tmp_path / "model", "qwen3", torch.bfloat16, **sizes).float()
    vocab = reference.config.vocab_size
    prefix = prompt(6000, vocab)
    asked = [prefix + prompt(1 + i % 20, vocab, i) for i in range(61)]
    more = {"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache_bytes": 200_000_000}
    settings = SETTINGS | more | {"kv_cache_dtype": pages, "enforce_eager": is_eager, "device": "cuda"}
    with Engine(tmp_path / "model", **settings) as engine:
        engine.generate([prefix], SamplingParams(max_tokens=1))
        outputs = engine.generate(asked, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert any(were_shared)
    if pages == "auto":
        for i in (0, 30, 60):
            assert_likely(outputs[i].token_ids, asked[i], reference)
        return
    with Engine(tmp_path / "model", **settings, disable_cascade_attn=True) as engine:
        engine.generate([prefix], SamplingParams(max_tokens=1))
        plain = engine.generate(asked, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    firsts = [one.token_ids[:4] == other.token_ids[:4] for one, other in zip(outputs, plain, strict=True)]
    assert sum(firsts) >= 0.8 * len(firsts), "but for what bfloat16 rounds away"


@pytest.mark.parametrize("pages", ["int8", "uint4"])
def test_quantised_pages_hold_what_the_cpu_s_do(pages: str, tmp_path: Path, on: dict[str, Any]) -> None:
    reference = save_tiny(tmp_path / "model", "qwen2", torch.bfloat16, **FAMILIES["qwen2"])
    asked = prompt(20, reference.config.vocab_size)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    told = []
    for here in ({"kernels": "reference"}, on):
        settings = SETTINGS | {"dtype": "bfloat16" if here is on else "float32", "kv_cache_dtype": pages}
        with Engine(tmp_path / "model", **here, **settings) as engine:
            (output,) = engine.generate([asked], params)
        told.append([entry.logprob for entry in output.prompt_logprobs])
    differences = (torch.tensor(told[0]) - torch.tensor(told[1])).abs()
    rounding = {"int8": 0.15, "uint4": 1.0}[pages]  # bfloat16 rounds, and a key that is rounded may get another code
    assert float(differences.median()) < rounding
    assert float(differences.max()) < 5 * rounding


def test_greedy_tokens_are_those_of_transformers(model: tuple[Path, Any], on: dict[str, Any]) -> None:
    folder, reference = model
    vocab = reference.config.vocab_size
    asked = [prompt(length, vocab, seed) for seed, length in enumerate(PROMPTS)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with Engine(folder, **on, **SETTINGS) as engine:
        outputs = engine.generate(asked, params)
    for one, output in zip(asked, outputs, strict=True):
        assert len(output.token_ids) == 4
        assert_likely(output.token_ids, one, reference)


@pytest.mark.parametrize("pages", ["auto", pytest.param("uint4", marks=pytest.mark.gpu)])
def test_a_float16_checkpoint_is_computed_in_float16(pages: str, tmp_path: Path, on: dict[str, Any]) -> None:
    """Nearer to transformers than bfloat16 would come."""
    reference = save_tiny(tmp_path / "model", "qwen3", torch.float16, **FAMILIES["qwen3"]).float()
    vocab = reference.config.vocab_size
    asked = [prompt(length, vocab, seed) for seed, length in enumerate(PROMPTS)]
    settings = SETTINGS | {"dtype": "auto" if on["device"] == "cuda" else "float16", "kv_cache_dtype": pages}
    with Engine(tmp_path / "model", **on, **settings) as engine:
        outputs = engine.generate(asked, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        model = engine._loaded.model
        assert model.holding.dtype is torch.float16
        assert {held.dtype for held in model.buffers} == {torch.float16, torch.float32}
        assert model.cache_groups[0].spec.dtype == ("float16" if pages == "auto" else pages)
    for one, output in zip(asked, outputs, strict=True):
        assert_likely(output.token_ids, one, reference, 0.01 if pages == "auto" else 1.0)


def test_prompts_that_are_padded_to_a_captured_step_get_their_tokens(tmp_path: Path, on: dict[str, Any]) -> None:
    reference = save_tiny(tmp_path / "model", "llama", torch.bfloat16, **FAMILIES["llama"]).float()
    asked = [prompt(length, reference.config.vocab_size, length) for length in (1, 3, 33)]
    with Engine(tmp_path / "model", **on, **SETTINGS) as engine:
        buffers = engine._loaded.core._batch.buffers
        assert isinstance(buffers, DeviceBuffers)
        assert buffers.chunks == ((16, 32, 64) if on["device"] == "cuda" else ())
        buffers.chunks = (16, 32, 64)
        outputs = engine.generate(asked, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    for one, output in zip(asked, outputs, strict=True):
        assert_likely(output.token_ids, one, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_whoever_comes_while_steps_go_ahead_gets_its_tokens(eager: bool, tmp_path: Path) -> None:
    """Chunks, newcomers and decodes in steps that begin before the last one's tokens are known, with cached prefixes,
    too few pages for all, a host tier, and requests that leave early."""
    reference = save_tiny(tmp_path / "model", "qwen3", torch.bfloat16, **FAMILIES["qwen3"]).float()
    vocab = reference.config.vocab_size
    beginnings = [prompt(48, vocab, 7), prompt(20, vocab, 8), []]
    asked = [beginnings[i % 3] + prompt(1 + 7 * i % 41, vocab, 100 + i) for i in range(48)]
    more = {"enforce_eager": eager, "kv_cache_bytes": 300_000, "host_kv_cache_bytes": 1_000_000}
    with Engine(tmp_path / "model", device="cuda", **(SETTINGS | more)) as engine:
        batch = engine._loaded.core._batch
        apply, noted = batch.apply, []

        def noting(plan: Any, inbox: Any, newest: Any = None) -> Any:
            if newest is not None:
                noted.append(max(run.num_tokens for run in plan.runs))
            return apply(plan, inbox, newest)

        batch.apply = noting  # type: ignore[method-assign]
        started = []
        for i, one in enumerate(asked):
            params = SamplingParams(max_tokens=1 + i % 9, temperature=0.0, ignore_eos=True)
            started.append(engine.start_request(one, params))
            if i % 5 == 4:
                time.sleep(0.003)
            if i % 11 == 10:
                engine.stop_request(started[i - 1][0])
        engine.sync_request(timeout=120)
        outputs = [[token for output in queue for token in output.token_ids] for _, queue in started]
    assert min(noted) == 1
    assert max(noted) > 1
    for i, (one, output) in enumerate(zip(asked, outputs, strict=True)):
        assert len(output) == 1 + i % 9 or i % 11 == 9
        assert_likely(tuple(output), one, reference)


@pytest.mark.gpu
def test_a_hidden_state_is_what_the_head_reads_of_the_last_token(tmp_path: Path) -> None:
    """In chunks and steps that were recorded, beside a request that decodes, and again from the prefix cache."""
    reference = save_tiny(tmp_path, "qwen3", torch.bfloat16, **FAMILIES["qwen3"]).float()
    with Engine(tmp_path, device="cuda", **SETTINGS) as engine:
        handle, _ = engine.start_request([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
        for length in (1, 90, 90):
            ids = prompt(length, reference.config.vocab_size, length)
            with torch.no_grad():
                expected = reference.model(torch.tensor([ids])).last_hidden_state[0, -1]
            torch.testing.assert_close(torch.tensor(engine.hidden_state(ids)), expected, rtol=0.05, atol=0.05)
        engine.release_request(handle)
