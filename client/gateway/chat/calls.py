"""Tool calls in text that arrives in pieces, whatever the pieces: what was found is the same for every split.

A call is told as soon as it is sure to be one: its name is there and its arguments have begun as a JSON object does.
From then on they are passed on as they come, well-formed or not. What breaks off earlier was text, and comes as text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection

from allspan.client.gateway.chat.formats import CallFormat, Region
from allspan.client.gateway.chat.json_scan import SPACE, JsonScanner
from allspan.client.gateway.chat.pieces import MAX_HELD_CHARS, CallArguments, CallStart, Content, Piece, end_of, overlap

_S = r"[ \t\r\n]*"
_STRING = r'"((?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)"'
_HEAD = re.compile(
    rf'\{{{_S}(?:"(?:type|id)"{_S}:{_S}"[\w-]*"{_S},{_S})*"name"{_S}:{_S}{_STRING}{_S},{_S}'
    rf'"(?:arguments|parameters)"{_S}:{_S}(?=\{{{_S}["}}])'
)
_FIRST_KEY = re.compile(rf'\{{{_S}"([^"\\]*)"')
_FIRST_NAME = re.compile(rf'\{{{_S}"name"{_S}:{_S}"([^"\\]*)"')
_KEYS = frozenset(("name", "arguments", "parameters", "type", "id", "function"))


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class CallReader:
    """The reader of tool calls: `push` text in order, then `finish`; both return the pieces that are certain by then.

    Space beside a call is the format's, not the answer's.
    """

    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        """`names`: of the tools that the request offers."""
        self._names = frozenset(names)
        self._marked = [region for region in form.regions if region.open]
        self._bare = next((region for region in form.regions if not region.open), None)
        self._region = form.regions[0]
        self._state = self._in_text
        self._buffer = ""
        self._held = ""
        """Text that has been read, and is emitted as text if it is no call."""
        self._space = ""
        """The end of the text so far, which may stand before a call."""
        self._wrote = False
        self._listed = False
        self._calls = 0
        self._scanner = JsonScanner()
        self._scanned = 0
        self._final = False
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        return self._read()

    def finish(self) -> list[Piece]:
        """The output is over."""
        self._final = True
        return self._read()

    def _read(self) -> list[Piece]:
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return _merged(pieces)

    # Each state reads what it can; True when there may be more to read, False when it waits for more.

    def _in_text(self) -> bool:
        buffer = self._buffer
        if self._bare and not self._wrote and not self._calls and (first := buffer.lstrip(SPACE))[:1] in ("{", "["):
            marks = [region.open for region in self._marked]
            if not self._final and any(mark.startswith(first) for mark in marks):
                return False
            if not first.startswith(tuple(marks)):
                start = len(buffer) - len(first)
                return self._open(self._bare, start, start)
        found = [(at, -len(region.open), region) for region in self._marked if (at := buffer.find(region.open)) >= 0]
        if found:
            at, _, region = min(found, key=lambda entry: entry[:2])
            return self._open(region, at, at + len(region.open))
        keep = 0 if self._final else max((overlap(buffer, region.open) for region in self._marked), default=0)
        self._text(buffer[: len(buffer) - keep])
        self._buffer = buffer[len(buffer) - keep :]
        if self._final and not self._calls:
            self._emit(Content(self._space))
            self._space = ""
        return False

    def _open(self, region: Region, at: int, end: int) -> bool:
        self._text(self._buffer[:at])
        self._held, self._buffer = self._buffer[at:end], self._buffer[end:]
        self._region, self._listed = region, False
        self._state = self._before_call
        return True

    def _before_call(self) -> bool:
        """Reads the state within a region, before an object or the list of them."""
        self._hold_space()
        first = self._buffer[:1]
        if first == "[" and not self._listed:
            self._listed = True
            self._held, self._buffer = self._held + "[", self._buffer[1:]
            return True
        if first == "{":
            self._scanner, self._scanned = JsonScanner(), 0
            self._state = self._in_head
            return True
        return self._fail() if first or self._final else False

    def _in_head(self) -> bool:
        """An object of which it is not known yet whether it is a call."""
        may_begin = self._scanned < MAX_HELD_CHARS
        if may_begin and (head := _HEAD.match(self._buffer, 0, MAX_HELD_CHARS)):
            name = json.loads(f'"{head[1]}"')
            if not self._is_tool(name):
                return self._fail()
            self._start_call(name)
            self._buffer, self._scanner = self._buffer[head.end() :], JsonScanner()
            self._state = self._in_arguments
            return True
        if may_begin and self._is_another():
            return self._fail()
        for at in range(self._scanned, len(self._buffer)):
            if not self._scanner.push(self._buffer[at]):
                return self._fail()
            if self._scanner.done:
                return self._whole_call(at + 1)
        self._scanned = len(self._buffer)
        return self._fail() if self._final else False

    def _is_another(self) -> bool:
        """An object that is seen to be no call by its first member."""
        key, name = (each.match(self._buffer, 0, MAX_HELD_CHARS) for each in (_FIRST_KEY, _FIRST_NAME))
        return (key is not None and key[1] not in _KEYS) or (name is not None and not self._is_tool(name[1]))

    def _whole_call(self, end: int) -> bool:
        """Reads a whole call, for members in another order than usual."""
        call = _call_of(self._buffer[:end])
        if call is None or not self._is_tool(call[0]):
            return self._fail()
        self._buffer = self._buffer[end:]
        self._start_call(call[0])
        self._arguments(call[1])
        self._state = self._after_call
        return True

    def _in_arguments(self) -> bool:
        text, scanner = self._buffer, self._scanner
        passed: list[str] = []
        for at, char in enumerate(text):
            if not scanner.push(char):
                self._arguments("".join(passed))
                self._buffer, self._state = text[at:], self._in_malformed
                return True
            passed.append(json.dumps(char)[1:-1] if char < " " and scanner.in_string else char)
            if scanner.done:
                self._arguments("".join(passed))
                self._buffer, self._scanner = text[at + 1 :], JsonScanner.after_member()
                self._state = self._after_arguments
                return True
        self._arguments("".join(passed))
        self._buffer = ""
        return False

    def _in_malformed(self) -> bool:
        """Arguments that are no JSON are passed on to the region's end, but for the brace that closes the call."""
        close = self._region.close
        at = self._buffer.find(close) if close else -1
        over = at >= 0 or self._final
        body = self._buffer[:at] if at >= 0 else self._buffer
        keep = 0 if over or not close else overlap(body, close)
        sure = body[: end_of(body[: len(body) - keep], SPACE + "}")]
        if over:
            end = body[len(sure) :].rstrip(SPACE).removesuffix("}").rstrip(SPACE)
            self._arguments(sure + end)
            self._buffer = self._buffer[at + len(close) :] if at >= 0 else ""
            self._state = self._in_text
            return True
        self._arguments(sure)
        self._buffer = self._buffer[len(sure) :]
        return False

    def _after_arguments(self) -> bool:
        """Reads to the end of the call's object; a missing closing brace is tolerated."""
        for at, char in enumerate(self._buffer):
            if self._scanner.push(char) and not self._scanner.done:
                continue
            self._buffer = self._buffer[at + self._scanner.done :]
            self._state = self._after_call
            return True
        self._buffer = ""
        return self._ended()

    def _after_call(self) -> bool:
        """Another call, the region's end, or text."""
        self._buffer = self._buffer.lstrip(SPACE)
        close = self._region.close
        if not self._buffer or (close.startswith(self._buffer) and close != self._buffer):
            return self._ended()
        if close and self._buffer.startswith(close):
            self._buffer, self._state = self._buffer[len(close) :], self._in_text
        elif self._listed and self._buffer[0] == "]":
            self._buffer, self._listed = self._buffer[1:], False
        elif self._buffer[0] in ("," if self._listed else "" if close else ",;"):
            self._held, self._buffer, self._state = self._buffer[0], self._buffer[1:], self._before_call
        elif self._buffer[0] == "{":
            self._state = self._before_call
        else:
            self._state = self._in_text
        return True

    def _ended(self) -> bool:
        if self._final:
            self._buffer, self._state = "", self._in_text
        return self._final

    def _fail(self) -> bool:
        """Handles text that turned out to be no call: the held part is emitted as text, and the rest is read again."""
        if not self._held:
            self._held, self._buffer = self._buffer[:1], self._buffer[1:]
        self._text(self._held)
        self._held = ""
        self._state = self._in_text
        return True

    def _hold_space(self) -> None:
        rest = self._buffer.lstrip(SPACE)
        self._held += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest

    def _is_tool(self, name: str) -> bool:
        return name.isprintable() and bool(name) and (name in self._names or not self._region.known_names_only)

    def _start_call(self, name: str) -> None:
        self._held = self._space = ""
        self._emit(CallStart(self._calls, new_call_id(), name))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._emit(CallArguments(self._calls - 1, text))

    def _text(self, text: str) -> None:
        """Emits text but for its last space, which waits: a call may follow."""
        text = self._space + text
        end = end_of(text)
        sure, self._space = text[:end], text[end:]
        if self._calls and not self._wrote:
            sure = sure.lstrip(SPACE)
        self._wrote = self._wrote or bool(sure.strip(SPACE))
        self._emit(Content(sure))

    def _emit(self, piece: Piece) -> None:
        if not isinstance(piece, Content) or piece.text:
            self._pieces.append(piece)


def _call_of(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of an object in one of the shapes that models write; None when it is no call."""
    try:
        value = json.loads(text, strict=False)
        if isinstance(value.get("function"), dict):
            value = value["function"]
        name = value.get("name", value.get("function"))
        arguments = value.get("arguments", value.get("parameters"))
        arguments = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
    except ValueError:  # a number of thousands of digits
        return None
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    return name, written if _is_unicode(written) else json.dumps(arguments)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Joins adjacent pieces of the same kind."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            merged[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            merged.append(piece)
    return merged
