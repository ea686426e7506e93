"""The name that requests call the model by."""

from __future__ import annotations

import pytest

from allspan.client.gateway.served_model import ServedModel
from allspan.protos.api.errors import ModelNotFound
from allspan.protos.text import GenerationDefaults

MODEL = ServedModel("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", 2048, 49152, GenerationDefaults(), 0)


@pytest.mark.parametrize("name", ["", "SmolLM2-135M-Instruct", "smollm2-135m-instruct", "SMOLLM2-135M-INSTRUCT"])
def test_a_request_may_write_the_served_name_in_any_case(name: str) -> None:
    MODEL.check_name(name)


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct "])
def test_another_name_is_refused_with_the_served_one(name: str) -> None:
    with pytest.raises(
        ModelNotFound, match=f"model '{name}' is not served here, this server has 'SmolLM2-135M-Instruct'"
    ):
        MODEL.check_name(name)
