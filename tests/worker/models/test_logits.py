"""The decoder's logits against transformers', at every position, on one to four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from allspan.kernels.table import backends
from support.threads import FusingCollectives, ThreadWorld
from support.tiny_models import CONFIGS, logits_on_ranks, prompt, reference_logits, relative_error, save_tiny


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, name)
    ids = prompt(150, 97)
    expected = reference_logits(reference, ids)
    for num_ranks in (1, 2, 3, 4):
        actual = logits_on_ranks(tmp_path, num_ranks, [ids])[0]
        assert relative_error(actual, expected) < 1e-4, f"{num_ranks} ranks"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_with_their_norms_and_whole_logits_on_every_rank_change_nothing(num_ranks: int, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama")
    ids, world = prompt(60, 97), ThreadWorld(num_ranks)
    world.collectives = fusing = [FusingCollectives(world, rank) for rank in range(num_ranks)]
    actual = logits_on_ranks(tmp_path, num_ranks, [ids], chunk=30, world=world)[0]
    assert relative_error(actual, reference_logits(reference, ids)) < 1e-4
    layers = reference.config.num_hidden_layers
    assert [each.fused for each in fusing] == [2 * (2 * layers - 1)] * num_ranks  # all but the last layer's last
    assert [each.steps for each in fusing] == [2] * num_ranks


def test_chunked_prefill_of_several_requests_equals_each_alone(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama")
    prompts = [prompt(length, 97, seed=length) for length in (1, 16, 17, 70)]
    for num_ranks, chunk in ((1, 1), (2, 5), (3, 16), (2, 1024)):
        for ids, actual in zip(prompts, logits_on_ranks(tmp_path, num_ranks, prompts, chunk), strict=True):
            assert relative_error(actual, reference_logits(reference, ids)) < 1e-4


@pytest.mark.parametrize("backend", [name for name in backends() if name.startswith("cpu/")] or ["cpu"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_compiled_kernels_give_the_same_bits_however_a_prompt_is_cut(name: str, backend: str, tmp_path: Path) -> None:
    if backend not in backends():
        pytest.skip("the compiled kernels are not built")
    expected = [reference_logits(save_tiny(tmp_path, name), prompt(length, 97)) for length in (70, 9)]
    prompts = [prompt(length, 97) for length in (70, 9)]
    for num_ranks in (1, 2):
        whole = logits_on_ranks(tmp_path, num_ranks, prompts, backend=backend)
        for actual, wanted in zip(whole, expected, strict=True):
            assert relative_error(actual, wanted) < 1e-4
        for chunk in (1, 7):
            cut = logits_on_ranks(tmp_path, num_ranks, prompts, chunk, backend=backend)
            assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True)), f"chunks of {chunk}"
        alone = logits_on_ranks(tmp_path, num_ranks, prompts[1:], backend=backend)
        assert torch.equal(alone[0], whole[1]), "alone"


def test_bfloat16_weights_are_used_as_they_are(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen2", dtype=torch.bfloat16).float()
    ids = prompt(40, 97)
    expected = reference_logits(reference, ids)
    widened = logits_on_ranks(tmp_path, 2, [ids], dtype="float32")[0]
    assert relative_error(widened, expected) < 1e-4
    # KV pages are bfloat16 then too: 8 bits of mantissa.
    kept = logits_on_ranks(tmp_path, 2, [ids])[0]
    assert 0 < relative_error(kept, expected) < 2e-2


def test_float16_weights_become_float32(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama", dtype=torch.float16).float()
    ids = prompt(40, 97)
    assert relative_error(logits_on_ranks(tmp_path, 2, [ids])[0], reference_logits(reference, ids)) < 1e-4


def test_a_sharded_checkpoint_reads_like_a_single_file(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "one", "qwen3")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    ids = prompt(20, 97)
    one, many = (logits_on_ranks(tmp_path / kind, 2, [ids])[0] for kind in ("one", "many"))
    assert torch.equal(one, many)


def test_random_weights_are_the_same_model_on_any_number_of_ranks(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    ids = prompt(20, 97)
    one = logits_on_ranks(tmp_path, 1, [ids], load_format="dummy")[0]
    assert one.isfinite().all()
    assert one.std() > 0
    for num_ranks in (2, 3):
        assert relative_error(logits_on_ranks(tmp_path, num_ranks, [ids], load_format="dummy")[0], one) < 1e-4
