"""ModelSpec: a model as data, layer by layer. A foreign config is read once, in its family's file; from then on these
values count."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.worker.models.blocks.base import AttentionBlock, DraftInput, MlpBlock

NORM_KINDS = ("rms", "layer")


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm over the hidden size. Its weight is `scale` times the checkpoint's."""

    eps: float
    scale: float = 1.0
    kind: str = "rms"
    """One of `NORM_KINDS`: RMSNorm, or LayerNorm without a bias."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Where a sublayer is normed: residual += after(sublayer(before(residual))). Llama has `before` alone, OLMo 2
    `after` alone, Gemma 2 both; None: no norm there."""

    before: NormSpec | None
    after: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer: an attention block, then an MLP block, each with its norms and added to the residual stream."""

    attention: AttentionBlock
    mlp: MlpBlock
    attention_norms: Norms
    mlp_norms: Norms


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the decoder asks of a model. Sizes are of the whole model, not of a rank."""

    family: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    """Before the head."""
    embedding_scale: float = 1.0
    """The embedding is held as so many times the checkpoint's."""
    tie_word_embeddings: bool = False
    final_soft_cap: float = 0.0
    """Logits become cap · tanh(logit / cap); 0: they are not capped."""
    leaves_float16: bool = False
    """Whether activations may be larger than float16 holds: then they never are in it."""
    has_normalised_head: bool = False
    """The head's rows are held as vectors of length 1; not with tied embeddings."""
    dtype: str = "float32"
    """The checkpoint's dtype: "float32", "bfloat16" or "float16"."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """The ids that config.json or the GGUF header names; generation_config.json may add some
    (`protos/text/model_defaults.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec(ModelSpec):
    """A draft head: a model whose layers read states of its target's tokens. Its row of a token predicts the token
    behind the next one: it reads the features of the token and the embedding of the next. `vocab_size` counts its own
    logits."""

    reads: DraftInput
    features: tuple[int, ...]
    """The states of the target that it reads: see `allspan.worker.models.decoder.build_decoder`."""
    num_embeddings: int
    """Rows of the embedding."""
    has_embedding: bool
    """False: the embedding is its target's."""
    has_head: bool
    """False: the product that makes logits is its target's."""
    chains_normed: bool
    """Whether the row of its own draft reads what its head reads; else the residual stream before the last norm."""
