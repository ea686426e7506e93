"""list, rm, and what is fetched from a hub: revisions beside each other, and tokens that nobody else sees."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO

import pytest

from allspan.launch.commands.models import list as list_command
from allspan.launch.commands.models import rm
from allspan.launch.models import find_model, model_lock, pull
from allspan.launch.models.find_model import resolve_model
from allspan.launch.models.hub import HubConfig, take_token
from allspan.launch.models.local_models import local_models, remember_converted
from allspan.protos.api.errors import ConfigError, ModelNotFound
from allspan.protos.cluster.cluster_file import ClusterInfo
from allspan.protos.cluster.running import RunningCluster, RunRecord
from support.gguf_files import write_gguf


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder with a GGUF file, a folder from a hub and half of another one."""
    monkeypatch.setenv("ALLSPAN_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home/models"
    for name in ("org/whole", "org/half"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    (folder / "org/whole/model.safetensors").write_bytes(bytes(1000))
    (folder / ".x.lock").touch()
    write_gguf(folder / "Tiny.gguf", {})
    monkeypatch.setattr(rm, "running_clusters", list)
    return folder


def test_list_shows_name_size_format_and_path(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_command.run(["--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found.keys() == {"Tiny", "org/whole", "org/half"}
    assert found["Tiny"]["format"].startswith("GGUF ")
    assert (found["org/whole"]["format"], found["org/whole"]["num_bytes"]) == ("safetensors bfloat16", 1027)
    assert found["org/half"]["format"] == "incomplete"
    assert list_command.run([]) == 0
    assert str(models / "org/whole") in capsys.readouterr().out


def test_a_name_in_the_list_is_a_name_for_serve(models: Path) -> None:
    assert resolve_model("tiny") == find_model.FoundModel("Tiny", models / "Tiny.gguf")


def test_rm_removes_what_is_named_and_asks_first(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="rm -y Tiny"):
        rm.run(["Tiny"])  # the tests' standard input is no terminal
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda text: "n")
    assert rm.run(["Tiny"]) == 1
    assert (models / "Tiny.gguf").exists()
    assert rm.run(["-y", "tiny", "Tiny", "org/whole"]) == 0
    assert [model.name for model in local_models()] == ["org/half"]
    assert rm.run(["-y", "org/half"]) == 0
    assert not (models / "org").exists()
    assert "removed Tiny" in capsys.readouterr().err


def test_a_name_of_several_models_is_refused_and_a_path_or_the_exact_name_decides(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Foo", "foo", "bar", "org/bar"):
        (models / name).mkdir()
        (models / name / "config.json").touch()
    write_gguf(models / "bar.gguf", {})
    for name in ("FOO", "bar"):
        with pytest.raises(ConfigError, match=f"'{name}' names 2 models; give the path of one: {models}"):
            rm.run(["-y", name])
        with pytest.raises(ConfigError, match="names 2 models"):
            resolve_model(name)
    assert resolve_model("foo").path == models / "foo"
    assert rm.run(["-y", "foo", str(models / "org/../bar.gguf")]) == 0
    assert {model.name for model in local_models()} == {"Foo", "bar", "org/bar", "Tiny", "org/whole", "org/half"}
    monkeypatch.chdir(models / "org")
    assert rm.run(["-y", "bar"]) == 0
    assert (models / "bar").exists(), "a path goes before a name"
    assert not (models / "org/bar").exists()


def test_rm_removes_no_model_while_another_process_fetches_it(models: Path) -> None:
    for name, lock in (("org/half", "org/.half.lock"), ("Tiny", ".Tiny.lock")):
        with open(models / lock, "w", encoding="utf-8") as pulling:
            fcntl.flock(pulling, fcntl.LOCK_EX)
            with pytest.raises(ConfigError, match=f"{name} is being fetched by another process"):
                rm.run(["-y", name])
            assert name in [model.name for model in local_models()]
        assert rm.run(["-y", name]) == 0
        assert not (models / lock).exists()


def test_a_lock_whose_file_is_removed_before_it_is_held_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = model_lock._try_lock

    def removed_first(file: IO[str]) -> bool:
        os.unlink(file.name)
        return take(file)

    monkeypatch.setattr(model_lock, "_try_lock", removed_first)
    with model_lock.locked_at_once(tmp_path / "x") as is_held:
        assert not is_held


def test_rm_leaves_alone_what_lies_outside_or_is_in_use(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    (outside / "allspan.json").write_text("{}")
    remember_converted(outside)
    (models / "linked").symlink_to(outside)
    for name in (str(outside), "../../outside", str(models / "../../outside")):
        with pytest.raises((ConfigError, ModelNotFound)):
            rm.run(["-y", name])
    assert rm.run(["-y", "linked"]) == 0
    assert (outside / "config.json").exists()
    record = RunRecord(41, "x", str(models / "org/whole"), 1, 0.0, 0.0)
    running = RunningCluster(tmp_path, record, ClusterInfo(1, "ready", "x", ""), ())
    monkeypatch.setattr(rm, "running_clusters", lambda: [running])
    with pytest.raises(ConfigError, match=r"pid 41.*allspan stop 41"):
        rm.run(["-y", "org/whole"])


def test_a_revision_is_kept_beside_the_main_branch(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def snapshot(name: str, revision: str | None, token: str | None, local_dir: Path, **rest: object) -> None:
        asked.append((name, revision, token))
        for file in ("config.json", "model.safetensors"):
            (local_dir / file).touch()

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(pull, "_check_host", lambda name, host: None)
    monkeypatch.setenv("HF_TOKEN", "hf_variable")
    found = resolve_model("org/new", HubConfig(revision="refs/pr/1"))
    assert (found.name, found.path.name) == ("org/new", "new@refs%2Fpr%2F1")
    other = resolve_model("org/new", HubConfig(revision="refs--pr--1"))
    assert other.path != found.path, "two revisions share a folder"
    asked.pop()
    assert resolve_model("org/new", HubConfig(hf_token="hf_flag")).path.name == "new"
    assert asked == [("org/new", "refs/pr/1", "hf_variable"), ("org/new", None, "hf_flag")]
    assert "HF_TOKEN" not in os.environ, "ranks would inherit it"
    with pytest.raises(ConfigError, match="--revision is 'x', but 'Tiny'"):
        resolve_model("Tiny", HubConfig(revision="x"))
    with pytest.raises(ConfigError, match="--revision"):
        resolve_model("org/new", HubConfig(revision="../../x"))


def test_a_token_comes_from_a_file_and_no_error_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hf_file\n")
    assert take_token(HubConfig(hf_token_file=str(file)), {"HF_TOKEN": "hf_other"}) == "hf_file"
    assert take_token(HubConfig(), {}) is None
    file.write_text("hf_one two\n")
    with pytest.raises(ConfigError) as caught:
        take_token(HubConfig(hf_token_file=str(file)), {})
    assert "hf_one" not in caught.value.message
    assert "hf_flag" not in repr(HubConfig(hf_token="hf_flag"))
