"""What the plan says without loading is what loading takes."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan.kernels.table import op_set
from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
    ServiceConfig,
    WorkerConfig,
)
from allspan.worker.cache.budget import Room
from allspan.worker.cache.kv import KVCache
from allspan.worker.load.draft_heads import prepare_drafter
from allspan.worker.load.loader import load_model, prepare
from allspan.worker.models.decoder import build_decoder
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.program.program import Interpreter, Rows, buffer_bytes
from allspan.worker.tools.memory_plan import main, plan_memory
from support.draft_heads import save_eagle3
from support.released_configs import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from support.threads import ThreadWorld
from support.tiny_models import save_tiny

ROOM = 1 << 40


def config_for(folder: Path, **cache: Any) -> WorkerConfig:
    return WorkerConfig(
        model=ModelConfig(path=str(folder), name="tiny"),
        service=ServiceConfig(run_dir="/nowhere"),
        cache=CacheConfig(**({"page_size": 16} | cache)),
        scheduler=SchedulerConfig(max_num_seqs=3),
    )


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "int8", "uint4"])
def test_planned_bytes_are_those_of_the_loaded_ranks(kv_cache_dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = config_for(tmp_path, kv_cache_dtype=kv_cache_dtype)
    plan = plan_memory(config, 2, Room(ROOM), 2)
    for collectives in ThreadWorld(2).collectives:
        model = load_model(config.model, collectives, op_set("reference"), 8, 1, cache=config.cache)
        planned = plan.ranks[collectives.rank]
        assert planned.weight_bytes == model.weight_bytes
        cache = KVCache(model.cache_groups[0].spec, 3)
        parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
        held = sum(tensor.nbytes for layers in parts for tensor in layers if tensor is not None)
        assert held == cache.num_bytes == 3 * planned.kv_bytes_per_page


@pytest.mark.parametrize(
    ("released", "token_bytes", "scale", "parameters"),
    [
        (DEEPSEEK_V2_LITE, 31_104, 0.1147214, 15_706_484_224),
        (DEEPSEEK_V3, 70_272, 0.1352338, 671_026_419_200),
    ],
    ids=["V2-Lite", "V3"],
)
def test_plans_of_released_configs_have_their_bytes_of_a_token_and_their_softmax_scale(
    released: dict[str, Any], token_bytes: int, scale: float, parameters: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(released))
    config = config_for(tmp_path, kv_cache_dtype="bfloat16")
    plan = plan_memory(replace(config, model=replace(config.model, load_format="dummy")), 2, Room(1 << 42), 2)
    assert [rank.kv_bytes_per_page for rank in plan.ranks] == [16 * token_bytes] * 2
    assert plan.parameters == parameters
    for layer in plan.model["layers"]:
        assert layer["attention"]["scale"] == pytest.approx(scale, rel=1e-6)
        assert layer["attention"]["rotary"]["attention_factor"] == 1.0  # of mscale over mscale_all_dim


@pytest.mark.parametrize(
    ("name", "shared", "whole"),
    [
        ("deepseek_v2", 3 * 320, 320),  # every rank has all latents
        ("llama", 2 * 3 * 2 * 8 * 4, 2 * 3 * 2 * 8 * 4),  # three KV heads on three ranks
    ],
)
def test_the_plan_says_what_kv_data_parallel_attention_frees(
    name: str, shared: int, whole: int, tmp_path: Path
) -> None:
    save_tiny(tmp_path, name)
    config = config_for(tmp_path, kv_cache_bytes=2**20)
    plan = plan_memory(config, 3, Room(ROOM), 3)
    assert (plan.attention_ranks, asdict(plan.token_kv)) == (
        1,
        {"rank": shared // 3, "every_rank": shared, "freed": shared - whole},
    )
    apart = plan_memory(replace(config, model=replace(config.model, data_parallel_attention=True)), 3, Room(ROOM), 3)
    assert (apart.attention_ranks, asdict(apart.token_kv)) == (
        3,
        {"rank": whole, "every_rank": whole, "freed": shared - whole},
    )
    assert apart.num_tokens == 3 * apart.num_pages * 16
    assert round(apart.num_tokens / plan.num_tokens) == shared // whole


def test_no_kv_is_said_to_be_freed_where_data_parallel_attention_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek_v2", torch.bfloat16)
    config = config_for(tmp_path, kv_cache_bytes=2**20)
    on_gpu = replace(config, model=replace(config.model, device="cuda"))
    in_stages = replace(config, parallel=replace(config.parallel, pipeline_parallel_size=2))
    plans = [plan_memory(each, 2, Room(ROOM, ROOM), 2) for each in (config, on_gpu, in_stages)]
    assert [plan.token_kv.freed > 0 for plan in plans] == [True, True, False]


def test_with_room_the_cache_holds_max_num_seqs_contexts(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    plan = plan_memory(config_for(tmp_path), 1, Room(ROOM), 1)
    assert (plan.num_pages, plan.max_model_len, plan.largest_model_len) == (3 * 256 // 16, 256, 256)
    assert plan.num_tokens == 3 * 256
    assert plan.ranks[0].kv_bytes == plan.num_pages * plan.ranks[0].kv_bytes_per_page
    assert not plan.refusal


def test_a_budget_below_one_context_is_refused_with_the_largest_that_fits(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = config_for(tmp_path)
    page = plan_memory(config, 1, Room(ROOM), 1).ranks[0].kv_bytes_per_page
    small = plan_memory(config_for(tmp_path, kv_cache_bytes=5 * page + 1), 1, Room(ROOM), 1)
    assert (small.num_pages, small.largest_model_len) == (0, 80)
    assert "max_model_len to at most 80" in small.refusal
    nothing = plan_memory(config, 1, Room(0), 1)
    assert (nothing.num_pages, nothing.largest_model_len) == (0, 0)


def test_weights_are_taken_off_the_memory_before_the_cache_gets_its_share(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = replace(config_for(tmp_path), scheduler=SchedulerConfig(max_num_seqs=4096))
    free = plan_memory(config, 2, Room(ROOM), 2)
    heaviest = max(rank.weight_bytes for rank in free.ranks)
    page = max(rank.kv_bytes_per_page for rank in free.ranks)
    budget = 40 * page
    assert plan_memory(config, 2, Room(2 * heaviest + 2 * 4 * budget), 2).num_pages == 40


def test_what_steps_take_of_a_gpu_is_taken_off_too(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.bfloat16)
    config = config_for(tmp_path)
    config = replace(config, model=replace(config.model, device="cuda"), scheduler=SchedulerConfig())
    few = replace(config, scheduler=SchedulerConfig(64, 512))
    with_many, with_few = (plan_memory(each, 1, Room(4 << 30, 4 << 30), 1) for each in (config, few))
    page, freed = with_few.ranks[0].kv_bytes_per_page, with_many.ranks[0].step_bytes - with_few.ranks[0].step_bytes
    assert freed == pytest.approx((8192 - 512) / 8192 * with_many.ranks[0].step_bytes, rel=0.1)
    assert with_few.num_pages - with_many.num_pages == pytest.approx(freed / page, abs=2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_slots_of_adapters_and_the_buffers_of_their_pass_are_taken_off(device: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.bfloat16)
    config = config_for(tmp_path)
    config = replace(config, model=replace(config.model, device=device))
    adapted = [replace(config, adapters=AdapterConfig(max_loras=count)) for count in (1, 3)]
    without, one, three = (plan_memory(each, 1, Room(ROOM, ROOM), 1).ranks[0] for each in (config, *adapted))
    slot = one.weight_bytes - without.weight_bytes
    assert three.weight_bytes - one.weight_bytes == pytest.approx(2 * slot, rel=0.01)
    if device == "cpu":
        assert without.step_bytes == one.step_bytes == 0
    else:
        assert 1.5 < one.step_bytes / without.step_bytes < 2.5


def test_room_for_keys_and_values_of_latents_is_taken_off_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V2_LITE))
    scheduler = SchedulerConfig(64, 8192)
    config = replace(config_for(tmp_path), scheduler=scheduler)
    model = replace(config.model, load_format="dummy", device="cuda")
    short, long = (
        plan_memory(replace(config, model=replace(model, max_model_len=length)), 1, Room(1 << 37, 1 << 37), 1)
        for length in (1 << 10, 160 << 10)
    )
    tokens = 8192 + (160 << 10)
    heads_of_tokens = [1 << 18, 4 * tokens]  # at once: of short contexts, and four of the longest
    of_latents = 1024 * ((160 << 10) - (1 << 10))
    grown = of_latents + 2 * 2 * 192 * (heads_of_tokens[1] - min(heads_of_tokens[0], 16 * (8192 + 1024)))
    assert long.ranks[0].step_bytes - short.ranks[0].step_bytes == pytest.approx(grown, rel=0.01)


def test_buffers_take_what_is_planned(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    program = build_decoder(prepare(config_for(tmp_path).model, CacheConfig(), 0, 1).holding).program
    capacity = {Rows.TOKENS: 100, Rows.LOGITS: 7}
    buffers = Interpreter(program, op_set("reference"), LocalCollectives(), capacity, "cpu").buffers
    held = {buffer.untyped_storage().data_ptr(): buffer.nbytes for buffer in buffers}
    assert buffer_bytes(program, capacity, torch.float32) == sum(held.values())


def test_the_host_tier_has_as_many_pages_as_every_rank_has_bytes_for(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    page = max(rank.kv_bytes_per_page for rank in plan_memory(config_for(tmp_path), 2, Room(ROOM), 2).ranks)
    plan = plan_memory(config_for(tmp_path, host_kv_cache_bytes=5 * page + 1), 2, Room(ROOM), 2)
    assert plan.host_pages == 5
    assert [rank.host_kv_bytes for rank in plan.ranks] == [5 * rank.kv_bytes_per_page for rank in plan.ranks]
    off = config_for(tmp_path, host_kv_cache_bytes=5 * page, enable_prefix_caching=False)
    assert plan_memory(off, 2, Room(ROOM), 2).host_pages == 0
    small = plan_memory(config_for(tmp_path, host_kv_cache_bytes=1), 1, Room(ROOM), 1)
    assert "host_kv_cache_bytes is 1, must be at least a page" in small.refusal


def test_a_model_that_drafts_takes_its_weights_and_its_pages(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    save_tiny(tmp_path / "draft", "qwen3", vocab_size=131)
    alone = [plan_memory(config_for(tmp_path / name), 2, Room(ROOM), 2) for name in ("model", "draft")]
    asks = SchedulerConfig(max_num_seqs=3, speculative_config=json.dumps({"model": str(tmp_path / "draft")}))
    both = plan_memory(replace(config_for(tmp_path / "model"), scheduler=asks), 2, Room(ROOM), 2)
    for rank, planned in enumerate(both.ranks):
        parts = [each.ranks[rank] for each in alone]
        assert planned.weight_bytes == sum(each.weight_bytes for each in parts)
        assert planned.kv_bytes_per_page == sum(each.kv_bytes_per_page for each in parts)
    assert both.token_kv.every_rank == sum(each.token_kv.every_rank for each in alone)
    assert both.model == alone[0].model


def test_a_draft_head_takes_its_weights_and_its_pages(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen2", hidden_size=60, num_hidden_layers=6)
    save_eagle3(tmp_path / "head", 97, 40)
    alone = plan_memory(config_for(tmp_path / "model"), 2, Room(ROOM), 2)
    asks = json.dumps({"method": "eagle3", "model": str(tmp_path / "head")})
    config = replace(config_for(tmp_path / "model"), scheduler=SchedulerConfig(3, speculative_config=asks))
    both = plan_memory(config, 2, Room(ROOM), 2)
    for rank, planned in enumerate(both.ranks):
        head = prepare_drafter(config, prepare(config.model, config.cache, rank, 2), rank, 2)
        assert head is not None
        assert planned.weight_bytes == alone.ranks[rank].weight_bytes + head.weight_bytes
        assert planned.kv_bytes_per_page > alone.ranks[rank].kv_bytes_per_page


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_what_drafts_on_a_gpu_takes_what_its_steps_write_to(method: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen2", hidden_size=60, num_hidden_layers=6)
    if method == "eagle3":
        save_eagle3(tmp_path / "draft", 97, 40)
    else:
        save_tiny(tmp_path / "draft", "qwen3")
    asks = json.dumps({"method": method, "model": str(tmp_path / "draft")})
    found = []
    for tokens, config in itertools.product((64, 512), ("", asks)):
        plain = config_for(tmp_path / "model")
        model = replace(plain.model, device="cuda", dtype="bfloat16")
        on_gpu = replace(plain, model=model, scheduler=SchedulerConfig(3, tokens, speculative_config=config))
        found.append(plan_memory(on_gpu, 1, Room(ROOM, ROOM), 1).ranks[0].step_bytes)
    few, few_drafted, many, many_drafted = found
    assert few < few_drafted < 4 * few
    assert 2 < (many_drafted - many) / (few_drafted - few) < 8.1


def test_the_command_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path, "llama")
    path = tmp_path / "worker.json"
    path.write_text(json.dumps(asdict(config_for(tmp_path))))
    assert main([str(path), "--ranks", "3"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in printed["ranks"]] == [0, 1, 2]
    assert printed["model"]["num_heads"] == 9
    assert printed["available_bytes"] > 0
    assert main([str(path), "--ranks", "10"]) == 1
    message = "ranks 10 is more than the model's 9 query heads: use at most 9 ranks"
    assert json.loads(capsys.readouterr().out) == {"error": ConfigError.code, "message": message}


def test_what_cannot_be_loaded_cannot_be_planned(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = config_for(tmp_path)
    with pytest.raises(ConfigError, match="max_model_len 300"):
        plan_memory(replace(config, model=replace(config.model, max_model_len=300)), 1, Room(ROOM), 1)
