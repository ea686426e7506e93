"""Tokenizers of folders without a tokenizer.json, as transformers' AutoTokenizer converts them (extra `hf`)."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Backend

from allspan.protos.api.errors import CheckpointError
from allspan.protos.config.installed import install_command

_SAVE = "or save_pretrained() it elsewhere with transformers' AutoTokenizer, which writes a tokenizer.json"


def converted_backend(path: Path) -> Backend:
    """The `tokenizers` tokenizer that transformers makes of the folder's files. Nothing is fetched, and no code that
    lies in the folder runs. Raises CheckpointError when transformers is missing or gives none."""
    try:
        from transformers import AutoTokenizer  # takes seconds, so only where it is needed
    except ImportError as error:
        raise CheckpointError(
            f"{path} has no tokenizer.json, and transformers, which could convert its tokenizer, cannot be imported "
            f"({error}); {install_command('hf')}, {_SAVE}"
        ) from error
    try:
        made = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a converter meets in a bad file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path} has no tokenizer.json, and transformers cannot convert its tokenizer: {reason[0]}; "
            f"add the missing files or packages, {_SAVE}"
        ) from error
    backend = getattr(made, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise CheckpointError(
            f"{path} has no tokenizer.json, and {type(made).__name__} of transformers runs in Python alone, which is "
            f"not supported; use a folder with a tokenizer.json, {_SAVE}"
        )
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    if backend.get_vocab(with_added_tokens=False).keys() <= added:  # what the model's class alone gives
        raise CheckpointError(
            f"{path} has no tokenizer.json, and no other file with a tokenizer's vocabulary; add its files, {_SAVE}"
        )
    return backend
