"""A `tokenizers` tokenizer whose control tokens are spelled with a frame."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from allspan.protos.text.tokenizers.control import BREAK, FRAME, ControlTexts


def framed_backend(
    backend: Backend, added: Mapping[int, AddedToken], control: ControlTexts
) -> tuple[Backend, dict[int, int]]:
    """The tokenizer, which shares the vocabulary of `backend`; and its ids that are others there, -1 for none."""
    made = Backend(backend.model)
    if backend.normalizer is not None:
        made.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        made.pre_tokenizer = backend.pre_tokenizer
    # New tokens are numbered from the vocabulary's size on, where a vocabulary with gaps has ids of its own.
    own = backend.get_vocab(with_added_tokens=False)
    spare = [f"{FRAME}{i}{BREAK}" for i in range(max(own.values(), default=-1) + 1 - len(own))]
    breaks = [AddedToken(text, normalized=False) for text in (*spare, BREAK)]
    made.add_special_tokens(breaks)
    spelled = {token_id: _spelled(token, control) for token_id, token in added.items()}
    made.add_special_tokens([token for token in spelled.values() if token.special])
    made.add_tokens([token for token in spelled.values() if not token.special])
    theirs = {token.content: token_id for token_id, token in spelled.items()} | {t.content: -1 for t in breaks}
    return made, {made_id: theirs[text] for text in theirs if (made_id := made.token_to_id(text)) is not None}


def _spelled(token: AddedToken, control: ControlTexts) -> AddedToken:
    text = f"{FRAME}{token.content}{FRAME}" if token.content in control.ids else token.content
    return AddedToken(
        text,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
