"""One model's chat template: its handling of tools and tool calls, found out by rendering probes, and its
conversations."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allspan.client.gateway.chat.formats import CallFormat, has_channels
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.text.chat_template import RENDER_S, ChatTemplate, TemplateTooSlow
from allspan.protos.text.vendors.chat_formats import GLM4_CALLS
from allspan.protos.text.written import CUT, Written, joined, with_tags, written

logger = logging.getLogger("allspan.gateway")

RESERVED = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "return_dict",
        "bos_token",
        "eos_token",
    )
)
"""The template's variables that no request can set."""

_UNREAD_CALLS = ("tool_call(", GLM4_CALLS)
"""What templates have whose models write calls as Python (ChatGLM3), or as a name above an object (GLM-4): no format
reads those, so such a model is taught ours."""
PROBE_S = 2.0
"""Most seconds that the rendering of a probe may take."""
_END = "\ue000the end\ue001"
"""A mark for the end of a message that the model continues; it occurs in no conversation."""
_NAME, _VALUE, _RESULT, _SYSTEM = "probe_function", "probe value", "probe result", "probe system"


@dataclass(frozen=True)
class Rendering:
    """The options for rendering a conversation as a prompt, beside its messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    generation_prompt: bool = True
    """The prompt ends where the assistant begins to answer."""
    continues: bool = False
    """The last message is the beginning of the answer."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The values of the template's variables."""
    think: bool = True
    """If False, reasoning that the template begins is ended at once."""

    @property
    def characters(self) -> int:
        """The approximate number of characters that the tools add to a prompt."""
        return sum(len(json.dumps(tool, ensure_ascii=False)) for tool in self.tools)


@dataclass(frozen=True)
class Traits:
    """The features of a template."""

    tools: bool
    """Whether it lists tools."""
    calls: bool
    """Whether it shows calls and results."""
    system: bool
    """Takes a system message."""
    arguments_are_text: bool = False
    """Whether it expects a call's arguments as JSON text rather than as an object."""
    empty_is_none: bool = False
    """Whether it recognises a message with calls by its content, which must be none."""
    lead: str = ""
    """What it puts before an answer that its prompt does not end with, where that is a line break (ChatGLM3, GLM-4):
    the model writes it first."""


def traits_of(template: ChatTemplate) -> Traits:
    """Finds a template's features by rendering small conversations; none of one that takes too long over them."""
    try:
        traits = _probed(template)
        if any(mark in template.source for mark in _UNREAD_CALLS):
            traits = replace(traits, tools=False, calls=False)
        return replace(traits, lead=_lead(template))
    except TemplateTooSlow as error:
        logger.warning("tools and calls are described in plain messages: %s", error)
        return Traits(tools=False, calls=False, system=False)


def _probed(template: ChatTemplate) -> Traits:
    tool = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}}}
    user = {"role": "user", "content": "Hi"}

    def shows(*needed: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> bool:
        try:
            text = template.render(messages, True, within_s=PROBE_S, **variables)
        except TemplateTooSlow:
            raise
        except InvalidRequest:
            return False
        return all(part in text for part in needed)

    tools = shows(_NAME, messages=[user], tools=[tool])
    system = shows(_SYSTEM, messages=[{"role": "system", "content": _SYSTEM}, user])
    for as_text in (False, True):
        for empty in ("", None):
            arguments = {"key": _VALUE}
            function = {"name": _NAME, "arguments": json.dumps(arguments) if as_text else arguments}
            call = {"id": "abcdefghi", "type": "function", "function": function}
            conversation: list[Mapping[str, Any]] = [
                user,
                {"role": "assistant", "content": empty, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "name": _NAME, "content": _RESULT},
            ]
            if shows(_NAME, f'"{_VALUE}"', _RESULT, messages=conversation):
                return Traits(tools, True, system, as_text, empty is None)
    return Traits(tools, False, system)


def _lead(template: ChatTemplate) -> str:
    """See `Traits.lead`."""
    user = {"role": "user", "content": "Hi"}
    try:
        prompt = template.render([user], True, within_s=PROBE_S)
        answered = template.render([user, {"role": "assistant", "content": _RESULT}], False, within_s=PROBE_S)
    except TemplateTooSlow:
        raise
    except InvalidRequest:
        return ""
    lead, found, _ = str.partition(answered, _RESULT)
    is_added = bool(found) and lead.startswith(prompt)
    lead = lead[len(prompt) :]
    return lead if is_added and not lead.replace(CUT, "").strip() and "\n" in lead else ""


class Conversations:
    """The renderer of conversations through one template. What the template does not know of tools is written into
    messages that it does know, in the call format of the server."""

    def __init__(self, template: ChatTemplate, traits: Traits, form: CallFormat) -> None:
        self._template = template
        self._traits = traits
        self._form = form
        self._has_channels = has_channels(template.source)
        """Whether the template calls an earlier message's reasoning `thinking`, as gpt-oss's does."""

    def render(self, messages: Sequence[Mapping[str, Any]], how: Rendering, within_s: float = RENDER_S) -> Written:
        """The prompt. InvalidRequest for what the template does not take."""
        if how.continues:
            *before, last = messages
            messages = [*before, {**last, "content": (last["content"] or "") + _END}]
        if not self._traits.calls:
            messages = _without_calls(messages, self._form)
        if how.tools and not self._traits.tools:
            messages = _taught(messages, self._form.instructions(how.tools), self._traits.system)
        variables = dict(how.variables) if how.think else {**how.variables, "enable_thinking": False}
        if how.tools and self._traits.tools:
            variables["tools"] = [_described(tool) for tool in how.tools] if self._has_channels else list(how.tools)
        shown = [self._shown(message) for message in messages]
        prompted = how.generation_prompt and not how.continues
        text = self._template.render(shown, prompted, within_s=within_s, **variables)
        if not how.continues:
            return text
        end = text.rfind(_END)
        if end < 0:
            raise InvalidRequest(
                "the chat template does not show the last message, which is to be continued", "messages"
            )
        return text[:end]

    def _shown(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if self._has_channels and message.get("reasoning_content") and not (calls and message["content"]):
            message = {**message, "thinking": message["reasoning_content"]}
        if not calls:
            return message
        content = message["content"] or ""
        return {
            **message,
            "content": None if self._traits.empty_is_none and not content else content,
            "tool_calls": [self._call(call) for call in calls],
        }

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if not self._traits.arguments_are_text:
            arguments = _object_of(arguments)
        return {**call, "function": {**function, "arguments": arguments}}


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with an empty description if it has none: gpt-oss's template takes no tool without."""
    function = tool["function"]
    return {**tool, "function": {**function, "description": function.get("description") or ""}}


def _object_of(arguments: str) -> Any:
    """Arguments as an object; text that is none is left as it is: a model may have written it."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _without_calls(messages: Sequence[Mapping[str, Any]], form: CallFormat) -> list[Mapping[str, Any]]:
    """Calls as the assistant's text, results as the user's."""
    plain: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        after_result = i > 0 and messages[i - 1]["role"] == "tool"
        if message["role"] == "tool":
            text = written("<tool_response>\n") + message["content"] + written("\n</tool_response>")
            if after_result:
                text = plain.pop()["content"] + "\n" + text
            plain.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            texts = [form.written(each["name"], _object_of(each["arguments"])) for each in functions]
            said = with_tags(message["content"] or "")
            content = joined(filter(None, (said, joined(texts, form.separator))), "\n")
            plain.append({"role": "assistant", "content": content})
        else:
            plain.append(message)
    return plain


def _taught(messages: Sequence[Mapping[str, Any]], instructions: Written, system: bool) -> list[Mapping[str, Any]]:
    """The instructions at the end of the system message, or where the template has none, before the first message."""
    first, *rest = messages
    if system and first["role"] == "system":
        return [{**first, "content": first["content"] + "\n\n" + instructions}, *rest]
    if system:
        return [{"role": "system", "content": instructions}, first, *rest]
    return [{**first, "content": instructions + "\n\n" + (first["content"] or "")}, *rest]
