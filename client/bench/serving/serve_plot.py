"""The picture of `allspan bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allspan.client.bench.serving.serve_clients import Record

COLOURS = ("#1f6feb", "#bf3989", "#1a7f37", "#9a6700")


def plot_serve(path: str, records: Sequence[Record], title: str) -> None:
    """Shares of requests below each latency, and over time what ran and how many tokens came."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    good = [record for record in records if not record.error]
    figure = Figure(figsize=(10.5, 3.9), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    values = {
        "TTFT": [record.ttft_s for record in good],
        "TPOT": [record.tpot_s for record in good if record.output_tokens > 1],
        "ITL": [gap for record in good for gap in record.itl_s],
        "E2EL": [record.e2el_s for record in good],
    }
    for (name, found), colour in zip(values.items(), COLOURS, strict=True):
        if found:
            ordered = sorted(1000 * value for value in found)
            left.step(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], label=name, color=colour)
    left.set_xscale("log")
    left.set_xlabel("milliseconds")
    left.set_ylabel("% at most so long")
    left.grid(alpha=0.3)
    left.legend()
    _over_time(right, records)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _over_time(axes: Any, records: Sequence[Record]) -> None:
    first = min(record.started for record in records)
    last = max(record.ended for record in records)
    width = max((last - first) / 60, 1e-3)
    tokens = [0.0] * 61
    for record in records:
        share = record.output_tokens / len(record.arrivals) if record.arrivals else 0.0
        for moment in record.arrivals:
            tokens[min(60, int((moment - first) / width))] += share / width
    axes.plot([(i + 0.5) * width for i in range(60)], tokens[:60], color=COLOURS[0])
    axes.set_xlabel("seconds")
    axes.set_ylabel("output tokens/s", color=COLOURS[0])
    axes.set_ylim(bottom=0)
    steps = sorted([(record.started, 1) for record in records] + [(record.ended, -1) for record in records])
    running, moments, counts = 0, [], []
    for moment, step in steps:
        running += step
        moments.append(moment - first)
        counts.append(running)
    other = axes.twinx()
    other.step(moments, counts, where="post", color=COLOURS[1], alpha=0.6)
    other.set_ylabel("requests at once", color=COLOURS[1])
    other.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
