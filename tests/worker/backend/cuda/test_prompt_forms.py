"""How the prompts of a step over latents are attended to: by keys and values or as they are, captured or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from allspan.kernels.cuda.attention.prefill import Tiling
from allspan.kernels.cuda.latent.expand_rule import ExpandRule
from allspan.kernels.latent_tensors import LatentSizes
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers
from allspan.worker.backend.cuda.step_layout import PromptForm, PromptForms, chunk_buckets
from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.inputs import StepInputs

Prompts = list[tuple[int, int]]
"""New tokens, and tokens before them."""
PAGE, LONGEST = 64, 40_000
RULE = ExpandRule(LatentSizes(512, 128, 64, 128), 16, 8192 + LONGEST, 132)


def counts(prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
    new, before = (np.array([each[i] for each in prompts], dtype=np.int64) for i in range(2))
    return new, before


@pytest.mark.parametrize(
    ("bucket", "prompts", "form", "with_ranks"),
    [
        (8192, [(1000, 0)] * 8, (8192, False), (8192, False)),
        (8192, [(7900, 300)], (10_240, False), (10_240, False)),
        (8192, [(8100, 292)], (10_240, False), (10_240, False)),
        (8192, [(8100, 8192)], None, (10_240, True)),
        (8192, [(8000, 0), (10, 8192)], (10_240, True), (10_240, True)),
        (512, [(512, 0)], (512, False), (512, False)),
        (512, [(400, 64)], (512, False), (512, False)),
        (512, [(400, 1024)], (1024, True), (1024, True)),
        (2048, [(2048, 30_000)], None, (4096, True)),
        (128, [(128, 30_000)], (0, True), (0, True)),
    ],
)
def test_the_form_of_a_captured_step(bucket: int, prompts: Prompts, form: Any, with_ranks: Any) -> None:
    """None where launching every kernel takes less time than leaving latents as they are, if no other rank waits for
    what is captured."""
    new, before = counts(prompts)
    for ranks, expected in ((1, form), (2, with_ranks)):
        found = PromptForms(Tiling(1), RULE, ranks).choose(bucket, bucket, new, new + before)
        assert found == (expected and PromptForm(*expected))


def filled(prompts: Prompts, decodes: int, is_captured: bool) -> StepInputs:
    sizes = BatchSizes(4, 8192, LONGEST, PAGE, 64)
    buffers = DeviceBuffers(sizes, torch.device("cpu"), Tiling(1), expand_rule=RULE)
    buffers.chunks = chunk_buckets(8192) if is_captured else ()
    new, before = counts([(1, 99)] * decodes + prompts)
    lens, tokens = new + before, int(new.sum())
    pages = np.cumsum([0, *(-(-lens // PAGE))])
    nothing = np.zeros(tokens, dtype=np.int64)
    values = dict.fromkeys(("ids", "positions", "slots"), nothing) | {"kv_lens": lens, "page_indptr": pages}
    values |= {
        "qo_indptr": np.cumsum([0, *new]),
        "page_indices": np.zeros(pages[-1]),
        "logits_rows": np.zeros(len(new)),
    }
    return buffers.fill(values)


@pytest.mark.parametrize("is_captured", [False, True])
def test_prompts_are_shared_out_over_two_plans(is_captured: bool) -> None:
    inputs = filled([(300, 0), (40, 9000), (20, 0)], 1, is_captured)
    assert inputs.tiles is not None
    assert inputs.expanded is not None
    assert inputs.expanded.rows == (768 if is_captured else 320)
    found = [[tile for tile in tiles.tolist() if tile[0] >= 0] for tiles in (inputs.tiles, inputs.expanded.tiles)]
    assert found == [[[2, 0]], [[1, 256], [1, 128], [1, 0], [3, 0]]]
    assert inputs.expanded.indptr[:5].tolist() == [0, 0, 300, 300, 320]
    assert set(inputs.expanded.indptr[5:].tolist()) <= {320}
    assert (inputs.bucket, inputs.num_decodes) == ((384, 0) if is_captured else (0, 1))


def test_a_step_whose_prompts_fit_has_no_other_tiles() -> None:
    inputs = filled([(4000, 0), (4001, 900)], 2, True)
    assert inputs.tiles is None
    assert inputs.expanded is not None
    assert inputs.expanded.rows == 10_240
    assert inputs.expanded.indptr[:5].tolist() == [0, 0, 0, 4000, 8901]
    assert (inputs.expanded.tiles[:, 0] >= 0).sum() == 64


def test_a_step_of_few_tokens_stays_latents() -> None:
    for is_captured in (False, True):
        inputs = filled([(80, 0), (40, 9000)], 1, is_captured)
        assert inputs.expanded is None
        assert inputs.tiles is not None
