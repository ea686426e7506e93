"""From the ranks' statuses to one answer."""

from __future__ import annotations

from dataclasses import fields

from allspan.client.cluster.statistics import added, merged
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.engine import EngineStatistics


def statuses(count: int, scale: int) -> list[pb.WorkerStatus]:
    """Each counter has a value of its own."""
    single = {"weights_loaded", "step_tokens"}
    names = [field.name for field in pb.Statistics.DESCRIPTOR.fields if field.name not in single]
    counters = {name: scale * (i + 1) for i, name in enumerate(names)} | {"step_tokens": [scale, 2 * scale]}
    return [
        pb.WorkerStatus(
            rank=rank,
            model="tiny",
            max_model_len=64,
            pid=100 + rank,
            statistics=pb.Statistics(weights_loaded=scale == 1, **(counters if rank == 0 else {"kv_bytes": 5})),
        )
        for rank in range(count)
    ]


def test_every_counter_of_the_leader_is_told() -> None:
    ranks = statuses(2, 1)
    told = merged(ranks, replica=3)
    known = {field.name for field in fields(EngineStatistics)} & set(pb.Statistics.DESCRIPTOR.fields_by_name)
    assert len(known) == 27
    for name in known:
        counted = getattr(ranks[0].statistics, name)
        assert getattr(told, name) == (tuple(counted) if name == "step_tokens" else counted), name
    assert [(rank.rank, rank.pid, rank.replica) for rank in told.ranks] == [(0, 100, 3), (1, 101, 3)]
    assert told.kv_bytes == ranks[0].statistics.kv_bytes + 5


def test_what_a_follower_s_full_inbox_refused_counts_as_refused() -> None:
    ranks = statuses(3, 1)
    by_leader = ranks[0].statistics.refused_requests
    for rank, refused in ((1, 4), (2, 7)):
        ranks[rank].statistics.refused_requests = refused
    assert merged(ranks).refused_requests == by_leader + 7


def test_replicas_are_added_up() -> None:
    worlds = [merged(statuses(2, scale), scale) for scale in (1, 10)]
    whole = added(worlds, replicas=3)
    assert whole.prompt_tokens == 11 * worlds[0].prompt_tokens
    assert whole.pages_total == 11 * worlds[0].pages_total
    assert whole.step_tokens == (11, 22)
    assert (whole.page_size, whole.weights_version) == (worlds[0].page_size, worlds[0].weights_version)
    assert not whole.weights_loaded, "one world has none"
    assert (whole.replicas, whole.replicas_ready, len(whole.ranks)) == (3, 2, 4)
