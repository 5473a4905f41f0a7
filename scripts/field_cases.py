"""Run the field cases (tests/field), each survivable: a table, JSON, and the README's rows.

    python scripts/field_cases.py --json field.json [--workers 6] [-k A26] [FILE ...]
    python scripts/field_cases.py --from-json field.json more.json --markdown field.md

Cases of one file and place go together, some at a time, in a child process; several children share
a GPU. They are forked by a server that has imported what takes long and has not touched a GPU.
Files that time something run by themselves at the end. A case that is still running after
--case-limit seconds, or that takes the process or the GPU's context with it, costs its child: the
cases behind it go on in a new one. Exit code 1 unless every case passed or was skipped.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "tests/field"
ALONE = ("test_perf.py",)  # files that time something
START_LIMIT_S = 120.0  # of a child, until its first case
LOST_CONTEXT = 3  # exit code of a child that cannot use its GPU any more
CASES_OF_A_CHILD = 8
NUM_ROWS = 92
FORKED = ("pytest", "moe_ep.mega", "moe_ep.split", "moe_ep.grouped")  # modules that a child has
# Kinds of the list, their rows, and what they are about: lines of the README's table.
KINDS = {
    "deadlock": (
        "1-12",
        "ranks that bring nothing, come late, fail, stop, die or leave a call out; "
        "GPUs busy with something else; calls back to back",
    ),
    "routing": (
        "13-14 17-18 20-21 24 26-31 65",
        "masked, repeated and skewed ids; experts that do "
        "not divide; copies and other orders; ranks that disagree",
    ),
    "API": (
        "15-16 19 22-23 56-57 59 81",
        "wrong dtypes, sizes and limits; weights of another rank; a backend that is missing",
    ),
    "numerics": (
        "25 32-52 54-55 58 60-62 69",
        "scales of every kind, NaN rows, stale and padded "
        "memory, order of sums, strides, 2^31 elements, other streams",
    ),
    "memory": (
        "53 66 70-72 75-78",
        "odd and huge capacities, shared workspaces, graphs that share "
        "a pool, failed calls, what does not fit",
    ),
    "life-cycle": (
        "63-64 67-68 73-74 82-83 87-89",
        "captures, refits, ends in every order, rebuilds, cold and killed starts",
    ),
    "install": ("79-80 84-85", "no GPU, no packages, no network, nowhere to write"),
    "perf": ("86 90-92", "second starts, capacities, and builds chosen for other sizes"),
}
# Columns of the README's table.
COLUMNS = {
    "cpu": "CPU, 1-8 processes",
    "split": "split, one GPU",
    "mega": "mega, one GPU",
    "gpus": "several GPUs",
}


@dataclass(frozen=True)
class Outcome:
    """Of one test. case: "A26", "" for a test of no row; column: of `COLUMNS`."""

    case: str
    column: str
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

    def pytest_collection_finish(self, session) -> None:
        for item in session.items:
            skip = item.get_closest_marker("skip")
            self.write(collected=item.nodeid, column=column_of(item),
                       skipped=skip and skip.kwargs["reason"])  # fmt: skip

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


def column_of(item) -> str:
    if item.get_closest_marker("gpus"):
        return "gpus"
    if not item.get_closest_marker("gpu"):
        return "cpu"
    return "mega" if re.search("mega", item.nodeid.partition("[")[2], re.I) else "split"


def fork_server() -> multiprocessing.context.BaseContext:
    os.environ["OMP_NUM_THREADS"] = "2"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(FORKED))
    return context


def context_works() -> bool:
    import torch

    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def child(record: str, log: str, words: list[str]) -> None:
    """A process of cases: their outcomes go to `record`, what they print to `log`."""
    os.setsid()
    os.chdir(ROOT)
    output = os.open(log, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True)
    import pytest

    options = ["-q", "-p", "no:cacheprovider", "-o", "timeout=0", *words]
    sys.exit(int(pytest.main(options, plugins=[Record(record)])))


@dataclass
class Reader:
    """Takes the record of a child's cases into `run`."""

    run: "Run"
    advance: Callable[[], object]
    running: str | None = None
    since: float = 0.0

    def read(self, line: dict) -> float:
        """One line; returns how many seconds may pass until the next."""
        match line:
            case {"started": node}:
                self.running, self.since = node, time.monotonic()
                return self.run.case_limit_s
            case {"node": node, "outcome": outcome, "text": text, "seconds": seconds}:
                self.run.add(node, outcome, seconds, text)
            case {"ended": _}:
                self.running = None
                self.advance()
            case {"lost": node}:
                text = self.run.outcomes[node].text if node in self.run.outcomes else ""
                self.run.add(node, "crashed", 0.0, f"the GPU's context is lost: {text}")
        return max(START_LIMIT_S, self.run.case_limit_s)


@dataclass
class Run:
    """All cases, and what became of them."""

    case_limit_s: float
    deadline: float
    scratch: Path
    columns: dict[str, str] = field(default_factory=dict)  # node -> column
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by node
    num_children: int = 0
    processes: multiprocessing.context.BaseContext = field(default_factory=fork_server)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def collect(self, words: list[str]) -> None:
        """Find the cases; those that this machine skips have their outcome."""
        lines, output = self.child(["--collect-only", *words], lambda _: START_LIMIT_S)
        for line in lines:
            node = line["collected"]
            self.columns[node] = line["column"]
            if line["skipped"]:
                self.add(node, "skipped", 0.0, line["skipped"])
        if not self.columns:
            sys.exit(f"no case was collected:\n{output}")

    def run(self, nodes: list[str], advance: Callable[[], object]) -> None:
        """The cases, in as many children as it takes."""
        while nodes and time.monotonic() < self.deadline:
            reader = Reader(self, advance)
            _, output = self.child(nodes, reader.read)
            if reader.running:
                is_late = time.monotonic() >= self.deadline
                outcome = "hung" if output.startswith("no end") else "crashed"
                seconds = time.monotonic() - reader.since
                self.add(reader.running, "not run" if is_late else outcome, seconds, output)
                advance()
            left = [node for node in nodes if node not in self.outcomes]
            if left == nodes and time.monotonic() < self.deadline:
                for node in left:  # none started: the file does not import, say
                    self.add(node, "crashed", 0.0, output)
                left = []
            nodes = left

    def child(self, words: list[str], read: Callable[[dict], float]) -> tuple[list[dict], str]:
        """Run pytest in a process; `read` takes each line of its record and says how many seconds
        may pass until the next. Returns the lines, and how it ended with its last words."""
        with self.lock:
            self.num_children += 1
            record = self.scratch / f"{self.num_children}.jsonl"
        log = record.with_suffix(".txt")
        record.touch()
        log.touch()
        process = self.processes.Process(target=child, args=(str(record), str(log), words))
        with self.lock:  # starting the server is not safe in threads
            process.start()
        lines, since, limit, why = [], time.monotonic(), START_LIMIT_S, ""
        while not why:
            if process.exitcode is not None:
                why = f"exit code {process.exitcode}"
            for line in record.read_text().splitlines()[len(lines) :]:
                lines.append(json.loads(line))
                limit, since = read(lines[-1]), time.monotonic()
            if time.monotonic() > min(since + limit, self.deadline):
                why = why or f"no end in {time.monotonic() - since:.0f} s"
            time.sleep(0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        return lines, f"{why}\n{log.read_text(errors='replace')[-2000:]}"

    def add(self, node: str, outcome: str, seconds: float, text: str) -> None:
        cases = re.findall(r"_[aA](\d\d)(?=_)", node.partition("[")[0])
        self.outcomes[node] = Outcome(
            case=" ".join(f"A{case}" for case in cases),
            column=self.columns[node],
            node=node.removeprefix(f"{FOLDER}/"),
            outcome=outcome,
            seconds=round(seconds, 2),
            text=text,
        )

    def groups(self) -> list[list[str]]:
        """Cases that share a child: of one file and place, the slow ones first. Cases over several
        processes stay together, which they share."""
        by_place: dict[tuple[str, str], list[str]] = {}
        for node in self.columns:
            if node not in self.outcomes:
                place = re.search(r"(cpu|split|mega)@?\d*", node.partition("[")[2])
                key = node.partition("::")[0], place[0] if place else ""
                by_place.setdefault(key, []).append(node)
        groups = []
        for (_, place), nodes in by_place.items():
            step = (
                len(nodes)
                if re.fullmatch(r"cpu[2-9]|(split|mega)@\d+", place)
                else CASES_OF_A_CHILD
            )
            groups += [nodes[start : start + step] for start in range(0, len(nodes), step)]
        order = ("gpus", "split", "mega", "cpu")
        return sorted(groups, key=lambda group: order.index(self.columns[group[0]]))


def run_all(args: argparse.Namespace, scratch: Path) -> list[Outcome]:
    run = Run(args.case_limit, time.monotonic() + args.limit, scratch)
    files = [f"{FOLDER}/{name}" for name in args.files] or [FOLDER]
    run.collect([*files, *args.selection])
    groups = run.groups()
    alone = [
        group
        for group in groups
        if group[0].partition("::")[0].endswith(ALONE) or run.columns[group[0]] == "gpus"
    ]
    with (
        Progress(console=Console(stderr=True)) as progress,
        ThreadPoolExecutor(args.workers) as pool,
    ):
        bar = progress.add_task("field cases", total=sum(map(len, groups)))

        def one(group: list[str]) -> None:
            run.run(group, lambda: progress.advance(bar))

        list(pool.map(one, [group for group in groups if group not in alone]))
        for group in alone:
            one(group)
    for node in run.columns:
        if node not in run.outcomes:
            run.add(node, "not run", 0.0, f"{args.limit:.0f} s were over")
    return sorted(run.outcomes.values(), key=lambda o: (o.case or "Z", o.column, o.node))


def table_of(outcomes: list[Outcome]) -> Table:
    table = Table("id", "where", "case", "outcome", "s", highlight=False)
    for one in outcomes:
        color = {"passed": "green", "skipped": "yellow"}.get(one.outcome, "red")
        node = one.node.partition("::")[2] or one.node
        table.add_row(
            *(one.case, one.column, node, f"[{color}]{one.outcome}[/]", f"{one.seconds:.1f}")
        )
    return table


def rows_of(ranges: str) -> list[str]:
    """`1-3 7` -> A01, A02, A03, A07."""
    rows = []
    for part in ranges.split():
        first, _, last = part.partition("-")
        rows += [f"A{number:02}" for number in range(int(first), int(last or first) + 1)]
    return rows


def state_of(case: str, column: str, outcomes: list[Outcome]) -> str:
    """Of all tests of a row in a column: what went wrong, else passed, else not run (time was over)
    or "wait" (for want of GPUs); "" where there is none."""
    kinds = [o.outcome for o in outcomes if case in o.case.split() and o.column == column]
    bad = [kind for kind in kinds if kind not in ("passed", "skipped", "not run")]
    for kind in (*bad, "passed", "not run", "skipped"):
        if kind in kinds:
            return "wait" if kind == "skipped" else kind
    return ""


def markdown_of(outcomes: list[Outcome]) -> str:
    """A line for each kind: its rows that passed of those with a test in the column, how many did
    not run, and every one that did not pass."""
    heads = " | ".join(COLUMNS.values())
    lines = [f"| rows | what happens | {heads} |", "| --- | --- |" + " --- |" * len(COLUMNS)]
    for kind, (ranges, what) in KINDS.items():
        cells, rows = [], rows_of(ranges)
        for column in COLUMNS:
            states = {row: state_of(row, column, outcomes) for row in rows}
            counts = Counter(filter(None, states.values()))
            parts = [f"{counts['passed']} of {counts.total()}"] if counts["passed"] else []
            parts += [f"{counts[state]} {state}" for state in ("not run", "wait") if counts[state]]
            known = ("", "passed", "not run", "wait")
            parts += [f"{row} {state}" for row, state in states.items() if state not in known]
            cells.append("; ".join(parts))
        lines.append(f"| {kind}, {len(rows)} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def report(outcomes: list[Outcome]) -> int:
    """Print all; 1 unless every case passed or was skipped."""
    console = Console(width=160)
    console.print(table_of(outcomes))
    bad = [one for one in outcomes if one.outcome not in ("passed", "skipped")]
    for one in bad:
        console.print(f"\n{one.outcome}: {one.node}\n{one.text}", markup=False, highlight=False)
    for one in bad:
        console.print(f"{one.outcome}: {one.node}", markup=False, highlight=False)
    counts = dict(Counter(one.outcome for one in outcomes))
    rows = {case for one in outcomes if one.outcome == "passed" for case in one.case.split()}
    written = {case for one in outcomes for case in one.case.split()}
    missing = sorted({f"A{n:02}" for n in range(1, NUM_ROWS + 1)} - written)
    console.print(f"{counts}, {len(rows)} rows passed somewhere, no test: {missing or 'none'}")
    return 1 if bad or not outcomes else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="of tests/field; default: all")
    parser.add_argument("-k", help="as pytest's")
    parser.add_argument("-m", help="as pytest's: 'gpu or gpus', 'not gpu'")
    parser.add_argument("--workers", type=int, default=6, help="children at a time")
    parser.add_argument("--case-limit", type=float, default=300.0, help="seconds of a case")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of all")
    parser.add_argument("--json", type=Path, help="write the outcomes")
    parser.add_argument("--markdown", type=Path, help="write the README's table")
    parser.add_argument(
        "--from-json", type=Path, nargs="+", help="run nothing: outcomes of earlier runs, the last "
        "of a case counts"
    )  # fmt: skip
    args = parser.parse_args()
    args.selection = [
        word for flag in "km" if getattr(args, flag) for word in (f"-{flag}", getattr(args, flag))
    ]
    if args.from_json:
        found = [Outcome(**one) for path in args.from_json for one in json.loads(path.read_text())]
        latest = {one.node: one for one in found if one.outcome == "not run"}
        latest |= {one.node: one for one in found if one.outcome != "not run"}
        outcomes = sorted(latest.values(), key=lambda o: (o.case or "Z", o.column, o.node))
    else:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            outcomes = run_all(args, Path(scratch))
        print(f"{time.monotonic() - start:.0f} s")
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    if args.markdown:
        args.markdown.write_text(markdown_of(outcomes))
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
