"""The gateway's requirements of its engine beside `EngineProtocol`: facts of its world, and calls that never block."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Protocol

from allspan.client.cluster.snapshot import ClusterView
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.engine import EngineProtocol, EngineStatistics, Prompt
from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import RequestHandle, ResultQueue
from allspan.protos.api.sampling import SamplingParams
from allspan.protos.cluster.cluster_file import ClusterInfo


class GatewayEngine(EngineProtocol, Protocol):
    """`ClientEngine` attached to a cluster, or a scripted fake."""

    @property
    def cluster(self) -> ClusterInfo:
        """The world's model and its limits."""

    @property
    def is_ready(self) -> bool:
        """True while every rank is up, the model runs and its step loop makes progress."""

    @property
    def down_cause(self) -> str:
        """The reason why it is not ready, "" while it is."""

    async def astart_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> tuple[RequestHandle, ResultQueue]:
        """`start_request` for asyncio."""

    async def astatistics(self) -> EngineStatistics:
        """`statistics` for asyncio."""

    async def astop_request(self, handle: RequestHandle) -> None:
        """`stop_request` for asyncio."""

    async def aview(self, timeout: float) -> ClusterView:
        """The cluster as it is known within `timeout` seconds, up or not."""

    async def acontrol(self, operation: str, timeout: float = 0.0) -> None:
        """`start_model`, `stop_model` … by name, for asyncio."""

    async def aload_lora(self, name: str, path: str | Path, base_model_name: str = "") -> None:
        """`load_lora` for asyncio. `base_model_name`: what /v1/models tells as its parent; "": the model."""

    async def aunload_lora(self, name: str) -> int:
        """`unload_lora` for asyncio."""

    async def ainspect(self, what: str) -> dict[str, Any]:
        """ "profile", "model" … for asyncio."""

    def page_events(self) -> list[AsyncGenerator[pb.PageEvents, None]]:
        """The changes of each replica's prefix cache, with token ids, from now on and as long as they are read."""
