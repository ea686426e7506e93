"""GPUs found by a played nvidia-smi or in a made-up /proc, and which of them ranks may have."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from allspan.launch.placement import gpus
from allspan.launch.placement.gpus import Gpu, find_gpus, gpus_for, visible_gpus
from allspan.protos.api.errors import ConfigError

LISTED = """0, NVIDIA H200, 143771, GPU-aaaa-1, 00000000:18:00.0
1, NVIDIA H200, 143771, GPU-aaab-2, 00000000:C3:00.0
"""
FOUR = tuple(Gpu(index, "NVIDIA H200", 141 << 30, f"GPU-{name}") for index, name in enumerate(("aa", "ab", "b", "c")))


def play(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(path))


def hang(root: Path, bus: str, node: int) -> None:
    folder = root / "bus/pci/devices" / bus
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{node}\n")


def test_nvidia_smi_tells_which_gpus_there_are_and_sys_where_they_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, monkeypatch, f"cat <<'END'\n{LISTED}END")
    hang(tmp_path, "0000:18:00.0", 0)
    hang(tmp_path, "0000:c3:00.0", -1)  # which means that nobody knows
    assert find_gpus(sys_root=tmp_path) == (
        Gpu(0, "NVIDIA H200", 143771 << 20, "GPU-aaaa-1", 0),
        Gpu(1, "NVIDIA H200", 143771 << 20, "GPU-aaab-2", None),
    )


def test_without_nvidia_smi_the_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(tmp_path, monkeypatch, "exit 9")
    folder = tmp_path / "driver/nvidia/gpus/0000:c3:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 30\nGPU UUID: \t GPU-aaab-2\n")
    hang(tmp_path, "0000:c3:00.0", 1)
    assert find_gpus(sys_root=tmp_path, proc_root=tmp_path) == (Gpu(0, "NVIDIA H200", 0, "GPU-aaab-2", 1),)
    assert find_gpus(sys_root=tmp_path, proc_root=tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("2,0", [2, 0]),
        ("GPU-b, GPU-aa", [2, 0]),
        ("GPU-a", []),  # two begin like that
        ("1,7,2", [1]),  # CUDA stops at what is not there
        ("-1", []),
        ("", []),
    ],
)
def test_cuda_visible_devices_is_respected(visible: str, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(FOUR, {gpus.VISIBLE: visible})] == indices
    assert visible_gpus(FOUR, {}) == FOUR


def test_a_part_of_a_gpu_is_taken_at_its_word() -> None:
    assert [gpu.visible for gpu in visible_gpus(FOUR, {gpus.VISIBLE: "MIG-1,MIG-2"})] == ["MIG-1", "MIG-2"]


def test_too_few_gpus_are_shared_where_that_is_allowed() -> None:
    shared = gpus_for(5, "--ranks is 5", FOUR, {gpus.VISIBLE: "2,1"}, are_shared=True)
    assert [gpu.index for gpu in shared] == [2, 1, 2, 1, 2]
    with pytest.raises(ConfigError, match="no NVIDIA GPU is found"):
        gpus_for(1, "--ranks is 1", (), {}, are_shared=True)


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    assert gpus_for(2, "--ranks is 2", FOUR, {}) == FOUR[:2]
    with pytest.raises(ConfigError, match="--ranks is 5, a GPU each, and there are 4; lower --ranks"):
        gpus_for(5, "--ranks is 5", FOUR, {})
    with pytest.raises(ConfigError, match=r"there is 1 \(CUDA_VISIBLE_DEVICES is '3', the machine has 4\)"):
        gpus_for(2, "--ranks is 2", FOUR, {gpus.VISIBLE: "3"})
    with pytest.raises(ConfigError, match="device is cuda, but no NVIDIA GPU is found here; use --device cpu"):
        gpus_for(1, "--ranks is 1", (), {})
