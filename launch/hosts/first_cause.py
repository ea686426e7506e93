"""The rank whose end was the cause of a world's end, among the ends of many ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable

from allspan.launch.hosts.messages import RankExit

NEAR_S = 0.02
"""Seconds by which the clocks of two hosts may be reckoned wrongly."""
HEARSAY = re.compile(
    r"socket closed|connection (reset|refused)|broken pipe|lost (connection|communication)|MPI_ERR|MPI_Abort|"
    r"mca_btl_tcp|calling abort|waited .* s for rank",
    re.IGNORECASE,
)
"""Words of a rank that ended because another one had: it has heard of a death and was not its cause."""


def first_cause(exits: Iterable[RankExit]) -> RankExit | None:
    """Returns the end that came first, on a clock common to all hosts, of those that have a cause of their own; of the
    others when there is none of these; None when no rank ended.

    Of ends on two hosts at nearly the same time, a signal is the cause and not an exit code: nobody passed it on."""
    ends = sorted(exits, key=lambda end: end.moment)
    own = [end for end in ends if is_own(end)]
    if not own:
        return ends[0] if ends else None
    near = [end for end in own if end.host != own[0].host and end.moment <= own[0].moment + NEAR_S and end.signal]
    return near[0] if near and not own[0].signal else own[0]


def is_own(end: RankExit) -> bool:
    """Returns whether a rank's end may be a first cause: nobody ended it, and it does not speak of another's end."""
    if end.followed or end.ended_by or not (end.signal or end.code):
        return False
    return bool(end.signal and end.signal != 6) or not HEARSAY.search(end.report or end.words)
