"""How a mixture of experts chooses them: an attribute of the op `route`, the same for every token of a layer."""

from __future__ import annotations

from dataclasses import dataclass

SCORES = ("softmax", "sigmoid", "softmax_of_chosen")
"""How logits become scores: "softmax_of_chosen" takes the logits themselves, and the softmax of those chosen as their
weights."""

GROUP_SCORES = ("max", "two_best")
"""What a group of experts is worth: its best score, or the sum of its two best."""


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Each token goes to the `top_k` experts of the largest choices, a choice being the score and a bias that does
    nothing else. Between equal ones the lower number wins."""

    top_k: int
    score: str = "softmax"
    """One of `SCORES`."""
    groups: int = 1
    """Equal runs of experts, of which `kept_groups` are chosen first; choices of the others do not count."""
    kept_groups: int = 1
    group_score: str = "two_best"
    """One of `GROUP_SCORES`."""
    normalises: bool = False
    """Whether the scores of the chosen are divided by their sum plus `epsilon`."""
    epsilon: float = 0.0
    scale: float = 1.0
    """The factor of all weights."""
