"""Foreign configs become specs, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allspan.protos.api.errors import CheckpointError, ConfigError, ModelNotFound
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.engine.setup import ends_of
from allspan.worker.load.loader import context_length, prepare, weight_dtype
from allspan.worker.load.registry import find_model
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.rope import RotarySpec
from allspan.worker.models.spec import ModelSpec

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
GEMMA3 = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 2}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}


def rotary_of(spec: ModelSpec) -> RotarySpec:
    attention = spec.layers[0].attention
    assert isinstance(attention, Gqa)
    assert attention.rotary is not None
    return attention.rotary


def spec_of(folder: Path, values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return find_model(str(folder)).spec


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


@pytest.mark.parametrize("scaling", [{}, SCALING], ids=["plain", "llama3"])
def test_rope_theta_and_rope_parameters_read_alike(scaling: dict[str, Any], tmp_path: Path) -> None:
    flat = spec_of(tmp_path, LLAMA | {"rope_scaling": scaling or None})
    bare = without(LLAMA, "rope_theta")
    nested = spec_of(tmp_path, bare | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0} | scaling})
    both = spec_of(tmp_path, LLAMA | {"rope_parameters": {"rope_theta": 500000.0} | scaling})
    assert flat == nested == both
    assert rotary_of(flat).theta == 500000.0
    assert rotary_of(flat).kind == ("llama3" if scaling else "default")


def test_the_old_key_type_names_a_scaling_as_well(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (rotary_of(spec).kind, rotary_of(spec).factor) == ("linear", 2.0)


@pytest.mark.parametrize(
    ("sections", "is_interleaved", "axes"),
    [([2, 3, 3], False, (0, 0, 1, 1, 1, 2, 2, 2)), ([4, 2, 2], True, (0, 1, 2, 0, 1, 2, 0, 0))],
)
def test_sections_say_which_position_turns_each_pair(
    sections: list[int], is_interleaved: bool, axes: tuple[int, ...], tmp_path: Path
) -> None:
    scaling = {"type": "mrope", "mrope_section": sections, "mrope_interleaved": is_interleaved}
    rotary = rotary_of(spec_of(tmp_path, LLAMA | {"head_dim": 16, "rope_scaling": scaling}))
    assert (rotary.kind, rotary.axes, rotary.num_positions) == ("default", axes, 3)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_names_of_the_dtype_are_read(key: str, tmp_path: Path) -> None:
    assert spec_of(tmp_path, LLAMA | {key: "bfloat16"}).dtype == "bfloat16"


def test_eos_ids_of_both_files_are_merged(tmp_path: Path) -> None:
    def ends(values: dict[str, Any], generation: dict[str, Any] | None = None) -> tuple[int, ...]:
        return ends_of(ModelConfig(str(tmp_path), "x"), spec_of(tmp_path, values, generation))

    assert ends(LLAMA) == (2,)
    assert ends(LLAMA, {"eos_token_id": [7, 2, 9]}) == (2, 7, 9)
    assert ends(LLAMA | {"eos_token_id": [6, 5]}, {"eos_token_id": 6}) == (5, 6)
    assert ends(without(LLAMA, "eos_token_id"), {}) == ()


def test_a_null_head_dim_is_hidden_over_heads_and_a_number_is_itself(tmp_path: Path) -> None:
    assert spec_of(tmp_path, LLAMA | {"head_dim": None}).layers[0].attention.heads.unit == 16
    assert spec_of(tmp_path, LLAMA | {"head_dim": 24}).layers[0].attention.heads.unit == 24


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    spec = spec_of(tmp_path, LLAMA | {"model_type": "qwen2", "architectures": None, "rope_scaling": scaling})
    assert spec.max_position_embeddings == 32768


def windows_of(folder: Path, values: dict[str, Any]) -> list[int]:
    return [layer.attention.lifetime.window for layer in spec_of(folder, values).layers]


def test_a_sliding_window_is_that_of_its_layers_and_leaves_the_context(tmp_path: Path) -> None:
    mistral = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_hidden_layers": 2}
    spec = spec_of(tmp_path, mistral | {"sliding_window": 4096})
    assert spec.max_position_embeddings == 8192
    assert windows_of(tmp_path, mistral | {"sliding_window": 4096}) == [4096, 4096]
    for harmless in (None, 8192):
        assert windows_of(tmp_path, mistral | {"sliding_window": harmless}) == [0, 0]
    mixed = mistral | {"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]}
    assert windows_of(tmp_path, mixed) == [0, 4096]


def test_a_window_in_a_config_of_llama_is_read_by_nobody_as_in_transformers(tmp_path: Path) -> None:
    assert set(windows_of(tmp_path, LLAMA | {"sliding_window": 1024, "use_sliding_window": True})) == {0}


def test_qwen_ignores_its_window_unless_it_is_switched_on(tmp_path: Path) -> None:
    qwen = LLAMA | {"model_type": "qwen2", "architectures": None, "sliding_window": 1024, "max_window_layers": 1}
    qwen |= {"num_hidden_layers": 2}
    assert windows_of(tmp_path, qwen) == [0, 0]
    assert windows_of(tmp_path, qwen | {"use_sliding_window": True}) == [0, 1024]
    assert windows_of(tmp_path, qwen | {"use_sliding_window": True, "max_window_layers": 2}) == [0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba2"}, r"model_type 'mamba2' is not supported \(supported: llama, mistral, qwen2, qwen3"),
        ({"model_type": "gemma4"}, r"model_type 'gemma4' is not supported: it needs two head sizes.*supported: llama"),
        ({"model_type": "gemma3"}, r"text_config must be an object, got None"),
        (GEMMA3 | {"use_bidirectional_attention": True}, r"attention in both directions"),
        (GEMMA3 | {"layer_types": None, "sliding_window_pattern": [1, 0]}, r"sliding_window_pattern must be a number"),
        (GEMMA3 | {"sliding_window": -4}, r"sliding_window must be a positive integer, got -4"),
        (GEMMA3 | {"attn_logit_softcapping": -1.0}, r"attn_logit_softcapping must be a positive number, got -1.0"),
        ({"model_type": None}, r"model_type None is not supported"),
        ({"model_type": "bert"}, r"'bert' is not supported: it needs attention in both directions"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"'LlamaForSequenceClassification'.*LlamaForCausalLM"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            r"quantised checkpoint \(bitsandbytes\).*GGUF",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantised checkpoint \(hqq\)"),
        ({"compression_config": {"format": "pack-quantized"}}, r"quantised checkpoint"),
        ({"rope_scaling": {"type": "cubic", "factor": 2.0}}, r"rope type 'cubic' .*default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"longrope needs short_factor and long_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"low_freq_factor must be a positive number"),
        ({"rope_scaling": {"type": "linear"}}, r"factor must be a positive number, got None"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"each kind of layer"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not supported"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported \(supported: silu, swish, gelu_pytorch_tanh\)"),
        ({"num_key_value_heads": 3}, r"num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"hidden_size": 66}, r"hidden_size 66 is no multiple of num_attention_heads 4"),
        ({"hidden_size": "64"}, r"hidden_size must be a positive integer, got '64'"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers must be a positive integer, got 0"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps must be a positive number, got -1.0"),
        ({"dtype": "float8_e4m3fn"}, r"dtype 'float8_e4m3fn' is not supported"),
        ({"eos_token_id": "</s>"}, r"eos_token_id must be a token id"),
        ({"tie_word_embeddings": 1}, r"tie_word_embeddings must be true or false"),
        ({"rope_scaling": {"mrope_section": [8, 8]}}, r"mrope_section must be 3 numbers of pairs, got \[8, 8\]"),
        ({"rope_scaling": {"mrope_section": [2, 3, 2]}}, r"mrope_section has 7 pairs of elements, a head of \d+ turns"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        spec_of(tmp_path, LLAMA | changes)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_linear_attention_layers_are_refused(tmp_path: Path) -> None:
    mixed = LLAMA | {
        "model_type": "mistral",
        "architectures": None,
        "layer_types": ["full_attention", "linear_attention"],
    }
    with pytest.raises(CheckpointError, match=r"layer_types 'linear_attention'"):
        spec_of(tmp_path, mixed)


def test_an_old_quantised_folder_is_recognised_by_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "quant_method": "marlin"}')
    with pytest.raises(CheckpointError, match=r"quantize_config.json: quantised checkpoint \(marlin\)"):
        spec_of(tmp_path, LLAMA)


def test_a_path_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere: no such file or folder"):
        find_model(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"no config.json and no \*.gguf file"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read as JSON"):
        find_model(str(tmp_path))


def test_a_config_file_of_any_name_is_a_model_too(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA)
    (tmp_path / "config.json").rename(tmp_path / "shape-7b.json")
    assert find_model(str(tmp_path / "shape-7b.json")).spec == spec


def test_sparse_gemma_3_beside_images_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    nested = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]}
    spec = spec_of(tmp_path, nested)
    sizes = spec.vocab_size, spec.max_position_embeddings, spec.bos_token_id, spec.eos_token_ids
    assert sizes == (262208, 131072, 2, (1, 106))
    assert spec.tie_word_embeddings
    blocks = [layer.attention for layer in spec.layers if isinstance(layer.attention, Gqa)]
    assert [block.window for block in blocks[:12]] == [*[1024] * 5, 0, *[1024] * 5, 0]
    assert blocks[0].rotary == RotarySpec(1e4)
    assert blocks[5].rotary == RotarySpec(1e6, "linear", factor=8.0)
    assert {(block.num_heads, block.num_kv_heads, block.head_dim, block.scale) for block in blocks} == {
        (8, 4, 256, 1 / 16)
    }


def test_blocks_without_a_norm_before_them_are_refused_on_gpus(tmp_path: Path) -> None:
    values = LLAMA | {"model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LG"}
    blocks = [layer.attention for layer in spec_of(tmp_path, values).layers if isinstance(layer.attention, Gqa)]
    assert [(block.window, block.rotary is None) for block in blocks] == [(4096, False), (0, True)]
    config = ModelConfig(str(tmp_path), "x", device="cuda", dtype="bfloat16")
    with pytest.raises(ConfigError, match="exaone4 has no norm before its blocks"):
        prepare(config, CacheConfig(), 0, 1)


def test_gemma_is_never_in_float16(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA | GEMMA3 | {"dtype": "float16"})
    assert weight_dtype("auto", spec, device="cuda") == "bfloat16"
    with pytest.raises(ConfigError, match=r"dtype 'float16' is not supported for gemma3_text.*use bfloat16 or float32"):
        weight_dtype("float16", spec, device="cuda")


def test_auto_dtype_is_the_checkpoints_with_float16_held_as_float32_on_cpus(tmp_path: Path) -> None:
    for stored, held in (("float16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        spec = spec_of(tmp_path, LLAMA | {"dtype": stored})
        assert weight_dtype("auto", spec) == held
        assert weight_dtype("auto", spec, device="cuda") == stored
        for device, quantised in (("cpu", "bfloat16"), ("cuda", "float16" if stored == "float16" else "bfloat16")):
            assert weight_dtype("auto", spec, "gptq", device) == quantised
    with pytest.raises(ConfigError, match=r"dtype 'int8' is not known \(auto, float32, bfloat16, float16\)"):
        weight_dtype("int8", spec)


def test_float16_is_refused_on_cpus_and_beside_pages_of_bfloat16(tmp_path: Path) -> None:
    spec_of(tmp_path, LLAMA | {"dtype": "float16"})

    def page_dtype(device: str, dtype: str, pages: str) -> str:
        config = ModelConfig(str(tmp_path), "tiny", device=device, dtype=dtype)
        return prepare(config, CacheConfig(kv_cache_dtype=pages), 0, 1).cache_groups[0].spec.dtype

    assert page_dtype("cuda", "auto", "auto") == page_dtype("cuda", "float16", "float16") == "float16"
    assert page_dtype("cuda", "auto", "int8") == "int8"
    with pytest.raises(ConfigError, match=r"dtype 'float16' is for GPUs; device is cpu, .* use --dtype auto"):
        page_dtype("cpu", "float16", "auto")
    for dtype, pages in (("float16", "bfloat16"), ("bfloat16", "float16"), ("float32", "float16")):
        with pytest.raises(ConfigError, match=f"kv_cache_dtype '{pages}' does not go with dtype '{dtype}': use auto"):
            page_dtype("cuda", dtype, pages)


def test_a_context_beyond_the_models_is_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA)
    assert (context_length(0, spec), context_length(100, spec)) == (8192, 100)
    with pytest.raises(ConfigError, match="max_model_len 9000 is not within 1 … 8192"):
        context_length(9000, spec)
