"""Two ranks with adapters, side by side or as stages of a pipeline: the tokens of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from allspan import ClientEngine, Engine, SamplingParams
from allspan.protos.api.errors import AdapterNotFound
from allspan.protos.api.options import RequestOptions
from support.byte_model import save_byte_model
from support.peft_adapters import save_adapter

pytestmark = pytest.mark.timeout(120)

PROMPT = [7, 9, 200, 31]


def test_two_ranks_give_each_adapters_tokens(tmp_path: Path) -> None:
    folder = save_byte_model(tmp_path / "model", "qwen2", max_position_embeddings=256)
    model = AutoModelForCausalLM.from_pretrained(folder)
    modules = []
    for seed, name in enumerate(("one", "two")):
        save_adapter(tmp_path / name, model, 8, seed=seed)
        modules.append(f"{name}={tmp_path / name}")
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    options = {name: RequestOptions(adapter=name) for name in ("", "one", "two")}
    with Engine(folder, threads=1, lora_modules=tuple(modules)) as engine:
        expected = {name: engine.generate([PROMPT], greedy, own)[0].token_ids for name, own in options.items()}
    assert len(set(expected.values())) == 3
    with ClientEngine(folder, ranks=2, threads=1, pipeline_parallel_size=2, enable_lora=True) as engine:
        for name in ("one", "two"):
            engine.load_lora(name, tmp_path / name)
            for each in ("", name):
                assert engine.generate([PROMPT], greedy, options[each])[0].token_ids == expected[each]
    with ClientEngine(folder, ranks=2, threads=1, lora_modules=tuple(modules)) as engine:
        opened = {name: engine.start_request(PROMPT, greedy, options=own) for name, own in options.items()}
        for name, (handle, queue) in opened.items():
            assert tuple(token for output in queue for token in output.token_ids) == expected[name]
            engine.release_request(handle)
        with pytest.raises(AdapterNotFound, match="'three'"):
            engine.generate([PROMPT], greedy, RequestOptions(adapter="three"))
