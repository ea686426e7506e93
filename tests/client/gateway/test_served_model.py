"""The name that requests call the model by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allspan.client.gateway.served_model import ServedModel
from allspan.protos.api.errors import ModelNotFound
from allspan.protos.text import SamplingDefaults

MODEL = ServedModel("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", 2048, 49152, SamplingDefaults({}, "nothing"), 0)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "SmolLM2-135M-Instruct",
        "SMOLLM2-135M-INSTRUCT",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "smollm2-135m-instruct:latest",
    ],
)
def test_a_request_may_write_the_served_name_in_any_case_with_org_and_tag(name: str) -> None:
    MODEL.check_name(name)


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct ", "SmolLM2-135M-Instruct:q4"])
def test_another_name_is_refused_with_the_served_one(name: str) -> None:
    with pytest.raises(
        ModelNotFound, match=f"model '{name}' is not served here, this server has 'SmolLM2-135M-Instruct'"
    ):
        MODEL.check_name(name)


def test_of_several_names_the_one_that_is_meant_is_found() -> None:
    model = replace(MODEL, name="Org/Big", aliases=("gpt-4o",))
    assert [model.find_name(name) for name in ("org/big", "BIG:latest", "GPT-4o")] == ["Org/Big", "Org/Big", "gpt-4o"]
    with pytest.raises(ModelNotFound, match="this server has 'Org/Big' and 'gpt-4o'"):
        model.find_name("Other/Big")
