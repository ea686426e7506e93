"""A folder of converted weights is there as a whole or not at all. The worker's process is one made up here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from allspan.launch.models.checkpoint_files import check_files
from allspan.launch.models.conversion import ConvertSettings, convert, with_its_ranks
from allspan.launch.models.find_model import FoundModel
from allspan.launch.placement.placement import PlacementConfig
from allspan.launch.settings import ServeSettings, serve_parser, serve_settings
from allspan.protos.api.errors import CheckpointError, ConfigError, InternalError
from allspan.protos.config.converted_manifest import FORMAT, MANIFEST, Manifest, RankWeights
from allspan.protos.config.settings import ModelConfig

POPEN = subprocess.Popen
GOOD = 'print(\'{"ranks": [{"name": "rank-0.safetensors", "num_bytes": 7}]}\')'

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


def manifest(ranks: int) -> str:
    files = tuple(RankWeights(f"rank-{rank}.safetensors", len(NO_TENSORS), "", "") for rank in range(ranks))
    return Manifest(FORMAT, 1, "0", {"dtype": "float32"}, {"family": "llama"}, {}, (), files).to_json()


def worker(monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Runs in place of the worker: writes a manifest into the folder that follows --into, then does `last`."""
    text = (
        "import sys, pathlib\n"
        "into = pathlib.Path(sys.argv[sys.argv.index('--into') + 1])\n"
        f"(into / {MANIFEST!r}).write_text({manifest(1)!r})\n{last}\n"
    )

    def popen(words: list[str], **options: object) -> subprocess.Popen[str]:
        return POPEN([sys.executable, "-c", text, *words[3:]], **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(subprocess, "Popen", popen)


@pytest.fixture
def model(tmp_path: Path) -> FoundModel:
    (tmp_path / "model").mkdir()
    return FoundModel("tiny", tmp_path / "model")


def run(model: FoundModel, out: Path, overwrite: bool = False) -> None:
    convert(model, ModelConfig("", ""), ConvertSettings(str(out), overwrite=overwrite))


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_appears_whole_and_nothing_stays_beside_it(
    model: FoundModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, GOOD)
    (tmp_path / ".out.converting-999999999").mkdir()
    run(model, tmp_path / "out")
    assert left(tmp_path) == ["model", "out"]
    assert left(tmp_path / "out") == [MANIFEST]


@pytest.mark.parametrize(
    ("last", "kind", "words"),
    [
        ('print(\'{"error": "checkpoint", "message": "the disk is full"}\')', CheckpointError, "disk is full"),
        ("sys.exit(9)", InternalError, "ended with code 9 and said nothing"),
    ],
)
def test_a_conversion_that_fails_leaves_what_was_there(
    last: str, kind: type[Exception], words: str, model: FoundModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, GOOD)
    run(model, tmp_path / "out")
    (tmp_path / "out" / "mark").touch()
    worker(monkeypatch, last)
    with pytest.raises(kind, match=words):
        run(model, tmp_path / "out", overwrite=True)
    assert left(tmp_path) == ["model", "out"]
    assert "mark" in left(tmp_path / "out")
    worker(monkeypatch, GOOD)
    run(model, tmp_path / "out", overwrite=True)
    assert left(tmp_path) == ["model", "out"]
    assert left(tmp_path / "out") == [MANIFEST]


def test_a_link_is_left_and_what_it_leads_to_is_replaced(
    model: FoundModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, GOOD)
    run(model, tmp_path / "out")
    (tmp_path / "out" / "mark").touch()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    run(model, tmp_path / "link", overwrite=True)
    assert left(tmp_path) == ["link", "model", "out"]
    assert left(tmp_path / "link") == left(tmp_path / "out") == [MANIFEST]


def test_what_a_killed_conversion_left_is_found_whatever_its_name(
    model: FoundModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, GOOD)
    (tmp_path / ".out[1].converting-999999999").mkdir()
    run(model, tmp_path / "out[1]")
    assert left(tmp_path) == ["model", "out[1]"]


def test_an_interrupted_conversion_ends_its_worker_and_leaves_nothing(
    model: FoundModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(monkeypatch, "import time; time.sleep(600)")
    ended: list[int] = []

    def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
        ended.append(process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(POPEN, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path / "out")
    assert left(tmp_path) == ["model"]
    with pytest.raises(ProcessLookupError):
        os.kill(ended[0], 0)


def test_an_out_that_must_not_be_replaced_is_refused(model: FoundModel, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="mine, which exists: give another name, or --overwrite"):
        run(model, tmp_path / "mine")
    with pytest.raises(ConfigError, match="has not made"):
        run(model, tmp_path / "mine", overwrite=True)
    with pytest.raises(ConfigError, match="holds the model itself"):
        run(model, model.path, overwrite=True)
    with pytest.raises(ConfigError, match="there is no folder"):
        run(model, tmp_path / "no" / "out")
    assert left(tmp_path) == ["mine", "model"]


def settings(model: Path, ranks: int) -> ServeSettings:
    made = serve_settings(serve_parser().parse([str(model)]))
    return replace(made, placement=PlacementConfig(ranks=ranks))


def test_a_converted_model_brings_its_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(manifest(3))
    assert with_its_ranks(settings(tmp_path, 0)).placement.ranks == 3
    assert with_its_ranks(settings(tmp_path, 3)).placement.ranks == 3
    with pytest.raises(ConfigError, match="holds weights for 3 ranks, --ranks is 2: pass --ranks 3"):
        with_its_ranks(settings(tmp_path, 2))
    (tmp_path / "other").mkdir()
    assert with_its_ranks(settings(tmp_path / "other", 0)).placement.ranks == 0


def test_before_any_process_starts_a_converted_models_files_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(manifest(2))
    for rank in range(2):
        (tmp_path / f"rank-{rank}.safetensors").write_bytes(NO_TENSORS)
    check_files(tmp_path)
    (tmp_path / "rank-0.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors: truncated: it has 0 bytes, .* 10: convert"):
        check_files(tmp_path)
    (tmp_path / "rank-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors: missing"):
        check_files(tmp_path)
