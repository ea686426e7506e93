"""Estimates what tensor or pipeline parallel ranks cost over the link between hosts.

With W bytes of weights, a memory bandwidth B of each host, N hosts and L layers, a decode step of one request takes

    tensor parallel     W / (N · B) + 2 · L · t      t: an all-reduce of one row of activations over the link
    pipeline parallel   W / B + (N - 1) · hop        hop: one row from host to host

A message takes the link's latency and its bytes at the link's rate; an all-reduce takes log2(N) messages, one after the
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allspan.launch.placement.estimate import GPU_BYTES_PER_S, NODE_BYTES_PER_S, THREAD_BYTES_PER_S
from allspan.protos.api.wording import counted

ROW_BYTES = 4
"""Bytes of an activation on the link."""


@dataclass(frozen=True)
class LinkConfig:
    """The assumptions about the link between hosts; nothing is measured."""

    link_latency_us: float = 25.0
    """Assumes this latency of a message between two hosts, in microseconds: about 25 with TCP, 3 with InfiniBand."""
    link_gbits: float = 10.0
    """Assumes this rate of the link between two hosts, in Gbit/s."""


@dataclass(frozen=True)
class LinkCost:
    """Seconds of a decode step of one request over several hosts, and on one that held everything (`alone_s`)."""

    hosts: int
    host_bytes_per_s: float
    read_s: float
    sums_s: float
    hops_s: float
    alone_s: float
    latency_us: float
    gbits: float

    @property
    def tensor_s(self) -> float:
        return self.read_s + self.sums_s

    @property
    def pipeline_s(self) -> float:
        return self.alone_s + self.hops_s

    @property
    def tensor_pays(self) -> bool:
        """Returns whether all-reduces take less time than the hosts save by reading at once."""
        return self.sums_s < self.alone_s - self.read_s

    def lines(self) -> list[str]:
        """Returns the estimate, what it assumes, and the verdict."""
        assumed = f"{self.host_bytes_per_s / 1e9:g} GB/s of memory a host, a link of {self.latency_us:g} us and "
        if self.tensor_pays:
            verdict = f"tensor parallel: a token takes {self.alone_s / self.tensor_s:.1f} times less than on one host"
        else:
            verdict = (
                f"pipeline parallel (--pipeline-parallel-size {self.hosts}), with {self.hosts} batches of requests at "
                "once, or replicas where the model fits a host: all-reduces cost more than reading at once saves"
            )
        return [
            f"{'tensor parallel':<18} {1e3 * self.tensor_s:.2f} ms a step = {1e3 * self.read_s:.2f} ms to read the "
            f"weights + {1e3 * self.sums_s:.2f} ms for all-reduces",
            f"{'pipeline parallel':<18} {1e3 * self.pipeline_s:.2f} ms a step = {1e3 * self.alone_s:.2f} ms to read "
            f"the weights + {1e3 * self.hops_s:.2f} ms for {counted(self.hosts - 1, 'hop')}",
            f"assumed: {assumed}{self.gbits:g} Gbit/s (--link-latency-us, --link-gbits)",
            f"what pays: {verdict}",
        ]


def link_cost(plan: Mapping[str, Any], link: LinkConfig) -> LinkCost | None:
    """Estimates a plan in the form that `allspan plan --json` prints; None for one host."""
    names = list(dict.fromkeys(plan["hosts"]))
    if len(names) < 2:
        return None
    model = plan["model"]
    bandwidth = min(_bandwidth(plan, name) for name in names)
    weights = sum(rank["token_bytes"] for rank in plan["ranks"])
    message_s = link.link_latency_us / 1e6 + model["hidden_size"] * ROW_BYTES * 8 / (link.link_gbits * 1e9)
    rounds = (len(names) - 1).bit_length()
    return LinkCost(
        hosts=len(names),
        host_bytes_per_s=bandwidth,
        read_s=weights / (len(names) * bandwidth),
        sums_s=2 * model["num_layers"] * rounds * message_s,
        hops_s=(len(names) - 1) * message_s,
        alone_s=weights / bandwidth,
        latency_us=link.link_latency_us,
        gbits=link.link_gbits,
    )


def _bandwidth(plan: Mapping[str, Any], host: str) -> float:
    """Returns the memory bandwidth that the ranks of a host have together."""
    mine = [index for index, name in enumerate(plan["hosts"]) if name == host]
    if plan["gpus"]:
        return len(mine) * GPU_BYTES_PER_S
    threads: Counter[int | None] = Counter()
    for index in mine:
        threads[plan["nodes"][index]] += plan["threads"][index]
    return sum(min(NODE_BYTES_PER_S, count * THREAD_BYTES_PER_S) for count in threads.values())
