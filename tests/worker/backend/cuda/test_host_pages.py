"""The host tier of a GPU: copies that go on beside the steps leave what copies one after the other would have left."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan import Engine, SamplingParams
from allspan.kernels.cuda.cache.move_pages import gather_pages, scatter_pages
from allspan.kernels.cuda.jit import modules
from allspan.protos.api.errors import InternalError
from allspan.worker.backend.cuda.host_pages import HostPages
from allspan.worker.backend.cuda.streams import Streams, cuda_streams
from allspan.worker.cache.kv import KVCache
from allspan.worker.cache.page_pool import Copy
from allspan.worker.cache.spec import CacheSpec
from support.emulator.backend import EmulatedBackend, add_device
from support.emulator.driver import EmulatorDriver
from support.tiny_models import prompt, save_tiny

SPECS = {
    "plain": CacheSpec(page_size=16, num_layers=2, num_kv_heads=1, head_dim=24, dtype="bfloat16"),
    "quantised": CacheSpec(page_size=16, num_layers=1, num_kv_heads=3, head_dim=31, dtype="uint4"),
}
PAGES, HOST_PAGES = 9, 6


@dataclass
class Mark:
    has_happened: bool = False

    def query(self) -> bool:
        return self.has_happened


@dataclass
class Turns:
    """Streams whose work is done whenever chance says, in the order of each stream."""

    chance: random.Random
    queues: list[deque[Any]] = field(default_factory=list)

    def stream(self) -> TurnStream:
        self.queues.append(deque())
        return TurnStream(self, self.queues[-1])

    def go(self, most: int) -> None:
        """Some more is done, where nothing waits; one stream stands still for a while, if another can go on.
        A GPU's own streams do theirs by themselves."""
        if not self.queues:
            return
        late = self.chance.choice(self.queues)
        for _ in range(most):
            ready = [queue for queue in self.queues if queue and not is_waiting(queue[0])]
            if not ready:
                return
            what = self.chance.choice([queue for queue in ready if queue is not late] or ready).popleft()
            if isinstance(what, tuple):
                what[0].has_happened = True
            elif not isinstance(what, Mark):
                what()

    def finish(self) -> None:
        self.go(1_000_000)
        assert not any(self.queues), "streams wait for each other"


def is_waiting(what: Any) -> bool:
    return isinstance(what, Mark) and not what.has_happened


@dataclass
class TurnStream:
    turns: Turns
    queue: deque[Any]

    def run(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def record(self) -> Mark:
        mark = Mark()
        self.queue.append((mark,))
        return mark

    def wait(self, event: Any) -> None:
        self.queue.append(event)


class SlowStream:
    """Of a GPU; sleeps now and then."""

    def __init__(self, stream: Any, chance: random.Random) -> None:
        self.run, self.record, self.wait = self._run, stream.record, stream.wait
        self._stream, self._chance = stream, chance

    def _run(self, work: Callable[[], None]) -> None:
        cycles = self._chance.choice((0, 0, 300_000, 3_000_000))
        self._stream.run(lambda: (torch.cuda._sleep(cycles) if cycles else None, work()))


def open_streams(device: str, chance: random.Random) -> tuple[Streams, Turns]:
    turns = Turns(chance)
    if device == "cpu":
        return Streams(turns.stream(), turns.stream(), turns.stream()), turns
    streams = cuda_streams()
    return Streams(*(SlowStream(stream, chance) for stream in (streams.steps, streams.saves, streams.loads))), turns


def randomise(cache: KVCache, seed: int, pages: list[int]) -> None:
    """What a step writes."""
    for part in cache.parts:
        flat = part.view(torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        shape = (len(flat), len(pages), *flat.shape[2:])
        values = torch.randint(0, 120, shape, dtype=torch.uint8, generator=generator)
        flat[:, pages] = values.to(flat.device)


def contents(cache: KVCache, page: int) -> bytes:
    return b"".join(part.view(torch.uint8)[:, page].cpu().numpy().tobytes() for part in cache.parts)


def some_copies(chance: random.Random, sources: int, targets: int) -> list[Copy]:
    return [Copy(chance.randrange(sources), chance.randrange(targets)) for _ in range(chance.choice((0, 1, 7)))]


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("seed", range(8))
def test_pages_are_as_if_every_copy_ended_before_the_next_step(kind: str, seed: int, device: str) -> None:
    spec, chance = SPECS[kind], random.Random(seed)
    streams, turns = open_streams(device, random.Random(-seed))
    device_pages, plain_device = KVCache(spec, PAGES, device), KVCache(spec, PAGES)
    host = HostPages(spec, HOST_PAGES, device, streams, chunk_bytes=2 * spec.bytes_per_page)
    if device == "cuda":
        host.pin()
    plain_host = KVCache(spec, HOST_PAGES)
    read: list[bytes] = []
    plainly_read: list[bytes] = []
    for step in range(15):
        pages = chance.sample(range(PAGES), 4)
        randomise(plain_device, step, pages)
        streams.steps.run(lambda step=step, pages=pages: randomise(device_pages, step, pages))  # type: ignore[misc]
        saves, loads = some_copies(chance, PAGES, HOST_PAGES), some_copies(chance, HOST_PAGES, PAGES)
        plain_host.copy_pages(plain_device, saves)
        plain_device.copy_pages(plain_host, loads)
        host.save(device_pages, saves)
        host.load(device_pages, loads)
        looked = chance.randrange(PAGES)
        plainly_read.append(contents(plain_device, looked))
        streams.steps.run(lambda page=looked: read.append(contents(device_pages, page)))  # type: ignore[misc]
        turns.go(turns.chance.randrange(60))
    turns.finish()
    if device == "cuda":
        host.drain()
        torch.cuda.synchronize()
    assert read == plainly_read
    assert [contents(device_pages, page) for page in range(PAGES)] == [contents(plain_device, p) for p in range(PAGES)]
    assert [host.memory[page].numpy().tobytes() for page in range(HOST_PAGES)] == [
        contents(plain_host, page) for page in range(HOST_PAGES)
    ]


def test_pages_that_are_not_there_are_refused(device: str) -> None:
    spec = SPECS["plain"]
    cache = KVCache(spec, PAGES, device)
    host = HostPages(spec, HOST_PAGES, device, open_streams(device, random.Random(0))[0])
    for source, target in ((PAGES, 0), (0, HOST_PAGES), (-1, 0)):
        with pytest.raises(InternalError, match="no such copy"):
            host.save(cache, [Copy(source, target)])
        with pytest.raises(InternalError, match="no such copy"):
            host.load(cache, [Copy(target, source)])


def test_pages_of_many_parts_are_gathered_and_scattered(device: str) -> None:
    cache = torch.randint(-100, 100, (3, 7, 2, 8200), dtype=torch.int8).to(device)
    before = cache.clone()
    buffer = torch.zeros((4, 3 * 16400 + 32), dtype=torch.uint8, device=device)
    gather_pages(cache, (6, 0, 3), buffer, 32)
    assert buffer[:3, 32:].view(torch.int8).equal(cache[:, [6, 0, 3]].transpose(0, 1).reshape(3, -1))
    assert not buffer[:, :32].any()
    assert not buffer[3].any()
    scatter_pages(cache, (1, 6), buffer, 32)
    assert cache[:, [1, 6]].equal(before[:, [6, 0]])
    assert cache[:, [0, 2, 3, 4, 5]].equal(before[:, [0, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match="no room for 5 pages"):
        gather_pages(cache, range(5), buffer)
    with pytest.raises(ValueError, match=r"pages: 0 … 7 of 7"):
        gather_pages(cache, (0, 7), buffer)


class AtOnce:
    """A stream that is never behind."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Mark:
        return Mark(has_happened=True)

    def wait(self, event: Any) -> None:
        assert event.query()


def test_an_engine_whose_pages_come_and_go_gives_the_same_tokens(
    tmp_path: Path, emulator: EmulatorDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "driver", lambda: emulator)
    on = add_device(monkeypatch)
    streams = Streams(AtOnce(), AtOnce(), AtOnce())
    monkeypatch.setattr(
        EmulatedBackend, "host_pages", lambda self, spec, num_pages, cpus: HostPages(spec, 40, "cpu", streams)
    )
    sizes = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_tiny(tmp_path / "model", "llama", torch.bfloat16, **sizes)
    page = CacheSpec(16, 2, 1, 64, "bfloat16").bytes_per_page
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    asked = [prompt(33 + i, 90, i) for i in range(4)]
    limits = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64, "page_size": 16}
    settings: dict[str, Any] = {**on, "dtype": "bfloat16", "kv_cache_bytes": 5 * page, **limits}
    settings["host_kv_cache_bytes"] = 40 * page
    with Engine(tmp_path / "model", **settings) as engine:
        first, again = ([engine.generate([one], params)[0].token_ids for one in asked] for _ in range(2))
        assert engine.statistics().prefix_host_hit_tokens >= 4 * 32 - 5 * 16
    assert first == again


@pytest.mark.gpu
@pytest.mark.parametrize("pages", ["auto", "int8"])
def test_tokens_are_those_of_an_engine_whose_pages_stay_on_the_gpu(pages: str, tmp_path: Path) -> None:
    """Prompts that come again when others have taken their pages, and rows that give way to others."""
    sizes = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_tiny(tmp_path / "model", "llama", torch.bfloat16, max_position_embeddings=2048, **sizes)
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "kv_cache_dtype": pages,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "page_size": 16,
    }
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    asked = [prompt(300 + 7 * i, 90, i) for i in range(12)]

    def tokens(**more: int) -> tuple[list[list[tuple[int, ...]]], int]:
        with Engine(tmp_path / "model", **settings, **more) as engine:
            page = engine._loaded.model.cache_groups[0].spec.bytes_per_page
            rounds = [[output.token_ids for output in engine.generate(asked, params)] for _ in range(3)]
            assert page == one_page
            return rounds, engine.statistics().prefix_host_hit_tokens

    spec = CacheSpec(16, 2, 2, 64, "bfloat16" if pages == "auto" else pages)
    one_page = spec.bytes_per_page
    plain, _ = tokens(kv_cache_bytes=600 * one_page)
    swapped, hits = tokens(kv_cache_bytes=80 * one_page, host_kv_cache_bytes=600 * one_page)
    assert hits > 1000
    same = [one[:4] == other[:4] for a, b in zip(plain, swapped, strict=True) for one, other in zip(a, b, strict=True)]
    assert sum(same) >= 0.9 * len(same), "but for what bfloat16 rounds away in other batches"
