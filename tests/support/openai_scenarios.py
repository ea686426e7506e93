"""What the golden transcripts beyond chat ask: completions, responses, tokens, models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from allspan.protos.api.errors import Unavailable
from support.chat_scenarios import CALL, FUNCTION, THINKING
from support.scripted_engine import Script

TOOL: dict[str, Any] = {"type": "function", **FUNCTION, "strict": False}
CITY: dict[str, Any] = {
    "type": "json_schema",
    "name": "place",
    "strict": True,
    "schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
SCRIPTS: dict[str, Script] = {
    "[plain]": ("Hello", " wörld", ", bye."),
    "[other]": ("Good", "bye"),
    "[json]": ('{"city"', ': "Paris"}'),
    "[tools]": ("Let me", " see.\n\n", *CALL),
    "[thinking]": THINKING,
    "[down]": Unavailable("rank 1 (pid 7 on here) died: signal 9"),
    "[breaks off]": ("Hello", Unavailable("rank 1 (pid 7 on here) died: signal 9")),
}
SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "thinking": {"reasoning_parser": "qwen3"}}


@dataclass(frozen=True)
class Scenario:
    """One call of an SDK: of its method `call`, or POST of a path. `extra`: what the Python SDK sends as extra_body."""

    name: str
    call: str
    request: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    settings: str = "plain"


def _completion(name: str, prompt: Any = "[plain]", extra: dict[str, Any] | None = None, **fields: Any) -> Scenario:
    request = {"model": "tiny", "prompt": prompt, "max_tokens": 20, **fields}
    return Scenario(f"completion-{name}", "completions.create", request, extra or {})


def _response(
    name: str, input_: Any = "[plain]", call: str = "create", settings: str = "plain", **fields: Any
) -> Scenario:
    return Scenario(
        f"response-{name}", f"responses.{call}", {"model": "tiny", "input": input_, **fields}, settings=settings
    )


def _streamed(scenario: Scenario) -> Scenario:
    request = {**scenario.request, "stream": True}
    return Scenario(f"{scenario.name}-stream", scenario.call, request, scenario.extra, scenario.settings)


_BOTH = (
    _completion("plain"),
    _completion("cut", max_tokens=3),
    _completion("stop", stop=[", b"], extra={"include_stop_str_in_output": True}),
    _completion("several", prompt=["[plain]", "[other]"], n=2, seed=7),
    _completion("logprobs", logprobs=2, max_tokens=3),
    _completion("echo", prompt="é[plain]", echo=True, max_tokens=3),
    _completion("echo-logprobs", prompt="é[plain]", echo=True, logprobs=1, max_tokens=3),
    _completion("token-ids", prompt=list(b"[plain]"), max_tokens=3, extra={"return_token_ids": True}),
    _completion("breaks-off", prompt="[breaks off]"),
    _response("plain", instructions="Be brief.", metadata={"who": "me"}, temperature=0.5, store=False),
    _response("incomplete", max_output_tokens=3),
    _response("items", [{"role": "user", "content": [{"type": "input_text", "text": "[plain]"}]}]),
    _response("tools", "[tools]", tools=[TOOL]),
    _response("json", "[json]", text={"format": CITY}),
    _response("thinking", "[thinking]", settings="thinking"),
    _response("logprobs", include=["message.output_text.logprobs"], top_logprobs=1, max_output_tokens=3),
    _response("breaks-off", "[breaks off]"),
)
SCENARIOS = (
    *_BOTH,
    *map(_streamed, _BOTH),
    _streamed(_completion("usage", stream_options={"include_usage": True})),
    _completion("best-of", n=2, best_of=3, max_tokens=3),
    _completion("score", prompt="[plain]", echo=True, logprobs=0, max_tokens=0),
    _completion("down", prompt="[down]"),
    _completion("bad-field", temperature=-1),
    _completion("suffix", suffix="x"),
    _completion("unknown-model", model="other"),
    _response("text", call="text"),
    _response("helper", call="final"),
    _response("bad-field", max_output_tokens=0),
    _response("not-kept", previous_response_id="resp_0"),
    _response("background", background=True),
    _response("bad-schema", text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "thing"}}}),
    Scenario("response-retrieve-unknown", "responses.retrieve", {"response_id": "resp_0"}),
    Scenario("response-count", "responses.input_tokens.count", {"model": "tiny", "input": "[plain]"}),
    Scenario("tokenize", "POST /tokenize", {"model": "tiny", "prompt": "Hé", "return_token_strs": True}),
    Scenario("tokenize-chat", "POST /tokenize", {"messages": [{"role": "user", "content": "x"}]}),
    Scenario("tokenize-nothing", "POST /tokenize", {"model": "tiny"}),
    Scenario("detokenize", "POST /detokenize", {"model": "tiny", "tokens": [72, 195, 169]}),
    Scenario("detokenize-unknown-token", "POST /detokenize", {"tokens": [72, 1000]}),
    Scenario("models", "models.list", {}),
    Scenario("model", "models.retrieve", {"model": "tiny"}),
    Scenario("model-unknown", "models.retrieve", {"model": "other"}),
)
