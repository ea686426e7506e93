"""`python -m allspan.worker`: its arguments, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from allspan.protos.config.config_json import to_json
from allspan.protos.config.settings import ModelConfig, ParallelConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from allspan.worker.__main__ import main, read_config


def test_a_file_is_read(tmp_path: Path) -> None:
    sizes = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=70)
    config = WorkerConfig(ModelConfig("/m", "m"), ServiceConfig(str(tmp_path)), scheduler=sizes)
    file = tmp_path / "config.json"
    file.write_text(to_json(config))
    assert read_config([str(file)]) == config


def test_the_rank_that_mpirun_told_reads_its_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorkerConfig(ModelConfig("/m", "m"), ServiceConfig(str(tmp_path)))
    file = tmp_path / "config.json"
    file.write_text(to_json(config, [{"threads": 1}, {"threads": 4}]))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert read_config([str(file)]).parallel.threads == 4


def test_flags_say_the_same() -> None:
    flags = [
        "--model",
        "/models/tiny.gguf",
        "--run-dir",
        "/run/1",
        "--threads",
        "2",
        "--cpus",
        "0,3",
        "--page-size",
        "64",
    ]
    config = read_config(flags)
    assert config.model == ModelConfig("/models/tiny.gguf", "tiny")
    assert config.service == ServiceConfig("/run/1")
    assert config.parallel == ParallelConfig(2, (0, 3))
    assert config.cache.page_size == 64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model"),
        (["--model", "/m"], "--run-dir"),
        (["--model", "/m", "--run-dir", "/r", "--thread", "2"], "unknown flag --thread"),
        (["--model", "/m", "--run-dir", "/r", "--threads", "0"], "must be"),
        (["--model", "/m", "--run-dir", "/r", "--page-size", "17"], "16, 32, 64, 128"),
        (["/no/such/file.json"], "/no/such/file.json"),
    ],
)
def test_wrong_arguments_end_with_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_wrong_arguments_load_neither_torch_nor_mpi() -> None:
    code = (
        "import sys\n"
        "from allspan.worker.__main__ import main\n"
        "try: main(['--bogus'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'mpi4py', 'grpc'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_a_rank_loads_no_tokenizer_no_templates_and_no_other_framework() -> None:
    """They would cost a start a quarter of a second, and memory."""
    unwanted = ["jinja2", "tokenizers", "transformers", "matplotlib", "scipy", "sympy", "torch._dynamo", "mpi4py"]
    code = f"import sys, allspan.worker.app; print(*[name for name in {unwanted} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == []
