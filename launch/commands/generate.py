"""`allspan generate MODEL --prompt P`: one prompt's continuation, streamed to standard output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from allspan.client.engine import ClientEngine
from allspan.launch.engine_flags import (
    add_engine_options,
    add_sampling_options,
    local_model,
    open_engine,
    sampling_params,
)
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.results import RequestTimings
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.config.flags import Parser
from allspan.protos.text import Tokenizer, load_tokenizer
from allspan.protos.text.stream.text_stream import TextStream

MAX_TOKENS = 128


def make_parser() -> Parser:
    parser = Parser("allspan generate", "Continues a prompt; starts a cluster for it, or attaches to one.")
    add_engine_options(parser)
    add_sampling_options(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="Sets the prompt; - reads standard input.")
    parser.add_argument(
        "--chat", action="store_true", help="Takes the prompt as a user's message and applies the chat template."
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="Prints a JSON object with the result as the last line instead of streaming.",
    )
    parser.add_config()
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    if namespace.prompt is None:
        raise ConfigError("--prompt is missing; give a text, or - for standard input")
    text = sys.stdin.read() if namespace.prompt == "-" else namespace.prompt
    sampling_params(namespace, None, MAX_TOKENS)  # refuses bad values before anything is fetched or loaded
    model = local_model(namespace)
    if model is not None:
        load_tokenizer(model.path)
    started = time.monotonic()
    with open_engine(namespace, model) as engine:
        ready_s = time.monotonic() - started
        params = sampling_params(namespace, engine.cluster.model_path, MAX_TOKENS)
        ids = prompt_ids(engine.tokenizer, text, namespace.chat)
        result = stream(engine, ids, params, continues=not namespace.chat, silent=namespace.json)
    if namespace.json:
        result["timings"]["start_s"] = ready_s
        print(json.dumps(result, ensure_ascii=False), flush=True)
    return 0


def prompt_ids(tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    return tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)


def stream(
    engine: ClientEngine,
    ids: list[int],
    params: SamplingParams,
    continues: bool,
    silent: bool = False,
    text_parts: list[str] | None = None,
) -> dict[str, Any]:
    """Runs one request and prints its text as it comes. Returns text, token_ids, prompt_tokens, finish_reason, timings.

    `continues`: the text goes on from the prompt's. Whatever ends this function ends the request, too; `text_parts` has
    what came until then.
    """
    handle, results = engine.start_request(ids, params)
    text_stream = TextStream(engine.tokenizer, params, continues)
    parts = [] if text_parts is None else text_parts
    reason, timings = "", RequestTimings()
    token_ids: list[int] = []
    try:
        for output in results:
            delta = text_stream.push(output)
            parts.append(delta.text)
            token_ids += delta.token_ids
            timings, reason = output.timings or timings, delta.finish_reason or reason
            if delta.text and not silent:
                print(delta.text, end="", flush=True)
            if delta.finish_reason:
                break
    finally:
        engine.stop_request(handle)
        engine.release_request(handle)
        if not silent:
            print(flush=True)
    return {
        "text": "".join(parts),
        "token_ids": token_ids,
        "prompt_tokens": len(ids),
        "finish_reason": reason,
        "timings": asdict(timings),
    }
