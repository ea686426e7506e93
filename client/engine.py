"""`ClientEngine`: the facade of a cluster, one that it starts for a model or one that it attaches to."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

from allspan.client.cluster.batch_calls import SessionCalls
from allspan.client.cluster.discovery import Attach, sources_of
from allspan.client.cluster.requests import ResumePolicy, Session
from allspan.client.cluster.snapshot import ClusterView
from allspan.client.event_loop import HomeLoop, LoopThread
from allspan.client.operations import ClusterOperations
from allspan.client.process import ClusterProcess
from allspan.client.transport.base import Connect
from allspan.protos.api.batch_generate import AsyncWaits, BatchGenerate, wait_all_finished
from allspan.protos.api.engine import Completion, EngineStatistics, Prompt
from allspan.protos.api.errors import AllspanError, CheckpointError, ConfigError, ModelNotFound, Unavailable
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
from allspan.protos.api.results import RequestHandle, ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.cluster_file import ClusterInfo
from allspan.protos.cluster.tls import NO_TLS, TlsFiles
from allspan.protos.config.settings import EngineOptions
from allspan.protos.embeddings.calls import EmbeddingCalls
from allspan.protos.embeddings.card import EmbeddingCard, embedding_card
from allspan.protos.text import Tokenizer, default_params, load_tokenizer

STARTUP_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ServeOptions(EngineOptions, total=False):
    """Flags of `allspan serve`, by their names with underscores; any other of its flags is passed on as well."""

    ranks: int | None
    data_parallel_size: int
    oversubscribe: bool
    restart: bool
    quiet: bool


class ClientEngine(ClusterOperations, EmbeddingCalls):
    """An engine on a cluster, with every method of `allspan.protos.api.engine.EngineProtocol`; safe from any thread.

        with ClientEngine("smollm2-135m-instruct", ranks=2) as engine:
            print(engine.generate("The sky is")[0].text)

    `model`: a model's name or path; a cluster is started for it, and ended with this engine.
    `attach`: instead, a run directory, its cluster.json, the URL or address of a server that this user runs on this
    host, or every rank's address, the leader's first (of a cluster of several replicas: such a list for each).
    `tls`: with `attach`, the certificates of this side for ranks that listen over TCP; a run directory names its own.
    `tokenizer`: folder or GGUF file, when the model's own path cannot be read from here.
    `startup_timeout`: seconds until the cluster must be ready, 600 by default. Ranks at addresses in `attach` that do
    not answer are waited for as long, by default 30 s; the log (INFO) and the error say which rank does not.
    `quiet`: keep the log of a cluster started here off this process's standard error.
    `resume`: when a rank dies, its unfinished requests go on in another replica, or in the world that is started next,
    for which they wait up to `resume_timeout` seconds; without repeating or missing a token. A request that loses
    more than `max_resumes` worlds in a row, none of which brought it a token, fails with Unavailable.
    Further options are those of `allspan serve` (`ranks`, `threads`, `dtype`, `max_model_len` …); more ranks than cores
    are let through here (the log says so), unlike there: `oversubscribe=False` refuses them.
    Raises the AllspanError that says why there is no cluster.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        attach: Attach | None = None,
        tls: TlsFiles = NO_TLS,
        tokenizer: str | Path | None = None,
        startup_timeout: float | None = None,
        resume: bool = True,
        resume_timeout: float = 30.0,
        max_resumes: int = 5,
        **serve_options: Unpack[ServeOptions],
    ) -> None:
        if (model is None) == (attach is None):
            raise ConfigError("give either a model to start a cluster for, or attach=… for one that runs")
        if attach is not None and serve_options:
            raise ConfigError(f"{', '.join(serve_options)}: options for starting a cluster, not for attaching to one")
        policy = ResumePolicy(resume, resume_timeout, max_resumes)
        quiet = serve_options.pop("quiet", False)
        answer_timeout = ANSWER_TIMEOUT_S if startup_timeout is None else startup_timeout
        startup_timeout = STARTUP_TIMEOUT_S if startup_timeout is None else startup_timeout
        deadline = time.monotonic() + startup_timeout
        options = {"start_timeout_s": max(1, math.ceil(startup_timeout)), "oversubscribe": True, **serve_options}
        process = None if model is None else ClusterProcess(str(model), options, quiet)
        self._process = process
        self._tokenizer_path = tokenizer
        self._tokenizer: Tokenizer | None = None
        try:
            where = process.wait_ready(startup_timeout) if process is not None else attach
            assert where is not None
            connect = _grpc_connect()
            self._session = Session(sources_of(where, connect, tls), connect, policy)
            self._loop = self._home_loop()
        except BaseException:
            if process is not None:
                process.close()
            raise
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, self._session, process)
        try:
            self._loop.run(self._session.attach(max(deadline - time.monotonic(), 1.0), answer_timeout))
        except BaseException:
            self.close()
            raise

    @property
    def cluster(self) -> ClusterInfo:
        """The world that this engine is attached to, or was last, with the adapters that are loaded now; of several
        replicas, the first that is up."""
        assert self._session.info is not None  # set by the constructor's attach
        return replace(self._session.info, adapters=self.list_loras())

    @property
    def model(self) -> str:
        """The name that the model is served under."""
        return self.cluster.model

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self.cluster.max_model_len

    @property
    def is_ready(self) -> bool:
        """True while requests are taken: of one replica at least every rank sends heartbeats, and its model runs."""
        return not self.down_cause

    @property
    def down_cause(self) -> str:
        """The reason why requests are not taken: a rank is gone or silent, the model is stopped or unloaded, the step
        loop has work and makes no progress; "" while they are."""
        return self._session.unready_cause

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's, loaded at first use. Raises CheckpointError or ModelNotFound, naming the path."""
        if self._tokenizer is None:
            path = self._tokenizer_path or self.cluster.model_path
            try:
                self._tokenizer = load_tokenizer(path)
            except ModelNotFound as error:
                raise ModelNotFound(f"no tokenizer: {error.message}; give tokenizer=PATH, or token ids") from None
            except CheckpointError as error:
                raise CheckpointError(f"no tokenizer: {error.message}; give tokenizer=PATH, or token ids") from None
        return self._tokenizer

    @functools.cached_property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that gives none: the model's own defaults and at most 128 tokens. Read from its
        files at first use; CheckpointError."""
        return default_params(self.cluster.model_path, self.model)

    @functools.cached_property
    def embedding_card(self) -> EmbeddingCard:
        return embedding_card(self.cluster.model_path, self.model)

    def close(self) -> None:
        self._finalizer()

    def start_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> tuple[RequestHandle, ResultQueue]:
        return self._loop.run(self._start(*self._request(prompt, sampling_params, request_id, options)))

    async def astart_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> tuple[RequestHandle, ResultQueue]:
        """`start_request` for asyncio; cancelling it leaves no request behind."""
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(self._encode, prompt)
        if sampling_params is None:  # the model's files may have to be read
            sampling_params = await asyncio.to_thread(lambda: self.default_sampling_params)
        return await self._loop.arun(self._start(*self._request(prompt, sampling_params, request_id, options)))

    def sync_request(self, handle: RequestHandle | None = None, timeout: float | None = None) -> None:
        request_id = None if handle is None else parse_request_id(handle.request_id)
        wait_all_finished(self._loop.run(_now(self._session.queues, request_id)), handle, timeout)

    def stop_request(self, handle: RequestHandle) -> None:
        self._loop.run(self._session.stop(parse_request_id(handle.request_id)))

    async def astop_request(self, handle: RequestHandle) -> None:
        """`stop_request` for asyncio."""
        await self._loop.arun(self._session.stop(parse_request_id(handle.request_id)))

    def release_request(self, handle: RequestHandle) -> None:
        request_id = parse_request_id(handle.request_id)
        if self._loop.is_current:
            self._session.release(request_id)
        else:
            self._loop.run(_now(self._session.release, request_id))

    def statistics(self) -> EngineStatistics:
        return self._loop.run(self._session.statistics())

    async def astatistics(self) -> EngineStatistics:
        """`statistics` for asyncio."""
        return await self._loop.arun(self._session.statistics())

    async def aview(self, timeout: float) -> ClusterView:
        """The cluster as it is known within `timeout` seconds, up or not; for asyncio."""
        return await self._loop.arun(self._session.view(timeout))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        return self._loop.run(self._generation(prompts, sampling_params, options))

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
        generation = await asyncio.to_thread(self._generation, prompts, sampling_params, options)
        return await self._loop.arun(generation)

    def __enter__(self) -> ClientEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _home_loop(self) -> HomeLoop:
        """The loop on which the results arrive."""
        return LoopThread("allspan-client")

    def _generation(
        self, prompts: Prompt | Sequence[Prompt], params: Params, options: RequestOptions | None
    ) -> Coroutine[Any, Any, list[Completion]]:
        """Checks and tokenises everything in the caller's thread, before anything is sent."""
        listed = prompt_list(prompts)
        seeded = params_list(params, len(listed), lambda: self.default_sampling_params)
        encoded = [self._encode(prompt) for prompt in listed]
        needs_text = any(isinstance(prompt, str) for prompt in listed) or any(entry.stop for entry in seeded)
        calls = SessionCalls(self._session, self.model, checked_options(options))
        generation = BatchGenerate(calls, AsyncWaits(), self._tokenizer_for(needs_text))
        return generation.run(list(zip(encoded, seeded, strict=True)))

    def _tokenizer_for(self, needs_text: bool) -> Tokenizer | None:
        """Returns the tokenizer, or None when the model has none and no text is needed: completions then carry token
        ids and an empty text."""
        try:
            return self.tokenizer
        except AllspanError:
            if needs_text:
                raise
            return None

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions | None,
    ) -> tuple[bytes, tuple[int, ...], SamplingParams, RequestOptions]:
        seeded = with_seed(params, lambda: self.default_sampling_params)
        return parse_request_id(request_id), self._encode(prompt), seeded, checked_options(options)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        return checked_ids(prompt, self.cluster)

    async def _start(
        self, request_id: bytes, prompt: tuple[int, ...], params: SamplingParams, options: RequestOptions
    ) -> tuple[RequestHandle, ResultQueue]:
        queue = await self._session.start(request_id, prompt, params, options)
        return RequestHandle(request_id.hex(), self.model), queue


async def _now(function: Callable[..., T], *arguments: Any) -> T:
    """A plain function, on the loop."""
    return function(*arguments)


async def _close_session(session: Session) -> None:
    async with asyncio.timeout(CLOSE_TIMEOUT_S):
        await session.close()


def _shut_down(loop: HomeLoop, session: Session, process: ClusterProcess | None) -> None:
    """Runs once: by close(), when the engine is collected, or when the program ends."""
    if loop.is_current:
        # Collected on the very thread that would have to do the work: the loop cannot wait for itself.
        threading.Thread(target=_shut_down, args=(loop, session, process), name="allspan-close").start()
        return
    try:
        loop.run(_close_session(session))
    except TimeoutError:
        logger.warning("the ranks did not let go within %g s", CLOSE_TIMEOUT_S)
    except Unavailable:
        logger.debug("the loop ended before its engine, and the leases with it")
    finally:
        loop.close()
        if process is not None:
            process.close()


def _grpc_connect() -> Connect:
    """Imported late: a program may import the client, and fork, before it uses gRPC."""
    from allspan.client.transport.grpc_transport import connect

    return connect
