"""`Engine`: the whole engine inside this process, with neither MPI nor gRPC. One rank, the same code below."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from allspan.protos.api.adapters import AdapterModule, find_adapter
from allspan.protos.api.batch_generate import (
    AsyncWaits,
    BatchGenerate,
    BlockingWaits,
    Started,
    Waits,
    Work,
    run_blocking,
    wait_all_finished,
)
from allspan.protos.api.counters import counters_of
from allspan.protos.api.engine import Completion, EngineStatistics, OpProfile, Prompt, RankStatistics
from allspan.protos.api.errors import AllspanError, CheckpointError, ModelNotFound, RequestCancelled, Unavailable
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.prompts import (
    Params,
    checked_ids,
    checked_options,
    conversation,
    params_list,
    parse_request_id,
    prompt_list,
    with_seed,
)
from allspan.protos.api.results import Output, RequestHandle, ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.config.adapters import expanded
from allspan.protos.embeddings.calls import EmbeddingCalls
from allspan.protos.embeddings.card import EmbeddingCard, embedding_card
from allspan.protos.text.defaults import default_params
from allspan.protos.text.tokenizers.loading import load_tokenizer
from allspan.protos.text.tokenizers.tokenizer import Tokenizer
from allspan.worker.engine.core import EngineCore
from allspan.worker.engine.requests import OpenRequests
from allspan.worker.engine.settings import EngineSettings, worker_config
from allspan.worker.engine.setup import load_engine
from allspan.worker.engine.weights import AllWeights
from allspan.worker.load.introspection import Inspection
from allspan.worker.load.loader import open_ops
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.process.host import host_name, peak_rss_bytes, rss_bytes
from allspan.worker.scheduler.plan import Operation
from allspan.worker.scheduler.request import Request
from allspan.worker.step.row_inputs import PromptEmbeddings, PromptPositions

CLOSE_TIMEOUT_S = 60.0
"""A step in flight is waited for."""
PROFILE_TIMEOUT_S = 20.0
"""To begin or end profiling: the step in flight is waited for."""

logger = logging.getLogger(__name__)


class Engine(EmbeddingCalls):
    """Every method of `allspan.protos.api.engine.EngineProtocol`, in this process; safe from any thread.

        with Engine("SmolLM2-135M-Instruct") as engine:
            print(engine.generate("The sky is")[0].text)

    `model`: a Hugging Face folder, a GGUF file, or the name of a model that `allspan pull` has fetched.
    `tokenizer`: a folder or GGUF file, when it does not lie beside the weights.
    `kernels`: "auto" (the best for `device`), or a backend of `allspan.kernels.table` ("cpu", "reference", "cuda").
    Further settings are the fields of `allspan.protos.config.settings` (`threads`, `dtype`, `max_model_len` …).
    Raises ModelNotFound, CheckpointError or ConfigError.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        kernels: str = "auto",
        **settings: Unpack[EngineSettings],
    ) -> None:
        config = worker_config(model, settings)
        ops = open_ops(config, kernels)
        self.model = config.model.name
        self._tokenizer_path = Path(tokenizer or config.model.path)
        self._tokenizer: Tokenizer | None = None
        self._model_path = config.model.path
        self._loaded = load_engine(config, ops, LocalCollectives())
        self._kernels = ops.name
        self._inspection = Inspection(config.model, self._loaded.model, self._kernels)
        self._core = self._loaded.core
        self._core.grammars.load_tokenizer = functools.partial(load_tokenizer, self._tokenizer_path)
        self._open = OpenRequests(self._core.cancel)
        self._core.on_outputs = self._open.deliver
        thread = threading.Thread(target=_run, args=(self._core,), name="allspan-engine", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _close, self._core, thread, self._loaded.weights)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self._core.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._core.limits.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """They end a request unless it ignores them."""
        return self._loaded.eos_token_ids

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's, loaded at first use. Raises CheckpointError or ModelNotFound, naming the path."""
        if self._tokenizer is None:
            try:
                self._tokenizer = load_tokenizer(self._tokenizer_path)
            except (CheckpointError, ModelNotFound) as error:
                raise type(error)(f"no tokenizer: {error.message}; give tokenizer=PATH, or token ids") from error
        return self._tokenizer

    @functools.cached_property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that gives none: the model's own defaults and at most 128 tokens. Read from its
        files at first use; CheckpointError."""
        return default_params(self._model_path, self.model)

    @functools.cached_property
    def embedding_card(self) -> EmbeddingCard:
        """What the model's files say of its embeddings and scores. Read at first use; CheckpointError."""
        return embedding_card(self._model_path, self.model)

    def start_model(self) -> None:
        self._core.start_model()

    def stop_model(self, timeout: float = 60.0) -> None:
        self._core.stop_model(timeout)

    def close(self) -> None:
        self._finalizer()

    def start_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> tuple[RequestHandle, ResultQueue]:
        params = with_seed(sampling_params, lambda: self.default_sampling_params)
        return self._start(self._encode(prompt), params, checked_options(options), parse_request_id(request_id))

    def start_with_embeddings(
        self, prompt: Prompt, embeddings: PromptEmbeddings, sampling_params: SamplingParams | None = None
    ) -> tuple[RequestHandle, ResultQueue]:
        """Starts a request some of whose prompt tokens are given by embedding rows; their ids say nothing. Raises
        InvalidRequest for rows of another width than the model's hidden size."""
        params = with_seed(sampling_params, lambda: self.default_sampling_params)
        return self._start(self._encode(prompt), params, checked_options(None), embeddings=embeddings)

    def start_with_positions(
        self,
        prompt: Prompt,
        positions: PromptPositions,
        sampling_params: SamplingParams | None = None,
        embeddings: PromptEmbeddings | None = None,
    ) -> tuple[RequestHandle, ResultQueue]:
        """Starts a request whose prompt tokens have three positions each, for a model with a multimodal rotary
        embedding; `embeddings` as in `start_with_embeddings`. Raises InvalidRequest where the model takes none."""
        params, ids = with_seed(sampling_params, lambda: self.default_sampling_params), self._encode(prompt)
        return self._start(ids, params, checked_options(None), embeddings=embeddings, positions=positions)

    def hidden_state(self, prompt: Prompt) -> tuple[float, ...]:
        """What the model's head reads of the prompt's last token: hidden_size numbers, to be pooled or normalised by
        the caller. Blocks until they are there; raises what a request raises."""
        params = with_seed(SamplingParams(max_tokens=1))
        handle, queue = self._start(self._encode(prompt), params, checked_options(None), wants_hidden_state=True)
        try:
            for output in queue:
                if output.hidden_state:
                    return output.hidden_state
        finally:
            self.release_request(handle)
        raise RequestCancelled("the request was cancelled before its hidden state was there")

    def sync_request(self, handle: RequestHandle | None = None, timeout: float | None = None) -> None:
        queue = None if handle is None else self._open.queue(parse_request_id(handle.request_id))
        queues = self._open.queues() if handle is None else [] if queue is None else [queue]
        wait_all_finished(queues, handle, timeout)

    def stop_request(self, handle: RequestHandle) -> None:
        self._core.cancel([parse_request_id(handle.request_id)])

    def release_request(self, handle: RequestHandle) -> None:
        request_id = parse_request_id(handle.request_id)
        queue = self._open.remove(request_id)
        if queue is not None and not queue.state.is_final:
            self._core.cancel([request_id])
            queue.put(Output(finish_reason="cancelled"))

    def statistics(self) -> EngineStatistics:
        counters = self._core.statistics()
        rank = RankStatistics(
            rank=0,
            pid=os.getpid(),
            host=host_name(),
            state=self._core.state,
            progress=self._core.progress,
            progress_age_s=self._core.progress_age_s,
            peak_rss_bytes=peak_rss_bytes(),
            weight_bytes=self._loaded.weight_bytes if counters.weights_loaded else 0,
            kv_bytes=self._loaded.kv_bytes if counters.weights_loaded else 0,
            load_s=self._loaded.load_s,
            kernels=self._kernels,
            rss_bytes=rss_bytes(),
            steps=counters.steps,
            host_s=counters.host_s,
            model_s=counters.model_s,
        )
        experts = self._loaded.model.expert_loads()
        return EngineStatistics(self.model, self.max_model_len, (rank,), experts=experts, **counters_of(counters))

    def reset_prefix_cache(self) -> None:
        self._core.reset_prefix_cache()

    def unload_weights(self, timeout: float = 60.0) -> None:
        self._core.operate(Operation.UNLOAD_WEIGHTS, timeout)

    def reload_weights(self, timeout: float = 600.0) -> None:
        self._core.operate(Operation.RELOAD_WEIGHTS, timeout)

    def rebalance_experts(self, timeout: float = 600.0) -> None:
        self._core.rebalance_experts(timeout)

    def load_lora(self, name: str, path: str | Path, timeout: float = 60.0) -> None:
        module = AdapterModule(name, expanded(path))
        self._core.adapters.load(module.loaded(os.urandom(16)), timeout)

    def unload_lora(self, name: str, timeout: float = 60.0) -> int:
        return self._core.adapters.unload(name, timeout)

    def list_loras(self) -> tuple[AdapterModule, ...]:
        return self._core.adapters.listed()[1]

    def start_profile(self) -> None:
        self._core.operate(Operation.START_PROFILE, PROFILE_TIMEOUT_S)

    def stop_profile(self) -> None:
        self._core.operate(Operation.STOP_PROFILE, PROFILE_TIMEOUT_S)

    def op_profile(self) -> tuple[OpProfile, ...]:
        return self._loaded.model.profile()

    def model_info(self) -> dict[str, Any]:
        return self._inspection.model()

    def file_info(self) -> dict[str, Any]:
        return self._inspection.files()

    def version(self) -> str:
        return str(self._inspection.version()["version"])

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        generation, work = self._generation(BlockingWaits(), prompts, sampling_params, options)
        return run_blocking(generation.run(work))

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Completion:
        return self.generate(self.tokenizer.encode_chat(conversation(messages)), sampling_params, options)[0]

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        generation, work = self._generation(AsyncWaits(), prompts, sampling_params, options)
        for grammar in {params.grammar for _, params in work if params.grammar is not None}:
            await asyncio.to_thread(self._core.grammars.compiled, grammar)
        return await generation.run(work)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _generation(
        self,
        waits: Waits,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params,
        options: RequestOptions | None,
    ) -> tuple[BatchGenerate, list[Work]]:
        """Checks and tokenises everything before any request starts."""
        listed = prompt_list(prompts)
        params = params_list(sampling_params, len(listed), lambda: self.default_sampling_params)
        work: list[Work] = [(self._encode(prompt), each) for prompt, each in zip(listed, params, strict=True)]
        start = functools.partial(self._start, options=checked_options(options))
        return BatchGenerate(_Calls(start, self.release_request), waits, self._tokenizer_or_none()), work

    def _start(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        request_id: bytes | None = None,
        embeddings: PromptEmbeddings | None = None,
        positions: PromptPositions | None = None,
        wants_hidden_state: bool = False,
    ) -> tuple[RequestHandle, ResultQueue]:
        request_id = request_id or parse_request_id(None)
        queue = self._open.add(request_id, params, self.tokenizer if params.stop else None)
        try:
            request = Request(request_id, "", tuple(ids), params, options, embeddings=embeddings)
            request.positions, request.wants_hidden_state = positions, wants_hidden_state
            request.adapter = find_adapter(options.adapter, self._core.adapters.listed()[1] if options.adapter else ())
            self._core.submit(request)
        except AllspanError:
            self._open.remove(request_id)
            raise
        return RequestHandle(request_id.hex(), self.model), queue

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        return checked_ids(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, self)

    def _tokenizer_or_none(self) -> Tokenizer | None:
        """None when the model has none: then completions carry token ids and an empty text."""
        try:
            return self.tokenizer
        except (CheckpointError, ModelNotFound) as error:
            logger.debug("completions carry no text: %s", error)
            return None


class _Calls:
    """An engine of this process as `BatchGenerate` uses it: starting a request only puts it into the inbox."""

    def __init__(
        self, start: Callable[[Sequence[int], SamplingParams], Started], release: Callable[[RequestHandle], None]
    ) -> None:
        self._start = start
        self.release = release

    async def start(self, work: Sequence[Work]) -> list[Started | AllspanError]:
        """Starts them in order; after a refusal it starts none of the rest, which get the same reply."""
        replies: list[Started | AllspanError] = []
        for prompt, params in work:
            if replies and isinstance(replies[-1], AllspanError):
                replies.append(replies[-1])
                continue
            try:
                replies.append(self._start(prompt, params))
            except AllspanError as error:
                replies.append(error)
        return replies

    async def outlast(self, error: Unavailable) -> None:
        raise error


def _run(core: EngineCore) -> None:
    """Runs the step loop on the engine's thread. What breaks it has failed every open request by now."""
    try:
        core.run()
    except Exception:
        logger.exception("the engine has failed")


def _close(core: EngineCore, thread: threading.Thread, weights: AllWeights) -> None:
    """Runs once: by close(), when the engine is collected, or when the program ends."""
    core.shutdown()
    thread.join(CLOSE_TIMEOUT_S)
    if thread.is_alive():
        logger.warning("the engine's step did not end within %g s", CLOSE_TIMEOUT_S)
        return
    weights.discard()
