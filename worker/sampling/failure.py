"""Why a row got no token: the negative numbers that stand in its place, and the errors that its request ends with."""

from __future__ import annotations

from allspan.protos.errors import AllspanError, InternalError, InvalidRequest

NOT_FINITE = -1
ALL_MASKED = -2


def failure(token: int, position: int) -> AllspanError:
    """The error for `token`, one of the above, in the place of the request's token `position`."""
    if token == ALL_MASKED:
        return InvalidRequest(
            f"no token is left for position {position}: allowed_token_ids, bad_words_ids, no_repeat_ngram_size and "
            "min_tokens together mask every one; relax one of them"
        )
    return InternalError(f"the model's logits for token {position} of the request are not finite numbers")
