"""The choice of a replica: what is known of each, the order of the replicas, and the simulation with the same code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.client.bench.serving.routing import Simulation, TraceRequest
from allspan.client.cluster.routing.choice import LEADING_TOKENS, SLACK_TOKENS, leading_key, order
from allspan.client.cluster.routing.facade import FacadeChoice
from allspan.client.cluster.routing.knowledge import UNTOLD, ReplicaKnowledge
from allspan.client.cluster.routing.page_index import PageIndex
from allspan.client.cluster.routing.prompt_keys import PromptKeys
from allspan.client.cluster.routing.rendezvous import heaviest, weight
from allspan.client.cluster.routing.replica_table import ReplicaTable, numbers_in
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.adapters import NO_ADAPTER, AdapterModule
from allspan.protos.page_keys import PageShape, page_keys, root_key, short_key

KEY = 77


def events(sequence: int, stored: list[int], removed: list[int] | None = None) -> pb.StepOutputs:
    message = pb.PageEvents(sequence=sequence, cleared=not sequence, removed=removed or (), page_tokens=2)
    message.weights_version = 1
    message.stored.extend(pb.PageStored(key=key) for key in stored)
    return pb.StepOutputs(page_events=[message])


changes = st.lists(st.tuples(st.sampled_from(["store", "remove", "clear", "expect"]), st.integers(1, 9)), max_size=30)


@settings(max_examples=100, deadline=None)
@given(changes)
def test_the_index_is_what_the_replicas_tell_and_what_is_expected_of_them(steps: list[tuple[str, int]]) -> None:
    table = ReplicaTable(2)
    known, index = [ReplicaKnowledge(number, table) for number in range(2)], table.index
    truth: list[set[int]] = [set(), set()]
    sequences = [1, 1]
    for each in known:
        each.hear(events(0, []), "tiny")
    for place, (what, key) in enumerate(steps):
        number = place % 2
        if what == "clear":
            known[number].hear(events(0, [key]), "tiny")
            truth[number], sequences[number] = {key}, 1
        elif what == "expect":
            known[number].expect([key])
            truth[number].add(key)
        else:
            is_stored = what == "store"
            known[number].hear(events(sequences[number], [key] * is_stored, [key] * (not is_stored)), "tiny")
            sequences[number] += 1
            truth[number] = truth[number] | {key} if is_stored else truth[number] - {key}
        for key in range(1, 10):
            holders = sum(1 << replica for replica in (0, 1) if key in truth[replica])
            assert index.match([key], 3) == ([(1, holders)] if holders else [])
            assert [len(each) for each in known] == [len(keys) for keys in truth]


def test_after_a_gap_nothing_is_believed_until_the_next_snapshot() -> None:
    table = ReplicaTable(1)
    known, index = ReplicaKnowledge(0, table), table.index
    assert known.hear(events(0, [1, 2]), "tiny")
    assert table.members == {PageShape(2, "tiny", 1): 1}
    assert not known.hear(events(2, [3]), "tiny")
    assert (len(index), known.shape, table.members) == (0, UNTOLD, {UNTOLD: 1})
    assert known.hear(events(3, [4]), "tiny")
    assert len(index) == 0
    assert known.hear(events(0, [5]), "tiny")
    assert index.match([5], 1) == [(1, 1)]


def test_the_longest_run_of_leading_pages_counts() -> None:
    index = PageIndex()
    index.add(0, [1, 2, 3])
    index.add(1, [1, 3])
    index.add(5, [1, 2])
    assert index.match([1, 2, 3, 4], 0b100011) == [(1, 0b10), (2, 0b100000), (3, 0b1)]
    assert index.match([1, 2], 0b10) == [(1, 0b10)]
    assert index.match([2, 1], 0) == []


def test_keys_are_made_once_and_no_further_than_a_replica_has_the_pages() -> None:
    made: list[int] = []
    keys = PromptKeys(key for key in range(1, 100) if not made.append(key))  # type: ignore[func-returns-value]
    index = PageIndex()
    index.add(3, [1, 2])
    assert leading_key(keys, LEADING_TOKENS // 2) == 2
    assert index.match(keys, 0b1000) == [(2, 0b1000)]
    assert made == [1, 2, 3]
    assert keys.all() == made == list(range(1, 100))


def test_keys_are_those_that_the_prefix_cache_makes() -> None:
    keys = page_keys(root_key("tiny", 3, -1, "", 1, "salt"), [1, 2, 3, 4], 2)
    shape = PageShape(2, "tiny", 3, (4, 9))
    assert list(shape.keys([1, 2, 3, 4, 5], 5, "salt", 9)) == [short_key(key) for key in keys]
    assert next(shape.keys([1, 2, 3, 4, 5], 4, "salt", 9)) != short_key(keys[0])
    assert len(list(shape.keys([1] * 40, 5, "", 7))) == 7


def test_an_adapters_keys_are_those_of_its_digest_and_of_nothing_else() -> None:
    known = ReplicaKnowledge(0, ReplicaTable(1))
    known.hear(events(0, []), "tiny")
    loads = [AdapterModule("sql", "/a").loaded(nonce).digest for nonce in (b"1", b"2")]
    found = [next(known.shape.keys([1, 2, 3], 3, "", 9, digest)) for digest in (NO_ADAPTER, *loads)]
    roots = [root_key("tiny", 1, digest, "", 0, "") for digest in (-1, *loads)]
    assert found == [short_key(page_keys(root, [1, 2], 2)[0]) for root in roots]
    assert len(set(found)) == 3
    assert next(UNTOLD.keys([1] * 32, 32, "", 9, loads[0])) != next(UNTOLD.keys([1] * 32, 32, "", 9))


def test_load_is_what_was_told_and_what_was_sent_since() -> None:
    table = ReplicaTable(1)
    known = ReplicaKnowledge(0, table)
    assert (known.load, table.untold) == (None, 1)
    known.hear(pb.StepOutputs(load=pb.EngineLoad(queued_tokens=100)), "tiny")
    known.sent(30, [])
    assert (known.load, table.loads[0], table.untold) == (130, 130, 0)
    known.hear(pb.StepOutputs(load=pb.EngineLoad(queued_tokens=50)), "tiny")
    assert (known.load, table.loads[0]) == (50, 50)
    known.forget()
    assert table.untold == 1


def ordered(
    loads: Mapping[int, float], recent: Sequence[float], hits: Mapping[int, int], key: int | None, work: int
) -> Iterator[int]:
    """`order` of values by replica."""
    table = np.zeros(max(loads, default=0) + 1)
    table[list(loads)] = list(loads.values())
    masks = [(hit, 1 << replica) for replica, hit in hits.items()]
    return order(np.array(list(loads), np.intp), table, np.array(recent), masks, key, work)


@given(st.sets(st.integers(0, 200)))
def test_a_mask_has_the_numbers_of_its_bits(numbers: set[int]) -> None:
    assert numbers_in(sum(1 << number for number in numbers)).tolist() == sorted(numbers)


def test_hits_go_before_the_hash_and_the_hash_before_the_load_up_to_a_bound() -> None:
    even, none = [0.0] * 3, dict.fromkeys(range(3), 0)
    by_hash = list(ordered(none, even, {}, KEY, 100))
    first, second, third = by_hash
    assert next(ordered(none, even, {third: 64}, KEY, 100)) == third
    assert next(ordered(none, even, {third: 64, second: 80}, KEY, 100)) == second
    assert list(ordered(none, even, {third: 12}, KEY, 100)) == by_hash  # too little of it
    assert next(ordered(none | {first: SLACK_TOKENS}, even, {}, KEY, 100)) == first
    assert next(ordered(none | {first: 4 * SLACK_TOKENS}, even, {first: 64}, KEY, 100)) == second
    recent = [0.0] * 3
    recent[first] = 1000.0
    assert next(ordered(none, recent, {}, KEY, 100)) == second
    assert list(ordered({0: 7, 1: 5, 2: 6}, even, {}, None, 3)) == [1, 2, 0]


states = st.tuples(
    st.sampled_from([0, 500, 3000, 20000]), st.sampled_from([0.0, 1.0, 9.0]), st.sampled_from([0, 64, 900])
)


@given(st.lists(states, min_size=1, max_size=6), st.sampled_from([None, KEY, 5]), st.sampled_from([10, 600, 5000]))
def test_every_replica_is_in_the_order_once_and_none_above_the_bound_is_first(
    found: list[tuple[int, float, int]], key: int | None, work: int
) -> None:
    loads, recent = {i: load for i, (load, _, _) in enumerate(found)}, [late for _, late, _ in found]
    hits = {i: hit for i, (_, _, hit) in enumerate(found) if hit}
    found_order = list(ordered(loads, recent, hits, key, work))
    assert sorted(found_order) == sorted(loads)
    bound = 1.25 * sum(loads.values()) / len(loads) + SLACK_TOKENS + work + 900
    if min(loads.values()) <= bound:
        assert loads[found_order[0]] <= bound


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=100), st.integers(0, 2**64 - 1))
def test_the_heaviest_replica_is_that_of_the_greatest_weight(replicas: list[int], key: int) -> None:
    assert heaviest(np.array(replicas), key) == max(replicas, key=lambda replica: weight(replica, key))


def test_a_replica_that_goes_moves_only_its_own_beginnings() -> None:
    even = [0.0] * 8
    before = [next(ordered(dict.fromkeys(range(8), 0), even, {}, key * 2**40, 1)) for key in range(300)]
    after = [next(ordered(dict.fromkeys(range(7), 0), even, {}, key * 2**40, 1)) for key in range(300)]
    assert all(a == b for a, b in zip(after, before, strict=True) if b != 7)
    assert max(before.count(number) for number in range(8)) < 60


def test_prompts_of_one_beginning_have_one_leading_key() -> None:
    keys = list(range(1, 100))
    assert leading_key(keys, 32) == keys[LEADING_TOKENS // 32 - 1] == leading_key([*keys, 7], 32)
    assert (leading_key([5, 6], 32), leading_key([5, 6], 4096), leading_key([], 32)) == (6, 5, None)


def test_facades_that_hear_the_same_choose_the_same() -> None:
    facades = [FacadeChoice(4, 1) for _ in range(2)]
    for keys in ([1, 2], [3], [9, 8, 7]):
        chosen = [next(facade.ranked(lambda shape, keys=keys: keys, 64, 0b1111, int)) for facade in facades]  # type: ignore[misc]
        assert chosen[0] == chosen[1]


@pytest.mark.parametrize("facades", [1, 8])
def test_facades_that_share_nothing_find_shared_beginnings_and_balance_the_work(facades: int) -> None:
    trace = [
        TraceRequest(float(i), 3000, (*(1000 * family + n for n in (0, 1, 2, 3)), 10**6 + i))
        for i in range(400)
        for family in [(i * 7919) % 40]
    ]
    simulation = Simulation(trace, 4, facades, 100, 1)
    simulation.run()
    report = simulation.report()
    assert report["hit_rate"] > 0.6
    assert report["work_imbalance"] < 1.15
