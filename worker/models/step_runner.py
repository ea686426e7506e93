"""StepRunner: runs a model's program for each step, op by op or from what the device has recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from allspan.protos.api.engine import OpProfile
from allspan.worker.step.backend import Executor
from allspan.worker.step.inputs import StepInputs, StepMetadata, axis_name, group_name
from allspan.worker.step.model import Recording
from allspan.worker.step.row_inputs import POSITION_AXES

_NamedStep = tuple[dict[str, Any], int, int, int]
"""What a step's inputs are to the program: by its names, tokens, rows of logits, tokens that the rank attends for."""
_MOST_NAMED = 4
"""The steps of a request alternate between few lengths."""


class StepRunner:
    """Gives the program its inputs by their names: those of the step, and the metadata of each attention block."""

    def __init__(
        self,
        executor: Executor,
        metas: Mapping[str, tuple[int, StepMetadata]],
        num_groups: int,
        check: Callable[[], None],
        row_numbers: Tensor | None = None,
    ) -> None:
        """`metas`: the program's name for each block's metadata, with its cache group. `check` raises where the
        collectives have failed. `row_numbers`: 0, 1, … for all rows that a step may have, where a token has several
        positions."""
        self._executor = executor
        self._metas = dict(metas)
        self._num_groups = num_groups
        self._check = check
        self._row_numbers = row_numbers
        self._named_steps: list[tuple[StepInputs, _NamedStep]] = []
        """The last inputs, the latest first."""
        self._graphs: dict[tuple[int, ...], Recording] = {}
        """The recorded steps, keyed by the place of their inputs."""
        self._is_profiling = False

    @property
    def step_metadata(self) -> tuple[StepMetadata, ...]:
        """See `allspan.worker.step.model.DeviceModel`."""
        by_group = sorted(self._metas.values(), key=lambda each: each[0])
        return tuple(meta for _, meta in by_group)

    def run(self, inputs: StepInputs) -> Tensor:
        """The output's rows of this step, a view that the next run overwrites."""
        self._check()
        if inputs.place in self._graphs and inputs.embeddings is None and not self._is_profiling:
            return self._graphs[inputs.place].replay()[: inputs.num_rows]
        output = self._executor.run(*self._named_once(inputs))
        return output[: inputs.num_rows] if inputs.bucket else output

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """What has been captured."""
        return tuple(self._graphs.values())

    def capture(self, inputs: StepInputs, record: Callable[[Callable[[], Tensor]], Recording]) -> None:
        """Has the device record the step by `record`; later steps in its place are replayed."""
        step = self._named(inputs)
        self._graphs[inputs.place] = record(lambda: self._executor.run(*step))

    def forget_graphs(self) -> None:
        """Gives up what was captured, and its memory; steps are launched op by op until they are captured again."""
        self._graphs.clear()

    def start_profile(self) -> None:
        """Times every op of the coming steps, from zero; on a GPU it waits for each, which slows the step."""
        self._is_profiling = True
        self._executor.start_profile()

    def stop_profile(self) -> None:
        """Stops timing; what was measured stays readable."""
        self._is_profiling = False
        self._executor.stop_profile()

    def profile(self) -> tuple[OpProfile, ...]:
        """The time of each op on this rank since `start_profile`, the longest in total first; empty before any."""
        return self._executor.profile()

    def _named_once(self, inputs: StepInputs) -> _NamedStep:
        """`_named`, for inputs that come again."""
        for known, step in self._named_steps:
            if known is inputs:
                return step
        self._named_steps.insert(0, (inputs, self._named(inputs)))
        del self._named_steps[_MOST_NAMED:]
        return self._named_steps[0][1]

    def _named(self, inputs: StepInputs) -> _NamedStep:
        num_own = inputs.positions.shape[0]
        groups = [inputs.of_group(group) for group in range(self._num_groups)]
        values = {
            "ids": inputs.ids,
            "positions": inputs.positions,
            "logits_rows": inputs.logits_rows,
            "own_rows": inputs.own_rows,
            "own_places": inputs.own_places,
            "adapters": inputs.adapters,
            "embedding_rows": inputs.embeddings.rows if inputs.embeddings else None,
            "embedding_places": inputs.embeddings.at if inputs.embeddings else None,
            **{group_name("slots", group): own.slots for group, own in enumerate(groups)},
            **{name: meta.of(groups[group]) for name, (group, meta) in self._metas.items()},
        }
        if self._row_numbers is not None:
            axes = inputs.axes or (inputs.positions,) * len(POSITION_AXES)
            values |= {axis_name(axis): own for axis, own in zip(POSITION_AXES, axes, strict=True)}
            values["row_numbers"] = self._row_numbers[:num_own]
        return values, inputs.ids.shape[0], inputs.logits_rows.shape[0], num_own
