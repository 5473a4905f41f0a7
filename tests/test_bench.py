"""The bench: values before times, the slowest rank counts, and figures say where they are from."""

import argparse
import json
import time

import pytest
import torch

from moe_ep import EpGroup, MoEInputs, MoEShape, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.launch import bench, bench_comm, cli, cpu_ratio, peaks, spawn, torchrun
from moe_ep.launch.geometries import GEOMETRIES, geometry
from moe_ep.reference import moe_reference

SHAPE = MoEShape(num_experts=8, top_k=3, hidden=64, intermediate=32)
CPU = EpGroup.single("cpu")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = parser.parse_args(words)
    args.command = "bench"
    return args


class ScaledReference:
    """A layer whose output is `factor` times the specification's."""

    def __init__(self, weights: MoEWeights, factor: float) -> None:
        self.weights, self.factor = weights, factor

    def forward(self, inputs: MoEInputs) -> torch.Tensor:
        return self.factor * moe_reference(inputs, self.weights, SHAPE)


class Sleeper:
    """A layer that takes as long as its rank says."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def forward(self, _inputs: MoEInputs, out: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return out


def sleep_on_ranks(rank: int, num_ranks: int) -> list[float]:
    group = EpGroup.from_process_group(torch.distributed.group.WORLD, "cpu")
    inputs = bench.random_inputs(SHAPE, 2, group)
    layer = Sleeper(0.02 * (rank + 1))
    return bench.time_forward(layer, inputs, group, iterations=3, use_graph=False).tolist()


def test_published_geometries_have_their_numbers():
    numbers = {
        name: (shape.hidden, shape.intermediate, shape.num_experts, shape.top_k)
        for name, shape in GEOMETRIES.items()
    }
    assert numbers["v3"] == (7168, 2048, 256, 8)
    assert numbers["v4flash"] == (4096, 2048, 256, 6)
    assert numbers["v4pro"] == (7168, 3072, 384, 6)
    assert numbers["glm5"] == (6144, 2048, 256, 8)
    assert numbers["qwen3"] == (2048, 768, 128, 8)


def test_unknown_geometry_lists_those_that_are_known():
    with pytest.raises(MoEEpConfigError, match="'v5'.*v3, v4flash"):
        geometry("v5")


def test_experts_per_rank_makes_the_shard_of_a_larger_job():
    shape = bench.bench_shape("v3", 32, num_ranks=2)
    assert (shape.num_experts, shape.top_k, shape.hidden) == (64, 8, 7168)
    with pytest.raises(MoEEpConfigError, match="makes 4 experts; allowed for v3: 8 to 256"):
        bench.bench_shape("v3", 4, num_ranks=1)


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.01, False), (0.0, False)])
def test_value_check_tells_a_right_layer_from_a_wrong_one(factor, is_right):
    weights = bench.random_weights(SHAPE, "nvfp4", CPU)
    inputs = bench.random_inputs(SHAPE, 40, CPU)
    error = bench.output_error(ScaledReference(weights, factor), SHAPE, weights, inputs, CPU)
    assert (error <= bench.MAX_ERROR) == is_right


def test_value_check_fails_on_nan():
    weights = bench.random_weights(SHAPE, "bf16", CPU)
    inputs = bench.random_inputs(SHAPE, 4, CPU)
    layer = ScaledReference(weights, float("nan"))
    assert bench.output_error(layer, SHAPE, weights, inputs, CPU) > bench.MAX_ERROR


def test_work_counts_experts_hit_rows_and_operations():
    weights = bench.random_weights(SHAPE, "nvfp4", CPU)
    ids = torch.tensor([[0, 1, 2], [0, 1, -1]])  # three experts, five rows, two tokens
    num_bytes, num_flops = bench.most_work(SHAPE, weights, ids.clamp(min=0), 2, CPU)
    assert num_flops == 2 * 6 * (64 * 64 + 64 * 32)
    codes_and_sf = (64 * 64 + 64 * 32) // 2 + (64 * 64 + 64 * 32) // 16
    assert num_bytes == 3 * codes_and_sf + 2 * 64 * (6 + 6 + 2 * 3 + 2)


def test_times_are_those_of_the_slowest_rank_on_every_rank():
    times = spawn.run(sleep_on_ranks, 2)
    assert times[0] == times[1]
    assert min(times[0]) >= 0.04


def test_options_survive_the_way_through_torchrun():
    args = parse(["--tokens", "1", "4", "--graph", "--backend", "auto", "mega", "--json", "a b"])
    words = torchrun.command_line(args)
    assert words[0] == "bench"
    assert parse(words[1:]) == args


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bench_writes_every_case_with_its_origin(tmp_path, num_ranks):
    path = tmp_path / "bench.json"
    words = ["--ranks", str(num_ranks), "--tokens", "1", "5", "--iterations", "3"]
    words += ["--weights-format", "bf16", "nvfp4", "--json", str(path)]
    assert cli.main(["bench", *words]) == 0
    record = json.loads(path.read_text())
    cases = [(r["weights_format"], r["tokens_per_rank"]) for r in record["results"]]
    assert cases == [("bf16", 1), ("bf16", 5), ("nvfp4", 1), ("nvfp4", 5)]
    for result in record["results"]:
        assert result["num_ranks"] == num_ranks
        assert 0 < result["limit_us"] and 0 < result["median_us"] <= result["p99_us"]
        assert result["error"] <= bench.MAX_ERROR
    assert all(record[name] for name in ("device", "date", "commit", "torch", "peaks"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPU does")
def test_backend_that_cannot_run_is_named_with_its_reason_and_fails(tmp_path, capsys):
    path = tmp_path / "bench.json"
    words = ["--tokens", "1", "--iterations", "1", "--backend", "mega", "--json", str(path)]
    assert cli.main(["bench", *words]) == 1
    record = json.loads(path.read_text())
    assert record["results"] == []
    assert record["skipped"][0]["backend"] == "mega"
    assert "not run: mega" in capsys.readouterr().out


def test_plot_draws_every_series(tmp_path):
    pytest.importorskip("matplotlib")
    from moe_ep.launch.plot import plot

    args = parse(["--tokens", "1", "5", "--iterations", "2"])
    path = tmp_path / "bench.png"
    plot(bench.bench_on_rank(args, CPU), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_measured_peaks_are_those_of_this_machine_not_of_a_clock_error():
    found = peaks.device_peaks(torch.device("cpu"))
    assert 1e8 < found.bytes_per_s < 1e13
    assert 1e8 < found.flops_per_s < 1e15


@pytest.mark.parametrize(("layer_s", "exit_code"), [(1.2, 0), (1.21, 1)])
def test_cpu_ratio_fails_above_its_limit(monkeypatch, capsys, layer_s, exit_code):
    monkeypatch.setattr(cpu_ratio, "measure", lambda: (layer_s, 1.0))
    assert cpu_ratio.run() == exit_code
    assert f"ratio {layer_s:.3f}" in capsys.readouterr().out


@pytest.mark.gpu
def test_gpu_bench_checks_values_and_stays_under_the_peaks(tmp_path):
    path = tmp_path / "bench.json"
    words = ["--tokens", "8", "--backend", "auto", "split-torch", "--json", str(path)]
    assert cli.main(["bench", *words, "--geometry", "qwen3"]) == 0
    for result in json.loads(path.read_text())["results"]:
        assert 0 < result["memory_share"] < 1
        assert 0 < result["matmul_share"] < 1


def test_the_transports_are_timed_alone_over_real_ranks(tmp_path, capfd):
    path = tmp_path / "comm.json"
    words = ["--comm", "--ranks", "2", "--tokens", "1", "7", "--iterations", "3"]
    assert cli.main(["bench", *words, "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert [(r["transport"], r["tokens_per_rank"]) for r in results] == [("torch", 1), ("torch", 7)]
    for result in results:
        assert 0 < result["dispatch_us"] and 0 < result["combine_us"]
        # 4 slots of 256 BF16 come back to each token.
        num_bytes = result["tokens_per_rank"] * 4 * 512
        assert result["combine_gb_s"] == pytest.approx(num_bytes / result["combine_us"] / 1e3)
        assert result["dispatch_gb_s"] * result["dispatch_us"] <= num_bytes / 1e3
    assert "dispatch us" in capfd.readouterr().out


def test_transports_need_something_to_move():
    with pytest.raises(MoEEpConfigError, match="nothing to move"):
        bench_comm.run(parse(["--comm"]), CPU)


def test_wrong_values_of_a_transport_end_its_bench():
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="torch transport: wrong values"):
        bench_comm.check_equal("torch", x, 2 * x)
