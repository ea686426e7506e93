"""What a Model does beside computing: limits, progress, memory, and what its program holds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from allspan.kernels.ops import OpSet
from allspan.kernels.table import op_set
from allspan.protos.api.errors import ConfigError, InternalError
from allspan.protos.config.settings import CacheConfig, ModelConfig, ParallelConfig, ServiceConfig, WorkerConfig
from allspan.worker.backend.cpu import backend as cpu_backend
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.load.loader import load_model, open_ops, prepare
from allspan.worker.models.decoder import build_decoder
from allspan.worker.models.model import Model
from allspan.worker.program.program import Buffer, Named, ProgramBuilder, Rows, Slot
from support.threads import ThreadWorld
from support.tiny_gguf import save_gguf
from support.tiny_models import logits_on_ranks, prefill, prompt, relative_error, save_tiny, step_inputs


def load(path: Path, size: int = 1, rank: int = 0, max_tokens: int = 32, **kwargs: Any) -> Model:
    collectives = ThreadWorld(size).collectives[rank]
    config = ModelConfig(path=str(path), name="tiny")
    return load_model(
        config, collectives, op_set("reference"), max_tokens, 4, cache=CacheConfig(page_size=16), **kwargs
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = ModelConfig(path=str(tmp_path), name="tiny", device="cuda")
    with pytest.raises(ConfigError, match=r"device is cuda, but torch .* sees no GPU"):
        load_model(config, ThreadWorld(1).collectives[0], op_set("reference"), 32, 4)


def test_threads_that_cannot_be_started_are_a_setting_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(backend: str, threads: int, cpus: tuple[int, ...]) -> OpSet:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(cpu_backend, "op_set", refused)
    config = WorkerConfig(ModelConfig("", ""), ServiceConfig(run_dir=""), parallel=ParallelConfig(threads=8))
    with pytest.raises(ConfigError, match="threads is 8, which cannot be started: Resource temporarily"):
        open_ops(config)


@pytest.mark.parametrize("kernels", ["cuda", "cuda/sm_90"])
def test_kernels_of_another_device_are_refused(kernels: str) -> None:
    config = WorkerConfig(ModelConfig("", ""), ServiceConfig(run_dir=""))
    with pytest.raises(ConfigError, match=f"kernels is '{kernels}', which needs device 'cuda'; device is 'cpu'"):
        open_ops(config, kernels)


def note(seen: list[tuple[int, int]], done: int, total: int) -> None:
    seen.append((done, total))


def test_progress_ends_at_all_bytes_and_the_plan_knew_them(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    for rank in range(2):
        seen: list[tuple[int, int]] = []
        model = load(tmp_path, 2, rank, on_progress=partial(note, seen))
        planned = prepare(ModelConfig(path=str(tmp_path), name="tiny"), CacheConfig(), rank, 2).weight_bytes
        assert seen == sorted(seen)
        assert seen[-1] == (model.weight_bytes, planned) == (planned, planned)


def test_tied_embeddings_are_held_once(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tied", "qwen3")
    save_tiny(tmp_path / "untied", "qwen3", tie_word_embeddings=False)
    assert (
        load(tmp_path / "untied").weight_bytes - load(tmp_path / "tied").weight_bytes == 7 * 16 * 64 * 4
    )  # 97 by 60, in panels


@pytest.mark.parametrize("name", ["llama", "qwen3"])  # a head of its own, and one that is tied to the embedding
@pytest.mark.parametrize("quantization", ["none", "uint4"])
def test_a_head_in_eight_bits_is_near_the_head(name: str, quantization: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    ids = [prompt(9, 97)]
    for ranks in (1, 2):
        plain, found = (
            logits_on_ranks(tmp_path, ranks, ids, quantization=quantization, quantize_lm_head=is_quantised)[0]
            for is_quantised in (False, True)
        )
        assert 0 < relative_error(found, plain) < 0.02
    held = []
    for is_quantised in (False, True):
        config = ModelConfig(str(tmp_path), "tiny", quantization=quantization, quantize_lm_head=is_quantised)
        weights = load_model(config, ThreadWorld(1).collectives[0], op_set("reference"), 32, 4).weights
        held.append(weights["embedding.weight" if name == "qwen3" else "lm_head.weight"].nbytes)
    assert held[1] < 0.6 * held[0]  # 16 bits or more an input


@pytest.mark.parametrize(("quantization", "is_smaller"), [("none", True), ("gguf", False)])
def test_a_head_of_a_gguf_file_is_held_in_eight_bits_where_it_would_be_decoded(
    quantization: str, is_smaller: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = save_tiny(tmp_path / "model", "llama", intermediate_size=96, **sizes)
    path = tmp_path / "tiny.gguf"
    save_gguf(path, model, GGMLQuantizationType.Q8_0)
    held = []
    for is_quantised in (False, True):
        config = ModelConfig(str(path), "tiny", quantization=quantization, quantize_lm_head=is_quantised)
        weights = load_model(config, ThreadWorld(1).collectives[0], op_set("reference"), 32, 4).weights
        held.append(weights["lm_head.weight"].nbytes)
    assert (held[1] < 0.6 * held[0]) == is_smaller


def test_two_ranks_have_two_collectives_a_layer_and_one_for_the_embedding(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = ModelConfig(path=str(tmp_path), name="tiny")
    counts = []
    for size in (1, 2):
        program = build_decoder(prepare(config, CacheConfig(), 0, size).holding).program
        counts.append(sum(op.name == "all_reduce" for op in program.ops))
    assert counts == [0, 1 + 2 * 2]


@pytest.mark.parametrize("size", [1, 2])
def test_products_are_added_to_float32_alone(size: int, tmp_path: Path) -> None:
    """GPUs have no kernels that add to activations of 16 bits, in which ranks sum up what experts make."""
    save_tiny(tmp_path, "deepseek_v2", first_k_dense_replace=1)
    program = build_decoder(prepare(ModelConfig(str(tmp_path), "tiny"), CacheConfig(), 0, size).holding).program
    added = [op.arguments[-1] for op in program.ops if op.name == "packed_linear_add"]
    buffers = [program.slots[slot.index] for slot in added if isinstance(slot, Slot)]
    assert all(isinstance(buffer, Buffer) and buffer.is_exact for buffer in buffers)
    assert len(buffers) == len(added) == (4 if size == 1 else 0)


def test_biases_behind_a_split_input_are_held_by_rank_zero_only(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    config = ModelConfig(path=str(tmp_path), name="tiny")
    names = []
    for rank in range(2):
        program = build_decoder(prepare(config, CacheConfig(), rank, 2).holding).program
        names.append({slot.name for slot in program.slots if isinstance(slot, Named)})
    assert "layers.0.o.bias" in names[0]
    assert "layers.0.o.bias" not in names[1]
    assert "layers.0.qkv.bias" in names[1]


def test_a_step_without_rows_of_logits_still_fills_the_cache(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model = load(tmp_path)
    ids = prompt(20, 97)
    whole = prefill(model, [ids[:4]], 4)[0]
    model.bind_cache(KVCache(model.cache_groups[0].spec, 2))
    inputs = step_inputs([ids[:3]], [0], [[0, 1]], 16)
    inputs.logits_rows = inputs.logits_rows[:0]
    assert model.forward(inputs).shape == (0, 131)
    last = model.forward(step_inputs([ids[3:4]], [3], [[0, 1]], 16))
    torch.testing.assert_close(last, whole[3:4])


def test_a_step_beyond_the_buffers_or_without_a_cache_is_an_internal_error(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model = load(tmp_path, max_tokens=3)
    inputs = step_inputs([[1, 2, 3, 4]], [0], [[0]], 16)
    with pytest.raises(InternalError, match="before bind_cache"):
        model.forward(inputs)
    with pytest.raises(InternalError, match="a cache of"):
        model.bind_cache(KVCache(CacheSpec(32, 2, 3, 8, "float32"), 1))
    model.bind_cache(KVCache(model.cache_groups[0].spec, 1))
    with pytest.raises(InternalError, match="4 rows of tokens, the buffers hold 3"):
        model.forward(inputs)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_inputs_that_come_again_are_read_and_checked_again(tmp_path: Path, backend: str) -> None:
    save_tiny(tmp_path, "llama")
    config, ids = ModelConfig(path=str(tmp_path), name="tiny"), prompt(6, 97)
    model = load_model(config, ThreadWorld(1).collectives[0], op_set(backend), 8, 4, cache=CacheConfig(page_size=16))
    model.bind_cache(KVCache(model.cache_groups[0].spec, 2))
    wanted = [model.forward(step_inputs([[token]], [i], [[0]], 16)).clone() for i, token in enumerate(ids)]
    inputs = step_inputs([[ids[0]]], [0], [[1]], 16)
    for i, token in enumerate(ids):
        inputs.ids.fill_(token)
        assert torch.equal(model.forward(inputs), wanted[i])
        for moving in (inputs.positions, inputs.slots, inputs.kv_lens):
            moving += 1
    if backend == "cpu":  # the reference trusts its caller
        inputs.slots.fill_(2 * 16)
        with pytest.raises(ValueError, match=r"slots\[0\] is 32, not in \[0, 32\)"):
            model.forward(inputs)


def test_a_slot_keeps_its_first_declaration() -> None:
    builder = ProgramBuilder()
    x = builder.buffer("x", Rows.TOKENS, 12)
    assert builder.buffer("x", Rows.TOKENS, 12) == x
    with pytest.raises(InternalError, match="declared twice"):
        builder.buffer("x", Rows.LOGITS, 12)
    with pytest.raises(InternalError, match="no view of shape"):
        builder.view(x, 5, 2)


def test_a_cache_holds_what_its_spec_says() -> None:
    spec = CacheSpec(page_size=16, num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    cache = KVCache(spec, 5)
    assert spec.bytes_per_page == 2 * 3 * 2 * 16 * 8 * 2
    assert len(cache.keys) == len(cache.values) == 3
    assert cache.keys[0].shape == (5, 2, 16, 8)
    assert cache.keys[0].dtype == torch.bfloat16
    tensors = [*cache.keys, *cache.values]
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert sum(tensor.nbytes for tensor in tensors) == cache.num_bytes == 5 * spec.bytes_per_page
    for i, tensor in enumerate(tensors):
        tensor.fill_(i + 1)
    assert all((tensor == i + 1).all() for i, tensor in enumerate(tensors)), "layers overlap"


def test_a_profile_counts_every_op_of_the_steps_between_its_start_and_its_stop(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model = load(tmp_path)
    ids = prompt(4, 97)
    plain = prefill(model, [ids], 4)[0]
    assert model.profile() == ()
    model.start_profile()
    profiled = prefill(model, [ids], 2)[0]
    model.stop_profile()
    prefill(model, [ids], 2)
    torch.testing.assert_close(profiled, plain)
    by_name = {profile.op: profile for profile in model.profile()}
    assert {name: by_name[name].count for name in ("packed_embedding", "attention", "packed_linear")} == {
        "packed_embedding": 2,
        "attention": 2 * 2,
        "packed_linear": 2 * (2 + 1),
    }
    assert sum(profile.share for profile in model.profile()) == pytest.approx(1)
    totals = [profile.total_ms for profile in model.profile()]
    assert totals == sorted(totals, reverse=True)
    for profile in model.profile():
        assert 0 < profile.min_ms <= profile.max_ms <= profile.total_ms <= profile.count * profile.max_ms * 1.001
    model.start_profile()
    assert model.profile() == ()
