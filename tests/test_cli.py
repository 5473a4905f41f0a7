"""The moe-ep command and its doctor."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from moe_ep import grouped_limits, mega_limits
from moe_ep.comm import nccl_ep_limits
from moe_ep.launch import cli, doctor, doctor_checks

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tPHB\tPXB\t0-47\n"
    "GPU1\tNV18\t X \tNV12\tSYS\tNODE\t0-47\n"
    "GPU2\tNV18\tNV12\t X \tSYS\tNODE\t48-95\n"
    "GPU3\tPHB\tSYS\tSYS\t X \tNODE\t48-95\n"
    "NIC0\tPXB\tNODE\tNODE\tNODE\t X \t\n"
    "\n"
    "Legend:\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n"
)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    assert cli.COMMANDS[command][1] in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("argv", [[], ["dokter"], ["doctor", "--colour"], ["--", "doctor", "x"]])
def test_an_unknown_word_is_a_usage_error(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2
    assert "usage: moe-ep" in capsys.readouterr().err


def test_a_level_of_logging_that_is_unknown_is_refused_by_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_EP_LOG", "loud")
    for words in (["doctor", "--json"], ["estimate", "--geometry", "tiny"]):
        assert cli.main(words) == 2
        assert "MOE_EP_LOG 'loud' is not known; allowed: debug, info" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "said"), [(None, "moe-ep doctor: interrupted\n"), ("1", "")])
def test_an_interrupted_command_ends_without_a_traceback(monkeypatch, capsys, rank, said) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == said


def test_doctor_reports_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    parts = {row["part"]: row for row in report["parts"]}
    assert parts["Python"]["version"] == platform.python_version()
    assert parts["torch"]["version"].startswith(torch.__version__)
    assert parts["gloo"]["found"]
    assert parts["GPU 0" if torch.cuda.is_available() else "GPU"]["found"] == (
        torch.cuda.is_available()
    )
    for row in parts.values():
        assert row["enables"]
        assert row["found"] == (row["version"] is not None)
        assert row["found"] or row["fix"], f"{row['part']}: missing, and no way to get it"
    backends = {row["backend"]: row for row in report["backends"]}
    assert backends["auto"]["ok"] and backends["split-torch"]["ok"]
    assert all(row["reason"] for row in backends.values())


def test_doctor_names_the_pip_line_of_everything_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda distribution: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert cli.main(["doctor", "--json"]) == 0
    rows = {row["part"]: row for row in json.loads(capsys.readouterr().out)["parts"]}
    expected = {"CuTe DSL": "gpu", "NVSHMEM": "gpu", "NCCL-EP": "nccl-ep", "transformers": "hf"}
    for part, extra in expected.items():
        assert not rows[part]["found"]
        assert rows[part]["fix"] == f'pip install -e ".[{extra}]"'


def test_doctor_prints_a_table_with_brackets_intact(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(doctor, "_version", lambda distribution: None)
    assert cli.main(["doctor"]) == 0
    assert 'pip install -e ".[nccl-ep]"' in capsys.readouterr().out


def sees_its_rank(rank: int, num_ranks: int) -> str:
    return f"rank {rank} of {num_ranks}"


def has_wrong_values(rank: int, num_ranks: int) -> str:
    doctor_checks.require_equal(torch.zeros(3).bfloat16(), torch.ones(3).bfloat16(), "rows")
    return "not reached"


def dies(rank: int, num_ranks: int) -> str:
    os.abort()


def test_a_check_that_fails_or_dies_is_a_line_of_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = (sees_its_rank, has_wrong_values, dies)
    outcomes = [
        doctor_checks.run_check(doctor_checks.Check(worker.__name__, worker), device="cpu")
        for worker in workers
    ]
    assert [outcome.ok for outcome in outcomes] == [True, False, False]
    assert outcomes[0].detail == "rank 0 of 1"
    assert "rows: 3 of 3 values are wrong" in outcomes[1].detail
    assert "SIGABRT" in outcomes[2].detail
    monkeypatch.setenv("COLUMNS", "160")
    for some, code in ((outcomes[:1], 0), (outcomes, 1)):
        monkeypatch.setattr(doctor, "run_checks", lambda say, some=some: some)
        assert cli.main(["doctor"]) == code
    printed = capsys.readouterr().out
    assert "3 of 3 values are wrong" in printed and "failed" in printed


@pytest.mark.parametrize(
    ("missing", "not_run"),
    [
        ("nothing", {}),
        ("cutlass", {"virtual ranks": "nvidia-cutlass-dsl", "peers": "nvidia-cutlass-dsl"}),
        ("nvshmem", {"peers": "nvshmem4py"}),
        ("nccl-extensions", {"NCCL-EP": "nccl-extensions"}),
    ],
)
def test_a_check_that_lacks_a_package_did_not_run_and_names_it(
    monkeypatch: pytest.MonkeyPatch, missing: str, not_run: dict[str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in (grouped_limits, mega_limits):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == missing else name)
    monkeypatch.setattr(nccl_ep_limits, "version", lambda name: find_version(name, missing))
    monkeypatch.setattr(nccl_ep_limits, "loaded_nccl", lambda: nccl_ep_limits.LEAST_NCCL)
    monkeypatch.setattr(nccl_ep_limits, "_nvcc", lambda: "nvcc")
    started = []

    def run_check(check: doctor_checks.Check, num_ranks: int) -> doctor_checks.Outcome:
        started.append((check.name, num_ranks))
        return doctor_checks.Outcome(check.name, True, "")

    monkeypatch.setattr(doctor_checks, "run_check", run_check)
    outcomes = {outcome.check: outcome for outcome in doctor_checks.run_checks(print)}
    assert {name for name, outcome in outcomes.items() if outcome.ok is None} == set(not_run)
    for name, package in not_run.items():
        assert package in outcomes[name].detail
    everything = [("virtual ranks", 1), ("peers", 2), ("NCCL-EP", 2)]
    assert started == [check for check in everything if check[0] not in not_run]


def find_version(name: str, missing: str) -> str:
    if name == missing:
        raise PackageNotFoundError(name)
    return "1.0"


def test_nvlinks_are_counted_once_a_pair() -> None:
    assert doctor.nvlinks_of_topology(TOPOLOGY) == {18: 2, 12: 1}
    assert doctor.nvlinks_of_topology("GPU0\t X \t0-47\n") == {}
