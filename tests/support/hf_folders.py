"""Small Hugging Face tokenizer folders, made with `tokenizers` for one test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "Zwölf Boxkämpfer jagen Viktor",
    "你好 世界 hello world",
    "1 + 2 = 3\n\n",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level(folder: Path, bos: bool = False, **config: Any) -> Path:
    """Byte-level BPE trained on a few words, with the special texts of SPECIAL."""
    tokenizer = backend()
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return save(folder, tokenizer, config)


def sentencepiece_like(folder: Path, **config: Any) -> Path:
    """Laid out as Llama 2's tokenizer.json: spaces as ▁, one before the text, unknown characters as bytes."""
    return save(folder, _sentencepiece_like(), config)


def backend(metaspace: bool = False) -> Tokenizer:
    """A tokenizer with <s> and </s>: byte-level BPE trained on a few words, or laid out as Llama 2's."""
    if metaspace:
        return _sentencepiece_like()
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _sentencepiece_like() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helowrd"]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "▁")]
    pieces += ["".join(merge) for merge in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    """The tokenizer as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder
