"""A check of several ranks that fails is that one test's failure."""

import pytest
from rank_checks import run_checks

from moe_ep.launch import spawn


def fails_by_pytest() -> None:
    with pytest.raises(ValueError):
        pass


def fails_by_assertion() -> None:
    raise AssertionError("wrong bits")


def job(rank: int, num_ranks: int) -> dict[str, str]:
    checks = {
        "raises nothing": fails_by_pytest if rank == 1 else lambda: None,
        "is wrong": fails_by_assertion if rank == 0 else lambda: None,
        "is right": lambda: None,
    }
    return run_checks(rank, checks)


def test_one_failure_leaves_the_other_checks():
    results = spawn.run(job, 2)
    assert [bool(text) for text in results[1].values()] == [True, False, False]
    assert [bool(text) for text in results[0].values()] == [False, True, False]
    assert "DID NOT RAISE" in results[1]["raises nothing"]
    assert "wrong bits" in results[0]["is wrong"]
