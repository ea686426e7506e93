"""Adapters as they are named at the start: what is written, what it means, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan.protos.api.adapters import AdapterModule, adapter_slot
from allspan.protos.api.errors import ERRORS, AdapterNotFound, ConfigError, ModelNotFound, StatusCode, from_code
from allspan.protos.config.adapters import FILES, checked_adapters, parse_modules, split_modules
from allspan.protos.config.settings import AdapterConfig


def modules(*entries: str, names: tuple[str, ...] = ()) -> tuple[AdapterModule, ...]:
    return parse_modules(AdapterConfig(entries), names)


def test_both_spellings_name_an_adapter_and_its_folder() -> None:
    found = modules("sql=/a=b", '{"name": "k-1.x", "path": "/b,c", "base_model_name": "org/base"}')
    assert found == (AdapterModule("sql", "/a=b"), AdapterModule("k-1.x", "/b,c", "org/base"))
    assert modules() == ()


def test_a_list_is_cut_at_the_commas_outside_of_json() -> None:
    json_one = '{"name": "b", "path": "/x,y"}'
    assert split_modules(f"a=/1, {json_one},c=/2") == ("a=/1", json_one, "c=/2")
    assert split_modules("a=/1") == ("a=/1",)
    with pytest.raises(ConfigError, match="no JSON object"):
        split_modules('a=/1,{"name": ')


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["sql"], "must be NAME=PATH"),
        (["=/x"], "must be NAME=PATH"),
        (["sql="], "must be NAME=PATH"),
        (["a=x\0y"], "must be NAME=PATH"),
        (['{"name": "a"}'], "must be NAME=PATH"),
        (['{"name": 1, "path": "/x"}'], "must be NAME=PATH"),
        (['{"name": "a", "path": "/x", "scale": 2}'], "the key 'scale'"),
        (['{"name": "a"'], "no JSON object"),
        (["../x=/x"], "names an adapter '../x'"),
        (["a b=/x"], "names an adapter 'a b'"),
        ([".a=/x"], "begin with a letter or digit"),
        (["a\n=/x"], "a name must have letters"),
        ([f"{'a' * 129}=/x"], "at most 128 characters"),
        (["a=/x", "A=/y"], "names 'A' twice"),
        (["tiny=/x"], "'tiny', which is the model's own name"),
        (["TINY=/x"], "'TINY', which is the model's own name"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(entries: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        modules(*entries, names=("org/tiny",))
    assert words in caught.value.message
    assert caught.value.message.isprintable()


def test_enabling_adapters_without_naming_any_is_refused() -> None:
    with pytest.raises(ConfigError, match="enable_lora is given without lora_modules"):
        parse_modules(AdapterConfig(enable_lora=True))
    assert parse_modules(AdapterConfig(("a=/x",), enable_lora=True))


def test_folders_are_checked_and_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="must be an existing folder"):
        checked_adapters(AdapterConfig(("sql=sql",)), ())
    (tmp_path / "sql").mkdir()
    for file in FILES:
        with pytest.raises(ConfigError, match=f"has no {file}"):
            checked_adapters(AdapterConfig(("sql=sql",)), ())
        (tmp_path / "sql" / file).touch()
    entries = ("sql=sql", '{"name": "b", "path": "sql", "base_model_name": "x"}')
    checked = checked_adapters(AdapterConfig(entries, 32), ("tiny",))
    path = str(tmp_path / "sql")
    assert parse_modules(checked) == (AdapterModule("sql", path), AdapterModule("b", path, "x"))
    assert checked.max_lora_rank == 32


def test_a_slot_is_the_place_in_the_list_and_an_unknown_name_is_not_found() -> None:
    assert [adapter_slot(name, ["a", "b"]) for name in ("", "a", "b")] == [-1, 0, 1]
    with pytest.raises(AdapterNotFound, match="'c', which is not served here; the adapters are 'a', 'b'"):
        adapter_slot("c", ["a", "b"])
    with pytest.raises(ModelNotFound, match="no adapters are served") as caught:
        adapter_slot("c", [])
    assert caught.value.status == StatusCode.LORA_NOT_FOUND
    assert ERRORS[caught.value.code].http == 404
    assert type(from_code(caught.value.code, "")) is AdapterNotFound
