"""Why a row got no token: the negative numbers that stand in its place, and the errors that its request ends with."""

from __future__ import annotations

from allspan.kernels.abi.sampling import ALL_MASKED
from allspan.protos.api.errors import AllspanError, InternalError, InvalidRequest
from allspan.protos.api.sampling import MASKING_FIELDS

GRAMMAR_ENDED = -3
"""No failure: the text is whole, nothing may follow, and no id may be sampled that ends it."""
GRAMMAR_FAILED = -4


def failure(token: int, position: int) -> AllspanError | None:
    """The error for `token`, one of the above, in the place of the request's token `position`; None: it is none."""
    if token == GRAMMAR_ENDED:
        return None
    if token == ALL_MASKED:
        return InvalidRequest(
            f"no token is left for position {position}: {', '.join(MASKING_FIELDS[:-1])} and {MASKING_FIELDS[-1]} "
            "together mask every one; relax one of them"
        )
    if token == GRAMMAR_FAILED:
        return InvalidRequest(
            f"grammar cannot go on at position {position}: it has grown beyond its limits, or takes too long; make it "
            "simpler (fewer alternatives for one text, shorter repetitions)",
            "grammar",
        )
    return InternalError(f"the model's logits for token {position} of the request are not finite numbers")
