"""`allspan bench kernels`: times the CUDA kernels, each group in a process of its own, and sums up."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from allspan.client.bench.report import columns
from allspan.protos.api.errors import ConfigError, Unavailable

GROUPS = ("decode", "prefill", "latent", "cascade", "linear", "experts", "adapters", "elementwise", "sampling")
ABOUT = "The CUDA kernels beside FlashInfer, cuDNN, cuBLAS and torch, on one GPU, inside CUDA graphs; takes no MODEL."

Report = dict[str, Any]


@dataclass(frozen=True)
class KernelBenchConfig:
    """The flags of `allspan bench kernels`."""

    only: str = ""
    """Times only these groups, separated by commas; empty times all: decode, prefill, latent,
    cascade, linear, experts, adapters, elementwise, sampling."""
    rounds: int = 7
    """Times every side this many times, in turns, and reports medians."""
    markdown: str = ""
    """Prints the tables of a saved JSON report, every case and the slower ones too, and times nothing; empty times the
    kernels."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"--rounds is {self.rounds}, must be at least 1")
        if unknown := [name for name in self.groups if name not in GROUPS]:
            raise ConfigError(f"--only is {self.only}, but there is no {unknown[0]!r}: {', '.join(GROUPS)}")

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(name for name in self.only.split(",") if name) or GROUPS


def run(config: KernelBenchConfig, tell: Callable[[str], None]) -> Report:
    """`tell` gets a line for each case as it comes. Raises Unavailable where there is no GPU that kernels run on."""
    report: Report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "settings": asdict(config)}
    report |= {"versions": {}, "devices": [], "cases": [], "broken": []}
    for group in config.groups:
        for line in _lines(group, config.rounds):
            if "error" in line:
                raise Unavailable(f"kernels cannot be timed here: {line['error']}")
            if "device" in line:
                report["devices"].append(line["device"])
                report["versions"] = line["versions"]
            elif "case" in line:
                report["cases"].append(line["case"])
                tell(words(line["case"], report["devices"][-1]["copy_tb_s"]))
            else:
                report["broken"].append(line["broken"])
                tell(line["broken"])
    report["summary"] = {group: summary(report["cases"], group) for group in config.groups}
    return report


def _lines(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Yields the lines of the benchmark process and, if it ends with an error code, {"broken": words}."""
    command = [sys.executable, "-m", "allspan.kernels.bench", group, "--rounds", str(rounds)]
    last = "before the first case"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for text in process.stdout or ():
                line: dict[str, Any] = json.loads(text)
                if "case" in line:
                    last = f"after {line['case']['name']!r}"
                yield line
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        yield {"broken": f"{group}: ended with code {process.returncode} {last}; the cases behind it are missing"}


def summary(cases: Sequence[dict[str, Any]], group: str) -> dict[str, Any]:
    """Returns the figures over the cases that another library could run as well; cases with wrong results are named."""
    mine = [case for case in cases if case["group"] == group]
    ratios = [case["ratio"] for case in mine if case["ratio"] and not case["wrong"]]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    wrong = [case["name"] for case in mine if case["wrong"]]
    return {
        "cases": len(mine),
        "compared": len(ratios),
        "ratio": mean,
        "least": min(ratios, default=None),
        "wrong": wrong,
    }


def words(case: dict[str, Any], copy_tb_s: float) -> str:
    """`decode  64 x 4,096 …  allspan 258.0 µs (4.16 TB/s, 98 % of a copy)  FlashInfer 280.1 µs  1.09 x`."""
    head = f"{case['group']}  {case['name']}"
    if case.get("kernel"):
        head += f" [{case['kernel']}]"
    if case["wrong"] or case["left_out"]:
        return f"{head}  {'WRONG: ' + case['wrong'] if case['wrong'] else 'left out: ' + case['left_out']}"
    parts = []
    for figure in case["figures"]:
        if figure["refused"]:
            parts.append(f"{figure['side']} refuses ({figure['refused'][:60]})")
            continue
        rate = ""
        if figure["is_ours"]:
            tb_s = case["num_bytes"] / figure["us"] / 1e6
            tflops = case["flops"] / figure["us"] / 1e6
            rate = (
                f" ({tflops:.0f} TFLOP/s)"
                if tflops > 100
                else f" ({tb_s:.2f} TB/s, {100 * tb_s / copy_tb_s:.0f} % of a copy)"
            )
        parts.append(f"{figure['side']} {figure['us']:.1f} µs{rate}")
    ratio = [f"{case['ratio']:.2f} x"] if case["ratio"] else []
    return "  ".join([head, *parts, *ratio])


def table(report: Report) -> str:
    """Returns the rows of the summary; the cases were printed as they came."""
    rows = [("group", "cases", "compared", "mean ratio", "min ratio", "wrong results")]
    for group, found in report["summary"].items():
        mean, least = (f"{found[key]:.2f} x" if found[key] else "-" for key in ("ratio", "least"))
        rows.append((group, str(found["cases"]), str(found["compared"]), mean, least, str(len(found["wrong"]))))
    device = report["devices"][0]
    about = f"{device['name']}: copy {device['copy_tb_s']:.2f} TB/s, bf16 product {device['tflops']:.0f} TFLOP/s"
    return "\n".join([about, "", columns(rows), *report["broken"]])
