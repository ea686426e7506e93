"""Ranks with a GPU each that attend for requests of their own: the tokens of the model, in steps that are padded to
recorded ones, and in larger ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan.kernels.cuda.jit import modules
from allspan.kernels.table import op_set
from allspan.protos.config.settings import CacheConfig, ModelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.worker.backend.cuda import step_layout
from allspan.worker.engine.setup import LoadedEngine, load_engine
from allspan.worker.engine.steps import step_times
from allspan.worker.parallel.base import GroupCapabilities
from allspan.worker.scheduler.request import Request
from support.cores import Collected, request
from support.drafters import Guesses, drafting
from support.emulator.backend import RecordingBackend, add_device
from support.emulator.driver import EmulatorDriver
from support.latent_models import save_latent
from support.threads import FusingCollectives, ThreadWorld
from support.tiny_models import prompt, reference_logits, save_tiny

VOCAB = 97
LATENTS = {"num_hidden_layers": 2, "first_k_dense_replace": 0, "qk_rope_head_dim": 16, "v_head_dim": 16}
WINDOWS: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "latents": (lambda folder: save_latent(folder, "v3", **LATENTS), "auto"),
    "latents in int8": (lambda folder: save_latent(folder, "v3", **LATENTS), "int8"),
    "few heads, windows": (lambda folder: save_tiny(folder, "qwen2", **WINDOWS), "auto"),
}


class Gpus(FusingCollectives):
    """What ranks on GPUs offer."""

    capabilities = GroupCapabilities(fused_norms=(torch.bfloat16,))


def asked() -> list[Request]:
    """Shared prefixes, prompts of several chunks, samples and log-probabilities."""
    first, many = prompt(40, VOCAB, 1), []
    for number in range(6):
        ids = first[: 18 + number] if number % 3 == 2 else prompt(27 + number, VOCAB, 2 + number)
        heat = {"temperature": 0.8, "logprobs": 2} if number == 2 else {"prompt_logprobs": 0} if number == 4 else {}
        many.append(request(number, ids, max_tokens=12, ignore_eos=True, **heat))
    return many


class Likeliest(Guesses):
    """Proposes what the model says without a temperature; each third time, it errs in the second place."""

    def __init__(self, reference: Any) -> None:
        self._reference, self._calls = reference, 0

    def guess(self, request: Request, most: int) -> Sequence[int]:
        ids = [*request.prompt_token_ids, *request.output_token_ids]
        found: list[int] = []
        while len(found) < min(most, 3):
            found.append(int(reference_logits(self._reference, [*ids, *found])[-1].argmax()))
        self._calls += 1
        return [*found[:1], *((token + 1) % VOCAB for token in found[1:])] if self._calls % 3 == 0 else found


def on_ranks(
    settings: WorkerConfig, pages: int, drafter: Guesses | None = None
) -> tuple[Collected, list[LoadedEngine]]:
    """What the leader of two ranks was told of `asked`, each rank with so many pages."""
    world = ThreadWorld(2, timeout=60)
    world.collectives = [Gpus(world, rank) for rank in range(2)]
    loaded: list[Any] = [None, None]

    def run(rank: int) -> Collected:
        loaded[rank] = load_engine(settings, op_set("cuda", 1), world.collectives[rank], world.channels[rank])
        core, told = loaded[rank].core, Collected()
        core.on_outputs = told
        if drafter and not rank:
            core._planner.scheduler.drafting = drafting(drafter, 3, VOCAB)
        for one in asked():
            core.submit(one)
            for _ in range(0 if rank else 2):
                core.step()
                core.check()
        if not rank:
            while core.step():
                core.check()
            core.shutdown()
        core.run()
        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("allspan.worker.engine.setup.num_kv_pages", lambda cache, demand: (pages,) * len(demand.groups))
        return world.run(run, timeout=300)[0], loaded


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("latents", False),
        pytest.param("latents", True, marks=pytest.mark.nightly),
        pytest.param("latents in int8", False, marks=pytest.mark.nightly),
        ("few heads, windows", False),
        ("few heads, windows", True),
    ],
)
def test_ranks_with_rows_of_their_own_make_the_tokens_of_the_model(
    name: str, drafts: bool, tmp_path: Path, emulator: EmulatorDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, from cached pages, put out and let in again; and with drafts. Latents of new tokens are expanded."""
    save, pages = MODELS[name]
    monkeypatch.setattr(step_layout, "LEAST_ROWS", 2)
    monkeypatch.setattr(step_layout, "SMALL_CHUNK", 16)
    monkeypatch.setattr(modules, "driver", lambda: emulator)
    monkeypatch.setattr(RecordingBackend, "made", [])
    device = add_device(monkeypatch, "recording", RecordingBackend)
    reference = save(tmp_path)
    for parameter in reference.parameters():
        parameter.data = parameter.data.bfloat16().float()
    reference.save_pretrained(tmp_path)
    apart: dict[str, Any] = {"data_parallel_attention": True, "enable_expert_parallel": name == "latents"}
    model = ModelConfig(str(tmp_path), "tiny", "bfloat16", max_model_len=64, **apart, **device)
    cache = CacheConfig(page_size=16, kv_cache_bytes=2**20, host_kv_cache_bytes=2**18, kv_cache_dtype=pages)
    most = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=24, speculative_config='{"num_speculative_tokens": 3}' if drafts else ""
    )
    monkeypatch.setattr(step_times, "MOST_SECONDS", 0.0)
    drafter = Likeliest(reference) if drafts else None
    told, loaded = on_ranks(WorkerConfig(model, ServiceConfig("-"), cache, most), 5, drafter)
    assert not told.errors
    counters = loaded[0].core.statistics()
    assert counters.prefix_hit_tokens > 0 or drafts
    assert counters.preemptions > 0 or drafts
    assert 0.3 * counters.draft_tokens <= counters.accepted_tokens
    assert (counters.accepted_tokens > 10) == drafts
    assert sum(map(len, RecordingBackend.made)) > len(RecordingBackend.made) > 0
    large = {rows for made in RecordingBackend.made for bucket, rows in made if bucket > 16}
    print(name, large, RecordingBackend.made)
    assert large
    assert (len(large) > 1) == (name != "few heads, windows")
    for rank in loaded:
        for load in rank.model.expert_loads()[:-1]:  # the last layer has the rows of logits alone
            assert sum(load.tokens) == 2 * counters.step_tokens_sum, "padding is not counted"
    slack = 0.05 if pages == "auto" else 0.5
    for one in asked():
        output, length = told.outputs[one.request_id], len(one.prompt_token_ids)
        assert len(output.token_ids) == one.params.max_tokens
        logits = reference_logits(reference, [*one.prompt_token_ids, *output.token_ids])
        for token, row in zip(output.token_ids, logits[length - 1 : -1], strict=True):
            if not one.params.temperature:
                assert float(row.max() - row[token]) <= slack * float(row.std())
        likely = logits.log_softmax(1)[range(length - 1), one.prompt_token_ids[1:]]
        for entry, expected in zip(output.prompt_logprobs, likely.tolist(), strict=False):
            assert entry.logprob == pytest.approx(expected, abs=2 * slack)
    assert told.outputs[asked()[4].request_id].prompt_logprobs
