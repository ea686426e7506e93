"""Pictures of what was measured, with matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from allspan.protos.errors import ConfigError


def check_plot(path: str) -> None:
    """Before anything is measured: ConfigError when no picture could be drawn there. "" asks for none."""
    if not path:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path} needs matplotlib, which is not installed: pip install 'allspan[plots]'")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {Path(path).absolute().parent}")


def plot_prefix(path: str, report: dict[str, Any], title: str) -> None:
    """Time to the first token over the share of the prompt that was cached: medians, the least and the most."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points = report["curve"]
    hits = [100 * point["cached_tokens"] / report["prompt_tokens"] for point in points]
    medians = [1000 * point["ttft_s"]["median"] for point in points]
    below = [1000 * (point["ttft_s"]["median"] - point["ttft_s"]["min"]) for point in points]
    above = [1000 * (point["ttft_s"]["max"] - point["ttft_s"]["median"]) for point in points]
    axes.errorbar(hits, medians, yerr=[below, above], marker="o", capsize=4, color="#1f6feb")
    for hit, median, point in zip(hits, medians, points, strict=True):
        label = f"{median:.0f} ms ({point['ratio']:.2f}×)"
        axes.annotate(label, (hit, median), textcoords="offset points", xytext=(6, 8), fontsize=9)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("prompt tokens found in the prefix cache, %")
    axes.set_ylabel("time to first token, ms")
    axes.set_xlim(-3, 118)
    axes.set_xticks(range(0, 101, 20))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path)
