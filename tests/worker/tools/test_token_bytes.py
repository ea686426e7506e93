"""What `plan` says that a token needs of a model, against published sizes, and by counting choices."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.load.loader import prepare
from allspan.worker.models.holding import Holding
from allspan.worker.tools.token_bytes import count_parameters, most_in_a_group, token_bytes

QWEN3_30B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def holding(folder: Path, rank: int, size: int, groups: int = 0, redundant: int = 0, **config: Any) -> Holding:
    path = folder / "config.json"
    path.write_text(AutoConfig.for_model("qwen3_moe", **QWEN3_30B | config).to_json_string())
    split: dict[str, Any] = {"enable_expert_parallel": True, "expert_parallel_size": groups} if groups else {}
    return prepare(
        ModelConfig(str(path), "tiny", redundant_experts=redundant, **split), CacheConfig(), rank, size
    ).holding


def test_parameters_are_those_that_are_published(tmp_path: Path) -> None:
    found = count_parameters(holding(tmp_path, 0, 1).spec)
    assert found.total == 30_532_122_624
    assert found.active == 30_532_122_624 - 48 * 120 * 3 * 2048 * 768  # "3.3 billion activated"


def test_a_token_s_bytes_are_the_weights_without_idle_experts_and_the_embedding(tmp_path: Path) -> None:
    read = token_bytes(holding(tmp_path, 0, 1))
    spec = holding(tmp_path, 0, 1).spec
    plain = (count_parameters(spec).active - 151936 * 2048) * 2
    assert read.mean == read.busiest
    assert plain < read.mean < plain * 1.01  # routers and norms are float32
    tied = token_bytes(holding(tmp_path, 0, 1, tie_word_embeddings=True))
    assert tied == read


@pytest.mark.parametrize(("ranks", "groups", "over_mean"), [(2, 2, 1.27), (4, 4, 1.72), (8, 8, 2.5), (4, 2, 1.27)])
def test_whole_experts_a_rank_make_a_busiest_one(ranks: int, groups: int, over_mean: float, tmp_path: Path) -> None:
    """Over the mean, of 8 experts out of 128."""
    sliced = [token_bytes(holding(tmp_path, rank, ranks)) for rank in range(ranks)]
    whole = [token_bytes(holding(tmp_path, rank, ranks, groups)) for rank in range(ranks)]
    assert [each.mean for each in whole] == [each.mean for each in sliced] == [each.busiest for each in sliced]
    experts = 48 * 3 * 2048 * 768 * 8 * 2 / ranks
    assert (whole[0].busiest - whole[0].mean) / experts == pytest.approx(over_mean - 1, rel=0.05)


@pytest.mark.parametrize(("groups", "chosen"), [((3, 3), 2), ((3, 2, 2), 3), ((4,), 2), ((1, 1, 1), 3)])
def test_the_busiest_group_s_share_is_that_of_all_choices(groups: tuple[int, ...], chosen: int) -> None:
    of = [number for number, size in enumerate(groups) for _ in range(size)]
    most = [max(map(choice.count, choice)) for choice in itertools.combinations(of, chosen)]
    assert most_in_a_group(groups, chosen) == pytest.approx(sum(most) / len(most))


def test_a_dense_model_uses_all_of_its_parameters(tmp_path: Path) -> None:
    spec = holding(tmp_path, 0, 1, mlp_only_layers=list(range(48))).spec
    found = count_parameters(spec)
    assert found.total == found.active
    assert json.loads((tmp_path / "config.json").read_text())["mlp_only_layers"]


def test_copies_of_experts_share_their_tokens(tmp_path: Path) -> None:
    one = token_bytes(holding(tmp_path, 0, 2, 2))
    with_copies = [token_bytes(holding(tmp_path, rank, 2, 2, redundant=16)) for rank in range(2)]
    assert sum(each.mean for each in with_copies) == pytest.approx(2 * one.mean, rel=1e-6)
    assert with_copies[0].busiest == pytest.approx(one.busiest, rel=0.05)
