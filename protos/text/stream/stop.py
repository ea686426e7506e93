"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, and holds back only what could still become one.

    The first stop string is the one that is complete first; of several that are complete at once, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._matched: str | None = None

    def push(self, delta: str) -> tuple[str, str | None]:
        """Returns (the text that is safe to show, the stop string that was found or None). Nothing comes after a
        match."""
        if self._matched is not None:
            return "", self._matched
        text = self._held + delta
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, at = min(found)
            self._matched, self._held = text[at:end], ""
            return text[:at], self._matched
        pending = self._pending(text)
        self._held = text[pending:]
        return text[:pending], None

    def finish(self) -> str:
        """Returns the text held back, at the end of an output without a match."""
        text, self._held = self._held, ""
        return text

    def _pending(self, text: str) -> int:
        """Returns the start of the longest suffix that is the beginning of some stop string (len(text): nowhere)."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            suffix = text[start:]
            if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in self._stops):
                return start
        return len(text)
