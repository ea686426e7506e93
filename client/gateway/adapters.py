"""Loading and unloading LoRA adapters for whoever has the admin key, over HTTP and gRPC alike."""

from __future__ import annotations

import logging
import time

from allspan.client.gateway.auth.caller import check_admin
from allspan.client.gateway.context import GatewayContext
from allspan.protos.api.errors import InvalidRequest, PermissionDenied
from allspan.protos.config.adapters import name_problem

logger = logging.getLogger("allspan.gateway")


class AdapterOperator:
    """The calls of one gateway."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._engine = context.engine

    async def load(self, name: str, path: str, base_model_name: str) -> None:
        """Has every rank load an adapter. Raises PermissionDenied without the admin key or --lora-dir, InvalidRequest
        for a name that is none, and what `EngineProtocol.load_lora` raises."""
        check_admin()
        if not self._engine.cluster.lora_dir:
            raise PermissionDenied(
                "adapters are not loaded over HTTP and gRPC here: start the server with --lora-dir DIR, and they are "
                "from folders below DIR"
            )
        if problem := name_problem(name, self._context.model.names):
            raise InvalidRequest(f"lora_name is {problem}", "lora_name")
        if not path:
            raise InvalidRequest("lora_path is empty, must name a folder", "lora_path")
        started = time.monotonic()
        await self._engine.aload_lora(name, path, base_model_name)
        logger.info("admin: adapter %r loaded in %.3f s", name, time.monotonic() - started)

    async def unload(self, name: str) -> int:
        """Refuses new requests for an adapter, and returns the number of those that still have it. PermissionDenied
        without the admin key, AdapterNotFound."""
        check_admin()
        left = await self._engine.aunload_lora(name)
        logger.info("admin: adapter %r unloaded, %d requests still have it", name, left)
        return left
