"""Adapters of a cluster as its client knows them: new worlds get them, replicas have the same, requests keep theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from allspan.client.cluster.requests import ResumePolicy
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import AdapterNotFound, InvalidRequest, QueueFull, Unavailable
from allspan.protos.api.options import RequestOptions
from allspan.protos.convert import adapters_to_wire
from support.fake_transport import SQL
from support.mortal_cluster import MortalCluster, tokens_of, until
from support.replicas import Replicas

pytestmark = pytest.mark.usefixtures("fast_polls")


@pytest.fixture
async def cluster() -> AsyncIterator[MortalCluster]:
    made = MortalCluster()
    await made.session.attach(5)
    yield made
    await made.session.close()


async def test_a_request_keeps_its_adapter_in_the_next_world(cluster: MortalCluster) -> None:
    await cluster.start(options=RequestOptions(adapter="sql"))
    assert cluster.sent[0].adapter == "sql"
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    assert (cluster.sent[0].epoch, cluster.sent[0].adapter, cluster.sent[0].adapter_digest) == (2, "sql", SQL.digest)


async def test_a_new_world_has_the_adapters_of_the_one_before_when_requests_go_on(cluster: MortalCluster) -> None:
    router, law = cluster.session.router, AdapterModule("law", "/law").loaded(b"1")
    await router.load_adapter(law, 5)
    await router.unload_adapter("SQL", 5)
    _, queue = await cluster.start(options=RequestOptions(adapter="law"))
    await cluster.die_and_return()
    await until(lambda: cluster.sent)
    assert cluster.ranks.adapters == [law]  # not the one that it was started with, and that was unloaded
    assert list(router.adapters.listed()) == [law]
    assert cluster.sent[0].adapter_digest == law.digest
    order = [name for name, rank in cluster.ranks.calls if rank == 0]
    assert order[-3:] == ["UnloadAdapter", "LoadAdapter", "StartRequest"]
    for _ in range(4):
        cluster.ranks.step()
    assert await tokens_of(queue) == [4, 5, 6, 7]


async def test_a_request_whose_adapter_cannot_be_loaded_again_says_so(cluster: MortalCluster) -> None:
    law = AdapterModule("law", "/law").loaded(b"1")
    await cluster.session.router.load_adapter(law, 5)
    _, queue = await cluster.start(options=RequestOptions(adapter="law"))
    _, plain = await cluster.start()
    cluster.kill()
    await until(lambda: cluster.session.down_cause)
    cluster.restart()
    cluster.ranks[0].replies["LoadAdapter"] = InvalidRequest("the folder is gone", "lora_path")
    with pytest.raises(AdapterNotFound, match="'law', which was unloaded just now, or could not be loaded again"):
        await tokens_of(queue)
    for _ in range(4):
        await until(lambda: cluster.sent)
        cluster.ranks.step()
    assert await tokens_of(plain) == [4, 5, 6, 7]
    with pytest.raises(AdapterNotFound, match="'law', which is not served here; the adapters are 'sql'"):
        await cluster.start(options=RequestOptions(adapter="law"))


async def test_what_another_client_loads_and_unloads_is_told_to_this_one(cluster: MortalCluster) -> None:
    law, listed = AdapterModule("law", "/law").loaded(), cluster.session.router.adapters.listed
    for version, adapters in ((1, [SQL, law]), (2, [law]), (1, [SQL])):
        cluster.ranks[0].stream.put_nowait(pb.StepOutputs(adapters=adapters_to_wire(version, adapters)))
    await until(lambda: listed() == (law,))
    await asyncio.sleep(0.01)
    assert listed() == (law,)  # an older word changes nothing


async def test_what_a_lost_world_still_tells_is_not_taken_for_the_next_ones_word(cluster: MortalCluster) -> None:
    router, law = cluster.session.router, AdapterModule("law", "/law").loaded(b"1")
    await router.load_adapter(law, 5)
    leaders = cluster.ranks[0].stream
    cluster.ranks[1].break_stream()
    await until(lambda: not router.ready)
    leaders.put_nowait(pb.StepOutputs(adapters=adapters_to_wire(9, [SQL, law])))
    await until(leaders.empty)
    await cluster.die_and_return()
    assert cluster.ranks.adapters == [SQL, law]
    router.replicas[0].knowledge.adapters.hear(adapters_to_wire(cluster.ranks.version + 1, [SQL]))
    assert router.adapters.listed() == (SQL,)  # heard, though the lost one's versions were higher


async def test_a_replica_that_comes_up_during_a_load_has_the_adapters_of_the_others(two: Replicas) -> None:
    router, law = two.session.router, AdapterModule("law", "/law").loaded(b"1")
    two.kill(1)
    await until(lambda: len(router.ready) == 1)

    async def first_the_other_comes_up(request: pb.LoadAdapterRequest) -> None:
        two.restart(1)
        await until(lambda: len(router.ready) == 2)

    two.ranks[0][0].replies["LoadAdapter"] = first_the_other_comes_up
    await router.load_adapter(law, 5)
    assert [ranks.adapters for ranks in two.ranks] == [[SQL, law], [SQL, law]]
    two.kill(1)
    await until(lambda: len(router.ready) == 1)
    two.restart(1)

    async def first_it_is_unloaded(request: pb.LoadAdapterRequest) -> None:
        await router.unload_adapter("law", 5)

    two.ranks[1][0].replies["LoadAdapter"] = first_it_is_unloaded
    await until(lambda: len(router.ready) == 2)
    assert [ranks.adapters for ranks in two.ranks] == [[SQL], [SQL]]


@pytest.mark.parametrize("lacking", [0, 1])
async def test_a_replica_without_the_adapter_does_not_hide_that_the_other_is_full(two: Replicas, lacking: int) -> None:
    router, law = two.session.router, AdapterModule("law", "/law").loaded(b"1")
    await router.load_adapter(law, 5)
    two.kill(lacking)
    await until(lambda: len(router.ready) == 1)
    two.restart(lacking)
    two.ranks[lacking][0].replies["LoadAdapter"] = InvalidRequest("the folder is gone", "lora_path")
    await until(lambda: len(router.ready) == 2)
    two.ranks[1 - lacking][0].replies["StartRequest"] = QueueFull("try again")
    with pytest.raises(QueueFull):
        await two.start(options=RequestOptions(adapter="law"))


async def law_on_replica_1_alone(two: Replicas) -> RequestOptions:
    """The other one came back without it."""
    await two.session.router.load_adapter(AdapterModule("law", "/law").loaded(b"1"), 5)
    two.kill(0)
    await until(lambda: len(two.session.router.ready) == 1)
    two.restart(0)
    two.ranks[0][0].replies["LoadAdapter"] = InvalidRequest("the folder is gone", "lora_path")
    await until(lambda: len(two.session.router.ready) == 2)
    return RequestOptions(adapter="law")


async def test_requests_wait_for_the_only_replica_with_their_adapter_while_it_restarts(two: Replicas) -> None:
    options = await law_on_replica_1_alone(two)
    running = await two.start(options=options)
    two.step()
    two.kill(1)
    await until(lambda: len(two.session.router.ready) == 1)
    new = asyncio.create_task(two.start(options=options))
    await asyncio.sleep(0.1)  # several attempts
    two.restart(1)
    queue = await asyncio.wait_for(new, 5)
    await until(lambda: two.counts == [0, 2])
    for _ in range(4):
        two.step()
    assert [await tokens_of(each) for each in (running, queue)] == [[4, 5, 6, 7]] * 2


async def test_requests_fail_once_the_only_replica_with_their_adapter_returns_without(two: Replicas) -> None:
    queue = await two.start(options=await law_on_replica_1_alone(two))
    two.kill(1)
    await until(lambda: len(two.session.router.ready) == 1)
    two.restart(1)
    two.ranks[1][0].replies["LoadAdapter"] = InvalidRequest("the folder is gone", "lora_path")
    with pytest.raises(AdapterNotFound, match="'law', which was unloaded just now, or could not be loaded again"):
        await tokens_of(queue)


async def test_requests_wait_for_their_adapter_no_longer_than_for_a_world() -> None:
    two = Replicas(policy=ResumePolicy(timeout_s=0.2))
    await two.session.attach(5)
    queue = await two.start(options=await law_on_replica_1_alone(two))
    two.kill(1)
    with pytest.raises(Unavailable, match=r"the adapter 'law'.* \(nothing to go on in within 0\.2 s\)"):
        await tokens_of(queue)
    await two.session.close()


async def test_an_adapter_is_loaded_on_all_replicas_or_on_none(two: Replicas) -> None:
    router, law = two.session.router, AdapterModule("law", "/law").loaded(b"1")
    two.ranks[1][0].replies["LoadAdapter"] = InvalidRequest("rank 1: no such folder", "lora_path")
    with pytest.raises(InvalidRequest, match="replica 1: rank 1: no such folder"):
        await router.load_adapter(law, 5)
    assert [ranks.adapters for ranks in two.ranks] == [[SQL], [SQL]]
    del two.ranks[1][0].replies["LoadAdapter"]
    law = AdapterModule("law", "/law").loaded(b"2")
    await router.load_adapter(law, 5)
    assert [ranks.adapters for ranks in two.ranks] == [[SQL, law], [SQL, law]]
    with pytest.raises(AdapterNotFound, match="'more', which is not served here"):
        await router.unload_adapter("more", 5)
    assert await router.unload_adapter("law", 5) == 0
    assert router.adapters.listed() == (SQL,)


async def test_a_replica_that_comes_back_gets_the_adapters_of_the_others(two: Replicas) -> None:
    router, law = two.session.router, AdapterModule("law", "/law").loaded(b"1")
    two.kill(1)
    await until(lambda: len(router.ready) == 1)
    await router.load_adapter(law, 5)
    await router.unload_adapter("sql", 5)
    assert [ranks.adapters for ranks in two.ranks] == [[law], [SQL]]
    two.restart(1)
    await until(lambda: len(router.ready) == 2)
    assert [ranks.adapters for ranks in two.ranks] == [[law], [law]]


async def test_a_request_goes_to_a_replica_that_has_its_adapter(two: Replicas) -> None:
    router, law = two.session.router, AdapterModule("law", "/law").loaded(b"1")
    await router.load_adapter(law, 5)
    two.kill(1)
    await until(lambda: len(router.ready) == 1)
    two.restart(1)
    two.ranks[1][0].replies["LoadAdapter"] = InvalidRequest("the folder is gone", "lora_path")
    await until(lambda: len(router.ready) == 2)
    assert router.adapters.listed() == (SQL, law)
    for number in range(4):
        assert await two.place([number] * 64, options=RequestOptions(adapter="law")) == 0
    assert 1 in [await two.place([number] * 64, options=RequestOptions(adapter="sql")) for number in range(4)]
