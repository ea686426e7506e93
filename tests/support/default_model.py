"""The default model: fetched as a user would, and its weights in transformers, dequantised here on their own."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from allspan.protos.text import load_tokenizer

NAME = "SmolLM2-135M-Instruct"

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@functools.cache
def default_model() -> Path:
    """The GGUF file, pulled into the user's cache if it is not there."""
    command = [sys.executable, "-m", "allspan.launch.cli", "pull", NAME, "--print-path"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1])


def chat_prompts() -> list[list[int]]:
    """Twenty varied prompts as token ids: chats, text to continue, code, numbers, other scripts."""
    tokenizer = load_tokenizer(default_model())
    chats = [
        "What is the capital of France?",
        "Write a haiku about the sea.",
        "Explain photosynthesis to a child in two sentences.",
        "List three prime numbers larger than 10.",
        "Translate 'good morning' into Spanish, French and German.",
        "Who wrote Don Quixote, and when?",
        "Give me a short recipe for pancakes.",
        "What is 12 times 12?",
    ]
    texts = [
        "Once upon a time, in a village by the river,",
        "The three laws of thermodynamics are",
        "def fibonacci(n):\n    ",
        "import numpy as np\n\nx = np.",
        "1, 1, 2, 3, 5, 8, 13,",
        "SELECT name, age FROM users WHERE",
        "Dear Sir or Madam,\n\nI am writing to",
        "El zorro marrón salta sobre",
        "東京は",
        "  42 is the answer to",
        "A",
        "The quick brown fox jumps over the lazy dog. " * 12,
    ]
    chatted = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in chats]
    return chatted + [tokenizer.encode(text) for text in texts]


@functools.cache
def reference_model() -> LlamaForCausalLM:
    """transformers' Llama in float32 with the file's weights."""
    reader = GGUFReader(str(default_model()))

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads, hidden = (
        value("attention.head_count"),
        value("attention.head_count_kv"),
        value("embedding_length"),
    )
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].contents()),
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            state[f"{_NAMES[parts[0]]}.{parts[1]}"] = torch.from_numpy(weight)
            continue
        if parts[2] in ("attn_q", "attn_k"):
            # GGUF's Llama pairs neighbouring elements of a head for its rotary embedding; transformers pairs halves.
            count = heads if parts[2] == "attn_q" else kv_heads
            weight = weight.reshape(count, -1, 2, hidden).swapaxes(1, 2).reshape(weight.shape)
        state[f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"] = torch.from_numpy(np.ascontiguousarray(weight))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    # Rotary frequencies are a buffer that is not saved.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.train(False)
    return model


def reference_logits(prompt: list[int], output: list[int]) -> torch.Tensor:
    """float32 [len(output), V]: the logits from which each output token is chosen, the ones before it given."""
    ids = torch.tensor([[*prompt, *output]])
    with torch.no_grad():
        logits: torch.Tensor = reference_model()(ids).logits[0]
    return logits[len(prompt) - 1 : -1]
