"""The names under which routers scrape vLLM."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from allspan.client.gateway.metrics.collect import Scene
from allspan.client.gateway.metrics.exposition import Exposition
from support.fake_engine import FakeEngine
from support.gateway import fake_engine, front

OPENMETRICS = "application/openmetrics-text"


async def scraped(engine: FakeEngine, accept: str = "", **settings: str) -> dict[str, tuple[dict[str, str], float]]:
    """The samples of vLLM's names, which must all be different."""
    context = front(engine, **settings)
    text, _ = Exposition().render(Scene(context, await context.snapshots.look()), accept)
    parse = openmetrics_families if accept else text_string_to_metric_families
    samples = [
        sample
        for family in parse(text.decode())
        if family.name.startswith("vllm:") and family.type != "histogram"
        for sample in family.samples
    ]
    assert len({(sample.name, *sorted(sample.labels.items())) for sample in samples}) == len(samples)
    return {sample.name: (sample.labels, sample.value) for sample in samples}


async def test_an_endpoint_picker_finds_the_names_and_labels_that_it_scrapes() -> None:
    for accept in ("", OPENMETRICS):
        found = await scraped(fake_engine(), accept)
        for name, value in (
            ("vllm:num_requests_waiting", 0),
            ("vllm:num_requests_running", 0),
            ("vllm:kv_cache_usage_perc", 0),
            ("vllm:prefix_cache_hits_total", 63),
        ):
            assert found[name] == ({"model_name": "tiny"}, value)
        cache, one = found["vllm:cache_config_info"]
        assert (cache, one) == ({"model_name": "tiny", "block_size": "16", "num_gpu_blocks": "64"}, 1)
        adapters, _ = found["vllm:lora_requests_info"]
        assert adapters.items() >= {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": ""}.items()


async def test_the_names_are_left_out_on_demand_and_while_nothing_is_known() -> None:
    assert not await scraped(fake_engine(), metrics_names="allspan")
    assert "vllm:num_requests_waiting" not in await scraped(fake_engine(down_cause="rank 1 died"))
