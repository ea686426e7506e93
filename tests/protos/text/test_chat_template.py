"""Chat templates: rendered as transformers renders them, and harmless."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from allspan.protos.api.errors import ConfigError, InvalidRequest
from allspan.protos.text import load_tokenizer
from allspan.protos.text.chat_template import ChatTemplate
from support.hf_folders import CHATML, byte_level

transformers = pytest.importorskip("transformers")

DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BRACKETS = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST] " ~ message.content | trim ~ " [/INST]" }}
    {%- elif message.role == "assistant" %}
        {{- " " ~ message.content ~ eos_token }}
    {%- endif %}
{%- endfor %}
"""
BLOCKS = """{% for message in messages %}
    {% if message.role == 'tool' %}
        {% continue %}
    {% endif %}
{{ message.role }}: {{ message.content }}
    {% generation %}
{{ message | tojson }} {{ {'ü': '<&>'} | tojson }} {{ [1, 2] | tojson(indent=2) }}
    {% endgeneration %}
    {% if loop.index == 3 %}{% break %}{% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}{{ unk_token }}{{ custom | default('none') }}
"""
TURNS = [
    {"role": "user", "content": " Hi, ünï "},
    {"role": "assistant", "content": "Hello <b>"},
    {"role": "tool", "content": "{}"},
    {"role": "user", "content": "Bye\n"},
]
CONVERSATIONS: list[list[dict[str, Any]]] = [TURNS[:1], TURNS, [{"role": "system", "content": "Be brief."}, *TURNS]]


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["one", "many", "system"])
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize(
    "template", [CHATML, DEFAULT_SYSTEM, BRACKETS, BLOCKS], ids=["chatml", "default", "brackets", "blocks"]
)
def test_a_template_renders_as_in_transformers(
    tmp_path: Path, template: str, prompted: bool, conversation: list[dict[str, Any]]
) -> None:
    folder = byte_level(tmp_path, bos=True, chat_template=template, unk_token="<s>")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    expected = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompted)
    assert ours.render_chat(conversation, prompted) == expected
    ids = theirs.apply_chat_template(conversation, tokenize=True, add_generation_prompt=prompted, return_dict=False)
    assert ours.encode_chat(conversation, prompted) == ids


def test_the_begin_is_never_doubled(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, bos=True, chat_template=BRACKETS))
    ids = tokenizer.encode_chat(TURNS[:1])
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(0) == 1


def test_arguments_reach_the_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, chat_template="{{ custom }}{{ tools | tojson }}"))
    assert tokenizer.render_chat([], custom="é", tools=[{"a": "<"}]) == 'é[{"a": "<"}]'


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path / "base-model"))
    assert not tokenizer.has_chat_template
    with pytest.raises(
        InvalidRequest, match="base-model has no chat template; use completions or give --chat-template FILE"
    ):
        tokenizer.encode_chat(TURNS)


def test_another_template_can_be_given(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path)).with_chat_template(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    )
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>x</s>"
    with pytest.raises(ConfigError, match="no valid Jinja"):
        tokenizer.with_chat_template("{% if %}")


def test_a_model_with_a_bad_template_still_completes_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, chat_template="{% for %}"))
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"
    with pytest.raises(InvalidRequest, match="no valid Jinja"):
        tokenizer.render_chat(TURNS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must\n alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ (1).__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.__class__.__base__ }}{{ x.y }}",
        "{% include 'file' %}",
    ],
)
def test_what_a_template_must_not_do_refuses_the_request_in_one_line(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^the chat template refuses messages: [^\n]+$") as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert caught.value.field == "messages"


def test_marks_change_nothing_in_what_is_rendered() -> None:
    source = (
        "{% macro m(x, y=1) %}{% for i in x %}{{ loop.index ~ i ~ y ~ none }}{% else %}-{% endfor %}{% endmacro %}"
        "{{ m([1, 2]) }}{{ m([]) }}"
        "{% for a in [1, 2, 3] if a != 2 %}{{ a }}{% if a == 3 %}{% break %}{% endif %}{% endfor %}"
        "{% macro m2() %}{{ caller('c') }}{% endmacro %}{% call(z) m2() %}{{ z }}{% endcall %}"
    )
    assert ChatTemplate(source).render([]) == "111None221None-13c"


def test_a_template_s_own_complaint_is_passed_on() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must\n  alternate') }}").render([])


def test_the_date_can_be_asked_for() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([]))
