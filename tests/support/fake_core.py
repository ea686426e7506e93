"""A scripted engine core: it remembers what a service asked of it, and the test says what it answers."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.counters import EngineCounters
from allspan.protos.api.errors import AllspanError
from allspan.worker.cache.page_log import PageLog
from allspan.worker.scheduler.counters import Load
from allspan.worker.scheduler.plan import Operation
from allspan.worker.scheduler.request import Request


class FakeAdapters:
    """See `LiveAdapters`. `rejection`, once set, is raised by `load` and `unload`; loads end once `may_load` is set."""

    def __init__(self, calls: list[str]) -> None:
        self.modules = [AdapterModule("sql", "/a", digest=8), AdapterModule("b", "/c", "tiny", 9)]
        self.version = 0
        self.rejection: AllspanError | None = None
        self.num_requests = 0
        self.may_load = threading.Event()
        self.may_load.set()
        self._calls = calls

    def listed(self) -> tuple[int, tuple[AdapterModule, ...]]:
        return self.version, tuple(self.modules)

    def load(self, module: AdapterModule, timeout: float) -> None:
        assert self.may_load.wait(10)
        if self.rejection is not None:
            raise self.rejection
        self.modules.append(module)
        self.version += 1
        self._calls.append(f"load {module.name} {timeout:.1f}")

    def unload(self, name: str, timeout: float) -> int:
        if self.rejection is not None:
            raise self.rejection
        self.modules = [module for module in self.modules if module.name != name]
        self.version += 1
        self._calls.append(f"unload {name} {timeout:.1f}")
        return self.num_requests


class FakeCore:
    """See `allspan.worker.service.servicer.Core`. `rejection`, once set, is raised by `submit`, `stop_model` and
    `operate`."""

    def __init__(self, is_leader: bool = True) -> None:
        self.is_leader = is_leader
        self.progress = 7
        self.steps = 3
        self.state = "running"
        self.progress_age_s = 0.25
        self.rejection: AllspanError | None = None
        self.refusal = ""
        self.submitted: list[Request] = []
        self.cancelled: list[bytes] = []
        self.calls: list[str] = []
        self.counted: EngineCounters | None = None
        self.page_log: PageLog | None = None
        self.release_stop = threading.Event()
        self.adapters = FakeAdapters(self.calls)

    @property
    def advance(self) -> int:
        return self.progress

    def submit(self, request: Request) -> None:
        if self.rejection is not None:
            raise self.rejection
        self.submitted.append(request)

    def cancel(self, request_ids: Iterable[bytes]) -> None:
        self.cancelled.extend(request_ids)

    def start_model(self) -> None:
        self.calls.append("start_model")

    def stop_model(self, timeout: float) -> None:
        if self.rejection is not None:
            raise self.rejection
        assert self.release_stop.wait(timeout), "the test never let stop_model end"
        self.calls.append("stop_model")

    def operate(self, operation: Operation, timeout: float) -> None:
        if self.rejection is not None:
            raise self.rejection
        self.calls.append(f"{operation.name} {timeout:g}")

    def rebalance_experts(self, timeout: float) -> None:
        self.calls.append(f"rebalance_experts {timeout:g}")

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def load(self) -> Load:
        return Load(running=1, waiting=2, queued_tokens=300, pages_used=4, pages_total=10, cached_pages=5)

    def statistics(self) -> EngineCounters:
        return self.counted or EngineCounters(
            running=1, waiting=2, pages_total=10, pages_used=4, page_size=32, steps=self.steps
        )
