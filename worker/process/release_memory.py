"""The memory of this process: how much it holds, and giving back what tensors hold without moving them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from allspan.protos.api.errors import Unavailable

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of mallopt, in <malloc.h>."""


def resident_bytes() -> int:
    """What this process holds now; 0 where the system does not say."""
    if not sys.platform.startswith("linux"):
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def anonymous(num_bytes: int) -> Tensor:
    """Zeroed bytes, uint8 [num_bytes], aligned to a page, in large pages where the system has some: a stream of weights
    or KV meets fewer of them, which is worth up to a third of its speed. Memory is taken when first written, on the
    writer's node. Raises OSError or ValueError when it cannot be had."""
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # advice: a kernel built without huge pages refuses it
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


def keep_freed_memory() -> None:
    """Has the C library keep up to 64 MiB that a thread frees, in pieces of up to 32 MiB, instead of giving it back at
    once: memory that is taken anew costs a page fault for each 4 KiB, more than reading and checking what it is for.
    glibc comes to these limits by itself once a piece of 32 MiB was freed; other libraries are left as they are."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, limit in ((_MMAP_THRESHOLD, 32 * 2**20), (_TRIM_THRESHOLD, 64 * 2**20)):
            mallopt(option, limit)


def num_memory_nodes(root: Path = Path("/")) -> int:
    """NUMA nodes of this machine that have memory; 1 where the system does not say. `root` stands for "/" in tests."""
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*/meminfo")
    return sum(not re.search(r"MemTotal:\s+0 kB", path.read_text()) for path in nodes) or 1


def give_back(tensors: Iterable[Tensor]) -> None:
    """Gives the memory behind tensors back to the system, and what is in them is lost.

    Tensors of the CPU stay where they are: until written again they read as zeros (but for what they share a page
    with). Writing takes memory anew, on the writer's node. So holders of a tensor, a view or a pointer need no
    notice. Those of a GPU must not be used before `take_again`; a view has its memory again then, a pointer is void.
    Raises Unavailable when the kernel refuses.
    """
    tensors = list(tensors)
    _unmap(tensor for tensor in tensors if tensor.is_cpu)
    empty(tensor for tensor in tensors if not tensor.is_cpu)


def empty(tensors: Iterable[Tensor]) -> None:
    """Frees the storages of tensors, which keep their shapes."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def take_again(tensors: Iterable[Tensor]) -> None:
    """Memory, elsewhere and zeroed, for tensors whose storages are empty; of tensors that share one, all must be given.
    Others are passed over. Raises Unavailable where there is too little."""
    ends: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.numel() and not storage.nbytes():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in steps)
            _, end = ends.get(storage._cdata, (storage, 0))
            ends[storage._cdata] = storage, max(end, (last + 1) * tensor.element_size())
    try:
        for storage, end in ends.values():
            storage.resize_(end)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
    except torch.OutOfMemoryError as error:
        raise Unavailable(f"{error}; end other programs on the GPU, then reload the weights once more") from error


def _unmap(tensors: Iterable[Tensor]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    for start, size in {(s.data_ptr(), s.nbytes()) for s in (tensor.untyped_storage() for tensor in tensors)}:
        first, last = -(-start // page) * page, (start + size) // page * page
        if last <= first:
            continue
        length = ctypes.c_size_t(last - first)
        if libc.madvise(ctypes.c_void_p(first), length, mmap.MADV_DONTNEED):  # private memory: free at once
            reason = os.strerror(ctypes.get_errno())
            raise Unavailable(f"the system does not take back {last - first} bytes of memory: {reason}")
