"""The order in which replicas are asked to take a request.

A replica that has a beginning of the prompt in its cache goes first, the longest one before others. Where none has,
and between equal ones, the order is that of a hash of the prompt's first tokens, so that facades that know nothing of
each other send the same beginnings to the same replica. Neither counts for a replica whose load is above a bound: then
the next one in the order takes the request. (Bounded loads: Mirrokni, Thorup and Zadimoghaddam, SODA 2018.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from allspan.client.cluster.routing.rendezvous import heaviest, weight
from allspan.client.cluster.routing.replica_table import Loads, Numbers, numbers_in

LEADING_TOKENS = 1024
"""The beginning of a prompt that is hashed."""
MOST_LOAD = 1.25
"""Load, over the mean, above which a replica is passed over."""
MOST_RECENT = 1.05
"""The same of the tokens that this facade has lately sent there: it evens out over time what hashing leaves uneven."""
SLACK_TOKENS = 2048
"""Load that is always allowed beside that, and a request like this one: four steps of the default token budget."""
LEAST_HIT = 8
"""A hit of less than this part of a prompt counts for nothing: most prompts share some beginning."""


def leading_key(keys: Iterable[int], page_tokens: int) -> int | None:
    """The key of the last page of the prompt's beginning; None: it has no full page."""
    beginning = list(islice(keys, max(LEADING_TOKENS // page_tokens, 1)))
    return beginning[-1] if beginning else None


def order(
    numbers: Numbers, loads: Loads, recent: Loads, hits: Sequence[tuple[int, int]], key: int | None, work: int
) -> Iterator[int]:
    """The replicas `numbers`, the best one first. `loads`: tokens to compute, `recent`: tokens that were sent there
    lately, on any scale, both by a replica's number; `hits`: tokens of the prompt, with the mask of those of `numbers`
    that have so many; `work`: the prompt's. What follows the first is worked out when it is asked for."""
    if not len(numbers):
        return
    present, late = loads[numbers], recent[numbers]
    most = MOST_LOAD * float(present.sum()) / len(numbers) + SLACK_TOKENS + work
    most_recent = MOST_RECENT * float(late.sum()) / len(numbers)
    useful = sorted((hit for hit in hits if LEAST_HIT * hit[0] >= work), reverse=True)
    first = None
    if key is not None:
        first = _holder(loads, useful, key, most)
        if first is None and len(light := numbers[(present <= most) & (late <= most_recent)]):
            first = heaviest(light, key)
    if first is not None:
        yield first
    hit_of = {int(number): hit for hit, mask in reversed(useful) for number in numbers_in(mask)}

    def rank(replica: int) -> tuple[float, ...]:
        load, hit = loads[replica], hit_of.get(replica, 0)
        if load > most + hit:
            return 3, load, replica
        if key is None:
            return 1, load, replica
        if hit:
            return 0, -hit, -weight(replica, key)
        return (2 if recent[replica] > most_recent else 1), -weight(replica, key), replica

    yield from sorted((replica for replica in numbers.tolist() if replica != first), key=rank)


def _holder(loads: Loads, useful: Iterable[tuple[int, int]], key: int, most: float) -> int | None:
    """The replica with the longest of these hits, the longest given first, whose load allows it."""
    for hit, mask in useful:
        holders = numbers_in(mask)
        allowed = holders[loads[holders] <= most + hit]
        if len(allowed):
            return heaviest(allowed, key)
    return None
