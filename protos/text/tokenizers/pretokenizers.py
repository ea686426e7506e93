"""The rules by which byte-level BPE vocabularies cut text into words before merging, by the names that GGUF files use
(`tokenizer.ggml.pre`).

A rule is a list of regular expressions: each cuts what the ones before it left, into its matches and what lies between.
The expressions are the models' own, as published in their tokenizer.json; which name means which is llama.cpp's list.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    rf"|{_LINES_AND_SPACES}"
)
_UPPER_FIRST = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
_UPPER_ONLY = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*"
_TEKKEN = rf"{_UPPER_FIRST}|{_UPPER_ONLY}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
_GPT4O = (
    rf"{_UPPER_FIRST}{_CONTRACTIONS}?|{_UPPER_ONLY}{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
    rf"|{_LINES_AND_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_SPACES}"
_BAILING = (
    rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_CJK_AND_BELOW = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS_AND_PATHS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"


def tiktoken_expression(most_digits: int) -> str:
    """The expression of tiktoken's cl100k_base, which many models took over, but for the digits that a number has."""
    digits = r"\p{N}" if most_digits == 1 else rf"\p{{N}}{{1,{most_digits}}}"
    return rf"{_ANY_CASE}|{_WORDS}|{digits}|{_SIGNS}"


_COHERE = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS_AND_PATHS}"
_OF_FOLDERS = (
    *map(tiktoken_expression, (1, 2, 3)),
    rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    rf"|{_LINES_AND_SPACES}",
    rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS_AND_PATHS}",
    rf"{_CASED[0]}{_ANY_CASE}?|{_CASED[1]}{_ANY_CASE}?|\p{{N}}{{1,3}}|{_SIGNS_AND_PATHS}",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"\p{N}{1,3}",
    " {2,}",
    "\n",
)
"""Expressions of tokenizer.json files (Llama 3, Qwen 2 to 3.5, Mistral's Tekken, gpt-4o's, BLOOM) that the rules below
write otherwise, or not at all."""


@dataclass(frozen=True)
class Rule:
    """The pre-tokenization rule of one family of vocabularies."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token as a whole is taken at once, whatever its merges."""
    add_bos: bool = False
    """Prompts begin with the begin-of-sequence id unless the file sets otherwise."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in self.expressions]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_RULES: dict[tuple[str, ...], Rule] = {
    (
        *("gpt-2", "phi-2", "gigachat", "mpt", "olmo", "jais", "trillion", "exaone4", "a.x-4.0", "mellum"),
        *("granite-docling", "modern-bert"),
    ): Rule((_GPT2,)),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): Rule(
        (r"\p{N}", _GPT2)
    ),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): Rule(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): Rule((_LLAMA3,)),
    ("glm4", "glm5"): Rule((_LLAMA3,), ignore_merges=True),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2", "kormo", "f2llmv2"): Rule(
        (_QWEN2,)
    ),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): Rule((_GPT4O,)),
    ("tiny_aya", "cohere2moe"): Rule((r"\d{1,3}(?=(?:\d{3})*\b)", _COHERE)),
    ("seed-coder",): Rule((_SEED,)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): Rule((_BAILING,)),
    ("qwen35",): Rule((_QWEN35,)),
    ("tekken",): Rule((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("deepseek-llm",): Rule(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            # The model's own class begins at the wide space U+3000, which llama.cpp never lets it match.
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
            r"\s+\z",
            _CJK_AND_BELOW,
            r"\p{N}+",
        )
    ),
    ("deepseek-coder",): Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_BELOW, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense"): Rule((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    ("falcon",): Rule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("default",): Rule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def rule(name: str) -> Rule | None:
    """The rule of that name; None when it is not known."""
    return next((rule for names, rule in _RULES.items() if name in names), None)


def names() -> list[str]:
    """Returns every name with a rule."""
    return sorted(name for names in _RULES for name in names)


@functools.cache
def published_expressions() -> frozenset[str]:
    """Every expression of a known model: over any text their time grows with its length."""
    return frozenset((*_OF_FOLDERS, *(expression for rule in _RULES.values() for expression in rule.expressions)))
