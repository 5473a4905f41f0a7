"""The bench: values before times, the slowest rank counts, and figures say where they are from."""

import argparse
import json
import time

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from moe_ep import EpGroup, MoEInputs, MoEShape, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.launch import (
    bench,
    bench_comm,
    bench_report,
    cli,
    comm_cases,
    cpu_ratio,
    peaks,
    spawn,
    torchrun,
    work,
)
from moe_ep.launch.geometries import GEOMETRIES, geometry
from moe_ep.launch.peaks import Peaks
from moe_ep.launch.random_layer import random_weights, shard_shape
from moe_ep.launch.stages import spans_us
from moe_ep.launch.timing import time_call
from moe_ep.random_inputs import random_inputs
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


def sleep_on_ranks(rank: int, num_ranks: int) -> list[float]:
    group = EpGroup.from_process_group(torch.distributed.group.WORLD, "cpu")
    return time_call(lambda: time.sleep(0.02 * (rank + 1)), group, 3, use_graph=False).tolist()


def work_of_ranks(rank: int, num_ranks: int) -> tuple[int, int, int]:
    group = EpGroup.from_process_group(torch.distributed.group.WORLD, "cpu")
    # Ranks of two tokens each; experts 0-3 are rank 0's. Rank 1's first token goes there twice.
    ids = torch.tensor([[0, 1, 5], [2, -1, 3], [0, 1, 7], [4, 5, 6]])
    found = work.most_work(SHAPE, "bf16", ids, 2, group)
    return found.num_bytes, found.num_flops, found.num_link_bytes


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
    shape = shard_shape("v3", 32, num_ranks=2)
    assert (shape.num_experts, shape.top_k, shape.hidden) == (64, 8, 7168)
    with pytest.raises(MoEEpConfigError, match="makes 4 experts; allowed for v3: 8 to 256"):
        shard_shape("v3", 4, num_ranks=1)


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.01, False), (0.0, False)])
def test_value_check_tells_a_right_layer_from_a_wrong_one(factor, is_right):
    weights = random_weights(SHAPE, "nvfp4", CPU)
    inputs = random_inputs(SHAPE, 40, CPU)
    error = bench.output_error(ScaledReference(weights, factor), SHAPE, weights, inputs, CPU)
    assert (error <= bench.MAX_ERROR) == is_right


def test_value_check_fails_on_nan():
    weights = random_weights(SHAPE, "bf16", CPU)
    inputs = random_inputs(SHAPE, 4, CPU)
    layer = ScaledReference(weights, float("nan"))
    assert bench.output_error(layer, SHAPE, weights, inputs, CPU) > bench.MAX_ERROR


def test_work_counts_experts_hit_rows_and_operations():
    ids = torch.tensor([[0, 1, 2], [0, 1, -1]])  # three experts, five rows, two tokens
    found = work.most_work(SHAPE, "nvfp4", ids, 2, CPU)
    assert found.num_flops == 2 * 5 * (64 * 64 + 64 * 32)
    codes_and_sf = (64 * 64 + 64 * 32) // 2 + (64 * 64 + 64 * 32) // 16
    assert found.num_bytes == 3 * codes_and_sf + 2 * 64 * (5 + 5 + 2 * 3 + 2)
    assert found.num_link_bytes == 0


def test_work_over_links_is_tokens_once_for_a_rank_and_terms_for_each_slot():
    (bytes_0, flops_0, link_0), rank_1 = spawn.run(work_of_ranks, 2)
    assert (bytes_0, flops_0, link_0) == rank_1
    # Rank 0: one token in, one term in; one token out, two terms out.
    assert link_0 == 2 * 64 * (1 + 2)
    assert flops_0 == 2 * 6 * 64 * (64 + 32)  # six rows at rank 0


def test_work_under_tp_is_a_part_of_every_expert_and_an_fp32_sum_of_each_token():
    group = EpGroup(rank=1, num_ranks=2, device=torch.device("cpu"))
    ids = torch.tensor([[0, 1, 5], [2, -1, 3], [0, 1, 7], [4, 5, 6]])
    found = work.most_work(SHAPE, "bf16", ids, 2, group, "tp")
    weights = 8 * (2 * 32 * 64 + 2 * 64 * 16)
    rows = 64 * (2 * 11 + 2 * 4 * 11 + 2 * 4 * 4 + 2 * 2)
    assert found.num_bytes == weights + rows
    assert found.num_flops == 2 * 11 * 64 * (32 + 16)
    assert found.num_link_bytes == 2 * 64 * (2 + 4)


def test_the_limit_is_the_largest_of_memory_matmuls_and_links():
    seconds = work.Work(100, 300, 50).seconds(Peaks(10.0, 100.0, "test", 25.0))
    assert seconds == {"memory": 10.0, "matmul": 3.0, "link": 2.0}
    assert work.Work(1, 1, 50).seconds(Peaks(1.0, 1.0, "test"))["link"] == 0.0


def test_stages_follow_one_another():
    moments = {
        "SCANNED": [1.0, 1.5, 2.0],
        "FED": [3.0, 4.0, 9.0],
        "WORKED": [80.0, 90.0, 100.0],
        "DRAINED": [101.0, 101.0, 101.5],
        "ENDED": [103.0, 103.0, 104.0],
    }
    assert spans_us(moments) == {
        "routing": 2.0,
        "first token": 1.0,
        "FC1 and FC2": 97.0,
        "drain": 1.5,
        "reduce": 2.5,
    }
    without_rows = {name: times for name, times in moments.items() if name != "FED"}
    assert spans_us(without_rows)["first token"] == 0.0


def test_times_are_those_of_the_slowest_rank_on_every_rank():
    times = spawn.run(sleep_on_ranks, 2)
    assert times[0] == times[1]
    assert min(times[0]) >= 0.04


def test_backends_are_listed_by_blanks_or_commas(capsys):
    for words in (["mega", "split"], ["mega,split"]):
        assert parse(["--backend", *words]).backend == ["mega", "split"]
    with pytest.raises(SystemExit):
        parse(["--backend", "mega,splitt"])
    assert "'splitt' is not known; allowed: auto, mega, split, split-t" in capsys.readouterr().err


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert cli.main(["bench", "--plot", str(tmp_path / "bench.png")]) == 2
    said = capsys.readouterr()
    assert "--plot needs matplotlib (pip install" in said.err and not said.out


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
        assert result["link_share"] == 0.0  # a CPU's links are not known
        assert result["error"] <= bench.MAX_ERROR
    assert all(record[name] for name in ("device", "date", "commit", "torch", "peaks"))


def test_bench_of_every_experts_part(tmp_path):
    path = tmp_path / "bench.json"
    words = ["--ranks", "2", "--parallel", "tp", "--tokens", "5", "--iterations", "2"]
    words += ["--weights-format", "nvfp4", "--json", str(path)]
    assert cli.main(["bench", *words]) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert (result["parallel"], result["num_ranks"]) == ("tp", 2)
    assert result["error"] <= bench.MAX_ERROR
    with pytest.raises(MoEEpConfigError, match="intermediate 128 does not divide over 2 ranks"):
        group = EpGroup(rank=0, num_ranks=2, device=torch.device("cpu"))
        random_weights(geometry("tiny"), "fp8_block", group, "tp")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_the_ranks_refuse_is_said_once_whatever_their_number(monkeypatch, capfd, num_ranks):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["--geometry", "tiny", "--ranks", str(num_ranks), "--experts-per-rank", "17"]
    assert cli.main(["bench", *words]) == 2
    printed = capfd.readouterr().err
    (line,) = (line for line in printed.splitlines() if line.startswith("moe-ep"))
    assert "Traceback" not in printed
    assert line.startswith("moe-ep bench: --experts-per-rank 17 on")
    assert line.endswith("allowed for tiny: 4 to 16")


@pytest.mark.parametrize(
    ("failures", "said", "code"),
    [
        ({0: (1, None), 1: (1, None)}, [], 1),  # what `run` returned, and has told
        ({1: (7, None)}, ["rank 1: exit code 7"], 7),
        ({0: (-15, None), 1: (-11, None)}, ["rank 1: ended by signal 11"], 1),
        ({0: (1, "lost"), 1: (2, "wrong")}, ["wrong"], 2),
        ({0: (1, "late"), 1: (1, "early")}, ["rank 0: late", "rank 1: early"], 1),
    ],
)
def test_a_refusal_is_told_alone_and_else_the_traceback_of_the_first_rank_that_failed(
    monkeypatch, capsys, tmp_path, failures, said, code
):
    def run(arguments) -> None:
        found = {}
        for rank, (exit_code, text) in failures.items():
            file = tmp_path / str(rank)
            if text:  # as `record` writes it, the last rank's first
                monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
                try:
                    raise MoEEpConfigError(text)
                except MoEEpConfigError as error:
                    assert torchrun.record(error)
                record = json.loads(file.read_text())
                record["message"]["extraInfo"]["timestamp"] = str(10 - rank)
                file.write_text(json.dumps(record))
            found[rank] = ProcessFailure(rank, 0, exit_code, str(file))
            found[rank].timestamp = found[rank].timestamp or rank
        raise ChildFailedError("moe-ep", found)

    monkeypatch.setattr("torch.distributed.run.run", run)
    assert torchrun.main(["2", "tune", "--geometry", "v3"]) == code
    printed = capsys.readouterr().err
    lines = [line for line in printed.splitlines() if line.startswith("moe-ep tune: ")]
    assert [line.removeprefix("moe-ep tune: ") for line in lines] == said
    assert printed.startswith("rank 1: Traceback") == ("rank 1: early" in said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0"], "bench: --ranks must be at least 1, got 0"),
        (["--tokens", "8", "-3"], "bench: --tokens must be at least 1, got -3"),
        (["--iterations", "0"], "bench: --iterations must be at least 1, got 0"),
        (["--stages"], "--stages needs a CUDA device"),
        (["--graph"], "--graph needs a CUDA device"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes these options")
def test_options_that_ask_for_what_is_not_there_are_refused(words, said, caplog, capsys):
    assert cli.main(["bench", "--iterations", "1", *words]) != 0
    assert said in caplog.text + capsys.readouterr().err


def test_two_measurements_instead_of_the_layers_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "--comm", "--cpu-ratio"])
    assert "--cpu-ratio: not allowed with argument --comm" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--ranks", "--max-tokens-per-rank"])
def test_tune_names_the_count_that_is_below_one(option, capsys):
    assert cli.main(["tune", "--geometry", "tiny", option, "0"]) == 2
    assert f"moe-ep tune: {option} must be at least 1, got 0\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "tune", "demo"])
@pytest.mark.parametrize("place", ["nowhere/x.json", "."])
def test_a_file_that_cannot_be_written_is_a_usage_error(command, place, tmp_path, capsys):
    words = [command, "--json", str(tmp_path / place)]
    words += ["--geometry", "tiny"] if command == "tune" else []
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2
    assert "is no file in a folder that exists" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPU does")
def test_backend_that_cannot_run_is_named_before_anything_is_measured(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(bench, "device_peaks", None)  # nobody asks
    path = tmp_path / "bench.json"
    words = ["--tokens", "1", "--iterations", "1", "--backend", "mega", "--json", str(path)]
    assert cli.main(["bench", *words]) == 1
    record = json.loads(path.read_text())
    assert record["results"] == []
    assert record["skipped"][0]["backend"] == "mega"
    said = capsys.readouterr().out
    assert "not run: mega" in said and "nothing can run" in said


def test_stages_are_told_once_for_each_layer_and_number_of_tokens(capsys):
    record = bench.bench_on_rank(parse(["--tokens", "1", "5", "--iterations", "2"]), CPU)
    for result in record["results"]:
        result["stages"] = {"spans_us": {"routing": 5.0, "FC1 and FC2": 90.04}}
    record["results"] += [result | {"is_graph": True} for result in record["results"]]
    bench_report.show(record)
    lines = [line for line in capsys.readouterr().out.splitlines() if "stages" in line]
    said = "tokens, us: routing 5.0, FC1 and FC2 90.0"
    assert lines == [f"stages of tiny bf16 at {n} {said}" for n in (1, 5)]


@pytest.mark.parametrize("is_staged", [False, True])
def test_plot_draws_every_series_and_stages_where_measured(tmp_path, is_staged):
    pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    from matplotlib import pyplot

    from moe_ep.launch.plot import plot

    args = parse(["--tokens", "1", "5", "--iterations", "2"])
    record = bench.bench_on_rank(args, CPU)
    if is_staged:
        for result in record["results"]:
            result["stages"] = {"spans_us": {"routing": 5.0, "FC1 and FC2": 90.0}}
    path = tmp_path / "bench.png"
    plot(record, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    height, width = pyplot.imread(path).shape[:2]
    assert width / height == pytest.approx(18 / 5 if is_staged else 12 / 5)


def test_measured_peaks_are_those_of_this_machine_not_of_a_clock_error():
    found = peaks.device_peaks(torch.device("cpu"))
    assert 1e8 < found.bytes_per_s < 1e13
    assert 1e8 < found.flops_per_s < 1e15


def test_cpu_ratio_divides_the_layer_by_its_matmuls(monkeypatch, capsys):
    monkeypatch.setattr(cpu_ratio, "measure", lambda: (0.3, 0.2))
    assert cli.main(["bench", "--cpu-ratio"]) == 0
    assert "layer 300.0 ms, FP32 matmuls 200.0 ms, ratio 1.500" in capsys.readouterr().out


@pytest.mark.gpu
def test_gpu_bench_checks_values_and_stays_under_the_peaks(tmp_path):
    path = tmp_path / "bench.json"
    words = ["--tokens", "8", "--backend", "mega,split,split-torch", "--json", str(path)]
    words += ["--geometry", "qwen3", "--graph", "--eager", "--stages"]
    assert cli.main(["bench", *words]) == 0
    results = json.loads(path.read_text())["results"]
    kinds = [("mega", True), ("mega", False), ("split", True), ("split", False)]
    kinds += [("split-torch", False)]  # which no graph can hold
    assert [(result["backend"], result["is_graph"]) for result in results] == kinds
    for result in results:
        assert 0 < result["memory_share"] < 1
        assert 0 < result["matmul_share"] < 1
        assert result["is_graph"] == (result["host_us"] is None)
        if result["backend"] == "mega":
            spans = result["stages"]["spans_us"]
            assert 0 < spans["FC1 and FC2"] < sum(spans.values()) < 1e5
        else:
            assert result["stages"] is None


def test_the_transports_are_timed_alone_over_real_ranks(tmp_path, capfd):
    path = tmp_path / "comm.json"
    words = ["--comm", "--ranks", "2", "--tokens", "1", "7", "--iterations", "3"]
    assert cli.main(["bench", *words, "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert [(r["transport"], r["tokens_per_rank"]) for r in results] == [("torch", 1), ("torch", 7)]
    for result in results:
        tokens = result["tokens_per_rank"]
        # Rows of 256 BF16 that both ranks send to the other one, in half of which a rank's share.
        sent = result["dispatch_gb_s"] * result["dispatch_us"] * 1e3 / 256
        both = result["round_gb_s"] * result["round_us"] * 1e3 / 256
        assert sent == pytest.approx(round(sent)) and both == pytest.approx(round(both))
        assert 0 <= round(sent) <= 2 * tokens  # each token once
        assert round(sent) <= round(both - sent) <= 2 * tokens * 4  # a term for each slot
        assert not result["is_graph"] and 0 < result["dispatch_us"]
        assert 0 < result["round_us"] <= result["round_p99_us"]
    assert "dispatch us" in capfd.readouterr().out


def comm_rows(tmp_path, num_ranks: int) -> tuple[dict, set[tuple[str, bool]]]:
    """The record of a run, and its (transport, whether in a graph)."""
    path = tmp_path / "comm.json"
    words = ["--comm", "--ranks", str(num_ranks), "--tokens", "8", "--iterations", "5"]
    words += ["--geometry", "qwen3", "--graph", "--eager", "--stages", "--json", str(path)]
    assert cli.main(["bench", *words]) == 0
    record = json.loads(path.read_text())
    assert all(0 < row["dispatch_us"] < 1e5 for row in record["results"])
    moments = record["moments_us"]["8"]
    assert 0 < moments["ROUTED"][-1] <= moments["DRAINED"][-1] <= moments["ENDED"][-1]
    return record, {(row["transport"], row["is_graph"]) for row in record["results"]}


FUSED_ROWS = {(name, graph) for name in ("fused", "fused-bare") for graph in (True, False)}


def nccl_ep_rows(record: dict) -> set[tuple[str, bool]]:
    modes = {"nccl-ep-ll", "nccl-ep-ht"} - set(record["left_out"])
    return {(mode, is_graph) for mode in modes for is_graph in (True, False)}


@pytest.mark.gpu
def test_the_fused_transport_is_timed_on_one_gpu(tmp_path):
    record, rows = comm_rows(tmp_path, 1)
    assert rows == FUSED_ROWS | nccl_ep_rows(record)


@pytest.mark.timeout(600)  # nvcc compiles the kernels of both modes of NCCL-EP
@pytest.mark.gpus(2)
def test_every_transport_is_timed_on_two_gpus(tmp_path):
    record, rows = comm_rows(tmp_path, 2)
    assert rows == FUSED_ROWS | {("torch", False)} | nccl_ep_rows(record)
    assert 0.1 < record["ping_pong_us"] < 1000


def test_transports_need_something_to_move():
    with pytest.raises(MoEEpConfigError, match="nothing to move"):
        bench_comm.run(parse(["--comm"]), CPU)


def test_wrong_values_of_a_transport_end_its_bench():
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="torch transport: wrong values"):
        comm_cases.check_equal("torch", x, 2 * x)
