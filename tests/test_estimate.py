"""moe-ep estimate against the bytes that weights hold and that calls allocate."""

import itertools
import json
import tempfile
from pathlib import Path

import pytest
import torch

from moe_ep import MoEEpLayer, MoEInputs, MoEShape, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.grouped_memory import GroupedWorkspace, workspace_regions
from moe_ep.launch import spawn
from moe_ep.launch.cli import main
from moe_ep.launch.estimate import (
    Problem,
    buffer_regions,
    format_bytes,
    peak_bytes,
    weight_regions,
)
from moe_ep.megakernel.formats import prepare

FORMATS = ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block")


def make_weights(shape: MoEShape) -> MoEWeights:
    generator = torch.Generator().manual_seed(0)
    sizes = (shape.fc1_rows, shape.hidden), (shape.hidden, shape.intermediate)
    w13, w2 = (torch.randn(shape.num_experts, *size, generator=generator) / 16 for size in sizes)
    return MoEWeights.from_dense(w13.bfloat16(), w2.bfloat16(), is_gated=shape.activation.is_gated)


@pytest.mark.parametrize("weights_format", FORMATS)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize(("parallel", "num_ranks"), [("ep", 1), ("ep", 3), ("tp", 2)])
def test_weight_bytes_are_those_of_the_tensors(
    weights_format: str, activation: str, parallel: str, num_ranks: int
) -> None:
    shape = MoEShape(num_experts=5, top_k=2, hidden=320, intermediate=256, activation=activation)
    weights = make_weights(shape)
    if weights_format != "bf16":
        weights = weights.quantize(weights_format)
    problem = Problem(
        shape=shape,
        weights_format=weights_format,
        num_ranks=num_ranks,
        max_tokens_per_rank=1,
        parallel=parallel,
    )
    held = weights.shard(parallel, 0, num_ranks).num_bytes
    assert sum(region.num_bytes for region in weight_regions(problem)) == held


def measured_peak(
    rank: int, num_ranks: int, shape: MoEShape, weights_format: str, capacity: int, parallel: str
) -> int:
    """Bytes that one forward allocates at its highest point, with evenly routed tokens."""
    weights = make_weights(shape)
    if weights_format != "bf16":
        weights = weights.quantize(weights_format)
    weights = weights.shard(parallel, rank, num_ranks)
    layer = MoEEpLayer(shape, weights, max_tokens_per_rank=capacity)
    # The slots of a token lie far apart, so that they need different ranks.
    ids = torch.arange(capacity)[:, None] + torch.arange(shape.top_k) * (
        shape.num_experts // shape.top_k
    )
    inputs = MoEInputs(
        torch.ones(capacity, shape.hidden, dtype=torch.bfloat16),
        ids % shape.num_experts,
        torch.ones(capacity, shape.top_k),
    )
    layer.forward(inputs)  # what is allocated once, is allocated now
    with torch.profiler.profile(profile_memory=True) as profile:
        layer.forward(inputs)
    layer.destroy()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    steps = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return max(itertools.accumulate(num_bytes for _, num_bytes in steps))


def both_parallel_modes(rank: int, num_ranks: int, shape: MoEShape, capacity: int) -> list[int]:
    return [measured_peak(rank, num_ranks, shape, "bf16", capacity, p) for p in ("ep", "tp")]


# Many tokens for their weights, so that the buffers of the tokens count.
PEAK_SHAPE = MoEShape(num_experts=8, top_k=4, hidden=512, intermediate=256)
PEAK_CAPACITY = 256


def estimated_peak(num_ranks: int, weights_format: str, parallel: str) -> int:
    problem = Problem(
        shape=PEAK_SHAPE,
        weights_format=weights_format,
        num_ranks=num_ranks,
        max_tokens_per_rank=PEAK_CAPACITY,
        parallel=parallel,
    )
    return peak_bytes(buffer_regions(problem))


@pytest.mark.parametrize("weights_format", ["bf16", "nvfp4"])
def test_peak_of_a_call_on_one_rank(weights_format: str) -> None:
    measured = measured_peak(0, 1, PEAK_SHAPE, weights_format, PEAK_CAPACITY, "ep")
    assert estimated_peak(1, weights_format, "ep") == pytest.approx(measured, rel=0.2)


def test_peak_of_a_call_on_two_ranks() -> None:
    for peaks in spawn.run(both_parallel_modes, 2, PEAK_SHAPE, PEAK_CAPACITY):
        for measured, parallel in zip(peaks, ("ep", "tp"), strict=True):
            assert estimated_peak(2, "bf16", parallel) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("parallel", ["ep", "tp"])
def test_worst_routing_needs_at_least_what_even_routing_needs(parallel: str) -> None:
    problem = Problem(
        shape=PEAK_SHAPE,
        weights_format="bf16",
        num_ranks=4,
        max_tokens_per_rank=64,
        parallel=parallel,
    )
    even, worst = (buffer_regions(problem, routing) for routing in ("even", "worst"))
    for region, bound in zip(even, worst, strict=True):
        assert region.num_bytes <= bound.num_bytes, region.name


def test_one_rank_with_the_grouped_kernel_needs_what_is_allocated() -> None:
    problem = Problem(
        shape=PEAK_SHAPE,
        weights_format="mxfp8",
        num_ranks=1,
        max_tokens_per_rank=PEAK_CAPACITY,
        kernel="grouped",
    )
    workspace = GroupedWorkspace(workspace_regions(PEAK_SHAPE, 8, PEAK_CAPACITY), "cpu")
    names = ("counts", "offsets", "src_slot", "pool_row", "pool", "hidden")
    allocated = {name: workspace[name].nbytes for name in names}
    assert {r.name: r.num_bytes for r in buffer_regions(problem)} == allocated
    assert peak_bytes(buffer_regions(problem)) == workspace.num_bytes == sum(allocated.values())
    prepared = prepare(make_weights(PEAK_SHAPE).quantize("mxfp8"))
    assert [r.num_bytes for r in weight_regions(problem)] == [prepared.num_bytes]


@pytest.mark.parametrize("parallel", ["ep", "tp"])
def test_several_ranks_with_the_grouped_kernel_hold_hidden_rows_for_a_decoded_matrix(
    parallel: str,
) -> None:
    facts = {
        "shape": PEAK_SHAPE,
        "weights_format": "bf16",
        "num_ranks": 2,
        "max_tokens_per_rank": PEAK_CAPACITY,
        "parallel": parallel,
    }
    with_torch, grouped = (
        {r.name: r.num_bytes for r in buffer_regions(Problem(**facts, kernel=kernel))}
        for kernel in ("torch", "grouped")
    )
    num_rows, columns = (2048, 128) if parallel == "tp" else (1024, 256)
    assert grouped.pop("hidden activations") == num_rows * columns * 2
    del with_torch["one expert"]
    assert grouped == with_torch


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--geometry", "v3", "--ranks", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    # 32 of 256 experts: 3 x 7168 x 2048 codes of 4 bits, a byte per 16, three FP32 scales.
    assert report["weights"]["bytes"] == 32 * (3 * 7168 * 2048 * 9 // 16 + 3 * 4)
    for routing in ("even", "worst"):
        split = report["split"][routing]
        assert split["total_bytes"] == report["weights"]["bytes"] + split["peak_bytes"]


def mega_bytes(report: dict) -> dict[str, int]:
    regions = report["mega"]["regions"]
    assert report["mega"]["total_bytes"] == sum(region["num_bytes"] for region in regions)
    assert len({region["name"] for region in regions}) == len(regions)
    return {region["name"]: region["num_bytes"] for region in regions}


def test_mega_holds_a_pool_row_for_every_slot_of_every_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["estimate", "--geometry", "v3", "--ranks", "8", "--json"]) == 0
    held = mega_bytes(json.loads(capsys.readouterr().out))
    num_rows = 8 * 512 * 8
    assert held["x_stage"] == 512 * 7168 * 2
    assert held["terms"] == 512 * 8 * 7168 * 2
    assert (held["ids"], held["pool_row"], held["src_meta"]) == (4 * num_rows,) * 2 + (
        8 * num_rows,
    )
    assert (held["pool"], held["hidden"]) == (num_rows * 7168 * 2, num_rows * 2048 * 2)
    # 4608 bytes for 64 x 128 codes with their scales, four FP32 scales of an expert.
    assert held["prepared weights"] == 32 * (3 * 7168 * 2048 // 8192 * 4608 + 16)
    # Flags and counters: a tile of 8 rows or more has two counters in each of two banks.
    rest = held["step"] + held["abort"] + held["counters"]
    assert rest < 16 * (num_rows // 8 + 32) + 1024


def test_mega_holds_the_terms_of_all_ranks_under_tp(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["estimate", "--geometry", "v3", "--ranks", "8", "--parallel", "tp", "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    held, scopes = mega_bytes(report), {"symmetric": 0, "local": 0}
    for region in report["mega"]["regions"][1:]:
        scopes[region["note"].split()[0]] += region["num_bytes"]
    num_rows = 8 * 512 * 8
    # Staged tokens, FP32 parts of eight ranks; pool, hidden pool of an eighth of I, FP32 terms.
    assert scopes["symmetric"] == pytest.approx(512 * 7168 * (2 + 8 * 4), rel=0.01)
    row_bytes = 2 * (7168 + 2048 // 8) + 4 * 7168 + 12
    assert scopes["local"] == pytest.approx(num_rows * row_bytes, rel=0.01)
    assert held["prepared weights"] == 256 * (3 * 7168 * 256 // 8192 * 4608 + 16)


def test_table_says_what_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--geometry", "qwen3"]) == 0
    text = capsys.readouterr().out
    assert "w13" in text and "received tokens" in text and "mega" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--hidden", "100"], "hidden 100"),
        (["--ranks", "0"], "num_ranks"),
        (["--max-tokens-per-rank", "0"], "max_tokens_per_rank"),
        (["--parallel", "tp", "--ranks", "3"], "intermediate 2048"),
        (["--top-k", "300"], "top_k 300"),
        (["--activation", "gelu"], "gelu"),
        (["--kernel", "grouped", "--top-k", "33"], "top_k is 33"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *arguments]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_problem_names_the_weight_format() -> None:
    with pytest.raises(MoEEpConfigError, match="fp3"):
        Problem(shape=PEAK_SHAPE, weights_format="fp3", num_ranks=1, max_tokens_per_rank=1)
