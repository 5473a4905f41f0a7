"""Call two layers for a long time: any error, other bits, slower calls or more memory fail.

    python scripts/soak.py --backend mega --virtual-ranks 2 --calls 50000 --json soak.json

Random tokens per rank (0 to capacity), routing from uniform to all on one expert, eager calls and
replays of CUDA graphs in turn, refits in between. Every --check-every calls the outputs are
compared to the bit with those of one rank, which were held to FP64 at the start. Time is that of
one probing graph, replayed all along.
"""

import argparse
import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("tests", "tests/field")]
# Layers of any place and their oracle, as the field cases have them.
from field_ranks import Call, RowLayer, assert_near, make_ranks, weights_of  # noqa: E402
from layer_cases import gathered, make_inputs, with_ids  # noqa: E402

from moe_ep import MoEInputs, MoEShape  # noqa: E402
from moe_ep.reference import moe_oracle_fp64  # noqa: E402

SHAPE = MoEShape(num_experts=16, top_k=4, hidden=256, intermediate=128)
CAPACITY = 64
NUM_LAYERS = 2
NUM_WEIGHTS = 3  # sets, by seed; layers are refitted with one after the other
NUM_CASES = 24  # every second one has a graph
EMPTY = 21
CALLS_OF_A_FIT = 400
PROBE_EVERY = 50
PROBE_REPLAYS = 10
MAX_DRIFT = 0.03
MAX_HOST_GROWTH = 64 << 20  # bytes; allocators and caches of Python settle


@dataclass
class Record:
    """calls done; checks made; refits; us of the probe, one for each PROBE_EVERY calls."""

    backend: str
    num_ranks: int
    calls: int = 0
    replays: int = 0
    checks: int = 0
    refits: int = 0
    seconds: float = 0.0
    probe_us: list[float] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)  # once warm, at the end
    host_bytes: list[int] = field(default_factory=list)

    @property
    def drift(self) -> float:
        """Median of the last tenth of the probes over that of the first, minus 1."""
        tenth = max(1, len(self.probe_us) // 10)
        first, last = (torch.tensor(part).median() for part in
                       (self.probe_us[:tenth], self.probe_us[-tenth:]))  # fmt: skip
        return float(last / first) - 1


def make_cases(num_ranks: int) -> list[list[MoEInputs]]:
    """Each rank's tokens. Case 0 has all ranks full; of case i, i / (n - 1) of the slots name one
    expert: all of the last one's, which is full too. EMPTY has no token at all."""
    generator, cases = torch.Generator().manual_seed(1), []
    for idx in range(NUM_CASES):
        hot, parts = idx % SHAPE.num_experts, []
        for rank in range(num_ranks):
            count = int(torch.randint(CAPACITY + 1, (), generator=generator))
            count = {0: CAPACITY, EMPTY: 0, NUM_CASES - 1: CAPACITY}.get(idx, count)
            part = make_inputs(SHAPE, count, seed=100 * idx + rank, masked=0.1 * (idx % 3))
            is_hot = torch.rand(part.topk_ids.shape, generator=generator) < idx / (NUM_CASES - 1)
            parts.append(with_ids(part, torch.where(is_hot, hot, part.topk_ids)))
        cases.append(parts)
    return cases


class Soak:
    """Layers, their bound calls and graphs, and what every call must give."""

    def __init__(self, backend: str, num_ranks: int, progress: Progress) -> None:
        self.weights = [weights_of(SHAPE, "nvfp4", seed) for seed in range(NUM_WEIGHTS)]
        cases = make_cases(num_ranks)
        ranks, alone = make_ranks(f"{backend}{num_ranks}"), make_ranks(f"{backend}1")
        bar = progress.add_task("one rank and FP64", total=NUM_WEIGHTS * NUM_CASES)
        single = alone.layer(SHAPE, self.weights[0], num_ranks * CAPACITY)
        self.expected: list[list[torch.Tensor]] = []
        for weights in self.weights:
            single.refit(weights)
            self.expected.append([])
            for parts in cases:
                whole = gathered(parts)
                (output,) = single([whole])
                assert_near(output, moe_oracle_fp64(whole, weights, SHAPE))
                self.expected[-1].append(output)
                progress.advance(bar)
        single.destroy()
        self.layers: list[RowLayer] = []
        self.calls: list[list[Call]] = []
        self.graphs: list[dict[int, torch.cuda.CUDAGraph]] = []
        for idx in range(NUM_LAYERS):
            layer = ranks.layer(SHAPE, self.weights[idx], CAPACITY)
            calls = [layer.bind(parts) for parts in cases]
            for call in calls:
                call.launch()
            layer.check()
            self.layers.append(layer)
            self.calls.append(calls)
            self.graphs.append({case: captured(calls[case]) for case in range(0, NUM_CASES, 2)})
        self.fits = list(range(NUM_LAYERS))  # which set each layer has

    def refit(self, layer_idx: int) -> None:
        self.fits[layer_idx] = (self.fits[layer_idx] + 1) % NUM_WEIGHTS
        self.layers[layer_idx].refit(self.weights[self.fits[layer_idx]])

    def launch(self, layer_idx: int, case: int, is_replay: bool) -> bool:
        """Whether a graph was replayed: not every case has one."""
        graph = self.graphs[layer_idx].get(case) if is_replay else None
        if graph is None:
            self.calls[layer_idx][case].launch()
        else:
            graph.replay()
        return graph is not None

    def check(self, layer_idx: int, case: int, where: str) -> None:
        output = torch.cat(self.calls[layer_idx][case].outputs())
        self.layers[layer_idx].check()
        expected = self.expected[self.fits[layer_idx]][case]
        if not torch.equal(output, expected):
            rows = (output != expected).any(dim=1).nonzero()[:, 0].tolist()
            raise SystemExit(
                f"{where}: layer {layer_idx}, case {case}, weights {self.fits[layer_idx]}: rows "
                f"{rows[:8]} of {len(output)} differ from one rank's"
            )

    def probe_us(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph = self.graphs[0][0]
        graph.replay()
        start.record()
        for _ in range(PROBE_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / PROBE_REPLAYS


def captured(call: Call) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.launch()
    return graph


def note_memory(record: Record) -> None:
    torch.cuda.synchronize()
    record.device_bytes.append(torch.cuda.memory_allocated())
    record.host_bytes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)


def run(args: argparse.Namespace) -> Record:
    record = Record(args.backend, args.virtual_ranks)
    random_choice = random.Random(args.seed)
    with Progress(console=Console(stderr=True)) as progress:
        soak = Soak(args.backend, args.virtual_ranks, progress)
        bar = progress.add_task("calls", total=args.calls)
        start = time.monotonic()
        for number in range(args.calls):
            layer_idx = random_choice.randrange(NUM_LAYERS)
            case = random_choice.randrange(NUM_CASES)
            record.replays += soak.launch(layer_idx, case, random_choice.random() < 0.5)
            record.calls += 1
            if number % args.check_every == args.check_every - 1:
                soak.check(layer_idx, case, f"call {number}")
                record.checks += 1
            if number % CALLS_OF_A_FIT == CALLS_OF_A_FIT - 1:
                soak.refit(random_choice.randrange(NUM_LAYERS))
                record.refits += 1
            if number % PROBE_EVERY == 0:
                record.probe_us.append(soak.probe_us())
                progress.update(bar, completed=number)
                if args.seconds and time.monotonic() - start > args.seconds:
                    break
            if number == min(args.calls // 10, 2000):
                note_memory(record)
        for layer_idx in range(NUM_LAYERS):
            for case in range(NUM_CASES):
                soak.launch(layer_idx, case, is_replay=True)
                soak.check(layer_idx, case, "after all calls")
        note_memory(record)
        record.seconds = time.monotonic() - start
    return record


def failures_of(record: Record) -> list[str]:
    failures = []
    if abs(record.drift) > MAX_DRIFT:
        failures.append(f"the probe drifted by {100 * record.drift:.1f} %")
    device, host = ([last - first for first, last in [sizes[:2]]][0] if len(sizes) > 1 else 0
                    for sizes in (record.device_bytes, record.host_bytes))  # fmt: skip
    if device:
        failures.append(f"device memory grew by {device} bytes")
    if host > MAX_HOST_GROWTH:
        failures.append(f"host memory grew by {host} bytes")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, help="stop after so many")
    parser.add_argument("--backend", choices=("mega", "split"), default="mega")
    parser.add_argument("--virtual-ranks", type=int, default=1, help="mega: in one launch")
    parser.add_argument("--check-every", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record = run(args)
    failures = failures_of(record)
    if args.json:
        held = asdict(record) | {"drift": record.drift, "failures": failures}
        args.json.write_text(json.dumps(held, indent=1))
    print(
        f"{record.backend}, {record.num_ranks} ranks: {record.calls} calls in {record.seconds:.0f} "
        f"s ({record.replays} replays, {record.refits} refits, {record.checks} checks to the bit), "
        f"probe {record.probe_us[0]:.1f} us, drift {100 * record.drift:+.1f} %: "
        f"{'; '.join(failures) or 'clean'}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
