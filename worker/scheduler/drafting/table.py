"""The drafters by the method that asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.speculation import REPLAY, Speculation
from allspan.worker.scheduler.drafting.bigram import BigramDrafter
from allspan.worker.scheduler.drafting.drafter import Drafter
from allspan.worker.scheduler.drafting.forced import ForcedTokens
from allspan.worker.scheduler.drafting.ngram import NgramDrafter
from allspan.worker.scheduler.drafting.rank_drafts import RankDrafts
from allspan.worker.scheduler.drafting.replay import ReplayDrafter
from allspan.worker.scheduler.drafting.suffix import SuffixDrafter

DRAFTERS: dict[str, Callable[[Speculation], Sequence[Drafter]]] = {
    REPLAY: lambda asked: (ReplayDrafter(asked),),
    **dict.fromkeys(("draft_model", "eagle3", "mtp"), lambda asked: (ForcedTokens(), RankDrafts(), BigramDrafter())),
    "ngram": lambda asked: (NgramDrafter(asked),),
    "suffix": lambda asked: (ForcedTokens(), SuffixDrafter(asked), BigramDrafter()),
}
"""A method's drafters. Where two propose different tokens, the likelier one counts; of equal ones the first."""


def drafters_of(asked: Speculation) -> Sequence[Drafter]:
    """New ones. Raises ConfigError for a method that is not in DRAFTERS."""
    if asked.method not in DRAFTERS:
        known = ", ".join(sorted(DRAFTERS.keys() - {REPLAY}))
        raise ConfigError(f"the speculation method is {asked.method!r}, must be one of {known}")
    return DRAFTERS[asked.method](asked)
