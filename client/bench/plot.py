"""Plots of the measurements, with matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.installed import install_command


def check_plot(path: str) -> None:
    """Checks, before anything is measured, that a plot can be written: ConfigError when no picture could be drawn
    there. "" asks for none."""
    if not path:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path} needs matplotlib, which is missing: {install_command('plots')}")
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


def plot_compare(path: str, report: dict[str, Any], title: str) -> None:
    """Tokens per second, one panel a measure, one bar an engine: medians, the least and the most, our ratio to it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measures = report["tokens_per_s"]
    figure = Figure(figsize=(3.4 * len(measures), 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for axes, (name, engines) in zip(panels, measures.items(), strict=True):
        medians = [rate["median"] for rate in engines.values()]
        below = [rate["median"] - rate["min"] for rate in engines.values()]
        above = [rate["max"] - rate["median"] for rate in engines.values()]
        colours = ["#1f6feb", *["#8c959f"] * (len(engines) - 1)]
        axes.bar(list(engines), medians, yerr=[below, above], capsize=4, color=colours)
        for place, (engine, rate) in enumerate(engines.items()):
            ratio = report["ratios"][name].get(engine)
            label = f"{rate['median']:,.0f}" + (f"\n(ours {ratio['median']:.2f}×)" if ratio else "")
            axes.annotate(
                label, (place, rate["max"]), textcoords="offset points", xytext=(0, 4), ha="center", fontsize=8
            )
        axes.set_title(f"{name} of {report['batch_size']}" if name == "batch decode" else name, fontsize=10)
        axes.margins(y=0.22)
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("tokens/s")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)
