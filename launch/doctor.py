"""`moe-ep doctor`: what this machine has, what each part enables, and how to get what is missing.

Imports torch, reads package metadata, asks nvidia-smi; on GPUs the checks of `doctor_checks.py`
run. Exit code 0 on any machine on which torch imports, with or without a GPU; 1 where a check
fails.
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from moe_ep.backends import supports
from moe_ep.comm.nccl_ep_limits import loaded_nccl
from moe_ep.launch.backends import BACKENDS
from moe_ep.launch.doctor_checks import Outcome, run_checks
from moe_ep.launch.geometries import geometry

_SMI_TIMEOUT_S = 20
_VERDICTS = {True: "[green]right", False: "[red]failed", None: "[yellow]not run"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `version` is None when the part is absent; then `fix` says what
    brings it (a pip line where one does, empty where nothing is needed)."""

    part: str
    version: str | None
    enables: str
    fix: str = ""

    @property
    def is_found(self) -> bool:
        return self.version is not None


def examine() -> list[Finding]:
    """Everything the report shows, in its order."""
    return [
        Finding("Python", platform.python_version(), "everything"),
        Finding("torch", _torch_version(), "everything"),
        _gloo(),
        *_gpus(),
        _nvlink(),
        _nccl(),
        *(_package(*row) for row in _PACKAGES),
        _tool("ptxas", "nvidia-cuda-nvcc", "tests: compile ring"),
        _tool("nvdisasm", "nvidia-cuda-nvdisasm", "tests: compile ring"),
    ]


# part, distribution that brings it, what it enables, extra of this package
_PACKAGES = (
    ("CuTe DSL", "nvidia-cutlass-dsl", "GPU kernels", "gpu"),
    ("NVSHMEM", "nvshmem4py-cu13", "mega, several GPUs", "gpu"),
    ("CUDA bindings", "cuda-bindings", "GPU kernels", "gpu"),
    ("NCCL-EP", "nccl-extensions", "split over NCCL-EP", "nccl-ep"),
    ("transformers", "transformers", "demo, checkpoints", "hf"),
    ("matplotlib", "matplotlib", "charts of the bench", "plot"),
    ("pytest", "pytest", "tests", "test"),
)


def examine_backends() -> dict[str, tuple[bool, str]]:
    """Name on the command line -> whether that backend can run here, and why or why not.

    Asked for the layer of DeepSeek-V3 in NVFP4; `moe_ep.supports` answers for any other.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    answers = {
        name: supports(geometry("v3"), "nvfp4", backend, device)
        for name, backend in BACKENDS.items()
    }
    return {name: (answer.ok, answer.reason) for name, answer in answers.items()}


def _torch_version() -> str:
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return f"{torch.__version__} ({built_for})"


def _gloo() -> Finding:
    is_there = dist.is_available() and dist.is_gloo_available()
    return Finding(
        "gloo",
        "with torch" if is_there else None,
        "several ranks on CPUs",
        "" if is_there else "a torch build with gloo",
    )


def _gpus() -> list[Finding]:
    enables = "GPU path"
    if torch.cuda.is_available():
        findings = []
        for idx in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(idx)
            text = f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
            findings.append(Finding(f"GPU {idx}", text, enables))
        return findings
    if shutil.which("nvidia-smi") and not torch.version.cuda:
        return [Finding("GPU", None, enables, 'pip install -e ".[gpu]"')]
    if shutil.which("nvidia-smi"):
        return [Finding("GPU", None, enables, f"a driver for CUDA {torch.version.cuda}")]
    return [Finding("GPU", None, enables, "an NVIDIA GPU (without: CPU path)")]


def _nvlink() -> Finding:
    enables = "mega, several GPUs"
    text = _run("nvidia-smi", "topo", "-m")
    links = nvlinks_of_topology(text) if text else {}
    if not links:
        return Finding("NVLink", None, enables, "two GPUs joined by NVLink")
    joined = ", ".join(f"{count} links x {pairs} pairs" for count, pairs in sorted(links.items()))
    return Finding("NVLink", joined, enables)


def nvlinks_of_topology(text: str) -> dict[int, int]:
    """Number of GPU pairs by number of NVLinks between them, from `nvidia-smi topo -m`.

    A row is `GPU0  X  NV18  ...`; a pair stands in two rows and is counted once.
    """
    pairs: dict[int, int] = {}
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # nvidia-smi underlines its header
    for row_idx, row in enumerate(re.findall(r"^GPU\d+\s+(.*)$", text, flags=re.MULTILINE)):
        for col, cell in enumerate(row.split()):
            if col > row_idx and (match := re.fullmatch(r"NV(\d+)", cell)):
                pairs[int(match[1])] = pairs.get(int(match[1]), 0) + 1
    return pairs


def _nccl() -> Finding:
    enables = "several ranks on GPUs"
    if not (dist.is_available() and dist.is_nccl_available()):
        return Finding("NCCL", None, enables, 'pip install -e ".[gpu]"')
    loaded = loaded_nccl() or torch.cuda.nccl.version()  # linked into torch: what it was built with
    return Finding("NCCL", ".".join(map(str, loaded)), enables)


def _package(part: str, distribution: str, enables: str, extra: str) -> Finding:
    found = _version(distribution)
    return Finding(part, found, enables, "" if found else f'pip install -e ".[{extra}]"')


def _tool(name: str, distribution: str, enables: str) -> Finding:
    """A CUDA binary, from the toolkit on PATH or from its package."""
    found = _version(distribution) or shutil.which(name)
    return Finding(name, found, enables, "" if found else f"pip install {distribution}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _run(*command: str) -> str | None:
    """Standard output of a command, or None where it is missing, fails or does not answer."""
    if not shutil.which(command[0]):
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    findings, backends = examine(), examine_backends()
    outcomes = run_checks(lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        report = {
            "parts": [asdict(finding) | {"found": finding.is_found} for finding in findings],
            "backends": [
                {"backend": name, "ok": ok, "reason": reason}
                for name, (ok, reason) in backends.items()
            ],
            "checks": [asdict(outcome) for outcome in outcomes],
        }
        print(json.dumps(report, indent=2))
    else:
        _print_tables(findings, backends, outcomes)
    return int(any(outcome.ok is False for outcome in outcomes))


def _print_tables(
    findings: list[Finding], backends: dict[str, tuple[bool, str]], outcomes: list[Outcome]
) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    parts = Table(title="parts", title_justify="left")
    for heading in ("part", "found", "enables", "to get it"):
        parts.add_column(heading, overflow="fold")
    for finding in findings:
        found = f"[green]{escape(finding.version)}" if finding.is_found else "[yellow]missing"
        parts.add_row(finding.part, found, finding.enables, escape(finding.fix))
    runs = Table(title="backends, for a layer of DeepSeek-V3 in nvfp4", title_justify="left")
    for heading in ("backend", "runs here", "why"):
        runs.add_column(heading, overflow="fold")
    for name, (ok, reason) in backends.items():
        runs.add_row(name, "[green]yes" if ok else "[yellow]no", escape(reason))
    console = Console()
    console.print(parts)
    console.print(runs)
    if not outcomes:
        return
    checks = Table(title="checks on the GPUs", title_justify="left")
    for heading in ("check", "outcome", "what was seen"):
        checks.add_column(heading, overflow="fold")
    for outcome in outcomes:
        checks.add_row(outcome.check, _VERDICTS[outcome.ok], escape(outcome.detail))
    console.print(checks)
