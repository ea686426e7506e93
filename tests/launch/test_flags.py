"""Flags and config keys made from dataclasses."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from allspan.launch.settings import serve_parser, serve_settings
from allspan.protos.config.flags import Parser, add_options, build, field_docs


@dataclass(frozen=True)
class Kitchen:
    max_model_len: int = 8
    """Longest thing,
    over two lines; 100 % of it."""
    dtype: str = "auto"
    """What it is made of."""
    restart: bool = True
    """Again?"""
    cpus: tuple[int, ...] = ()
    """Which ones."""
    seed: int | None = None
    """Where from."""
    warmth: float = 1.0
    """How much."""


CHOICES = {"dtype": ("auto", "float32")}
LIMITS = {"max_model_len": (1.0, 100.0), "warmth": (0.0, 2.0)}


def parser() -> Parser:
    made = Parser("allspan cook")
    add_options(made, Kitchen, aliases={"max_model_len": ("--context-length", "-c")}, choices=CHOICES, limits=LIMITS)
    made.add_config()
    return made


def cook(*argv: str) -> Kitchen:
    return build(Kitchen, parser().parse(argv))


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parser().parse(argv)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_without_flags_every_field_has_its_default() -> None:
    assert cook() == Kitchen()


def test_flags_are_the_fields_names_with_dashes_and_aliases() -> None:
    made = cook("--max-model-len", "5", "--no-restart", "--cpus", "3,1", "--seed=7", "--warmth", "0.5")
    assert made == Kitchen(5, "auto", False, (3, 1), 7, 0.5)
    assert cook("--context-length", "6") == cook("-c", "6") == Kitchen(6)


def test_help_is_the_docstring_under_the_field() -> None:
    assert field_docs(Kitchen)["max_model_len"] == "Longest thing, over two lines; 100 % of it."
    text = " ".join(parser().format_help().split())
    assert "Longest thing, over two lines; 100 % of it. (default: 8)" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-model-length", "5"], ["unknown flag --max-model-length", "did you mean --max-model-len"]),
        (["--maxmodellen=5"], ["unknown flag --maxmodellen"]),
        (["--max-model", "5"], ["unknown flag --max-model"]),
        (["stray"], ["unexpected argument 'stray'"]),
        (["--max-model-len", "many"], ["--max-model-len", "'many'", "an integer"]),
        (["--max-model-len", "101"], ["--max-model-len", "101", "from 1 to 100"]),
        (["--max-model-len", "0"], ["from 1 to 100"]),
        (["--warmth", "nan"], ["--warmth", "nan", "from 0 to 2"]),
        (["--dtype", "float17"], ["--dtype", "'float17'", "auto, float32"]),
        (["--cpus", "1,x"], ["--cpus", "'x'", "an integer"]),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    line = refusal(capsys, *argv)
    assert all(word in line for word in ["allspan cook: ", *words]), line


@pytest.mark.parametrize("name", ["c.toml", "c.json", "c.yaml", "c.yml"])
def test_a_config_file_sets_values_that_flags_override(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    texts = {"c.toml": 'max-model-len = 9\ncpus = [1, 2]\nrestart = false\ndtype = "float32"\n'}
    texts["c.yaml"] = "# a comment\nmax-model-len: 9\ncpus:\n  - 1\n  - 2\nrestart: no\ndtype: float32\n"
    texts["c.yml"] = texts["c.yaml"].replace("-len", "_len")
    file.write_text(texts.get(name, '{"max_model_len": 9, "cpus": [1, 2], "restart": false, "dtype": "float32"}'))
    assert cook("--config", str(file)) == Kitchen(9, "float32", False, (1, 2))
    assert cook("--config", str(file), "--max-model-len", "3", "--restart") == Kitchen(3, "float32", True, (1, 2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-modle-len = 9", ["unknown key 'max-modle-len'", "did you mean max-model-len"]),
        ("help = 1", ["unknown key 'help'"]),
        ('restart = "yes"', ["restart", "'yes'", "true or false"]),
        ("max-model-len = 1000", ["max-model-len", "1000", "from 1 to 100"]),
        ("max-model-len = true", ["max-model-len", "true"]),
        ("dtype = 'x'", ["dtype", "'x'", "auto, float32"]),
        ("[table]\nx = 1", ["unknown key 'table'"]),
        ("= 3", ["--config"]),
    ],
)
def test_a_wrong_config_file_is_one_line_that_names_the_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    line = refusal(capsys, "--config", str(file))
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-modle-len: 9", ["unknown key 'max-modle-len'", "did you mean max-model-len"]),
        ("max-model-len:", ["max-model-len is null", "must be a plain value"]),
        ("on: 1", ["unknown key 'True'"]),
        ("- 1", ["must hold a table", "is a list"]),
        ("", ["must hold a table"]),
        ("a: [1", ["--config"]),
        ("a: !!python/object/apply:os.system [true]", ["--config", "could not determine a constructor"]),
    ],
)
def test_a_wrong_yaml_file_is_one_line_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    line = refusal(capsys, "--config", str(file))
    assert all(word in line for word in words), line


def test_a_missing_config_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert str(tmp_path / "none.toml") in refusal(capsys, "--config", str(tmp_path / "none.toml"))


def test_optional_options_tell_what_was_not_given() -> None:
    made = argparse.ArgumentParser()
    add_options(made, Kitchen, optional=True)
    assert vars(made.parse_args(["--seed", "3"])) == dict.fromkeys(vars(Kitchen())) | {"seed": 3}


def test_this_module_is_importable_source() -> None:
    """field_docs reads a class's source, so its module must have one."""
    assert sys.modules[Kitchen.__module__].__file__


def grouped() -> Parser:
    made = Parser("tool", "Does things.")
    made.add_argument("--plain", help="In no group.")
    add_options(made.group("cache", "the cache"), Kitchen)
    return made


def test_help_is_an_overview_where_flags_come_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        grouped().parse(["--help"])
    text = capsys.readouterr().out
    assert "In no group." in text
    assert "--max-model-len" in text
    assert "Longest thing" not in text


@pytest.mark.parametrize(
    "words", [["--help", "cache"], ["--help", "max-model-len"], ["--help=--max-model-len"], ["-h", "all"]]
)
def test_help_explains_a_group_a_flag_or_all(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        grouped().parse(words)
    assert "Longest thing" in capsys.readouterr().out


def test_help_on_what_is_not_there_names_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        grouped().parse(["--help", "max-model-length"])
    assert "did you mean max-model-len" in capsys.readouterr().err


JSON_MODULE = '{"name": "c", "path": "/x,y"}'


@pytest.mark.parametrize(
    "argv",
    [
        ["m", "--lora-modules", "a=/1", "b=/2", JSON_MODULE, "--ranks", "1"],
        ["--lora-modules", f"a=/1,b=/2,{JSON_MODULE}", "--ranks", "1", "m"],
        ["m", "--lora-modules=a=/1", "--lora-modules", "b=/2", JSON_MODULE],
    ],
)
def test_adapters_are_words_or_a_list_and_the_flag_may_be_repeated(argv: list[str]) -> None:
    settings = serve_settings(serve_parser().parse(argv))
    assert (settings.model, settings.adapters.lora_modules) == ("m", ("a=/1", "b=/2", JSON_MODULE))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'lora-modules = ["a=/1", {name = "c", path = "/x,y"}]'),
        ("c.yaml", 'lora-modules:\n  - a=/1\n  - name: c\n    path: "/x,y"\n'),
    ],
)
def test_a_config_file_lists_adapters_as_texts_or_tables(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    settings = serve_settings(serve_parser().parse(["m", "--config", str(tmp_path / name)]))
    assert settings.adapters.lora_modules == ("a=/1", JSON_MODULE)


def test_an_adapter_that_is_no_json_is_one_line_that_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_parser().parse(["m", "--lora-modules", '{"name": '])
    line = capsys.readouterr().err
    assert ("--lora-modules" in line, "no JSON object" in line, line.count("\n")) == (True, True, 1)
