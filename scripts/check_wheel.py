"""Build the wheel and import every module of it from another folder, away from the checkout.

An editable install finds modules that `packages` in pyproject.toml forgot; a wheel does not hold
them. Run it with the Python of the checkout's environment:  python scripts/check_wheel.py
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folder in the checkout -> folder in the wheel (pyproject.toml, package-dir).
FOLDERS = {
    "moe_ep": "moe_ep",
    "megakernel": "moe_ep/megakernel",
    "comm": "moe_ep/comm",
    "launch": "moe_ep/launch",
}
# What a build reads besides.
FILES = ("pyproject.toml", "README.md", "LICENSE")
IMPORT_ALL = """
import importlib, pathlib, sys
for module in sys.argv[2:]:
    origin = pathlib.Path(importlib.import_module(module).__file__).resolve()
    assert origin.is_relative_to(pathlib.Path(sys.argv[1]).resolve()), f"{module}: {origin}"
print(f"{len(sys.argv) - 2} modules of the wheel imported")
"""


def expected_files() -> list[str]:
    """Path inside the wheel of every module of the checkout."""
    return sorted(
        f"{target}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for file in (ROOT / folder).rglob("*.py")
    )


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def main() -> int:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        # A copy, because setuptools packs what an earlier build left in build/ of the checkout.
        source, wheels, site = (Path(folder, name) for name in ("source", "wheels", "site"))
        for name in FOLDERS:
            shutil.copytree(ROOT / name, source / name)
        for name in FILES:
            shutil.copy(ROOT / name, source)
        subprocess.run([*pip, "wheel", "--no-deps", "-w", wheels, source], check=True, cwd=folder)
        (wheel,) = wheels.glob("*.whl")
        held = set(zipfile.ZipFile(wheel).namelist())
        missing = [file for file in expected_files() if file not in held]
        if missing:
            print(f"{wheel.name} lacks {', '.join(missing)}; see packages in pyproject.toml")
            return 1
        subprocess.run(
            [*pip, "install", "--no-deps", "--target", site, wheel], check=True, cwd=folder
        )
        modules = [module_name(file) for file in expected_files()]
        # First on the path, so before the editable install's own finder.
        environ = {**os.environ, "PYTHONPATH": str(site)}
        command = [sys.executable, "-c", IMPORT_ALL, str(site), *modules]
        return subprocess.run(command, cwd=folder, env=environ).returncode


if __name__ == "__main__":
    sys.exit(main())
