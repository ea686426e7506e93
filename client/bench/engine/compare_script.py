"""The other side of `allspan bench compare`: run by a peer's own interpreter, it needs nothing of this project.

Reads one JSON object a line from standard input and answers each with one on standard output:

    {"do": "find"}                                                → {"found": ["llama.cpp", …]}
    {"do": "load", "engine", "model", "threads", "sequences",
     "max_tokens"}                                                → {"version", "details"}
    {"do": "round", "prompts": [[id, …], …], "output_len"}        → {"ttft_s", "decode_s", "decode_tokens"}

`sequences`: most prompts of a round. `max_tokens`: most tokens of one, prompt and output. `ttft_s` is the time until
every prompt has its first token, `decode_tokens` came in the `decode_s` after that, greedily. An error is answered as
{"error": "…"}; what engines print goes to standard error. The process ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
from typing import Any

Message = dict[str, Any]

MAX_BATCH = 2048
"""Most tokens of one call of llama.cpp, its own default."""


class LlamaCpp:
    """llama.cpp through the C functions of llama-cpp-python: one context for single prompts, one for many at once."""

    def __init__(self, request: Message) -> None:
        import numpy

        self._numpy = numpy
        self._api: Any = importlib.import_module("llama_cpp")
        self._request = request
        self._contexts: dict[bool, Any] = {}
        self._api.llama_backend_init()
        self._model = self._api.llama_model_load_from_file(
            request["model"].encode(), self._api.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {request['model']}")
        self._vocab = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))

    def about(self) -> Message:
        return {
            "version": f"llama-cpp-python {self._api.__version__}",
            "details": self._api.llama_print_system_info().decode().strip(" |"),
        }

    def round(self, prompts: list[list[int]], output_len: int) -> Message:
        context = self._context(len(prompts))
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(context), False)
        batch = api.llama_batch_init(MAX_BATCH, 0, 1)
        try:
            started = time.perf_counter()
            tokens = self._read(context, batch, prompts)
            first = time.perf_counter()
            for step in range(output_len - 1):
                tokens = self._step(context, batch, tokens, [len(prompt) + step for prompt in prompts])
            ended = time.perf_counter()
        finally:
            api.llama_batch_free(batch)
        return {
            "ttft_s": first - started,
            "decode_s": ended - first,
            "decode_tokens": len(prompts) * (output_len - 1),
        }

    def _context(self, sequences: int) -> Any:
        many = sequences > 1
        if many not in self._contexts:
            request = self._request
            params = self._api.llama_context_default_params()
            params.n_seq_max = request["sequences"] if many else 1
            params.n_ctx = params.n_seq_max * request["max_tokens"]
            params.n_batch = MAX_BATCH
            params.n_threads = params.n_threads_batch = request["threads"]
            context = self._api.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens")
            self._contexts[many] = context
        return self._contexts[many]

    def _read(self, context: Any, batch: Any, prompts: list[list[int]]) -> list[int]:
        """Reads whole prompts one after another, MAX_BATCH tokens a call; returns the first token of each."""
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens: list[int] = []
        for start in range(0, len(rows), MAX_BATCH):
            tokens += self._decode(context, batch, rows[start : start + MAX_BATCH])
        return tokens

    def _step(self, context: Any, batch: Any, tokens: list[int], positions: list[int]) -> list[int]:
        pairs = enumerate(zip(tokens, positions, strict=True))
        return self._decode(context, batch, [(token, position, row, True) for row, (token, position) in pairs])

    def _decode(self, context: Any, batch: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Makes one call; returns the likeliest token after each row (token, position, sequence, wanted) that is
        wanted."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if code := self._api.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode of {len(rows)} tokens: code {code}")
        logits = (self._api.llama_get_logits_ith(context, i) for i, row in enumerate(rows) if row[3])
        return [int(self._numpy.ctypeslib.as_array(row, (self._vocab,)).argmax()) for row in logits]


class OpenVino:
    """OpenVINO GenAI's LLMPipeline on the CPU, which reads GGUF files itself."""

    def __init__(self, request: Message) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._pipeline = self._genai.LLMPipeline(request["model"], "CPU", INFERENCE_NUM_THREADS=request["threads"])

    def about(self) -> Message:
        return {"version": f"openvino-genai {self._genai.__version__}", "details": "CPU, defaults"}

    def round(self, prompts: list[list[int]], output_len: int) -> Message:
        import numpy

        if len(prompts) > 1:
            raise RuntimeError("LLMPipeline takes one sequence of token ids of this kind at a time")
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_len, True, False
        config.apply_chat_template = False
        moments: list[float] = []
        started = time.perf_counter()
        self._pipeline.generate(
            self._openvino.Tensor(numpy.array(prompts, numpy.int64)), config, _streamer(self._genai, moments)
        )
        if len(moments) < output_len:
            raise RuntimeError(f"{len(moments)} tokens came, {output_len} were asked for")
        return {
            "ttft_s": moments[0] - started,
            "decode_s": moments[-1] - moments[0],
            "decode_tokens": len(moments) - 1,
        }


def _streamer(genai: Any, moments: list[float]) -> Any:
    """Returns a streamer that records when each token comes."""

    class Clock(genai.StreamerBase):  # type: ignore[misc]
        def write(self, tokens: Any) -> Any:
            moments.extend([time.perf_counter()] * (len(tokens) if isinstance(tokens, list) else 1))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    return Clock()


ENGINES: dict[str, tuple[str, Any]] = {"llama.cpp": ("llama_cpp", LlamaCpp), "openvino": ("openvino_genai", OpenVino)}
"""Name → (the module that must be importable, its class)."""


def find() -> list[str]:
    return [name for name, (module, _) in ENGINES.items() if importlib.util.find_spec(module) is not None]


def answer(loaded: list[Any], request: Message) -> Message:
    if request["do"] == "find":
        return {"found": find()}
    if request["do"] == "load":
        loaded.append(ENGINES[request["engine"]][1](request))
        about: Message = loaded[-1].about()
        return about
    measured: Message = loaded[-1].round(request["prompts"], request["output_len"])
    return measured


def main() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print as they like
    loaded: list[Any] = []
    for line in sys.stdin:
        try:
            reply = answer(loaded, json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
