"""Grammars in the engine: equal tokens however a request is worked on, whole texts, ends, failures of one's own."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable

import llguidance
import numpy as np
import pytest

from allspan.protos.api.errors import AllspanError, InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.worker.engine.core import EngineCore
from allspan.worker.sampling import grammar, grammar_masks, guidance
from allspan.worker.scheduler.request import Request
from support.byte_tokenizer import byte_tokenizer
from support.cores import Collected, fake_core, fake_gpu_core, request, step_until_idle
from support.threads import ThreadWorld

EOS = 256
VOCAB = 260
"""Of the model: bytes, its end, and ids that nobody has."""
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
)
WORD = Grammar("regex", "[a-c]{1,9}x")
LONG = Grammar("regex", "[a-c]{12,18}x")


def core_with(eos: tuple[int, ...] = (EOS,), **settings: object) -> tuple[EngineCore, Collected]:
    collected = Collected()
    core, _ = fake_core(collected=collected, eos=eos, widths=(VOCAB,), **settings)  # type: ignore[arg-type]
    core.grammars.load_tokenizer = byte_tokenizer
    return core, collected


def asked(number: int, grammar: Grammar, prompt: str = "ab", **params: object) -> Request:
    return request(number, prompt.encode(), grammar=grammar, **{"max_tokens": 40, "temperature": 1.0} | params)


def run(*requests: Request, eos: tuple[int, ...] = (EOS,), **settings: object) -> Collected:
    core, collected = core_with(eos, **settings)
    for each in requests:
        core.submit(each)
    step_until_idle(core)
    return collected


def text(collected: Collected, one: Request) -> str:
    return bytes(token for token in collected.tokens(one) if token < 256).decode()


def error(collected: Collected, one: Request) -> AllspanError:
    return collected.errors[one.request_id]


@pytest.mark.parametrize("seed", range(8))
def test_what_ends_by_itself_is_whole(seed: int) -> None:
    one, other = asked(seed, WORD), asked(100 + seed, SCHEMA, max_tokens=50)
    collected = run(one, other)
    assert re.fullmatch("[a-c]{1,9}x", text(collected, one))
    assert collected.reason(one) == "stop"
    assert collected.tokens(one)[-1] == EOS
    if collected.reason(other) == "stop":
        assert set(json.loads(text(collected, other))) == {"a", "b"}


def test_neighbours_without_a_grammar_do_not_notice() -> None:
    plain = request(1, b"ab", max_tokens=9, temperature=1.0)
    alone = run(plain).tokens(plain)
    again = request(1, b"ab", max_tokens=9, temperature=1.0)
    beside = run(again, asked(2, WORD), asked(3, SCHEMA))
    assert beside.tokens(again) == alone


@pytest.mark.parametrize("greedy", [True, False])
def test_batched_chunked_and_preempted_rows_get_the_tokens_that_they_get_alone(greedy: bool) -> None:
    def requests() -> list[Request]:
        return [
            asked(n, grammar, "abcd" * n, max_tokens=20, temperature=0.0 if greedy else 1.0)
            for n, grammar in enumerate((LONG, SCHEMA, Grammar("regex", "(ab|ba)+"), LONG), start=1)
        ]

    alone = []
    for each in requests():
        collected = run(each)
        alone.append(collected.tokens(each))
    ways: tuple[dict[str, int], ...] = ({}, {"max_num_batched_tokens": 5}, {"num_pages": 12}, {"max_num_seqs": 2})
    for settings in ways:
        together = requests()
        core, collected = core_with(**settings)
        for each in together:
            core.submit(each)
        step_until_idle(core)
        assert [collected.tokens(each) for each in together] == alone, settings
        if "num_pages" in settings:
            assert core.statistics().preemptions


def test_a_resumed_request_goes_on_as_it_had_begun() -> None:
    whole = asked(5, WORD)
    tokens = run(whole).tokens(whole)
    assert len(tokens) > 3
    rest = Request(
        (6).to_bytes(16, "little"),
        "client",
        whole.prompt_token_ids,
        whole.params,
        num_resumed=2,
        output_token_ids=tokens[:2],
    )
    collected = run(rest)
    assert collected.tokens(rest) == tokens[2:]


def test_ids_without_a_text_are_never_sampled() -> None:
    one = asked(1, Grammar("regex", "(.|\\n)*"), max_tokens=60, min_tokens=60)
    collected = run(one, max_model_len=128)
    assert len(collected.tokens(one)) == 60
    assert max(collected.tokens(one)) < 256


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    one = asked(3, Grammar("choice", '["k"]'), logprobs=20, temperature=0.0)
    free = request(4, b"ab", max_tokens=1, temperature=0.0, logprobs=20)
    collected = run(one, free)
    entry = collected.outputs[one.request_id].logprobs[0]
    assert entry.top == collected.outputs[free.request_id].logprobs[0].top
    assert entry.logprob < entry.top[0][1]


def test_where_only_the_end_is_left_a_request_that_ignores_it_stops_without_it() -> None:
    one, other = asked(1, Grammar("choice", '["hello"]'), ignore_eos=True), asked(2, Grammar("choice", '["hello"]'))
    collected = run(one, other)
    assert text(collected, one) == text(collected, other) == "hello"
    assert collected.reason(one) == collected.reason(other) == "stop"
    assert collected.tokens(one) == collected.tokens(other)[:-1]
    assert collected.outputs[one.request_id].timings is not None


def test_a_model_without_an_end_stops_too() -> None:
    one = asked(1, Grammar("choice", '["hello"]'))
    collected = run(one, eos=())
    assert (text(collected, one), collected.reason(one)) == ("hello", "stop")


def test_a_stop_id_of_ones_own_may_end_a_whole_text_and_only_that() -> None:
    one = asked(1, Grammar("choice", '["hello"]'), stop_token_ids=(ord("!"),))
    collected = run(one, eos=())
    assert bytes(collected.tokens(one)) == b"hello!"
    assert collected.outputs[one.request_id].stop_token_id == ord("!")


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (ord("z"),)},
        {"min_tokens": 10},
        {"bad_words_ids": ((ord("h"),),)},
        {"allowed_token_ids": tuple(b"helo")},  # all of the text, not its end
    ],
)
def test_a_dead_end_is_its_requests_own(params: dict[str, object]) -> None:
    one, other = asked(1, Grammar("choice", '["hello"]'), **params), asked(2, WORD)
    collected = run(one, other)
    assert isinstance(error(collected, one), InvalidRequest)
    assert "no token is left" in error(collected, one).message
    assert collected.reason(other) == "stop"


def test_other_masks_and_penalties_choose_among_what_is_allowed() -> None:
    one = asked(1, Grammar("regex", "[a-z]{6}"), logit_bias={ord("q"): 100.0}, bad_words_ids=((ord("q"), ord("q")),))
    chosen = text(run(one), one)
    assert re.fullmatch("[a-z]{6}", chosen)
    assert "q" in chosen
    assert "qq" not in chosen
    two = asked(
        2, Grammar("regex", "[a-z]{6}"), allowed_token_ids=(*b"abc", EOS), temperature=0.0, frequency_penalty=2.0
    )
    assert re.fullmatch("[a-c]{6}", text(run(two), two))


def test_a_text_begins_where_the_prompt_ends() -> None:
    one = asked(1, Grammar("choice", '["b"]'), prompt="ab")
    assert text(run(one), one) == "b"


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("regex", "(a"),
        ("regex", r"(a)\1"),
        ("grammar", "start: start"),
        ("grammar", "hello"),
        ("grammar", 'root ::= "a" b'),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        ("json_schema", '{"type": "integer", "multipleOf": 999983}'),
        ("json_schema", '{"type": "integer", "multipleOf": 1e9}'),
        ("json_schema", '{"type": "number", "multipleOf": 0.0000123457}'),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
        ("json_schema", '{"items": ' * 500 + "{}" + "}" * 500),
        ("json_schema", '{"$ref": "#/nowhere"}'),
        ("json_schema", '{"type": "banana"}'),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_at_the_door(kind: str, written: str) -> None:
    core, _ = core_with()
    with pytest.raises(InvalidRequest) as caught:
        core.submit(asked(1, Grammar(kind, written)))
    assert caught.value.field == "grammar"
    assert len(caught.value.message) < 600
    assert "\n" not in caught.value.message
    assert not step_until_idle(core)


def test_a_grammar_that_explodes_fails_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    bomb, other = asked(1, Grammar("regex", "((a{1,100}){1,100}){1,100}b")), asked(2, WORD)
    collected = run(bomb, other)
    assert collected.reason(other) == "stop"
    if bomb.request_id in collected.errors:
        assert "limits" in error(collected, bomb).message
        assert "a request's grammar failed at position" in caplog.text


def test_what_one_request_needs_of_a_grammar_is_not_taken_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of a grammar share tables of a bounded size: who finds them full begins with tables of its own."""
    limits = llguidance.LLParserLimits(max_lexer_states=600, verbose_errors=False)
    monkeypatch.setattr(guidance, "_LIMITS", limits)
    core, collected = core_with(num_pages=200, max_model_len=128)
    greedy = Grammar("regex", "(.*a.{12})+")  # another state for each of 2 ** 12 pasts
    requests = [asked(n, greedy, max_tokens=90, logit_bias={97: 4.0}) for n in range(1, 9)]
    begun_anew: list[object] = []
    own = guidance.GuidanceGrammar.own_matcher
    monkeypatch.setattr(guidance.GuidanceGrammar, "own_matcher", lambda self: begun_anew.append(self) or own(self))
    for one in requests:
        core.submit(one)
    step_until_idle(core)
    assert begun_anew, "the limit was never met: the test shows nothing"
    assert not collected.errors
    for one in requests:
        assert len(collected.tokens(one)) == 90 or collected.reason(one) == "stop"


class Stubborn:
    """A matcher that allows the letter a, until it has had three."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._seen = 0

    def matcher(self) -> Stubborn:
        return self

    own_matcher = matcher

    def consume(self, token_ids: list[int]) -> None:
        self._seen += len(token_ids)

    def fill(self, mask: np.ndarray) -> bool:
        if self._seen == 3:
            self._then()
        mask[:] = 0
        mask[ord("a") // 32] = 1 << ord("a") % 32
        return False


def burn() -> None:
    began = time.thread_time()
    while time.thread_time() - began < 0.06:
        pass


@pytest.mark.parametrize("trouble", ["breaks", "hangs", "is dear"])
def test_a_matcher_in_trouble_takes_its_own_request_with_it_and_no_other(
    trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()

    def breaks() -> None:
        raise RuntimeError("a bug")

    then = {"breaks": breaks, "hangs": lambda: over.wait(20.0) and None, "is dear": burn}[trouble]
    if trouble == "hangs":
        monkeypatch.setattr(grammar_masks, "WAIT_S", 0.3)
    if trouble == "is dear":
        monkeypatch.setattr(grammar, "FIRST_ALLOWANCE_S", 0.03)
    core, collected = core_with()
    others = [asked(n, WORD) for n in (1, 3)]
    odd = asked(2, WORD)
    odd.grammar = Stubborn(then)
    for one in (others[0], odd, others[1]):
        core.submit(one)
    step_until_idle(core)
    over.set()
    assert "grammar cannot go on" in error(collected, odd).message
    assert collected.tokens(odd) == [ord("a")] * 3
    assert [collected.reason(one) for one in others] == ["stop", "stop"]
    assert "a request's grammar failed at position" in caplog.text


def test_an_engine_without_a_tokenizer_says_so() -> None:
    core, _ = fake_core()
    with pytest.raises(InvalidRequest, match="grammar needs the model's tokenizer"):
        core.submit(asked(1, WORD))


def test_masks_are_exact() -> None:
    """At each position of a text, just the bytes that a regular expression allows there."""
    core, _ = core_with()
    matcher = core.grammars.compiled(Grammar("regex", "a(b|c)+")).matcher()
    mask = np.zeros(-(-VOCAB // 32), dtype=np.int32)

    def allowed() -> tuple[bytes, bool]:
        whole = matcher.fill(mask)
        return bytes(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()), whole

    assert allowed() == (b"a", False)
    matcher.consume(list(b"a"))
    assert allowed() == (b"bc", False)
    matcher.consume(list(b"bcb"))
    assert allowed() == (b"bc", True)


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_gives_the_tokens_of_one(size: int) -> None:
    """Rows move from rank to rank as others come and go, so that a matcher has to catch up."""

    def requests() -> list[Request]:
        grammars = (LONG, SCHEMA, Grammar("choice", '["hello", "help"]'), WORD, None, LONG)
        return [
            request(n, b"abcd" * n, max_tokens=20, temperature=1.0, logprobs=n, grammar=grammar)
            for n, grammar in enumerate(grammars, start=1)
        ]

    whole = requests()
    collected = run(*whole, max_num_seqs=6)
    world, together = ThreadWorld(size), Collected()
    widths = {2: (140, 120), 3: (100, 100, 60)}[size]
    cores = []
    for rank in range(size):
        world_of = {"collectives": world.collectives[rank], "channel": world.channels[rank], "widths": widths}
        core, _ = fake_core(18, together, eos=(EOS,), **world_of)
        core.grammars.load_tokenizer = byte_tokenizer
        cores.append(core)
    theirs = requests()
    for core in reversed(cores):
        for each in requests() if not core.is_leader else theirs:
            core.submit(each)
    done = threading.Thread(target=stop_when_idle, args=(cores[0],), daemon=True)
    done.start()
    world.run(lambda rank: cores[rank].run())
    assert not together.errors
    assert cores[0].statistics().preemptions
    for ours, other in zip(whole, theirs, strict=True):
        assert together.outputs[other.request_id].token_ids == collected.outputs[ours.request_id].token_ids
        assert together.outputs[other.request_id].logprobs == collected.outputs[ours.request_id].logprobs


def stop_when_idle(core: EngineCore) -> None:
    core.stop_model(60.0)
    core.shutdown()


def test_on_a_gpu_rows_with_a_grammar_never_go_ahead_of_their_tokens() -> None:
    """Greedy, and the host samples: others do go ahead, and whoever joins them with a grammar puts an end to that."""

    def played(make: Callable[..., tuple[EngineCore, object]], **settings: object) -> list[list[int]]:
        collected = Collected()
        core, _ = make(collected=collected, eos=(96,), max_num_seqs=3, **settings)
        core.grammars.load_tokenizer = byte_tokenizer
        code = Grammar("regex", "[A-F0-9]{3,8}Z")
        made = [request(n, b"A" * n, max_tokens=8 + n, grammar=None if n % 2 else code) for n in range(1, 7)]
        for each in made[:2]:
            core.submit(each)
        for _ in range(3):
            core.step()
        for each in made[2:]:
            core.submit(each)
        step_until_idle(core)
        assert not collected.errors
        for each in made[1::2]:
            assert re.fullmatch("[A-F0-9]{3,8}Z`", bytes(collected.tokens(each)).decode())
        return [collected.tokens(each) for each in made]

    assert played(fake_gpu_core) == played(fake_core, widths=(97,))
