"""Drafters and the controller, without a model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from unittest.mock import create_autospec

import pytest

from allspan.protos.api.grammar import Grammar
from allspan.protos.api.options import RequestOptions
from allspan.protos.config.speculation import REPLAY, Speculation
from allspan.worker.sampling.grammar import CompiledGrammar
from allspan.worker.sampling.guidance import GuidanceCompiler
from allspan.worker.scheduler.drafting import suffix
from allspan.worker.scheduler.drafting.acceptance import Acceptance, Proposed
from allspan.worker.scheduler.drafting.bigram import BigramDrafter
from allspan.worker.scheduler.drafting.costs import GAIN, TRIAL_STEPS, StepCosts
from allspan.worker.scheduler.drafting.drafter import Draft, Drafter
from allspan.worker.scheduler.drafting.drafting import Drafting
from allspan.worker.scheduler.drafting.forced import ForcedTokens
from allspan.worker.scheduler.drafting.ngram import NgramDrafter
from allspan.worker.scheduler.drafting.replay import ReplayDrafter
from allspan.worker.scheduler.drafting.suffix import SuffixDrafter
from allspan.worker.scheduler.drafting.token_index import SHORTEST, TokenIndex
from allspan.worker.scheduler.request import Request
from support.byte_tokenizer import byte_tokenizer
from support.cores import request
from support.drafters import Guesses

STEADY = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.25, 16: 1.6, 32: 2.4, 64: 4.2}
"""What steps take on a machine whose weights are read in most of the time."""


def ids(drafts: Sequence[Draft]) -> list[int]:
    return [draft.token for draft in drafts]


@pytest.mark.parametrize("seed", range(5))
def test_the_index_finds_the_longest_end_that_occurred_before(seed: int) -> None:
    rng = random.Random(seed)
    text, index = [rng.randrange(6) for _ in range(40)], TokenIndex()
    while len(text) < 400:
        index.extend(text[len(index) :])
        context = text[-8:]
        found = index.find(context, 8)
        lengths = {
            place: next((n for n in range(8) if text[place - 1 - n] != context[-1 - n]), 8)
            for place in range(8, len(text))
        }
        recent = [place for place in lengths if lengths[place] >= SHORTEST][-12:]
        longest = max((lengths[place] for place in recent), default=0)
        if found is not None:
            assert text[found.place - found.length : found.place] == context[-found.length :]
            assert found.place < len(text)
        assert (found.length if found else 0) >= longest or (found is not None and found.length == 8)
        text += [rng.randrange(6) for _ in range(rng.randint(1, 9))]


def test_an_index_takes_few_bytes_a_token() -> None:
    index = TokenIndex()
    for _ in range(100):
        index.extend(range(300))
    assert index.num_bytes <= 25 * len(index)


def test_drafts_go_on_where_the_text_occurred_last() -> None:
    drafter = SuffixDrafter(Speculation())
    one = request(1, [1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 8, 1, 2, 3])
    assert ids(drafter.propose(one, (), 2)) == [7, 8]
    assert ids(drafter.propose(one, (4,), 2)) == [5, 9]
    assert drafter.propose(request(2, [1, 2, 3, 4]), (), 2) == ()


def test_the_first_occurrence_is_what_ngram_goes_on_from() -> None:
    drafter = NgramDrafter(Speculation("ngram", 4, 2, 3))
    one = request(1, [1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3])
    assert ids(drafter.propose(one, (), 2)) == [4, 5]
    one.output_token_ids += [4, 2, 3]
    assert ids(drafter.propose(one, (), 3)) == [4, 5, 9]
    one.output_token_ids += [6]
    assert not drafter.propose(one, (), 3)


def answered(drafter: SuffixDrafter, number: int, tokens: Sequence[int], **options: object) -> None:
    one = request(number, [100, 101])
    one.options = RequestOptions(**options)  # type: ignore[arg-type]
    one.output_token_ids += tokens
    drafter.forget(one)


def asked(number: int, prompt: Sequence[int], **options: object) -> list[object]:
    one = request(number, prompt)
    one.options = RequestOptions(**options)  # type: ignore[arg-type]
    return [one, (), 4]


def test_earlier_answers_serve_their_own_salt_alone() -> None:
    drafter = SuffixDrafter(Speculation())
    answered(drafter, 1, range(10, 20), cache_salt="mine")
    answered(drafter, 2, range(30, 40), prefix_cache=False)
    assert ids(drafter.propose(*asked(3, [11, 12], cache_salt="mine"))) == [13, 14, 15, 16]  # type: ignore[arg-type]
    for options in ({}, {"cache_salt": "other"}, {"cache_salt": "mine", "prefix_cache": False}):
        assert not drafter.propose(*asked(4, [11, 12], **options))  # type: ignore[arg-type]
    assert not drafter.propose(*asked(5, [31, 32]))  # type: ignore[arg-type]


def test_earlier_answers_are_bounded_for_a_salt_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MOST_SALT_TOKENS", 400)
    monkeypatch.setattr(suffix, "MOST_SHARED_TOKENS", 1000)
    monkeypatch.setattr(suffix, "SALT_TOKENS", 100)
    drafter = SuffixDrafter(Speculation())
    for number in range(60):
        answered(drafter, number, range(number * 60, number * 60 + 50), cache_salt=str(number % 4))
        assert drafter.num_shared_tokens <= 1000
    last = drafter.propose(*asked(99, [59 * 60 + 3, 59 * 60 + 4], cache_salt="3"))  # type: ignore[arg-type]
    assert ids(last) == [59 * 60 + 5 + i for i in range(4)]
    for number in range(30):  # however short their answers are
        answered(drafter, number, [1], cache_salt=f"short {number}")
    assert len(drafter._answers) <= 10


def test_no_earlier_answers_are_kept_where_none_are_asked_for() -> None:
    drafter = SuffixDrafter(Speculation(suffix_decoding_max_cached_requests=0))
    answered(drafter, 1, range(10, 20))
    assert not drafter.num_shared_tokens


def test_a_grammar_forces_the_text_that_it_leaves_no_choice_about() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]}
    one = request(1, [5], grammar=Grammar("json_schema", json.dumps(schema)))
    one.grammar = GuidanceCompiler(byte_tokenizer(), 256).compile(one.params.grammar)  # type: ignore[arg-type]
    drafter = ForcedTokens()
    assert bytes(ids(drafter.propose(one, (), 9))) == b"{"
    one.output_token_ids += b'{"n'
    found = drafter.propose(one, (), 9)
    assert bytes(ids(found)) == b'ame"'
    assert drafter.chance(found[-1].kind) < drafter.chance(found[0].kind)  # it may be one token with what follows
    assert bytes(ids(drafter.propose(one, b"am", 9))) == b'e"'
    assert drafter.accepted(one, list(b'ame": 7x}')) == 8 - 1
    one.output_token_ids += b"x"  # not of the language: the request's own matcher will say so
    assert not drafter.propose(one, (), 9)


def test_what_followed_a_token_in_structured_text_is_proposed_again() -> None:
    drafter = BigramDrafter()
    one, plain = request(1, [5], grammar=Grammar("regex", ".*")), request(2, [5])
    one.grammar = create_autospec(CompiledGrammar)

    def after(token: int) -> list[Draft]:
        return list(drafter.propose(one, (token,), 9))

    one.output_token_ids += [1, 2, 3, 1, 2, 4, 1]
    plain.output_token_ids += [1, 2, 1]
    (seen_twice,), (other_than_before,) = after(1), after(2)
    assert (seen_twice.token, other_than_before.token) == (2, 4)
    assert drafter.propose(one, (), 9) == (seen_twice,)
    assert drafter.chance(seen_twice.kind) > drafter.chance(after(3)[0].kind) > drafter.chance(other_than_before.kind)
    one.output_token_ids += [7, 7, 7, 7, 7, 7, 7, 7, 7]
    assert drafter.chance(after(7)[0].kind) > drafter.chance(seen_twice.kind)
    assert not after(9)
    assert not drafter.propose(plain, (), 9)
    drafter.forget(one)
    assert drafter.propose(one, (), 9)[0].token == 7


def test_what_a_grammar_forces_is_drafted_behind_what_it_does_not() -> None:
    person = {"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]}
    schema = {"type": "array", "items": person | {"additionalProperties": False}}
    one = request(1, [5], grammar=Grammar("json_schema", json.dumps(schema)))
    one.grammar = GuidanceCompiler(byte_tokenizer(), 256).compile(one.params.grammar)  # type: ignore[arg-type]
    one.output_token_ids += b'[{"name":1},{"name":2},{"name":3},{"name":4},{"name":5}'
    drafting = Drafting(Speculation(), [ForcedTokens(), BigramDrafter()], 256)
    drafts = bytes(each.draft.token for each in drafting._propose(one, 20))
    assert drafts.startswith(b',{"name":')
    assert len(drafting._propose(one, 3)) == 3


def test_the_likelier_of_two_drafters_is_believed() -> None:
    class Sure(Guesses):
        def guess(self, request: Request, most: int) -> Sequence[int]:
            return [7, 8]

        def chance(self, kind: int) -> float:
            return 0.9

    class Unsure(Sure):
        def guess(self, request: Request, most: int) -> Sequence[int]:
            return [9]

        def chance(self, kind: int) -> float:
            return 0.6

    for drafters in ([Sure(), Unsure()], [Unsure(), Sure()]):
        assert [each.draft.token for each in Drafting(Speculation(), drafters, 256)._propose(request(1, [5]), 9)] == [
            7,
            8,
        ]


def test_an_answer_is_replayed_with_as_many_errors_as_were_asked_for() -> None:
    drafter, answer = ReplayDrafter(Speculation(REPLAY, replay_rate=0.8)), [*range(200), *[0, 1] * 100]
    assert not drafter.propose(request(1, [5]), (), 9)
    for number, length in enumerate((len(answer), 7)):
        one = request(number, [5])
        one.output_token_ids += answer[:length]
        drafter.forget(one)
    assert not drafter.propose(request(1, [6]), (), 9)
    two = request(3, [5])
    two.output_token_ids += answer[:10]
    found = [ids(drafter.propose(two, (9,), 500)) for _ in range(20)]
    assert {len(each) for each in found} == {389}
    right = [draft == token for each in found for draft, token in zip(each, answer[11:], strict=True)]
    assert 0.78 < sum(right) / len(right) < 0.82
    assert min(draft for each in found for draft in each) >= 0


class Even:
    """Whatever it drafts is as likely as not."""

    def propose(self, request: object, before: object, most: int) -> Sequence[Draft]:
        return ()

    def chance(self, kind: int) -> float:
        return 0.5

    def forget(self, request: object) -> None:
        pass


def test_chances_become_what_is_seen_for_the_request_first() -> None:
    drafter: Drafter = Even()
    acceptance, good, bad = Acceptance([drafter]), request(1, [1]), request(2, [1])
    proposed = [Proposed(Draft(7), 0), Proposed(Draft(8), 0)]
    for _ in range(12):
        acceptance.learn(good, proposed, (7, 8, 9))
        acceptance.learn(bad, proposed, (3,))
    assert acceptance.chances(good, proposed)[0] > 0.85
    assert acceptance.chances(bad, proposed)[0] < 0.25
    acceptance.forget(good)
    assert 0.3 < acceptance.chances(good, proposed)[0] < 0.7


def useful(costs: StepCosts, chance: float, most: int, tokens: int = 1) -> int:
    """Drafts that pay, of one request, if each is so likely."""
    return costs.most_useful([chance ** (i + 1) for i in range(most)], tokens, tokens)


@pytest.mark.parametrize(
    ("chance", "tokens", "least", "most"), [(0.99, 1, 16, 31), (0.8, 1, 4, 12), (0.02, 1, 0, 0), (0.9, 60, 0, 0)]
)
def test_as_many_drafts_are_run_as_pay(chance: float, tokens: int, least: int, most: int) -> None:
    costs = StepCosts(STEADY, 512)
    assert least <= useful(costs, chance, 31, tokens) <= most


def test_steps_that_are_at_their_limit_are_not_drafted_for() -> None:
    costs = StepCosts({1: 1.0, 64: 64.0}, 512)
    assert not costs.can_gain(1, 1)
    assert StepCosts(STEADY, 512).can_gain(1, 1)


def test_what_one_request_s_drafts_do_not_pay_for_those_of_all_may() -> None:
    costs = StepCosts({1: 0.99, 16: 1.0, 17: 1.05, 32: 1.06, 64: 1.5}, 512)
    assert costs.can_gain(16, 16)
    assert costs.most_useful([0.8], 16, 16) == 0
    assert costs.most_useful([0.8] * 16, 16, 16) == 16
    drafting = Drafting(Speculation(), (Even(),), 300, costs)
    alone, everyone = [[0.8, 0.1]] + [[]] * 15, [[0.8, 0.1]] * 15 + [[0.9, 0.85, 0.8, 0.75]]
    assert drafting._useful(alone, 16, 16, 48, False) == [0] * 16
    assert drafting._useful(everyone, 16, 16, 48, False) == [1] * 15 + [4]
    assert drafting._useful(everyone, 16, 16, 2, False) == [0] * 15 + [2], "the likeliest where there is room for few"


def test_drafts_that_take_longer_than_was_measured_are_given_up() -> None:
    costs = StepCosts(STEADY, 512)
    before = useful(costs, 0.6, 8)
    for _ in range(20):
        for tokens in (3, 5, 9):
            costs.learn(1, False, 1.0)
            costs.learn(tokens, True, 3 * costs._measured[tokens])
    assert costs.seconds(4, True) / costs.seconds(4, False) > 1.5
    assert before > useful(costs, 0.6, 8) == 0


def test_drafts_that_were_given_up_are_tried_again_some_time() -> None:
    costs = StepCosts(STEADY, 512)
    for _ in range(80):
        for tokens in (3, 5, 9):
            costs.learn(1, False, 1.0)
            costs.learn(tokens, True, 3 * costs._measured[tokens])
    assert not useful(costs, 0.7, 8)
    for _ in range(1500):
        costs.learn(1, False, 1.0)
    assert useful(costs, 0.7, 8)


def test_times_of_a_machine_that_was_busy_at_the_start_do_not_last() -> None:
    costs = StepCosts({tokens: seconds * (1 if tokens == 1 else 10) for tokens, seconds in STEADY.items()}, 512)
    assert not costs.can_gain(1, 1)
    for _ in range(TRIAL_STEPS):
        assert not costs.begin_trial()
        costs.learn(1, False, 1.0)
    assert costs.begin_trial()
    assert not costs.begin_trial()
    for _ in range(4):
        costs.learn(1, False, 1.0)
        costs.learn(8, True, STEADY[8])
    assert costs.can_gain(1, 1)


def test_a_time_that_is_longer_than_that_of_more_tokens_is_not_believed() -> None:
    assert StepCosts(STEADY | {2: 9.0}, 64).seconds(2, False) == STEADY[4]


def test_a_machine_that_slows_down_changes_no_choice() -> None:
    costs = StepCosts(STEADY, 512)
    rng, before = random.Random(1), useful(costs, 0.8, 31)
    for round in range(300):
        tokens = rng.choice([1, 1, 5, 9])
        costs.learn(tokens, tokens > 1, costs._measured[tokens] * (4 if round > 150 else 1) * rng.uniform(0.9, 1.1))
    assert abs(useful(costs, 0.8, 31) - before) <= 3
    assert costs.seconds(1, False) == pytest.approx(4, rel=0.3)
    assert GAIN > 1
