"""What NCCL-EP cannot carry is said before anything is allocated: each limit at N and N + 1."""

from pathlib import Path

import pytest
import torch

from moe_ep import MoEShape, SplitConfig, supports
from moe_ep.comm import nccl_ep_limits
from moe_ep.config import NcclEpConfig

LAYER = dict(hidden=7168, top_k=8, num_experts=256, num_ranks=8)


@pytest.mark.parametrize(
    ("mode", "fits", "exceeds", "message"),
    [
        ("ll", dict(num_ranks=64), dict(num_ranks=65), "at most 64 ranks, got 65"),
        (
            "ll",
            dict(hidden=2816),
            dict(hidden=2880),
            "multiple of 256 and at most 16384, got 288",
        ),
        ("ll", dict(hidden=16384), dict(hidden=16640), "at most 16384, got 16640"),
        ("ht", dict(hidden=2880), dict(hidden=2884), "a multiple of 8 and at most 16384, got 2884"),
        ("ll", dict(top_k=31), dict(top_k=32), "'ll' takes a top_k of at most 31, got 32"),
        ("ht", dict(top_k=32), dict(top_k=33), "'ht' takes a top_k of at most 32, got 33"),
        ("ll", dict(num_experts=264), dict(num_experts=260), "equally many experts on 8 ranks"),
        ("ll", dict(num_experts=8192), dict(num_experts=8200), "1024 experts a rank, got 1025"),
        (
            *("ht", dict(num_experts=8, num_ranks=2), dict(num_experts=6, num_ranks=2)),
            "needs a multiple of 4 experts, got 6",
        ),
    ],
)
def test_a_layer_beyond_a_limit_is_named_and_one_at_it_fits(mode, fits, exceeds, message):
    assert nccl_ep_limits.layer_misfit(mode, **LAYER | fits) is None
    assert message in nccl_ep_limits.layer_misfit(mode, **LAYER | exceeds)


@pytest.fixture
def library(monkeypatch, tmp_path):
    """A machine that has all of it; each test takes one part away."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(nccl_ep_limits, "version", lambda name: "0.1.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 4))
    for name in ("NCCL_EP_JIT_NVCC", "NVCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return monkeypatch


def test_a_machine_with_all_parts_lacks_nothing(library):
    assert nccl_ep_limits.library_misfit() is None


def test_an_old_nccl_is_named(library):
    library.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    assert "loaded NCCL 2.29.7, NCCL-EP needs 2.30.4" in nccl_ep_limits.library_misfit()


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
    assert "multiple of 256 and at most 16384, got 2880" in answer.reason
