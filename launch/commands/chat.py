"""`allspan chat MODEL`: a conversation in the terminal. Ctrl-C ends one reply, Ctrl-D leaves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from allspan.client.engine import ClientEngine
from allspan.launch.commands.generate import stream
from allspan.launch.engine_flags import (
    add_engine_options,
    add_sampling_options,
    local_model,
    open_engine,
    sampling_params,
)
from allspan.protos.api.errors import InvalidRequest, Unavailable
from allspan.protos.config.flags import Parser
from allspan.protos.text import Tokenizer, load_tokenizer

MAX_TOKENS = 1024


def make_parser() -> Parser:
    parser = Parser("allspan chat", "Talks to a model; starts a cluster for it, or attaches to one.")
    add_engine_options(parser)
    add_sampling_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="Begins the conversation with this system message.")
    parser.add_config()
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    sampling_params(namespace, None, MAX_TOKENS)
    model = local_model(namespace)
    if model is not None:
        check_template(load_tokenizer(model.path), model.name)
    with open_engine(namespace, model) as engine:
        check_template(engine.tokenizer, engine.model)
        if sys.stdin.isatty():
            import readline  # noqa: F401  (importing it gives input() editing and a history)

            print("Ctrl-C ends a reply, Ctrl-D the conversation.", file=sys.stderr)
        converse(engine, namespace)
    return 0


def check_template(tokenizer: Tokenizer, model: str) -> None:
    if not tokenizer.has_chat_template:
        raise InvalidRequest(
            f"{model} has no chat template (a base model?); use allspan generate, or an instruction-tuned model",
            "messages",
        )


def converse(engine: ClientEngine, namespace: argparse.Namespace) -> None:
    """Reads messages until the end of the input and streams the replies."""
    params = sampling_params(namespace, engine.cluster.model_path, MAX_TOKENS)
    messages = [{"role": "system", "content": namespace.system}] if namespace.system else []
    while (text := ask()) is not None:
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        ids = engine.tokenizer.encode_chat(messages)
        room = engine.max_model_len - len(ids)
        if room < 1:
            raise InvalidRequest(
                f"the conversation has {len(ids)} tokens, the context is {engine.max_model_len}; start a new one",
                "messages",
            )
        reply: list[str] = []
        try:
            bounded = params.with_(max_tokens=min(params.max_tokens, room), min_tokens=min(params.min_tokens, room))
            stream(engine, ids, bounded, continues=False, text_parts=reply)
        except KeyboardInterrupt:
            print("[reply ended]", file=sys.stderr)
        except Unavailable as error:
            raise Unavailable(f"the conversation ended: {error.message}") from error
        messages.append({"role": "assistant", "content": "".join(reply)})


def ask() -> str | None:
    """The next line; None at the end of the input. Ctrl-C clears the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None
        except KeyboardInterrupt:
            print()
