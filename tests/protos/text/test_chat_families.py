"""Conversations that spell no control token have the ids that transformers gives them, for every family's template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allspan.protos.api.errors import InvalidRequest
from allspan.protos.text import load_tokenizer
from support.chat_families import FAMILIES, family_folder

transformers = pytest.importorskip("transformers")

CALL = {"id": "call_1234", "type": "function", "function": {"name": "f", "arguments": {"a": "ü <b>"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": " Hi,  ünï\n\n<b> [1] "},
    {"role": "assistant", "content": "Hello <|world"},
    {"role": "user", "content": "Bye\n"},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": TALK[:1],
    "many": TALK,
    "system": [{"role": "system", "content": " Be brief. "}, *TALK],
    "calls": [
        *TALK[:1],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1234", "name": "f", "content": '{"x": 1}'},
    ],
    "thoughts": [*TALK[:1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}, *TALK[2:]],
    "ends": [*TALK[:1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}],
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("metaspace", [False, True], ids=["bytes", "metaspace"])
def test_ids_of_plain_conversations_are_those_of_transformers(tmp_path: Path, name: str, metaspace: bool) -> None:
    folder = family_folder(tmp_path, name, metaspace)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    rendered = 0
    for messages in CONVERSATIONS.values():
        for prompted in (True, False):
            for tools in ([TOOL], None):
                try:
                    text = ours.render_chat(messages, prompted, tools=tools)
                except InvalidRequest:
                    continue  # as many templates do with calls; ours does with tools that the template leaves out
                rendered += 1
                options = {"add_generation_prompt": prompted, "tools": tools}
                assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
                ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
                assert ours.encode_chat(messages, prompted, tools=tools) == ids
    assert rendered >= 8
