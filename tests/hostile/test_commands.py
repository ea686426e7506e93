"""Every command that takes a model refuses a hostile one in one line, with exit code 2, before anything is started."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from support.hostile_models import CONFIG, gguf, save_sound
from support.serving import run_allspan

pytestmark = pytest.mark.timeout(120)

COMMANDS = {
    "plan": ["plan", "{model}"],
    "serve": ["serve", "{model}", "--port=0", "--grpc-port=0"],
    "generate": ["generate", "{model}", "--prompt=x"],
    "chat": ["chat", "{model}"],
    "convert": ["convert", "{model}", "{out}"],
    "pull": ["pull", "{model}"],
}
MOST_SECONDS = 2.0
"""Of a processor, on a quiet machine."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hostile_model_is_one_line_and_exit_code_2(command: str, tmp_path: Path) -> None:
    models = {"lies": tmp_path / "lies.gguf", "pipe": tmp_path / "pipe", "config": tmp_path / "config"}
    file = gguf()
    file.counts = [2**60, None]
    models["lies"].write_bytes(file.bytes())
    os.mkfifo(models["pipe"])
    save_sound(models["config"])
    (models["config"] / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 10**18}))
    models["tokenizer"] = save_sound(tmp_path / "tokenizer")
    (models["tokenizer"] / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}}}'
    )
    for model in models.values():
        if command == "serve" and model.name == "tokenizer":
            continue  # its tokenizer is read while the ranks start
        words = [word.format(model=model, out=tmp_path / "out") for word in COMMANDS[command]]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = run_allspan(*words, timeout=60.0, XDG_RUNTIME_DIR=str(tmp_path))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run.returncode == 2, run.stderr
        (line,) = run.stderr.splitlines()
        assert line.startswith(f"allspan {command}: {model}"), line
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_SECONDS
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "allspan").exists()
