"""How a generating model judges a query and a document: the prompt, and the two tokens whose logits are its answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from allspan.protos.api.errors import ConfigError, InvalidRequest
from allspan.protos.text.tokenizers.tokenizer import Tokenizer
from allspan.protos.text.written import Written, joined, written

_PLACE = re.compile(r"\{(instruction|query|document)\}")


@dataclass(frozen=True, slots=True)
class RerankHead:
    """The score of a pair is sigmoid(logit of `yes` - logit of `no`) behind the prompt."""

    no: str
    yes: str
    template: str
    """The prompt, with the places {instruction}, {query} and {document}."""
    instruction: str
    """What is asked of a pair whose caller says nothing."""

    def prompt(self, query: str, document: str, instruction: str | None = None) -> Written:
        """The prompt of a pair. Control tokens are those of the template: text of a caller never becomes one."""
        texts = {"query": query, "document": document}
        texts["instruction"] = self.instruction if instruction is None else instruction
        parts = _PLACE.split(self.template)
        made = joined(texts[part] if place % 2 else written(part) for place, part in enumerate(parts))
        return made if isinstance(made, Written) else Written(made)

    def token_ids(self, tokenizer: Tokenizer) -> tuple[int, int]:
        """The ids of `no` and `yes`. Raises ConfigError where one is not a single token."""
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in (self.no, self.yes)]
        for text, found in zip((self.no, self.yes), ids, strict=True):
            if len(found) != 1:
                raise ConfigError(f"{text!r} is {len(found)} tokens of this model, an answer must be one")
        return ids[0][0], ids[1][0]


def check_template(template: str) -> str:
    """Returns the template. Raises ConfigError for one that leaves the query or the document out."""
    missing = {"query", "document"} - set(_PLACE.findall(template))
    if missing:
        raise ConfigError(f"--rerank-template has no {{{min(missing)}}}, must have {{query}} and {{document}}")
    return template


def check_pair(query: object, document: object) -> None:
    """Raises InvalidRequest for what is no text."""
    for name, value in (("query", query), ("document", document)):
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{name} is {value!r:.64}, must be text of at least one character", name)


QWEN3 = RerankHead(
    no="no",
    yes="yes",
    template=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
