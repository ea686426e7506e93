"""`allspan chat MODEL`: a conversation in the terminal. Ctrl-C stops an answer, Ctrl-D leaves; /help lists commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from allspan.launch.chat.conversation import Conversation
from allspan.launch.chat.model_client import EngineClient, ModelClient, add_client_options, check_adapter, open_client
from allspan.launch.chat.slash_commands import Answer, run_command, tell
from allspan.launch.chat.terminal import Terminal
from allspan.launch.engine_flags import add_engine_options, add_sampling_options, local_model, sampling_params
from allspan.protos.api.errors import AllspanError, InvalidRequest, Unavailable
from allspan.protos.config.flags import Parser
from allspan.protos.text import Tokenizer, load_tokenizer

MAX_TOKENS = 1024


def make_parser() -> Parser:
    parser = Parser(
        "allspan chat",
        "Talks to a model: starts a cluster for it, attaches to one, or asks a server. /help lists its commands.",
    )
    add_engine_options(parser)
    add_sampling_options(parser)
    add_client_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="Begins the conversation with this system message.")
    parser.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Keeps what is typed for the next conversation, in $ALLSPAN_HOME/chat_history, which only its user may "
        "read.",
    )
    parser.add_config()
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    sampling_params(namespace, None, MAX_TOKENS)
    check_adapter(namespace)
    model = local_model(namespace)
    if model is not None:
        check_template(load_tokenizer(model.path), model.name)
    with open_client(namespace, model, MAX_TOKENS) as client, Terminal(namespace.history) as terminal:
        if isinstance(client, EngineClient):
            check_template(client.engine.tokenizer, client.model)
        if sys.stdin.isatty():
            tell(f"{client.model}: Ctrl-C stops an answer, Ctrl-D ends the conversation, /help lists commands.")
        converse(client, namespace, terminal)
    return 0


def check_template(tokenizer: Tokenizer, model: str) -> None:
    if not tokenizer.has_chat_template:
        raise InvalidRequest(
            f"{model} has no chat template (a base model?); use allspan generate, or an instruction-tuned model",
            "messages",
        )


def converse(client: ModelClient, namespace: argparse.Namespace, terminal: Terminal) -> None:
    """Reads messages and commands until the end of the input, and streams the answers. At a terminal an error is told
    and the conversation goes on, as the server may soon be back; from a pipe it ends the program."""
    conversation = Conversation(client, namespace)
    conversation.system = namespace.system or ""
    while (text := terminal.message()) is not None:
        if not text.strip():
            continue
        try:
            answer: Answer | None
            if text.startswith("/") and not text.startswith("//"):
                answer = run_command(conversation, text)
            else:
                answer = conversation.ask(text.removeprefix("/") if text.startswith("//") else text)
            if answer is not None:
                show(answer)
        except EOFError:
            return
        except AllspanError as error:
            if not sys.stdin.isatty():
                raise
            tell(error.message)
            if isinstance(error, Unavailable):
                tell("The conversation is kept: ask again later, or keep it in a file with /save FILE.")


def show(answer: Answer) -> None:
    """Prints an answer as it comes, until its end or Ctrl-C."""
    try:
        with closing(answer):
            for text in answer:
                print(text, end="", flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        tell("[stopped]")
    else:
        print(flush=True)
