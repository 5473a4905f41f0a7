"""Field cases of kind life-cycle: captures, refits, processes that start, end and are killed."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from field_ranks import S0, backend_of, device_of, on, places, weights_of
from layer_cases import make_inputs, make_weights

from moe_ep import MoEEpLayer, MoEInputs
from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError
from moe_ep.launch import spawn
from moe_ep.reference import moe_reference

INPUTS = make_inputs(S0, 16, seed=0)


def on_gpu(inputs: MoEInputs = INPUTS) -> MoEInputs:
    return MoEInputs(*(tensor.cuda() for tensor in vars(inputs).values()))


@on("split1", "mega1")
def test_A63_a_hundred_replays_of_a_captured_call(ranks):
    layer = ranks.module(S0, ranks.weights())
    layer.warmup()
    static = on_gpu()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(static)
    expected = layer(on_gpu())
    ranks.assert_right([expected.cpu()], [INPUTS], ranks.weights())
    for _ in range(100):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@on("split1", "mega1")
def test_A64_a_first_call_inside_a_capture_says_to_warm_up_and_spoils_nothing(ranks):
    layer, inputs = ranks.module(S0, ranks.weights()), on_gpu()
    with pytest.raises(MoEEpStateError, match="warm up first"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(inputs)
    output = layer(inputs)
    ranks.assert_right([output.cpu()], [INPUTS], ranks.weights())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = layer(inputs)
    graph.replay()
    assert torch.equal(again, output)


@on("split1", "mega1")
def test_A67_a_replay_after_a_refit_has_the_new_weights(ranks):
    weights = weights_of(S0, "nvfp4")
    layer, static = ranks.module(S0, weights), on_gpu()
    layer.warmup()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(static)
    graph.replay()
    before = out.clone()
    ranks.assert_right([before.cpu()], [INPUTS], weights)
    doubled = replace(weights, down_scale=2 * weights.down_scale)
    layer.update_weights(doubled.to("cuda"))
    graph.replay()
    assert torch.equal(out, 2 * before)  # a power of two is exact


@on("cpu1", "split1", "mega1")
def test_A68_three_refits_in_a_row_are_right_and_memory_is_flat(ranks):
    for name in ("nvfp4", "fp8_block", "bf16"):
        layer = ranks.module(S0, make_weights(S0, name))
        held = []
        for seed in (1, 2, 3):
            weights = make_weights(S0, name, seed)
            layer.update_weights(weights.to(ranks.device))
            inputs = MoEInputs(*(tensor.to(ranks.device) for tensor in vars(INPUTS).values()))
            ranks.assert_right([layer(inputs).cpu()], [INPUTS], weights)
            del inputs
            held.append(torch.cuda.memory_allocated() if ranks.kind != "cpu" else 0)
        assert held[2] == held[0]
        layer.destroy()


# ---- the end of a layer and of its group ---------------------------------------------------------


def build(kind: str, rank: int, num_ranks: int, **options) -> MoEEpLayer:
    weights = make_weights(S0, "nvfp4").shard("ep", rank, num_ranks).to(device_of(kind))
    backend = backend_of(kind, "nvfp4")
    return MoEEpLayer(S0, weights, max_tokens_per_rank=32, backend=backend, **options)


def forward(layer: MoEEpLayer, rank: int) -> bool:
    inputs = make_inputs(S0, 16, seed=rank)
    device = layer.group.device
    output = layer(MoEInputs(*(tensor.to(device) for tensor in vars(inputs).values()))).cpu()
    expected = moe_reference(inputs, make_weights(S0, "nvfp4"), S0).double()
    return bool((output.double() - expected).norm() < 0.008 * expected.norm())


def end_in_every_order(rank: int, num_ranks: int, kind: str) -> list[str]:
    """The process group goes before the layer; then destroy twice, then forward."""
    layer = build(kind, rank, num_ranks)
    assert forward(layer, rank)
    dist.barrier()
    dist.destroy_process_group()
    layer.destroy()
    layer.destroy()
    with pytest.raises(MoEEpStateError, match="the layer was destroyed") as error:
        forward(layer, rank)
    return [str(error.value)]


EVERYWHERE = places(("cpu", 2), ("split", 1), ("mega", 1), ("split", 2), ("mega", 2))


@pytest.mark.parametrize(("kind", "num_ranks"), EVERYWHERE)
def test_A73_a_layer_may_outlive_its_process_group(kind, num_ranks):
    spawn.run(end_in_every_order, num_ranks, kind, device=device_of(kind))


def leave_without_destroy(rank: int, num_ranks: int, kind: str) -> bool:
    layer = build(kind, rank, num_ranks)
    return forward(layer, rank) and forward(build(kind, rank, num_ranks), rank)


@pytest.mark.parametrize(("kind", "num_ranks"), EVERYWHERE)
def test_A73_leaving_without_destroy_neither_hangs_nor_crashes(kind, num_ranks):
    """`spawn.run` raises for a rank that ends by a signal, or not at all."""
    assert all(spawn.run(leave_without_destroy, num_ranks, kind, device=device_of(kind)))


def build_and_end_three_times(rank: int, num_ranks: int, kind: str) -> list[bool]:
    from moe_ep.comm.symmetric import finish_nvshmem

    seen = []
    for _ in range(3):
        layer = build(kind, rank, num_ranks)
        seen.append(forward(layer, rank))
        layer.destroy()
        dist.barrier()
        finish_nvshmem()
    return seen


@pytest.mark.parametrize(("kind", "num_ranks"), places(("mega", 1), ("mega", 2)))
def test_A74_a_layer_is_built_again_after_everything_was_ended(kind, num_ranks):
    seen = spawn.run(build_and_end_three_times, num_ranks, kind, device=device_of(kind))
    assert seen == [[True] * 3] * num_ranks


def rebuild(rank: int, num_ranks: int, kind: str) -> bool:
    seen = []
    for _ in range(20):
        layer = build(kind, rank, num_ranks)
        seen.append(forward(layer, rank))
        layer.destroy()
    return all(seen)


@pytest.mark.parametrize(("kind", "num_ranks"), EVERYWHERE)
def test_A74_twenty_layers_one_after_the_other(kind, num_ranks):
    assert all(spawn.run(rebuild, num_ranks, kind, device=device_of(kind)))


# ---- processes that start ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [
    "cpu", pytest.param("split", marks=pytest.mark.gpu), pytest.param("mega", marks=pytest.mark.gpu)
])  # fmt: skip
def test_A87_plain_python_is_one_rank_and_a_job_without_a_group_says_what_to_call(
    kind, monkeypatch
):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    layer = build(kind, 0, 1)
    assert (layer.group.rank, layer.group.num_ranks) == (0, 1)
    assert forward(layer, 0)
    layer.destroy()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(MoEEpConfigError, match="WORLD_SIZE is 2.*init_process_group"):
        build(kind, 0, 1)
    monkeypatch.delenv("WORLD_SIZE")
    from moe_ep.launch import bootstrap

    with pytest.raises(MoEEpConfigError, match="RANK set but .*WORLD_SIZE.* missing"):
        bootstrap.init("cpu")


def build_before_any_collective(rank: int, num_ranks: int, kind: str, port: int) -> bool:
    """A process group of NCCL without device_id, and the layer at once."""
    dist.destroy_process_group()
    dist.init_process_group(
        "nccl" if kind != "cpu" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
    )
    layer = build(kind, rank, num_ranks, group=dist.group.WORLD)
    return forward(layer, rank)


@pytest.mark.parametrize(("kind", "num_ranks"), EVERYWHERE)
def test_A88_a_layer_built_before_any_collective(kind, num_ranks):
    arguments = (build_before_any_collective, num_ranks, kind, free_port())
    assert all(spawn.run(*arguments, device=device_of(kind)))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


LONG = (pytest.mark.timeout(900),)
JOB = """
import sys
from moe_ep.launch import bootstrap
from test_lifecycle import build, forward

kind, device = sys.argv[1], sys.argv[2]
with bootstrap.session(device) as group:
    layer = build(kind, group.rank, group.num_ranks)
    assert forward(layer, group.rank)
    layer.destroy()
"""


@pytest.mark.parametrize(
    ("kind", "num_ranks", "num_runs"),
    [
        pytest.param("cpu", 2, 4, id="cpu"),
        # A start takes 12 to 15 s on a GPU.
        pytest.param("split", 2, 20, marks=[*LONG, pytest.mark.gpus(2)], id="split"),
        pytest.param("mega", 2, 20, marks=[*LONG, pytest.mark.gpus(2)], id="mega"),
    ],
)
def test_A89_short_jobs_one_after_the_other_on_one_port(kind, num_ranks, num_runs, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    port = free_port()
    for _ in range(num_runs):
        ranks = [
            subprocess.Popen(
                [sys.executable, tmp_path / "job.py", kind, device_of(kind)],
                env=child_env(
                    RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=num_ranks,
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                ),
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        try:
            assert [rank.wait(timeout=60) for rank in ranks] == [0] * num_ranks
        finally:
            for rank in ranks:
                rank.kill()


def child_env(**variables: object) -> dict[str, str]:
    """The environment of this process, its import path, and more."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return env | {name: str(value) for name, value in variables.items()}


# ---- processes that compile ----------------------------------------------------------------------


COMPILE = """
import json, socket, sys, time

def no_network(self, address):
    raise OSError(f"the network is off: {address}")

socket.socket.connect = no_network
from moe_ep.megakernel import compile_cache
from moe_ep.megakernel.combine_sm90 import CombineConfig, combine_build

num_compiled = 0
store = compile_cache._store
def counted(*args):
    global num_compiled
    num_compiled += 1
    print("compiling", flush=True)
    return store(*args)
compile_cache._store = counted
start = time.monotonic()
function = compile_cache.load(combine_build(CombineConfig(top_k=int(sys.argv[1]), hidden=256)))
print(json.dumps([num_compiled, time.monotonic() - start, callable(function)]), flush=True)
"""


def compile_in_process(cache: Path, top_k: int = 2) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE, str(top_k)],
        env=child_env(MOE_EP_CACHE_DIR=cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen) -> tuple[int, float]:
    """Kernels that it compiled, and its seconds."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    num_compiled, seconds, is_callable = json.loads(out.splitlines()[-1])
    assert is_callable
    return num_compiled, seconds


@pytest.mark.compile
def test_A82_A85_cold_starts_at_once_compile_once_a_node_without_a_network(tmp_path):
    """Four processes on an empty directory that a variable names; a real kernel."""
    for repeat in range(2):
        started = [compile_in_process(tmp_path / str(repeat)) for _ in range(4)]
        assert sum(result_of(process)[0] for process in started) == 1
    assert result_of(compile_in_process(tmp_path / "0"))[0] == 0


@pytest.mark.compile
def test_A83_a_start_after_a_kill_during_the_compile_takes_the_usual_time(tmp_path):
    usual = result_of(compile_in_process(tmp_path / "usual"))[1]
    killed = [compile_in_process(tmp_path / "cache") for _ in range(2)]
    is_compiling = wait_for_compile(killed)
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert is_compiling
    num_compiled, seconds = result_of(compile_in_process(tmp_path / "cache"))
    assert num_compiled == 1
    assert seconds < 3 * usual + 5


def wait_for_compile(processes: list[subprocess.Popen]) -> bool:
    """Whether one of them, which holds the lock, compiles now."""
    ready, _, _ = select.select([process.stdout for process in processes], [], [], 60)
    return any(stdout.readline() == "compiling\n" for stdout in ready)


@pytest.mark.compile
def test_A84_a_home_that_cannot_be_written_is_replaced_with_a_warning(tmp_path):
    (tmp_path / "home").touch()  # nobody makes a folder below a file, not even root
    env = child_env(HOME=tmp_path / "home")
    for name in ("XDG_CACHE_HOME", "MOE_EP_CACHE_DIR"):
        env.pop(name, None)
    process = subprocess.run(
        [sys.executable, "-c", COMPILE, "2"], env=env, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert "MOE_EP_CACHE_DIR" in process.stderr and "cannot write" in process.stderr
    assert json.loads(process.stdout.splitlines()[-1])[0] == 1
