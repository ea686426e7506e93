"""Tools of a request: what is refused, and grammars that hold a model to their schemas."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from allspan.client.gateway.chat.enforce import calls_grammar
from allspan.client.gateway.chat.formats import FORMATS
from allspan.client.gateway.chat.tools import NO_TOOLS, read_tools
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str = "f", parameters: Any = CITY, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


REFUSED: list[tuple[Any, Any, str, str]] = [
    ({}, None, "tools", "tools is {}, must be a list"),
    ([1], None, "tools", "tools[0] is 1"),
    ([{"type": "custom", "custom": {}}], None, "tools", "tools[0] is {"),
    ([tool(), tool("g", description=1)], None, "tools", "tools[1].function.description is 1"),
    ([tool("a b")], None, "tools", "tools[0].function.name is 'a b', must be of 1 to 64"),
    ([tool("")], None, "tools", "tools[0].function.name is ''"),
    ([tool("f" * 65)], None, "tools", "tools[0].function.name"),
    ([tool(), tool()], None, "tools", "tools[1].function.name is 'f', which is an earlier tool's name"),
    ([tool(parameters=[])], None, "tools", "tools[0].function.parameters is []"),
    ([tool(strict=1)], None, "tools", "tools[0].function.strict is 1"),
    ([tool(str(i)) for i in range(129)], None, "tools", "tools has 129 entries, at most 128"),
    ([tool()], "always", "tool_choice", "tool_choice is 'always', must be none, auto, required"),
    ([tool()], 7, "tool_choice", "tool_choice is 7"),
    ([tool()], {"type": "function"}, "tool_choice", "tool_choice is {'type': 'function'}"),
    ([tool()], {"type": {}}, "tool_choice", "tool_choice is"),
    ([tool()], named("g"), "tool_choice", "names 'g', which is not among tools"),
    ([tool()], allowed("auto", "g"), "tool_choice", "tool_choice.allowed_tools.tools[0] names 'g'"),
    ([tool()], allowed("never", "f"), "tool_choice", "mode is 'never', must be auto or required"),
    ([tool()], allowed("auto"), "tool_choice", "tool_choice is"),
    ([], "required", "tool_choice", "which needs tools"),
    (None, named("f"), "tool_choice", "which needs tools"),
]


@pytest.mark.parametrize(("tools", "choice", "field", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit_is_refused_by_its_place(tools: Any, choice: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_tools(tools, choice, None)
    assert words in caught.value.message
    assert caught.value.field == field


def test_choice_says_what_the_model_sees_and_must() -> None:
    tools = [tool("f"), tool("g")]
    assert read_tools(tools, None, None).names == read_tools(tools, "auto", None).names == ("f", "g")
    assert read_tools(tools, "none", None) == NO_TOOLS
    assert read_tools(tools, "required", False).required
    assert not read_tools(tools, "required", False).parallel
    use = read_tools(tools, named("g"), True)
    assert (use.names, use.required, use.parallel) == (("g",), True, False)
    use = read_tools(tools, allowed("required", "g", "g"), None)
    assert (use.names, use.required, use.parallel) == (("g",), True, True)
    assert read_tools(tools, allowed("auto", "f"), None).required is False
    for nothing in (None, []):
        assert read_tools(nothing, "auto", True) == NO_TOOLS


def ends(grammar: Any, text: str) -> bool | None:
    """Whether an output that the grammar allows may end here; None: it does not allow it."""
    assert grammar is not None
    tokens = llguidance.LLTokenizer("byte")
    compiled = llguidance.grammar_from("lark", grammar.text)
    assert not llguidance.LLMatcher.validate_grammar(compiled, tokens)
    matcher = llguidance.LLMatcher(tokens, compiled)
    ids = tokens.tokenize_str(text)
    return matcher.is_accepting() if matcher.try_consume_tokens(ids) == len(ids) else None


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if not form.marks])
def test_required_calls_follow_their_schemas_in_the_model_s_format(name: str) -> None:
    form = FORMATS[name]
    tools = [tool("f"), tool("g-1.x", None), tool("h", {})]
    grammar = calls_grammar(form, read_tools(tools, "required", None))
    call = form.written("f", {"city": 'P"ris\n', "days": 2})
    others = [form.written("g-1.x", {}), form.written("h", {"any": [1, {"x": None}]})]
    assert ends(grammar, call) is True
    assert ends(grammar, form.separator.join([call, *others])) is True
    assert ends(grammar, call[:-1]) is not True
    for wrong in ("Hi", "", form.written("f", {"days": 2}), form.written("f", {"city": 1}), form.written("x", {})):
        assert ends(grammar, wrong) is not True, wrong
    single = calls_grammar(form, read_tools(tools, "required", False))
    assert ends(single, call) is True
    assert ends(single, form.separator.join([call, call])) is None
    only = calls_grammar(form, read_tools(tools, named("h"), None))
    assert ends(only, form.written("h", {})) is True
    assert ends(only, call) is None


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if not form.marks])
def test_strict_functions_are_held_to_their_schemas_when_the_model_chooses(name: str) -> None:
    form = FORMATS[name]
    assert calls_grammar(form, read_tools([tool()], "auto", None)) is None
    grammar = calls_grammar(form, read_tools([tool(strict=True)], "auto", None))
    good, bad = form.written("f", {"city": "Paris"}), form.written("f", {"city": 7})
    assert ends(grammar, good) is True
    assert ends(grammar, "Just text, a < b, <tool_cal and\n\nmore.") is True
    assert ends(grammar, "") is True
    assert ends(grammar, bad) is None
    if form.regions[0].open:
        assert ends(grammar, f"Let me see.\n{good}\n{good} Done.") is True
        assert ends(grammar, f"Let me see.\n{bad}") is None


def test_answers_in_a_form_stand_beside_calls() -> None:
    form = FORMATS["hermes"]
    use = read_tools([tool()], "auto", None)
    answer = Grammar("json_schema", json.dumps(CITY))
    grammar = calls_grammar(form, use, answer)
    assert ends(grammar, form.written("f", {"city": "Paris"})) is True
    assert ends(grammar, '{"city": "Paris"}') is True
    assert ends(grammar, "Paris") is None
    assert ends(calls_grammar(form, use, Grammar("json_object")), '{"x": 1}') is True
    assert calls_grammar(form, NO_TOOLS, answer) is answer
    assert ends(calls_grammar(form, read_tools([tool()], "required", None), answer), '{"city": "Paris"}') is None
    with pytest.raises(InvalidRequest, match='only JSON can be told from calls; use tool_choice "none"'):
        calls_grammar(form, use, Grammar("regex", "[a-z]+"))


def test_schemas_of_strict_functions_are_followed_to_the_letter_or_refused() -> None:
    form, odd = FORMATS["hermes"], CITY | {"not": {"required": ["x"]}}
    grammar = calls_grammar(form, read_tools([tool(parameters=odd)], "required", None))
    assert ends(grammar, form.written("f", {"city": "Paris"})) is True
    with pytest.raises(InvalidRequest, match=r"the parameters of tool 'f': .*not") as caught:
        calls_grammar(form, read_tools([tool(parameters=odd, strict=True)], "auto", None))
    assert caught.value.field == "tools"


def test_schemas_too_large_for_a_grammar_are_refused() -> None:
    big = {"type": "object", "description": "x" * 2**18}
    with pytest.raises(InvalidRequest, match="at most 262144") as caught:
        calls_grammar(FORMATS["hermes"], read_tools([tool(parameters=big)], "required", None))
    assert caught.value.field == "tools"
