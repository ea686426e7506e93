"""The conversation of `allspan chat`: its commands, its input, and the servers that it talks to."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from allspan.client.transport.public import Access, Message, Piece, Pieces
from allspan.client.transport.public_grpc import GrpcServer
from allspan.client.transport.public_http import HttpServer
from allspan.launch.chat.conversation import Conversation
from allspan.launch.chat.model_client import AttachConfig, given_fields, open_server
from allspan.launch.chat.slash_commands import run_command
from allspan.launch.chat.terminal import Terminal
from allspan.launch.commands import chat
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import ConfigError, InvalidRequest, Unauthenticated, Unavailable
from support.fake_engine import ANSWER
from support.gateway import fake_engine, gateway


class Echo:
    """Answers with the number of messages it was given, in two pieces."""

    model = "echo"

    def chat(self, messages: Sequence[Message]) -> Pieces:
        yield Piece(f"{len(messages)} ")
        yield Piece("messages", finish_reason="stop")

    def complete(self, prompt: str) -> Pieces:
        yield Piece(prompt)


@pytest.fixture
def talk() -> Conversation:
    return Conversation(Echo(), argparse.Namespace())


def test_every_command_does_what_it_says(
    talk: Conversation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "".join(talk.ask("one")) == "1 messages"
    assert "".join(talk.ask("two")) == "3 messages"
    run_command(talk, "/system Be brief.")
    answer = run_command(talk, "/regenerate")
    assert answer is not None
    assert "".join(answer) == "4 messages"
    run_command(talk, "/set temperature 0.5")
    run_command(talk, "/set stop END")
    assert given_fields(talk.namespace) == {"temperature": 0.5, "stop": ("END",)}
    run_command(talk, "/set temperature default")
    assert given_fields(talk.namespace) == {"stop": ("END",)}
    file = tmp_path / "saved.json"
    run_command(talk, f"/save {file}")
    run_command(talk, "/clear")
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    run_command(talk, f"/load {file}")
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    with pytest.raises(EOFError):
        run_command(talk, "/exit")
    capsys.readouterr()
    run_command(talk, "/help")
    assert "/regenerate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature hot", "temperature"),
        ("/set temprature 1", "did you mean temperature"),
        ("/load /no/such/file", "No such file"),
        ("/save {file}", "no saved conversation"),
        ("/nope", "There is no command /nope"),
        ("/regenerate", "no answer to make again"),
    ],
)
def test_a_mistake_is_told_and_changes_nothing(
    talk: Conversation, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("mine")
    run_command(talk, line.format(file=file))
    assert words in capsys.readouterr().err
    assert (file.read_text(), talk.messages, vars(talk.namespace)) == ("mine", [], {})


def test_an_answer_that_is_broken_off_stays_as_far_as_it_came(talk: Conversation) -> None:
    answer = talk.ask("one")
    next(answer)
    answer.close()
    assert talk.messages[-1] == {"role": "assistant", "content": "1 "}


class Failing:
    """Fails after `text`, if any, and with KeyboardInterrupt where `is_stopped`."""

    model = "failing"

    def __init__(self, text: str = "", is_stopped: bool = False) -> None:
        self.text = text
        self.is_stopped = is_stopped

    def chat(self, messages: Sequence[Message]) -> Pieces:
        yield Piece(self.text)
        if self.is_stopped:
            raise KeyboardInterrupt
        raise Unavailable("the ranks restart")

    def complete(self, prompt: str) -> Pieces:
        return self.chat([])


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_answer_that_never_begins_leaves_the_conversation_as_it_was(talk: Conversation, is_stopped: bool) -> None:
    "".join(talk.ask("one"))
    before = list(talk.messages)
    expected = KeyboardInterrupt if is_stopped else Unavailable
    talk.client = Failing("", is_stopped)
    for answer in (talk.again(), talk.ask("two")):
        with pytest.raises(expected):
            list(answer)
        assert talk.messages == before
    talk.client = Failing("half", is_stopped)
    with pytest.raises(expected):
        list(talk.again())
    assert talk.messages == [before[0], {"role": "assistant", "content": "half"}]


def test_a_server_that_is_away_ends_a_pipes_conversation_but_no_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def converse() -> None:
        lines = iter(["one", "two", "/exit"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
        chat.converse(Failing(), argparse.Namespace(system=None), Terminal(keep_history=False))

    with pytest.raises(Unavailable, match="the ranks restart"):
        converse()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    converse()
    assert capsys.readouterr().err.count("The conversation is kept") == 2


def test_a_message_may_have_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one\\", "two", '"""three', "", 'four"""', '"""five"""', "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    terminal = Terminal()
    messages = [terminal.message() for _ in range(4)]
    assert messages == ["one\ntwo", "three\n\nfour", "five", "/exit"]


async def test_a_server_answers_over_http_and_grpc() -> None:
    async with gateway(fake_engine(), api_key=("sk-right",)) as running:

        def ask() -> None:
            for address in (running.http_address, f"{running.http_address}/v1/", f"grpc://{running.grpc_address}"):
                with pytest.raises(Unauthenticated):
                    open_server(address, AttachConfig())
            access, question = Access("sk-right"), [{"role": "user", "content": "x"}]
            for server in (HttpServer(running.http_address, access), GrpcServer(running.grpc_address, access)):
                for pieces in (server.chat(question, {}), server.complete("x", {"max_tokens": 99})):
                    found = list(pieces)
                    assert "".join(piece.text for piece in found) == ANSWER
                    assert (found[-1].finish_reason, found[-1].prompt_tokens > 0) == ("stop", True)
                with pytest.raises(InvalidRequest, match="top_p is 7"):
                    list(server.complete("x", {"top_p": 7}))
                assert server.model == "tiny"
                server.close()

        await asyncio.to_thread(ask)


async def test_a_server_is_asked_for_the_adapter_that_is_named() -> None:
    async with gateway(fake_engine(adapters=(AdapterModule("sql", "/a"),))) as running:

        def ask() -> None:
            for address in (running.http_address, f"grpc://{running.grpc_address}", running.grpc_address):
                for name, adapter in (("sql", "sql"), ("", "")):
                    server = open_server(address, AttachConfig(), name)
                    assert server is not None
                    assert server.model == (name or "tiny")
                    for pieces in (server.chat([{"role": "user", "content": "x"}], {}), server.complete("x", {})):
                        list(pieces)
                        assert running.engine.last.options.adapter == adapter
                    server.close()

        await asyncio.to_thread(ask)


async def test_an_answer_that_is_closed_ends_its_request() -> None:
    async with gateway(fake_engine(endless=True)) as running:

        def ask() -> None:
            for address in (running.http_address, f"grpc://{running.grpc_address}", running.grpc_address):
                server = open_server(address, AttachConfig())
                assert server is not None
                pieces = server.complete("x", {})
                next(pieces)
                pieces.close()
                server.close()

        await asyncio.to_thread(ask)  # the gateway's end asserts that nothing runs


async def test_chat_talks_to_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["hello", "/set max_tokens 5", "//x"])

    def next_line(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", next_line)
    async with gateway(fake_engine()) as running:
        assert await asyncio.to_thread(chat.run, ["--attach", running.http_address]) == 0
    assert capsys.readouterr().out == f"{ANSWER}\n{ANSWER[:5]}\n"


def test_what_cannot_be_reached_says_so(tmp_path: Path) -> None:
    for address in ("http://127.0.0.1:9", "grpc://127.0.0.1:9"):
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
            open_server(address, AttachConfig())
    with pytest.raises(ConfigError, match="http, https, grpc, grpcs"):
        open_server("ws://127.0.0.1:9", AttachConfig())
    assert open_server(str(tmp_path), AttachConfig()) is None
    with pytest.raises(ConfigError, match="--api-key-file"):
        open_server("http://127.0.0.1:9", AttachConfig(api_key_file=str(tmp_path / "none")))
    assert "sk-" not in json.dumps(repr(Access("sk-secret")))
