"""The one decoder: a ModelSpec and a rank's shard become a Program. No family has one of its own."""

from __future__ import annotations

from allspan.worker.models.layout import EMBEDDING, HEAD, Holding, Linear, layer_pieces
from allspan.worker.models.program import Program, ProgramBuilder, Rows, Slot
from allspan.worker.models.spec import ModelSpec
from allspan.worker.quant.base import Epilogue


def build_decoder(holding: Holding, quantised_cache: bool = False) -> Program:
    """The forward pass of one step.

    Inputs: ids, positions, slots, attention (an AttentionMeta), logits_rows; `cos_sin`; caches k_cache.N, v_cache.N,
    k_scales.N and v_scales.N of every layer N, k_center.N where `has_centers`; weights under their canonical names.
    Output: this rank's columns of the logits.

    A quantised cache gets keys that are spread over their elements, less what a bias adds to all of them, and the
    queries are spread alike: see `OpSet.hadamard`. One large element would take the scale from all others.
    """
    return _Decoder(holding, quantised_cache).build()


def has_centers(spec: ModelSpec) -> bool:
    """Whether keys have a bias of their own that reaches the cache."""
    return spec.qkv_bias and not spec.qk_norm


class _Decoder:
    def __init__(self, holding: Holding, quantised_cache: bool) -> None:
        self._holding = holding
        self._quantised_cache = quantised_cache
        self._spec = spec = holding.shard.spec
        shard = holding.shard
        self._sums_ranks = shard.size > 1
        self._program = program = ProgramBuilder()
        self._heads, kv_heads, size = len(shard.query_heads), len(shard.kv_heads), spec.head_dim
        all_heads = self._heads + 2 * kv_heads
        self._residual = program.buffer("residual", Rows.TOKENS, spec.hidden_size)
        self._x = program.buffer("x", Rows.TOKENS, spec.hidden_size)
        self._qkv = program.buffer("qkv", Rows.TOKENS, all_heads * size)
        self._qkv_heads = program.view("qkv.heads", self._qkv, all_heads, size)
        self._attended = program.buffer("attended", Rows.TOKENS, self._heads * size)
        self._attended_heads = program.view("attended.heads", self._attended, self._heads, size)
        self._mlp = program.buffer("mlp", Rows.TOKENS, len(shard.intermediate))
        self._last = program.buffer("last", Rows.LOGITS, spec.hidden_size)
        self._logits = program.buffer("logits", Rows.LOGITS, len(shard.vocabulary))

    def build(self) -> Program:
        spec, program = self._spec, self._program
        self._holding.emit_embedding(program, program.named("ids"), self._residual)
        if self._sums_ranks:
            program.op("all_reduce", self._residual)
        for layer in range(spec.num_layers):
            self._layer(layer)
        if self._sums_ranks:
            program.op("add", self._x, self._residual)
        program.op("gather_rows", self._residual, program.named("logits_rows"), self._last)
        program.op("rms_norm", self._last, program.named("norm.weight"), spec.rms_norm_eps, self._last)
        self._holding.emit(program, EMBEDDING if spec.tie_word_embeddings else HEAD, self._last, self._logits)
        return program.build(self._logits)

    def _layer(self, layer: int) -> None:
        prefix = f"layers.{layer}."
        linears = {piece.name: piece for piece in layer_pieces(self._spec, prefix) if isinstance(piece, Linear)}
        self._norm(prefix + "input_norm.weight", is_first=layer == 0)
        self._holding.emit(self._program, linears[prefix + "qkv"], self._x, self._qkv)
        self._attention(layer, prefix)
        self._sublayer(linears[prefix + "o"], self._attended)
        self._norm(prefix + "mlp_norm.weight")
        self._holding.emit(self._program, linears[prefix + "gate_up"], self._x, self._mlp, Epilogue.GATED)
        self._sublayer(linears[prefix + "down"], self._mlp)

    def _norm(self, name: str, is_first: bool = False) -> None:
        """x = the norm of the residual stream, to which the last sublayer's sum over the ranks may still be added."""
        weight, eps = self._program.named(name), self._spec.rms_norm_eps
        if self._sums_ranks and not is_first:
            self._program.op("add_rms_norm", self._x, self._residual, weight, eps, self._x)
        else:
            self._program.op("rms_norm", self._residual, weight, eps, self._x)

    def _sublayer(self, linear: Linear, x: Slot) -> None:
        """Alone, a rank adds the product to the residual stream at once; several sum theirs first."""
        if self._sums_ranks:
            self._holding.emit(self._program, linear, x, self._x)
            self._program.op("all_reduce", self._x)
        else:
            self._holding.emit(self._program, linear, x, self._residual, Epilogue.ADD)

    def _attention(self, layer: int, prefix: str) -> None:
        """From queries, keys and values to what each query head saw; new keys and values go to the cache first."""
        program, spec = self._program, self._spec
        norms = [program.named(prefix + f"{part}_norm.weight") if spec.qk_norm else None for part in ("q", "k")]
        center = program.named(f"k_center.{layer}") if self._quantised_cache and has_centers(spec) else None
        cache = [program.named(f"{part}.{layer}") for part in ("k_cache", "v_cache", "k_scales", "v_scales")]
        program.op(
            "rotary_append",
            self._qkv_heads,
            self._heads,
            (*norms, spec.rms_norm_eps),
            (program.named("positions"), program.named("cos_sin")),
            (int(self._quantised_cache), center),
            tuple(cache),
            program.named("slots"),
        )
        program.op("attention", self._qkv_heads, *cache, program.named("attention"), self._attended_heads)
