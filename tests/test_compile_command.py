"""moe-ep compile: which kernels it fills the cache with."""

import sys
from types import SimpleNamespace

import pytest
import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.launch import compile as compile_command
from moe_ep.launch.cli import main
from moe_ep.launch.geometries import geometry
from moe_ep.launch.random_layer import shard_shape
from moe_ep.megakernel import workspace_memory
from moe_ep.megakernel.grouped_gemm import GroupedGemm
from moe_ep.megakernel.mega_moe import MegaMoE


def needs_dsl() -> None:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")


def kernel_names(builds) -> list[str]:
    return sorted(build.name for build in builds)


@pytest.mark.parametrize("weights_format", ["nvfp4", "mxfp8", "bf16"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_lists_the_grouped_gemms_that_a_layer_loads(weights_format, has_bias, monkeypatch):
    needs_dsl()
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    shape = geometry("v3")
    layer = GroupedGemm(
        weights_format,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        activation=shape.activation,
        num_local_experts=32,
        has_bias13=has_bias,
        has_bias2=has_bias,
        device="cpu",
    )
    builds = compile_command.split_builds(shape, weights_format, num_ranks=8, has_bias=has_bias)
    symbols = {build.symbol for build in builds}
    assert {build.symbol for build in layer.kernel_builds()} <= symbols
    assert len(symbols) == len(builds) == len(layer.kernel_builds()) + 3
    assert {"permute", "combine"} < set(kernel_names(builds))


def test_under_tp_it_lists_a_part_of_every_expert_with_and_without_the_last_bias(monkeypatch):
    needs_dsl()
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    monkeypatch.setattr(workspace_memory, "acquire", lambda *_: SimpleNamespace(num_launched=1))
    shape = geometry("qwen3")
    division = {"num_ranks": 2, "has_bias": True, "parallel": "tp"}
    builds = compile_command.split_builds(shape, "nvfp4", **division)
    builds += compile_command.mega_builds(shape, "nvfp4", max_tokens_per_rank=32, **division)
    expected = []
    for rank in range(2):
        biases = {"has_bias13": True, "has_bias2": rank == 0}
        gemms = GroupedGemm(
            "nvfp4",
            hidden=shape.hidden,
            intermediate=shape.intermediate // 2,
            activation=shape.activation,
            num_local_experts=shape.num_experts,
            terms_are_fp32=True,
            device="cpu",
            **biases,
        )
        group = EpGroup(rank=rank, num_ranks=2, device=torch.device("cpu"))
        mega = MegaMoE(group, shape, "nvfp4", max_tokens_per_rank=32, parallel="tp", **biases)
        expected += gemms.kernel_builds() + mega.kernel_builds()
    assert {build.symbol for build in builds} == {build.symbol for build in expected}


def test_experts_that_do_not_divide_give_two_sizes():
    needs_dsl()
    builds = compile_command.split_builds(geometry("tiny"), "nvfp4", num_ranks=3)  # 6, 5, 5 of 16
    sizes = {build.config.num_local_experts for build in builds if build.name == "permute"}
    assert sizes == {5, 6}


def test_run_compiles_each_kernel_once_and_prints_where(monkeypatch, capsys, tmp_path):
    needs_dsl()
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path))
    asked = []

    def compile_all(builds, *, num_processes):
        asked.extend(builds)
        return 5

    monkeypatch.setattr(compile_command, "compile_all", compile_all)
    # Both geometries, both EP sizes: combine depends on neither format nor ranks.
    arguments = "compile --geometry tiny v3 --formats nvfp4 mxfp4 --ranks 1 2 --jobs 1"
    arguments += " --max-tokens-per-rank 64"
    assert main(arguments.split()) == 0
    assert len({build.symbol for build in asked}) == len(asked)
    assert kernel_names(asked).count("combine") == 2
    assert kernel_names(asked).count("permute") == 2 * 2 * 2  # geometry, ranks, dtype of the ids
    megas = [build.config for build in asked if build.name == "mega_moe"]
    assert {spec.layout.num_ranks for spec in megas} == {1, 2}
    assert {spec.layout.max_tokens_per_rank for spec in megas} == {64}
    out = capsys.readouterr().out
    assert str(tmp_path) in out and "5 compiled" in out


def test_without_cute_dsl_it_says_what_to_install(monkeypatch, capsys):
    for name in ("megakernel.combine_sm90", "megakernel.permute_sm90", "grouped"):
        monkeypatch.delitem(sys.modules, f"moe_ep.{name}", raising=False)
        monkeypatch.delattr(f"moe_ep.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.setitem(sys.modules, "cutlass.cute", None)
    assert main(["compile", "--geometry", "tiny"]) == 2
    assert "nvidia-cutlass-dsl" in capsys.readouterr().err


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_it_lists_the_mega_kernels_that_a_layer_loads(num_ranks, monkeypatch):
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    memory = SimpleNamespace(num_launched=1)
    monkeypatch.setattr(workspace_memory, "acquire", lambda group, layout: memory)
    group = EpGroup(rank=0, num_ranks=num_ranks, device=torch.device("cpu"))
    shape = shard_shape("v3", 32, num_ranks)
    layer = MegaMoE(group, shape, "nvfp4", max_tokens_per_rank=8192, has_bias2=True)
    layer_without = MegaMoE(group, shape, "nvfp4", max_tokens_per_rank=8192)
    builds = compile_command.mega_builds(
        shape, "nvfp4", max_tokens_per_rank=8192, num_ranks=num_ranks
    )
    assert len(builds) == 2 * len(layer_without.buckets) >= 6  # int32 and int64 ids
    symbols = {build.symbol for build in builds}
    assert symbols == {build.symbol for build in layer_without.kernel_builds()}
    assert symbols.isdisjoint(build.symbol for build in layer.kernel_builds())


def test_under_tp_it_lists_what_rank_0_with_the_bias_and_the_others_load(monkeypatch):
    needs_dsl()
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    memory = SimpleNamespace(num_launched=1)
    monkeypatch.setattr(workspace_memory, "acquire", lambda group, layout: memory)
    group = EpGroup(rank=0, num_ranks=4, device=torch.device("cpu"))
    shape = geometry("tiny")
    tp = {"parallel": "tp", "has_bias": True, "num_ranks": 4}
    fused = compile_command.mega_builds(shape, "nvfp4", max_tokens_per_rank=64, **tp)
    split = compile_command.split_builds(shape, "nvfp4", **tp)
    wanted = {"fused": set(), "split": set()}
    for has_bias2 in (True, False):
        biases = {"has_bias13": True, "has_bias2": has_bias2}
        layer = MegaMoE(group, shape, "nvfp4", max_tokens_per_rank=64, parallel="tp", **biases)
        wanted["fused"] |= {build.symbol for build in layer.kernel_builds()}
        gemms = GroupedGemm(
            "nvfp4",
            hidden=shape.hidden,
            intermediate=shape.intermediate // 4,
            activation=shape.activation,
            num_local_experts=shape.num_experts,
            terms_are_fp32=True,
            device="cpu",
            **biases,
        )
        wanted["split"] |= {build.symbol for build in gemms.kernel_builds()}
    assert {build.symbol for build in fused} == wanted["fused"]
    assert {build.symbol for build in split} == wanted["split"]


@pytest.mark.parametrize("backend", ["split", "mega"])
def test_an_intermediate_that_does_not_divide_is_refused(backend, capsys):
    command = ["compile", "--geometry", "v3", "--parallel", "tp", "--ranks", "3"]
    assert main([*command, "--backend", backend]) == 2
    assert "over 3 tp ranks" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--ranks", "--jobs", "--max-tokens-per-rank"])
@pytest.mark.parametrize("count", ["0", "-2"])
def test_a_count_below_one_is_refused_before_anything_is_compiled(option, count, capsys):
    assert main(["compile", "--geometry", "tiny", option, count]) == 2
    assert f"{option} must be at least 1, got {count}" in capsys.readouterr().err


def test_a_cache_that_would_keep_nothing_is_refused_before_anything_is_compiled(
    monkeypatch, capsys, tmp_path
):
    needs_dsl()
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(blocked / "cache"))
    monkeypatch.setattr(compile_command, "compile_all", lambda *_, **__: pytest.fail("compiled"))
    assert main(["compile", "--geometry", "tiny", "--backend", "split"]) == 2
    said = capsys.readouterr().err
    assert f"the kernel cache {blocked / 'cache'} cannot be written" in said
    assert "MOE_EP_CACHE_DIR" in said


def test_a_full_cache_need_not_be_writable(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_command.tempfile, "TemporaryFile", read_only)
    (tmp_path / "fc1_0.o").touch()
    compile_command.check_can_keep(["fc1_0"])
    with pytest.raises(MoEEpConfigError, match="cannot be written"):
        compile_command.check_can_keep(["fc1_0", "fc2_0"])


def read_only(**_: object) -> None:
    raise OSError("Read-only file system")
