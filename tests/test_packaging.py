"""pyproject.toml: every package is listed, and every extra can be installed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIP = (sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--retries", "0")


def test_every_folder_with_modules_is_a_package() -> None:
    folder_of = PYPROJECT["tool"]["setuptools"]["package-dir"]
    listed = [folder_of[package] for package in PYPROJECT["tool"]["setuptools"]["packages"]]
    roots = [ROOT / folder for folder in ("moe_ep", "megakernel", "comm", "launch")]
    held = {file.parent for root in roots for file in root.rglob("*.py")}
    assert sorted(listed) == sorted(folder.relative_to(ROOT).as_posix() for folder in held)
    for folder in held:
        assert (folder / "__init__.py").exists()


def test_versions_agree() -> None:
    import moe_ep

    assert moe_ep.__version__ == PYPROJECT["project"]["version"]


def test_base_dependencies_have_no_cap() -> None:
    assert [d for d in PYPROJECT["project"]["dependencies"] if any(c in d for c in "<=~")] == []


@pytest.mark.timeout(600)
def test_all_extras_resolve_together() -> None:
    """Versions that satisfy all extras at once satisfy each; pip names the pair that does not.

    Metadata only where the index offers it: nothing is installed.
    """
    probe = subprocess.run([*PIP, "--ignore-installed", "--no-deps", "filelock"], text=True)
    if probe.returncode != 0:
        pytest.skip("no package index answers")
    extras = ",".join(PYPROJECT["project"]["optional-dependencies"])
    done = subprocess.run([*PIP, f"{ROOT}[{extras}]"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
