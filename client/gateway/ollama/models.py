"""The served model as Ollama's clients list and show models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.ollama.turn import iso
from allspan.protos.api.errors import CheckpointError
from allspan.protos.text.tokenizers.gguf_metadata import gguf_of, read_metadata

Json = dict[str, Any]

NEVER = "9999-12-31T23:59:59Z"
"""The time until which the model stays loaded."""


@dataclass(frozen=True)
class ModelCards:
    """Makes the descriptions of one gateway's model."""

    context: GatewayContext

    def tags(self) -> Json:
        """The list of models: one an entry for each name that requests may use."""
        return {"models": [self._entry(name) for name in self.context.model.all_names]}

    def running(self) -> Json:
        """The list of loaded models."""
        more = {"expires_at": NEVER, "size_vram": 0, "context_length": self.context.model.max_model_len}
        return {"models": [self._entry(name) | more for name in self.context.model.all_names]}

    def shown(self, name: str) -> Json:
        """The model in full, or the one of its adapters that this names."""
        template = self.context.tokenizer.chat_template
        family = self._details["family"] or "unknown"
        info = {"general.architecture": family, f"{family}.context_length": self.context.model.max_model_len}
        sampling = self.context.model.defaults.sampling()
        return {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value}" for name, value in sampling.items()),
            "template": template.published if template is not None else "",
            "details": self._details | self._parent(self.context.model.adapter(name)),
            "model_info": info,
            "capabilities": list(self._capabilities()),
            "modified_at": iso(self.context.model.created),
        }

    def _entry(self, name: str) -> Json:
        model, adapter = self.context.model, self.context.model.adapter(name)
        tagged = name if ":" in name else f"{name}:latest"
        return {
            "name": tagged,
            "model": tagged,
            "modified_at": iso(model.created),
            "size": self._size,
            "digest": hashlib.sha256(f"{model.fingerprint}{adapter}".encode()).hexdigest(),
            "details": self._details | self._parent(adapter),
        }

    def _parent(self, adapter: str) -> Json:
        return {"parent_model": self.context.model.name if adapter else ""}

    def _capabilities(self) -> Iterable[str]:
        if self.context.model.card.generates:
            yield "completion"
        yield "embedding"
        if self.context.tokenizer.has_chat_template:
            yield "tools"
        if self.context.prompts.chat.tags is not None:
            yield "thinking"

    @property
    def _path(self) -> Path:
        return Path(self.context.engine.cluster.model_path)

    @cached_property
    def _size(self) -> int:
        """Bytes of the model's files; 0 where they lie on another host."""
        files = [self._path] if self._path.is_file() else self._path.glob("*.*")
        try:
            return sum(file.stat().st_size for file in files if file.suffix in (".gguf", ".safetensors", ".bin"))
        except OSError:
            return 0

    @cached_property
    def _details(self) -> Json:
        family, size, quantised = self._described()
        return {
            "format": "gguf" if gguf_of(self._path) else "safetensors",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": size,
            "quantization_level": quantised,
        }

    def _described(self) -> tuple[str, str, str]:
        """Returns the model's architecture, its number of parameters and its quantisation, "" for what its files do not
        say."""
        try:
            if gguf := gguf_of(self._path):
                metadata = read_metadata(gguf)
                named = (metadata.get(f"general.{key}", "") for key in ("architecture", "size_label"))
                family, size = map(str, named)
                return family, size, _file_type(metadata.get("general.file_type"))
            config = json.loads((self._path / "config.json").read_text(encoding="utf-8"))
            return str(config.get("model_type", "")), "", ""
        except (OSError, ValueError, AttributeError, CheckpointError):
            return "", "", ""


def _file_type(number: Any) -> str:
    """Returns the name of a GGUF file type (7 is Q8_0); "" for none."""
    from gguf import LlamaFileType

    known = {kind.value: kind.name for kind in LlamaFileType}
    return known.get(number, "").removeprefix("MOSTLY_").removeprefix("ALL_")
