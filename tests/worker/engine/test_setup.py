"""All ranks of a world take the same number of pages."""

import pytest

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import CacheConfig, ModelConfig, ServiceConfig, WorkerConfig
from allspan.worker.cache.budget import CacheDemand, GroupDemand, Room
from allspan.worker.engine.setup import agreed_pages
from support.threads import ThreadWorld

CONFIG = WorkerConfig(ModelConfig("m", "m"), ServiceConfig("-"), CacheConfig(kv_cache_bytes=1000))


def demand(bytes_per_page):
    return CacheDemand((GroupDemand(bytes_per_page),), max_model_len=64, max_num_seqs=4, room=Room(0))


def test_the_rank_with_the_largest_pages_decides():
    world = ThreadWorld(3)
    sizes = (10, 25, 20)
    assert world.run(lambda rank: agreed_pages(CONFIG, demand(sizes[rank]), world.collectives[rank])) == [(40,)] * 3


def test_a_rank_without_room_fails_them_all_and_is_named():
    world = ThreadWorld(2)
    messages = {}

    def on_rank(rank):
        with pytest.raises(ConfigError) as caught:
            agreed_pages(CONFIG, demand((10, 800)[rank]), world.collectives[rank])
        messages[rank] = caught.value.message

    world.run(on_rank)
    assert "rank 1" in messages[0]
    assert "max_model_len to at most 32" in messages[1]
