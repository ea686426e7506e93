"""Tokenizers out of small GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan.protos.api.errors import CheckpointError, ModelNotFound
from allspan.protos.text import generation_defaults, load_tokenizer
from allspan.protos.text.tokenizers import pretokenizers
from allspan.protos.text.tokenizers.byte_level import BYTES
from allspan.protos.text.tokenizers.gguf_metadata import read_metadata
from support.gguf_files import CONTROL, SPACE, UNUSED, USER_DEFINED, G, byte_level_gguf, sentencepiece_gguf, write_gguf

MERGES = [f"{G} {G}", "h e", "l l", "he ll", "hell o", f"{G} hello"]
SPECIAL = {"<s>": CONTROL, "</s>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED, "<gap>": UNUSED}
FIRST = 256 + len(MERGES)
BOS, EOS, IM_END, THINK, GAP = range(FIRST, FIRST + len(SPECIAL))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def test_merges_run_in_their_order(path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_gguf(path, MERGES))
    assert tokenizer.encode("hello hello") == [260, 261]
    assert tokenizer.encode("hell") == [259]
    assert tokenizer.decode([260, 261]) == "hello hello"


def test_the_name_of_the_rule_decides_how_words_are_cut(path: Path) -> None:
    by_rule = {
        pre: load_tokenizer(byte_level_gguf(path, MERGES, pre=pre)).encode("  42")
        for pre in ("gpt-2", "smollm", "qwen2")
    }
    assert by_rule == {"gpt-2": [32, 32, 52, 50], "smollm": [256, 52, 50], "qwen2": [32, 32, 52, 50]}


def test_an_unknown_rule_is_refused_with_the_list(path: Path) -> None:
    byte_level_gguf(path, MERGES, pre="martian")
    with pytest.raises(CheckpointError, match=r"'martian' is not supported; supported are .*llama-bpe.*qwen2.*smollm"):
        load_tokenizer(path)


def test_an_unknown_kind_of_vocabulary_is_refused_with_the_list(path: Path) -> None:
    byte_level_gguf(path, model="bert")
    with pytest.raises(CheckpointError, match="'bert' is not supported; supported are 'gpt2' and 'llama'"):
        load_tokenizer(path)


def test_a_file_without_a_vocabulary_is_refused(path: Path) -> None:
    write_gguf(path, {"general.name": "x"})
    with pytest.raises(CheckpointError, match="no vocabulary"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", [1, 2]),
        ("token_type", [1]),
        ("token_type", ["a"] * FIRST),
        ("merges", "a b"),
        ("merges", ["ab"]),
        ("merges", ["a martian"]),
        ("bos_token_id", "7"),
        ("add_bos_token", 1),
        ("pre", 3),
        ("scores", [0.5]),
    ],
)
def test_a_bad_value_is_refused_in_one_line(path: Path, key: str, value: object) -> None:
    byte_level_gguf(path, MERGES, None, **{f"tokenizer.ggml.{key}": value})
    with pytest.raises(CheckpointError, match=r"^[^\n]*m\.gguf[^\n]*(vocabulary|tokenizer\.ggml\.)[^\n]*$"):
        load_tokenizer(path)


def test_special_texts_count_only_where_asked_but_user_defined_ones_always(path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_gguf(path, MERGES, SPECIAL))
    text = "<s>hello<think><|im_end|>"
    assert tokenizer.encode(text) == [BOS, 260, THINK, IM_END]
    literal = tokenizer.encode(text, parse_special=False)
    assert THINK in literal
    assert not {BOS, IM_END} & set(literal)
    assert tokenizer.decode(literal) == text
    assert tokenizer.encode("<gap>") == [*b"<gap>"]


def test_control_texts_are_no_part_of_the_text_unless_asked(path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_gguf(path, MERGES, SPECIAL))
    ids = [BOS, 260, THINK, GAP, IM_END]
    assert tokenizer.decode(ids) == "hello<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello<think><|im_end|>"


def test_ids_without_a_text_are_nothing(path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_gguf(path, MERGES))
    assert tokenizer.decode([260, tokenizer.vocab_size, 10**6, -1]) == "hello"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [260]),
        ({"add_bos_token": True}, [BOS, 260]),
        ({"add_eos_token": True}, [260, EOS]),
        ({"pre": "llama-bpe"}, [BOS, 260]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [260]),
    ],
)
def test_flags_say_what_wraps_a_prompt(path: Path, flags: dict[str, object], expected: list[int]) -> None:
    byte_level_gguf(path, MERGES, SPECIAL, bos_token_id=BOS, eos_token_id=EOS, **flags)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("hello") == expected
    assert tokenizer.encode("hello", add_special_tokens=False) == [260]


def test_a_spelt_out_begin_is_not_doubled(path: Path) -> None:
    byte_level_gguf(path, MERGES, SPECIAL, bos_token_id=BOS, eos_token_id=EOS, add_bos_token=True)
    assert load_tokenizer(path).encode("<s>hello") == [BOS, 260]


def test_end_ids_are_the_files_and_well_known_turn_ends(path: Path) -> None:
    byte_level_gguf(path, MERGES, SPECIAL, eos_token_id=EOS, eot_token_id=BOS)
    assert load_tokenizer(path).eos_token_ids == (EOS, BOS, IM_END)
    assert generation_defaults(path).eos_token_ids == (EOS, BOS, IM_END)


def test_the_end_of_a_message_ends_no_answer_of_several(path: Path) -> None:
    special = dict.fromkeys(("<|return|>", "<|end|>", "<|call|>"), CONTROL)
    byte_level_gguf(
        path, MERGES, special, eos_token_id=FIRST, eot_token_id=FIRST + 1, **{"general.architecture": "gpt-oss"}
    )
    assert load_tokenizer(path).eos_token_ids == (FIRST, FIRST + 2)


def test_an_id_outside_the_vocabulary_is_refused_unless_it_means_none(path: Path) -> None:
    byte_level_gguf(path, MERGES, bos_token_id=9999)
    with pytest.raises(CheckpointError, match=r"bos_token_id is 9999, must be below \d+, the number of tokens"):
        load_tokenizer(path)
    byte_level_gguf(path, MERGES, bos_token_id=2**32 - 1, eos_token_id=2**32 - 1)
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())


def test_the_chat_template_comes_with_the_file(path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    byte_level_gguf(
        path,
        MERGES,
        SPECIAL,
        bos_token_id=BOS,
        eos_token_id=EOS,
        add_bos_token=True,
        **{"tokenizer.chat_template": template},
    )
    tokenizer = load_tokenizer(path)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.render_chat(messages) == "<s>hello</s>"
    assert tokenizer.encode_chat(messages) == [BOS, 260, EOS]


def test_empty_tokens_and_missing_types_are_accepted(path: Path) -> None:
    byte_level_gguf(path, MERGES, {"": 1, "</s>": CONTROL})
    assert load_tokenizer(path).encode("hello") == [260]


def test_sentencepiece_puts_a_space_before_a_first_word_only(path: Path) -> None:
    pieces = {SPACE: -9.0, f"{SPACE}a": -1.0, "a": -8.0, "b": -7.0, "ab": -2.0}
    tokenizer = load_tokenizer(sentencepiece_gguf(path, pieces))
    ids = {text: 259 + i for i, text in enumerate(pieces)}
    assert tokenizer.encode("a") == [1, ids[f"{SPACE}a"]]
    assert tokenizer.encode("a a") == [1, ids[f"{SPACE}a"], ids[f"{SPACE}a"]]
    assert tokenizer.encode("<s>b</s>b") == [1, ids[SPACE], ids["b"], 2, ids[SPACE], ids["b"]]
    assert tokenizer.decode(tokenizer.encode("a ba")) == "a ba"


def test_sentencepiece_without_the_space_prefix(path: Path) -> None:
    pieces = {SPACE: -9.0, f"{SPACE}a": -1.0, "a": -8.0}
    tokenizer = load_tokenizer(sentencepiece_gguf(path, pieces, add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("a a") == [261, 260]
    assert tokenizer.decode([260, 260]) == " a a"


def test_only_the_second_baichuan_begins_without_a_space(path: Path) -> None:
    for count, begins in ((5, True), (64_000, False)):
        pieces = {SPACE: -1.0, "a": -2.0, **{f"p{i}": -9.0 for i in range(count)}}
        tokenizer = load_tokenizer(sentencepiece_gguf(path, pieces, **{"general.architecture": "baichuan"}))
        assert tokenizer.encode("a")[1:] == ([259, 260] if begins else [260])


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-4o", ["Hello", "World'S", " x", "123", "4", "/\n\n", " ", " y"]),
        ("seed-coder", ["HelloWorld", "'S", " x", "1", "2", "3", "4", "/", "\n\n", " ", " y"]),
        ("bailingmoe", ["HelloWorld", "'S", " x", "1", "2", "3", "4", "/\n\n", " ", " y"]),
        ("tiny_aya", ["Hello", "World'S", " x", "1", "234", "/\n\n", " ", " y"]),
        ("glm5", ["HelloWorld", "'S", " x", "123", "4", "/\n\n", " ", " y"]),
    ],
)
def test_rules_cut_as_published(pre: str, words: list[str]) -> None:
    found = pretokenizers.rule(pre)
    assert found is not None
    cut = found.pre_tokenizer().pre_tokenize_str("HelloWorld'S x1234/\n\n  y")
    assert ["".join(bytes([BYTES[c] for c in word]).decode()) for word, _ in cut] == words


def test_sentencepiece_writes_unknown_characters_as_bytes(path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_gguf(path, {SPACE: -1.0}))
    assert tokenizer.encode("é\n", add_special_tokens=False) == [259, 3 + 0xC3, 3 + 0xA9, 3 + 10]
    assert tokenizer.decode([259, 3 + 0xC3, 3 + 0xA9]) == "é"


def test_a_file_cut_anywhere_is_refused_in_one_line(path: Path) -> None:
    data = byte_level_gguf(path, MERGES, SPECIAL).read_bytes()
    cut = path.with_name("cut.gguf")
    for size in [*range(1, 200), *range(200, len(data) - 64, 97)]:
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"^[^\n]*cut\.gguf[^\n]*$"):
            load_tokenizer(cut)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" + b"\0" * 40, b"GGUF\x09\0\0\0" + b"\0" * 16])
def test_what_is_no_gguf_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        load_tokenizer(path)


def test_absurd_sizes_are_refused_without_memory(path: Path) -> None:
    data = bytearray(write_gguf(path, {"zzz": ["x"] * 3}).read_bytes())
    at = data.index(b"zzz") + 3 + 8  # after the key: its type, the type of its entries, then their number
    data[at : at + 8] = (2**63).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"9223372036854775808 entries of 'zzz', must be at most 2097152"):
        read_metadata(path)


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")


def test_every_kind_of_value_is_read(path: Path) -> None:
    values = {"i": 7, "f": 0.5, "b": True, "s": "é", "strings": ["x", ""], "ints": [1, -2], "floats": [0.25]}
    metadata = read_metadata(write_gguf(path, values))
    assert {key: metadata[key] for key in values} == values
