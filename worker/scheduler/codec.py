"""StepPlan to bytes and back: a fixed little-endian layout, never pickle.

    header   "ASP8", epoch u32, step u64, tokens_hash u32, operation u32, in_flight u32, twelve counts u32: leaves,
             drops, joins, grants, saves, loads, runs, drafts, draft runs, numbers, placements, bytes of the argument
    drops    16 bytes each
    joins    row u32, request id 16 bytes, digest u64, num_computed u32, num_output u32, adapter i32, owner u32
    numbers  u32 each: leaves; row, page count, group and first place of each grant; source, target, group and owner of
             each save and each load; row, first, most and number of drafts of each draft run; row and token count of
             each run and of each draft; then the pages of all grants and the tokens of all drafts
    places   slot u32 and digest u64 of each adapter that is placed
    argument of the operation

Every count is checked against the length before anything is read.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

from allspan.protos.api.errors import InternalError
from allspan.worker.cache.page_pool import Copy
from allspan.worker.scheduler.plan import Grant, Join, Operation, Run, StepPlan
from allspan.worker.step.rank_drafter import DraftRun

_MAGIC = b"ASP8"
_HEADER = struct.Struct("<4sIQIII12I")
_JOIN = struct.Struct("<I16sQIIiI")
_PLACE = struct.Struct("<IQ")
_ID_BYTES = 16
_OPERATIONS = frozenset(int(operation) for operation in Operation)


def encode(plan: StepPlan) -> bytes:
    """Raises InternalError for a value that its field cannot hold."""
    numbers: list[int] = [*plan.leaves]
    for grant in plan.grants:
        numbers += (grant.row, len(grant.pages), grant.group, grant.first)
    for copy in itertools.chain(plan.saves, plan.loads):
        numbers += (copy.source, copy.target, copy.group, copy.owner)
    for each in plan.draft_runs:
        numbers += (each.row, each.first, each.most, each.num_drafts)
    for run in plan.runs:
        numbers += (run.row, run.num_tokens)
    for row, tokens in plan.drafts:
        numbers += (row, len(tokens))
    numbers.extend(itertools.chain.from_iterable(grant.pages for grant in plan.grants))
    numbers.extend(itertools.chain.from_iterable(tokens for _, tokens in plan.drafts))
    if any(len(request_id) != _ID_BYTES for request_id in (*plan.drops, *(join.request_id for join in plan.joins))):
        raise InternalError(f"a plan names a request id that is not {_ID_BYTES} bytes: {plan}")
    parts = (
        plan.leaves, plan.drops, plan.joins, plan.grants, plan.saves, plan.loads, plan.runs, plan.drafts,
        plan.draft_runs, numbers, plan.placements, plan.argument,
    )  # fmt: skip
    counts = (len(part) for part in parts)
    try:
        head = _HEADER.pack(_MAGIC, plan.epoch, plan.step, plan.tokens_hash, plan.operation, plan.in_flight, *counts)
        joins = b"".join(
            _JOIN.pack(j.row, j.request_id, j.digest, j.num_computed, j.num_output, j.adapter, j.owner)
            for j in plan.joins
        )
        places = b"".join(itertools.starmap(_PLACE.pack, plan.placements))
        packed = struct.pack(f"<{len(numbers)}I", *numbers)
        return head + b"".join(plan.drops) + joins + packed + places + plan.argument
    except struct.error as error:
        raise InternalError(f"a plan cannot be encoded: {error}: {plan}") from error


def decode(data: bytes) -> StepPlan:
    """Raises InternalError for bytes that `encode` cannot have made."""
    if len(data) < _HEADER.size:
        raise InternalError(f"malformed plan: {len(data)} bytes, the header alone has {_HEADER.size}")
    magic, epoch, step, tokens_hash, operation, in_flight, *counts = _HEADER.unpack_from(data)
    if magic != _MAGIC or operation not in _OPERATIONS:
        raise InternalError(f"malformed plan: starts with {magic!r}, operation {operation}")
    leaves, drops, joins, grants, saves, loads, runs, drafts, draft_runs, total, placements, argument = counts
    joins_at = _HEADER.size + _ID_BYTES * drops
    numbers_at = joins_at + _JOIN.size * joins
    places_at = numbers_at + 4 * total
    argument_at = places_at + _PLACE.size * placements
    if len(data) != argument_at + argument:
        raise InternalError(f"malformed plan: {len(data)} bytes, its counts {counts} say {argument_at + argument}")
    numbers = struct.unpack_from(f"<{total}I", data, numbers_at)
    granted_at = leaves + 4 * grants
    copied_at = granted_at + 4 * (saves + loads)
    asked_at = copied_at + 4 * draft_runs
    fixed = asked_at + 2 * (runs + drafts)
    granted = list(zip(*[iter(numbers[leaves:granted_at])] * 4, strict=False))
    copied = zip(*[iter(numbers[granted_at:copied_at])] * 4, strict=False)
    saved, loaded = (list(itertools.islice(copied, count)) for count in (saves, loads))
    asked = zip(*[iter(numbers[copied_at:asked_at])] * 4, strict=False)
    pairs = zip(numbers[asked_at:fixed:2], numbers[asked_at + 1 : fixed : 2], strict=False)
    ran, drafted = (list(itertools.islice(pairs, count)) for count in (runs, drafts))
    if fixed + sum(grant[1] for grant in granted) + sum(count for _, count in drafted) != total:
        raise InternalError(f"malformed plan: its counts {counts} do not add up")
    rest = iter(numbers[fixed:])
    return StepPlan(
        epoch=epoch,
        step=step,
        tokens_hash=tokens_hash,
        leaves=numbers[:leaves],
        drops=tuple(data[at : at + _ID_BYTES] for at in range(_HEADER.size, joins_at, _ID_BYTES)),
        joins=tuple(Join(*values) for values in _JOIN.iter_unpack(data[joins_at:numbers_at])),
        grants=tuple(Grant(row, _take(rest, count), group, first) for row, count, group, first in granted),
        saves=tuple(itertools.starmap(Copy, saved)),
        loads=tuple(itertools.starmap(Copy, loaded)),
        runs=tuple(itertools.starmap(Run, ran)),
        in_flight=in_flight,
        drafts=tuple((row, _take(rest, count)) for row, count in drafted),
        draft_runs=tuple(itertools.starmap(DraftRun, asked)),
        operation=Operation(operation),
        argument=data[argument_at:],
        placements=tuple(_PLACE.iter_unpack(data[places_at:argument_at])),
    )


def _take(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(itertools.islice(numbers, count))
