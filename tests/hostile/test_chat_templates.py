"""Chat templates of a hostile model: each is refused within its time, and the process that asks loses neither memory
nor its event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from allspan.client.gateway.chat.setup import ChatSetup
from allspan.client.gateway.chat.template import Rendering, Traits
from allspan.client.gateway.config import ChatConfig
from allspan.protos.api.errors import InternalError, InvalidRequest
from allspan.protos.text import chat_template
from allspan.protos.text.chat_template import ChatTemplate, TemplateTooSlow
from allspan.protos.text.helper_process import ATTEMPTS, HelperPool, HelperProcess
from allspan.protos.text.written import Written
from support.chat_tokenizer import TEMPLATE, chat_tokenizer

HUGE = 10**9
WITHIN_S = 0.4
USER = [{"role": "user", "content": "x"}]

WIDTHS = [
    "{{ '%*d' % (N, 1) }}",
    "{{ '%Nd' % 1 }}",
    "{{ '%.Nf' % 1.5 }}",
    "{{ '{:Nd}'.format(1) }}",
    "{{ '{:{}}'.format('x', N) }}",
    "{{ 'x'.center(N) }}",
    "{{ 'x'.ljust(N) }}",
    "{{ 'x'.rjust(N, 'é') }}",
    "{{ 'x'.zfill(N) }}",
    "{{ '\\t'.expandtabs(N) }}",
    "{{ 'x' | center(N) }}",
    "{{ 'a\\nb' | indent(N) }}",
    "{{ '%*d' | format(N, 1) }}",
    "{{ {'a': [1]} | tojson(indent=N) }}",
    "{{ [1] | tojson(separators=('x' * N, ':')) }}",
]
LISTS = [
    "{{ [1] | slice(N) | list }}",
    "{{ [1] | batch(N, 0) | list }}",
    "{{ [0] * N }}",
    "{{ ([0] * 99999) * 99999 }}",
    "{{ (1, 2) * N }}",
    "{{ range(99999) | list | string | list | string | list | string | list | string | list | string }}",
    "{% set n = namespace(v=[]) %}{% for i in range(200) %}{% set n.v = [n.v, n.v] %}{% endfor %}{{ n.v | string }}",
    "{% set n = namespace(v=[0]) %}{% for i in range(60) %}{% set n.v = n.v + n.v %}{% endfor %}",
    "{% set n = namespace(v=[]) %}{% for i in range(300) %}{% set n.v = [n.v, n.v] %}{% endfor %}{{ n.v | tojson }}",
]
TEXTS = [
    "{{ 'x' * N }}",
    "{{ 'x' * 99999 | string | wordwrap(1, wrapstring='y' * 99999) }}",
    "{{ ('x ' * 99999) | replace('x', 'y' * 99999) }}",
    "{{ ('x' * 99999).replace('', 'y' * 99999) }}",
    "{{ range(99999) | join('y' * 99999) }}",
    "{{ ('y' * 99999).join(range(99999) | map('string')) }}",
    "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s * 2 %}{% endfor %}",
    "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 43000 }}{% endfor %}",  # 4 GiB
    "{% set t %}{% for i in range(99999) %}{{ 'x' * 43000 }}{% endfor %}{% endset %}",
    "{% filter upper %}{% for i in range(99999) %}{{ 'x' * 43000 }}{% endfor %}{% endfilter %}",
]
LOOPS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) if range(99999) | sum < 0 %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f() %}{{ caller() }}{% endmacro %}"
    "{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
    "{{ lipsum(n=99999999) }}",
    "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{% for i in range(99999) %}{{ (range(99999) | list)[::-1] | sort | sum }}{% endfor %}",
    "{{ range(99999) | map('string') | map('list') | map('sort') | list | tojson | length }}" * 20,
]
NUMBERS = [
    "{{ 2 ** (2 ** 40) }}",
    "{{ 10 ** (9 ** 9) }}",
    "{{ (7 ** 9999999) | string }}",
    "{% set n = namespace(v=3) %}{% for i in range(99) %}{% set n.v = n.v * n.v %}{% endfor %}",
    "{{ 1.5 ** 99999 }}",
    "{{ range(N) | list }}",
    "{{ (10 ** 5000) | string }}",
]
SYNTAX = [
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "{{ " + "[" * 3_000 + "]" * 3_000 + " }}",
    "{{ " + "not " * 5_000 + "1 }}",
    "{{ " + "-" * 5_000 + "1 }}",
    "{{ 1" + " + 1" * 30_000 + " }}",
    "{% if 1 %}" * 3_000 + "{% endif %}" * 3_000,
    "{% for i in [1] %}" * 500 + "{% endfor %}" * 500,
    "{{ x" + ".y" * 30_000 + " }}",
    "{{ x" + " | list" * 30_000 + " }}",
]
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ x.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ ('' | attr('__class__')).mro() }}",
    "{{ ''['__class__']['__base__'].x }}",
    "{{ '{0.__class__.__base__.x}'.format(1) }}",
    "{{ '{x.__class__.y}'.format_map({'x': 1}) }}",
    "{{ ['x'] | map(attribute='__class__.__base__.z') | first + 1 }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ raise_exception.__globals__['jinja2'] }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ messages[0].content._mask + 1 }}",
    "{% set environment.texts = 1 %}",
    "{{ raise_exception('\\ud800') }}",
    "{{ raise_exception('x\\n' * 9999999) }}",
]
CORPUS = [source.replace("N", str(HUGE)) for source in (*WIDTHS, *LISTS, *TEXTS, *LOOPS, *NUMBERS, *SYNTAX, *ESCAPES)]
ENDLESS = LOOPS[0]


@pytest.fixture(autouse=True)
def _renders_afterwards() -> Iterator[None]:
    yield
    assert ChatTemplate("{{ messages[0].content }}").render(USER) == "x"  # whatever went before


def idle() -> list[HelperProcess]:
    return list(chat_template.renderers._idle)


@pytest.mark.parametrize("source", CORPUS, ids=range(len(CORPUS)))
def test_hostile_template_is_refused_in_time_without_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, limits = HelperProcess.ask, []

    def counted(helper: HelperProcess, question: dict[str, object], within_s: float) -> dict[str, object]:
        limits.append(within_s)
        return ask(helper, question, within_s)

    monkeypatch.setattr(HelperProcess, "ask", counted)
    process = psutil.Process()
    before = process.memory_info().rss
    with pytest.raises(InvalidRequest, match=r"^(the chat template|messages render to more than)[^\n]+$") as caught:
        ChatTemplate(source).render(USER, within_s=WITHIN_S)
    assert caught.value.field == "messages"
    assert len(caught.value.message.encode()) < 800
    assert len(limits) <= 2 * ATTEMPTS, "with the template's source, and before that without it"
    assert max(limits) <= WITHIN_S
    assert process.memory_info().rss - before < 2**25


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_death_of_idle_processes_is_invisible(number: signal.Signals) -> None:
    quick = ChatTemplate("{% for i in range(9) %}{% set x = range(99999) | sum %}{% endfor %}")
    threads = [threading.Thread(target=quick.render, args=(USER,)) for _ in range(4)]  # several are started
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(3):
        assert ChatTemplate(TEMPLATE).render(USER) == "<|user|>x<|assistant|>"
        for helper in idle():
            os.kill(helper.pid, number)


def test_death_of_a_process_at_work_is_invisible() -> None:
    slow = "{% for i in range(40) %}{% set x = range(99999) | sum %}{% endfor %}done"
    ChatTemplate(slow).render(USER)
    (helper, *_) = reversed(idle())
    timer = threading.Timer(0.02, os.kill, (helper.pid, signal.SIGKILL))
    timer.start()
    assert ChatTemplate(slow).render(USER) == "done"
    timer.join()


def test_template_whose_processes_all_die_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def killed(helper: HelperProcess, question: dict[str, object], within_s: float) -> dict[str, object]:
        asked.append(helper)
        os.kill(helper.pid, signal.SIGKILL)
        return exchange(helper, question, within_s)

    exchange = HelperProcess.ask
    chat_template.renderers._end_idle()
    ChatTemplate(TEMPLATE).render(USER)
    with monkeypatch.context() as patch:
        patch.setattr(HelperProcess, "ask", killed)
        with pytest.raises((InvalidRequest, InternalError)):
            ChatTemplate(TEMPLATE).render(USER)
    assert len(asked) == ATTEMPTS


def test_process_that_cannot_start_is_no_fault_of_the_template() -> None:
    pool = HelperPool("allspan.protos.text.no_such_module")
    with pytest.raises(InternalError, match=f"at {ATTEMPTS} starts"):
        pool.ask({}, 1.0)


def test_process_ends_with_its_parent_even_within_an_endless_template() -> None:
    code = (
        "from allspan.protos.text.chat_template import ChatTemplate, renderers\n"
        f"template = ChatTemplate({ENDLESS!r})\n"
        "assert template.error is None\n"
        "print(renderers._idle[0].pid, flush=True)\n"
        "template.render([], within_s=0.5)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.1)
    parent.kill()
    parent.communicate()
    child.wait(10.0)


def test_forked_process_starts_its_own() -> None:
    ChatTemplate(TEMPLATE).render(USER)
    before = [helper.pid for helper in idle()]
    if (pid := os.fork()) == 0:
        try:
            good = ChatTemplate(TEMPLATE).render(USER) == "<|user|>x<|assistant|>"
            os._exit(0 if good and idle()[0].pid not in before else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert [helper.pid for helper in idle()] == before


async def test_slow_template_holds_up_neither_the_loop_nor_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allspan.client.gateway.chat.setup.RENDER_S", 2.0)
    slow, quick = (ChatSetup.of(chat_tokenizer(source), ChatConfig()) for source in (ENDLESS, TEMPLATE))
    render, threads = ChatSetup.render, []

    def noted(setup: ChatSetup, *given: Any) -> Written:
        threads.append(threading.get_ident())
        return render(setup, *given)

    monkeypatch.setattr(ChatSetup, "render", noted)
    hostile = [asyncio.create_task(slow.encode(USER, Rendering(), False)) for _ in range(2)]
    await asyncio.sleep(0.05)
    done = await asyncio.gather(*(quick.encode(USER, Rendering(), False) for _ in range(64)))
    assert not any(task.done() for task in hostile)
    assert len(set(map(tuple, done))) == 1
    assert len(threads) == 64 + len(hostile)
    assert threading.get_ident() not in threads
    for task in hostile:
        with pytest.raises(TemplateTooSlow, match=r"too long over these messages: more than 2 s"):
            await task


def test_hostile_template_has_no_traits() -> None:
    setup = ChatSetup.of(chat_tokenizer(ENDLESS), ChatConfig())
    assert setup.conversations is not None
    assert setup.conversations._traits == Traits(tools=False, calls=False, system=False)
