"""The one decoder: a ModelSpec and a rank's shard become a Program. No family has one of its own."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.worker.models.layout import EMBEDDING, HEAD, Holding, Linear, layer_pieces
from allspan.worker.models.spec import ModelSpec
from allspan.worker.program.program import Program, ProgramBuilder, Rows, Slot
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


@dataclass(frozen=True, slots=True)
class _Stream:
    """The buffers that a sublayer goes through, for one kind of rows."""

    residual: Slot
    x: Slot
    attended: Slot
    mlp: Slot


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
        self._qkv = program.buffer("qkv", Rows.TOKENS, all_heads * size)
        self._qkv_heads = program.view("qkv.heads", self._qkv, all_heads, size)
        self._tokens = self._stream("", Rows.TOKENS)
        self._attended_heads = program.view("attended.heads", self._tokens.attended, self._heads, size)
        self._logits = program.buffer("logits", Rows.LOGITS, len(shard.vocabulary), is_exact=True)

    def build(self) -> Program:
        spec, program, tokens = self._spec, self._program, self._tokens
        self._holding.emit_embedding(program, program.named("ids"), tokens.residual)
        if self._sums_ranks:
            program.op("all_reduce", tokens.residual)
        for layer in range(spec.num_layers - 1):
            self._attention_sublayer(layer)
            self._rest_of_layer(layer, tokens)
        self._attention_sublayer(spec.num_layers - 1)
        last = self._wanted_rows()
        self._rest_of_layer(spec.num_layers - 1, last)
        if self._sums_ranks:
            program.op("add", last.x, last.residual)
        program.op("rms_norm", last.residual, program.named("norm.weight"), spec.rms_norm_eps, last.x)
        self._holding.emit(program, EMBEDDING if spec.tie_word_embeddings else HEAD, last.x, self._logits)
        return program.build(self._logits)

    def _stream(self, prefix: str, rows: Rows) -> _Stream:
        widths = {
            "residual": self._spec.hidden_size,
            "x": self._spec.hidden_size,
            "attended": self._heads * self._spec.head_dim,
            "mlp": len(self._holding.shard.intermediate),
        }
        return _Stream(
            **{
                name: self._program.buffer(prefix + name, rows, width, is_exact=name == "residual")
                for name, width in widths.items()
            }
        )

    def _wanted_rows(self) -> _Stream:
        """Past the last attention no row is read by another: only those whose logits are wanted go on."""
        last, rows = self._stream("last.", Rows.LOGITS), self._program.named("logits_rows")
        self._program.op("gather_rows", self._tokens.attended, rows, last.attended)
        self._program.op("gather_rows", self._tokens.residual, rows, last.residual)
        return last

    def _attention_sublayer(self, layer: int) -> None:
        """From the residual stream to `attended`."""
        prefix = f"layers.{layer}."
        self._norm(prefix + "input_norm.weight", self._tokens, is_first=layer == 0)
        self._holding.emit(self._program, self._linears(layer)["qkv"], self._tokens.x, self._qkv)
        self._attention(layer, prefix)

    def _rest_of_layer(self, layer: int, stream: _Stream) -> None:
        linears = self._linears(layer)
        self._sublayer(linears["o"], stream.attended, stream)
        self._norm(f"layers.{layer}.mlp_norm.weight", stream)
        self._holding.emit(self._program, linears["gate_up"], stream.x, stream.mlp, Epilogue.GATED)
        self._sublayer(linears["down"], stream.mlp, stream)

    def _linears(self, layer: int) -> dict[str, Linear]:
        prefix = f"layers.{layer}."
        pieces = layer_pieces(self._spec, prefix)
        return {piece.name.removeprefix(prefix): piece for piece in pieces if isinstance(piece, Linear)}

    def _norm(self, name: str, stream: _Stream, is_first: bool = False) -> None:
        """x = the norm of the residual stream, to which the last sublayer's sum over the ranks may still be added."""
        weight, eps = self._program.named(name), self._spec.rms_norm_eps
        if self._sums_ranks and not is_first:
            self._program.op("add_rms_norm", stream.x, stream.residual, weight, eps, stream.x)
        else:
            self._program.op("rms_norm", stream.residual, weight, eps, stream.x)

    def _sublayer(self, linear: Linear, x: Slot, stream: _Stream) -> None:
        """Alone, a rank adds the product to the residual stream at once; several sum theirs first."""
        if self._sums_ranks:
            self._holding.emit(self._program, linear, x, stream.x)
            self._program.op("all_reduce", stream.x)
        else:
            self._holding.emit(self._program, linear, x, stream.residual, Epilogue.ADD)

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
