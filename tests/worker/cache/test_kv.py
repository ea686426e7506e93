"""The pages' memory."""

import mmap

import pytest

from allspan.protos.api.errors import InternalError
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.page_pool import Copy
from allspan.worker.cache.spec import CacheSpec
from allspan.worker.process import release_memory


class WithoutHugePages(mmap.mmap):
    """A mapping under a kernel that was built without transparent huge pages."""

    def madvise(self, *advice):
        raise OSError(22, "Invalid argument")


def test_a_kernel_without_huge_pages_gives_its_memory_all_the_same(monkeypatch):
    monkeypatch.setattr(release_memory.mmap, "mmap", WithoutHugePages)
    cache = KVCache(CacheSpec(16, 2, 3, 8, "float32"), 5)
    assert [keys.shape for keys in cache.keys] == [(5, 3, 16, 8)] * 2
    assert not cache.values[1].any()


def numbered(num_pages, dtype="float32"):
    """A cache whose every byte tells its page."""
    cache = KVCache(CacheSpec(16, 2, 3, 8, dtype), num_pages)
    for tensor in tensors_of(cache):
        for page in range(num_pages):
            tensor[page] = page + 1
    return cache


def tensors_of(cache):
    parts = [*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales]
    return [part for part in parts if part is not None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint4"])
def test_pages_go_to_another_cache_and_come_back_whole(dtype):
    device, host = numbered(5, dtype), KVCache(CacheSpec(16, 2, 3, 8, dtype), 3)
    host.copy_pages(device, [Copy(4, 0), Copy(1, 2)])
    for tensor in tensors_of(host):
        assert [int(page.min()) for page in tensor] == [int(page.max()) for page in tensor] == [5, 0, 2]
    device.copy_pages(host, [Copy(0, 1), Copy(2, 3)])
    for tensor in tensors_of(device):
        assert [int(page.min()) for page in tensor] == [int(page.max()) for page in tensor] == [1, 5, 3, 2, 5]


@pytest.mark.parametrize("copy", [Copy(5, 0), Copy(0, 3), Copy(-1, 0), Copy(0, -1)])
def test_a_page_that_is_not_there_is_an_internal_error(copy):
    with pytest.raises(InternalError, match="page"):
        KVCache(CacheSpec(16, 2, 3, 8, "float32"), 3).copy_pages(numbered(5), [copy])


def test_pages_of_another_kind_are_an_internal_error():
    with pytest.raises(InternalError, match="copied into a cache of"):
        KVCache(CacheSpec(16, 2, 3, 8, "bfloat16"), 3).copy_pages(numbered(5), [Copy(0, 0)])


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "row_bytes"),
    [("float32", 33, 132), ("bfloat16", 33, 66), ("int8", 33, 33 + 8), ("uint4", 33, 17 + 8), ("uint4", 64, 32 + 8)],
)
def test_a_page_takes_the_bytes_of_its_tokens_and_their_scales(page_size, dtype, head_dim, row_bytes):
    spec = CacheSpec(page_size, 3, 2, head_dim, dtype)
    cache = KVCache(spec, 5)
    assert spec.bytes_per_page == 2 * 3 * 2 * page_size * row_bytes
    assert sum(tensor.nbytes for tensor in tensors_of(cache)) == cache.num_bytes == 5 * spec.bytes_per_page
    assert all(tensor.is_contiguous() for tensor in tensors_of(cache))
    for i, tensor in enumerate(tensors_of(cache)):
        tensor.fill_(i + 1)
    assert all((tensor == i + 1).all() for i, tensor in enumerate(tensors_of(cache))), "layers overlap"
    assert (cache.key_scales[0] is None) == (dtype in ("float32", "bfloat16"))
