"""The sampling values that publishers recommend for families of models, for files that do not carry them.

The rows were written from memory of the pages that they name: docs/http.md, "Sampling defaults", says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class FamilyDefaults:
    """The values of the models that one pattern finds."""

    names: str
    """A regular expression, searched for in a model's names, in lower case with hyphens for spaces and underscores."""
    values: Mapping[str, Any]
    """Fields of SamplingParams; those left out are neutral."""
    source: str
    """Where the values are published, as the log says it."""
    architecture: str = ""
    """The architecture of models whose names say nothing, such as a fine-tuned model's; empty for none."""


KNOWN: tuple[FamilyDefaults, ...] = (
    # huggingface.co/deepseek-ai/DeepSeek-R1, "Usage Recommendations", and its generation_config.json
    FamilyDefaults(r"deepseek-r1|r1-distill", {"temperature": 0.6, "top_p": 0.95}, "the model card of DeepSeek-R1"),
    # huggingface.co/Qwen/QwQ-32B, "Usage Guidelines"
    FamilyDefaults(r"\bqwq", {"temperature": 0.6, "top_p": 0.95, "top_k": 40}, "the model card of QwQ-32B"),
    # huggingface.co/Qwen/Qwen3-4B-Instruct-2507, "Best Practices"
    FamilyDefaults(
        r"qwen-?3.*instruct",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        "the model card of Qwen3-Instruct-2507",
    ),
    # huggingface.co/Qwen/Qwen3-8B, "Best Practices", thinking mode; its generation_config.json
    FamilyDefaults(
        r"qwen-?3", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}, "the model card of Qwen3", architecture="qwen3"
    ),
    # huggingface.co/Qwen/Qwen2.5-0.5B-Instruct and Qwen2.5-1.5B-Instruct, generation_config.json
    FamilyDefaults(
        r"qwen-?2.*\b(0\.5|1\.5)b",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
        "the generation_config.json of Qwen2.5-0.5B-Instruct",
    ),
    # huggingface.co/Qwen/Qwen2.5-7B-Instruct, generation_config.json
    FamilyDefaults(
        r"qwen-?2",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        "the generation_config.json of Qwen2.5-7B-Instruct",
        architecture="qwen2",
    ),
    # huggingface.co/HuggingFaceTB/SmolLM3-3B, "How to use"
    FamilyDefaults(r"smollm-?3", {"temperature": 0.6, "top_p": 0.95}, "the model card of SmolLM3"),
    # The smallest one repeats itself without a penalty: docs/measurements.md, "Sampling defaults".
    FamilyDefaults(
        r"smollm-?2-135m",
        {"temperature": 0.2, "top_p": 0.9, "frequency_penalty": 0.2},
        "the model card of SmolLM2, with a penalty against its repetitions",
    ),
    # huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, "How to use"; the same for SmolLM
    FamilyDefaults(r"smollm", {"temperature": 0.2, "top_p": 0.9}, "the model card of SmolLM2"),
    # huggingface.co/TinyLlama/TinyLlama-1.1B-Chat-v1.0, "How to use"
    FamilyDefaults(r"tinyllama", {"temperature": 0.7, "top_p": 0.95, "top_k": 50}, "the model card of TinyLlama"),
    # huggingface.co/mistralai/Mistral-Nemo-Instruct-2407: "we recommend to use a temperature of 0.3"
    FamilyDefaults(r"ministral|mistral-nemo", {"temperature": 0.3}, "the model card of Mistral-Nemo"),
    # huggingface.co/mistralai/Mistral-Small-24B-Instruct-2501: "a relatively low temperature, such as 0.15"
    FamilyDefaults(r"mistral-small|devstral", {"temperature": 0.15}, "the model card of Mistral-Small"),
    # docs.mistral.ai: the default temperature of open-mistral-7b in Mistral's API
    FamilyDefaults(r"mistral", {"temperature": 0.7}, "the default of Mistral's API", architecture="mistral"),
    # huggingface.co/google/gemma-3-4b-it, generation_config.json
    FamilyDefaults(
        r"gemma-?3",
        {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        "the generation_config.json of gemma-3-4b-it",
        architecture="gemma3",
    ),
    # huggingface.co/THUDM/GLM-Z1-9B-0414, "Model Usage Guidelines"
    FamilyDefaults(r"glm-?z1", {"temperature": 0.6, "top_p": 0.95, "top_k": 40}, "the model card of GLM-Z1"),
    # huggingface.co/THUDM/glm-4-9b-chat, generation_config.json; the same in the code of ChatGLM2 and 3
    FamilyDefaults(
        r"chatglm|\bglm-?4\b",
        {"temperature": 0.8, "top_p": 0.8},
        "the generation_config.json of glm-4-9b-chat",
        architecture="chatglm",
    ),
    # huggingface.co/LGAI-EXAONE/EXAONE-4.0-32B, "Usage Guideline", reasoning
    FamilyDefaults(r"exaone-?4", {"temperature": 0.6, "top_p": 0.95}, "the model card of EXAONE-4.0"),
    # huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct, "Model Usage"
    FamilyDefaults(r"seed-?oss", {"temperature": 1.1, "top_p": 0.95}, "the model card of Seed-OSS"),
    # huggingface.co/CohereLabs/c4ai-command-r-v01, "Usage"
    FamilyDefaults(r"command-?r|\baya\b", {"temperature": 0.3}, "the model card of Command R"),
    # huggingface.co/meta-llama/Llama-3.1-8B-Instruct and Llama-2-7b-chat-hf, generation_config.json
    FamilyDefaults(
        r"llama-?[23]", {"temperature": 0.6, "top_p": 0.9}, "the generation_config.json of Llama-3.1-8B-Instruct"
    ),
)
"""The first row that fits counts; a row that a name finds goes before one that an architecture finds."""

OTHERS = FamilyDefaults(
    "",
    MappingProxyType({"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}),
    "the defaults of llama-server, as nothing is known of this model",
)
"""The values of all other models: those that llama-server's help names."""


_BASE = r"\bbase\b"
"""Finds the names of base models that have a chat template all the same, such as Qwen3-8B-Base."""


def known_defaults(names: Iterable[str], architecture: str, can_chat: bool = True) -> FamilyDefaults:
    """Returns the row of a model that goes by these names, else that of its architecture, else OTHERS. The rows are
    about models made for chat: OTHERS for one without a chat template (`can_chat` false), and for a base model."""
    spelt = [re.sub(r"[\s_]+", "-", name.lower()) for name in names]
    if not can_chat:
        return replace(OTHERS, source="the defaults of llama-server, as the model has no chat template")
    if any(re.search(_BASE, name) for name in spelt):
        return replace(OTHERS, source="the defaults of llama-server, as the model's name is that of a base model")
    for row in KNOWN:
        if any(re.search(row.names, name) for name in spelt):
            return row
    return next((row for row in KNOWN if row.architecture and row.architecture == architecture), OTHERS)
