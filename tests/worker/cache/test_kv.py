"""The pages' memory."""

import mmap

from allspan.worker.cache import kv
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.spec import CacheSpec


class WithoutHugePages(mmap.mmap):
    """A mapping under a kernel that was built without transparent huge pages."""

    def madvise(self, *advice):
        raise OSError(22, "Invalid argument")


def test_a_kernel_without_huge_pages_gives_its_memory_all_the_same(monkeypatch):
    monkeypatch.setattr(kv.mmap, "mmap", WithoutHugePages)
    cache = KVCache(CacheSpec(16, 2, 3, 8, "float32"), 5)
    assert [keys.shape for keys in cache.keys] == [(5, 3, 16, 8)] * 2
    assert not cache.values[1].any()
