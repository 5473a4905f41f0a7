"""launch/bootstrap.py and log.py: environments, devices, groups, teardown."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_ep.comm.errors import MoEEpConfigError, MoEEpTimeoutError, MoEEpTransportError
from moe_ep.launch import bootstrap, log, spawn

TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "MOE_EP_LOG"):
        monkeypatch.delenv(name, raising=False)


def test_plain_python_is_one_rank_without_a_process_group() -> None:
    with bootstrap.session("cpu") as group:
        assert (group.rank, group.num_ranks, group.process_group) == (0, 1, None)
        assert group.device == torch.device("cpu")
        assert not dist.is_initialized()


def test_an_address_alone_does_not_make_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert bootstrap.init("cpu").process_group is None


@pytest.mark.parametrize("missing", TORCHRUN)
def test_a_missing_variable_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(MoEEpConfigError, match=rf"set but {missing} missing"):
        bootstrap.init("cpu")
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "two", "RANK is 'two'"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK is '-1'"),
        ("RANK", "1", "RANK is 1; allowed: below WORLD_SIZE, 1"),
    ],
)
def test_a_wrong_variable_is_named(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, good in TORCHRUN.items():
        monkeypatch.setenv(given, good)
    monkeypatch.setenv(name, value)
    with pytest.raises(MoEEpConfigError, match=message):
        bootstrap.init("cpu")


def test_a_rank_without_its_gpu_is_told_so() -> None:
    num_gpus = torch.cuda.device_count()
    with pytest.raises(MoEEpConfigError, match=f"local rank {num_gpus} has no GPU"):
        bootstrap.bind_device("cuda", num_gpus)
    with pytest.raises(MoEEpConfigError, match="'tpu'"):
        bootstrap.init("tpu")


def test_torchrun_makes_a_group_of_its_processes(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from moe_ep.launch import bootstrap\n"
        "with bootstrap.session('cpu') as group:\n"
        "    total = torch.tensor([group.rank + 1.0])\n"
        "    dist.all_reduce(total, group=group.process_group)\n"
        "    sys.stdout.write(f'rank {group.rank} of {group.num_ranks}: {total.item()}\\n')\n"
        "assert not dist.is_initialized()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]


def take_the_group_that_is_there(rank: int, num_ranks: int) -> tuple[int, int, bool]:
    with bootstrap.session("cpu") as group:
        pass
    return group.rank, group.num_ranks, dist.is_initialized()


def test_a_group_that_is_there_is_taken_and_left() -> None:
    assert spawn.run(take_the_group_that_is_there, 2) == [(0, 2, True), (1, 2, True)]


def end_after_a_loss(rank: int, num_ranks: int) -> str:
    group = bootstrap.init("cpu")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(MoEEpTransportError) as caught:
        bootstrap.shutdown(group)
    return str(caught.value)


def test_the_end_without_a_lost_rank_is_one_sentence() -> None:
    text, _ = spawn.run(end_after_a_loss, 2, expect_killed=[1])
    assert text.startswith("the ranks cannot end together, one of them is lost or still busy: ")
    assert "\n" not in text


def test_a_long_wait_for_other_ranks_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bootstrap, "_QUIET_S", 0.05)
    monkeypatch.setattr(bootstrap, "start_process_group", lambda *_, **__: time.sleep(0.5))
    for name, value in (TORCHRUN | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MoEEpConfigError):  # nothing was started
        bootstrap.init("cpu")
    assert "rank 0 waits at 127.0.0.1:29500 for the other ranks of 2" in caplog.text


def order_of_shutdown(rank: int, num_ranks: int, device: str) -> list[str]:
    steps = []

    def note(name: str, step: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: object, **options: object) -> None:
            steps.append(name)
            step(*args, **options)

        return noted

    group = bootstrap.init("cpu")
    bootstrap.finish_nvshmem = note("nvshmem", bootstrap.finish_nvshmem)
    dist.barrier = note("barrier", dist.barrier)
    bootstrap.exchange_records = note("exchange", bootstrap.exchange_records)
    if device == "cuda":  # whose NCCL would wait for a lost rank
        group = replace(group, device=torch.device("cuda", 0))
        torch.cuda.synchronize = lambda device: None
    dist.destroy_process_group = note("process group", dist.destroy_process_group)
    bootstrap.shutdown(group)
    return steps


@pytest.mark.parametrize("device, meets_by", [("cpu", "barrier"), ("cuda", "exchange")])
def test_nvshmem_ends_when_all_ranks_are_there_and_before_the_process_group(device, meets_by):
    steps = [meets_by, "nvshmem", "process group"]
    assert spawn.run(order_of_shutdown, 2, device) == [steps] * 2


def come_late(rank: int, num_ranks: int) -> str:
    group = replace(bootstrap.init("cpu"), device=torch.device("cuda", 0))
    torch.cuda.synchronize = lambda device: None
    if rank == 1:
        time.sleep(4.0)
        return ""
    with pytest.raises(MoEEpTimeoutError) as error:
        bootstrap.shutdown(group, timeout_s=1.0)
    return str(error.value)


def test_a_rank_that_does_not_come_to_the_end_is_named_on_gpus() -> None:
    assert spawn.run(come_late, 2)[0].startswith("shutdown: rank 1 did not come")


def test_log_lines_name_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.setup(rank=2, num_ranks=4)
    log.setup(rank=2, num_ranks=4)  # again: no second handler
    logger.info("not from this rank")
    logger.warning("from this one")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "rank 2/4 WARNING from this one" in lines[0]


def test_the_level_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_EP_LOG", "debug")
    log.setup().debug("a detail")
    assert "a detail" in capsys.readouterr().err
    monkeypatch.setenv("MOE_EP_LOG", "loud")
    with pytest.raises(MoEEpConfigError, match="MOE_EP_LOG 'loud'.*debug, info"):
        log.setup()
