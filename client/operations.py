"""The operations of `ClientEngine` on its cluster's model, beside requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from allspan.client.cluster.requests import Session
from allspan.client.event_loop import HomeLoop
from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.engine import OpProfile
from allspan.protos.api.errors import InvalidRequest
from allspan.protos.config.adapters import expanded, text_problem

ADAPTER_S = 60.0
"""Seconds for all ranks to load an adapter, where the caller says nothing."""


class ClusterOperations:
    """Each is carried out by every replica that is up."""

    _session: Session
    _loop: HomeLoop

    def start_model(self) -> None:
        self._control("start_model", 0.0)

    def stop_model(self, timeout: float = 60.0) -> None:
        self._control("stop_model", timeout)

    def reset_prefix_cache(self) -> None:
        self._control("reset_prefix_cache", 0.0)

    def unload_weights(self, timeout: float = 60.0) -> None:
        self._control("unload_weights", timeout)

    def reload_weights(self, timeout: float = 600.0) -> None:
        self._control("reload_weights", timeout)

    def rebalance_experts(self, timeout: float = 600.0) -> None:
        self._control("rebalance_experts", timeout)

    def start_profile(self) -> None:
        self._control("start_profile", 0.0)

    def stop_profile(self) -> None:
        self._control("stop_profile", 0.0)

    async def acontrol(self, operation: str, timeout: float = 0.0) -> None:
        """Runs one of the operations above, by its method's name, for asyncio."""
        await self._loop.arun(self._session.control(operation, timeout))

    def load_lora(self, name: str, path: str | Path, timeout: float = ADAPTER_S) -> None:
        self._loop.run(self._session.router.load_adapter(self._adapter(name, path, ""), timeout))

    async def aload_lora(
        self, name: str, path: str | Path, base_model_name: str = "", timeout: float = ADAPTER_S
    ) -> None:
        """`load_lora` for asyncio. `base_model_name`: what /v1/models tells as its parent; "": the model."""
        adapter = self._adapter(name, path, base_model_name)
        await self._loop.arun(self._session.router.load_adapter(adapter, timeout))

    def unload_lora(self, name: str, timeout: float = ADAPTER_S) -> int:
        return self._loop.run(self._session.router.unload_adapter(name, timeout))

    async def aunload_lora(self, name: str, timeout: float = ADAPTER_S) -> int:
        """`unload_lora` for asyncio."""
        return await self._loop.arun(self._session.router.unload_adapter(name, timeout))

    def list_loras(self) -> tuple[AdapterModule, ...]:
        return self._session.router.adapters.listed()

    def op_profile(self) -> tuple[OpProfile, ...]:
        return tuple(OpProfile(**op) for op in self._inspect("profile")["ops"])

    def model_info(self) -> dict[str, Any]:
        return self._inspect("model")

    def file_info(self) -> dict[str, Any]:
        return self._inspect("files")

    def version(self) -> str:
        return str(self._inspect("version")["version"])

    async def ainspect(self, what: str) -> dict[str, Any]:
        """ "profile", "model", "files" or "version", for asyncio."""
        return await self._loop.arun(self._session.inspect(what))

    def _adapter(self, name: str, path: str | Path, base_model_name: str) -> AdapterModule:
        """A load of its own. Without a folder that adapters must be below, a relative path begins here. Raises
        InvalidRequest for a text that cannot be sent."""
        folder, info = expanded(path), self._session.info
        if info is None or not info.lora_dir:
            folder = os.path.abspath(folder)
        for field, text in (("lora_name", name), ("lora_path", folder), ("base_model_name", base_model_name)):
            if problem := text_problem(text):
                raise InvalidRequest(f"{field} is {problem}", field)
        return AdapterModule(name, folder, base_model_name).loaded(os.urandom(16))

    def _control(self, operation: str, timeout: float) -> None:
        self._loop.run(self._session.control(operation, timeout))

    def _inspect(self, what: str) -> dict[str, Any]:
        return self._loop.run(self._session.inspect(what))
