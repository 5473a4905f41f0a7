"""scripts/setup.sh with a stand-in for Python: what it installs, and what it says on failure."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Answers what setup.sh asks of python3 and of .venv/bin/python, and logs calls of pip install.
STUB = """#!/usr/bin/env bash
here=$(cd "$(dirname "$0")/.." && pwd)
case "$*" in
    *version_info*) exit "${STUB_TOO_OLD:-0}" ;;
    *base_prefix*) [[ -n ${STUB_IN_VENV:-} ]] ;;
    *'version("torch")'*) cat "$here/torch" || cat "$STUB_TORCH" ;;
    *sys.prefix*) echo "$here" ;;
    "-m venv "*)
        mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    "-m pip install "*)
        echo "${@:3}" >>"$STUB_LOG"
        [[ $* != *"${STUB_PIP_FAILS_AT:-nothing}"* ]] || exit 1
        [[ $* != *torch==2.13.0* || $* == *--editable* ]] || echo 2.13.0 >"$here/torch" ;;
    --version) echo "Python 3.11" ;;
esac 2>/dev/null
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the scripts, with the stand-in first on PATH and no GPU."""
    root, bin_folder = tmp_path / "check out", tmp_path / "system" / "bin"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    bin_folder.mkdir(parents=True)
    for name in ("python3", "nvidia-smi"):
        stub = bin_folder / name
        stub.write_text(STUB if name == "python3" else "#!/usr/bin/env bash\nexit 1\n")
        stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "pip.log"))
    monkeypatch.setenv("STUB_TORCH", str(tmp_path / "no-torch"))
    return root


def set_up(root: Path, extra: str = "test") -> subprocess.CompletedProcess[str]:
    script = f'set -euo pipefail; source scripts/setup.sh {extra}; echo "$PYTHON"'
    return subprocess.run(["bash", "-c", script], cwd=root, capture_output=True, text=True)


def pip_calls() -> list[str]:
    log = Path(os.environ["STUB_LOG"])
    return log.read_text().splitlines() if log.exists() else []


def test_a_fresh_machine_gets_torch_first_and_is_told_the_size(checkout: Path) -> None:
    done = set_up(checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{checkout}/.venv/bin/python"
    assert done.stderr.index("To download") < done.stderr.index("Installing torch")
    torch_call, package_call = pip_calls()
    assert torch_call.endswith(" torch==2.13.0")
    assert f"--editable {checkout}[test] --constraint" in package_call


def test_the_second_run_installs_nothing(checkout: Path) -> None:
    set_up(checkout)
    before = pip_calls()
    done = set_up(checkout)
    assert "nothing to install" in done.stderr
    assert "nothing to install" in set_up(checkout, "hf").stderr, "test includes hf"
    assert pip_calls() == before
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("\n")
    set_up(checkout)
    assert len(pip_calls()) == len(before) + 1, "a changed pyproject.toml installs again"


@pytest.mark.parametrize("is_venv", [False, True])
def test_an_installed_torch_stays(
    checkout: Path, is_venv: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no-torch").write_text("2.12.1+cu128\n")
    monkeypatch.setenv("STUB_IN_VENV", "yes" if is_venv else "")
    done = set_up(checkout)
    assert done.returncode == 0, done.stderr
    prefix = tmp_path / "system" if is_venv else checkout / ".venv"
    assert done.stdout.strip().startswith(f"{prefix}/bin/python")
    assert ("--system-site-packages" in done.stderr) == (not is_venv)
    assert (prefix / "moe-ep-constraint.txt").read_text() == "torch==2.12.1+cu128\n"
    assert len(pip_calls()) == 1 and "torch==2.13.0" not in pip_calls()[0]


@pytest.mark.parametrize("step", ["torch==2.13.0", "--editable"])
def test_a_failing_step_is_named_and_tried_again(
    checkout: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_PIP_FAILS_AT", step)
    done = set_up(checkout)
    assert done.returncode == 1
    assert "Set-up failed at: Installing" in done.stderr and step in done.stderr
    assert done.stdout == ""
    monkeypatch.delenv("STUB_PIP_FAILS_AT")
    assert set_up(checkout).returncode == 0


def test_no_python_is_said(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_TOO_OLD", "1")
    for name in ("python3.13", "python3.12", "python3.11"):
        bin_folder = Path(os.environ["PATH"].partition(os.pathsep)[0])
        shutil.copy(bin_folder / "python3", bin_folder / name)
    done = set_up(checkout)
    assert done.returncode == 1
    assert "Set-up failed at: finding Python" in done.stderr
