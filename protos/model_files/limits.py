"""How large the parts of a model's files may be: an order of magnitude above the largest known models, and small enough
that a file at its limit is read within seconds."""

from __future__ import annotations

MAX_CONFIG_BYTES = 16 << 20
"""A JSON file of settings (config.json, tokenizer_config.json, generation_config.json, a manifest …); known ones reach
2 MB, most of it lists of added tokens."""
MAX_INDEX_BYTES = 64 << 20
"""model.safetensors.index.json: a line a tensor; 90,000 tensors take 9 MB."""
MAX_TOKENIZER_BYTES = 64 << 20
"""tokenizer.json, vocab.json, merges.txt, tokenizer.model; known ones reach 35 MB."""
MAX_TEMPLATE_BYTES = 1 << 20
"""A chat template; known ones reach 30 kB."""
MAX_TENSORS_HEADER_BYTES = 32 << 20
"""The JSON header of a safetensors file: some 130 bytes a tensor."""
MAX_PICKLE_INSTRUCTIONS = 1 << 18
"""Instructions of the pickle in a pytorch_model.bin: some 35 a tensor, of which one file has hundreds."""
MAX_GGUF_HEADER_BYTES = 256 << 20
"""All bytes of a GGUF file before its tensors: mostly the vocabulary, 12 MB for 150,000 tokens."""

MAX_JSON_DEPTH = 64
"""Objects and lists within each other; a config has 5."""
MAX_JSON_VALUES = 4 << 20
"""Values of one JSON file."""

MAX_TENSORS = 1 << 18
"""Tensors of one file; the largest mixtures of experts have 90,000 in all."""
MAX_TENSOR_DIMS = 8
MAX_TENSOR_NAME = 1024
"""Characters of a tensor's name; GGUF allows 64 bytes, known ones in safetensors reach 120."""
MAX_TENSOR_SIZE = 1 << 40
"""Entries of one dimension."""

MAX_GGUF_DIMS = 4
MAX_GGUF_KEYS = 1 << 16
"""Metadata keys of a GGUF file; known ones have 60."""
MAX_GGUF_KEY_BYTES = (1 << 16) - 1
"""The format's own limit."""
MAX_GGUF_STRING_BYTES = 16 << 20
MAX_GGUF_ALIGNMENT = 1 << 16

MAX_VOCABULARY = 1 << 21
"""Tokens, and merges, and entries of any other list in a GGUF file's metadata; known vocabularies reach 262,144
tokens and 514,906 merges."""
MAX_CONTROL_TOKENS = 1 << 14
"""Tokens of a GGUF vocabulary whose texts are looked for in a prompt; Gemma 3 has 6,400."""
MAX_TOKEN_BYTES = 1 << 16
"""The UTF-8 bytes of one token."""
MAX_AFFIXES = 16
"""Tokens that a tokenizer puts before or after every prompt."""
MAX_FILE_NAME = 200
"""Characters of the name of a file that another file names."""
MAX_MESSAGE_CHARS = 80
"""Characters of a value that a message shows."""

CONFIG_SIZES = {
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 13,
    "num_key_value_heads": 1 << 13,
    "head_dim": 1 << 13,
    "vocab_size": MAX_VOCABULARY,
    "max_position_embeddings": 1 << 27,
    "original_max_position_embeddings": 1 << 27,
}
"""The largest value of a size in config.json, and of its like in GGUF metadata; known models: hidden size 53,248
(feed-forward), 126 layers, 128 heads of up to 576, contexts of 10,485,760 tokens. Layers and heads are looped over,
tables are as long as the context."""
MAX_SIZE = (1 << 32) - 1
"""Any other integer of a config: GGUF writes most of them in 32 bits."""

CONFIG_NUMBERS = {
    "rope_theta": 1e12,
    "rms_norm_eps": 1.0,
    "factor": 65536.0,
    "partial_rotary_factor": 1.0,
}
"""The largest value of a fraction in config.json."""
MAX_NUMBER = 1e12
"""Any other fraction of a config."""
