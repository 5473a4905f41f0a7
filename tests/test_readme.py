"""README.md: what it names exists, what it shows runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ep.launch.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
FOLDERS = ("moe_ep", "megakernel", "comm", "launch", "tests", "scripts")


def named_paths(text: str) -> set[str]:
    """Words that are paths of this repository: under a folder of ours, or a file's name."""
    words = {word.rstrip(".") for word in re.findall(r"[\w.][\w./-]*", text)}
    starts = tuple(f"{folder}/" for folder in FOLDERS)
    return {word for word in words if word.startswith(starts) or word.endswith((".md", ".toml"))}


def example() -> str:
    """The indented block of the section "Example"."""
    section = TEXT.split("## Example\n", 1)[1].split("\n## ", 1)[0]
    lines = [line[4:] for line in section.splitlines() if line.startswith("    ") or not line]
    return "\n".join(lines).strip() + "\n"


def test_every_path_exists() -> None:
    paths = named_paths(TEXT)
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_folder_is_in_the_folder_map() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|", TEXT, flags=re.MULTILINE)
    assert sorted(rows) == sorted(FOLDERS)


def test_a_path_that_does_not_exist_is_seen() -> None:
    assert named_paths("see `moe_ep/nothing.py`, GONE.md.") == {"moe_ep/nothing.py", "GONE.md"}


def test_every_command_is_named() -> None:
    assert [name for name in COMMANDS if f"`{name}`" not in TEXT] == []


def test_every_environment_variable_is_in_the_table() -> None:
    sources = [file.read_text() for folder in FOLDERS[:4] for file in (ROOT / folder).rglob("*.py")]
    used = set(re.findall(r"\bMOE_EP_[A-Z_]+\b", "\n".join(sources)))
    table = re.findall(r"^\| `(MOE_EP_[A-Z_]+)` \|", TEXT, flags=re.MULTILINE)
    assert sorted(table) == sorted(used)
    assert len(table) <= 5


@pytest.mark.timeout(620)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_example_runs(num_ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(example())
    assert len(example().splitlines()) <= 18
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), script]
    # Seconds on a quiet machine, minutes where three imports of torch share a core with others.
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"of {num_ranks} on") == num_ranks
