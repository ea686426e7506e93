"""The op set: the narrow waist between models and kernels.

Every op takes contiguous torch tensors (or, where it says so, such whose rows lie apart), writes into buffers that the
caller owns, allocates nothing that outlives the call and never looks at a value on the host to decide what to launch.
Index tensors are int32. `n` counts tokens, `H` is the hidden size, `d` the head size, `R` the number of requests in the
step.

Each signature below is the contract that every backend meets; `allspan.kernels.table` says which backend has which op.
Batch invariance: what an op writes for a row depends on that row's inputs alone, never on how many rows come with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol

import torch
from torch import Tensor

from allspan.kernels.adapter_ops import AdapterOps
from allspan.kernels.copy_ops import CopyOps
from allspan.kernels.fused_ops import FusedOps, T
from allspan.kernels.latent_tensors import LatentWeights
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.router_spec import RouterSpec

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
"""What a gated product may apply to its first part."""


class HeadNorms(NamedTuple, Generic[T]):
    """RMSNorm of each head of queries and of keys, before they turn; weights float32 [d], None: no norm."""

    q_weight: T | None
    k_weight: T | None
    eps: float


class Rotation(NamedTuple, Generic[T]):
    """Rotary embedding as `OpSet.rotary` takes it, and what queries are multiplied with afterwards."""

    positions: T
    cos_sin: T
    q_scales: T | None = None
    """float32 [max_positions], by the query's position; None: queries stay as they are."""


class HadamardRotation(NamedTuple, Generic[T]):
    """Whether queries and keys go through `OpSet.hadamard`, and the center of the keys, float32 [Hkv, d], or None."""

    is_on: bool
    k_center: T | None


class KvPages(NamedTuple, Generic[T]):
    """Pages and their scales as `OpSet.append_kv` takes them."""

    k_cache: T
    v_cache: T
    k_scales: T | None
    v_scales: T | None


class Routing(NamedTuple, Generic[T]):
    """Where each token goes in a mixture of experts, and the same sorted by expert. Slot i · k + j is the j-th choice
    of token i; a place is the number of an expert among those that this rank holds."""

    places: T
    """int32 [n, k]: -1 where another rank holds the expert; in each row ascending, those of other ranks last."""
    weights: T
    """float32 [n, k]: the factor of that expert's product."""
    slots: T
    """int32 [n, k]: the slots in the order of their places, then of tokens; behind them nothing that counts."""
    starts: T
    """int32 [1, places + 1]: where the slots of each place begin in that order, and where those of the last end."""


class OpSet(FusedOps, AdapterOps, CopyOps, Protocol):
    """Offered op by op. On the CPU, activations between ops and all sums are float32."""

    @property
    def name(self) -> str:
        """Backend and variant: "cpu/avx512", "reference"."""

    @property
    def runtime(self) -> Any:
        """The threads of the backend's kernels, which packing and sampling share; None: plain functions."""

    @property
    def activations(self) -> tuple[torch.dtype, ...]:
        """Dtypes that may go from op to op (`activations_of`); the residual stream and logits are float32."""

    @property
    def program(self) -> Callable[..., Any] | None:
        """Makes what runs many ops in one native call; None: the backend has no such thing."""

    def op(self, name: str) -> Callable[..., None]:
        """The op of that name, one of the following."""

    def kernel_name(self, op: str, arguments: Sequence[Any]) -> str:
        """Returns the name of the kernel that runs an op with these arguments, "" where the op has one alone."""

    @property
    def reference_ops(self) -> frozenset[str]:
        """The ops for which this backend takes the reference's function."""

    def embedding(self, ids: Tensor, weight: Tensor, first_row: int, out: Tensor) -> None:
        """out[n, H] = weight[ids - first_row] where that row is one of weight's, else 0 (another rank's row).

        ids int32 [n]; weight [V_rank, H].
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out[n, H] = x / sqrt(mean(x²) + eps) · weight. weight float32 [H]. `out` may be `x`; where it is
        not, rows of x may lie apart."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual += x, then out = rms_norm(residual). All [n, H]; `out` may be `x`."""

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out[n, H] = c / sqrt(mean(c²) + eps) · weight, where c = x - mean(x). weight float32 [H]. Also in place."""

    def add(self, x: Tensor, residual: Tensor) -> None:
        """residual[n, H] += x[n, H]."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out[n, N] = x[n, K] · weight[N, K]ᵀ (+ bias float32 [N]). One K-order for every n."""

    def packed_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor
    ) -> None:
        """out[:, column : column + N] = x[n, K] · Wᵀ (+ bias float32 [N]), with N = spec.features and K = spec.inputs.

        weight: uint8 of spec.shape, packed as `allspan.kernels.packed_spec` says; out [n, column + N or more], of which
        the other columns are left alone. x is first turned into what spec.activation says. One K-order for any n; with
        codes the same bits on every instruction set.
        """

    def packed_linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec, column: int, out: Tensor
    ) -> None:
        """Adds what packed_linear would write to what those columns of out hold."""

    def packed_gated_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: PackedSpec,
        column: int,
        activation: str,
        out: Tensor,
    ) -> None:
        """out[:, column : column + I] = activation(gate) · up, of a weight with two interleaved parts of I features
        each; activations are those of `gated_mul`."""

    def route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        places: Tensor,
        spec: RouterSpec,
        routing: Routing[Tensor],
        load: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """Chooses `spec.top_k` of E experts for each token: logits float32 [n, E], bias float32 [E], places int32
        [copies, E].

        In float32: scores = softmax or sigmoid of the logits; choices = scores + bias; if there are groups, those but
        the best `kept_groups` (between equal ones the lower) count as -inf; then the k largest choices, between equal
        ones the lower expert. Weights are scores, never choices. A token with a NaN among its logits gets the first k
        experts with weights NaN. An expert may have several copies: a token takes copy (sum of its experts' numbers)
        modulo copies, the same on all ranks, and places[copy, expert] says where this rank holds that one (-1: another
        rank does). load int64 [E], where it is not None: each expert's number of tokens of this step is added to it,
        whichever rank holds the expert. rows int32 [n], where it is not None: a token whose number is negative is
        padding, chooses no expert and is not counted.
        """

    def expert_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: PackedSpec,
        column: int,
        routing: Routing[Tensor],
        out: Tensor,
    ) -> None:
        """Each slot of a place: out[token, choice, column : column + N] = x[token] · weight[place]ᵀ (+ bias[place]).

        x [n, K], or with a row for each slot [n, k, K]; weight uint8 [places, *spec.shape]; bias float32 [places, N];
        out [n, k, column + N or more]. Other slots' rows are left as they are.
        """

    def expert_gated_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: PackedSpec,
        activation: str,
        routing: Routing[Tensor],
        out: Tensor,
        is_settled: bool = False,
    ) -> None:
        """Writes `gated_mul` of the two parts' columns that `expert_linear` would write. out [n, k, N / 2].
        is_settled: another op than what made the routing comes before this one, so that the routing is likely to be
        there already where a backend begins ops early; see `with_settled_routings` of allspan.worker.program.fused."""

    def expert_gather(self, x: Tensor, columns: Tensor, routing: Routing[Tensor], out: Tensor) -> None:
        """out[token, choice] = x[token, columns[place]] of each slot of a place, or of x [n, k, K] those of the slot's
        row: `gather_columns` with an order for each expert. x [n, K]; columns int32 [places, K]; out [n, k, K]. Other
        slots' rows are left as they are."""

    def expert_gated_mul(self, gate_up: Tensor, activation: str, routing: Routing[Tensor], out: Tensor) -> None:
        """`gated_mul` of the rows of each slot of a place. gate_up [n, k, 2 · I], out [n, k, I]."""

    def expert_sum(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: PackedSpec,
        routing: Routing[Tensor],
        adds: bool,
        out: Tensor,
    ) -> None:
        """out[n, N] = (or += if it `adds`) Σ of routing.weights[token, choice] · (x[token, choice] · weight[place]ᵀ
        (+ bias[place])) over the choices of a place; x [n, k, K]. The sum is made in float32, in ascending order of
        places, and then rounded or added."""

    def scale_rows(self, x: Tensor, logits: Tensor) -> None:
        """x[n, H] *= sigmoid(logits[n, 1]) in place."""

    def packed_embedding(self, ids: Tensor, weight: Tensor, spec: PackedSpec, first_row: int, out: Tensor) -> None:
        """out[n, K] = feature ids - first_row of a packed weight of one part where it has that feature, else 0.

        ids int32 [n]; K = spec.inputs.
        """

    def head_norm(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """rms_norm of each head of x [n, heads, d] in place (Qwen3's q/k norm). weight float32 [d]."""

    def mean_squares(self, x: Tensor, shares: Tensor, out: Tensor) -> None:
        """out[n, c] = Σ over heads h of shares[c, h] · Σ x[n, h]². x [n, heads, d], shares float32 [2, heads],
        out float32 [n, 2]. With shares of 1 / (heads of a kind · d) these are means of what all heads of a kind hold;
        ranks that have some of the heads add theirs up."""

    def norm_heads(self, x: Tensor, means: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
        """x[n, h] *= 1 / sqrt(means[n, c] + eps) · weight of h, for the first heads of x [n, heads, d] (c = 0, q_weight
        float32 [Hq · d]) and the next ones (c = 1, k_weight [Hkv · d]): rms_norm of all heads together, which
        `mean_squares` begins (MiniMax-M2's q/k norm). Other heads stay."""

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotates q [n, Hq, d] and k [n, Hkv, d] in place, pairing element i with i + rot/2 (the NeoX convention).

        positions int32 [n]; cos_sin float32 [max_positions, rot]: cosines in the first half, sines in the second.
        """

    def hadamard(self, x: Tensor, center: Tensor | None) -> None:
        """x [n, heads, d] = (x - center) · W in place; center float32 [heads, d], or None for 0.

        W repeats, along d, the symmetric and orthonormal Walsh-Hadamard matrix of the largest power of two that divides
        d: the same on queries and keys leaves their products as they are, and spreads what stands out in a few elements
        over all, so that a few bits hold keys better (S. Ashkboos et al., QuaRot, arXiv:2404.00456). A center that all
        keys of a head have in common adds the same to all scores of a query, which the softmax takes out again.
        """

    def append_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scales: Tensor | None,
        v_scales: Tensor | None,
        slots: Tensor,
    ) -> None:
        """Writes k and v [n, Hkv, d] to the pages: slot = page · page_size + offset, int32 [n].

        k_cache and v_cache [pages, Hkv, page_size, e], of one dtype: float32 or of 16 bits (e = d, scales None), int8
        (e = d), or uint8 (e = ⌈d / 2⌉), which holds two elements of 4 bits a byte, the first in the low half; the last
        half byte of an odd d is 0.

        int8 and 4 bits are quantised for each token and head, and read as (n - zero) · scale. k_scales and v_scales
        float32 [pages, Hkv, 2, page_size] hold zeros, then scales. With least and most of the d elements x, and n from
        low to high (-128 … 127, or 0 … 15):
        scale = max((most - least) / (high - low), 1e-5), zero = round(low - least / scale), n = round(x / scale + zero)
        within low … high; halves round to even. So no x is off by more than scale / 2 (and float32's own rounding).
        A row with a NaN or an infinity, or whose range or zero is not finite, gets n = 0, zero = 0, scale = NaN: every
        read of it is NaN.
        """

    def rotary_append(
        self,
        qkv: Tensor,
        num_heads: int,
        norms: HeadNorms[Tensor],
        rotation: Rotation[Tensor],
        hadamard: HadamardRotation[Tensor],
        pages: KvPages[Tensor],
        slots: Tensor,
    ) -> None:
        """head_norm, rotary, hadamard and append_kv in one, in place, on qkv [n, Hq + 2·Hkv, d]: a token's queries
        (num_heads of them), keys and values. Between rotary and hadamard queries are multiplied with
        rotation.q_scales[position]. The bits are those of the single ops.
        """

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scales: Tensor | None,
        v_scales: Tensor | None,
        sinks: Tensor | None,
        meta: Any,
        out: Tensor,
    ) -> None:
        """Causal attention of every request's new tokens over its pages (which already hold the new tokens' K and V).

        Caches and scales are those of `append_kv`. What a page holds is what every query reads, a token's own included.
        out [n, Hq, d], with Hq this rank's query heads; q [n, Hq or more, d], of which the first Hq heads are read, so
        that it may be a fused buffer of queries, keys and values. Query i of the L new ones of a request with kv_len
        tokens sees the first kv_len - L + i + 1 of them, with a window the last ones of these.

        The logit of a query at position i and a key at position j is x = scale · (q · k), with a soft cap
        cap · tanh(x / cap), and with slopes that plus slope · (j - i). sinks float32 [Hq], or None: for each query head
        the logit of one more token, whose value is 0: it joins the softmax's denominator alone, and neither cap nor
        slope meets it. A query that sees no token gets zeros (and the log-sum-exp -inf, where one is returned).

        `meta` is what the device prepares of a step once for all layers. The CPU and the reference take an
        `AttentionMeta`; the CUDA kernels take a `allspan.kernels.cuda.attention.attention.StepAttention` of the same
        requests, cut into the tiles of their kernels.
        """

    def latent_append(
        self,
        q: Tensor,
        kv: Tensor,
        weight: Tensor,
        eps: float,
        rotation: Rotation[Tensor],
        cache: Tensor,
        scales: Tensor | None,
        slots: Tensor,
    ) -> None:
        """In place: rms_norm of the first L elements of kv [n, L + rot], a token's latent and its key that turns, with
        weight float32 [L]; rotary of the last rot elements of kv and of each head of q [n, Hq, d + rot], and q times
        rotation.q_scales[position]; then kv goes to cache [pages, 1, page_size, ..] as `append_kv` writes keys, or to
        one of float8_e4m3fn, with zero = 0, scale = max(most |x| / 448, 1e-5) and n = e4m3(x / scale). Rows of q and kv
        may lie apart."""

    def latent_attention(
        self,
        q: Tensor,
        weights: LatentWeights[Tensor],
        cache: Tensor,
        scales: Tensor | None,
        meta: Any,
        absorbed: Tensor,
        mixed: Tensor,
        out: Tensor,
    ) -> None:
        """`attention` of heads whose keys and values are made of one latent a token (DeepSeek-V2, arXiv:2405.04434).

        The cache is that of `latent_append`: L elements of the latent, then rot that all heads' keys end with. The key
        of a head is (latent · k_up, those that turn), its value latent · v_upᵀ. q [n, Hq, d + rot], out [n, Hq, e].
        `meta` is that of `attention` for Hq heads that read one KV head of L + rot elements. Rows of q may lie apart.

        A backend may make keys and values (2 · Hq · (d + rot + e) operations for a query and a token, and 2 · Hq · L ·
        (d + e) for each token read), or keep latents: (q · k_upᵀ) is the query of a latent, and v_up multiplies what
        latents give (2 · Hq · (2 · L + rot) for a query and a token, one row for all heads). Where results must not
        depend on a prompt's cuts, the second goes for all rows. `absorbed` [n, Hq, L + rot] and `mixed` [n, Hq, L] are
        room, float32 or q's dtype.
        """

    def gated_mul(self, gate_up: Tensor, activation: str, out: Tensor) -> None:
        """out[n, I] = activation(gate_up[:, :I]) · gate_up[:, I:].

        Of `ACTIVATIONS`: silu(x) = x / (1 + exp(-x)); gelu_tanh(x) = x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³)));
        clamped_swiglu is g / (1 + exp(-1.702 · g)) · (u + 1), where g is the first half, at most 7, and u the second,
        within -7 … 7; a NaN stays one.
        """

    def soft_cap(self, x: Tensor, cap: float) -> None:
        """x[n, V] = cap · tanh(x / cap) in place; cap > 0."""
