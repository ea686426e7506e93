"""`allspan bench experts`: times the CPU's products with experts of one layer, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allspan.client.bench.machine import machine
from allspan.client.bench.report import columns
from allspan.protos.api.errors import ConfigError, Unavailable

ABOUT = "Measures the CPU's products with experts, for synthetic routings; takes no MODEL."
ROUTINGS = ("uniform", "zipf", "one")

Report = dict[str, Any]

SHAPES = {
    "qwen1.5-moe-a2.7b": (2048, 60, 4, 1408),
    "qwen2-57b-a14b": (3584, 64, 8, 2560),
    "qwen3-30b-a3b": (2048, 128, 8, 768),
    "qwen3-235b-a22b": (4096, 128, 8, 1536),
    "mixtral-8x7b": (4096, 8, 2, 14336),
    "glm-4.5-air": (4096, 128, 8, 1408),
    "gpt-oss-20b": (2880, 32, 4, 2880),
    "gpt-oss-120b": (2880, 128, 4, 2880),
}
"""Hidden size, experts, those of a token and the columns of one."""

_KEYS = (
    ("hidden_size",),
    ("num_experts", "n_routed_experts", "num_local_experts"),
    ("num_experts_per_tok", "experts_per_token"),
    ("moe_intermediate_size", "intermediate_size"),
)
"""The names of these sizes in a config.json."""


@dataclass(frozen=True)
class ExpertBenchConfig:
    """The flags of `allspan bench experts`."""

    shape: str = "qwen1.5-moe-a2.7b"
    """Takes the sizes of this model, by name, or those of a config.json, by its path."""
    rows: str = "1,32,512"
    """Times steps of these numbers of tokens, separated by commas."""
    formats: str = "q4_0,q8_0"
    """Holds the weights in these formats of the CPU's kernels, separated by commas."""
    routings: str = "uniform,zipf,one"
    """Routes tokens so, separated by commas: to every expert as likely, to few more than to others, or all to the
    same."""
    threads: int = 0
    """Computes with this many threads; 0 takes one for each processor that this process may use."""
    rounds: int = 5
    """Times every case this many times and reports medians."""
    seed: int = 0
    """Seeds the generator of the routings."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.threads < 0:
            raise ConfigError(f"--rounds is {self.rounds} and --threads {self.threads}: at least 1 and 0")
        if unknown := [name for name in _words(self.routings) if name not in ROUTINGS]:
            raise ConfigError(f"--routings has {unknown[0]!r}, but there is only: {', '.join(ROUTINGS)}")
        if not self.row_counts or min(self.row_counts) < 1:
            raise ConfigError(f"--rows is {self.rows!r}, must be numbers of at least 1, separated by commas")

    @property
    def row_counts(self) -> tuple[int, ...]:
        try:
            return tuple(map(int, _words(self.rows)))
        except ValueError:
            return ()


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def sizes_of(shape: str) -> dict[str, int]:
    """Returns the sizes of a layer by name. Raises ConfigError for a name or a file that says none."""
    if shape.lower() in SHAPES:
        sizes = SHAPES[shape.lower()]
    else:
        path = Path(shape)
        if not path.is_file():
            raise ConfigError(f"--shape is {shape!r}: no file of that name, nor one of {', '.join(SHAPES)}")
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"--shape {shape}: no JSON object ({error})") from error
        sizes = tuple(_size(shape, config.get("text_config", config), names) for names in _KEYS)  # type: ignore[assignment]
    return dict(zip(("hidden", "experts", "top_k", "width"), sizes, strict=True))


def _size(path: str, config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return int(config[name])
    raise ConfigError(f"--shape {path}: it has no {' or '.join(names)}, so it is no mixture of experts")


def run(config: ExpertBenchConfig, tell: Callable[[str], None]) -> Report:
    """`tell` gets a line for each case as it comes. Raises Unavailable where the measuring process fails."""
    sizes = sizes_of(config.shape)
    report: Report = {"settings": asdict(config), "sizes": sizes, "machine": machine(), "cases": []}
    settings = {
        "shape": sizes,
        "rows": config.row_counts,
        "formats": _words(config.formats),
        "routings": _words(config.routings),
        "threads": config.threads or len(os.sched_getaffinity(0)),
        "rounds": config.rounds,
        "seed": config.seed,
    }
    for line in _lines(settings):
        if "machine" in line:
            report["machine"] |= line["machine"]
        elif "error" in line:
            raise ConfigError(line["error"])
        else:
            case = _rates(line["case"], report["machine"]["copy_gb_s"])
            report["cases"].append(case)
            tell(f"{case['format']}, {case['rows']} rows, {case['routing']}: {case['total_us']:.0f} µs")
    return report


def _lines(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "allspan.kernels.bench.experts", json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for text in process.stdout or ():
                yield json.loads(text)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise Unavailable(f"experts cannot be timed here: the process ended with code {process.returncode}")


def _rates(case: Mapping[str, Any], copy_gb_s: float) -> Report:
    """A case with what follows from its times; the bytes are those of the experts that any row goes to."""
    us = case["us"]
    total = us["gated"] + us["sum"]
    gb_s = case["num_bytes"] / total / 1e3
    return dict(case) | {
        "total_us": total,
        "gb_s": gb_s,
        "share_of_copy": gb_s / copy_gb_s,
        "gflop_s": case["flops"] / total / 1e3,
        "share_of_dense": us["dense"] / total,
    }


def table(report: Report) -> str:
    head = (
        "format",
        "rows",
        "routing",
        "experts",
        "busiest",
        "route µs",
        "gate, up µs",
        "down µs",
        "GB/s",
        "of a copy",
    )
    rows = [(*head, "GFLOP/s", "of dense")]
    for case in report["cases"]:
        us = case["us"]
        rows.append(
            (
                *(case["format"], str(case["rows"]), case["routing"], f"{case['distinct']:.1f}"),
                *(f"{case['imbalance']:.1f} x", f"{us['route']:.0f}", f"{us['gated']:.0f}", f"{us['sum']:.0f}"),
                *(f"{case['gb_s']:.1f}", f"{100 * case['share_of_copy']:.0f} %"),
                *(f"{case['gflop_s']:.0f}", f"{100 * case['share_of_dense']:.0f} %"),
            )
        )
    about = report["machine"]
    head_line = f"{about['kernels']}, {about['threads']} threads, copy {about['copy_gb_s']:.1f} GB/s"
    return f"{head_line}\n\n{columns(rows)}\n\n{_loads(report)}"


def _loads(report: Report) -> str:
    """The rows of each expert in the first of the routings that take turns, the busiest expert first."""
    lines = {}
    for case in report["cases"]:
        counts = Counter(case["load"])
        parts = (f"{counts[rows]} x {rows}" for rows in sorted(counts, reverse=True))
        lines[case["rows"], case["routing"]] = f"{case['rows']} rows, {case['routing']}: {', '.join(parts)}"
    return "\n".join(("Rows of each expert, as experts x rows, the busiest first:", *lines.values()))
