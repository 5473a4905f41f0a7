"""Where the figures of a bench are from, and how they are shown."""

import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from moe_ep.comm.group import EpGroup
from moe_ep.launch.peaks import Peaks

# Relative L2 error of the output against the specification. Both round each term and the sum to
# BF16 (0.0017 each); where the sums before them differ in order, some roundings fall apart.
MAX_ERROR = 0.004


def provenance(group: EpGroup, peaks: Peaks | None) -> dict[str, object]:
    """What a figure must carry: device, date, commit, versions, peaks (None where nothing ran)."""
    is_cuda = group.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(group.device) if is_cuda else cpu_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "peaks": asdict(peaks) if peaks else None,
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "CPU")


def git_commit() -> str:
    """Short hash of the checkout this file lies in, '+' if it has changes; 'unknown' without."""
    command = ["git", "describe", "--always", "--dirty=+", "--match", ""]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def show(record: dict[str, object]) -> None:
    """Print the results to standard output, one line a case."""
    console = Console()
    console.width = max(console.width, 150)  # one line a case, also where output is a file
    peaks = record["peaks"]
    if peaks is None:
        known = "nothing can run"
    else:
        known = (
            f"peaks ({peaks['source']}): {peaks['bytes_per_s'] / 1e12:.3g} TB/s, "
            f"{peaks['flops_per_s'] / 1e12:.3g} TFLOP/s, "
            f"{peaks['link_bytes_per_s'] / 1e9:.3g} GB/s a link"
        )
    console.print(
        f"{record['device']}, {record['date']}, commit {record['commit']}, "
        f"torch {record['torch']}; {known}",
        markup=False,
        highlight=False,
    )
    table = Table(box=None)
    columns = "geometry ranks format backend tokens median p99 host limit memory matmul link error"
    for name in columns.split():
        table.add_column(name, justify="left" if name in ("geometry", "format") else "right")
    for result in record["results"]:
        host = result["host_us"]
        table.add_row(
            f"{result['geometry']} E={result['num_experts']} K={result['top_k']}",
            f"{result['num_ranks']} {result['parallel']}",
            result["weights_format"],
            result["backend"]
            + (" graph" if result["is_graph"] else "")
            + (" skew" if result["is_skewed"] else ""),
            str(result["tokens_per_rank"]),
            f"{result['median_us']:.1f} us",
            f"{result['p99_us']:.1f} us",
            "-" if host is None else f"{host:.1f} us",
            f"{result['limit_us']:.1f} us",
            f"{result['memory_share']:.1%}",
            f"{result['matmul_share']:.1%}",
            f"{result['link_share']:.1%}",
            f"{result['error']:.1e}" + (" WRONG" if result["error"] > MAX_ERROR else ""),
        )
    console.print(table)
    lines = {}  # once where graph and eager calls were timed
    for result in record["results"]:
        if result["stages"]:
            spans = result["stages"]["spans_us"]
            text = ", ".join(f"{name} {span:.1f}" for name, span in spans.items())
            layer = f"{result['geometry']} {result['weights_format']}"
            lines[f"stages of {layer} at {result['tokens_per_rank']} tokens, us: {text}"] = None
    for line in lines:
        console.print(line, markup=False)
    for case in record["skipped"]:
        console.print(
            f"not run: {case['backend']}, {case['geometry']}, {case['weights_format']}: "
            f"{case['reason']}",
            markup=False,
        )
