"""Jinja as Hugging Face's `apply_chat_template` sets it up, with a mark on every character that a template writes.

It bounds neither time nor memory: a template is foreign code, compiled and rendered in `template_child` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import filters, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from allspan.protos.text.written import Written, joined, written


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. Texts in a template's source are its own; values that it is given are not, unless they say so."""

    concat = staticmethod(joined)

    def __init__(self) -> None:
        extensions = [_GenerationBlock, LoopControlExtension]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.texts: list[Written] = []
        """The texts in the sources of the compiled templates."""
        self.filters |= {"tojson": _tojson, "join": _join, "replace": _replace}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def tilde(self, values: Iterable[Any]) -> str:
        """The operator `~`."""
        return joined(map(str, values))


class _Generator(CodeGenerator):
    """Compiles every text of a template's source to one that is marked as the template's own."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self._own(value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._own(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.tilde((")
        for value in node.nodes:
            self.visit(value, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._own("".join(map(str, group)))

    def _own(self, text: str) -> str:
        assert isinstance(self.environment, TemplateEnvironment)
        self.environment.texts.append(written(str.__str__(text)))
        return f"environment.texts[{len(self.environment.texts) - 1}]"


TemplateEnvironment.code_generator_class = _Generator


class _GenerationBlock(Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's part for training; here its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - how jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's own filter, over marked text."""
    made: str = filters.do_join(context, value, Written(d), attribute)
    return made


@jinja2.pass_eval_context
def _replace(context: EvalContext, s: Any, old: str, new: str, count: int | None = None) -> str:
    """Jinja's own filter, over marked text."""
    return filters.do_replace(context, Written(str(s)), old, new, count)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
