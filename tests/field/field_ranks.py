"""Where a row of the field list runs: one test function, several places.

A row is a test of one argument, `ranks`, and `@on("cpu2", "split2", "mega2")` names its places:

    cpuN               N processes over gloo, plain torch kernels (cpu1: this process)
    splitN             one GPU, one rank over the grouped GEMM kernel with the tokens of N ranks
    megaN              one GPU, N virtual ranks in one launch of the mega kernel (mega1: the layer)
    split@N, mega@N    N GPUs, a process each

In places of several processes every process runs the body, each with its own part of the tokens;
all rows that a file has for a place share the processes (`Processes.report`).
"""

import functools
import importlib
import os
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from layer_cases import gathered, make_inputs, make_weights

from moe_ep import MegaConfig, MoEEpLayer, MoEInputs, MoEShape, MoEWeights, SplitConfig
from moe_ep.comm.group import EpGroup
from moe_ep.config import Backend, GroupedGemmConfig, MegaKernelConfig
from moe_ep.launch import spawn
from moe_ep.megakernel.knobs import KernelKnobs, choose_row
from moe_ep.reference import moe_oracle_fp64, moe_reference

# The base case of the list.
S0 = MoEShape(num_experts=8, top_k=2, hidden=256, intermediate=128)
TOP_1 = replace(S0, top_k=1)
# Contract: a term within 0.0026 of FP64 (relative L2), and the output's own rounding. A row of few
# elements scatters around it.
MAX_ERROR = 0.0026 + 0.0017
MAX_ROW_ERROR = 2 * MAX_ERROR
TIMEOUT_S = 20.0


def on(*places: str) -> pytest.MarkDecorator:
    """Run the row at each place."""
    params = []
    for place in places:
        kind, at, num = re.fullmatch(r"(cpu|split|mega)(@?)(\d+)", place).groups()
        marks = [pytest.mark.gpus(int(num))] if at else [pytest.mark.gpu] if kind != "cpu" else []
        params.append(pytest.param(place, marks=marks, id=place))
    return pytest.mark.parametrize("ranks", params, indirect=True)


def places(*kinds_and_ranks: tuple[str, int]) -> list:
    """Backend and number of ranks, of rows that start their own processes."""
    params = []
    for kind, num_ranks in kinds_and_ranks:
        marks = []
        if kind != "cpu":
            marks = [pytest.mark.gpu if num_ranks == 1 else pytest.mark.gpus(num_ranks)]
        params.append(pytest.param(kind, num_ranks, marks=marks, id=f"{kind}-{num_ranks}"))
    return params


def make_ranks(place: str) -> "OneRank | Virtual | Processes":
    kind, at, num = re.fullmatch(r"(cpu|split|mega)(@?)(\d+)", place).groups()
    num_ranks = int(num)
    if kind != "cpu":
        pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    elif num_ranks > 4 and (os.cpu_count() or 1) < num_ranks:
        pytest.skip(f"needs {num_ranks} CPU cores")
    if at or (kind == "cpu" and num_ranks > 1):
        return Processes(kind, num_ranks)
    if kind == "mega" and num_ranks > 1:
        return Virtual(kind, num_ranks)
    return OneRank(kind, num_ranks)


def backend_of(kind: str, weights_format: str, *, takes_table: bool = False) -> Backend:
    """The configuration of a kind. One build of the kernels, or all of the knob table."""
    knobs = None if takes_table else choose_row(weights_format, 1).knobs
    if kind == "mega":
        return MegaConfig(megakernel=MegaKernelConfig(knobs=knobs))
    return SplitConfig(kernel=GroupedGemmConfig(knobs=knobs)) if kind == "split" else SplitConfig()


def device_of(kind: str) -> str:
    return "cpu" if kind == "cpu" else "cuda"


def moved(inputs: MoEInputs, device: str) -> MoEInputs:
    return MoEInputs(*(tensor.to(device) for tensor in vars(inputs).values()))


@functools.cache
def weights_of(shape: MoEShape, weights_format: str, seed: int = 0) -> MoEWeights:
    return make_weights(shape, weights_format, seed)


def parts_of(shape: MoEShape, counts: Sequence[int], seed: int = 0) -> list[MoEInputs]:
    """Each rank's tokens; seed + rank, as the list has it."""
    return [make_inputs(shape, count, seed=seed + rank) for rank, count in enumerate(counts)]


@dataclass(frozen=True)
class Ranks:
    """kind: "cpu", "split" or "mega"; num_ranks: of whose tokens a call brings."""

    kind: str
    num_ranks: int

    @property
    def device(self) -> str:
        return device_of(self.kind)

    def weights(self, shape: MoEShape = S0, seed: int = 0) -> MoEWeights:
        """Where the row leaves the format open: NVFP4 for kernels; a CPU decodes it slowly."""
        return weights_of(shape, "bf16" if self.kind == "cpu" else "nvfp4", seed)

    def parts(self, shape: MoEShape, count: int, seed: int = 0) -> list[MoEInputs]:
        """`count` tokens of each rank."""
        return parts_of(shape, [count] * self.num_ranks, seed)

    def assert_right(
        self,
        outputs: Sequence[torch.Tensor],
        parts: Sequence[MoEInputs],
        weights: MoEWeights,
        shape: MoEShape = S0,
    ) -> None:
        """Kernels: every row within the contract of FP64. A CPU: the bits of the specification."""
        inputs, output = gathered(list(parts)), torch.cat(list(outputs))
        if self.kind == "cpu":
            assert torch.equal(output, moe_reference(inputs, weights, shape))
            return
        assert_near(output, moe_oracle_fp64(inputs, weights, shape))


def assert_near(output: torch.Tensor, exact: torch.Tensor) -> None:
    """Every row, and all of them, within the contract of FP64."""
    difference = output.double() - exact
    assert not difference.isnan().any()
    far = difference.norm(dim=1) > MAX_ROW_ERROR * exact.norm(dim=1)
    assert not far.any(), f"{int(far.sum())} rows are wrong, first {int(far.nonzero()[0])}"
    assert difference.norm() <= MAX_ERROR * exact.norm()


class OneRank(Ranks):
    """This process and one layer, which gets the tokens of all ranks in one call."""

    def layer(
        self, shape: MoEShape, weights: MoEWeights, capacity: int = 32, **options
    ) -> "OneRankLayer":
        """`capacity` tokens for each of the ranks."""
        return OneRankLayer(self.module(shape, weights, capacity * self.num_ranks, **options))

    def module(
        self,
        shape: MoEShape,
        weights: MoEWeights,
        capacity: int = 32,
        *,
        takes_table: bool = False,
        **options,
    ) -> MoEEpLayer:
        """The layer itself."""
        options.setdefault("group", EpGroup.single(self.device))
        options.setdefault(
            "backend", backend_of(self.kind, weights.weights_format, takes_table=takes_table)
        )
        return MoEEpLayer(shape, weights.to(self.device), max_tokens_per_rank=capacity, **options)


@dataclass(frozen=True)
class Call:
    """One call, bound to its tensors. `launch` waits for nothing on a GPU.

    stack    ranks' parts -> tensors like `inputs`, for `refill`
    out      what a launch writes on this device
    outputs  each rank's output of the last launch, on the CPU
    """

    inputs: MoEInputs
    out: torch.Tensor
    stack: Callable[[Sequence[MoEInputs]], MoEInputs]
    launch: Callable[[], None]
    outputs: Callable[[], list[torch.Tensor]]

    def refill(self, parts: Sequence[MoEInputs]) -> None:
        """Other tokens at the same addresses, as many of each rank."""
        for name, tensor in vars(self.stack(parts)).items():
            getattr(self.inputs, name).copy_(tensor)


class RowLayer:
    """`layer(parts)` -> each rank's output, on the CPU."""

    def __call__(self, parts: Sequence[MoEInputs]) -> list[torch.Tensor]:
        call = self.bind(parts)
        call.launch()
        outputs = call.outputs()
        self.check()
        return outputs


class OneRankLayer(RowLayer):
    def __init__(self, module: MoEEpLayer) -> None:
        self.module, self.device = module, module.group.device
        self.check, self.destroy = module.check, module.destroy

    def refit(self, weights: MoEWeights) -> None:
        self.module.update_weights(weights.to(self.device))

    def bind(self, parts: Sequence[MoEInputs]) -> Call:
        def stack(parts: Sequence[MoEInputs]) -> MoEInputs:
            return moved(gathered(list(parts)), self.device)

        inputs = stack(parts)
        out = torch.full_like(inputs.hidden_states, float("nan"))
        counts = [part.num_tokens for part in parts]
        return Call(
            *(inputs, out, stack),
            lambda: self.module(inputs, out=out),
            lambda: list(out.cpu().split(counts)),
        )


class Virtual(Ranks):
    """All ranks in one launch of the mega kernel."""

    def layer(
        self, shape: MoEShape, weights: MoEWeights, capacity: int = 32, **options
    ) -> "VirtualLayer":
        return VirtualLayer(self.num_ranks, shape, weights, capacity, **options)


class VirtualLayer(RowLayer):
    def __init__(
        self,
        num_ranks: int,
        shape: MoEShape,
        weights: MoEWeights,
        capacity: int,
        *,
        knobs: KernelKnobs | None = None,
        takes_table: bool = False,
        timeout_s: float = TIMEOUT_S,
        **options,
    ) -> None:
        from moe_ep.megakernel.formats import prepare
        from moe_ep.megakernel.mega_moe import MegaMoE

        self.capacity, name = capacity, weights.weights_format
        self.prepared = prepare(weights.to("cuda"))
        self.mega = MegaMoE(
            EpGroup.virtual(num_ranks),
            shape,
            name,
            max_tokens_per_rank=capacity,
            knobs=knobs or (None if takes_table else choose_row(name, 1).knobs),
            timeout_s=timeout_s,
            **options,
        )
        self.destroy = self.mega.destroy

    def refit(self, weights: MoEWeights) -> None:
        from moe_ep.megakernel.formats import prepare

        prepare(weights.to("cuda"), out=self.prepared)

    def check(self) -> None:
        torch.cuda.synchronize()
        self.mega.check()

    def bind(self, parts: Sequence[MoEInputs], **options) -> Call:
        inputs = self.stack(parts)
        counts = [part.num_tokens for part in parts]
        out = torch.full_like(inputs.hidden_states, float("nan"))
        num_tokens = torch.tensor(counts, dtype=torch.int32, device="cuda")

        def launch() -> None:
            self.mega.forward(
                *(inputs.hidden_states, inputs.topk_ids, inputs.topk_weights),
                *(self.prepared, out),
                num_tokens=num_tokens,
                **options,
            )

        def read() -> list[torch.Tensor]:
            held = out.cpu()
            for rank, count in enumerate(counts):
                assert held[rank, count:].isnan().all(), f"rank {rank} wrote past its tokens"
            return [held[rank, :count] for rank, count in enumerate(counts)]

        return Call(inputs, out, self.stack, launch, read)

    def stack(self, parts: Sequence[MoEInputs]) -> MoEInputs:
        """[ranks, capacity, ...]"""
        stacked = (
            torch.stack([with_junk(getattr(part, name), self.capacity) for part in parts]).cuda()
            for name in ("hidden_states", "topk_ids", "topk_weights")
        )
        return MoEInputs(*stacked)


def with_junk(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Rows behind the tokens, which nobody may read."""
    junk = float("nan") if tensor.is_floating_point() else 1 << 30
    return torch.cat([tensor, tensor.new_full((length - len(tensor), tensor.shape[1]), junk)])


class Processes(Ranks):
    """A process for each rank: what a test sees; the rows run in `run_rows`."""

    def report(self, function: Callable, module: str, names: tuple[str, ...]) -> None:
        """Raise, in a test, what the row raised in the processes."""
        outcome, text = results(self, module, names)[function.__name__]
        if outcome == "skipped":
            pytest.skip(text)
        if outcome == "failed":
            pytest.fail(text, pytrace=False)


@functools.cache
def results(ranks: Processes, module: str, names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Row -> (outcome, text) of the first rank where it did not pass, else of rank 0."""
    try:
        by_rank = spawn.run(
            *(run_rows, ranks.num_ranks, ranks.kind, module, names),
            timeout_s=280.0,
            device=ranks.device,
        )
    except Exception as error:  # of the job, which no other row is to start again
        return dict.fromkeys(names, ("failed", f"the job of this file's rows: {error!r}"))
    return {
        name: next((rank[name] for rank in by_rank if rank[name][0] != "passed"), by_rank[0][name])
        for name in names
    }


def run_rows(
    rank: int, num_ranks: int, kind: str, module: str, names: tuple[str, ...]
) -> dict[str, tuple[str, str]]:
    """In a process: every row in turn."""
    rows = importlib.import_module(module)
    ranks, outcomes = ProcessRank(kind, num_ranks), {}
    for name in names:
        try:
            getattr(rows, name)(ranks)
            outcomes[name] = "passed", ""
        except pytest.skip.Exception as reason:
            outcomes[name] = "skipped", str(reason)
        except BaseException:
            outcomes[name] = "failed", f"rank {rank}:\n{traceback.format_exc()}"
        dist.barrier()
    return outcomes


class ProcessRank(Ranks):
    """This process's rank, as the body of a row sees it."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def layer(
        self, shape: MoEShape, weights: MoEWeights, capacity: int = 32, **options
    ) -> "ProcessLayer":
        return ProcessLayer(self.module(shape, weights, capacity, **options))

    def module(
        self,
        shape: MoEShape,
        weights: MoEWeights,
        capacity: int = 32,
        *,
        takes_table: bool = False,
        timeout_s: float = TIMEOUT_S,
        **options,
    ) -> MoEEpLayer:
        options.setdefault(
            "backend", backend_of(self.kind, weights.weights_format, takes_table=takes_table)
        )
        part = weights.shard("ep", self.rank, self.num_ranks).to(self.device)
        return MoEEpLayer(
            *(shape, part),
            max_tokens_per_rank=capacity,
            timeout_s=timeout_s,
            **options,
        )


class ProcessLayer(RowLayer):
    def __init__(self, module: MoEEpLayer) -> None:
        self.module, self.device = module, module.group.device
        self.check, self.destroy = module.check, module.destroy

    def bind(self, parts: Sequence[MoEInputs]) -> Call:
        def stack(parts: Sequence[MoEInputs]) -> MoEInputs:
            return moved(parts[dist.get_rank()], self.device)

        inputs = stack(parts)
        out = torch.full_like(inputs.hidden_states, float("nan"))

        def read() -> list[torch.Tensor]:
            held = [None] * dist.get_world_size()
            dist.all_gather_object(held, out.cpu())
            return held

        return Call(inputs, out, stack, lambda: self.module(inputs, out=out), read)
