"""Draft heads in the ranks of a GPU: tokens are those of transformers' model, and drafts those that the head makes on a
CPU, also where it has taken in steps whose tokens the host did not know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan.protos.api.errors import ConfigError
from allspan.protos.api.options import RequestOptions
from allspan.worker.engine.steps.draft_head import DraftHead
from allspan.worker.step.rank_drafter import Drafted, DraftRows, DraftRun, RanStep
from support.cores import request
from support.draft_heads import Mtp, save_eagle3
from support.gpu_drafting import (
    FIXED,
    SIZES,
    VOCAB,
    answers,
    assert_likely,
    assert_replayed,
    device_for,
    greedy,
    loaded,
    noted_plans,
)
from support.tiny_models import prompt, save_tiny


@pytest.fixture
def on(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of a model."""
    return device_for(device, monkeypatch)


LATENT = {
    "hidden_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token follows from the last one alone, and whose layer for multi-token prediction knows how:
    no layer adds anything, and a row of the head is an embedding of another token."""
    folder = tmp_path_factory.mktemp("mtp")
    mtp = Mtp(folder, "deepseek_v3", **LATENT, **FIXED)
    mtp.rewrite(folder, {"self_attn.o_proj": 0.0, "down_proj": 0.0}, torch.eye(96, 192))
    return folder


def test_a_layer_that_knows_what_follows_is_right(following: Path, on: dict[str, str]) -> None:
    requests = [
        request(number, prompt(5 + 30 * (number == 1), VOCAB, number), max_tokens=14, temperature=temperature, seed=4)
        for number, temperature in enumerate((0.0, 0.0, 3.0))
    ]
    plain = answers(loaded(following, on), requests)
    engine = loaded(following, on, '{"method": "mtp"}')
    found = answers(engine, requests)
    counters = engine.core.statistics()
    assert [each.token_ids for each in found.values()] == [each.token_ids for each in plain.values()]
    assert counters.accepted_tokens == counters.draft_tokens > 3 * 6
    assert_replayed(on)


def test_a_head_that_the_models_kernels_do_not_run_is_refused(on: dict[str, str], tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama", torch.bfloat16, **FIXED, **SIZES | {"num_hidden_layers": 2})
    save_eagle3(tmp_path / "head", VOCAB, 90, 64, 64, head_dim=20, eagle_aux_hidden_state_layer_ids=[0, 1, 1])
    asks = json.dumps({"method": "eagle3", "model": str(tmp_path / "head")})
    with pytest.raises(ConfigError, match="the head has a head size of 20 and 2 query heads a KV head"):
        loaded(tmp_path / "model", {**on, "load_format": "dummy"}, asks)


@dataclass(frozen=True)
class Eagle:
    """A model and an EAGLE-3 head of it, as transformers has the first."""

    model: Path
    asks: str
    reference: Any

    @classmethod
    def made(cls, folder: Path, **config: Any) -> Eagle:
        sizes = SIZES | {"num_hidden_layers": 6}
        reference = save_tiny(folder / "model", "llama2", torch.bfloat16, **FIXED, **sizes).float()
        save_eagle3(folder / "head", VOCAB, 90, 64, 64, **config)
        return cls(folder / "model", json.dumps({"method": "eagle3", "model": str(folder / "head")}), reference)


Noted = dict[tuple[int, ...], Sequence[int]]


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """What heads draft behind which tokens, by engines: a test appends one for each."""
    noted: list[Noted] = []
    draft = DraftHead.draft

    def noting(head: DraftHead, runs: Sequence[DraftRun], rows: DraftRows, ran: RanStep) -> Mapping[int, Drafted]:
        found = draft(head, runs, rows, ran)
        for row, each in found.items():
            if each.drafts:
                noted[-1][tuple(rows.tokens[row, : each.num_tokens].tolist())] = each.drafts
        return found

    monkeypatch.setattr(DraftHead, "draft", noting)
    return noted


def assert_mostly_equal(one: Noted, other: Noted, least: int) -> None:
    """As far as 16 bits tell, of drafts behind tokens that both have seen."""
    both = [one[tokens] == other[tokens] for tokens in one.keys() & other.keys()]
    assert len(both) >= least
    assert sum(both) > 0.8 * len(both)


@pytest.mark.parametrize("norms", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_head_drafts_what_it_drafts_on_a_cpu(
    norms: bool, tmp_path: Path, on: dict[str, str], drafts: list[Noted]
) -> None:
    eagle, requests = Eagle.made(tmp_path, norm_before_fc=norms), greedy((14, 13, 35, 15), 24)
    for where in (on, {"device": "cpu"}):
        drafts.append({})
        engine = loaded(eagle.model, where, eagle.asks, 8)
        assert_likely(answers(engine, requests), requests, eagle.reference)
        assert engine.core.statistics().preemptions
    assert_mostly_equal(*drafts, 20)


def test_a_head_takes_in_steps_that_are_planned_ahead(
    tmp_path: Path, on: dict[str, str], drafts: list[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    eagle, plans = Eagle.made(tmp_path), noted_plans(monkeypatch)
    engine, asked = loaded(eagle.model, on, eagle.asks), greedy((35, 9), 30)
    for one in asked:
        one.options = RequestOptions(speculation=False)
    drafts.append({})
    found = answers(engine, asked)
    assert sum(plan.in_flight for plan in plans) > 20
    assert not drafts[0]
    assert_likely(found, asked, eagle.reference)
    ids = [(*one.prompt_token_ids, *found[one.request_id].token_ids, 3) for one in asked]
    then = [request(9 + i, each, max_tokens=12, temperature=0.0) for i, each in enumerate(ids)]
    assert_likely(answers(engine, then), then, eagle.reference)
    assert engine.core.statistics().prefix_hit_tokens >= 80
    drafts.append({})
    answers(loaded(eagle.model, {"device": "cpu"}, eagle.asks), then)
    assert_mostly_equal(*drafts, 12)
