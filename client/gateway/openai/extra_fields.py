"""The fields of a request that its endpoint does not have: most are ignored, with a line in the log; refused are those
that would change the answer, and those that are probably a field of the endpoint, misspelt."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from allspan.protos.api.errors import InvalidRequest

HARMLESS = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)
"""Fields that change nothing here: who asks, how it is billed or kept, how it might be faster."""
_ADAPTER = "give the adapter's name as the model"
NEVER: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "only text is spoken here"),
    "function_call": (("none",), "it is obsolete: use tool_choice"),
    "functions": (([],), "it is obsolete: use tools"),
    "length_penalty": ((1,), "there is no beam search; best_of takes the likeliest of several outputs"),
    "lora": (([],), _ADAPTER),
    "lora_path": ((), _ADAPTER),
    "modalities": ((["text"],), "only text is spoken here"),
    "suffix": (("",), "write the prompt with the model's own fill-in-the-middle tokens instead"),
    "thinking_token_budget": ((), "bound thinking and answer together with max_tokens"),
    "use_beam_search": ((False,), "there is no beam search; best_of takes the likeliest of several outputs"),
    "verbosity": (("medium",), "ask for it in a message"),
    "web_search_options": ((), "nothing is fetched; offer a tool that searches"),
}
"""Fields that this server does not do → the values with which they change nothing; why, and what does instead."""
REFUSED = {
    "chat_template": "a template comes with the model or from the server's --chat-template, never from a request",
    "documents": "give them in a message's content",
}

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")
_STOPS = ("stop", "stop_sequences")
_ALIKE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*_LIMITS, "max_new_tokens", "max_length", "max_tokens_to_sample"), _LIMITS),
    **dict.fromkeys((*_STOPS, "stop_strings"), _STOPS),
}
"""Other APIs' names → what a field of that meaning is called here or there: without it an output might not end."""
_OTHERS = frozenset(("stream_id", "temperature_last", "timeout"))
"""Fields of other APIs that are close to one here, and mean something else."""
_MIN_CHARS, _CLOSE = 3, 0.8
"""The length of a name from which, and the similarity above which, it is taken for another one misspelt."""
_MAX_TOLD = 256
_MAX_EXTRAS = 64
"""Fields of one request that an endpoint does not have: each is compared with those that it has."""

logger = logging.getLogger("allspan.gateway")
_told: set[str] = set()


def check_extras(extras: Mapping[str, Any], known: Mapping[str, bool], strict: bool) -> None:
    """Checks the fields that an endpoint does not have; InvalidRequest names one that is refused.

    `known`: the endpoint's own fields, and whether the request has them. `strict`: refuses every unknown field.
    """
    if len(extras) > _MAX_EXTRAS:
        raise InvalidRequest(f"this endpoint does not know {len(extras)} of the fields, must be at most {_MAX_EXTRAS}")
    for name, value in extras.items():
        if name in HARMLESS:
            continue
        if name in REFUSED:
            raise InvalidRequest(f"{name} is not accepted: {REFUSED[name]}", name)
        if name in NEVER:
            check_neutral(name, value, NEVER)
            continue
        if meant := _meant(name, known):
            raise InvalidRequest(
                f"{_short(name)} is not a field that this endpoint knows: did you mean {meant}?", name[:64]
            )
        if strict:
            raise InvalidRequest(f"{_short(name)} is not a field that this endpoint knows", name[:64])
        _tell(name)


def check_neutral(name: str, value: Any, table: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """Raises InvalidRequest unless the value is one with which the field changes nothing. `table`: as NEVER is."""
    accepted, why = table[name]
    neutral = [item for item in accepted if item == value and isinstance(item, bool) == isinstance(value, bool)]
    if value is not None and not neutral:
        raise InvalidRequest(f"{name} is {_short(value)}: {why}", name)


def _meant(name: str, known: Mapping[str, bool]) -> str:
    """Returns the field that the request leaves out and this one is likely to be; "" for none."""
    if same := [other for other in _ALIKE.get(name, ()) if other in known]:
        return "" if any(known[other] for other in same) else same[0]
    plain = _plain(name)
    if len(plain) < _MIN_CHARS or name in _OTHERS:
        return ""
    absent = {_plain(other): other for other, is_given in known.items() if not is_given and other not in HARMLESS}
    close = difflib.get_close_matches(plain, absent, n=3, cutoff=_CLOSE + 0.001)
    begins = [other for other in close if other[0] == plain[0]]
    return absent[(begins or close)[0]] if close else ""


def _plain(name: str) -> str:
    return name[:64].lower().replace("_", "").replace("-", "")


def _tell(name: str) -> None:
    """Logs an ignored name once; of names that callers make up, a bounded number."""
    if name not in _told and len(_told) < _MAX_TOLD:
        _told.add(name)
        text = "requests have the field %s, which this server does not know and ignores (--strict refuses it)"
        logger.warning(text, _short(name))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
