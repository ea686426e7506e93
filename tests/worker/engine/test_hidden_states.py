"""A result may be the hidden state of the prompt's last token: that of transformers, however the prompt is computed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan import Engine, SamplingParams
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output
from support.cores import fake_core, request
from support.tiny_models import prompt, save_tiny

SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 16}


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_it_is_what_the_head_reads_of_the_last_token(tmp_path: Path, kernels: str) -> None:
    """In chunks, beside a request that decodes, and again from the prefix cache."""
    reference = save_tiny(tmp_path, "qwen3")
    with Engine(tmp_path, kernels=kernels, **SETTINGS) as engine:
        handle, _ = engine.start_request([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
        for length in (1, 40, 40):
            ids = prompt(length, reference.config.vocab_size, length)
            with torch.no_grad():
                expected = reference.model(torch.tensor([ids])).last_hidden_state[0, -1]
            torch.testing.assert_close(torch.tensor(engine.hidden_state(ids)), expected, rtol=1e-3, atol=1e-4)
        engine.release_request(handle)


def test_it_comes_with_the_first_token_alone_and_stays_in_the_whole_result(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3")
    with Engine(tmp_path, kernels="reference", **SETTINGS) as engine:
        for length in (1, 40):  # one token may begin a run of decodes at once
            ids = prompt(length, reference.config.vocab_size, length)
            params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, seed=0)
            _, queue = engine._start(ids, params, RequestOptions(), wants_hidden_state=True)
            outputs = list(queue)
            whole = functools.reduce(Output.merged, outputs)
            assert len(whole.token_ids) == 5
            assert [bool(output.hidden_state) for output in outputs] == [True] + [False] * (len(outputs) - 1)
            with torch.no_grad():
                expected = reference.model(torch.tensor([ids])).last_hidden_state[0, -1]
            torch.testing.assert_close(torch.tensor(whole.hidden_state), expected, rtol=1e-3, atol=1e-4)


def test_a_model_without_any_refuses() -> None:
    core, _ = fake_core()
    one = request(0, [1], max_tokens=1)
    one.wants_hidden_state = True
    with pytest.raises(InvalidRequest, match="hidden_state is asked for, the model gives none"):
        core.submit(one)
