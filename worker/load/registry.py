"""Which families there are, and how a path on disk becomes a ModelSpec."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from allspan.protos.api.errors import CheckpointError, ConfigError, ModelNotFound
from allspan.protos.config.converted_manifest import MANIFEST, is_converted
from allspan.protos.config.hf_overrides import overridden
from allspan.protos.model_files.json_values import read_json_object, shown
from allspan.protos.model_files.limits import MAX_MESSAGE_CHARS
from allspan.protos.model_files.weight_files import format_of
from allspan.worker.load.converted import ConvertedModel
from allspan.worker.load.foreign_values import completed, nested
from allspan.worker.load.gguf_config import gguf_values
from allspan.worker.load.refused import why_refused
from allspan.worker.models.families.baichuan import BAICHUAN
from allspan.worker.models.families.chatglm import CHATGLM
from allspan.worker.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from allspan.worker.models.families.exaone4 import EXAONE4
from allspan.worker.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from allspan.worker.models.families.glm import GLM, GLM4
from allspan.worker.models.families.glm4_moe import GLM4_MOE
from allspan.worker.models.families.gpt_oss import GPT_OSS
from allspan.worker.models.families.granite import GRANITE, GRANITE_HYBRID
from allspan.worker.models.families.llama import LLAMA
from allspan.worker.models.families.llama_like import ERNIE, HELIUM, SEED_OSS, SMOLLM3
from allspan.worker.models.families.minimax_m2 import MINIMAX_M2
from allspan.worker.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from allspan.worker.models.families.mixtral import MIXTRAL
from allspan.worker.models.families.phi3 import PHI3
from allspan.worker.models.families.qwen import QWEN
from allspan.worker.models.families.qwen2 import QWEN2
from allspan.worker.models.families.qwen3 import QWEN3
from allspan.worker.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.layout import foreign_tensors
from allspan.worker.models.spec import ModelSpec
from allspan.worker.weights.gguf_file import GgufFile
from allspan.worker.weights.latent_gguf_file import LatentGgufFile
from allspan.worker.weights.mxfp4_folder import MXFP4, Mxfp4Folder
from allspan.worker.weights.quantised_folder import METHODS, QuantisedFolder
from allspan.worker.weights.tensor_folder import TensorFolder

logger = logging.getLogger(__name__)

_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where old tools described quantised weights, and by which method those are if it does not say."""

_BITSANDBYTES = ("load_in_4bit", "load_in_8bit")
"""Keys by which old configs tell that method without its name."""

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_ARCHITECTURES = 64
"""Names that a config may list."""

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        PHI3,
        GRANITE,
        GRANITE_HYBRID,
        GLM,
        GLM4,
        SMOLLM3,
        SEED_OSS,
        ERNIE,
        HELIUM,
        GEMMA,
        GEMMA2,
        GEMMA3,
        EXAONE4,
        MINISTRAL,
        MINISTRAL3,
        QWEN,
        CHATGLM,
        BAICHUAN,
        QWEN2_MOE,
        QWEN3_MOE,
        MIXTRAL,
        GLM4_MOE,
        GPT_OSS,
        MINIMAX_M2,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GLM4_MOE_LITE,
    )
}
"""model_type → family. A new family is one file and one name here."""


@dataclass(frozen=True)
class ModelSource:
    """A model as found on disk: `path` is the folder or the GGUF file; `gguf` is set for the latter, `converted` for a
    folder that `allspan convert` has made, `quantised` for one of quantised safetensors."""

    path: Path
    family: Family
    spec: ModelSpec
    gguf: GgufFile | None
    converted: ConvertedModel | None = None
    quantised: QuantisedFolder | Mxfp4Folder | None = None
    drawn: Mapping[str, str] = field(default_factory=dict)
    """The types of random weights, by GGUF's names, where these are not plain."""

    @property
    def stored(self) -> Mapping[str, str]:
        """The types of a quantised checkpoint's tensors, by its names; empty for others."""
        if self.converted is not None:
            return self.converted.manifest.stored
        checkpoint = self.gguf or self.quantised
        if self.drawn:
            return self.drawn
        return {} if checkpoint is None else checkpoint.kinds()


def with_random_weights(source: ModelSource, quantization: str) -> ModelSource:
    """The model with weights that are drawn, those of experts as "mxfp4" has them if that is the method."""
    weights, drawn = source.family.weights, {}
    if quantization == Mxfp4Folder.method:
        tensors = foreign_tensors(source.spec, weights, "gguf")
        drawn = {each.name: MXFP4 for each in tensors if len(each.shape) == 3}
    return replace(source, quantised=None, drawn=drawn)


def find_model(path: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> ModelSource:
    """A folder with config.json, a GGUF file, a folder with one, or a .json config alone (for random weights).
    `overrides` replace values of the config; ConfigError for those of a converted model."""
    place = Path(path).expanduser()
    if not place.exists():
        raise ModelNotFound(f"{place}: no such file or folder")
    if is_converted(place):
        if overrides:
            raise ConfigError(
                f"hf_overrides: {place} is converted, its config as it was then: leave --hf-overrides out, or convert "
                "the model again with it"
            )
        return _from_converted(place)
    config = place / "config.json" if place.is_dir() else place
    if config.suffix == ".json" and config.is_file():
        return _from_config(config, overrides)
    return _from_gguf(_only_gguf(place) if place.is_dir() else place, overrides)


def _from_config(source: Path, overrides: Mapping[str, Any]) -> ModelSource:
    folder = source.parent
    family, values = _family_of(overridden(read_json_object(source), overrides), str(source))
    quantised = _quantised(source, values)
    spec = family.read(ForeignConfig(values, str(source)))
    has_dtype = any(values.get(key) is not None for key in ("dtype", "torch_dtype"))
    family, spec = _as_in_weights(spec, folder, family, quantised, has_dtype)
    return ModelSource(folder, family, spec, None, quantised=quantised)


def _as_in_weights(
    spec: ModelSpec, folder: Path, family: Family, quantised: QuantisedFolder | Mxfp4Folder | None, has_dtype: bool
) -> tuple[Family, ModelSpec]:
    """The family with the names that the weights have, and the spec with what they say and the config does not. A
    folder with an embedding and no head is one of tied embeddings; without a dtype in the config, that of the embedding
    counts."""
    if format_of(folder) is None:
        return family, spec
    try:
        weights = quantised or TensorFolder(folder)
    except CheckpointError:  # said when the weights are opened, if they are
        return family, spec
    family = replace(family, weights=family.weights.as_spelled("hugging_face", weights.names()))
    head, embedding = (family.weights.foreign(f"{name}.weight", "hugging_face") for name in ("lm_head", "embedding"))
    if embedding not in weights.names():
        return family, spec
    if not has_dtype and isinstance(weights, TensorFolder):
        spec = replace(spec, dtype=_DTYPES.get(weights.dtype(embedding), spec.dtype))
    if head not in weights.names() and not spec.tie_word_embeddings:
        logger.warning("%s: the weights have no head: the embedding is the head, too", folder)
        spec = replace(spec, tie_word_embeddings=True)
    return family, spec


def _family_of(values: dict[str, Any], source: str) -> tuple[Family, dict[str, Any]]:
    """The family and its config's values: those of `text_config` where a model has one for its text."""
    outer, families = values.get("model_type"), FAMILIES.values()
    if isinstance(outer, str) and any(outer in family.inside for family in families):
        inner = values.get("text_config")
        if not isinstance(inner, dict):
            raise CheckpointError(f"{source}: text_config must be an object, got {shown(inner)}")
        family = _family(inner.get("model_type"), f"{source}: text_config")
        if outer not in family.inside:
            known = ", ".join(each.model_type for each in families if outer in each.inside)
            raise CheckpointError(
                f"{source}: text_config of model type {family.model_type!r} in one of {outer!r} is not supported "
                f"(supported: {known})"
            )
        return family, completed(family, nested(values, inner))
    family = _family(outer, source)
    architectures = values.get("architectures")
    if architectures and (not isinstance(architectures, list) or len(architectures) > _ARCHITECTURES):
        raise CheckpointError(f"{source}: architectures must be a list of names, got {shown(architectures)}")
    if architectures and not {str(name).lower() for name in architectures} & {n.lower() for n in family.architectures}:
        raise CheckpointError(
            f"{source}: architecture {shown(architectures[0])} of model type {family.model_type!r} is not supported "
            f"(supported: {', '.join(family.architectures)})"
        )
    return family, completed(family, values)


def _from_converted(folder: Path) -> ModelSource:
    model = ConvertedModel(folder)
    family = _family(model.spec.family, str(folder / MANIFEST))
    stored = model.manifest.stored
    family = replace(family, weights=family.weights.in_gguf(stored).as_spelled("hugging_face", stored))
    return ModelSource(folder, family, model.spec, None, model)


def _from_gguf(path: Path, overrides: Mapping[str, Any]) -> ModelSource:
    file = GgufFile(path)
    architecture = file.metadata.get("general.architecture")
    has_experts = bool(file.metadata.get(f"{architecture}.expert_count"))
    known = {
        name: family
        for family in FAMILIES.values()
        for name in family.gguf_architectures
        if has_experts or not family.is_gguf_with_experts
    }
    if not isinstance(architecture, str) or architecture not in known:
        raise CheckpointError(
            f"{path}: GGUF architecture {shown(architecture)} is not supported{why_refused(architecture)} "
            f"(supported: {', '.join(known)})"
        )
    family = known[architecture]
    values = overridden({**family.defaults, **gguf_values(file, family, str(path))}, overrides)
    if family.has_latents:
        file = LatentGgufFile(path)
    family = replace(family, weights=family.weights.in_gguf(file.names()))
    return ModelSource(path, family, family.read(ForeignConfig(values, str(path))), file)


def _family(model_type: object, source: str) -> Family:
    for family in FAMILIES.values():
        if model_type in family.other_types:
            return family
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported, why = ", ".join(FAMILIES), why_refused(model_type)
        raise CheckpointError(
            f"{source}: model_type {shown(model_type)} is not supported{why} (supported: {supported})"
        )
    return FAMILIES[model_type]


def _quantised(source: Path, values: Mapping[str, Any]) -> QuantisedFolder | Mxfp4Folder | None:
    """The folder, if its config (or a file beside it, of old) says that weights are quantised; one without weights is
    for random ones, which are not."""
    folder = source.parent
    described = values.get("quantization_config") or values.get("compression_config")
    if not described:
        beside = [path for name in _BESIDE if (path := folder / name).is_file()]
        if not beside:
            return None
        source, described = beside[0], {"quant_method": _BESIDE[beside[0].name]} | read_json_object(beside[0])
    method = (described.get("quant_method") or described.get("quant_type")) if isinstance(described, dict) else None
    if method is None and isinstance(described, dict) and any(described.get(key) for key in _BITSANDBYTES):
        method = "bitsandbytes"
    if method == Mxfp4Folder.method:
        return Mxfp4Folder(folder, str(source)) if format_of(folder) else None
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{source}: quantised checkpoint ({str(method or 'unnamed method')[:MAX_MESSAGE_CHARS]}) is not "
            f"supported (supported: {', '.join(METHODS)}, mxfp4, safetensors in float32, bfloat16 or float16, and "
            "GGUF): take the model that is not quantised, and quantise it with --quantization int8 or uint4"
        )
    return QuantisedFolder(folder, described, str(source)) if format_of(folder) else None


def _only_gguf(folder: Path) -> Path:
    files = sorted(path for path in folder.glob("*.gguf") if "-of-" not in path.name or "-00001-of-" in path.name)
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(f"{folder}: {len(files)} GGUF files: name one, such as {files[0]}")
    if (folder / "params.json").is_file():
        raise CheckpointError(
            f"{folder}: params.json is of Mistral's own layout, which is not supported: take the model in Hugging "
            "Face's layout (config.json and model*.safetensors, mostly in the same repository), or a GGUF file"
        )
    raise CheckpointError(f"{folder}: no config.json and no *.gguf file in this folder")
