"""Estimates whether ranks that share a model decode faster than replicas would: a rough formula, stated with its
figures.

A decode step reads a rank's weights once, of experts those that the token goes to, and has two all-reduces a layer (and
one for the embedding):

    step = weights read by the busiest rank / bandwidth of a rank + (2 · layers + 1) · all-reduce

The stages of a pipeline read one after the other, and each sums its own layers' parts. Over several hosts an all-reduce
takes its messages over the link as well, and so does each hand-over between stages on different hosts.

One rank that holds everything on a node reads all weights with the node's bandwidth. The bandwidth is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

THREAD_BYTES_PER_S = 12e9
"""Memory bandwidth of one thread, in bytes per second."""
NODE_BYTES_PER_S = 150e9
"""Memory bandwidth of all threads of a NUMA node together, in bytes per second."""
ALL_REDUCE_S = 8e-6
"""Seconds of an all-reduce of a row or a few, through a window of shared memory."""
GPU_BYTES_PER_S = 4.25e12
"""Memory bandwidth of an H200, in bytes per second, as a copy reaches it; an H100 or A100 has two thirds or 0.4 of
it."""
GPU_ALL_REDUCE_S = 5e-6
"""Seconds of an all-reduce of a row or a few over NVLink, with the residual stream and its norm."""
SIZEABLE = 0.15
"""Share of a step that all-reduces may take before replicas are advised."""


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of a decode step at batch 1: reading weights, all-reduces, hand-overs between the stages of a pipeline on
    different hosts; and one rank's that holds the whole model."""

    read_s: float
    all_reduce_s: float
    alone_s: float
    on_gpu: bool = False
    hand_over_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.read_s + self.all_reduce_s + self.hand_over_s

    @property
    def floor_tokens_per_s(self) -> float:
        """Returns the tokens per second of one request if a step did nothing but read weights."""
        return 1 / self.read_s if self.read_s else 0.0

    @property
    def all_reduce_share(self) -> float:
        return self.all_reduce_s / self.step_s


def decode_step(plan: Mapping[str, Any]) -> DecodeStep:
    """Estimates the decode step of a plan, in the form that `allspan plan --json` prints, for its first replica; over
    hosts by the plan's `link`."""
    weights = [rank["busiest_token_bytes"] for rank in plan["ranks"]]
    whole = sum(rank["token_bytes"] for rank in plan["ranks"])
    stages, nodes, threads = plan.get("stages", 1), plan["nodes"], plan["threads"][0]
    count = len(weights) // stages
    heaviest = sum(max(weights[first : first + count]) for first in range(0, len(weights), count))
    reduces = 2 * plan["model"]["num_layers"] + 1 if count > 1 else 0
    sum_s, hand_over_s = _over_link(plan, count)
    if plan["gpus"]:
        read_s, alone_s = heaviest / GPU_BYTES_PER_S, whole / GPU_BYTES_PER_S
        return DecodeStep(read_s, reduces * (GPU_ALL_REDUCE_S + sum_s), alone_s, True, hand_over_s)
    places = list(zip(plan.get("hosts") or [""] * count, nodes, strict=False))[:count]
    on_node = max(places.count(place) for place in places)
    together = min(NODE_BYTES_PER_S, on_node * threads * THREAD_BYTES_PER_S)
    reduces_s = reduces * ((ALL_REDUCE_S if on_node > 1 or not sum_s else 0.0) + sum_s)
    return DecodeStep(heaviest * on_node / together, reduces_s, whole / together, hand_over_s=hand_over_s)


def _over_link(plan: Mapping[str, Any], count: int) -> tuple[float, float]:
    """Returns the seconds on the link of an all-reduce within the stages of `count` ranks, and of a step's hand-overs
    between them."""
    link, hosts = plan.get("link"), plan.get("hosts") or []
    if not link:
        return 0.0, 0.0
    message_s = link["hops_s"] / (link["hosts"] - 1)
    stages = [hosts[first : first + count] for first in range(0, len(plan["ranks"]), count)]
    rounds = max((len(set(stage)) - 1).bit_length() for stage in stages)
    hops = sum(before[0] != after[0] for before, after in pairwise(stages))
    return rounds * message_s, hops * message_s


def advice(plan: Mapping[str, Any]) -> list[str]:
    """Returns the arguments against this split of the model, a line each; none for one rank."""
    stages, model = plan.get("stages", 1), plan["model"]
    count = len(plan["ranks"]) // stages
    found, step = [], decode_step(plan)
    if stages > 1:
        found.append(
            f"the {stages} stages of a pipeline read their weights one after the other: about {1e3 * step.step_s:.2f} "
            f"ms a token of one request; {stages} batches of requests at once, and more, keep all of them busy"
        )
    if count == 1:
        return found
    took = f"a decode step of about {1e3 * step.step_s:.2f} ms"
    if step.all_reduce_share > SIZEABLE:
        way = f"--ranks 1 --data-parallel-size {count * plan['replicas']}"
        if plan.get("link"):
            way = "one on each host that holds the model, behind a router"
        found.append(
            f"the model is small for {count} ranks: all-reduces take {step.all_reduce_share:.0%} of {took}; replicas "
            f"need none ({way})"
        )
    if step.step_s > step.alone_s:
        found.append(
            f"ranks on the same node share its memory bandwidth: {took}, against {1e3 * step.alone_s:.2f} ms on one "
            "rank with all their threads"
        )
    heads, kv_heads = model["num_heads"], model["num_kv_heads"]
    if plan.get("attention_ranks", 1) > 1:  # every rank has all heads
        return found
    if most := -(-heads // count) if heads % count else 0:
        found.append(
            f"{heads} query heads do not divide by {count} ranks: the rank with {most} of them is the slowest, and the "
            f"others wait for {1 - heads / (most * count):.0%} of the attention's time"
        )
    if kv_heads % count:
        found.append(f"{kv_heads} KV heads do not divide by {count} ranks: two ranks hold a copy of some")
    return found


def formula(step: DecodeStep) -> str:
    """The estimate in one line."""
    assumed = f"{THREAD_BYTES_PER_S / 1e9:g} GB/s per thread, {NODE_BYTES_PER_S / 1e9:g} per node"
    if step.on_gpu:
        assumed = f"{GPU_BYTES_PER_S / 1e9:g} GB/s per GPU"
    return (
        f"{1e3 * step.step_s:.2f} ms = {1e3 * step.read_s:.2f} ms to read the weights (assumed: {assumed}) + "
        f"{1e3 * step.all_reduce_s:.2f} ms for all-reduces"
        f"{f' + {1e3 * step.hand_over_s:.2f} ms for hand-overs' if step.hand_over_s else ''}"
    )
