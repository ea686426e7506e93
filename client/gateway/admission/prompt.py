"""How a request wants its prompt read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allspan.protos.api.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The same for a text, token ids and a conversation. None: as the endpoint does by itself."""

    add_special_tokens: bool | None = None
    """Wrap a text as the model wants its prompts; a conversation's template has done so already."""
    last_tokens: int | None = None
    """Only so many of the prompt's last tokens; -1: as many as leave room for `max_tokens`."""
    max_tokens: int | None = None
    add_generation_prompt: bool = True
    """A conversation ends with the beginning of the assistant's turn."""
    only_counted: bool = False
    """It is not going to run: none of it, or more than the context holds, is as good."""

    def truncated(self, ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        """InvalidRequest when that cannot be."""
        keep = self.last_tokens
        if keep is None:
            return ids
        most = max_model_len - 1
        if keep != -1 and not 1 <= keep <= most:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {keep}, must be -1 (as many as fit) or from 1 to {most}",
                "truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max_model_len - min(max(self.max_tokens or 1, 1), most)
        return ids[-keep:]


AS_USUAL = PromptOptions()
