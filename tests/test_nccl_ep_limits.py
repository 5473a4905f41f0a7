"""What NCCL-EP cannot carry is said before anything is allocated: each limit at N and N + 1."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ep import MoEShape, SplitConfig, supports
from moe_ep.comm import nccl_ep_limits
from moe_ep.config import NcclEpConfig

LAYER = dict(hidden=7168, top_k=8, num_experts=256, num_ranks=8)


@pytest.mark.parametrize(
    ("kind", "fits", "exceeds", "message"),
    [
        ("ll rank_major", dict(num_ranks=64), dict(num_ranks=65), "at most 64 ranks, got 65"),
        (
            "ll rank_major",
            dict(hidden=2560),
            dict(hidden=2816),
            "a multiple of 512 and at most 15872, got 2816",
        ),
        ("ll expert_major", dict(hidden=15872), dict(hidden=16384), "at most 15872, got 16384"),
        ("ht expert_major", dict(hidden=16384), dict(hidden=16392), "at most 16384, got 16392"),
        ("ht flat", dict(hidden=2880), dict(hidden=2884), "multiple of 8 and at most 16384, got"),
        ("ll rank_major", dict(top_k=31), dict(top_k=32), "a top_k of at most 31, got 32"),
        # Three experts on an SM: three groups of ten warps.
        (
            "ll rank_major",
            dict(num_experts=264, top_k=31),
            dict(num_experts=272, top_k=30),
            "a top_k of at most 29, got 30",
        ),
        ("ht flat", dict(top_k=32), dict(top_k=33), "a top_k of at most 32, got 33"),
        (
            "ll rank_major",
            dict(num_experts=264),
            dict(num_experts=260),
            "equally many experts on 8",
        ),
        (
            "ll rank_major",
            dict(num_experts=1848),
            dict(num_experts=1856),
            "at most 1848 experts on GPUs of 132 SMs, got 1856",
        ),
        ("ht flat", dict(num_experts=8192), dict(num_experts=8200), "1024 experts of a rank, got"),
        (
            *("ht expert_major", dict(num_experts=2048), dict(num_experts=4096)),
            "at most 256 experts of a rank, got 512",
        ),
        (
            *("ht expert_major", dict(num_experts=32), dict(num_experts=48)),
            "a power of two experts on each rank, got 6",
        ),
        (
            *("ht flat", dict(num_experts=8, num_ranks=2), dict(num_experts=6, num_ranks=2)),
            "a multiple of 4 experts, got 6",
        ),
    ],
)
def test_a_layer_beyond_a_limit_is_named_and_one_at_it_fits(kind, fits, exceeds, message):
    mode, layout = kind.split()
    assert nccl_ep_limits.layer_misfit(mode, layout, **LAYER | fits) is None
    assert message in nccl_ep_limits.layer_misfit(mode, layout, **LAYER | exceeds)


def test_all_that_does_not_fit_is_in_one_message():
    layer = LAYER | dict(hidden=2884, top_k=33, num_experts=254)
    message = nccl_ep_limits.layer_misfit("ht", "flat", **layer)
    for part in ("got 2884", "got 33", "a multiple of 4 experts, got 254", "equally many experts"):
        assert part in message


@pytest.mark.parametrize(("top_k", "most"), [(1, 8192), (8, 1024)])
def test_tokens_of_a_rank_are_limited_in_high_throughput(top_k, most):
    def misfit(mode: str, tokens: int) -> str | None:
        return nccl_ep_limits.capacity_misfit(mode, "flat", max_tokens_per_rank=tokens, top_k=top_k)

    assert misfit("ht", most) is None
    assert f"at most 8192 rows of a rank, got {most + 1} tokens" in misfit("ht", most + 1)
    assert misfit("ll", most + 1) is None


@pytest.fixture
def library(monkeypatch, tmp_path):
    """A machine that has all of it; each test takes one part away."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(nccl_ep_limits, "version", lambda name: "0.1.0")
    monkeypatch.setattr(nccl_ep_limits, "loaded_nccl", lambda: (2, 30, 4))
    for name in ("NCCL_EP_JIT_NVCC", "NVCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return monkeypatch


def test_a_machine_with_all_parts_lacks_nothing(library):
    assert nccl_ep_limits.library_misfit() is None


def test_an_old_nccl_is_named(library):
    library.setattr(nccl_ep_limits, "loaded_nccl", lambda: (2, 29, 7))
    assert "loaded NCCL 2.29.7, NCCL-EP needs 2.30.4" in nccl_ep_limits.library_misfit()
    library.setattr(nccl_ep_limits, "loaded_nccl", lambda: None)
    assert "loaded no NCCL, NCCL-EP needs 2.30.4" in nccl_ep_limits.library_misfit()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_nccl_that_counts_is_the_one_in_the_process(tmp_path):
    """torch may have been built with another one: a library is preloaded, and its version told."""
    source = "int ncclGetVersion(int* version) { *version = 23107; return 0; }"
    library = tmp_path / "libnccl.so.2"
    build = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-x", "c", "-", "-o", library]
    subprocess.run(build, input=source, text=True, check=True)
    ask = "from moe_ep.comm.nccl_ep_limits import loaded_nccl; print(loaded_nccl())"
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "(2, 31, 7)"


def test_a_missing_compiler_is_named(library):
    library.setenv("CUDA_HOME", str(Path("nowhere")))
    assert "finds no nvcc" in nccl_ep_limits.library_misfit()


def test_a_missing_library_is_named():
    assert "nccl-extensions is not installed" in nccl_ep_limits.library_misfit()


def test_supports_answers_with_the_limit():
    shape = MoEShape(num_experts=8, top_k=2, hidden=2880, intermediate=2880)
    backend = SplitConfig(comm=NcclEpConfig(mode="ll"))
    answer = supports(shape, "bf16", backend, "cuda", num_ranks=2)
    assert not answer.ok
    assert "multiple of 512 and at most 15872, got 2880" in answer.reason
