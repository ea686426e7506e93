"""What a small model is asked while answers for a draft head are made: beginnings of user turns that it ends itself,
and Python functions found on the machine. See eagle3_answers.py."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Names of people and things, and beginnings of what is asked."""
PUPIL = (
    "Grade-school maths word problems about everyday life, with names and numbers. Each takes some steps of arithmetic "
    "and ends with a question."
)
EXERCISES = (
    "The user writes programming exercises. Each message of the user is the head of one Python function with type "
    "hints and a docstring that says what the function returns and has examples with >>>. It has no body."
)
PROGRAMMER = "The user is a programmer who works on {topic} and asks for code. Each message is one precise request."
CURIOUS = "The user asks short questions about {topic} in programming, mathematics, science and everyday life."


@dataclass(frozen=True)
class Ask:
    """A user turn to be ended by the model (`system` is then what it is told first), or a whole one."""

    text: str
    system: str | None = None
    finish: Callable[[str], str | None] = str.strip
    """Makes the turn of the whole text; None: it is of no use."""
    limit: int = 200
    """Tokens that the model adds, at most."""
    is_cut: bool = False
    """`finish` cuts the text, which need not have come to its end."""


def asks(seed: int) -> Iterator[Ask]:
    """Without an end: two fifths maths, two fifths exercises and requests for code, the others about code that lies
    here and about anything."""
    draw = random.Random(seed)
    functions = _functions(draw)
    while True:
        kind = draw.random()
        if kind < 0.42:
            yield _problem(draw)
        elif kind < 0.62:
            yield _exercise(draw)
        elif kind < 0.82:
            yield Ask(draw.choice(WORDS["requests"]), PROGRAMMER.format(topic=draw.choice(WORDS["topics"])))
        elif kind < 0.95:
            yield _about(draw, next(functions))
        else:
            yield Ask(draw.choice(WORDS["chat"]), CURIOUS.format(topic=draw.choice(WORDS["topics"])))


def _problem(draw: random.Random) -> Ask:
    n, m = draw.sample(WORDS["names"], 2)
    words = {
        "n": n,
        "m": m,
        "p": draw.choice(WORDS["people"]),
        "q": draw.choice(WORDS["places"]),
        "k": draw.randint(2, 60),
    }
    return Ask(draw.choice(WORDS["maths"]).format(**words), PUPIL, _question, 128, True)


def _exercise(draw: random.Random) -> Ask:
    name = f"{draw.choice(WORDS['verbs'])}_{draw.choice(WORDS['nouns'])}"
    imports = "from typing import List\n\n\n" if draw.random() < 0.4 else ""
    return Ask(f"{imports}def {name}({draw.choice(WORDS['arguments'])}", EXERCISES, _head)


def _about(draw: random.Random, code: str) -> Ask:
    head = _head(code) if draw.random() < 0.5 else None
    return Ask(head or f"{draw.choice(WORDS['about_code'])}\n\n```python\n{code}\n```")


def _question(text: str) -> str | None:
    """Up to the first question, if there are numbers in it."""
    asked, mark, _ = text.partition("?")
    return asked.strip() + mark if mark and any(each.isdigit() for each in asked) else None


def _head(text: str) -> str | None:
    """A function's head and docstring, as it lies before the body."""
    parts = text.split('"""', 2)
    return f'{parts[0]}"""{parts[1]}"""\n' if len(parts) == 3 and len(parts[1]) > 20 else None


def _functions(draw: random.Random) -> Iterator[str]:
    """Source of functions of the packages and the standard library that lie here, over and over; at least one."""
    paths = sysconfig.get_paths()
    files = sorted({each for key in ("purelib", "stdlib") for each in Path(paths[key]).glob("*/**/*.py")})
    while True:
        draw.shuffle(files)
        for file in files:
            try:
                text = file.read_text(encoding="utf-8")
                found = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef)]
            except (OSError, SyntaxError, ValueError, RecursionError):
                continue
            for each in draw.sample(found, min(3, len(found))):
                code = ast.get_source_segment(text, each)
                if code is not None and 120 < len(code) < 1200 and code.isascii():
                    yield code
        yield "def double(number):\n    return 2 * number"
