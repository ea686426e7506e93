"""Grammars (Lark, with JSON Schema inside) that make a model's calls follow the schemas of its tools."""

from __future__ import annotations

import json

from allspan.client.gateway.chat.formats import CallFormat
from allspan.client.gateway.chat.harmony import calls_rules
from allspan.client.gateway.chat.tools import ToolUse
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.protos.text.schema_keywords import check_keywords, simplified


def calls_grammar(form: CallFormat, use: ToolUse, answer: Grammar | None = None) -> Grammar | None:
    """Returns the grammar of an output that may call tools: calls and nothing else when they are required; else calls
    or the `answer`, where that has a form; text and well-formed calls, when one of the functions is strict. None where
    the model is free. InvalidRequest when the schemas are too large, or the answer's form cannot be told from calls."""
    if form.marks and use.functions and (use.required or answer or any(each.strict for each in use.functions)):
        wanted = f"%json {_schema_of(answer)}" if answer is not None and not use.required else ""
        return Grammar("grammar", calls_rules(use.functions, use.required, wanted))
    if use.required:
        start = "start: calls\n"
    elif answer is not None and use.functions:
        start = f"start: calls | answer\nanswer: %json {_schema_of(answer)}\n"
    elif answer is not None:
        return answer
    elif any(function.strict for function in use.functions):
        start = _text_or_calls(form)
    else:
        return None
    try:
        return Grammar("grammar", start + _calls(form, use))
    except InvalidRequest as error:
        raise InvalidRequest(f"tools make a {error.message}", "tools") from error


def _schema_of(answer: Grammar) -> str:
    if answer.kind == "json_object":
        return '{"type": "object"}'
    if answer.kind == "json_schema":
        schema = json.loads(answer.text)
        check_keywords(schema)
        return json.dumps(simplified(schema))
    raise InvalidRequest(
        f"tools are given with a {answer.kind} that the answer must follow: only JSON can be told from calls; "
        'use tool_choice "none"',
        "tools",
    )


def _text_or_calls(form: CallFormat) -> str:
    mark = form.regions[0].open
    if not mark:  # what begins as JSON is a call
        return "start: calls | ANSWER\nANSWER: /([^ \\t\\r\\n{\\[](.|\\n)*)?/\n"
    mark = "".join(f"\\{char}" if char in "[]|/" else char for char in mark)
    return (
        "start: marked* ANSWER\n"
        "marked: until_mark written_call\n"
        f"until_mark[lazy]: /(.|\\n)*{mark}/\n"
        f"ANSWER: /(.|\\n)*/ & ~/(.|\\n)*{mark}(.|\\n)*/\n"
    )


def _calls(form: CallFormat, use: ToolUse) -> str:
    """The rules `calls` and `written_call`: what follows a mark."""
    region = form.regions[0]
    around = ("\n", f"\n{region.close}") if region.close else ("", "")
    more = f" ({_quoted(form.separator)} call)*" if use.parallel else ""
    rules = [
        f"calls: call{more}",
        f"call: {_quoted(region.open)} written_call" if region.open else "call: written_call",
        "written_call: " + " ".join(filter(None, (_quoted(around[0]), "object", _quoted(around[1])))),
        "object: " + " | ".join(f"object_{i}" for i in range(len(use.functions))),
    ]
    for i, function in enumerate(use.functions):
        head = f'{{"name": {json.dumps(function.name)}, "{form.arguments}": '
        rules.append(f"object_{i}: {_quoted(head)} arguments_{i} {_quoted('}')}")
        rules.append(f"arguments_{i}: %json {json.dumps(function.schema)}")
    return "\n".join(rules) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
