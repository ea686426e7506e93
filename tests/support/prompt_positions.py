"""Prompts whose tokens have three positions each, and transformers' model of a checkpoint that takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

from support.tiny_models import save_tiny


def picture(length: int, first: int, height: int, width: int) -> np.ndarray:
    """[3, length]: text, a picture of height · width tokens from `first` on, then text again."""
    before, count = np.tile(np.arange(first), (3, 1)), height * width
    inside = np.stack((np.zeros(count), np.arange(count) // width, np.arange(count) % width)) + first
    after = np.tile(np.arange(length - first - count), (3, 1)) + first + max(height, width)
    return np.concatenate((before, inside, after), axis=1).astype(np.int32)


def text(length: int) -> np.ndarray:
    """[3, length]: the index of each token, on every axis."""
    return np.tile(np.arange(length, dtype=np.int32), (3, 1))


def save_sectioned(folder: Path, sections: Sequence[int], dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """Writes a random Qwen 2 checkpoint with a multimodal rotary embedding, and returns transformers' decoder of it, in
    float32."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    saved = save_tiny(folder, "qwen2", dtype, tie_word_embeddings=True, rope_parameters=rope, **sizes).float()
    values = {name: value for name, value in saved.config.to_dict().items() if name not in ("model_type", "dtype")}
    config = Qwen2VLTextConfig(**values)
    config._attn_implementation = "eager"
    model: Any = Qwen2VLTextModel(config)
    model.eval()
    model.load_state_dict(saved.model.state_dict())
    return model


def logits_at(model: Any, ids: Sequence[int], positions: np.ndarray) -> Tensor:
    """float32 [n, V], of a prompt and the answer so far; `positions` are the prompt's."""
    answered = np.arange(len(ids) - positions.shape[1], dtype=np.int32) + positions.max() + 1
    whole = torch.from_numpy(np.concatenate((positions, np.tile(answered, (3, 1))), axis=1)).long()
    with torch.no_grad():
        hidden = model(torch.tensor([[*ids]]), position_ids=whole[:, None], use_cache=False).last_hidden_state[0]
        logits: Tensor = hidden @ model.embed_tokens.weight.T
    return logits
