"""Outputs that a caller can have a model write: read in time that grows as they do, and never an error.

A reader that looks again at all that it holds, with each piece, takes minutes for these on the loop of all requests.
"""

from __future__ import annotations

import pytest

from allspan.client.gateway.chat.formats import FORMATS
from allspan.client.gateway.chat.pieces import CallStart
from allspan.client.gateway.chat.reader import MessageReader, Reading
from allspan.client.gateway.chat.thinking import TAGS

PIECES = 2000
CALL = "<tool_call>"
BEGUN = f'{CALL}{{"name": "f", "arguments": {{'

FLOODS = {
    "space": ("", " " * 4096),
    "space after text": ("x", "\n" * 4096),
    "space in a call": (CALL, "\t" * 64),
    "space in arguments": (BEGUN, " " * 64),
    "space after arguments": (BEGUN + "}", " " * 64),
    "space after a call": (BEGUN + "}}", " " * 4096),
    "space in a list of calls": (f"{CALL}[", " " * 64),
    "space in reasoning": ("<think>a", " " * 4096),
    "reasoning that never ends": ("<think>", "a b " * 16),
    "beginnings of tags": ("<think>", "</thin" * 10),
    "a name": (f'{CALL}{{"name": "', "a" * 64),
    "a name in bare JSON": ('{"name": "', "a" * 64),
    "a key": (f'{CALL}{{"', "a" * 64),
    "members before a name": (f"{CALL}{{", '"type": "a", ' * 5),
    "arguments before a name": (f'{CALL}{{"arguments": {{"a": "', "a" * 64),
    "arguments that never end": (BEGUN + '"a": "', "a" * 64),
    "a number": (BEGUN + '"a": ', "1" * 64),
    "escapes": (BEGUN + '"a": "', "\\u0041" * 10),
    "malformed arguments": (BEGUN + '"a": }', "}" * 4096),
    "malformed arguments and space": (BEGUN + '"a": }', " }" * 32),
    "braces": (CALL, "{" * 64),
    "brackets": (f"{CALL}[", "[" * 64),
    "nested objects": (BEGUN, '"a": {' * 10),
    "marks": ("", CALL * 6),
    "marks that begin a call": ("", f'{CALL}{{"name' * 4),
    "ends of calls": ("", "</tool_call>" * 5),
    "calls": ("", f"{BEGUN}}}}}</tool_call>"),
    "a list of calls": (f'{CALL}[{{"name": "f", "arguments": {{}}}}', ', {"name": "f", "arguments": {}}' * 2),
    "code fences": ("", "```json\n" * 8),
}


@pytest.mark.timeout(8)
@pytest.mark.parametrize("form", ["generic", "hermes"])
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_is_read_in_linear_time(flood: str, form: str) -> None:
    begin, piece = FLOODS[flood]
    reader = MessageReader(Reading(tags=TAGS["generic"], form=FORMATS[form], names=["f"]))
    found = reader.push(begin)
    for _ in range(PIECES):
        found += [made for made in reader.push(piece) if isinstance(made, CallStart)]
    reader.finish()
    assert {start.name for start in found if isinstance(start, CallStart)} <= {"f"}
