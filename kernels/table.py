"""The ops table: (op, backend) -> implementation, chosen once when an op set is opened.

A backend is one row of `BACKENDS`; an implementation is one entry "module:function", imported when first needed.
What a backend lacks, it takes from the reference, and says so.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from allspan.kernels.errors import BackendUnavailable
from allspan.kernels.ops import OpSet

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """One way to run the ops.

    Without `module` the ops are plain functions. A backend with threads or variants names the module that has
    `variants() -> tuple[str, ...]` (best first, empty where it cannot run, and never raising) and
    `open_runtime(variant: str | None, threads: int, cpus: tuple[int, ...]) -> (variant, runtime)`, which raises
    BackendUnavailable; its ops take the runtime as their first argument.
    """

    ops: Mapping[str, str]
    module: str | None = None
    program: str | None = None
    """What runs a whole program in one call; made of the runtime, the number of slots and the ranks' window or None."""
    activations: tuple[torch.dtype, ...] = (torch.float32,)
    """What may go from op to op (`activations_of`); the residual stream and logits are float32 everywhere."""
    device: str = "cpu"
    """Where its tensors lie."""
    kernel_names: Mapping[str, str] = field(default_factory=dict)
    """(op's name, its arguments) -> name of the kernel that runs them, for ops that choose among several."""


EXPERT_OPS = (
    *("route", "expert_linear", "expert_gated_linear", "expert_gated_mul", "expert_sum", "expert_gather"),
    "scale_rows",
)

LATENT_OPS = ("latent_append", "latent_attention")
ADAPTER_OPS = ("route_adapters", "embed_adapters", "add_adapters")

REFERENCE = {
    "embedding": "allspan.kernels.reference.elementwise:embedding",
    "rms_norm": "allspan.kernels.reference.elementwise:rms_norm",
    "add_rms_norm": "allspan.kernels.reference.elementwise:add_rms_norm",
    "layer_norm": "allspan.kernels.reference.elementwise:layer_norm",
    "add": "allspan.kernels.reference.elementwise:add",
    "linear": "allspan.kernels.reference.linear:linear",
    "head_norm": "allspan.kernels.reference.elementwise:head_norm",
    "mean_squares": "allspan.kernels.reference.elementwise:mean_squares",
    "norm_heads": "allspan.kernels.reference.elementwise:norm_heads",
    "rotary": "allspan.kernels.reference.elementwise:rotary",
    "hadamard": "allspan.kernels.reference.elementwise:hadamard",
    "append_kv": "allspan.kernels.reference.attention:append_kv",
    "rotary_append": "allspan.kernels.reference.rotary_append:rotary_append",
    "attention": "allspan.kernels.reference.attention:attention",
    "gated_mul": "allspan.kernels.reference.elementwise:gated_mul",
    "soft_cap": "allspan.kernels.reference.elementwise:soft_cap",
    "gather_rows": "allspan.kernels.reference.elementwise:gather_rows",
    "gather_columns": "allspan.kernels.reference.elementwise:gather_columns",
    "put_rows": "allspan.kernels.reference.elementwise:put_rows",
    "put_columns": "allspan.kernels.reference.elementwise:put_columns",
    "packed_embedding": "allspan.kernels.reference.packed_linear:packed_embedding",
    "packed_linear": "allspan.kernels.reference.packed_linear:packed_linear",
    "packed_linear_add": "allspan.kernels.reference.packed_linear:packed_linear_add",
    "packed_gated_linear": "allspan.kernels.reference.packed_linear:packed_gated_linear",
    **{op: f"allspan.kernels.reference.experts:{op}" for op in (*EXPERT_OPS, "norm_route")},
    **{op: f"allspan.kernels.reference.latent:{op}" for op in (*LATENT_OPS, "append_and_attend")},
    **{op: f"allspan.kernels.reference.adapters:{op}" for op in (*ADAPTER_OPS, "adapted_linear")},
}

_COMPILED = (
    *("embedding", "rms_norm", "add_rms_norm", "add", "linear", "head_norm", "rotary", "hadamard", "append_kv"),
    *("rotary_append", "attention", "gated_mul", "soft_cap", "layer_norm", "gather_rows", "put_columns"),
    *("packed_embedding", "packed_linear", "packed_linear_add", "packed_gated_linear"),
    *("mean_squares", "norm_heads"),
    *EXPERT_OPS,
    *LATENT_OPS,
    *ADAPTER_OPS,
    "adapted_linear",
)
CPU = {op: f"allspan.kernels.cpu._native:{op}" for op in _COMPILED}
CPU |= {op: REFERENCE[op] for op in ("gather_columns", "put_rows")}  # no decode of a CPU has them
CPU |= {op: REFERENCE[op] for op in ("norm_route", "append_and_attend")}  # programs of CPUs are not changed for it

CUDA = {
    "embedding": "allspan.kernels.cuda.rows.elementwise:embedding",
    "head_norm": "allspan.kernels.cuda.rows.rotary_append:head_norm",
    "mean_squares": "allspan.kernels.cuda.rows.all_heads:mean_squares",
    "norm_heads": "allspan.kernels.cuda.rows.all_heads:norm_heads",
    "rotary": "allspan.kernels.cuda.rows.rotary_append:rotary",
    "hadamard": "allspan.kernels.cuda.rows.rotary_append:hadamard",
    "append_kv": "allspan.kernels.cuda.rows.rotary_append:append_kv",
    "linear": "allspan.kernels.cuda.moe.rows:linear",
    "add": "allspan.kernels.cuda.rows.elementwise:add",
    "rms_norm": "allspan.kernels.cuda.rows.rms_norm:rms_norm",
    "add_rms_norm": "allspan.kernels.cuda.rows.rms_norm:add_rms_norm",
    "layer_norm": "allspan.kernels.cuda.rows.rms_norm:layer_norm",
    "gated_mul": "allspan.kernels.cuda.rows.elementwise:gated_mul",
    "soft_cap": "allspan.kernels.cuda.rows.elementwise:soft_cap",
    "gather_rows": "allspan.kernels.cuda.rows.elementwise:gather_rows",
    "gather_columns": "allspan.kernels.cuda.rows.gather_columns:gather_columns",
    "put_rows": REFERENCE["put_rows"],
    "put_columns": REFERENCE["put_columns"],
    "rotary_append": "allspan.kernels.cuda.rows.rotary_append:rotary_append",
    "attention": "allspan.kernels.cuda.attention.attention:attention",
    "packed_linear": "allspan.kernels.cuda.linear.packed_linear:packed_linear",
    "packed_linear_add": "allspan.kernels.cuda.linear.packed_linear:packed_linear_add",
    "packed_gated_linear": "allspan.kernels.cuda.linear.packed_linear:packed_gated_linear",
    "packed_embedding": "allspan.kernels.cuda.linear.packed_embedding:packed_embedding",
    "route": "allspan.kernels.cuda.moe.route:route",
    "norm_route": "allspan.kernels.cuda.moe.norm_route:norm_route",
    **{op: f"allspan.kernels.cuda.moe.product:{op}" for op in ("expert_linear", "expert_gated_linear", "expert_sum")},
    "route_adapters": "allspan.kernels.cuda.adapters.route:route_adapters",
    "embed_adapters": "allspan.kernels.cuda.adapters.embed:embed_adapters",
    "add_adapters": "allspan.kernels.cuda.adapters.expand:add_adapters",
    "adapted_linear": "allspan.kernels.cuda.adapters.adapted_linear:adapted_linear",
    "latent_append": "allspan.kernels.cuda.latent.append:latent_append",
    "latent_attention": "allspan.kernels.cuda.latent.attention:latent_attention",
    "append_and_attend": "allspan.kernels.cuda.latent.attention:append_and_attend",
    **{op: f"allspan.kernels.cuda.moe.rows:{op}" for op in ("expert_gather", "expert_gated_mul", "scale_rows")},
}

BACKENDS: Mapping[str, Backend] = {
    "cpu": Backend(CPU, module="allspan.kernels.cpu.backend", program="allspan.kernels.cpu._native:Program"),
    "reference": Backend(REFERENCE),
    "cuda": Backend(
        CUDA,
        module="allspan.kernels.cuda.jit.runtime",
        activations=(torch.bfloat16, torch.float16),
        device="cuda",
        kernel_names=dict.fromkeys(
            ("packed_linear", "packed_linear_add", "packed_gated_linear"),
            "allspan.kernels.cuda.linear.packed_linear:kernel_name",
        ),
    ),
}
"""In order of preference."""


class LoadedOps:
    """An op set: one attribute per op, and `name`, the backend and its variant ("cpu/avx512", "reference"). `runtime`
    is what the backend's ops take first (None: nothing), for other kernels that share its threads; `program` makes what
    runs many ops in one call, all but `reference_ops` (None: the backend has no such thing)."""

    def __init__(
        self,
        name: str,
        ops: Mapping[str, Callable[..., None]],
        runtime: Any = None,
        program: Callable[..., Any] | None = None,
        activations: tuple[torch.dtype, ...] = (torch.float32,),
        reference_ops: frozenset[str] = frozenset(),
        kernel_names: Mapping[str, Callable[..., str]] | None = None,
    ) -> None:
        self.name = name
        self.reference_ops = reference_ops
        self.activations = activations
        self.runtime = runtime
        self.program = program
        self._kernel_names = kernel_names or {}
        for op, implementation in ops.items():
            setattr(self, op, implementation)

    def op(self, name: str) -> Callable[..., None]:
        return cast(Callable[..., None], getattr(self, name))

    def kernel_name(self, op: str, arguments: Sequence[Any]) -> str:
        """Returns the name of the kernel that runs an op with these arguments, "" where the op has one alone."""
        name = self._kernel_names.get(op)
        return "" if name is None else name(op, *arguments)

    def __repr__(self) -> str:
        return f"LoadedOps({self.name})"


def activations_of(ops: OpSet, held: torch.dtype) -> torch.dtype:
    """The dtype of what goes from op to op in a model whose plain weights are held in `held`: the same, where the ops
    take it."""
    return held if held in ops.activations else ops.activations[0]


def op_set(backend: str = "auto", threads: int = 1, cpus: tuple[int, ...] = ()) -> OpSet:
    """The op set of a backend: "cpu", "reference", "cuda", one variant as in "cpu/avx2", or "auto": the best for the
    CPU's tensors that runs here.

    `threads` work on each op, the calling one included; they are pinned to `cpus`, one each, when these are given.
    Raises BackendUnavailable for a backend that cannot run here (never for "auto"), ValueError for bad arguments and
    for an instruction set that is forced (`ALLSPAN_ISA`) and cannot run here, StaleModule for a compiled module that
    was made from other sources.
    """
    if threads < 1:
        raise ValueError(f"threads: {threads} is not a number of threads (at least 1)")
    if backend != "auto":
        return _open(backend, threads, cpus)
    for name in (name for name, backend in BACKENDS.items() if backend.device == "cpu"):
        try:
            return _open(name, threads, cpus)
        except BackendUnavailable as error:
            logger.warning("kernels: no %s backend (%s); trying the next one, which is slower", name, error)
    raise BackendUnavailable("kernels: no backend runs here")


def backends() -> tuple[str, ...]:
    """Every backend and variant for the CPU's tensors that this machine can run, best first: ("cpu/avx512", …,
    "reference")."""
    names: list[str] = []
    for name, backend in BACKENDS.items():
        if backend.device != "cpu":
            continue
        if backend.module is None:
            names.append(name)
        else:
            names += [f"{name}/{variant}" for variant in importlib.import_module(backend.module).variants()]
    return tuple(names)


def _open(name: str, threads: int, cpus: tuple[int, ...]) -> OpSet:
    family, _, variant = name.partition("/")
    if family not in BACKENDS:
        raise ValueError(f"backend: {name!r} is not known (auto, {', '.join(BACKENDS)})")
    backend = BACKENDS[family]
    if backend.module is None:
        ops = _resolve(family, backend, None)
        return cast(OpSet, LoadedOps(family, ops, activations=backend.activations, reference_ops=_borrowed(backend)))
    opened, runtime = importlib.import_module(backend.module).open_runtime(variant or None, threads, cpus)
    program = partial(_load(backend.program), runtime) if backend.program else None
    ops = _resolve(family, backend, runtime)
    names = {op: _load(target) for op, target in backend.kernel_names.items()}
    borrowed = _borrowed(backend)
    return cast(OpSet, LoadedOps(f"{family}/{opened}", ops, runtime, program, backend.activations, borrowed, names))


def _borrowed(backend: Backend) -> frozenset[str]:
    """The ops that the backend takes from the reference, whether it says so or has none of its own."""
    return frozenset(op for op, reference in REFERENCE.items() if backend.ops.get(op, reference) == reference)


def _resolve(name: str, backend: Backend, runtime: Any) -> dict[str, Callable[..., None]]:
    missing = [op for op in REFERENCE if op not in backend.ops]
    if missing:
        logger.warning("kernels: backend %s has no %s; using the reference for it", name, ", ".join(missing))
    ops = {op: _load(REFERENCE[op]) for op in missing}
    for op, target in backend.ops.items():
        function = _load(target)
        ops[op] = function if runtime is None or target == REFERENCE[op] else partial(function, runtime)
    return ops


def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), function))
