"""The profile of a program: times by op and by the kernel that ran it."""

from __future__ import annotations

from allspan.worker.program.profile import profiles, summed


def test_an_op_has_a_profile_for_each_kernel_that_ran_it() -> None:
    rows = [("linear gemv", 2, 10, 30, 40), ("linear cublas", 1, 60, 60, 60)]
    found = [(profile.op, profile.kernel, profile.count, profile.total_ms) for profile in profiles(rows)]
    assert found[:2] == [("linear", "cublas", 1, 60e-6), ("linear", "gemv", 2, 40e-6)]
    assert sum(profile.share for profile in profiles(rows)) == 1.0


def test_programs_that_run_in_turn_have_one_profile_of_both() -> None:
    first, second = [("rope", 3, 10, 30, 60), ("linear gemm", 1, 40, 40, 40)], [("rope", 1, 5, 5, 5)]
    found = summed([*profiles(first), *profiles(second)])
    assert found == profiles([*first, *second])
    assert sum(profile.share for profile in found) == 1.0
