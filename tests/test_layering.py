"""Imports go one way: scripts, tests -> launch -> moe_ep -> megakernel -> comm."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# folder -> the folders whose modules it may import
MAY_IMPORT = {
    "comm": {"comm"},
    "megakernel": {"megakernel", "comm"},
    "moe_ep": {"moe_ep", "megakernel", "comm"},
    "launch": {"launch", "moe_ep", "megakernel", "comm"},
}
# Libraries that a plain import must not pull in: slow, or of an extra.
HEAVY = {"cutlass", "transformers", "nvshmem", "cuda", "matplotlib", "torchao"}
EVERY_NAME = "import moe_ep; [getattr(moe_ep, name) for name in moe_ep.__all__]"


def folder_of(module: str) -> str | None:
    """Folder of one of our modules ("moe_ep.comm.group" -> "comm"), None for another's."""
    parts = module.split(".")
    if parts[0] != "moe_ep":
        return parts[0] if parts[0] in MAY_IMPORT else None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "moe_ep"


def imports_of(source: str, package: str) -> list[str]:
    """Dotted names that `source`, a module of `package`, imports anywhere, relative ones resolved.

    `import_module("moe_ep....")` and other strings of that form count too, so a lazy import does.
    """
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join(base if node.level else []) + ("." if node.level else "")
            module = (module + (node.module or "")).strip(".")
            names += [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("moe_ep.") and node.value.replace(".", "_").isidentifier():
                names.append(node.value)
    return names


def wrong_imports(folder: str, source: str, package: str) -> list[str]:
    found = [(name, folder_of(name)) for name in imports_of(source, package)]
    return [name for name, target in found if target and target not in MAY_IMPORT[folder]]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_no_import_points_back(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = {}
    for file in files:
        parents = file.relative_to(ROOT).parent.parts
        package = ".".join(parents if folder == "moe_ep" else ("moe_ep", *parents))
        if names := wrong_imports(folder, file.read_text(), package):
            wrong[str(file.relative_to(ROOT))] = names
    assert wrong == {}


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("comm", "from moe_ep.megakernel.problem import MoEShape"),
        ("comm", "from moe_ep import megakernel"),
        ("comm", "from .. import layer"),
        ("megakernel", "def f():\n    import moe_ep.config"),
        ("moe_ep", "from moe_ep.launch import spawn"),
        ("moe_ep", "import_module('moe_ep.launch.spawn')"),
        ("moe_ep", "import launch.spawn"),
    ],
)
def test_the_check_sees_a_wrong_import(folder: str, source: str) -> None:
    package = "moe_ep" if folder == "moe_ep" else f"moe_ep.{folder}"
    assert wrong_imports(folder, source, package)


def run_python(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True)


def test_importing_the_package_and_the_command_loads_no_torch() -> None:
    code = "import sys, moe_ep, moe_ep.config, moe_ep.launch.cli; print(*sys.modules)"
    roots = {name.partition(".")[0] for name in run_python(code).split()}
    assert roots.isdisjoint(HEAVY | {"torch"})


def test_the_names_of_the_api_load_no_heavy_library() -> None:
    code = (
        f"import sys, torch; before = set(sys.modules); {EVERY_NAME}; "
        "print(*(set(sys.modules) - before))"
    )
    loaded = run_python(code).split()
    assert "moe_ep.layer" in loaded
    assert {name.partition(".")[0] for name in loaded}.isdisjoint(HEAVY)


def test_import_adds_at_most_300_ms_to_torch() -> None:
    """CPU seconds of one of five processes. A busy machine stretches them, and with them those of
    torch, which are 1.7 on a quiet one."""
    code = (
        "import time; start = time.process_time(); import torch; middle = time.process_time(); "
        f"{EVERY_NAME}; print(middle - start, time.process_time() - middle)"
    )
    tries = (map(float, run_python(code).split()) for _ in range(5))
    assert any(added <= 0.3 * max(1.0, of_torch / 1.7) for of_torch, added in tries)
