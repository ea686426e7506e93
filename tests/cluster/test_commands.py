"""Commands that start a cluster of their own, on tiny models: what they print last, and how they refuse a bad model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allspan.launch.commands.plan import table
from support.byte_model import save_byte_model
from support.released_configs import DEEPSEEK_V3
from support.serving import Traces, memory_folders, run_allspan, runtime_folder

pytestmark = pytest.mark.timeout(240)

KINDS = ("truncated", "missing", "context", "nothing")
AT_NIGHT = ("family", "awq", "heads", "tokenizer")
"""Kinds of damaged models that the readers' own tests cover, too."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 whose tokens are bytes."""
    return save_byte_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


def generate(model: Path, *flags: str) -> dict[str, Any]:
    run = run_allspan("generate", str(model), "--prompt=abc", "--max-tokens=12", "--temperature=0", "--json", *flags)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.nightly
def test_generate_gives_the_same_tokens_on_one_rank_and_on_four(tiny: Path) -> None:
    one = generate(tiny, "--ranks=1", "--threads=1")
    four = generate(tiny, "--ranks=4", "--threads=1", "--oversubscribe", "--collectives=mpi")
    assert one.keys() >= {"text", "token_ids", "prompt_tokens", "timings"}
    assert (one["prompt_tokens"], len(one["token_ids"])) == (3, 12)
    assert one["token_ids"] == four["token_ids"]


def test_bench_latency_with_random_weights_prints_every_figure_last(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape/config.json").write_text((tiny / "config.json").read_text())
    run = run_allspan(
        *["bench", "latency", str(tmp_path / "shape"), "--random-weights", "-tp", "2", "--threads", "1"],
        *["--oversubscribe", "--batch-size", "3", "--input-len", "20", "--output-len", "5", "--json"],
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    positive = ("prefill_tokens_per_s", "decode_tokens_per_s", "ttft_s", "host_s_per_step", "load_s")
    assert all(report[name] > 0 for name in positive), report
    assert len(report["peak_rss_bytes"]) == 2
    assert min(report["peak_rss_bytes"]) > 1 << 20


def test_a_converted_model_gives_the_same_tokens_and_its_own_ranks(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = run_allspan("convert", str(tiny), str(out), "--ranks=2", "--threads=1")
    assert run.returncode == 0, run.stderr
    assert f"serve it with: allspan serve {out}" in run.stderr
    flags = ("--threads=1", "--oversubscribe")
    assert generate(out, *flags)["token_ids"] == generate(tiny, "--ranks=2", *flags)["token_ids"]
    run = run_allspan("generate", str(out), "--prompt=abc", "--ranks=1")
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith("pass --ranks 2, or convert the model again with --ranks 1")
    file = out / "rank-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    run = run_allspan("generate", str(out), "--prompt=abc", *flags)
    assert run.returncode == 2
    assert "rank-1.safetensors: truncated" in run.stderr
    run = run_allspan("convert", str(tiny), str(out), "--ranks=1", "--overwrite", "--quantization=nosuch")
    assert run.returncode == 2
    assert (out / "rank-1.safetensors").exists()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_plan_tells_what_the_ranks_would_hold(tiny: Path, ranks: int) -> None:
    run = run_allspan("plan", str(tiny), f"--ranks={ranks}", "--oversubscribe", "--json")
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    assert [rank["rank"] for rank in plan["ranks"]] == [*range(ranks)]
    assert all(rank["weight_bytes"] > 0 and rank["kv_bytes"] > 0 for rank in plan["ranks"])
    assert all(0 < rank["token_bytes"] <= rank["weight_bytes"] for rank in plan["ranks"])
    assert plan["parameters"] == plan["active_parameters"]
    assert plan["floor_tokens_per_s"] > 0
    assert plan["max_model_len"] == plan["largest_model_len"] == 256


def test_plan_tells_the_cache_of_a_token_from_a_config_alone(tmp_path: Path) -> None:
    """In bfloat16, on a machine that the model need not fit."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    run = run_allspan("plan", str(tmp_path), "--load-format=dummy", "--ranks=1", "--json")
    plan = json.loads(run.stdout)
    assert plan["ranks"][0]["kv_bytes_per_page"] == plan["page_size"] * 70_272
    assert "  KV cache of a token        68.6 KiB on a rank" in table(plan).splitlines()


def damaged(tiny: Path, folder: Path, **config: Any) -> Path:
    folder.mkdir()
    for path in tiny.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if config:
        values = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in AT_NIGHT)])
def test_a_bad_model_is_refused_in_one_line_and_nothing_is_left(tiny: Path, tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {
        "family": {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
        "awq": {"quantization_config": {"quant_method": "awq", "bits": 4}},
    }.get(kind, {})
    model = damaged(tiny, tmp_path / "bad", **changes)
    flags, words, code = ["--ranks=1"], [], 2
    weights = model / "model.safetensors"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:5000])
        words = ["model.safetensors", "5000"]
    elif kind == "missing":
        weights.unlink()
        words = ["safetensors"]
    elif kind == "family":
        words = ["amba", "Llama"]
    elif kind == "awq":
        words = ["awq"]
    elif kind == "tokenizer":
        for path in [*model.glob("tokenizer*"), *model.glob("vocab*")]:
            path.unlink()
        words = ["no tokenizer.json"]
    elif kind == "nothing":
        for path in model.iterdir():
            path.unlink()
        words, code = ["holds no model", "config.json"], 3
    elif kind == "context":
        flags, words = ["--max-model-len=9999"], ["9999", "256"]
    else:
        flags, words = ["--ranks=7", "--threads=1", "--oversubscribe"], ["7", "6"]
    with runtime_folder() as runtime:
        run = run_allspan("serve", str(model), "--port=0", "--grpc-port=0", *flags, XDG_RUNTIME_DIR=str(runtime))
        Traces(runtime, [], memory_folders(runtime)).assert_gone(0.5)
    last = run.stderr.splitlines()[-1]
    assert run.returncode == code, run.stderr
    assert last.startswith("allspan serve: ")
    assert all(word.lower() in last.lower() for word in words), last
    assert "Traceback" not in run.stderr
