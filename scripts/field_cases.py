"""Run the field cases (tests/field), each survivable: a table, JSON, and the README's rows.

    python scripts/field_cases.py --json field.json --markdown field.md [--workers 6] [-k A26]

Every file runs in child processes, several at a time on one GPU; timings run by themselves at the
end. A case that is still running after --case-limit seconds, or that takes the process or the GPU's
context with it, costs its child: the cases behind it go on in a new one. Exit code 1 unless every
case passed or was skipped.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "tests/field"
ALONE = ("test_perf.py",)  # files that time something
START_LIMIT_S = 120.0  # of a child, until its first case
LOST_CONTEXT = 3  # exit code of a child that cannot use its GPU any more


@dataclass(frozen=True)
class Outcome:
    """Of one test: id "A26" ("" for a test of no row), backend, node, outcome, seconds, text."""

    case: str
    backend: str
    node: str
    outcome: str
    seconds: float
    text: str = ""


class Record:
    """The plugin in a child: a line when a case starts, one when it has ended."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "a")  # noqa: SIM115 - for as long as the child lives

    def write(self, **line: object) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def pytest_collection_modifyitems(self, items: list) -> None:
        self.write(collected=[item.nodeid for item in items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(started=nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = report.longrepr[2] if report.skipped else str(report.longrepr or "")[-4000:]
            self.write(node=report.nodeid, outcome=report.outcome, text=text,
                       seconds=report.duration)  # fmt: skip

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(ended=nodeid)
        if not context_works():
            self.write(lost=nodeid)
            os._exit(LOST_CONTEXT)


def context_works() -> bool:
    import torch

    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def child(path: str, words: list[str]) -> int:
    import pytest

    options = ["-q", "-p", "no:cacheprovider", "-o", "timeout=0", *words]
    return int(pytest.main(options, plugins=[Record(path)]))


class File:
    """One test file: its cases, in as many children as it takes."""

    def __init__(self, name: str, args: argparse.Namespace, scratch: Path) -> None:
        self.name, self.args, self.scratch = name, args, scratch
        self.nodes: list[str] = []
        self.outcomes: dict[str, Outcome] = {}
        self.num_children = 0

    def run(self, on_case) -> list[Outcome]:
        waiting = None  # not collected yet
        while waiting is None or waiting:
            words = waiting or [f"{FOLDER}/{self.name}", *self.args.selection]
            lines = self.run_child(words, on_case)
            before = waiting
            waiting = [node for node in self.nodes if node not in self.outcomes]
            if not lines or waiting == before:
                break  # nothing ran: the file does not import, or nothing was selected
        return list(self.outcomes.values())

    def run_child(self, words: list[str], on_case) -> list[dict]:
        self.num_children += 1
        record = self.scratch / f"{self.name}.{self.num_children}.jsonl"
        record.touch()
        with (self.scratch / f"{self.name}.{self.num_children}.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, "--child", str(record), *words],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        seen, running, since = [], None, time.monotonic()
        limit = START_LIMIT_S
        while True:
            has_ended = process.poll() is not None
            for line in record.read_text().splitlines()[len(seen) :]:
                seen.append(json.loads(line))
                running, since, limit = self.read(seen[-1], running, since, limit)
                on_case(len(self.outcomes))
            if has_ended or time.monotonic() - since > limit:
                break
            time.sleep(0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if running is not None:
            how = f"exit code {process.returncode}" if has_ended else f"no end in {limit:.0f} s"
            outcome = "crashed" if has_ended else "hung"
            self.add(running, outcome, time.monotonic() - since, how)
        elif not has_ended:
            tail = (self.scratch / f"{self.name}.{self.num_children}.txt").read_text()[-2000:]
            self.add(f"{FOLDER}/{self.name}", "hung", limit, tail)
        elif not seen:
            tail = (self.scratch / f"{self.name}.{self.num_children}.txt").read_text()[-2000:]
            self.add(f"{FOLDER}/{self.name}", "crashed", 0.0, tail)
        return seen

    def read(self, line: dict, running: str | None, since: float, limit: float) -> tuple:
        match line:
            case {"collected": nodes}:
                self.nodes = self.nodes or nodes
            case {"started": node}:
                return node, time.monotonic(), self.args.case_limit
            case {"node": node, "outcome": outcome, "text": text, "seconds": seconds}:
                self.add(node, outcome, seconds, text)
            case {"ended": _}:
                return None, time.monotonic(), max(self.args.case_limit, START_LIMIT_S)
            case {"lost": node}:
                self.add(node, "crashed", 0.0, "the GPU's context is lost: " + self.text_of(node))
        return running, since, limit

    def text_of(self, node: str) -> str:
        return self.outcomes[node].text if node in self.outcomes else ""

    def add(self, node: str, outcome: str, seconds: float, text: str) -> None:
        case = re.search(r"test_[aA](\d\d)", node)
        backend = re.search(r"(mega|split)", node.partition("[")[2])
        self.outcomes[node] = Outcome(
            case=f"A{case[1]}" if case else "",
            backend=backend[1] if backend else "cpu",
            node=node.removeprefix(f"{FOLDER}/"),
            outcome=outcome,
            seconds=round(seconds, 2),
            text=text,
        )


def run_all(args: argparse.Namespace, scratch: Path) -> list[Outcome]:
    names = sorted(path.name for path in (ROOT / FOLDER).glob("test_*.py"))
    names = [name for name in names if not args.files or name in args.files]
    together = [File(name, args, scratch) for name in names if name not in ALONE]
    alone = [File(name, args, scratch) for name in names if name in ALONE]
    outcomes, lock = [], threading.Lock()
    with (
        Progress(console=Console(stderr=True)) as progress,
        ThreadPoolExecutor(args.workers) as pool,
    ):
        bars = {f.name: progress.add_task(f.name, total=None) for f in together + alone}

        def run(file: File) -> None:
            found = file.run(lambda count: progress.update(
                bars[file.name], completed=count, total=len(file.nodes) or None
            ))  # fmt: skip
            with lock:
                outcomes.extend(found)

        list(pool.map(run, together))
        for file in alone:
            run(file)
    return sorted(outcomes, key=lambda o: (o.case or "Z", o.backend, o.node))


def table_of(outcomes: list[Outcome]) -> Table:
    table = Table("id", "backend", "case", "outcome", "s", highlight=False)
    for one in outcomes:
        color = {"passed": "green", "skipped": "yellow"}.get(one.outcome, "red")
        node = one.node.partition("::")[2] or one.node
        table.add_row(
            one.case, one.backend, node, f"[{color}]{one.outcome}[/]", f"{one.seconds:.1f}"
        )
    return table


def markdown_of(outcomes: list[Outcome]) -> str:
    """A line for each id: what ran on each backend."""
    lines = ["| id | cpu | split | mega |", "| --- | --- | --- | --- |"]
    for case in sorted({one.case for one in outcomes if one.case}):
        cells = []
        for backend in ("cpu", "split", "mega"):
            kinds = [o.outcome for o in outcomes if (o.case, o.backend) == (case, backend)]
            ran = [kind for kind in kinds if kind != "skipped"]
            bad = [kind for kind in ran if kind != "passed"]
            cells.append(bad[0] if bad else "passed" if ran else "not run" if kinds else "-")
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def selection(flag: str, value: str | None) -> list[str]:
    return [] if value is None else [f"-{flag}", value]


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="of tests/field; default: all")
    parser.add_argument("-k", help="as pytest's")
    parser.add_argument("-m", help="as pytest's: 'gpu or gpus', 'not gpu'")
    parser.add_argument("--workers", type=int, default=6, help="files at a time")
    parser.add_argument("--case-limit", type=float, default=300.0, help="seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    args.selection = [word for flag in ("k", "m") for word in selection(flag, getattr(args, flag))]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = run_all(args, Path(scratch))
    console = Console(width=160)
    console.print(table_of(outcomes))
    bad = [one for one in outcomes if one.outcome not in ("passed", "skipped")]
    for one in bad:
        console.print(f"\n{one.outcome}: {one.node}\n{one.text}", markup=False, highlight=False)
    counts = dict(Counter(one.outcome for one in outcomes))
    rows = len({one.case for one in outcomes if one.case and one.outcome == "passed"})
    console.print(f"{counts}, {rows} rows, {time.monotonic() - start:.0f} s")
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    if args.markdown:
        args.markdown.write_text(markdown_of(outcomes))
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
