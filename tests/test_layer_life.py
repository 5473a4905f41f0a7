"""A layer on one rank: built in plain python, explained, refitted, never copied, destroyed."""

import copy
import pickle
import types

import pytest
import torch
from layer_cases import make_inputs, make_weights, with_ids

import moe_ep
from moe_ep import MegaConfig, MoEEpLayer, MoEInputs, MoEShape, SplitConfig
from moe_ep.backends import AUTO_ORDER
from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError, MoEEpUnavailableError
from moe_ep.comm.group import EpGroup
from moe_ep.config import GroupedGemmConfig, NcclEpConfig
from moe_ep.launch import spawn
from moe_ep.megakernel.knobs import KNOB_TABLE
from moe_ep.reference import moe_reference

SHAPE = MoEShape(num_experts=8, top_k=2, hidden=128, intermediate=128)
FORMATS = ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block")


def make_layer(weights_format: str = "bf16", **changes: object) -> MoEEpLayer:
    arguments = {
        "weights": make_weights(SHAPE, weights_format),
        "max_tokens_per_rank": 32,
    } | changes
    return MoEEpLayer(SHAPE, **arguments)


@pytest.fixture
def layer() -> MoEEpLayer:
    return make_layer()


@pytest.fixture
def inputs() -> MoEInputs:
    return make_inputs(SHAPE, 16, seed=4)


@pytest.fixture
def expected(inputs: MoEInputs) -> torch.Tensor:
    return moe_reference(inputs, make_weights(SHAPE), SHAPE)


def test_a_virtual_group_is_refused():
    with pytest.raises(MoEEpConfigError, match="group is virtual: its 2 ranks"):
        make_layer(group=EpGroup.virtual(2, "cpu"))


def test_the_layer_is_a_module_without_parameters_inside_a_model(layer, inputs, expected):
    model = torch.nn.ModuleDict({"experts": layer}).eval().requires_grad_(False)
    assert not list(model.parameters()) and not model.state_dict()
    assert torch.equal(model["experts"](inputs), expected)
    assert "max_tokens_per_rank=32" in repr(model)


@pytest.mark.parametrize(
    "move",
    [
        lambda layer: layer.to("cpu"),
        lambda layer: layer.to(torch.float16),
        lambda layer: layer.half(),
        lambda layer: layer.float(),
        lambda layer: torch.nn.Sequential(layer).bfloat16(),
        copy.deepcopy,
        copy.copy,
        pickle.dumps,
        lambda layer: copy.deepcopy(torch.nn.Sequential(layer)),
    ],
)
def test_moving_casting_or_copying_raises_and_leaves_the_layer_as_it_was(
    layer, inputs, expected, move
):
    with pytest.raises(MoEEpStateError, match="bound to its"):
        move(layer)
    assert torch.equal(layer(inputs), expected)


def test_out_is_written_and_returned_with_any_strides(layer, inputs, expected):
    wide = torch.zeros(16, 2 * SHAPE.hidden, dtype=torch.bfloat16)
    out = wide[:, ::2]
    assert layer(inputs, out=out) is out
    assert torch.equal(out, expected)
    assert not wide[:, 1::2].any()
    assert layer(inputs).data_ptr() != layer(inputs).data_ptr()


def test_out_may_be_the_input(layer, inputs, expected):
    layer(inputs, out=inputs.hidden_states)
    assert torch.equal(inputs.hidden_states, expected)


def test_inputs_are_not_written(layer, inputs):
    before = [tensor.clone() for tensor in vars(inputs).values()]
    layer(inputs)
    assert all(map(torch.equal, before, vars(inputs).values()))


def test_strided_inputs_give_the_bits_of_contiguous_ones(layer, inputs, expected):
    x, ids, weights = vars(inputs).values()
    strided = MoEInputs(
        x.t().contiguous().t(),
        torch.cat([ids, ids], dim=1)[:, : SHAPE.top_k],
        weights.repeat_interleave(2, dim=1)[:, ::2],
    )
    assert not any(tensor.is_contiguous() for tensor in vars(strided).values())
    assert torch.equal(layer(strided), expected)


def test_int64_ids_give_the_bits_of_int32_ids(layer, inputs, expected):
    assert inputs.topk_ids.dtype == torch.int32
    assert torch.equal(layer(with_ids(inputs, inputs.topk_ids.long())), expected)


@pytest.mark.parametrize("mask", [-1, -(2**31), -(2**40)])
def test_any_negative_id_masks_its_slot(layer, inputs, mask):
    ids = inputs.topk_ids.long().clone()
    ids[::2, 1] = mask
    masked = with_ids(inputs, ids)
    assert torch.equal(layer(masked), moe_reference(masked, make_weights(SHAPE), SHAPE))
    assert not layer(with_ids(inputs, torch.full_like(ids, mask))).any()


def test_max_tokens_bounds_one_call(layer, inputs, expected):
    assert torch.equal(layer(inputs, max_tokens=16), expected)
    with pytest.raises(MoEEpConfigError, match="16 tokens; allowed: at most 15"):
        layer(inputs, max_tokens=15)
    assert layer(make_inputs(SHAPE, 0, seed=0), max_tokens=0).shape == (0, SHAPE.hidden)


def test_a_token_that_is_nan_or_inf_spoils_no_other_token(layer, inputs, expected):
    x = inputs.hidden_states.clone()
    x[3], x[9] = float("nan"), float("inf")
    same_expert = with_ids(inputs, 2)
    clean = layer(same_expert)
    output = layer(MoEInputs(x, same_expert.topk_ids, inputs.topk_weights))
    others = [token for token in range(16) if token not in (3, 9)]
    assert torch.equal(output[others], clean[others])
    assert not output[[3, 9]].isfinite().all(dim=1).any()


def test_input_that_requires_grad_is_refused_only_in_grad_mode(layer, inputs, expected):
    needs_grad = MoEInputs(
        inputs.hidden_states.clone().requires_grad_(), inputs.topk_ids, inputs.topk_weights
    )
    with pytest.raises(MoEEpConfigError, match="hidden_states requires grad"):
        layer(needs_grad)
    with torch.no_grad():
        assert torch.equal(layer(needs_grad), expected)


def test_warmup_and_check_leave_a_working_layer(layer, inputs, expected):
    layer.warmup()
    layer.check()
    assert torch.equal(layer(inputs), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_update_weights_keeps_addresses_and_gives_the_new_weights(inputs, name):
    layer = make_layer(name)
    held = layer._backend._kernel.weights.tensors
    addresses = {key: tensor.data_ptr() for key, tensor in held.items()}
    for seed in (1, 2, 3):
        new = make_weights(SHAPE, name, seed=seed)
        layer.update_weights(new)
        assert torch.equal(layer(inputs), moe_reference(inputs, new, SHAPE))
    assert addresses == {key: tensor.data_ptr() for key, tensor in held.items()}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (lambda: make_weights(SHAPE, "mxfp8"), "weights_format is mxfp8; allowed: bf16"),
        (lambda: make_weights(SHAPE).shard("ep", 0, 2), "num_ranks is 2; allowed: 1"),
        (lambda: make_weights(SHAPE).to("meta"), "w13 is on meta; allowed: cpu"),
        (lambda: "weights", "must be MoEWeights, got str"),
    ],
)
def test_update_weights_that_do_not_fit_change_nothing(layer, inputs, expected, weights, message):
    with pytest.raises(MoEEpConfigError, match=message):
        layer.update_weights(weights())
    assert torch.equal(layer(inputs), expected)


def test_after_destroy_only_destroy_works(layer, inputs):
    layer.destroy()
    layer.destroy()
    for call in (lambda: layer(inputs), layer.warmup, layer.check):
        with pytest.raises(MoEEpStateError, match="destroyed"):
            call()
    with pytest.raises(MoEEpStateError, match="destroyed"):
        layer.update_weights(make_weights(SHAPE))
    assert "runs" in layer.explain()


def test_a_failed_kernel_leaves_a_layer_that_says_so(layer, inputs):
    def fail(*_: object) -> None:
        raise MemoryError("no memory left")

    layer._backend._kernel = fail
    with pytest.raises(MemoryError):
        layer(inputs)
    with pytest.raises(MoEEpStateError, match="MemoryError: no memory left"):
        layer(inputs)
    layer.destroy()


def test_auto_on_a_cpu_explains_what_runs_and_why_the_others_do_not(layer):
    text = layer.explain()
    assert layer.backend == AUTO_ORDER[-1] == SplitConfig()
    assert "mega not chosen: needs NVIDIA GPUs" in text
    assert "NcclEpConfig with GroupedGemmConfig not chosen: NCCL-EP needs NVIDIA GPUs" in text
    assert "TorchCommConfig with TorchGemmConfig runs" in text
    assert "8 of 8 experts in bf16" in text


@pytest.mark.parametrize(
    "backend",
    [
        MegaConfig(),
        SplitConfig(comm=NcclEpConfig()),
        SplitConfig(kernel=GroupedGemmConfig()),
    ],
)
def test_a_backend_asked_for_by_name_runs_or_raises_its_reason(backend):
    support = moe_ep.supports(SHAPE, "bf16", backend, "cpu")
    assert not support.ok
    with pytest.raises(MoEEpUnavailableError) as error:
        make_layer(backend=backend)
    assert support.reason in str(error.value)


def test_supports_answers_for_auto_and_for_shapes_that_do_not_fit():
    assert moe_ep.supports(SHAPE, "nvfp4", "auto", "cpu").ok
    odd = MoEShape(num_experts=8, top_k=2, hidden=72, intermediate=128)
    refused = moe_ep.supports(odd, "nvfp4", SplitConfig(), "cpu")
    assert not refused.ok
    assert refused.reason == "hidden 72 is not a multiple of 16, the scale block of nvfp4"
    assert not moe_ep.supports(odd, "nvfp4", "auto", "cpu").ok
    assert moe_ep.supports(odd, "bf16", "auto", "cpu").ok
    with pytest.raises(MoEEpConfigError, match="int3"):
        moe_ep.supports(SHAPE, "int3", "auto", "cpu")
    with pytest.raises(MoEEpConfigError, match="device 'abacus'"):
        moe_ep.supports(SHAPE, "bf16", "auto", "abacus")


@pytest.mark.parametrize("timeout_s", [0, -1.0, 1e-4, 1e7, float("inf"), float("nan"), "60", True])
def test_a_time_out_must_be_a_number_that_every_clock_can_count(timeout_s):
    with pytest.raises(MoEEpConfigError, match="timeout_s must be .*, got"):
        make_layer(timeout_s=timeout_s)


def test_weights_elsewhere_than_the_layer_are_refused():
    with pytest.raises(MoEEpConfigError, match="weights are on meta, the layer on cpu"):
        make_layer(weights=make_weights(SHAPE).to("meta"), device="cpu")


@pytest.mark.parametrize("group", [None, EpGroup.single("cpu")], ids=["no group", "group"])
@pytest.mark.parametrize("device", ["abacus", 3.5, torch.float32])
def test_a_device_that_does_not_exist_is_refused_with_any_group(device, group):
    with pytest.raises(MoEEpConfigError, match=f"device {device!r} cannot be used"):
        make_layer(device=device, group=group)


def test_a_device_other_than_the_groups_is_refused():
    with pytest.raises(MoEEpConfigError, match="device is meta; allowed: cpu, the group's"):
        make_layer(device="meta", group=EpGroup.single("cpu"))
    make_layer(device="cpu", group=EpGroup.single("cpu")).destroy()


def test_what_goes_into_a_configuration_comes_from_config():
    assert moe_ep.config.KernelKnobs is KNOB_TABLE[0].knobs.__class__
    with pytest.raises(ImportError, match="Nobs"):
        from moe_ep.config import Nobs  # noqa: F401


def build_in_pairs(rank: int, num_ranks: int) -> dict:
    """Ranks 1 and 3, ranks 0 and 2: two layers at once; then one rank alone inside the job."""
    inputs = make_inputs(SHAPE, 5 + rank, seed=rank)
    pairs = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
    weights = make_weights(SHAPE).shard("ep", rank // 2, 2)
    layer = make_layer(weights=weights, group=pairs[rank % 2])
    alone = make_layer(group=EpGroup.single("cpu"))
    outputs = {"pair": layer(inputs), "alone": alone(inputs), "explain": layer.explain()}
    torch.distributed.destroy_process_group()
    layer.destroy()  # after its group: harmless
    return outputs


def test_layers_of_process_subgroups_and_of_one_rank_live_side_by_side():
    for rank, outputs in enumerate(spawn.run(build_in_pairs, 4)):
        inputs = make_inputs(SHAPE, 5 + rank, seed=rank)
        expected = moe_reference(inputs, make_weights(SHAPE), SHAPE)
        assert torch.equal(outputs["pair"], expected)
        assert torch.equal(outputs["alone"], expected)
        assert f"rank {rank // 2} of 2" in outputs["explain"]


def test_no_public_name_is_hidden_by_a_module_of_the_same_name():
    for name in moe_ep.__all__:
        assert not isinstance(getattr(moe_ep, name), types.ModuleType), name


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (127, 1), (1, 15), (64, 2)])
def test_an_output_whose_elements_overlap_is_refused(layer, inputs, strides):
    out = torch.empty(16 * 128 * 2, dtype=torch.bfloat16).as_strided((16, 128), strides)
    with pytest.raises(MoEEpConfigError, match="out has strides .*no element that stands for sev"):
        layer.forward(inputs, out=out)


@pytest.mark.parametrize("strides", [(128, 1), (256, 2), (1, 16), (129, 1), (3, 48)])
def test_an_output_of_any_other_strides_is_written(layer, inputs, strides):
    out = torch.empty(16 * 128 * 3, dtype=torch.bfloat16).as_strided((16, 128), strides)
    assert torch.equal(layer.forward(inputs, out=out), layer.forward(inputs))
