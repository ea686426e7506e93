"""docs/runs/train_eagle3.py and what writes its answers, with a toy model: drafts of a head are kept as often as the
trainer says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from allspan.protos.config.speculation import Speculation
from support.cores import request
from support.drafted import play, told
from support.hf_folders import CHATML, byte_level
from support.tiny_models import save_tiny

sys.path.append(str(Path(__file__).parents[2] / "docs" / "runs"))

import eagle3_answers
import train_eagle3

IDS, BATCH, PROMPT, NEW, STEPS = 97, 256, 6, 48, 3
Answers = dict[str, NDArray[np.int32]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products are too small here for several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers add little to a token's embedding, and whose head is sure of what it says."""
    folder = tmp_path_factory.mktemp("model")
    toy = save_tiny(folder, "llama2", torch.bfloat16, num_hidden_layers=6, vocab_size=IDS, eos_token_id=None)
    with torch.no_grad():
        toy.lm_head.weight.mul_(8)
        toy.model.embed_tokens.weight.mul_(6)
        for name, weight in toy.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.2)
    toy.save_pretrained(folder)
    return byte_level(folder, chat_template=CHATML, pad_token="</s>")


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers to random prompts, as eagle3_answers.py decodes and writes them."""
    folder, draw = tmp_path_factory.mktemp("answers"), np.random.default_rng(0)
    torch.manual_seed(0)
    decoder = eagle3_answers.Decoder(model, "cpu", BATCH, PROMPT + NEW)
    talk = eagle3_answers.Talk(model, folder, 0, PROMPT, NEW)
    talk.stops = []
    for _ in range(2):
        prompts = draw.integers(0, IDS, (BATCH, PROMPT)).tolist()
        temperatures = [0.0, 0.7] * (BATCH // 2)
        decoder.take_in(list(range(BATCH)), prompts, temperatures)
        drawn = []
        for _ in range(NEW):
            decoder.step()
            drawn.append(decoder.tokens.tolist())
        for prompt, temperature, tokens in zip(prompts, temperatures, zip(*drawn, strict=True), strict=True):
            talk.over(eagle3_answers.Started(prompt, temperature, NEW), list(tokens))
    talk.save()
    return folder


def test_greedy_answers_are_what_the_model_says(model: Path, answers: Path) -> None:
    file = np.load(answers / "answers-0.npz")
    sizes, starts = file["sizes"], np.cumsum(file["sizes"]) - file["sizes"]
    assert (file["prompts"] == PROMPT).all()
    assert set(file["temperatures"].round(1).tolist()) == {0.0, np.float32(0.7).round(1)}
    chosen = [each for each in np.flatnonzero(file["temperatures"] == 0) if sizes[each] == PROMPT + NEW]
    rows = torch.tensor(
        np.stack([file["tokens"][starts[each] :][: PROMPT + NEW] for each in chosen]), dtype=torch.int64
    )
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        says = theirs(rows).logits.argmax(-1)[:, PROMPT - 1 : -1]
    assert len(chosen) > 50
    assert (says == rows[:, PROMPT:]).float().mean() > 0.97  # near ties go either way in bfloat16


def test_drafts_are_kept_as_often_as_the_trainer_says(
    model: Path, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        f"--batches 80 --steps {STEPS} --draft-vocab 90 --batch-tokens 1024 --warmup 10 --lr 0.01 --every 600".split()
    )
    train_eagle3.main([str(model), str(answers), str(tmp_path / "head"), "--device", "cpu", *flags])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    draw = np.random.default_rng(1)
    requests = [request(number, draw.integers(0, IDS, PROMPT).tolist(), max_tokens=NEW) for number in range(20)]
    plain, _ = play(model, requests=requests)
    asks = json.dumps({"method": "eagle3", "model": str(tmp_path / "head")})
    outputs, counters = play(model, Speculation("eagle3", STEPS), requests, speculative_config=asks)
    assert told(outputs) == told(plain)
    runs = [counters.drafts, *counters.accepted_per_position]
    rates = [after / before for before, after in pairwise(runs)]
    assert said["greedy"][0] > 0.5
    # the trainer counts every place alike, while runs of drafts begin behind those that were not kept
    assert rates[:STEPS] == pytest.approx(said["greedy"], abs=0.2)
