"""The tokenizer as a zip archive of Hugging Face's files, which routers fetch."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

from allspan.client.gateway.context import GatewayContext
from allspan.protos import vllm_worker_pb2 as pb
from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.regular_file import names_in, read_regular
from allspan.protos.text.tokenizers.gguf_metadata import gguf_of
from allspan.protos.text.vendors.tokenizer_json import huggingface_files

CHUNK_BYTES = 64 * 1024
MAX_FILE_BYTES = 256 * 2**20

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
)
_SUFFIXES = (".jinja", ".tiktoken", ".model")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The date of every entry, so that equal files make equal archives."""


class TokenizerArchive:
    """The archive, made at its first use and kept."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._made: asyncio.Task[bytes] | None = None

    async def chunks(self) -> Iterator[pb.GetTokenizerChunk]:
        """Returns the messages, the last with the archive's SHA-256. CheckpointError says what cannot be read."""
        if self._made is None or (self._made.done() and self._made.exception() is not None):
            self._made = asyncio.create_task(asyncio.to_thread(self._make))
        data = await asyncio.shield(self._made)
        return _chunks(data)

    def _make(self) -> bytes:
        path = Path(self._context.engine.cluster.model_path)
        gguf = gguf_of(path)
        files = _files_of(path) if gguf is None else huggingface_files(gguf, self._context.tokenizer)
        template = self._context.tokenizer.chat_template
        if template is not None and (self._context.config.chat.chat_template or not _has_template(files)):
            files = _with_template(files, template.published)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
        return buffer.getvalue()


def _files_of(folder: Path) -> dict[str, bytes]:
    names = [name for name in names_in(folder) if name in _NAMES or name.endswith(_SUFFIXES)]
    files = {name: read_regular(folder / name, MAX_FILE_BYTES) for name in names if (folder / name).is_file()}
    if not any(name not in ("config.json", "generation_config.json") for name in files):
        raise CheckpointError(f"{folder} has no files of a tokenizer; give the router one with its --tokenizer-path")
    return files


def _has_template(files: dict[str, bytes]) -> bool:
    if any(name.endswith(".jinja") or name == "chat_template.json" for name in files):
        return True
    return bool(_settings(files).get("chat_template"))


def _with_template(files: dict[str, bytes], template: str) -> dict[str, bytes]:
    """Returns the files with this chat template and no other."""
    others = {name: data for name, data in files.items() if not name.endswith(".jinja") and "chat_template" not in name}
    settings = _settings(files) | {"chat_template": template}
    return others | {"tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=1).encode()}


def _settings(files: dict[str, bytes]) -> dict[str, object]:
    read = json.loads(files.get("tokenizer_config.json", b"{}"))
    return read if isinstance(read, dict) else {}


def _chunks(data: bytes) -> Iterator[pb.GetTokenizerChunk]:
    digest = hashlib.sha256(data).hexdigest()
    for start in range(0, len(data), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        yield pb.GetTokenizerChunk(data=data[start:end], sha256=digest if end >= len(data) else "")
