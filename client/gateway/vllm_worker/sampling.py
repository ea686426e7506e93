"""Sampling fields of `vllm.grpc.engine` as the gateway's own, with proto3's zeros read as that contract reads them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from allspan.client.gateway.admission.prompts import PromptOptions
from allspan.protos import vllm_worker_pb2 as pb
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.api.grammar import Grammar
from allspan.protos.api.sampling import SAMPLING_FIELDS
from allspan.protos.text.stream.text_stream import TextOptions

_MOST = 2**31 - 1
_NEUTRAL = {name: default for name, (default, _) in SAMPLING_FIELDS.items()}
"""A router has filled the model's defaults in already, so that none is added here."""


def sampling_fields(given: pb.SamplingParams, room: int) -> dict[str, Any]:
    """Returns all fields of `SamplingParams`. `room`: most new tokens; a larger `max_tokens` is taken as this, as
    vLLM's engine does. InvalidRequest names the field."""
    fields = _NEUTRAL | {
        "temperature": _decimal(given.temperature) if given.HasField("temperature") else 1.0,
        "top_p": _decimal(given.top_p) or 1.0,
        "top_k": min(given.top_k, _MOST),
        "min_p": _decimal(given.min_p),
        "frequency_penalty": _decimal(given.frequency_penalty),
        "presence_penalty": _decimal(given.presence_penalty),
        "repetition_penalty": _decimal(given.repetition_penalty) or 1.0,
        "max_tokens": min(given.max_tokens, room) if given.HasField("max_tokens") else room,
        "min_tokens": min(given.min_tokens, _MOST),
        "stop": tuple(given.stop),
        "stop_token_ids": tuple(given.stop_token_ids),
        "ignore_eos": given.ignore_eos,
        "logit_bias": {token: _decimal(bias) for token, bias in given.logit_bias.items()},
        "grammar": _grammar(given),
    }
    for name in ("logprobs", "prompt_logprobs"):
        if given.HasField(name):
            fields[name] = getattr(given, name)
    if given.HasField("seed") and given.seed != -1:
        fields["seed"] = given.seed % 2**64
    return fields


def prompt_options(given: pb.SamplingParams) -> PromptOptions:
    last = given.truncate_prompt_tokens if given.HasField("truncate_prompt_tokens") else None
    return PromptOptions(last_tokens=last, max_tokens=given.max_tokens or None)


def text_options(given: pb.SamplingParams) -> TextOptions:
    """The router makes the text; here it is made only to find stop strings."""
    return TextOptions(given.skip_special_tokens, given.include_stop_str_in_output, bool(given.stop))


def _decimal(value: float) -> float:
    """Returns the shortest decimal that is this 32-bit number: 0.7 and not 0.699999988, so that a request through a
    router draws the tokens that it draws without one."""
    return float(str(np.float32(value)))


def _grammar(given: pb.SamplingParams) -> Grammar | None:
    kind = given.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not given.json_object):
        return None
    if kind == "structural_tag":
        raise InvalidRequest(
            "sampling_params.structural_tag is not supported, only json_schema, regex, grammar, json_object and choice",
            "sampling_params.structural_tag",
        )
    text = "" if kind == "json_object" else getattr(given, kind)
    if kind == "choice":
        text = json.dumps(list(given.choice.choices), ensure_ascii=False)
    try:
        return Grammar(kind, text)
    except InvalidRequest as error:
        place = f"sampling_params.{kind}"
        raise InvalidRequest(error.message.replace("grammar", place, 1), place) from None
