"""From the ranks' statuses to one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allspan.client.cluster.statistics import added, merged
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.counters import COUNTERS, EngineCounters, counters_of
from allspan.protos.api.expert_load import ExpertLoad
from allspan.protos.convert import counters_to_wire


def counters(scale: int) -> EngineCounters:
    """Each has a value of its own."""
    single: dict[str, Any] = {
        "weights_loaded": scale == 1,
        "step_tokens": (scale, 2 * scale),
        "accepted_per_position": (scale,) * min(scale, 2),
    }
    return EngineCounters(**{name: scale * (i + 1) for i, name in enumerate(COUNTERS)} | single)


def statuses(count: int, scale: int, refused: Sequence[int] = (0, 0, 0)) -> list[pb.WorkerStatus]:
    ranks = [counters(scale), *(EngineCounters(refused_requests=number) for number in refused)]
    return [
        pb.WorkerStatus(
            rank=rank,
            model="tiny",
            max_model_len=64,
            pid=100 + rank,
            experts=[] if rank else [pb.ExpertLoad(layer=3, tokens=[scale, 2 * scale], groups=[1.0, 2.0])],
            statistics=pb.Statistics(counters=counters_to_wire(ranks[rank]), kv_bytes=5 + rank),
        )
        for rank in range(count)
    ]


def test_every_counter_of_the_leader_is_told() -> None:
    told = merged(statuses(2, 1), replica=3)
    assert counters_of(told) == counters_of(counters(1))
    assert [(rank.rank, rank.pid, rank.replica) for rank in told.ranks] == [(0, 100, 3), (1, 101, 3)]
    assert [rank.steps for rank in told.ranks] == [counters(1).steps, 0]
    assert told.kv_bytes == 5 + 6


def test_what_a_follower_s_full_inbox_refused_counts_as_refused() -> None:
    by_leader = counters(1).refused_requests
    assert merged(statuses(3, 1, refused=(4, 7))).refused_requests == by_leader + 7


def test_replicas_are_added_up() -> None:
    worlds = [merged(statuses(2, scale), scale) for scale in (1, 10)]
    whole = added(worlds, replicas=3)
    assert whole.prompt_tokens == 11 * worlds[0].prompt_tokens
    assert whole.pages_total == 11 * worlds[0].pages_total
    assert whole.step_tokens == (11, 22)
    assert whole.accepted_per_position == (11, 10)
    assert whole.experts == (ExpertLoad(3, (11, 22), (2.0, 4.0)),)
    assert (whole.page_size, whole.weights_version) == (worlds[0].page_size, worlds[0].weights_version)
    assert not whole.weights_loaded, "one world has none"
    assert (whole.replicas, whole.replicas_ready, len(whole.ranks)) == (3, 2, 4)
