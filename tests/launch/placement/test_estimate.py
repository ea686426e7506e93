"""What `allspan plan` says of a split: by its formula, in its words."""

from __future__ import annotations

from typing import Any

import pytest

from allspan.launch.placement.estimate import (
    ALL_REDUCE_S,
    GPU_ALL_REDUCE_S,
    GPU_BYTES_PER_S,
    NODE_BYTES_PER_S,
    THREAD_BYTES_PER_S,
    advice,
    decode_step,
    formula,
)


def plan(weights: list[int], nodes: list[int], threads: int = 1, heads: tuple[int, int] = (16, 8)) -> dict[str, Any]:
    return {
        "ranks": [{"token_bytes": each, "busiest_token_bytes": each} for each in weights],
        "nodes": nodes,
        "threads": [threads] * len(nodes),
        "replicas": 1,
        "gpus": [],
        "model": {"num_layers": 30, "num_heads": heads[0], "num_kv_heads": heads[1]},
    }


def test_a_step_reads_the_heaviest_rank_and_reduces_twice_a_layer() -> None:
    step = decode_step(plan([12 * 10**9, 6 * 10**9], [0, 1]))
    assert step.read_s == pytest.approx(12e9 / THREAD_BYTES_PER_S)
    assert step.all_reduce_s == pytest.approx(61 * ALL_REDUCE_S)
    assert step.alone_s == pytest.approx(18e9 / THREAD_BYTES_PER_S)
    assert "1000.49 ms = 1000.00 ms to read the weights" in formula(step)


def test_a_step_reads_what_the_busiest_rank_reads_and_alone_what_all_do() -> None:
    """Of a mixture of experts: two ranks with whole experts, of which a token's mostly lie on one."""
    ranks = [{"weight_bytes": 9 * 10**9, "token_bytes": 10**9, "busiest_token_bytes": 1.2 * 10**9}] * 2
    step = decode_step(plan([0, 0], [0, 1]) | {"ranks": ranks})
    assert step.read_s == pytest.approx(1.2e9 / THREAD_BYTES_PER_S)
    assert step.floor_tokens_per_s == pytest.approx(10.0)
    assert step.alone_s == pytest.approx(2e9 / THREAD_BYTES_PER_S)


def test_sums_and_hand_overs_between_hosts_take_the_links_time() -> None:
    link = {"hosts": 2, "hops_s": 1e-3}
    split = plan([10**9] * 2, [0, 0]) | {"hosts": ["a", "b"], "link": link}
    assert decode_step(split).all_reduce_s == pytest.approx(61e-3)
    assert "one on each host" in " ".join(advice(split))
    both = plan([10**9] * 4, [0] * 4) | {"hosts": ["a", "a", "b", "b"], "link": link}
    assert decode_step(both).all_reduce_s == pytest.approx(61 * (1e-3 + ALL_REDUCE_S))
    stages = decode_step(both | {"stages": 2})
    assert stages.all_reduce_s == pytest.approx(61 * ALL_REDUCE_S)
    assert stages.hand_over_s == pytest.approx(1e-3)
    assert "+ 1.00 ms for hand-overs" in formula(stages)


def test_a_node_gives_no_more_than_it_has() -> None:
    assert decode_step(plan([10**9], [0], threads=64)).read_s == pytest.approx(1e9 / NODE_BYTES_PER_S)
    assert decode_step(plan([10**9], [0], threads=2)).read_s == pytest.approx(1e9 / (2 * THREAD_BYTES_PER_S))


def test_one_rank_and_a_large_model_on_two_nodes_have_no_warning() -> None:
    assert advice(plan([10**8], [0])) == []
    assert advice(plan([10**10, 10**10], [0, 1], threads=16)) == []


def test_a_small_model_is_better_off_with_replicas() -> None:
    (words,) = advice(plan([10**7, 10**7], [0, 1]))
    assert "the model is small for 2 ranks" in words
    assert "--ranks 1 --data-parallel-size 2" in words


def test_ranks_on_one_node_share_its_bandwidth() -> None:
    (words,) = advice(plan([10**10, 10**10], [0, 0], threads=4))
    assert "share its memory bandwidth" in words


def test_heads_that_do_not_divide_are_told() -> None:
    query, kv = advice(plan([10**10, 10**10], [0, 1], threads=4, heads=(9, 3)))
    assert "9 query heads do not divide by 2 ranks: the rank with 5 of them is the slowest" in query
    assert "10%" in query
    assert "3 KV heads" in kv


def test_gpus_read_with_bandwidth_of_their_own() -> None:
    on_gpus = plan([7 * 10**9] * 2, [0, 0]) | {"gpus": [{"index": 0}, {"index": 1}]}
    step = decode_step(on_gpus)
    assert step.read_s == pytest.approx(7e9 / GPU_BYTES_PER_S)
    assert step.alone_s == pytest.approx(2 * step.read_s)
    assert step.all_reduce_s == pytest.approx(61 * GPU_ALL_REDUCE_S)
    assert "4250 GB/s per GPU" in formula(step)
    assert not [words for words in advice(on_gpus) if "bandwidth" in words]
