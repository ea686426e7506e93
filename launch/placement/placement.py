"""Decides how many ranks there are, where each one runs and with how many threads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from allspan.launch.placement.gpus import Gpu, gpus_for
from allspan.launch.placement.topology import Node, Topology, parse_list
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.wording import counted

MOST_GPU_THREADS = 8
"""Most threads of a rank that computes on a GPU: for reading weights, sampling on the host and torch's own work."""
MAX_OVERSUBSCRIPTION = 16
"""Threads a core, with --oversubscribe: for trying things out; beyond it a typing error would fell the machine."""


@dataclass(frozen=True)
class PlacementConfig:
    """The settings for laying the ranks over this machine."""

    ranks: int = 0
    """Sets the tensor-parallel ranks (with --pipeline-parallel-size those of each stage): processes that share one copy
    of the model, each with a GPU of its own with --device cuda. 0 takes one for each NUMA node, divided over the
    replicas, or a single one with a GPU or in a stage."""
    data_parallel_size: int = 1
    """Sets the replicas: copies of the model behind one address, each with ranks of its own."""
    threads: int = 0
    """Sets the compute threads of each rank. 0 takes the physical cores of its node, shared by the ranks there; more
    threads than cores use the second hardware threads where there are any."""
    bind: str = "auto"
    """Binds ranks to processors: "auto" (each rank to its NUMA node), "none", or the processors of each rank, as in
    "0-31|32-63"."""
    oversubscribe: bool = False
    """Allows more ranks x threads than processors, and more ranks than GPUs. It is slow and meant for tests."""
    stages: int = 1
    """Says how many stages of a pipeline there are, each with `ranks` ranks; --pipeline-parallel-size sets them."""

    @property
    def world_size(self) -> int:
        """Returns the ranks of a replica; 0: as many as suit the machine."""
        return max(1, self.ranks) * self.stages if self.stages > 1 else self.ranks


@dataclass(frozen=True)
class RankPlace:
    """`node`: NUMA node to bind to, None for none. `cpus`: processors to pin threads to, one a thread, or empty."""

    rank: int
    node: int | None
    threads: int
    cpus: tuple[int, ...] = ()
    sharing: int = 0
    """Ranks of all replicas that take from the same memory as this one; 0: there is one replica."""
    gpu: Gpu | None = None
    """The rank's GPU, the only one visible to it."""
    host: str = ""
    """The rank's host, with ranks on several; empty: this one."""


@dataclass(frozen=True)
class Placement:
    """The places of all ranks of a cluster; with several replicas, the ranks of the first come first."""

    ranks: tuple[RankPlace, ...]
    oversubscribed: bool = False
    replicas: int = 1

    def worlds(self) -> tuple[Placement, ...]:
        """One placement a replica, its ranks counted from 0."""
        if self.replicas == 1:
            return (self,)
        size = len(self.ranks) // self.replicas
        ranks = [
            replace(place, rank=place.rank % size, sharing=sum(other.node == place.node for other in self.ranks))
            for place in self.ranks
        ]
        firsts = range(0, len(ranks), size)
        return tuple(Placement(tuple(ranks[first : first + size]), self.oversubscribed) for first in firsts)

    def describe(self) -> str:
        """Returns one line: how many replicas, ranks and threads there are, and where."""
        threads = sorted({place.threads for place in self.ranks})
        nodes = sorted({place.node for place in self.ranks if place.node is not None})
        where = f" on NUMA node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}" if nodes else ""
        count = len(self.ranks) // self.replicas
        replicas = f"{self.replicas} replicas of " if self.replicas > 1 else ""
        each = counted(threads[0], "thread") if len(threads) == 1 else f"{'/'.join(map(str, threads))} threads"
        words = f"{replicas}{counted(count, 'rank')} with {each}{' each' if len(self.ranks) > 1 else ''}"
        hosts = list(dict.fromkeys(place.host for place in self.ranks))
        over = f" on hosts {', '.join(hosts)}" if len(hosts) > 1 else ""
        return f"{words}{over}{where}{self._gpus()}{' (oversubscribed)' if self.oversubscribed else ''}"

    def _gpus(self) -> str:
        gpus = [place.gpu for place in self.ranks if place.gpu is not None]
        if not gpus:
            return ""
        names = "/".join(sorted({gpu.name for gpu in gpus}))
        return f", GPU{'s' if len(gpus) > 1 else ''} {', '.join(str(gpu.index) for gpu in gpus)} ({names})"


def place(topology: Topology, config: PlacementConfig, can_bind: bool = True) -> Placement:
    """Spreads ranks over the nodes in order, contiguous ranks sharing a node. Raises ConfigError with the numbers.

    Without `oversubscribe`, replicas x ranks x threads fit the machine's processors and each node's. Threads are
    pinned, one a physical core and only then to the cores' siblings, where the ranks of a node take all of its cores;
    ranks that leave cores free are left to the system's scheduler, within the node that numactl binds them to. Where
    it cannot (`can_bind`), threads are pinned in any case.
    """
    if config.bind not in ("auto", "none"):
        return _place_by_list(topology, config)
    nodes = [node for node in topology.nodes if node.cores]
    replicas = config.data_parallel_size
    ranks = replicas * (config.world_size or max(1, len(nodes) // replicas))
    groups = _spread(ranks, nodes)
    threads = config.threads or _default_threads(topology, groups, ranks)
    _check_cores(config, ranks, threads, topology)
    places: list[RankPlace] = []
    oversubscribed = ranks * threads > topology.num_processors
    for node, count in groups:
        if count * threads > len(node.processors):
            if not config.oversubscribe:
                has = _cores(len(node.cores), len(node.processors))
                raise ConfigError(
                    f"NUMA node {node.index} has {has}, {counted(count, 'rank')} x {counted(threads, 'thread')} want "
                    f"{count * threads}; lower --ranks or --threads, or pass --oversubscribe"
                )
            oversubscribed = True
    auto = config.bind == "auto"
    for node, count in groups:
        pin = auto and not oversubscribed and (count * threads >= len(node.cores) or not can_bind)
        for i in range(count):
            cpus = node.processors[i * threads : (i + 1) * threads] if pin else ()
            places.append(RankPlace(len(places), node.index if auto else None, threads, cpus))
    return Placement(tuple(places), oversubscribed, replicas)


def place_on_gpus(
    topology: Topology, config: PlacementConfig, gpus: tuple[Gpu, ...], can_bind: bool = True
) -> Placement:
    """Places rank i of all replicas on the i-th visible GPU, with cores of that GPU's NUMA node.

    The work is the GPU's: without `threads` a rank has up to MOST_GPU_THREADS, and too few cores are no reason to
    refuse. Raises ConfigError for too few GPUs, and as `place` does.
    """
    replicas, ranks = config.data_parallel_size, config.world_size or 1
    flags = _product(config, ranks)
    mine = gpus_for(replicas * ranks, flags, gpus, are_shared=config.oversubscribe)
    if config.bind not in ("auto", "none"):
        placed = _place_by_list(topology, config if config.ranks else replace(config, ranks=1))
        return replace(placed, ranks=tuple(replace(p, gpu=gpu) for p, gpu in zip(placed.ranks, mine, strict=True)))
    nodes = {node.index: node for node in topology.nodes if node.cores}
    where = [gpu.node if gpu.node in nodes else (next(iter(nodes)) if len(nodes) == 1 else None) for gpu in mine]
    cores = min(len(nodes[node].cores) if node in nodes else topology.num_cores for node in where)
    threads = config.threads or max(1, min(MOST_GPU_THREADS, cores // len(mine)))
    if config.threads:
        _check_cores(config, len(mine), threads, topology)
    oversubscribed = len(mine) * threads > topology.num_processors
    places: list[RankPlace] = []
    for rank, (gpu, node) in enumerate(zip(mine, where, strict=True)):
        before = where[:rank].count(node)
        pin = config.bind == "auto" and not oversubscribed and not can_bind and node is not None
        cpus = nodes[node].processors[before * threads : (before + 1) * threads] if pin and node is not None else ()
        pinned = cpus if len(cpus) == threads else ()
        places.append(RankPlace(rank, node if config.bind == "auto" else None, threads, pinned, gpu=gpu))
    return Placement(tuple(places), oversubscribed, replicas)


def _check_cores(config: PlacementConfig, ranks: int, threads: int, topology: Topology) -> None:
    """`ranks` are all replicas'."""
    cores, processors = topology.num_cores, topology.num_processors
    wanted, product = ranks * threads, _product(config, ranks // config.data_parallel_size, threads)
    fix = "lower --pipeline-parallel-size, --ranks or --threads" if config.stages > 1 else "lower --ranks or --threads"
    if wanted > processors and not config.oversubscribe:
        raise ConfigError(
            f"{product} = {wanted}, this machine grants {_cores(cores, processors)}; {fix}, or pass --oversubscribe"
        )
    if wanted > MAX_OVERSUBSCRIPTION * cores:
        raise ConfigError(
            f"{product} = {wanted}, more than {MAX_OVERSUBSCRIPTION} times this machine's {cores} cores; {fix}"
        )


def _product(config: PlacementConfig, ranks: int, threads: int = 0) -> str:
    """Returns the flags whose values multiply, those that matter, and the values. `ranks` are a replica's."""
    factors = {"--data-parallel-size": config.data_parallel_size, "--pipeline-parallel-size": config.stages}
    factors = {flag: value for flag, value in factors.items() if value > 1}
    factors |= {"--ranks": ranks // config.stages} | ({"--threads": threads} if threads else {})
    return f"{' x '.join(factors)} is {' x '.join(map(str, factors.values()))}"


def _cores(cores: int, processors: int) -> str:
    threads = f" ({processors} hardware threads)" if processors > cores else ""
    return f"{counted(cores, 'core')}{threads}"


def _spread(ranks: int, nodes: list[Node]) -> list[tuple[Node, int]]:
    """Returns the number of ranks for each node: as even as possible, in node order."""
    used = nodes[: min(ranks, len(nodes))]
    each, more = divmod(ranks, len(used))
    return [(node, each + (i < more)) for i, node in enumerate(used)]


def _default_threads(topology: Topology, groups: list[tuple[Node, int]], ranks: int) -> int:
    per_node = min(len(node.cores) // count for node, count in groups)
    return max(1, min(per_node, topology.num_cores // ranks))


def _place_by_list(topology: Topology, config: PlacementConfig) -> Placement:
    """`--bind "0-31|32-63"`: the processors of each rank, by hand."""
    try:
        lists = [parse_list(part) for part in config.bind.split("|")]
    except ValueError:
        lists = []
    if not lists or not all(lists):
        raise ConfigError(
            f'--bind is {config.bind!r}, must be auto, none or processors rank by rank as in "0-31|32-63"'
        )
    replicas = config.data_parallel_size
    if len(lists) % replicas or config.world_size not in (0, len(lists) // replicas):
        times = f" and --data-parallel-size {replicas}" if replicas > 1 else ""
        times += f" and --pipeline-parallel-size {config.stages}" if config.stages > 1 else ""
        raise ConfigError(f"--bind names processors for {len(lists)} ranks, --ranks is {config.ranks}{times}")
    allowed = {cpu: node.index for node in topology.nodes for core in node.cores for cpu in core}
    for rank, cpus in enumerate(lists):
        if missing := [cpu for cpu in cpus if cpu not in allowed]:
            raise ConfigError(f"--bind gives rank {rank} processor {missing[0]}, which this process may not use")
    oversubscribed = len({cpu for cpus in lists for cpu in cpus}) < sum(len(cpus) for cpus in lists)
    places = []
    for rank, cpus in enumerate(lists):
        threads = config.threads or len(cpus)
        if threads > len(cpus) or oversubscribed:
            if not config.oversubscribe:
                raise ConfigError(
                    f"--bind gives rank {rank} {len(cpus)} processors for {threads} threads, shared: {oversubscribed}; "
                    "give each rank its own, lower --threads, or pass --oversubscribe"
                )
            oversubscribed = True
        nodes = {allowed[cpu] for cpu in cpus}
        places.append(RankPlace(rank, nodes.pop() if len(nodes) == 1 else None, threads, cpus[:threads]))
    return Placement(tuple(places), oversubscribed, replicas)
