"""How many pages a rank gets, and the refusal when one context does not fit."""

import re

import pytest

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import CacheConfig
from allspan.worker.cache.budget import GPU_RESERVE, CacheDemand, GroupDemand, Room, check_weights_fit, num_kv_pages
from allspan.worker.cache.spec import CacheSpec, PageLifetime
from allspan.worker.scheduler.limits import GroupLimits, Limits

MIB = 2**20


def demand(available=64 * MIB, ranks=1, context=100, seqs=4, page=MIB // 16, total=0):
    return CacheDemand((GroupDemand(page),), context, seqs, Room(available, total), ranks)


def pages_of_one(cache, demand):
    (pages,) = num_kv_pages(cache, demand)
    return pages


def test_a_quarter_of_the_node_is_shared_by_its_ranks():
    assert pages_of_one(CacheConfig(), demand(seqs=1000)) == 64 * 16 // 4
    assert pages_of_one(CacheConfig(), demand(seqs=1000, ranks=2)) == 64 * 16 // 8


def test_no_more_is_taken_than_all_rows_can_fill():
    assert pages_of_one(CacheConfig(), demand(seqs=4, context=100)) == 4 * 4


def test_a_given_size_is_taken_as_it_is():
    assert pages_of_one(CacheConfig(kv_cache_bytes=10 * MIB + 5), demand(available=0)) == 160


def test_every_place_in_the_cache_has_an_int32_number():
    pages = pages_of_one(CacheConfig(page_size=128, kv_cache_bytes=2**45), demand(page=2**12, available=2**46))
    assert pages * 128 - 1 == 2**31 - 1


def test_the_refusal_names_what_is_needed_and_the_longest_context_that_fits():
    with pytest.raises(ConfigError) as caught:
        pages_of_one(CacheConfig(), demand(available=2 * MIB, context=1000))
    message = caught.value.message
    fits = int(re.search(r"max_model_len to at most (\d+)", message).group(1))
    needs = int(re.search(r"kv_cache_bytes to at least (\d+)", message).group(1))
    assert pages_of_one(CacheConfig(), demand(available=2 * MIB, context=fits)) >= 1
    with pytest.raises(ConfigError):
        pages_of_one(CacheConfig(), demand(available=2 * MIB, context=fits + 1))
    pages_of_one(CacheConfig(kv_cache_bytes=needs), demand(context=1000))
    with pytest.raises(ConfigError):
        pages_of_one(CacheConfig(kv_cache_bytes=needs - 1), demand(context=1000))


def test_more_than_the_node_has_is_refused_with_what_it_has():
    with pytest.raises(ConfigError, match=re.escape(f"64.00 MiB available: set it to at most {32 * MIB}")):
        pages_of_one(CacheConfig(kv_cache_bytes=33 * MIB), demand(ranks=2))
    assert pages_of_one(CacheConfig(kv_cache_bytes=32 * MIB), demand(ranks=2)) == 512


def test_nothing_fits_when_not_even_a_page_does():
    with pytest.raises(ConfigError, match="kv_cache_bytes is 1: set kv_cache_bytes to at least"):
        pages_of_one(CacheConfig(kv_cache_bytes=1), demand())


GIB = 2**30


def test_a_gpu_gives_what_its_share_leaves_beside_weights_and_a_reserve():
    on_gpu = demand(available=60 * GIB, total=80 * GIB, page=MIB)
    expected = (int(0.9 * 80 * GIB) - 20 * GIB - GPU_RESERVE) // MIB
    assert pages_of_one(CacheConfig(), on_gpu) == expected  # more than all rows can fill: the prefix cache's
    assert pages_of_one(CacheConfig(gpu_memory_utilization=0.5), on_gpu) == (20 * GIB - GPU_RESERVE) // MIB
    shared = demand(available=60 * GIB, total=80 * GIB, page=MIB, ranks=2)
    assert pages_of_one(CacheConfig(), shared) == (int(0.9 * 80 * GIB) - 20 * GIB - 2 * GPU_RESERVE) // MIB // 2


def test_a_gpu_that_is_full_is_refused_with_the_numbers_and_the_ways_out():
    words = r"gpu_memory_utilization 0.9 of 80.00 GiB, less 79.00 GiB .* raise it, or end other.*kv_cache_bytes"
    with pytest.raises(ConfigError, match=words):
        pages_of_one(CacheConfig(), demand(available=GIB, total=80 * GIB))
    with pytest.raises(ConfigError, match=r"on the GPU, which has 1.00 GiB available: set it to at most 1073741824"):
        pages_of_one(CacheConfig(kv_cache_bytes=2 * GIB), demand(available=GIB, total=80 * GIB))


def two_groups(available=64 * MIB, context=1000, seqs=4, window=100, step=60):
    """Pages of 1 KiB for all tokens and of 3 KiB for those of a window, 16 tokens each."""
    groups = GroupDemand(2**10), GroupDemand(3 * 2**10, PageLifetime(window))
    return CacheDemand(groups, context, seqs, Room(available), max_step_tokens=step)


def test_groups_get_the_pages_of_a_context_and_then_equally_many_more():
    least = (63, 9)  # 1000 tokens; 99 of the window's and a page's of a step, wherever the first page begins
    needed = 63 * 2**10 + 9 * 3 * 2**10
    assert num_kv_pages(CacheConfig(page_size=16, kv_cache_bytes=needed), two_groups()) == least
    assert num_kv_pages(CacheConfig(page_size=16, kv_cache_bytes=needed + 20 * 2**12), two_groups()) == (83, 29)


def test_a_window_gets_no_more_than_all_rows_can_hold_beside_a_group_of_all_tokens():
    assert num_kv_pages(CacheConfig(page_size=16), two_groups()) == (4 * 63, 4 * 11)
    plenty = 2**20
    assert num_kv_pages(CacheConfig(page_size=16, kv_cache_bytes=plenty), two_groups()) == (
        (plenty - 44 * 3 * 2**10) // 2**10,
        44,
    )


def test_the_longest_context_counts_the_pages_of_every_group():
    budget = 100 * 2**10
    with pytest.raises(ConfigError) as caught:
        num_kv_pages(CacheConfig(page_size=16, kv_cache_bytes=budget), two_groups(context=4000))
    fits = int(re.search(r"max_model_len to at most (\d+)", caught.value.message).group(1))
    assert fits == (100 - 27) * 16
    num_kv_pages(CacheConfig(page_size=16, kv_cache_bytes=budget), two_groups(context=fits))
    with pytest.raises(ConfigError):
        num_kv_pages(CacheConfig(page_size=16, kv_cache_bytes=budget), two_groups(context=fits + 1))


@pytest.mark.parametrize("step", [512, 8192])
def test_a_context_of_32k_of_gemma_3_27b_fits_3_gib(step):
    """10 of 62 layers keep all tokens, 52 the last 1024: 15.5 GiB if all did."""
    layer = CacheSpec(16, 1, 16, 128, "bfloat16").bytes_per_page
    groups = GroupDemand(10 * layer), GroupDemand(52 * layer, PageLifetime(1024))
    need = CacheDemand(groups, 32768, 1, Room(2**40), max_step_tokens=step)
    pages = num_kv_pages(CacheConfig(page_size=16, kv_cache_bytes=3 * GIB), need)
    assert pages[0] >= 2048
    assert (pages[1] - 1) * 16 >= 1023 + 128
    limits = Limits(9, 32768, 16, pages[0], 1, step, 1, more_groups=(GroupLimits(pages[1], PageLifetime(1024)),))
    assert 128 <= limits.max_chunk_tokens < 256
    assert min(limits.context_tokens(pages)) >= 32768


def test_weights_that_do_not_fit_are_refused_before_they_are_read():
    check_weights_fit(30 * GIB, Room(60 * GIB, 80 * GIB), 2)
    with pytest.raises(ConfigError, match=r"on this GPU take 70.00 GiB of memory, 60.00 GiB are available: .*--ranks"):
        check_weights_fit(70 * GIB, Room(60 * GIB, 80 * GIB), 1)
    with pytest.raises(ConfigError, match=r"on this node .* container's limit"):
        check_weights_fit(70 * GIB, Room(60 * GIB), 1)


def test_a_context_of_more_than_2_to_the_31_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"max_model_len is 2147483649, must be at most 2147483648"):
        num_kv_pages(CacheConfig(page_size=16, kv_cache_bytes=2**40), demand(context=2**31 + 1, page=1))
