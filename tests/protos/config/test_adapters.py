"""Adapters as they are named at the start: what is written, what it means, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allspan.protos.api.adapters import NO_ADAPTER, AdapterModule, find_adapter
from allspan.protos.api.errors import ERRORS, AdapterNotFound, ConfigError, ModelNotFound, StatusCode, from_code
from allspan.protos.config.adapters import (
    FILES,
    checked_adapters,
    most_adapters,
    most_slots,
    parse_modules,
    split_modules,
)
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
        (["a=/x\udcff"], "the path of 'a' is '/x\\udcff', which is not UTF-8 at character 2"),
        (['{"name": "a", "path": "/x", "base_model_name": "\\ud800"}'], "the base_model_name of 'a' is"),
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


@pytest.mark.parametrize(
    ("config", "slots", "most"),
    [
        (AdapterConfig(), 0, 0),
        (AdapterConfig(("a=/x", "b=/y")), 2, 2),
        (AdapterConfig(("a=/x", "b=/y"), max_loras=1), 1, 2),
        (AdapterConfig(enable_lora=True), 8, 8),
        (AdapterConfig(lora_dir="/adapters", max_cpu_loras=50), 8, 50),
        (AdapterConfig(max_cpu_loras=3), 3, 3),
        (AdapterConfig(max_loras=20), 20, 20),
    ],
)
def test_room_for_adapters_is_what_is_named_or_asked_for(config: AdapterConfig, slots: int, most: int) -> None:
    parse_modules(config)
    assert (most_slots(config), most_adapters(config)) == (slots, most)


def test_room_that_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_cpu_loras is 2, must be at least max_loras \(4\)"):
        parse_modules(AdapterConfig(max_loras=4, max_cpu_loras=2))
    with pytest.raises(ConfigError, match="names 2 adapters, at most 1"):
        parse_modules(AdapterConfig(("a=/x", "b=/y"), max_loras=1, max_cpu_loras=1))


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


def test_a_folder_for_adapters_whose_name_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    folder = os.fsdecode(bytes(tmp_path) + b"/\xff")
    os.mkdir(folder)
    with pytest.raises(ConfigError, match=r"lora_dir is .* which is not UTF-8"):
        checked_adapters(AdapterConfig(lora_dir=folder), ())


def test_a_name_means_the_last_load_of_an_adapter_and_an_unknown_one_is_not_found() -> None:
    served = [AdapterModule("a", "/x").loaded(), AdapterModule("b", "/y").loaded(b"once more")]
    assert [find_adapter(name, served) for name in ("", "a", "b")] == [NO_ADAPTER, served[0].digest, served[1].digest]
    with pytest.raises(AdapterNotFound, match="'c', which is not served here; the adapters are 'a', 'b'"):
        find_adapter("c", served)
    with pytest.raises(ModelNotFound, match="no adapters are served") as caught:
        find_adapter("c", [])
    assert caught.value.status == StatusCode.LORA_NOT_FOUND
    assert ERRORS[caught.value.code].http == 404
    assert type(from_code(caught.value.code, "")) is AdapterNotFound


def test_each_load_has_a_digest_of_its_own_but_those_of_a_start_are_alike_everywhere() -> None:
    module = AdapterModule("a", "/x")
    assert module.loaded() == module.loaded()
    digests = {module.loaded(nonce).digest for nonce in (b"", b"1", b"2")} | {AdapterModule("a", "/y").loaded().digest}
    assert len(digests) == 4
    assert all(0 <= digest < 2**48 for digest in digests)
