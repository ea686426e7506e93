"""Chat formats of models whose folders have no chat template: a row a format, as Jinja in which CUT marks the places
where the publisher's code encodes what follows by itself.

A role is a special token that the template writes, so that the text of a message cannot become one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspan.protos.model_files.json_values import read_json_object
from allspan.protos.model_files.limits import MAX_VOCABULARY
from allspan.protos.model_files.regular_file import is_there
from allspan.protos.text.vendors.families import Family
from allspan.protos.text.written import CUT

GLM4_CALLS = "在调用上述函数时，请使用 Json 格式表示调用的参数。"
"""How GLM-4's system message asks for the arguments of calls."""
_REFUSED = "{{ raise_exception('a message of the role ' ~ message.role ~ ' has no place here in this chat format') }}"
_CALLS_REFUSED = (
    "{%- if message.tool_calls -%}{{ raise_exception('tool_calls have no place in this chat format') }}{%- endif -%}"
)

_CHATML = """{%- if messages and messages[0].role == 'system' -%}
{%- set head, rest = messages[0].content or '', messages[1:] -%}
{%- else -%}
{%- set head, rest = 'You are a helpful assistant.', messages -%}
{%- endif -%}
<|im_start|>system
CUT{{ head }}<|im_end|>
{%- for message in rest -%}
NO_CALLS
{%- if message.role not in ['system', 'user', 'assistant'] -%}REFUSE{%- endif -%}
{{ '\\n<|im_start|>' ~ message.role ~ '\\nCUT' ~ TEXT ~ '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\\n<|im_start|>assistant\\n' }}{%- endif -%}"""
"""Qwen 1's."""

_CHATGLM2 = """{{- '[gMASK]<sop>' -}}
{%- set state = namespace(round=0, is_open=false) -%}
{%- for message in messages -%}
NO_CALLS
{%- if message.role == 'system' and loop.first -%}
{{ TEXT ~ '\\n\\n' }}
{%- elif message.role == 'user' -%}
{%- if state.is_open -%}{{ '答：\\n\\n' }}{%- endif -%}
{%- set state.round = state.round + 1 -%}
{%- set state.is_open = true -%}
{{ '[Round ' ~ state.round ~ ']\\n\\n问：' ~ TEXT ~ '\\n\\n' }}
{%- elif message.role == 'assistant' and state.is_open -%}
{%- set state.is_open = false -%}
{{ '答：' ~ TEXT ~ '\\n\\n' }}
{%- else -%}REFUSE
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '答：' }}{%- endif -%}"""
"""Rounds of a question and an answer, encoded as one text."""

_CHATGLM3 = """{{- '[gMASK]<sop>' -}}
{%- if tools -%}
{%- set described = tools | map(attribute='function') | list | tojson(indent=4) -%}
{%- if not messages or messages[0].role != 'system' -%}
{{ '<|system|>\\nCUT' ~ 'Answer the following questions as best as you can. You have access to the following tools:' ~
 '\\n' ~ described }}
{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|observation|>\\nCUT' ~ TEXT }}
{%- elif message.role == 'system' and loop.first and tools -%}
{{ '<|system|>\\nCUT' ~ TEXT ~ '\\n' ~ described }}
{%- elif message.role in ['system', 'user', 'assistant', 'observation'] -%}
{%- if message.content or not message.tool_calls -%}
{{ '<|' ~ message.role ~ '|>' ~ (message.metadata or '') ~ '\\nCUT' ~ TEXT }}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ '<|assistant|>' ~ call.function.name ~ '\\nCUT' ~ '```python\\ntool_call(' }}
{%- if call.function.arguments is mapping -%}
{%- for name, value in call.function.arguments.items() -%}
{{ (', ' if not loop.first else '') ~ name ~ '=' ~ (value | tojson) }}
{%- endfor -%}
{%- else -%}{{ call.function.arguments }}
{%- endif -%}
{{ ')\\n```' }}
{%- endfor -%}
{%- else -%}REFUSE
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"""
"""Role tokens; a message's metadata and its text are encoded each by itself."""

_GLM4 = """{%- macro listed(tools) -%}
{{ '<|system|>\\nCUT' ~ '你是一个名为 ChatGLM 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，' ~
 '你的任务是针对用户的问题和要求提供适当的答复和支持。\\n\\n# 可用工具' }}
{%- for tool in tools -%}
{%- set function = tool.function or tool -%}
{{ '\\n\\n## ' ~ function.name ~ '\\n\\n' ~ (function | tojson(indent=4)) ~ '\\nGLM4_CALLS' }}
{%- endfor -%}
{%- endmacro -%}
{{- '[gMASK]<sop>' -}}
{%- if tools -%}{{ listed(tools) }}{%- endif -%}
{%- for message in messages -%}
{%- if message.tools -%}{{ listed(message.tools) }}{%- endif -%}
{%- if message.role == 'tool' -%}
{{ '<|observation|>\\nCUT' ~ TEXT }}
{%- elif message.role in ['system', 'user', 'assistant', 'observation'] -%}
{%- if message.content or not (message.tools or message.tool_calls) -%}
{{ '<|' ~ message.role ~ '|>' ~ (message.metadata or '') ~ '\\nCUT' ~ TEXT }}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set given = call.function.arguments -%}
{{ '<|assistant|>' ~ call.function.name ~ '\\nCUT' ~ (given if given is string else given | tojson) }}
{%- endfor -%}
{%- else -%}REFUSE
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"""
"""Role tokens as ChatGLM3's; the tools are a system message of their own, before all others."""

_BAICHUAN = """{%- for message in messages -%}
NO_CALLS
{%- if message.role == 'system' and loop.first -%}
{{ TEXT }}
{%- elif message.role == 'user' -%}
{{ user_token ~ TEXT }}
{%- elif message.role == 'assistant' -%}
{{ assistant_token ~ TEXT }}
{%- else -%}REFUSE
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ assistant_token }}{%- endif -%}"""
"""Reserved pieces stand for the user and the assistant; generation_config.json says which."""


@dataclass(frozen=True)
class ChatFormat:
    """The chat format of one family: its Jinja, and the texts that it names beside the messages."""

    source: str
    names: Callable[[Path, Callable[[int], str]], Mapping[str, str] | None]
    """Returns those texts, of a folder whose ids have these texts; None where its model is none for chat."""


def _ids_of_roles(folder: Path, text_of: Callable[[int], str]) -> Mapping[str, str] | None:
    """The texts of Baichuan's role tokens, whose ids generation_config.json has."""
    settings = _settings(folder)
    names: dict[str, str] = {}
    for role in ("user", "assistant"):
        token_id = settings.get(f"{role}_token_id")
        if type(token_id) is not int or not 0 <= token_id < MAX_VOCABULARY or not text_of(token_id):
            return None
        names[f"{role}_token"] = text_of(token_id)
    return names


def _unless_raw(folder: Path, text_of: Callable[[int], str]) -> Mapping[str, str] | None:
    """Qwen 1's generation_config.json says whether it is a chat model."""
    return {} if _settings(folder).get("chat_format") == "chatml" else None


def _always(folder: Path, text_of: Callable[[int], str]) -> Mapping[str, str] | None:
    return {}


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    return read_json_object(file) if is_there(file) else {}


def _made(source: str) -> str:
    """The source with what its words in capitals stand for: TEXT is a message's, "" for content that is null."""
    source = source.replace("TEXT", "(message.content or '')").replace("NO_CALLS", _CALLS_REFUSED)
    return source.replace("REFUSE", _REFUSED).replace("GLM4_CALLS", GLM4_CALLS).replace("CUT", CUT)


FORMATS: Mapping[str, ChatFormat] = {
    "qwen": ChatFormat(_made(_CHATML), _unless_raw),
    "chatglm2": ChatFormat(_made(_CHATGLM2), _always),
    "chatglm3": ChatFormat(_made(_CHATGLM3), _always),
    "glm4": ChatFormat(_made(_GLM4), _always),
    "baichuan": ChatFormat(_made(_BAICHUAN), _ids_of_roles),
}
"""The formats by the names of families (`families`)."""


def has_format(folder: Path, family: Family | None) -> bool:
    """Whether the folder's model is one for chat, in its family's format."""
    return family is not None and FORMATS[family.name].names(folder, str) is not None
