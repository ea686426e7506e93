"""JSON that arrives in pieces: where a value ends, and the first character that cannot belong to it."""

from __future__ import annotations

import re

SPACE = " \t\r\n"

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NUMBER_SO_FAR = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*)?(?:(?<=\d)[eE][+-]?\d*)?)?")
_WORDS = ("true", "false", "null")
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"
MAX_DEPTH = 128
MAX_NUMBER_CHARS = 512


class JsonScanner:
    """A scanner of one JSON object or array. Control characters within strings are let through: models write them."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expects = "value"
        self._word = ""
        self._hex_left = 0
        self.done = False

    @classmethod
    def after_member(cls) -> JsonScanner:
        """Continues in an object, behind the value of one of its members."""
        scanner = cls()
        scanner._stack, scanner._expects = ["}"], "comma"
        return scanner

    @property
    def in_string(self) -> bool:
        return self._expects in ("string", "key string", "escape", "key escape")

    def push(self, char: str) -> bool:
        """Reads a character; returns False when the value cannot continue with it; nothing is pushed after that, nor
        after `done`."""
        if self.in_string:
            return self._in_string(char)
        if self._word:
            if char not in SPACE and char not in ",]}":
                self._word += char
                return _may_become_word(self._word)
            if not _is_word(self._word):
                return False
            self._word, self._expects = "", "comma"
        return char in SPACE or self._structure(char)

    def _in_string(self, char: str) -> bool:
        prefix = "key " if self._expects.startswith("key") else ""
        if self._hex_left:
            self._hex_left -= 1
            return char in _HEX
        if self._expects.endswith("escape"):
            self._expects = f"{prefix}string"
            self._hex_left = 4 if char == "u" else 0
            return char == "u" or char in _ESCAPES
        if char == "\\":
            self._expects = f"{prefix}escape"
        elif char == '"':
            self._expects = "colon" if prefix else "comma"
        return True

    def _structure(self, char: str) -> bool:
        expects = self._expects
        if expects == "colon":
            self._expects = "value"
            return char == ":"
        if expects == "comma" and char == ",":
            self._expects = "key" if self._stack[-1] == "}" else "value"
            return True
        if expects in ("comma", "first key", "first value") and char == self._stack[-1]:
            self._stack.pop()
            self._expects, self.done = "comma", not self._stack
            return True
        if expects in ("key", "first key"):
            self._expects = "key string"
            return char == '"'
        return expects in ("value", "first value") and self._value(char)

    def _value(self, char: str) -> bool:
        if char in "{[":
            self._stack.append("}" if char == "{" else "]")
            self._expects = "first key" if char == "{" else "first value"
            return len(self._stack) <= MAX_DEPTH
        if not self._stack:
            return False
        if char == '"':
            self._expects = "string"
            return True
        self._word = char
        return _may_become_word(char)


def _may_become_word(text: str) -> bool:
    if len(text) > MAX_NUMBER_CHARS:
        return False
    return any(word.startswith(text) for word in _WORDS) or _NUMBER_SO_FAR.fullmatch(text) is not None


def _is_word(text: str) -> bool:
    return text in _WORDS or _NUMBER.fullmatch(text) is not None
