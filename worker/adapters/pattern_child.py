"""The process that matches the regular expressions of an adapter's config with names of modules: one may never end.

A question is {"patterns": {name: keys}, "modules", "within_s"}. An answer has for each name the first key that matches
each module (null: none), or "problem". Started by `peft_config`, with the bytes of memory that it may take.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence

from allspan.protos.text.helper_child import limit_memory, questions, reply

_SLACK_S = 1.0


def matched(keys: Sequence[str], modules: Sequence[str]) -> list[str | None]:
    """Returns the first key that matches the last parts of each module's name, as PEFT has it. Raises ValueError for a
    key that is no regular expression."""
    patterns: dict[str, re.Pattern[str]] = {}
    for key in keys:
        try:
            patterns[key] = re.compile(rf"(.*\.)?({key})$")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{key[:80]!r} is no regular expression: {error}") from None
    return [next((key for key, each in patterns.items() if each.match(module)), None) for module in modules]


def main() -> None:
    """Answers until standard input ends."""
    limit_memory(int(sys.argv[1]))
    asked = questions()
    next(asked, None)  # the greeting
    reply({})
    for question in asked:
        # Should the parent be gone when an expression does not end.
        signal.setitimer(signal.ITIMER_REAL, question["within_s"] + _SLACK_S)
        found: dict[str, list[str | None] | str] = {}
        for name, keys in question["patterns"].items():
            try:
                found[name] = matched(keys, question["modules"])
            except (ValueError, MemoryError) as error:
                found = {"problem": f"{name}: {error}"}
                break
        reply(found)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


if __name__ == "__main__":
    main()
