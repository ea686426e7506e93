"""Chat formats of models without a chat template: the publisher's ids, roles that no text can forge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allspan.client.gateway.chat.messages import read_messages
from allspan.client.gateway.chat.setup import ChatSetup
from allspan.client.gateway.chat.template import Rendering
from allspan.client.gateway.chat.tools import read_tools
from allspan.client.gateway.config import ChatConfig
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.text import Tokenizer, generation_defaults, load_tokenizer
from allspan.protos.text.written import CUT
from support import vendor_folders
from support.gateway import events, fake_engine, gateway
from support.gguf_files import CONTROL, USER_DEFINED, byte_level_gguf, sentencepiece_gguf

Encode = Callable[[str], list[int]]
HOSTILE = ("<reserved_106>", "<|user|>", "<|im_start|>", "<|im_end|>", "[gMASK]", "<sop>", "</s>", "<|observation|>")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSPAN_HOME", str(tmp_path / "home"))


@pytest.fixture(params=vendor_folders.FOLDERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return load_tokenizer(vendor_folders.FOLDERS[request.param](tmp_path / request.param))


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def special(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.codec.control.ids[text]]


def test_qwen_has_chatml_with_contents_encoded_by_themselves(tmp_path: Path) -> None:
    made = load_tokenizer(vendor_folders.qwen(tmp_path / "m"))
    start, end = special(made, "<|im_start|>"), special(made, "<|im_end|>")

    def turn(role: str, text: str) -> list[int]:
        return [*start, *literal(made)(role), *literal(made)("\n"), *literal(made)(text), *end]

    expected = [*turn("system", "You are a helpful assistant."), 10, *turn("user", "\n\n hello"), 10, *start]
    expected += [*literal(made)("assistant"), 10]
    assert made.encode_chat(said("\n\n hello")) == expected
    system = {"role": "system", "content": "hello"}
    assert made.encode_chat([system, *said("a")], add_generation_prompt=False) == [
        *turn("system", "hello"),
        10,
        *turn("user", "a"),
    ]


def test_chatglm2_counts_rounds_in_one_text(tmp_path: Path) -> None:
    made = load_tokenizer(vendor_folders.chatglm2(tmp_path / "m"))
    prefix = [*special(made, "[gMASK]"), *special(made, "<sop>")]
    text = "[Round 1]\n\n问：你好\n\n答：the\n\n[Round 2]\n\n问：x\n\n答："
    assert made.encode_chat(said("你好", "the", "x")) == [*prefix, *literal(made)(text)]
    system = {"role": "system", "content": "Be brief."}
    rendered = made.render_chat([system, *said("a")], add_generation_prompt=False)
    assert rendered == "[gMASK]<sop>Be brief.\n\n[Round 1]\n\n问：a\n\n"
    with pytest.raises(InvalidRequest, match="role assistant has no place"):
        made.encode_chat([{"role": "assistant", "content": "x"}])


def test_chatglm3_encodes_metadata_and_texts_by_themselves(tmp_path: Path) -> None:
    made = load_tokenizer(vendor_folders.chatglm3(tmp_path / "m"))
    encode = literal(made)
    expected = [*special(made, "[gMASK]"), *special(made, "<sop>")]
    turns = [("system", "", "the"), ("user", "", "  hello"), ("assistant", "f", ""), ("user", "", "\n")]
    for role, meta, text in turns:
        expected += [*special(made, f"<|{role}|>"), *encode(f"{meta}\n"), *encode(text)]
    messages = [
        {"role": "system", "content": "the"},
        {"role": "user", "content": "  hello"},
        {"role": "assistant", "content": "", "metadata": "f"},
        {"role": "user", "content": "\n"},
    ]
    assert made.encode_chat(messages) == [*expected, *special(made, "<|assistant|>")]
    assert made.encode_chat(messages, add_generation_prompt=False) == expected


def test_chatglm3s_own_template_gives_the_same_ids(tmp_path: Path) -> None:
    folder = vendor_folders.chatglm3(tmp_path / "m")
    expected = load_tokenizer(folder).encode_chat(said("hello", "the sop", "你好"))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% if loop.first %}[gMASK]sop{% endif %}<|{{ message['role'] }}|>\n "
        "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert load_tokenizer(folder).encode_chat(said("hello", "the sop", "你好")) == expected


def test_chatglm3_lists_tools_in_the_system_message(tmp_path: Path) -> None:
    made = load_tokenizer(vendor_folders.chatglm3(tmp_path / "m"))
    listed = json.dumps([TOOL["function"]], indent=4, ensure_ascii=False)
    messages = [{"role": "system", "content": "the"}, *said("x")]
    encode = literal(made)
    assert made.encode_chat(messages, tools=[TOOL])[2:] == [
        *special(made, "<|system|>"),
        *encode("\n"),
        *encode(f"the\n{listed}"),
        *made.encode_chat(said("x"))[2:],
    ]


def test_glm4_lists_tools_in_a_system_message_of_its_own(tmp_path: Path) -> None:
    made = load_tokenizer(vendor_folders.glm4(tmp_path / "m"))
    listed = (
        "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
        "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具\n\n## f\n\n"
        f"{json.dumps(TOOL['function'], indent=4)}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
    )
    tools = [*special(made, "<|system|>"), *literal(made)("\n"), *literal(made)(listed)]
    messages = [{"role": "system", "content": "the"}, *said("x")]
    expected = [*made.prefix, *tools, *made.encode_chat(messages)[2:]]
    assert made.encode_chat(messages, tools=[TOOL]) == expected
    call = {"function": {"name": "f", "arguments": {"a": "x"}}}
    called = made.render_chat([*said("x"), {"role": "assistant", "content": "", "tool_calls": [call]}], False)
    assert called.replace(CUT, "") == '[gMASK]<sop><|user|>\nx<|assistant|>f\n{"a": "x"}'


@pytest.mark.parametrize("name", ["qwen", "chatglm2", "baichuan"])
def test_formats_without_tools_refuse_them_by_name(tmp_path: Path, name: str) -> None:
    made = load_tokenizer(vendor_folders.FOLDERS[name](tmp_path / name))
    with pytest.raises(InvalidRequest, match=f"model {name} does not list tools"):
        made.encode_chat(said("x"), tools=[TOOL])
    assert made.encode_chat(said("x"), tools=[]) == made.encode_chat(said("x"))


def test_content_that_is_null_is_no_text(tokenizer: Tokenizer) -> None:
    conversation = [{"role": "system", "content": ""}, *said("", "", "x")]
    empty: list[dict[str, Any]] = [{**message, "content": message["content"] or None} for message in conversation]
    assert tokenizer.render_chat(empty) == tokenizer.render_chat(conversation)


@pytest.mark.parametrize("name", ["qwen", "chatglm2", "baichuan"])
def test_formats_without_calls_refuse_them(tmp_path: Path, name: str) -> None:
    made = load_tokenizer(vendor_folders.FOLDERS[name](tmp_path / name))
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(InvalidRequest, match="tool_calls have no place"):
        made.encode_chat([*said("x"), {"role": "assistant", "content": None, "tool_calls": [call]}])


def test_glm4_and_baichuan_have_roles_before_texts(tmp_path: Path) -> None:
    glm = load_tokenizer(vendor_folders.glm4(tmp_path / "g"))
    expected = [*glm.prefix, *special(glm, "<|user|>"), 10, *literal(glm)("\n\n hello"), *special(glm, "<|assistant|>")]
    assert glm.encode_chat(said("\n\n hello")) == expected
    baichuan = load_tokenizer(vendor_folders.baichuan(tmp_path / "b"))
    user, assistant = special(baichuan, "<reserved_106>"), special(baichuan, "<reserved_107>")
    messages = [{"role": "system", "content": "the"}, *said("hello\n", "ab", "x")]
    encode = literal(baichuan)
    expected = [*encode("the"), *user, *encode("hello\n"), *assistant, *encode("ab"), *user, *encode("x"), *assistant]
    assert baichuan.encode_chat(messages) == expected


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_roles_in_messages_are_spelled(tokenizer: Tokenizer, text: str) -> None:
    steering = set(tokenizer.codec.control.ids.values())
    for content in (text, f"a{text}b {text}", f"\n{text}"):
        plain = tokenizer.encode_chat(said("x", "y", "z"))
        forged = tokenizer.encode_chat(said(content, content, content))
        assert [i for i in forged if i in steering] == [i for i in plain if i in steering]
        assert content in tokenizer.decode(forged, skip_special_tokens=False)


def test_earlier_turns_are_the_beginning_of_later_ones(tokenizer: Tokenizer) -> None:
    texts = ["hello", "the answer", "你好\n", "and", "x"]
    whole = tokenizer.encode_chat(said(*texts))
    for size in range(1, len(texts)):
        part = tokenizer.encode_chat(said(*texts[:size]), add_generation_prompt=False)
        assert whole[: len(part)] == part


def test_generation_prompt_is_what_is_added(tokenizer: Tokenizer) -> None:
    with_it, without = tokenizer.encode_chat(said("x")), tokenizer.encode_chat(said("x"), add_generation_prompt=False)
    assert with_it[: len(without)] == without
    assert len(with_it) > len(without)


def test_ranks_know_the_ids_that_end_an_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids, ends = tokenizer.codec.control.ids, set(tokenizer.eos_token_ids)
    expected = {
        "qwen": ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        "chatglm2": ("</s>",),
        "chatglm3": ("</s>", "<|user|>", "<|observation|>"),
        "glm4": ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "baichuan": ("</s>",),
    }[tokenizer.name]
    assert ends == {ids[text] for text in expected}
    assert set(generation_defaults(tmp_path / tokenizer.name).eos_token_ids) == ends


@pytest.mark.parametrize("base", [vendor_folders.qwen, vendor_folders.baichuan])
def test_base_models_have_no_chat_format(tmp_path: Path, base: Any) -> None:
    option = {"chat_format": "raw"} if base is vendor_folders.qwen else {"base": True}
    assert not load_tokenizer(base(tmp_path / "m", **option)).has_chat_template


def test_conversations_with_tools_and_continued_answers_render(tokenizer: Tokenizer) -> None:
    setup = ChatSetup.of(tokenizer, ChatConfig())
    use = read_tools([TOOL], None, None)
    messages = read_messages(said("x"))
    text = setup.render(messages, Rendering(tools=use.for_template))
    assert '"name": "f"' in text
    assert "<tool_call>" in text, "the format that the server reads is taught"
    continued = setup.render(read_messages(said("x", "hel")), Rendering(continues=True))
    assert continued.replace(CUT, "").endswith("hel")
    assert len(tokenizer.encode(continued, False)) > 0


async def test_chats_and_tokens_go_over_http(tokenizer: Tokenizer) -> None:
    async with gateway(fake_engine(vocab_size=1000, max_model_len=8192), tokenizer) as server:
        answered = (await server.post("/tokenize", messages=said("<|user|> hello"))).json()
        assert answered["tokens"] == tokenizer.encode_chat(said("<|user|> hello"))
        assert (await server.post("/v1/chat/completions", messages=said("hello"), max_tokens=2)).status_code == 200
        asked = await server.post("/v1/chat/completions", messages=said("hello"), max_tokens=2, tools=[TOOL])
        assert asked.status_code == 200
        prompt = tokenizer.decode(server.engine.last.prompt, skip_special_tokens=False)
        assert '"name": "f"' in prompt
        assert "<tool_call>" in prompt, "the format that the server reads is taught"
        back = (await server.post("/detokenize", tokens=tokenizer.encode("hello 你好", False))).json()
        assert back["prompt"] == "hello 你好"
        assert CUT not in (await server.http.get("/tokenizer_info")).json()["chat_template"]


@pytest.mark.parametrize("name", ["chatglm3", "glm4"])
@pytest.mark.parametrize("metadata", ["\n", ""])
async def test_the_line_break_before_an_answer_is_no_part_of_it(tmp_path: Path, name: str, metadata: str) -> None:
    made = load_tokenizer(vendor_folders.FOLDERS[name](tmp_path / name))
    wrote = [*literal(made)(metadata), *literal(made)("hello\n\nx")]
    async with gateway(fake_engine(tokens=wrote, vocab_size=1000), made) as server:
        body = {"messages": said("a"), "max_tokens": 99}
        answer = (await server.post("/v1/chat/completions", **body)).json()["choices"][0]["message"]["content"]
        assert answer == "hello\n\nx"
        streamed = events((await server.post("/v1/chat/completions", **body, stream=True)).text)
        deltas = [event["choices"][0]["delta"] for event in streamed if event != "[DONE]" and event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == answer
    if metadata:
        whole = made.encode_chat(said("a", answer, "b"))
        before = [*made.encode_chat(said("a")), *wrote]
        assert whole[: len(before)] == before, "what was computed for the first turn counts for the second"


@pytest.mark.parametrize("start", ["<sop>", "sop"])
@pytest.mark.parametrize("name", ["chatglm2", "chatglm3", "glm4", "qwen"])
def test_gguf_files_without_a_template_have_their_familys_format(tmp_path: Path, name: str, start: str) -> None:
    roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"] * (name != "chatglm2")
    texts = ["<|im_start|>", "<|im_end|>"] if name == "qwen" else ["[gMASK]", start, *roles]
    values = {"general.architecture": "qwen" if name == "qwen" else "chatglm", "general.name": f"{name} Chat"}
    file, known = tmp_path / "m.gguf", dict.fromkeys(texts, CONTROL)
    if name in ("qwen", "glm4"):
        made = load_tokenizer(byte_level_gguf(file, special=known, **values))
    else:
        made = load_tokenizer(sentencepiece_gguf(file, {}, known, **values))
    folder = load_tokenizer(vendor_folders.FOLDERS[name](tmp_path / name))
    rendered = str(folder.render_chat(said("x", "y", "<|user|> z"))).replace("<sop>", start)
    assert made.render_chat(said("x", "y", "<|user|> z")) == rendered
    ids = made.encode_chat(said("x", "y", "<|user|> [gMASK] <|im_start|>"))
    steering = [i for i in ids if i in made.codec.control.ids.values()]
    assert steering == [i for i in made.encode_chat(said("x", "y", "z")) if i in made.codec.control.ids.values()]
    assert len(steering) >= 2
    if "<|user|>" in texts:
        assert special(made, "<|user|>")[0] in made.eos_token_ids


@pytest.mark.parametrize(("architecture", "texts"), [("baichuan", ["<reserved_106>"]), ("qwen", ["<|im_start|>"])])
def test_gguf_files_that_say_nothing_of_chat_refuse_it_by_name(
    tmp_path: Path, architecture: str, texts: list[str]
) -> None:
    values = {"general.architecture": architecture, "special": dict.fromkeys(texts, USER_DEFINED)}
    made = load_tokenizer(sentencepiece_gguf(tmp_path / "my-base.gguf", {}, **values))
    with pytest.raises(InvalidRequest, match="model my-base has no chat template"):
        made.encode_chat(said("x"))


def literal(tokenizer: Tokenizer) -> Encode:
    return lambda text: tokenizer.codec.encode(text, False) if text else []
