"""spawn.run: results, failures and time limits of local ranks; nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_ep.comm.errors import MoEEpConfigError, MoEEpTimeoutError
from moe_ep.launch import spawn


def exchange(rank: int, num_ranks: int, offset: torch.Tensor) -> dict:
    gathered = [torch.empty(2) for _ in range(num_ranks)]
    dist.all_gather(gathered, offset + rank)
    return {
        "rank": rank,
        "gathered": torch.stack(gathered),
        "num_threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


def raise_on_rank_one(rank: int, num_ranks: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("from the worker")
    dist.barrier()


class UnpicklableError(Exception):
    def __init__(self, *, phase: str) -> None:
        super().__init__(phase)


def raise_unpicklable(rank: int, num_ranks: int) -> None:
    raise UnpicklableError(phase="the phase")


def kill_rank_one(rank: int, num_ranks: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        return "survived"
    return "saw nothing"


def sleep_on_rank_one(rank: int, num_ranks: int, folder: Path) -> None:
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    (folder / f"{rank}.pids").write_text(f"{os.getpid()} {grandchild.pid}")
    if rank == 1:
        time.sleep(300)


def crash_at_exit(rank: int, num_ranks: int) -> None:
    import atexit

    atexit.register(os.kill, os.getpid(), signal.SIGSEGV)


def return_large(rank: int, num_ranks: int) -> torch.Tensor:
    return torch.full((1 << 22,), rank, dtype=torch.int32)


def is_gone(pid: int) -> bool:
    """True once no process of that id runs (a zombie does not run; its parent may be pid 1)."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_ranks_share_a_group_and_return_in_rank_order() -> None:
    results = spawn.run(exchange, 3, torch.tensor([10.0, 20.0]), timeout_s=60)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert [result["num_threads"] for result in results] == [1, 1, 1]
    expected = torch.tensor([[10.0, 20.0], [11.0, 21.0], [12.0, 22.0]])
    for result in results:
        assert torch.equal(result["gathered"], expected)
        assert is_gone(result["pid"])


def test_results_larger_than_a_pipe_leave_no_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    results = spawn.run(return_large, 2, timeout_s=60)
    assert [int(result.sum()) for result in results] == [0, 1 << 22]
    assert not any(result.is_shared() for result in results)
    assert {name for name in os.listdir("/dev/shm") if "torch" in name} <= before


def test_an_exception_comes_back_with_its_type_rank_and_traceback() -> None:
    with pytest.raises(ZeroDivisionError, match="from the worker") as caught:
        spawn.run(raise_on_rank_one, 2, timeout_s=60)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1" in notes and "raise_on_rank_one" in notes


def test_an_exception_that_cannot_be_pickled_comes_back_as_text() -> None:
    with pytest.raises(spawn.RankFailedError, match="rank 0 raised.*(\n.*)*the phase"):
        spawn.run(raise_unpicklable, 1, timeout_s=60)


def test_a_rank_killed_by_a_signal_is_named() -> None:
    with pytest.raises(spawn.RankFailedError, match="rank 1 was killed by signal 9"):
        spawn.run(kill_rank_one, 2, timeout_s=60)


def test_an_expected_death_leaves_the_other_results() -> None:
    results = spawn.run(kill_rank_one, 2, timeout_s=60, expect_killed=(1,))
    assert results == ["survived", None]


def test_a_crash_after_the_result_is_reported() -> None:
    with pytest.raises(spawn.RankFailedError, match="returned from the worker, then was killed"):
        spawn.run(crash_at_exit, 1, timeout_s=60)


def test_the_time_limit_names_the_rank_and_kills_grandchildren(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(MoEEpTimeoutError, match=r"ranks \[1\] of 2") as caught:
        spawn.run(sleep_on_rank_one, 2, tmp_path, timeout_s=12)
    assert caught.value.ranks == (1,)
    assert time.monotonic() - started < 20
    pids = [int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()]
    assert len(pids) == 4
    assert all(is_gone(pid) for pid in pids)


def test_children_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2]); import test_spawn as t\n"
        "if __name__ == '__main__': t.spawn.run(t.sleep_on_rank_one, 2, pathlib.Path(sys.argv[1]))"
    )
    runner = tmp_path / "runner.py"
    runner.write_text(script)
    parent = subprocess.Popen([sys.executable, runner, tmp_path, Path(__file__).parent])
    try:
        for _ in range(600):
            if len(list(tmp_path.glob("*.pids"))) == 2:
                break
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    files = list(tmp_path.glob("*.pids"))
    assert len(files) == 2
    pids = [[int(pid) for pid in file.read_text().split()] for file in files]
    try:
        assert all(is_gone(rank_pid) for rank_pid, _ in pids)
    finally:
        for _, grandchild_pid in pids:
            os.kill(grandchild_pid, signal.SIGKILL)


@pytest.mark.parametrize(("num_ranks", "device"), [(0, "cpu"), (2, "tpu")])
def test_bad_arguments_are_refused_before_any_process_starts(num_ranks: int, device: str) -> None:
    with pytest.raises(MoEEpConfigError, match="got 0|'tpu'"):
        spawn.run(exchange, num_ranks, device=device)
