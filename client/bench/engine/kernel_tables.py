"""Markdown tables of a run of `allspan bench kernels`: every case of the run, the slower ones too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import ConfigError

TITLES = {
    "decode": "Decode attention",
    "prefill": "Prefill attention",
    "latent": "Attention over latents",
    "cascade": "Cascade attention",
    "linear": "Products",
    "experts": "Experts of a mixture",
    "adapters": "Low-rank adapters",
    "elementwise": "Norms, SwiGLU and rotary embedding",
    "sampling": "Sampling",
}
_NOTE = """Times are µs of a call inside a CUDA graph, medians. The ratio is the fastest peer's time over the fastest of
allspan's: below 1 (in bold) the peer is faster."""


def read_report(path: str) -> dict[str, Any]:
    """The JSON object that `allspan bench kernels --json` printed. Raises ConfigError for a file that holds none."""
    try:
        report = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--markdown is {path}, which cannot be read as JSON: {error}") from error
    if not isinstance(report, dict) or "cases" not in report or "devices" not in report:
        raise ConfigError(f"--markdown is {path}, which is no report of `allspan bench kernels --json`")
    return report


def markdown(report: Mapping[str, Any]) -> str:
    """A summary by group, then a table of every case for each group."""
    device, versions = report["devices"][0], report["versions"]
    about = [
        f"`{report.get('command', 'allspan bench kernels')}` on {device['name']}, {report['date'][:10]}: copy "
        f"{device['copy_tb_s']:.2f} TB/s, bfloat16 product {device['tflops']:.0f} TFLOP/s.",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        _NOTE,
    ]
    groups = [group for group in TITLES if any(case["group"] == group for case in report["cases"])]
    return "\n\n".join([*about, _summary(report, groups), *(_group(report["cases"], group) for group in groups)]) + "\n"


def _summary(report: Mapping[str, Any], groups: Sequence[str]) -> str:
    rows = [["group", "cases", "with a peer", "slower than the peer", "ratio, geometric mean", "least ratio"]]
    for group in groups:
        found = report["summary"][group]
        slower = sum(1 for case in report["cases"] if case["group"] == group and (case["ratio"] or 1) < 1)
        mean, least = (_ratio(found[key]) for key in ("ratio", "least"))
        rows.append([TITLES[group], str(found["cases"]), str(found["compared"]), str(slower), mean, least])
    return _table(rows)


def _group(cases: Sequence[Mapping[str, Any]], group: str) -> str:
    mine = [case for case in cases if case["group"] == group]
    sides = list(dict.fromkeys(figure["side"] for case in mine for figure in case["figures"]))
    rows = [["case", *sides, "ratio"]]
    for case in mine:
        times = {figure["side"]: _time(figure) for figure in case["figures"]}
        ending = "wrong" if case["wrong"] else "left out" if case["left_out"] else _ratio(case["ratio"])
        rows.append([case["name"], *(times.get(side, "") for side in sides), ending])
    return f"## {TITLES[group]}\n\n{_table(rows)}"


def _time(figure: Mapping[str, Any]) -> str:
    if figure["refused"]:
        return "refused"
    us = figure["us"]
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _ratio(ratio: float | None) -> str:
    if not ratio:
        return ""
    return f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
