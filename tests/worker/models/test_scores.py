"""A model whose scores have all there is: a scale, a window in some layers, a cap, slopes, sinks and a query scale by
position. Its logits are those of the formulas on any number of ranks, its engine's numbers the same bits however steps
are cut; and the tables and slopes themselves."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2

from allspan.kernels.table import op_set
from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.worker.cache.kv import KVCache
from allspan.worker.engine.setup import load_engine
from allspan.worker.load.loader import load_model
from allspan.worker.load.registry import FAMILIES
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.blocks.position_scores import QueryScale, alibi_slopes, query_scale_table
from allspan.worker.models.families.qwen2 import QWEN2
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.shard import make_shard
from allspan.worker.models.spec import ModelSpec
from allspan.worker.parallel.local import LocalCollectives
from support.cores import Collected, request, step_until_idle
from support.threads import ThreadWorld
from support.tiny_models import prompt, reference_logits, relative_error, save_tiny, step_inputs

HEADS, WINDOW, PAGE = 6, 20, 16
FEATURES: dict[str, Any] = {
    "soft_cap": 1.5,
    "has_slopes": True,
    "has_sinks": True,
    "query_scale": QueryScale("log", 16),
    "scale": 0.7,
}
IDS = prompt(75, 97)


def _read(config: ForeignConfig) -> ModelSpec:
    spec = QWEN2.read(config)
    layers = [replace(layer, attention=replace(layer.attention, **FEATURES)) for layer in spec.layers]  # type: ignore[type-var]
    return replace(spec, layers=tuple(layers))


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> tuple[Tensor, None]:
    """In the place of transformers' own: the formulas, on queries and keys that are rotated."""
    key, value = (modeling_qwen2.repeat_kv(x, HEADS // x.shape[1]) for x in (key, value))
    places = torch.arange(query.shape[2])
    factors = ((places + 1).log() / torch.tensor(16.0).log()).clamp(min=1)
    logits = (query * factors[:, None]) @ key.transpose(2, 3) * FEATURES["scale"]
    logits = (logits / FEATURES["soft_cap"]).tanh() * FEATURES["soft_cap"]
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])  # of 6 heads: 4, and 2 of 8
    logits = logits + slopes[:, None, None] * (places[None, :] - places[:, None]) + mask
    sinks = module.sinks.view(1, HEADS, 1, 1).expand(1, HEADS, len(places), 1)
    weights = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2).contiguous(), None


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder whose model has the features in every layer, and what computes its logits."""
    folder, patch = tmp_path_factory.mktemp("scored"), pytest.MonkeyPatch()
    overrides = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "num_hidden_layers": 4}
    model = save_tiny(folder, "qwen2", **overrides)
    weights = load_file(folder / "model.safetensors")
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(number)) * 2
        weights[f"model.layers.{number}.self_attn.sinks"] = layer.self_attn.sinks
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    patch.setitem(FAMILIES, "qwen2", replace(QWEN2, read=_read))
    patch.setattr(modeling_qwen2, "eager_attention_forward", _attend)
    yield folder, model
    patch.undo()


def logits_of(folder: Path, ranks: int, backend: str, chunk: int, kv: str) -> Tensor:
    """All rows of logits of IDS, in chunks."""
    world = ThreadWorld(ranks)

    def run(rank: int) -> Tensor:
        settings, cache = ModelConfig(str(folder), "tiny"), CacheConfig(page_size=PAGE, kv_cache_dtype=kv)
        model = load_model(settings, world.collectives[rank], op_set(backend), chunk, chunk, cache=cache)
        model.bind_cache(*(KVCache(group.spec, 5) for group in model.cache_groups))
        parts = []
        for start in range(0, len(IDS), chunk):
            inputs = step_inputs([IDS[start : start + chunk]], [start], [[3, 1, 4, 0, 2]], PAGE)
            both = replace(inputs, groups=(inputs.of_group(0),))
            parts.append(model.forward(both).clone())
        return torch.cat(parts)

    by_rank = world.run(run)
    whole = by_rank[0].shape[1] == 97
    return by_rank[0] if whole else torch.cat(by_rank, dim=1)


@pytest.mark.parametrize(
    ("ranks", "backend", "chunk", "kv", "limit"),
    [
        (1, "reference", 80, "float32", 1e-5),
        (1, "cpu", 80, "float32", 1e-5),
        (2, "cpu", 7, "float32", 1e-5),
        (3, "cpu", 80, "float32", 1e-5),
        (1, "cpu", 80, "int8", 8e-2),
        (1, "reference", 80, "int8", 8e-2),
    ],
)
def test_logits_are_those_of_the_formulas(
    scored: Any, ranks: int, backend: str, chunk: int, kv: str, limit: float
) -> None:
    folder, model = scored
    assert relative_error(logits_of(folder, ranks, backend, chunk, kv), reference_logits(model, IDS)) < limit


def numbers_of(folder: Path, pages: tuple[int, ...], budget: int, host: int = 0, alone: bool = False) -> list[Any]:
    """Tokens and their log-probabilities of conversations with shared beginnings."""
    config = WorkerConfig(
        ModelConfig(str(folder), "tiny", max_model_len=160),
        ServiceConfig("-"),
        CacheConfig(page_size=PAGE, kv_cache_bytes=2**30, host_kv_cache_bytes=host, enable_prefix_caching=not alone),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget),
    )
    with pytest.MonkeyPatch.context() as patch:
        if pages:
            patch.setattr("allspan.worker.engine.setup.num_kv_pages", lambda cache, demand: pages)
        core = load_engine(config, op_set("cpu", 2), LocalCollectives(), None).core
    core.on_outputs = collected = Collected()
    rng, families = random.Random(7), [prompt(40, 97, seed) for seed in range(2)]
    asked = []
    for number in range(6):
        ids = families[number % 2][: rng.randint(17, 40)] + [rng.randrange(97) for _ in range(rng.randint(1, 5))]
        asked.append(request(number, ids, max_tokens=rng.randint(20, 45), ignore_eos=True, logprobs=0))
    for one in asked:
        core.submit(one)
        if alone:
            step_until_idle(core)
    step_until_idle(core)
    core.check()
    counters = core.statistics()
    if host:
        assert counters.prefix_hit_tokens > 0
        assert counters.preemptions > 0
    return [
        (collected.tokens(one), [each.logprob for each in collected.outputs[one.request_id].logprobs]) for one in asked
    ]


def test_bits_are_the_same_however_steps_are_cut(scored: Any) -> None:
    """Alone in whole chunks without a cache; among others with prefix hits, preemption and resumption, few pages of the
    window (chunks of 13 tokens) and a host tier."""
    folder, _ = scored
    alone = numbers_of(folder, (), 160, alone=True)
    assert numbers_of(folder, (12, 3), 24) == alone
    assert numbers_of(folder, (11, 9), 24, host=2**18) == alone


def test_slopes_of_a_rank_are_those_of_its_heads_in_the_whole_model() -> None:
    block = Gqa(40, 40, 16, None, has_slopes=True)
    whole = alibi_slopes(40)
    assert whole[:2] == (2**-0.25, 2**-0.5)
    assert (whole[31], whole[32], whole[39]) == pytest.approx((0.00390625, 0.91700404, 0.27262693))
    ranks = [block.on_rank(make_shard(rank, 3)).slopes for rank in range(3)]
    assert [len(each or ()) for each in ranks] == [14, 13, 13]
    assert sum((each or () for each in ranks), ()) == whole


def test_query_scales_follow_their_formulas() -> None:
    log, steps = query_scale_table(QueryScale("log", 8), 100), query_scale_table(QueryScale("log_steps", 8, 0.1), 100)
    assert log[:8].eq(1).all()
    assert float(log[63]) == pytest.approx(2)
    assert steps[:8].eq(1).all()
    assert float(steps[56]) == pytest.approx(1 + 0.1 * torch.tensor(8.0).log().item())
    for wrong in (QueryScale("cubic", 8), QueryScale("log", 1)):
        with pytest.raises(ConfigError, match="query_scale"):
            query_scale_table(wrong, 8)


@pytest.mark.parametrize("features", [{}, {"soft_cap": 5.0}, {"has_sinks": True}])
def test_what_a_bias_adds_to_keys_stays_where_the_softmax_does_not_take_it_out(features: dict[str, Any]) -> None:
    assert Gqa(4, 2, 16, None, qkv_bias=True, **features).has_centers == (not features)
