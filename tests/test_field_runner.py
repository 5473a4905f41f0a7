"""What runs the field cases outlives them; the scripts around it say what they lack."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / "scripts" / "field_cases.py"
CASES = """
import os, time

def test_A01_passes(): pass
def test_A02_A03_hangs(): time.sleep(100)
def test_A04_crashes(): os.kill(os.getpid(), 11)
def test_a05_fails(): assert 1 == 2
def test_any_passes(): pass
"""


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("field_cases", RUNNER)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_cases_that_hang_or_crash_cost_nobody_else(tmp_path):
    """In a checkout of its own."""
    for folder in ("scripts", "tests/field"):
        (tmp_path / folder).mkdir(parents=True)
    own, path = shutil.copy(RUNNER, tmp_path / "scripts"), tmp_path / "field.json"
    (tmp_path / "tests/field/test_cases.py").write_text(CASES)
    process = subprocess.run(
        [sys.executable, own, "--case-limit", "3", "--json", path],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert process.returncode == 1
    outcomes = {one["case"]: one["outcome"] for one in json.loads(path.read_text())}
    assert outcomes == {
        "A01": "passed", "A02 A03": "hung", "A04": "crashed", "A05": "failed", "": "passed",
    }  # fmt: skip


def test_the_kinds_hold_every_row_once_and_every_row_has_a_test(runner):
    rows = [row for ranges, _ in runner.KINDS.values() for row in runner.rows_of(ranges)]
    assert sorted(rows) == [f"A{number:02}" for number in range(1, runner.NUM_ROWS + 1)]
    text = "".join(path.read_text().upper() for path in (ROOT / "tests/field").glob("test_*.py"))
    assert not [row for row in rows if f"_{row}_" not in text]


def test_the_table_counts_what_ran_and_names_what_did_not_pass(runner):
    outcomes = [
        runner.Outcome("A01", "cpu", "test_x.py::test_A01_x", "passed", 1.0),
        runner.Outcome("A02", "cpu", "test_x.py::test_A02_x", "failed", 1.0),
        runner.Outcome("A02", "gpus", "test_x.py::test_A02_x[mega@2]", "skipped", 0.0),
    ]
    deadlock = runner.markdown_of(outcomes).splitlines()[2]
    assert deadlock.startswith("| deadlock, 12 |")
    assert deadlock.endswith("| 1 of 2; A02 failed |  |  | 1 wait |")


@pytest.mark.skipif(shutil.which("compute-sanitizer") is not None, reason="it is installed")
def test_a_missing_sanitizer_is_named():
    process = subprocess.run(
        ["bash", ROOT / "scripts" / "sanitize.sh"],
        capture_output=True, text=True, env=os.environ | {"PYTHON": "false"},
    )  # fmt: skip
    assert process.returncode == 2
    assert "compute-sanitizer is not on PATH" in process.stderr
