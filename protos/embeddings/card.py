"""What a model's files say of its embeddings and scores: pooling, normalisation, prompts, a head of two answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import CheckpointError, InvalidRequest
from allspan.protos.embeddings.rerank import QWEN3, RerankHead
from allspan.protos.model_files.json_values import parse_object, read_json_object, shown
from allspan.protos.model_files.limits import MAX_CONFIG_BYTES
from allspan.protos.model_files.regular_file import is_there, read_regular
from allspan.protos.text.tokenizers.gguf_metadata import gguf_of, read_metadata

_QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
_MODES = {"cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}
"""sentence-transformers' names of pooling, without `pooling_mode_`."""
_GGUF_POOLING = {1: "mean", 2: "cls", 3: "last"}
_ALIASES = {"search_query": "query", "search_document": "document", "passage": "document"}
"""Cohere's and Jina's names of prompts."""
MAX_PROMPTS = 256
MAX_PROMPT_CHARS = 16384

_WITH_HEAD = ("LMHeadModel", "ChatGLMModel")
"""How the names of classes end that generate, though those of models without a head end in "Model", too."""


@dataclass(frozen=True, slots=True)
class EmbeddingCard:
    """How a model embeds and scores."""

    pooling: str = "last"
    """One of `allspan.protos.api.options.POOLINGS`."""
    normalize: bool = True
    """Vectors have length 1."""
    generates: bool = True
    """Whether it also answers prompts with tokens."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts put before an input, by their names ("query")."""
    default_prompt: str = ""
    """The name of the prompt of an input that names none; "": none."""
    size: int = 0
    """Elements of a vector; 0: the files do not say."""
    is_matryoshka: bool = False
    """Whether a vector's first elements are a vector of their own."""
    dimensions: tuple[int, ...] = ()
    """The numbers of elements that it may be cut to; empty: any."""
    head: RerankHead | None = None
    """How it judges a query and a document; None: by the angle between their vectors."""

    def prompt(self, name: str | None) -> str:
        """The text before an input. Raises InvalidRequest for a name that the model does not have."""
        name = self.default_prompt if name is None else name
        if not isinstance(name, str):
            raise InvalidRequest(f"input_type is {shown(name)}, must be a text", "input_type")
        known = _ALIASES.get(name, name)
        if known in self.prompts:
            return self.prompts[known]
        if known in ("", "document", "query"):  # a model without a prompt for it takes the text as it is
            return ""
        names = ", ".join(self.prompts) or "none"
        raise InvalidRequest(f"input_type is {name!r}, must be one of the model's prompts ({names})", "input_type")

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises InvalidRequest for a number of elements that the model's vectors may not be cut to."""
        if dimensions is None:
            return
        if type(dimensions) is not int or dimensions < 1:
            raise InvalidRequest(f"dimensions is {shown(dimensions)}, must be a number from 1 on", "dimensions")
        if dimensions == self.size:
            return
        if not self.is_matryoshka:
            raise InvalidRequest(
                f"dimensions is {dimensions}, but the model does not say that its vectors may be cut (is_matryoshka); "
                "leave it out",
                "dimensions",
            )
        if self.dimensions and dimensions not in self.dimensions:
            named = ", ".join(map(str, self.dimensions))
            raise InvalidRequest(f"dimensions is {dimensions}, must be one of {named}", "dimensions")
        if not 1 <= dimensions <= (self.size or dimensions):
            raise InvalidRequest(f"dimensions is {dimensions}, must be from 1 to {self.size}", "dimensions")


def embedding_card(path: str | Path, name: str = "") -> EmbeddingCard:
    """Returns what the files of a folder or a GGUF file say; `name` is what the model is called, too. Raises
    CheckpointError, naming the file, for pooling that is not computed here."""
    place = Path(path)
    if gguf := gguf_of(place):
        card, names = _of_gguf(gguf)
    elif is_there(place / "config.json"):
        card, names = _of_folder(place)
    else:
        card, names = EmbeddingCard(), []
    known = " ".join(re.sub(r"[\s_]+", "-", each.lower()) for each in (*names, place.name, name))
    if "qwen3-embedding" in known:
        card = replace(card, is_matryoshka=True, prompts=card.prompts or {"query": _QUERY})
    if "qwen3-reranker" in known and card.head is None:
        card = replace(card, head=QWEN3)
    return card


def _of_gguf(path: Path) -> tuple[EmbeddingCard, list[str]]:
    metadata = read_metadata(path)
    architecture = metadata.get("general.architecture", "")
    kind, size = (metadata.get(f"{architecture}.{key}") for key in ("pooling_type", "embedding_length"))
    names = [str(metadata.get(f"general.{key}", "")) for key in ("name", "basename")]
    card = EmbeddingCard(size=size if isinstance(size, int) else 0)
    if not kind:
        return card, names
    if kind not in _GGUF_POOLING:
        raise CheckpointError(
            f"{path}: {architecture}.pooling_type is {shown(kind)}, which is not supported (supported: 1 mean, 2 cls, "
            "3 last)"
        )
    return replace(card, pooling=_GGUF_POOLING[kind], generates=False), names


def _of_folder(folder: Path) -> tuple[EmbeddingCard, list[str]]:
    config = read_json_object(folder / "config.json")
    names = [name] if isinstance(name := config.get("_name_or_path"), str) else []
    sizes = config.get("matryoshka_dimensions")
    dimensions = tuple(each for each in sizes if type(each) is int and each > 0) if isinstance(sizes, list) else ()
    text = config.get("text_config")
    size = config.get("hidden_size") or (text.get("hidden_size") if isinstance(text, dict) else None)
    made_for = config.get("architectures")
    classes = [str(each) for each in made_for] if isinstance(made_for, list) else []
    card = EmbeddingCard(
        generates=not classes or any(not each.endswith("Model") or each.endswith(_WITH_HEAD) for each in classes),
        size=size if isinstance(size, int) else 0,
        is_matryoshka=bool(config.get("is_matryoshka")) or bool(dimensions),
        dimensions=dimensions,
        head=_head(config, folder / "config.json"),
    )
    if is_there(folder / "modules.json"):
        card = _of_modules(folder, card)
    file = folder / "config_sentence_transformers.json"
    return (_with_prompts(card, file) if is_there(file) else card), names


def _head(config: Mapping[str, Any], file: Path) -> RerankHead | None:
    tokens = config.get("classifier_from_token")
    if tokens is None:
        return None
    if not (isinstance(tokens, list) and len(tokens) == 2 and all(isinstance(each, str) and each for each in tokens)):
        raise CheckpointError(
            f"{file}: classifier_from_token is {shown(tokens)}, must be two texts: of the token that says no, and of "
            "the one that says yes"
        )
    return replace(QWEN3, no=tokens[0], yes=tokens[1])


def _of_modules(folder: Path, card: EmbeddingCard) -> EmbeddingCard:
    """What sentence-transformers wrote: a list of modules, the model first."""
    file = folder / "modules.json"
    normalize, pooling = False, ""
    for module in _modules(file):
        kind = str(module.get("type", "")).rpartition(".")[2]
        place = folder / str(module.get("path", "")) / "config.json"
        if kind == "Pooling":
            if pooling:
                raise CheckpointError(f"{file}: names two Pooling modules, must name one")
            pooling = _pooling(place)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(f"{file}: module {shown(kind)} is not supported (Transformer, Pooling, Normalize)")
    if not pooling:
        raise CheckpointError(f"{file}: names no Pooling module, must name one: it says how vectors are made of tokens")
    return replace(card, pooling=pooling, normalize=normalize, generates=False)


def _modules(file: Path) -> list[Mapping[str, Any]]:
    """The file's list: the reader of JSON wants an object."""
    values = parse_object(b'{"modules":' + read_regular(file, MAX_CONFIG_BYTES) + b"}", str(file))
    found = values["modules"] if len(values) == 1 else None
    if not isinstance(found, list) or len(found) > 16 or not all(isinstance(each, dict) for each in found):
        raise CheckpointError(f"{file}: must be a list of at most 16 modules, each an object")
    paths = [Path(str(each.get("path", ""))) for each in found]
    if any(".." in path.parts or path.is_absolute() for path in paths):
        raise CheckpointError(f"{file}: a module's path must lie within the folder")
    return found


def _pooling(file: Path) -> str:
    config = read_json_object(file)
    start = "pooling_mode_"
    modes = [key.removeprefix(start) for key, on in config.items() if key.startswith(start) and on is True]
    if isinstance(mode := config.get("pooling_mode"), str):
        modes = [mode]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise CheckpointError(
            f"{file}: pooling {shown(' and '.join(modes) or 'none')} is not supported (supported: cls_token, "
            "mean_tokens, lasttoken)"
        )
    if config.get("include_prompt") is False:
        raise CheckpointError(f"{file}: include_prompt false is not supported: prompts are part of the mean here")
    return _MODES[modes[0]]


def _with_prompts(card: EmbeddingCard, file: Path) -> EmbeddingCard:
    config = read_json_object(file)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    is_fit = isinstance(prompts, dict) and len(prompts) <= MAX_PROMPTS and isinstance(default, str)
    if not is_fit or any(not isinstance(text, str) or len(text) > MAX_PROMPT_CHARS for text in prompts.values()):
        raise CheckpointError(
            f"{file}: prompts must be at most {MAX_PROMPTS} names with texts of at most {MAX_PROMPT_CHARS} characters, "
            "default_prompt_name one of the names"
        )
    if default and default not in prompts:
        raise CheckpointError(f"{file}: default_prompt_name is {shown(default)}, which prompts does not have")
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        raise CheckpointError(f"{file}: similarity_fn_name {shown(similarity)} is not supported (cosine, dot)")
    return replace(card, prompts=prompts, default_prompt=default)
