"""LiveAdapters: adapters come and go while the model serves, on every rank at the same step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol

from allspan.protos.api.adapters import DIGEST_BYTES, AdapterModule, unknown_adapter
from allspan.protos.api.errors import (
    AdapterInUse,
    AdapterLoaded,
    AdapterNotFound,
    AllspanError,
    DeadlineExceeded,
    InvalidRequest,
    TooManyAdapters,
)
from allspan.protos.config.adapters import most_adapters, name_problem, plain_name, text_problem
from allspan.protos.config.settings import WorkerConfig
from allspan.worker.adapters.registry import drop_argument, load_argument
from allspan.worker.engine.operations import Operations
from allspan.worker.scheduler.adapter_table import AdapterTable
from allspan.worker.scheduler.plan import Operation
from allspan.worker.step.model import RankAdapters

MAX_TEXT_CHARS = 4096
"""Most characters of a path, which goes to all ranks in a plan."""
DROP_S = 10.0
"""Wait for all ranks to forget an adapter that could not be loaded."""
MOST_UNLOADED = 4096
"""Unloaded adapters that are remembered; the oldest are forgotten first."""
POLL_S = 0.005
"""Between two looks at whether all ranks have read an adapter."""


class Operate(Protocol):
    """`EngineCore.operate`."""

    def __call__(self, operation: Operation, timeout: float, argument: bytes = b"") -> None: ...


class LiveAdapters:
    """Callers use `load` and `unload` of the leader's, from any thread; `actions` are what every rank's step loop does
    at these operations of a plan."""

    def __init__(
        self,
        registry: RankAdapters | None,
        table: AdapterTable,
        operations: Operations,
        operate: Operate,
        changed: threading.Condition,
        config: WorkerConfig,
    ) -> None:
        """`registry` None: requests take no adapters. `table`: the leader's scheduler's, under the lock `changed`."""
        self._registry, self._table = registry, table
        self._operations, self._operate, self._changed = operations, operate, changed
        self._most, self._model = most_adapters(config.adapters), config.model.name
        self._one_call = threading.Lock()
        self._unloaded: dict[int, None] = {}
        """The digests of adapters that were unloaded: the prefix cache may still have pages of theirs."""
        self.version = 0
        """Rises with each change of what is listed."""
        self.actions: dict[Operation, Callable[[bytes], None]] = {}
        if registry is not None:
            self.actions = {
                Operation.READ_ADAPTER: registry.read,
                Operation.ADD_ADAPTER: self._add,
                Operation.DROP_ADAPTER: self._drop,
            }
            for adapter in registry.modules:
                table.add(adapter)

    def listed(self) -> tuple[int, tuple[AdapterModule, ...]]:
        """Returns the version and the adapters that take requests, in the order in which they were loaded. Takes no
        lock: between two changes that come at once it may have the newer one."""
        version, known = self.version, self._registry.modules if self._registry is not None else {}
        return version, tuple(each for each in tuple(known.values()) if self._table.takes_requests(each.digest))

    def load(self, module: AdapterModule, timeout: float) -> None:
        """Has all ranks load an adapter, which has its digest, and returns once requests may take it; one that is
        there is left alone. Raises InvalidRequest, AdapterLoaded for the name of another one, AdapterNotFound for a
        load that was unloaded, TooManyAdapters, AdapterInUse, PermissionDenied, AdapterRank, and DeadlineExceeded after
        `timeout` seconds: then no rank has it."""
        deadline = time.monotonic() + timeout

        def left() -> float:
            if (seconds := deadline - time.monotonic()) <= 0:
                raise DeadlineExceeded(f"not all ranks have read the adapter {module.name!r} within {timeout:g} s")
            return seconds

        if self._registry is None:
            raise InvalidRequest(
                "there is no room for adapters: start with --enable-lora, --lora-dir or --max-loras", "lora_name"
            )
        if not self._one_call.acquire(timeout=left()):
            raise DeadlineExceeded(f"another adapter was being loaded for {timeout:g} s; call again")
        try:
            with self._changed:
                if self._is_there(module):
                    return
                slot = self._table.add(module.digest, is_loading=True)
            try:
                self._operate(Operation.READ_ADAPTER, left(), load_argument(module, slot))
                while self._table.is_loading(module.digest):
                    self._registry.wait(left())
                    self._operate(Operation.ADD_ADAPTER, left())
                    if self._table.is_loading(module.digest):  # another rank is not as far
                        time.sleep(min(POLL_S, left()))
            except AllspanError:
                with contextlib.suppress(AllspanError):
                    self._close(module.digest, DROP_S)
                raise
        finally:
            self._one_call.release()

    def unload(self, name: str, timeout: float) -> int:
        """Refuses new requests for an adapter at once, and returns the number of those that still have it: its place
        is free once they have ended. Without any it is free on return, or DeadlineExceeded is raised after `timeout`
        seconds. Raises AdapterNotFound."""
        with self._changed:
            _, listed = self.listed()
            found = next((each for each in listed if plain_name(each.name) == plain_name(name)), None)
            if found is None:
                raise unknown_adapter(name, [each.name for each in listed])
            self._unloaded[found.digest] = None
            if len(self._unloaded) > MOST_UNLOADED:
                del self._unloaded[next(iter(self._unloaded))]
        return self._close(found.digest, timeout)

    def _close(self, adapter: int, timeout: float) -> int:
        """Refuses new requests for it, also where it is taken in only now, and has all ranks forget it: at once, or
        when the requests that it returns the number of have ended; one that is gone already is passed over. Raises as
        `Operations.wait`."""
        with self._changed:
            if adapter not in self._table:
                return 0
            self.version += 1
            num_requests = self._table.close(adapter)
            if not self._table.take_if_unused(adapter):
                return num_requests
            dropping = self._operations.add(Operation.DROP_ADAPTER, drop_argument(adapter))
        self._operations.wait(dropping, timeout)
        return 0

    def _is_there(self, module: AdapterModule) -> bool:
        """Whether it is loaded already. Raises what `load` does for one that cannot be."""
        _, listed = self.listed()
        for each in listed:
            if each.digest == module.digest:
                return True
            if plain_name(each.name) == plain_name(module.name):
                raise AdapterLoaded(
                    f"an adapter {each.name!r} is loaded already: unload it first, or choose another name"
                )
        if module.digest in self._unloaded:
            raise AdapterNotFound(f"this load of the adapter {module.name!r} was unloaded: load it anew")
        if module.digest in self._table:
            raise AdapterInUse(f"the adapter {module.name!r} could not be loaded, and is being removed: try again")
        _check_module(module, self._model)
        if len(self._table) >= self._most:
            if waiting := len(self._table) - len(listed):
                raise AdapterInUse(
                    f"{len(listed)} adapters are loaded and {waiting} that were unloaded still have requests, at most "
                    f"{self._most} (--max-cpu-loras): try again when these have ended"
                )
            raise TooManyAdapters(
                f"{len(listed)} adapters are loaded, at most {self._most} (--max-cpu-loras): unload one, or raise it"
            )
        return False

    def _add(self, argument: bytes) -> None:
        assert self._registry is not None  # these actions are there with it alone
        if self._registry.add():
            with self._changed:
                self._open_newest(self._registry)

    def _open_newest(self, registry: RankAdapters) -> None:
        self._table.open(tuple(registry.modules)[-1])
        self.version += 1

    def _drop(self, argument: bytes) -> None:
        assert self._registry is not None
        adapter = int.from_bytes(argument, "little")
        self._registry.drop(adapter)
        with self._changed:
            self._table.remove(adapter)
            self.version += 1


def _check_module(module: AdapterModule, model: str) -> None:
    """Raises InvalidRequest for a name that is none, texts that are too long for a plan, and a digest that is none."""
    if not 0 < module.digest < 1 << 8 * DIGEST_BYTES:
        raise InvalidRequest(f"digest is {module.digest}, must have {8 * DIGEST_BYTES} bits and not be 0", "digest")
    if problem := name_problem(module.name, (model,)):
        raise InvalidRequest(f"lora_name is {problem}", "lora_name")
    for field, text in (("lora_path", module.path), ("base_model_name", module.base_model_name)):
        if len(text) > MAX_TEXT_CHARS or "\0" in text:
            raise InvalidRequest(
                f"{field} has {len(text)} characters, must have at most {MAX_TEXT_CHARS}, none of them NUL", field
            )
        if problem := text_problem(text):
            raise InvalidRequest(f"{field} is {problem}", field)
