"""The distributions that the gateway measures over its requests, with their buckets."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from allspan.client.gateway.telemetry.histogram import Histogram

# fmt: off
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0,
)
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 10.0,
)
_REQUEST_S = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
# fmt: on


@dataclass(frozen=True)
class RequestHistograms:
    """Times in seconds, and numbers of tokens; the names are those that the table of metrics reads."""

    first_token_s: Histogram = field(default_factory=partial(Histogram, _FIRST_TOKEN_S))
    inter_token_s: Histogram = field(default_factory=partial(Histogram, _TOKEN_S))
    mean_token_s: Histogram = field(default_factory=partial(Histogram, _TOKEN_S))
    total_s: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    queue_s: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    prefill_s: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    decode_s: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    request_prompt_tokens: Histogram = field(default_factory=partial(Histogram, _TOKENS))
    request_output_tokens: Histogram = field(default_factory=partial(Histogram, _TOKENS))
