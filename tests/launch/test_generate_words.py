"""Which words of `allspan generate` are the model, and which the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan.launch.commands.generate import make_parser, settle
from allspan.launch.models.find_model import DEFAULT_MODEL
from allspan.protos.api.errors import ConfigError


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSPAN_HOME", str(tmp_path / "home"))
    (tmp_path / "home/models").mkdir(parents=True)
    (tmp_path / "home/models/Mine.gguf").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("argv", "model", "prompt"),
    [
        (["Once upon a time"], DEFAULT_MODEL, "Once upon a time"),
        (["hello"], DEFAULT_MODEL, "hello"),
        (["-"], DEFAULT_MODEL, "-"),
        (["folder", "text"], "folder", "text"),
        (["folder", "--max-tokens", "3", "text"], "folder", "text"),
        (["--chat", "text", "--seed=1"], DEFAULT_MODEL, "text"),
        (["mine", "--prompt", "text"], "mine", "text"),
        (["nosuch", "--prompt", "-"], "nosuch", "-"),
        (["--prompt", "folder"], DEFAULT_MODEL, "folder"),
        (["--attach", "http://x:1", "folder"], DEFAULT_MODEL, "folder"),
    ],
)
def test_words_are_taken_as_they_are_meant(argv: list[str], model: str, prompt: str) -> None:
    namespace = make_parser().parse(argv)
    settle(namespace)
    assert (namespace.model, namespace.prompt) == (model, prompt)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the prompt is missing; give TEXT"),
        (["folder"], "'folder' names a model"),
        (["MINE"], "'MINE' names a model"),
        (["org/name"], "'org/name' names a model"),
        (["./no.gguf"], "names a model"),
        ([DEFAULT_MODEL[:-1]], "names a model"),
        (["folder", "text", "--prompt", "other"], "given twice"),
        (["--attach", "http://x:1", "folder", "text"], "one word too many"),
    ],
)
def test_words_that_do_not_fit_are_refused(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settle(make_parser().parse(argv))
