"""POST /v1/chat/completions as a pydantic model, and its meaning in the terms of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from allspan.client.gateway.admission.prompts import PromptOptions
from allspan.client.gateway.chat.enforce import calls_grammar
from allspan.client.gateway.chat.harmony import FINAL
from allspan.client.gateway.chat.messages import Message, read_messages
from allspan.client.gateway.chat.reader import Reading
from allspan.client.gateway.chat.setup import ChatSetup
from allspan.client.gateway.chat.template import Rendering
from allspan.client.gateway.chat.tools import NO_TOOLS, ToolUse, read_tools
from allspan.client.gateway.config import LimitsConfig
from allspan.client.gateway.openai.schemas import SamplingFields
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.sampling import MAX_LOGPROBS


class ChatRequest(SamplingFields):
    """OpenAI's fields; below them vLLM's and SGLang's."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    def prompt_options(self) -> PromptOptions:
        return replace(super().prompt_options(), max_tokens=self.max_completion_tokens or self.max_tokens)

    def check(self, limits: LimitsConfig) -> None:
        super().check(limits)
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message is true, which needs add_generation_prompt to be false",
                "continue_final_message",
            )

    def sampling(self) -> dict[str, Any]:
        fields = super().sampling()
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequest(
                    f"max_completion_tokens is {self.max_completion_tokens}, max_tokens {self.max_tokens}: give one",
                    "max_completion_tokens",
                )
            fields["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            if not 0 <= (top := self.top_logprobs or 0) <= MAX_LOGPROBS:
                raise InvalidRequest(f"top_logprobs is {top}, must be from 0 to {MAX_LOGPROBS}", "top_logprobs")
            fields["logprobs"] = top
        elif self.top_logprobs:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}, which needs logprobs to be true", "top_logprobs"
            )
        return fields


@dataclass(frozen=True)
class Chat:
    """One request's conversation: its input, and how its output is read."""

    messages: list[Message]
    use: ToolUse
    rendering: Rendering
    grammar: Grammar | None
    """The grammar of the output, from its tools or from the request."""
    grammar_field: str
    """The request's field that the grammar comes from."""
    separate_reasoning: bool
    tell_reasoning: bool

    def reading(self, setup: ChatSetup, prompt: Sequence[int]) -> Reading:
        """`prompt`: its token ids. Under a grammar nothing is thought: it holds from the first token on, but for models
        whose reasoning has a channel of its own."""
        has_channels = setup.tags is not None and bool(setup.tags.marks)
        tags = setup.tags if has_channels or (self.separate_reasoning and self.grammar is None) else None
        continued = FINAL if has_channels else ""
        return Reading(
            tags=tags,
            opened=continued if self.rendering.continues else setup.opened(prompt) if tags else "",
            tell_reasoning=self.tell_reasoning,
            separates=self.separate_reasoning,
            form=setup.form if self.use.functions else None,
            names=self.use.names,
            parallel=self.use.parallel,
            lead="" if self.rendering.continues else setup.lead,
        )


def read_chat(request: ChatRequest, setup: ChatSetup, answer: Grammar | None = None) -> Chat:
    """`answer`: its form, where there is one. InvalidRequest names the field and the place of what does not fit."""
    messages = read_messages(request.messages)
    use = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    if use.functions and not use.required and not setup.auto_tool_choice:
        raise InvalidRequest(
            'tool_choice is "auto", which this server was started without (--no-enable-auto-tool-choice); '
            'use "required" or name a function',
            "tool_choice",
        )
    continues = bool(request.continue_final_message)
    if continues and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
        raise InvalidRequest(
            "continue_final_message is true, which needs the last message to be the assistant's, without tool_calls",
            "continue_final_message",
        )
    try:
        grammar = calls_grammar(setup.form, use, answer)
    except InvalidRequest as error:
        if error.field != "grammar":
            raise
        raise InvalidRequest(f"{request.grammar_field}: {error.message}", request.grammar_field) from error
    return Chat(
        messages=messages,
        use=use if use.functions else NO_TOOLS,
        rendering=Rendering(
            tools=use.for_template,
            generation_prompt=request.add_generation_prompt is not False,
            continues=continues,
            variables=_variables(request, setup),
            think=grammar is None or (grammar is not answer and bool(setup.form.marks)),
        ),
        grammar=grammar,
        grammar_field=request.grammar_field if grammar is answer else "tools",
        separate_reasoning=request.separate_reasoning is not False,
        tell_reasoning=request.include_reasoning is not False,
    )


def _variables(request: ChatRequest, setup: ChatSetup) -> dict[str, Any]:
    given = request.chat_template_kwargs or {}
    setup.check_variables(given)
    if request.reasoning_effort is None:
        return given
    effort = {"reasoning_effort": request.reasoning_effort, "enable_thinking": request.reasoning_effort != "none"}
    return effort | given
