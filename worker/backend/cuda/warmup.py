"""GPU warm-up: which kernels the steps launch is noted, they are compiled, and what memory a step takes is measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from allspan.kernels.cuda import sampling
from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.jit.variants import variants_of
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers
from allspan.worker.backend.cuda.step_layout import InputNames, chunk_buckets
from allspan.worker.cache.budget import pages_of
from allspan.worker.cache.kv import KVCache
from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.inputs import InputBuffers, StepInputs
from allspan.worker.step.model import DeviceModel

logger = logging.getLogger(__name__)

_PROMPTS = (2, 9, 17, 33, 65, 257, 513, 1025, 4097)
"""Tokens of a step: few are multiplied by other kernels than many."""
_MOST_CHUNK = 128


def warm_up(
    model: DeviceModel,
    buffers: InputBuffers,
    sizes: BatchSizes,
    device: torch.device,
    launch_sampling: Callable[[], None] | None,
) -> int:
    """Compiles the kernels of steps of these sizes; returns the bytes that a step takes beside the buffers that are
    there: what steps that are launched op by op allocate, and what captured ones keep. `launch_sampling` samples a row
    once; None: the host samples.

    Steps of every size go through the model with kernels that are noted and not launched: what they compute is void,
    what they allocate is measured. Kernels that are not compiled yet are then compiled side by side. Every rank calls
    it at once. Raises CompilationError.
    """
    taken, begun = 0, time.monotonic()
    with modules.noting() as kernels:
        if launch_sampling is not None:
            launch_sampling()
        if isinstance(buffers, DeviceBuffers):
            model.bind_cache(*(KVCache(group.spec, 1, str(device)) for group in model.cache_groups))
            steps = _steps(buffers, sizes)
            taken = _measure(device, lambda: [model.forward(inputs) for inputs in steps])
            if sizes.captures:
                buffers.chunks = chunk_buckets(sizes.max_tokens)[-1:]
                taken += _measure(device, lambda: model.forward(next(buffers.paddings())))
    noted = time.monotonic()
    wanted = list(kernels)
    if launch_sampling is not None:
        wanted += variants_of(sampling, capability=modules.gpu(device).capability)
    if wanted:
        modules.driver().prepare(wanted)
    logger.info(
        "warm-up: %d kernels noted in %.1f s, compiled in %.1f s", len(wanted), noted - begun, time.monotonic() - noted
    )
    return taken


def _steps(buffers: DeviceBuffers, sizes: BatchSizes) -> Iterator[StepInputs]:
    """Yields inputs of the steps that are launched op by op, and of those that are captured but for the large ones,
    whose products take time and whose kernels are the same. Nothing reads what the inputs say."""
    largest = min(sizes.max_tokens, sizes.max_rows * (sizes.max_model_len - 1))
    for tokens in (*(count for count in _PROMPTS if count < largest), largest):
        for adapts in (True, False) if buffers.has_adapters else (False,):
            yield _prompts(buffers, sizes, tokens, adapts)
    buffers.chunks = tuple(tokens for tokens in chunk_buckets(sizes.max_tokens) if tokens <= _MOST_CHUNK)
    yield from buffers.paddings()


def _prompts(buffers: DeviceBuffers, sizes: BatchSizes, tokens: int, adapts: bool) -> StepInputs:
    """Returns the inputs of a step of `tokens` tokens in as few prompts as hold them, all of this rank's own, with
    adapters or none."""
    rows = pages_of(tokens, sizes.max_model_len - 1)
    counts = np.sort(np.diff(np.linspace(0, tokens, rows + 1).astype(np.int64)))
    page_counts = -(-counts // sizes.page_size)
    nothing, names = np.zeros(tokens, dtype=np.int64), InputNames(sizes)
    values = {
        **dict.fromkeys((*names.every, *names.tokens), nothing),
        **dict.fromkeys(names.paddings, nothing - 1),
        "qo_indptr": np.concatenate(([0], np.cumsum(counts))),
        **dict.fromkeys(names.page_indptrs, np.concatenate(([0], np.cumsum(page_counts)))),
        **dict.fromkeys(names.page_tables, np.zeros(int(page_counts.sum()), dtype=np.int64)),
        "kv_lens": counts,
        "logits_rows": np.zeros(rows, dtype=np.int64),
    }
    if not adapts:
        values.pop("adapters", None)
    return buffers.fill(values)


def _measure(device: torch.device, run: Callable[[], object]) -> int:
    """The most bytes that it held at once on a GPU."""
    if device.type != "cuda":
        run()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before)
