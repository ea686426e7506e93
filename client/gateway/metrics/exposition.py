"""A scrape of /metrics in Prometheus' text format, or in OpenMetrics for clients that ask for it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import (
    Metric as Family,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from allspan.client.gateway.metrics.collect import Scene, Value
from allspan.client.gateway.metrics.table import METRICS, MODEL, PREFIX, Metric
from allspan.client.gateway.metrics.vllm_names import VLLM_METRICS, VLLM_PREFIX

_OPENMETRICS = "application/openmetrics-text"
_AS_THEY_ARE = (
    {"escaping": "allow-utf-8"} if "escaping" in inspect.signature(openmetrics.generate_latest).parameters else {}
)
"""Newer writers would otherwise make underscores of the samples' colons."""
_KINDS: dict[str, Callable[..., Family]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
    "summary": SummaryMetricFamily,
}


class Exposition:
    """`render` one scrape after another."""

    def __init__(self) -> None:
        self._process = ProcessCollector(registry=CollectorRegistry())

    def render(self, scene: Scene, accept: str) -> tuple[bytes, str]:
        """The body and its content type."""
        own = [_family(PREFIX, metric, scene) for metric in METRICS]
        if scene.context.config.metrics_names == "vllm":
            own += [_family(VLLM_PREFIX, metric, scene) for metric in VLLM_METRICS]
        families = _Families([*own, *self._process.collect()])
        if _OPENMETRICS in accept:
            written: bytes = openmetrics.generate_latest(families, **_AS_THEY_ARE)  # type: ignore[no-untyped-call]
            return written, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(families), CONTENT_TYPE_PLAIN_0_0_4


class _Families(Collector):
    """A collector over given metric families, as the library's writers expect it."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _family(prefix: str, metric: Metric, scene: Scene) -> Family:
    name, labels = prefix + metric.name, (MODEL, *metric.labels)
    model = scene.context.model.name
    values = [((model, *of), value) for of, value in metric.read(scene)]
    if metric.kind == "info":
        info = InfoMetricFamily(name.removesuffix("_info"), metric.help)
        for of, _ in values:
            info.add_metric((), dict(zip(labels, of, strict=True)))
        return info
    family: Family = _KINDS[metric.kind](name, metric.help, labels=labels)
    for of, value in values:
        family.add_metric(of, *_parts(value))  # type: ignore[attr-defined]
    return family


def _parts(value: Value) -> tuple[object, ...]:
    """Returns a value as the arguments of a family's `add_metric`."""
    if not isinstance(value, tuple):
        return (float(value),)
    if len(value) == 2:
        return value
    bounds, counts, total = value
    uppers = map(floatToGoString, (*bounds, math.inf))
    return list(zip(uppers, accumulate(counts), strict=True)), total
