"""Field cases of kind install: what a machine or an environment lacks, and backends by name."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch.distributed as dist
from field_ranks import S0, on, weights_of
from layer_cases import make_inputs

from moe_ep import MegaConfig, MoEEpLayer, MoEInputs, MoEWeights, SplitConfig, supports
from moe_ep.config import GroupedGemmConfig, NcclEpConfig, TorchCommConfig
from moe_ep.launch import spawn
from moe_ep.reference import moe_reference

WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        is_missing = name.partition(".")[0] in {missing!r}
        return None if is_missing else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
import test_install as here
from moe_ep import *
from moe_ep.comm.errors import MoEEpUnavailableError
from moe_ep.config import GroupedGemmConfig, NcclEpConfig, TorchCommConfig
"""


def run_without(missing: tuple[str, ...], code: str, **variables: str) -> str:
    """What `code` prints in a process of its own that cannot import `missing`."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=set(missing)) + code],
        env=os.environ | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


RAISES = """
try:
    here.layer({backend}, {device!r})
except MoEEpUnavailableError as error:
    print(error)
else:
    raise SystemExit("it ran")
"""
MEGA = "MegaConfig()"
GROUPED = "SplitConfig(kernel=GroupedGemmConfig())"
NCCL_EP = "SplitConfig(comm=NcclEpConfig())"
DSL = ("cutlass", "cutlass_library", "nvidia_cutlass_dsl")


def layer(backend, device: str) -> MoEEpLayer:
    weights = weights_of(S0, "bf16").to(device)
    return MoEEpLayer(S0, weights, max_tokens_per_rank=32, backend=backend)


def run(backend, device: str) -> float:
    """Relative distance of one call to the specification."""
    inputs = make_inputs(S0, 16, seed=0)
    moved = MoEInputs(*(tensor.to(device) for tensor in vars(inputs).values()))
    output = layer(backend, device)(moved).cpu().double()
    expected = moe_reference(inputs, weights_of(S0, "bf16"), S0).double()
    return float((output - expected).norm() / expected.norm())


def on_a_rank(rank: int, num_ranks: int) -> bool:
    """Over gloo, of a process that sees no GPU."""
    weights: MoEWeights = weights_of(S0, "bf16").shard("ep", rank, num_ranks)
    inputs = make_inputs(S0, 16, seed=rank)
    output = MoEEpLayer(S0, weights, max_tokens_per_rank=32)(inputs)
    dist.barrier()
    return bool((output == moe_reference(inputs, weights_of(S0, "bf16"), S0)).all())


def two_ranks() -> list[bool]:
    return spawn.run(on_a_rank, 2)


def test_A79_a_machine_without_a_gpu_runs_the_cpu_and_says_what_the_others_need():
    code = "print(here.run('auto', 'cpu'), here.two_ranks())\n"
    for backend in (MEGA, GROUPED, NCCL_EP):
        code += RAISES.format(backend=backend, device="cpu")
    lines = run_without((), code, CUDA_VISIBLE_DEVICES="").splitlines()
    assert lines[0] == "0.0 [True, True]"
    assert len(lines) == 4
    assert all("GPU" in line and "cpu" in line for line in lines[1:]), lines


def test_A80_without_the_gpu_packages_the_cpu_runs_and_they_are_declared():
    missing = (*DSL, "nvshmem", "nccl_ep", "nccl", "cuda")
    assert run_without(missing, "print(here.run('auto', 'cpu'))") == "0.0\n"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {name: " ".join(lines) for name, lines in project["optional-dependencies"].items()}
    assert "nvidia-cutlass-dsl" in extras["gpu"] and "nvshmem4py" in extras["gpu"]
    assert "nccl-extensions" in extras["nccl-ep"]


@pytest.mark.gpu
def test_A80_without_the_gpu_packages_split_runs_and_mega_names_the_package():
    missing = (*DSL, "nvshmem", "nccl_ep")
    code = "print(here.run(SplitConfig(), 'cuda') < 0.005, here.run('auto', 'cuda') < 0.005)\n"
    code += RAISES.format(backend=MEGA, device="cuda")
    runs, error = run_without(missing, code).splitlines()
    assert runs == "True True"
    assert "nvidia-cutlass-dsl" in error and "pip install" in error


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [MEGA, GROUPED], ids=["mega", "split"])
def test_A81_a_backend_asked_for_by_name_never_gives_way_to_another(backend):
    error = run_without(DSL, RAISES.format(backend=backend, device="cuda"))
    assert "nvidia-cutlass-dsl" in error


def test_A81_nccl_ep_that_is_missing_is_named():
    support = supports(S0, "bf16", SplitConfig(comm=NcclEpConfig()), "cpu")
    assert not support.ok and "NCCL-EP" in support.reason


@on("cpu1", "split1", "mega1")
def test_A81_the_backend_that_runs_can_be_asked_for(ranks):
    backend = ranks.module(S0, ranks.weights()).backend
    assert isinstance(backend, MegaConfig if ranks.kind == "mega" else SplitConfig)
    if ranks.kind == "split":
        assert isinstance(backend.kernel, GroupedGemmConfig)
        assert isinstance(backend.comm, TorchCommConfig)
    assert "runs" in ranks.module(S0, ranks.weights()).explain()
