"""The one decoder: a ModelSpec and a rank's shard become a Program. No family has one of its own."""

from __future__ import annotations

from allspan.worker.models.layout import Holding, Linear, layer_pieces
from allspan.worker.models.program import Program, ProgramBuilder, Rows, Slot
from allspan.worker.models.spec import ModelSpec


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
        self._program = program = ProgramBuilder()
        heads, kv_heads, size = len(shard.query_heads), len(shard.kv_heads), spec.head_dim
        self._residual = program.buffer("residual", Rows.TOKENS, spec.hidden_size)
        self._x = program.buffer("x", Rows.TOKENS, spec.hidden_size)
        self._q = program.buffer("q", Rows.TOKENS, heads * size)
        self._k = program.buffer("k", Rows.TOKENS, kv_heads * size)
        self._v = program.buffer("v", Rows.TOKENS, kv_heads * size)
        self._attended = program.buffer("attended", Rows.TOKENS, heads * size)
        self._q_heads = program.view("q.heads", self._q, heads, size)
        self._k_heads = program.view("k.heads", self._k, kv_heads, size)
        self._v_heads = program.view("v.heads", self._v, kv_heads, size)
        self._attended_heads = program.view("attended.heads", self._attended, heads, size)
        self._gate_up = program.buffer("gate_up", Rows.TOKENS, 2 * len(shard.intermediate))
        self._mlp = program.buffer("mlp", Rows.TOKENS, len(shard.intermediate))
        self._last = program.buffer("last", Rows.LOGITS, spec.hidden_size)
        self._logits = program.buffer("logits", Rows.LOGITS, len(shard.vocabulary))

    def build(self) -> Program:
        spec, program = self._spec, self._program
        table = program.named("embedding.weight")
        first_row = self._holding.shard.vocabulary.start
        program.op("embedding", program.named("ids"), table, first_row, self._residual)
        self._sum_ranks(self._residual)
        for layer in range(spec.num_layers):
            self._layer(layer)
        program.op("add", self._x, self._residual)
        program.op("gather_rows", self._residual, program.named("logits_rows"), self._last)
        self._norm("norm.weight", self._last)
        if spec.tie_word_embeddings:
            program.op("linear", self._last, table, None, self._logits)
        else:
            self._linear(Linear("lm_head", ("lm_head",)), self._last, self._logits)
        return program.build(self._logits)

    def _layer(self, layer: int) -> None:
        program, spec = self._program, self._spec
        prefix = f"layers.{layer}."
        linears = {piece.name: piece for piece in layer_pieces(spec, prefix) if isinstance(piece, Linear)}
        norm = program.named(prefix + "input_norm.weight")
        if layer == 0:
            program.op("rms_norm", self._residual, norm, spec.rms_norm_eps, self._x)
        else:
            program.op("add_rms_norm", self._x, self._residual, norm, spec.rms_norm_eps, self._x)
        for name, out in (("q", self._q), ("k", self._k), ("v", self._v)):
            self._linear(linears[prefix + name], self._x, out)
        self._attention(layer, prefix)
        self._linear(linears[prefix + "o"], self._attended, self._x)
        self._sum_ranks(self._x)
        norm = program.named(prefix + "mlp_norm.weight")
        program.op("add_rms_norm", self._x, self._residual, norm, spec.rms_norm_eps, self._x)
        self._linear(linears[prefix + "gate_up"], self._x, self._gate_up)
        program.op("silu_mul", self._gate_up, self._mlp)
        self._linear(linears[prefix + "down"], self._mlp, self._x)
        self._sum_ranks(self._x)

    def _attention(self, layer: int, prefix: str) -> None:
        """From q, k, v to what each query head saw; the new keys and values go to the cache first."""
        program, spec = self._program, self._spec
        q, k, v = self._q_heads, self._k_heads, self._v_heads
        if spec.qk_norm:
            program.op("head_norm", q, program.named(prefix + "q_norm.weight"), spec.rms_norm_eps)
            program.op("head_norm", k, program.named(prefix + "k_norm.weight"), spec.rms_norm_eps)
        program.op("rotary", q, k, program.named("positions"), program.named("cos_sin"))
        if self._quantised_cache:
            program.op("hadamard", q, None)
            program.op("hadamard", k, program.named(f"k_center.{layer}") if has_centers(spec) else None)
        cache = [program.named(f"{part}.{layer}") for part in ("k_cache", "v_cache", "k_scales", "v_scales")]
        program.op("append_kv", k, v, *cache, program.named("slots"))
        program.op("attention", q, *cache, program.named("attention"), self._attended_heads)

    def _linear(self, linear: Linear, x: Slot, out: Slot) -> None:
        suffixes = [name.removeprefix(linear.name + ".") for name in self._holding.tensors(linear)]
        weights = {suffix: self._program.named(f"{linear.name}.{suffix}") for suffix in suffixes}
        self._holding.method.emit(self._program, weights, x, out)

    def _norm(self, name: str, x: Slot) -> None:
        self._program.op("rms_norm", x, self._program.named(name), self._spec.rms_norm_eps, x)

    def _sum_ranks(self, x: Slot) -> None:
        if self._holding.shard.size > 1:
            self._program.op("all_reduce", x)
