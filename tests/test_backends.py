"""supports(): which backend "auto" takes, and every limit of the grouped kernel at N and N + 1."""

from types import SimpleNamespace

import pytest
import torch

from moe_ep import MegaConfig, MoEShape, SplitConfig, supports
from moe_ep.backends import AUTO_ORDER, choose_backend, describe
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.config import (
    GroupedGemmConfig,
    MegaKernelConfig,
    NcclEpConfig,
    TorchGemmConfig,
)
from moe_ep.grouped_limits import MAX_TOP_K, max_local_experts
from moe_ep.megakernel.knobs import KNOB_TABLE, MAX_SMEM_BYTES
from moe_ep.megakernel.problem import WEIGHT_FORMATS

GROUPED = SplitConfig(kernel=GroupedGemmConfig())
GPU = torch.device("cuda", 0)


def shape(**changes: object) -> MoEShape:
    fields = {"num_experts": 256, "top_k": 8, "hidden": 7168, "intermediate": 2048} | changes
    return MoEShape(**fields)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with one Hopper GPU and CuTe DSL, as torch and importlib describe it."""
    state = SimpleNamespace(num_gpus=1, capability=(9, 0), has_dsl=True)
    cuda, limits = "torch.cuda", "moe_ep.grouped_limits"
    monkeypatch.setattr(f"{cuda}.is_available", lambda: state.num_gpus > 0)
    monkeypatch.setattr(f"{cuda}.get_device_capability", lambda device: state.capability)
    monkeypatch.setattr(f"{cuda}.get_device_name", lambda device: "the GPU")
    monkeypatch.setattr(f"{limits}.find_spec", lambda name: state.has_dsl or None)
    return state


def reason(machine: SimpleNamespace, a_shape: MoEShape, fmt: str = "nvfp4", **options) -> str:
    """Why the grouped kernel does not run such a layer; empty where it does."""
    answer = supports(a_shape, fmt, options.pop("backend", GROUPED), GPU, **options)
    return "" if answer.ok else answer.reason


def test_auto_prefers_the_grouped_kernel_to_torch(machine):
    order = [describe(backend) for backend in AUTO_ORDER]
    assert order == [
        "mega",
        "split over NcclEpConfig with GroupedGemmConfig",
        "split over TorchCommConfig with GroupedGemmConfig",
        "split over TorchCommConfig with TorchGemmConfig",
    ]
    machine.has_dsl = False
    choice = choose_backend(shape(), "nvfp4", "auto", GPU)
    assert describe(choice.backend) == order[3]
    assert "needs nvidia-cutlass-dsl" in choice.explain()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_gpus": 0}, "torch finds no GPU"),
        ({"capability": (8, 0)}, "compute capability 9.0, the GPU has 8.0"),
        ({"capability": (10, 0)}, "compute capability 9.0, the GPU has 10.0"),
        ({"has_dsl": False}, "needs nvidia-cutlass-dsl"),
    ],
)
def test_what_the_machine_lacks_is_named(machine, changes, said):
    assert reason(machine, shape()) == ""
    vars(machine).update(changes)
    assert said in reason(machine, shape())


def test_on_a_cpu_it_names_the_device():
    assert "capability 9.0, device is cpu" in supports(shape(), "nvfp4", GROUPED, "cpu").reason


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
@pytest.mark.parametrize(("fmt", "multiple"), [("bf16", 16), ("fp8_block", 16), ("nvfp4", 16)])
def test_hidden_and_intermediate_are_multiples(machine, name, fmt, multiple):
    for value in (multiple, 7 * multiple):
        assert reason(machine, shape(**{name: value}), fmt) == ""
        assert f"{name} " in reason(machine, shape(**{name: value + 1}), fmt)
        assert "multiple" in reason(machine, shape(**{name: value + multiple // 2}), fmt)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_mx_formats_need_whole_scale_blocks(machine, fmt):
    assert reason(machine, shape(hidden=96), fmt) == ""
    assert "multiple of 32" in reason(machine, shape(hidden=80), fmt)


def test_top_k_ends_at_its_limit(machine):
    assert reason(machine, shape(top_k=MAX_TOP_K)) == ""
    assert f"at most {MAX_TOP_K}" in reason(machine, shape(top_k=MAX_TOP_K + 1))


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS)
def test_experts_of_a_rank_end_where_shared_memory_does(machine, fmt):
    most = max_local_experts(fmt)
    assert reason(machine, shape(num_experts=most), fmt) == ""
    assert f"holds {most + 1} experts; allowed: at most {most}" in reason(
        machine, shape(num_experts=most + 1), fmt
    )
    # Divided over two ranks the larger half counts.
    assert reason(machine, shape(num_experts=2 * most), fmt, num_ranks=2) == ""
    assert "at most" in reason(machine, shape(num_experts=2 * most + 1), fmt, num_ranks=2)
    knobs = [row.knobs for row in KNOB_TABLE if fmt in row.formats]
    assert all(k.smem_bytes(fmt, most) <= MAX_SMEM_BYTES for k in knobs)


def test_tp_divides_the_intermediate_into_multiples_and_keeps_every_expert(machine):
    tp = {"parallel": "tp", "num_ranks": 8}
    assert reason(machine, shape(intermediate=8 * 16), "bf16", **tp) == ""
    for intermediate in (8 * 16 + 16, 8 * 16 + 8):
        said = reason(machine, shape(intermediate=intermediate), "bf16", **tp)
        assert "over 8 tp ranks: multiples of 128" in said
    most = max_local_experts("bf16")
    assert reason(machine, shape(num_experts=most), "bf16", **tp) == ""
    assert "at most" in reason(machine, shape(num_experts=most + 1), "bf16", **tp)


def test_a_configuration_that_is_not_built_is_refused(machine):
    backend = SplitConfig(kernel=GroupedGemmConfig(activations="fp8"))
    said = "activations='fp8' is not built yet; allowed: 'bf16'"
    assert said in reason(machine, shape(), backend=backend)


def test_explicit_knobs_run(machine):
    backend = SplitConfig(kernel=GroupedGemmConfig(knobs=KNOB_TABLE[0].knobs))
    assert reason(machine, shape(), backend=backend) == ""


# ---- arguments


def test_torch_on_a_gpu_needs_one(machine):
    plain = SplitConfig()
    assert reason(machine, shape(), backend=plain) == ""
    machine.num_gpus = 0
    assert "torch finds no GPU" in reason(machine, shape(), backend=plain)
    assert "torch finds no GPU" in reason(machine, shape(), backend="auto")


@pytest.mark.parametrize("backend", ["auto", SplitConfig()])
def test_an_intermediate_that_tp_ranks_cannot_divide_is_refused_on_a_cpu_too(backend):
    tp = {"parallel": "tp", "num_ranks": 5}
    assert supports(shape(intermediate=80), "nvfp4", backend, "cpu", **tp).ok
    answer = supports(shape(intermediate=48), "nvfp4", backend, "cpu", **tp)
    assert not answer.ok
    assert "48 does not divide over 5 tp ranks into whole nvfp4 scale blocks" in answer.reason


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"shape": None}, "shape must be a MoEShape, got None"),
        ({"parallel": "zz"}, "parallel 'zz' is not known; allowed: ep, tp"),
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"num_ranks": "2"}, "num_ranks must be an int, got '2'"),
        ({"max_tokens_per_rank": -1}, "max_tokens_per_rank must be at least 1, got -1"),
    ],
)
def test_arguments_that_no_layer_has_are_errors(arguments, said):
    with pytest.raises(MoEEpConfigError, match=said):
        supports(**{"shape": shape(), "weights_format": "bf16"} | arguments)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (MegaConfig, {"megakernel": 3}, "megakernel must be MegaKernelConfig, got 3"),
        (MegaConfig, {"preprocess_weights": 1}, "preprocess_weights must be True or False, got 1"),
        (
            MegaConfig,
            {"quantize_input": True},
            "quantize_input=True contradicts activations=",
        ),
        (
            MegaKernelConfig,
            {"knobs": "fast"},
            "knobs is 'fast'; allowed: None .*, 'auto'",
        ),
        (MegaKernelConfig, {"knobs": 3}, "knobs is 3; allowed: None"),
        (MegaKernelConfig, {"max_sms": "20"}, "max_sms must be None or an int .* got '20'"),
        (MegaKernelConfig, {"max_sms": True}, "max_sms must be None or an int .* got True"),
        (MegaKernelConfig, {"max_sms": 0}, "max_sms must be None or an int of at least 1, got 0"),
        (MegaKernelConfig, {"activations": "bf61"}, "activations 'bf61' is not known; allowed: bf"),
        (GroupedGemmConfig, {"knobs": "auto"}, "GroupedGemmConfig knobs is 'auto'; allowed: None"),
        (GroupedGemmConfig, {"activations": None}, "activations None is not known; allowed: bf16"),
        (SplitConfig, {"comm": TorchGemmConfig()}, "comm must be NcclEpConfig or TorchCommConfig"),
        (SplitConfig, {"kernel": "grouped"}, "kernel must be GroupedGemmConfig or .* 'grouped'"),
        (NcclEpConfig, {"mode": ["ll"]}, r"mode \['ll'\] is not known; allowed: ll, ht"),
        (
            NcclEpConfig,
            {"mode": "ht", "layout": "rank_major"},
            "not one of mode 'ht'; allowed: f",
        ),
        (NcclEpConfig, {"exact_combine": "no"}, "exact_combine must be True or False, got 'no'"),
    ],
)
def test_what_a_configuration_does_not_take_is_named_without_a_gpu(kind, options, said):
    with pytest.raises(MoEEpConfigError, match=said):
        kind(**options)
