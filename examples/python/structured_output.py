"""Structured output: JSON that follows a schema, a choice, and a regular expression.

python examples/python/structured_output.py [MODEL]
"""

from __future__ import annotations

import json
import sys

from allspan import Engine, Grammar, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main(model: str) -> None:
    grammars = {
        "Describe a person as JSON: ": Grammar("json_schema", json.dumps(PERSON)),
        "Is the sky blue? Answer: ": Grammar("choice", json.dumps(["yes", "no", "perhaps"])),
        "A date in ISO format: ": Grammar("regex", r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"),
    }
    with Engine(model) as engine:
        for prompt, grammar in grammars.items():
            params = SamplingParams(max_tokens=64, temperature=0.0, grammar=grammar)
            print(prompt + engine.generate(prompt, params)[0].text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct")
