"""`allspan generate MODEL TEXT`: one prompt's continuation, streamed to standard output."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from allspan.client.transport.public import Piece, Pieces
from allspan.launch.chat.model_client import add_client_options, check_adapter, open_client
from allspan.launch.engine_flags import add_engine_options, add_sampling_options, local_model, sampling_params
from allspan.launch.models.find_model import DEFAULT_MODEL, names_a_model
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.results import RequestTimings
from allspan.protos.config.flags import Parser
from allspan.protos.text import load_tokenizer

MAX_TOKENS = 128


def make_parser() -> Parser:
    parser = Parser(
        "allspan generate",
        "Continues a text: starts a cluster for the model, attaches to one, or asks a server. A single word or text is "
        f"MODEL if a model is called so (a path, a name in `allspan list`, ORG/NAME), else TEXT for {DEFAULT_MODEL}.",
    )
    add_engine_options(parser)
    parser.add_argument("text", nargs="?", metavar="TEXT", help="Sets the prompt; - reads standard input.")
    add_sampling_options(parser)
    add_client_options(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="Sets the prompt, whatever it looks like.")
    parser.add_argument(
        "--chat", action="store_true", help="Takes the prompt as a user's message and applies the chat template."
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="Prints a JSON object with the result as the last line instead of streaming.",
    )
    parser.add_config()
    parser.set_defaults(model=None)  # so that one that is given can be told from the default
    parser.is_intermixed = True
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    settle(namespace)
    text = sys.stdin.read() if namespace.prompt == "-" else namespace.prompt
    sampling_params(namespace, None, MAX_TOKENS)  # refuses bad values before anything is fetched or loaded
    check_adapter(namespace)
    model = local_model(namespace)
    if model is not None:
        load_tokenizer(model.path)
    started = time.monotonic()
    with open_client(namespace, model, MAX_TOKENS) as client:
        ready_s = time.monotonic() - started
        asked = [{"role": "user", "content": text}]
        result = stream(client.chat(asked) if namespace.chat else client.complete(text), silent=namespace.json)
    if namespace.json:
        result["timings"]["start_s"] = ready_s
        print(json.dumps(result, ensure_ascii=False), flush=True)
    return 0


def settle(namespace: argparse.Namespace) -> None:
    """Decides which of the words given is the model and which the prompt. ConfigError when that cannot be."""
    words = [word for word in (namespace.model, namespace.text) if word is not None]
    if namespace.prompt is None and words and (len(words) == 2 or namespace.attach or not names_a_model(words[0])):
        namespace.prompt = words.pop()
    if namespace.attach and words:
        raise ConfigError(f"{words[0]!r} is one word too many: the server of --attach has its model")
    if len(words) > 1:
        raise ConfigError(f"the prompt is given twice: {words[1]!r} and --prompt {namespace.prompt!r}")
    if namespace.prompt is None:
        which = f"; {words[0]!r} names a model" if words else ""
        raise ConfigError(f"the prompt is missing{which}; give TEXT or --prompt TEXT, or - for standard input")
    namespace.model = words[0] if words else DEFAULT_MODEL


def stream(pieces: Pieces, silent: bool = False) -> dict[str, Any]:
    """Prints an answer as it comes. Returns text, token_ids, prompt_tokens, finish_reason, timings. Whatever ends this
    function ends the request, too."""
    parts: list[str] = []
    token_ids: list[int] = []
    last = Piece()
    try:
        with closing(pieces):
            for last in pieces:
                parts.append(last.text)
                token_ids += last.token_ids
                if last.text and not silent:
                    print(last.text, end="", flush=True)
    finally:
        if not silent:
            print(flush=True)
    return {
        "text": "".join(parts),
        "token_ids": token_ids,
        "prompt_tokens": last.prompt_tokens,
        "finish_reason": last.finish_reason,
        "timings": asdict(last.timings or RequestTimings()),
    }
