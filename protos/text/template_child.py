"""The process that compiles and renders chat templates: their code is the model's, so its time and memory are bounded
from outside. Started by `chat_template`, with the bytes of memory that it may take.

A question is {"id", "source", "messages", "own", "roles" …} as `ChatTemplate` asks it; "source" is left out once a
process has it. An answer has one of "text" (with "own", the stretches that the template wrote), "error" (no valid
Jinja), "problem" (the template refuses the messages), "unknown" (no source yet), "chars" or "memory" (too much).
"""

from __future__ import annotations

import os
import pprint  # noqa: F401 - a filter imports it when first used
import signal
import sys
from collections.abc import Iterable
from typing import Any

import jinja2

from allspan.protos.text.helper_child import limit_memory, questions, reply
from allspan.protos.text.template_environment import TemplateEnvironment
from allspan.protos.text.written import Written, joined, with_own, with_tags, written

ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "model"))
"""The roles whose names may be part of a control token that a template puts together."""
MAX_TEMPLATES = 16
_SLACK_S = 1.0


class TooLong(Exception):
    """The text has more characters than it may."""


class Templates:
    """The compiled templates, by their ids."""

    def __init__(self) -> None:
        self._compiled: dict[str, jinja2.Template | str] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        template = self._compiled.get(question["id"])
        if template is None:
            if "source" not in question:
                return {"unknown": True}
            template = _compiled(question["source"])
            if len(self._compiled) >= MAX_TEMPLATES:
                self._compiled.clear()
            self._compiled[question["id"]] = template
        if isinstance(template, str):
            return {"error": template}
        if question["messages"] is None:
            return {"text": "", "own": []}
        text = _rendered(template, _values(question), question["max_chars"])
        return {"text": text, "own": text.own if isinstance(text, Written) else []}


def main() -> None:
    """Answers until standard input ends."""
    templates = Templates()
    TemplateEnvironment().from_string("{{ 1 | pprint }}{{ strftime_now('%Y') }}").render()  # imports what comes late
    limit_memory(int(sys.argv[1]))
    asked = questions()
    next(asked, None)  # the greeting
    reply({})
    for question in asked:
        # Should the parent be gone when a template does not end.
        signal.setitimer(signal.ITIMER_REAL, question["within_s"] + _SLACK_S)
        try:
            answer = templates.answer(question)
        except MemoryError:
            answer = {"memory": True}
        except TooLong:
            answer = {"chars": True}
        except Exception as error:  # whatever foreign code raises
            answer = {"problem": _one_line(error)}
        reply(answer)
        if "memory" in answer:
            os._exit(0)  # what is left of it would make the next one fail, and takes long to free
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _compiled(source: str) -> jinja2.Template | str:
    """The template, or what is wrong with it."""
    try:
        return TemplateEnvironment().from_string(source)
    except MemoryError as error:
        if not str(error):
            raise
        return _one_line(error)  # Python's compiler on code that is nested too deeply
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        return _one_line(error)


def _values(question: dict[str, Any]) -> dict[str, Any]:
    messages = question["messages"]
    for i, key, own in question["own"]:
        messages[i][key] = with_own(messages[i][key], own)
    for message in messages:
        if isinstance(message, dict) and message.get("role") in ROLES:
            message["role"] = written(message["role"])
            if message["role"] == "assistant" and type(message.get("content")) is str:
                message["content"] = with_tags(message["content"])
    specials = {name: written(text) for name, text in question["specials"].items()}
    return {"tools": None, "documents": None, **specials, **question["variables"], "messages": messages}


def _rendered(template: jinja2.Template, values: dict[str, Any], max_chars: int) -> str:
    def bounded(parts: Iterable[str]) -> Iterable[str]:
        size = 0
        for part in parts:
            size += len(part)
            if size > max_chars:
                raise TooLong
            yield part

    return joined(bounded(template.generate(values)))


def _one_line(error: BaseException) -> str:
    text = str(error)[:10_000].encode("utf-8", "replace").decode()  # a template can spell half a surrogate pair
    return " ".join(text.split())[:500] or type(error).__name__


if __name__ == "__main__":
    main()
