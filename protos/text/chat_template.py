"""Chat templates: Jinja as model publishers write it, run where it can do no harm.

The names and settings that a template may count on are those of Hugging Face's `apply_chat_template`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from allspan.protos.api.errors import InvalidRequest

MAX_RENDERED_CHARS = 4 * 2**20
RENDER_S = 5.0
"""Most seconds that the rendering of a conversation may take."""


class TemplateTooSlow(InvalidRequest):
    """The template was still at it when its time was over."""


class _GenerationBlock(Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's part for training; here its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - how jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Bounds(NodeTransformer):
    """A pass over a template's syntax tree that makes every turn of a loop and every call of a macro check the clock,
    and every `~` the length."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._timed(node)
        if node.test is not None:  # a filter that lets nothing through loops as well
            node.test = nodes.Or(self._call("tick", []), node.test).set_lineno(node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._timed(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._timed(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("tilde", node.nodes).set_lineno(node.lineno)

    def _timed(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("tick", [])).set_lineno(node.lineno))
        return node

    def _call(self, name: str, arguments: list[nodes.Expr]) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that also bounds time and size: no loop runs for ever (`allow` a time before rendering), and no
    operator blows a small template up to gigabytes."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._clock = threading.local()  # several threads may render one template

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Bounds().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        return tree.set_environment(self)  # type: ignore[return-value]

    def allow(self, seconds: float) -> None:
        """Sets the time that renderings of this thread may take from now."""
        self._clock.deadline = time.monotonic() + seconds

    def tick(self) -> str:
        if time.monotonic() > self._clock.deadline:
            raise TemplateTooSlow("the chat template takes too long over these messages", "messages")
        return ""

    def tilde(self, *values: Any) -> str:
        """The operator `~`."""
        texts = [str(value) for value in values]
        if sum(map(len, texts)) > MAX_RENDERED_CHARS:
            raise _too_long("~")
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = sum(len(value) for value in (left, right) if isinstance(value, (str, list, tuple)))
        times = max((abs(value) for value in (left, right) if isinstance(value, (int, float))), default=0)
        if operator == "**" or size * (times if operator == "*" else 1) > MAX_RENDERED_CHARS:
            raise _too_long(operator)
        return super().call_binop(context, operator, left, right)


def _too_long(operator: str) -> SecurityError:
    return SecurityError(f"operator {operator} makes values of more than {MAX_RENDERED_CHARS} characters")


class ChatTemplate:
    """A compiled template with the model's begin- and end-of-sequence texts.

    `error` says, in one line, why the source is no valid Jinja; None when it is. A model with a bad template can still
    complete text, so only rendering fails.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", extra: Mapping[str, str] | None = None
    ) -> None:
        """`extra`: further special tokens that the template may name."""
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._extra = dict(extra or {})
        self.error: str | None = None
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            self.error = f"the chat template is no valid Jinja: {_one_line(error)}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        within_s: float = RENDER_S,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. Raises InvalidRequest, in one line, for whatever the template objects to, and
        TemplateTooSlow when it takes longer than `within_s` seconds."""
        if self.error is not None:
            raise InvalidRequest(f"{self.error}; use completions or give --chat-template FILE", "messages")
        values: dict[str, Any] = {"tools": None, "documents": None}
        values |= self._extra | {"bos_token": self.bos_token, "eos_token": self.eos_token} | kwargs
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        parts: list[str] = []
        size = 0
        self._environment.allow(within_s)
        try:
            for part in self._template.generate(values):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise InvalidRequest(
                        f"messages render to more than {MAX_RENDERED_CHARS} characters, the limit", "messages"
                    )
        except InvalidRequest:
            raise
        except Exception as error:  # a template is foreign code: whatever it raises is about this request
            raise InvalidRequest(f"the chat template refuses messages: {_one_line(error)}", "messages") from error
        return "".join(parts)


def _environment() -> _Environment:
    extensions = [_GenerationBlock, LoopControlExtension]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
