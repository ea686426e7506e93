"""How many ranks, where, with how many threads."""

from __future__ import annotations

import pytest

from allspan.launch.placement.gpus import Gpu
from allspan.launch.placement.placement import Placement, PlacementConfig, place, place_on_gpus
from allspan.launch.placement.topology import Node, Topology
from allspan.protos.api.errors import ConfigError


def machine(nodes: dict[int, int], cpu_limit: float | None = None) -> Topology:
    """Node index → number of cores; processors are numbered through."""
    made, cpu = [], 0
    for index, count in nodes.items():
        made.append(Node(index, tuple((cpu + i,) for i in range(count))))
        cpu += count
    return Topology(tuple(made), cpu_limit=cpu_limit)


FOUR_NODES = machine({0: 8, 2: 8, 5: 8, 11: 8})


def summary(placement: Placement) -> list[tuple[int | None, int]]:
    return [(rank.node, rank.threads) for rank in placement.ranks]


def test_by_default_one_rank_a_node_with_all_its_cores_pinned() -> None:
    placement = place(FOUR_NODES, PlacementConfig())
    assert summary(placement) == [(0, 8), (2, 8), (5, 8), (11, 8)]
    assert [rank.cpus for rank in placement.ranks] == [tuple(range(8 * i, 8 * i + 8)) for i in range(4)]
    assert "on NUMA nodes 0, 2, 5, 11" in placement.describe()


def test_more_ranks_than_nodes_share_them_in_order() -> None:
    placement = place(FOUR_NODES, PlacementConfig(ranks=6))
    assert summary(placement) == [(0, 4), (0, 4), (2, 4), (2, 4), (5, 4), (11, 4)]
    cpus = [cpu for rank in placement.ranks for cpu in rank.cpus]
    assert len(set(cpus)) == len(cpus)


def test_fewer_ranks_than_nodes_use_the_first_ones() -> None:
    assert summary(place(FOUR_NODES, PlacementConfig(ranks=2))) == [(0, 8), (2, 8)]


def test_ranks_that_leave_cores_free_are_not_pinned_where_numactl_binds_them() -> None:
    config = PlacementConfig(ranks=1, threads=2)
    assert [rank.cpus for rank in place(machine({0: 8}), config).ranks] == [()]
    assert [rank.cpus for rank in place(machine({0: 8}), config, can_bind=False).ranks] == [(0, 1)]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PlacementConfig(ranks=3), ["3 x 1 = 3", "2 cores", "--oversubscribe"]),
        (PlacementConfig(ranks=999, oversubscribe=True), ["999 x 1 = 999", "16 times", "2 cores"]),
        (PlacementConfig(ranks=2, threads=2), ["2 x 2 = 4", "2 cores"]),
        (PlacementConfig(threads=3), ["1 x 3 = 3", "2 cores"]),
    ],
)
def test_too_much_is_refused_with_the_numbers(config: PlacementConfig, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        place(machine({0: 2}), config)
    assert all(word in caught.value.message for word in words), caught.value.message


def test_too_much_for_one_node_is_refused_although_the_machine_has_enough() -> None:
    with pytest.raises(ConfigError, match="NUMA node 0 has 2 cores, 2 ranks x 2 threads want 4"):
        place(machine({0: 2, 1: 6}), PlacementConfig(ranks=3, threads=2))


def test_oversubscribed_ranks_are_not_pinned_and_know_it() -> None:
    placement = place(machine({0: 2}), PlacementConfig(ranks=3, oversubscribe=True))
    assert summary(placement) == [(0, 1)] * 3
    assert placement.oversubscribed
    assert all(rank.cpus == () for rank in placement.ranks)


def test_oversubscribe_changes_nothing_where_it_fits() -> None:
    assert place(machine({0: 2}), PlacementConfig(ranks=2, oversubscribe=True)) == place(
        machine({0: 2}), PlacementConfig(ranks=2)
    )


def test_a_cgroups_quota_counts_as_cores() -> None:
    assert summary(place(machine({0: 8}, cpu_limit=2.5), PlacementConfig())) == [(0, 2)]
    with pytest.raises(ConfigError, match="grants 2 cores"):
        place(machine({0: 8}, cpu_limit=2.5), PlacementConfig(ranks=4))


def test_without_binding_there_is_no_node_and_no_pin() -> None:
    placement = place(FOUR_NODES, PlacementConfig(bind="none"))
    assert [(rank.node, rank.cpus) for rank in placement.ranks] == [(None, ())] * 4


def test_processors_by_hand() -> None:
    placement = place(FOUR_NODES, PlacementConfig(bind="0-2|8,16"))
    assert [(rank.node, rank.threads, rank.cpus) for rank in placement.ranks] == [(0, 3, (0, 1, 2)), (None, 2, (8, 16))]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (PlacementConfig(bind="fast"), "'fast'"),
        (PlacementConfig(bind="0-1|"), "must be auto, none"),
        (PlacementConfig(bind="0-1|2-3", ranks=3), "2 ranks, --ranks is 3"),
        (PlacementConfig(bind="0,99"), "processor 99"),
        (PlacementConfig(bind="0-1", threads=3), "2 processors for 3 threads"),
        (PlacementConfig(bind="0-1|1-2"), "shared: True"),
    ],
)
def test_a_wrong_list_of_processors_is_refused(config: PlacementConfig, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place(FOUR_NODES, config)
    assert word in caught.value.message


def test_replicas_divide_the_nodes_and_count_their_ranks_from_zero() -> None:
    placement = place(FOUR_NODES, PlacementConfig(data_parallel_size=2))
    assert placement.describe() == "2 replicas of 2 ranks with 8 threads each on NUMA nodes 0, 2, 5, 11"
    worlds = placement.worlds()
    assert [summary(world) for world in worlds] == [[(0, 8), (2, 8)], [(5, 8), (11, 8)]]
    assert [rank.rank for world in worlds for rank in world.ranks] == [0, 1, 0, 1]
    assert [rank.sharing for world in worlds for rank in world.ranks] == [1] * 4
    cpus = [cpu for world in worlds for rank in world.ranks for cpu in rank.cpus]
    assert sorted(cpus) == list(range(32))


def test_replicas_on_one_node_share_its_cores_and_know_how_many_share_its_memory() -> None:
    worlds = place(machine({0: 8}), PlacementConfig(data_parallel_size=4)).worlds()
    assert [summary(world) for world in worlds] == [[(0, 2)]] * 4
    assert [rank.sharing for world in worlds for rank in world.ranks] == [4] * 4


def test_one_replica_is_the_placement_itself() -> None:
    placement = place(FOUR_NODES, PlacementConfig())
    assert placement.worlds() == (placement,)


def test_too_many_replicas_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--data-parallel-size x --ranks x --threads is 3 x 1 x 1 = 3, .* 2 cores"):
        place(machine({0: 2}), PlacementConfig(data_parallel_size=3))


def test_processors_by_hand_are_listed_for_all_replicas() -> None:
    config = PlacementConfig(data_parallel_size=2, bind="0-3|4-7|8-11|12-15")
    worlds = place(FOUR_NODES, config).worlds()
    assert [[rank.cpus[0] for rank in world.ranks] for world in worlds] == [[0, 4], [8, 12]]
    with pytest.raises(ConfigError, match="processors for 3 ranks, --ranks is 0 and --data-parallel-size 2"):
        place(FOUR_NODES, PlacementConfig(data_parallel_size=2, bind="0|1|2"))


def with_siblings(nodes: int, cores: int) -> Topology:
    """Core c of the machine has the hardware threads 2·c and 2·c + 1."""
    numbers = range(cores)
    made = [
        Node(node, tuple((2 * (node * cores + c), 2 * (node * cores + c) + 1) for c in numbers))
        for node in range(nodes)
    ]
    return Topology(tuple(made))


def test_threads_take_a_physical_core_each_and_siblings_only_when_there_are_more() -> None:
    machine = with_siblings(nodes=2, cores=3)
    placed = place(machine, PlacementConfig())
    assert [rank.cpus for rank in placed.ranks] == [(0, 2, 4), (6, 8, 10)]
    placed = place(machine, PlacementConfig(threads=5))
    assert [rank.cpus for rank in placed.ranks] == [(0, 2, 4, 1, 3), (6, 8, 10, 7, 9)]
    assert not placed.oversubscribed
    placed = place(machine, PlacementConfig(ranks=4, threads=2))
    assert [rank.cpus for rank in placed.ranks] == [(0, 2), (4, 1), (6, 8), (10, 7)]
    with pytest.raises(ConfigError, match=r"2 x 7 = 14, this machine grants 6 cores \(12 hardware threads\)"):
        place(machine, PlacementConfig(threads=7))
    with pytest.raises(
        ConfigError, match=r"NUMA node 0 has 3 cores \(6 hardware threads\), 2 ranks x 4 threads want 8"
    ):
        place(machine, PlacementConfig(ranks=3, threads=4))


def gpus_on(*nodes: int | None) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, "NVIDIA H200", 141 << 30, f"GPU-{index}", node) for index, node in enumerate(nodes))


def on_gpus(topology: Topology, config: PlacementConfig, *nodes: int | None, can_bind: bool = True) -> Placement:
    return place_on_gpus(topology, config, gpus_on(*nodes), can_bind)


def test_rank_i_gets_gpu_i_and_cores_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    placement = on_gpus(FOUR_NODES, PlacementConfig(ranks=4), 0, 0, 11, None)
    assert [rank.gpu.index for rank in placement.ranks if rank.gpu] == [0, 1, 2, 3]
    assert summary(placement) == [(0, 2), (0, 2), (11, 2), (None, 2)]
    assert "GPUs 0, 1, 2, 3 (NVIDIA H200)" in placement.describe()
    unbound = on_gpus(FOUR_NODES, PlacementConfig(ranks=3, threads=2), 0, 0, 11, can_bind=False)
    assert [rank.cpus for rank in unbound.ranks] == [(0, 1), (2, 3), (24, 25)]


def test_without_a_number_there_is_one_rank_a_replica_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    assert [rank.gpu.index for rank in on_gpus(FOUR_NODES, PlacementConfig(), 0, 0, 2, 2).ranks if rank.gpu] == [3]
    worlds = on_gpus(FOUR_NODES, PlacementConfig(data_parallel_size=3), 0, 0, 2, 2).worlds()
    assert [world.ranks[0].gpu.index for world in worlds if world.ranks[0].gpu] == [3, 1, 0]
    with pytest.raises(ConfigError, match=r"--data-parallel-size x --ranks is 2 x 2, a GPU each, and there are 3"):
        on_gpus(FOUR_NODES, PlacementConfig(ranks=2, data_parallel_size=2), 0, 0, 2, 2)


def test_few_cores_are_no_reason_to_refuse_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    placement = on_gpus(machine({0: 2}), PlacementConfig(ranks=4), 0, 0, 0, 0)
    assert summary(placement) == [(0, 1)] * 4
    assert placement.oversubscribed
    with pytest.raises(ConfigError, match="4 x 2 = 8, this machine grants 2 cores"):
        on_gpus(machine({0: 2}), PlacementConfig(ranks=4, threads=2), 0, 0, 0, 0)


def test_processors_by_hand_go_with_gpus_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    placement = on_gpus(FOUR_NODES, PlacementConfig(ranks=2, bind="0-1|8-9"), 0, 2)
    assert [(rank.cpus, rank.gpu.index) for rank in placement.ranks if rank.gpu] == [((0, 1), 0), ((8, 9), 1)]


def test_stages_are_named_where_there_are_too_few_cores() -> None:
    with pytest.raises(ConfigError, match="--pipeline-parallel-size x --ranks x --threads is 3 x 2 x 1 = 6"):
        place(machine({0: 2}), PlacementConfig(ranks=2, threads=1, stages=3))
