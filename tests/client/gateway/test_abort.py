"""A request is ended by its name or its answer's id, by its owner alone."""

from __future__ import annotations

import asyncio

from allspan.client.gateway.admission.admission import Job
from allspan.client.gateway.auth.caller import ANYONE, Caller
from allspan.client.gateway.telemetry.request_context import Origin
from allspan.protos.api.sampling import SamplingParams
from support.gateway import eventually, fake_engine, front

JOB = Job((1, 2), SamplingParams(max_tokens=200))


async def test_all_choices_end_by_the_name_or_by_the_id_of_the_answer() -> None:
    for by_name in (True, False):
        engine = fake_engine(endless=True, step_s=0.005)
        asked = front(engine).admission
        async with asked.running([JOB] * 3, Origin("test", "mine")) as generations:
            others = await asked.start([JOB], Origin("test", "yours"))
            request_id = "mine" if by_name else f"cmpl-{generations[0].handle.request_id}"
            assert await asked.abort(request_id, ANYONE) == 3
            assert [engine.asked[g.handle.request_id].stopped for g in (*generations, *others)] == [True] * 3 + [False]
            assert await asked.abort(request_id, ANYONE) == 3  # not ended for its reader yet: still the same
        await asked.end(others)
        assert await asked.abort(request_id, ANYONE) == 0


async def test_foreign_and_unknown_ids_are_the_same_nothing() -> None:
    engine = fake_engine(endless=True, step_s=0.005)
    asked = front(engine).admission
    async with asked.running([JOB], Origin("test", "mine")) as (generation,):
        for request_id in ("mine", generation.handle.request_id, "unheard-of", ""):
            assert await asked.abort(request_id, Caller("somebody else")) == 0
        assert await asked.abort("", ANYONE) == 0
        assert not engine.last.stopped
        assert await asked.abort("mine", Caller("the operator", is_admin=True)) == 1
        assert engine.last.stopped


async def test_a_request_that_is_just_being_admitted_is_stopped_as_soon_as_it_is() -> None:
    engine = fake_engine(endless=True, step_s=0.005, admission=asyncio.Event())
    asked = front(engine).admission
    starting = asyncio.create_task(asked.start([JOB] * 2, Origin("test", "mine")))
    await asyncio.sleep(0.02)
    assert await asked.abort("mine", ANYONE) == 0
    assert engine.admission is not None
    engine.admission.set()
    generations = await starting
    assert all(request.stopped for request in engine.asked.values())
    await eventually(lambda: not engine.running)
    await asked.end(generations)
