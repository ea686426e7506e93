"""The order in which replicas are asked to take a request.

A replica that has a beginning of the prompt in its cache goes first, the longest one before others. Where none has,
and between equal ones, the order is that of a hash of the prompt's first tokens, so that facades that know nothing of
each other send the same beginnings to the same replica. Neither counts for a replica whose load is above a bound: then
the next one in the order takes the request. (Bounded loads: Mirrokni, Thorup and Zadimoghaddam, SODA 2018.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from allspan.client.cluster.routing.rendezvous import heaviest, weight

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


def leading_key(keys: Sequence[int], page_tokens: int) -> int | None:
    """The key of the last page of the prompt's beginning; None: it has no full page."""
    return keys[min(len(keys), max(LEADING_TOKENS // page_tokens, 1)) - 1] if keys else None


def order(
    loads: Mapping[int, int], recent: Sequence[float], hits: Mapping[int, int], key: int | None, work: int
) -> Iterator[int]:
    """The replicas of `loads` (tokens to compute, by replica), the best one first. `recent`: tokens that were sent
    there lately, on any scale; `hits`: tokens of the prompt that a replica has; `work`: the prompt's. What follows the
    first is worked out when it is asked for."""
    if not loads:
        return
    most = MOST_LOAD * sum(loads.values()) / len(loads) + SLACK_TOKENS + work
    most_recent = MOST_RECENT * sum(recent[replica] for replica in loads) / len(loads)
    useful = {replica: hit for replica, hit in hits.items() if LEAST_HIT * hit >= work}

    def rank(replica: int) -> tuple[float, ...]:
        load, hit = loads[replica], useful.get(replica, 0)
        if load > most + hit:
            return 3, load, replica
        if key is None:
            return 1, load, replica
        if hit:
            return 0, -hit, -weight(replica, key)
        return (2 if recent[replica] > most_recent else 1), -weight(replica, key), replica

    holders = [] if key is None else [replica for replica, hit in useful.items() if loads[replica] <= most + hit]
    light = [] if holders else [r for r, load in loads.items() if load <= most and recent[r] <= most_recent]
    if holders:
        first = min(holders, key=rank)
    elif key is not None and light:
        first = heaviest(light, key)
    else:
        first = min(loads, key=rank)
    yield first
    yield from sorted((replica for replica in loads if replica != first), key=rank)
