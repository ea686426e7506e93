"""Structured output from ranks that are processes: equal tokens on one, two and three, whole texts, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from allspan import ClientEngine, Grammar, SamplingParams
from allspan.protos.api.engine import Completion
from allspan.protos.api.errors import InvalidRequest

pytestmark = pytest.mark.timeout(180)

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": -999, "maximum": 999}, "on": {"type": "boolean"}},
    "required": ["id", "on"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "[a-f]{3,9}-[0-9]{2}"),
    None,
    Grammar("choice", '["yes", "no", "perhaps, who knows"]'),
    Grammar("grammar", 'start: "<" start ">" | "x"'),
)
PARAMS = [
    SamplingParams(max_tokens=48, temperature=temperature, seed=i, grammar=grammar, logprobs=1)
    for i, grammar in enumerate(GRAMMARS)
    for temperature in (0.0, 1.0)
]
PROMPTS = [list(b"tell me" * (i + 1)) for i in range(len(PARAMS))]


def results(engine: ClientEngine) -> list[Completion]:
    return engine.generate(PROMPTS, PARAMS)


def check(done: list[Completion]) -> None:
    for completion, params in zip(done, PARAMS, strict=True):
        if completion.finish_reason != "stop" or params.grammar is None:
            continue
        if params.grammar.kind == "json_schema":
            value = json.loads(completion.text)
            assert set(value) == {"id", "on"}
            assert -999 <= value["id"] <= 999
        elif params.grammar.kind == "regex":
            assert re.fullmatch(params.grammar.text, completion.text)
        elif params.grammar.kind == "choice":
            assert completion.text in params.grammar.choices
        else:
            assert re.fullmatch("<*x>*", completion.text)
            assert completion.text.count("<") == completion.text.count(">")


@pytest.mark.parametrize("numbers", [(1, 2), pytest.param((1, 2, 3), marks=pytest.mark.nightly)])
def test_any_number_of_ranks_keeps_to_the_grammar_with_the_same_tokens(
    start_tiny: Callable[..., ClientEngine], numbers: tuple[int, ...]
) -> None:
    """Float32 sums of a tiny model agree on any number of ranks but for near ties, which random logits do not have."""
    seen = []
    for ranks in numbers:
        with start_tiny(ranks=ranks, dtype="float32", max_model_len=256, max_num_batched_tokens=32) as engine:
            together = results(engine)
            check(together)
            assert sum(completion.finish_reason == "stop" for completion in together) >= 5
            if ranks == 2:
                alone = [engine.generate(p, each)[0] for p, each in zip(PROMPTS, PARAMS, strict=True)]
                assert [one.token_ids for one in alone] == [one.token_ids for one in together]
                refuses_alone(engine)
            seen.append([completion.token_ids for completion in together])
    assert all(tokens == seen[0] for tokens in seen)


def refuses_alone(engine: ClientEngine) -> None:
    """What cannot be compiled is refused at the door, what comes to a dead end fails: others go on."""
    long = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    handle, queue = engine.start_request(PROMPTS[0], long)
    with pytest.raises(InvalidRequest, match="grammar is no regex that can be followed") as caught:
        engine.generate(PROMPTS[0], SamplingParams(grammar=Grammar("regex", "(a")))
    assert caught.value.field == "grammar"
    with pytest.raises(InvalidRequest, match="no token is left"):
        engine.generate(PROMPTS[0], SamplingParams(grammar=Grammar("choice", '["a"]'), allowed_token_ids=(98,)))
    assert sum(len(output.token_ids) for output in queue) == 40
    engine.release_request(handle)
    assert engine.statistics().pages_used == 0
