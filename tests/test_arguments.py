"""Arguments of the wrong kind: each is named with its value, and never fails as something else."""

from collections.abc import Callable

import pytest
import torch
from checkpoint_files import SHAPE, make, save
from layer_cases import make_weights

import moe_ep
from moe_ep import MoEEpLayer, MoEWeights
from moe_ep.checkpoint import Checkpoint
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.placement import ExpertMap, place
from moe_ep.quantize import QuantizedTensor, QuantSpec, dequantize, qdq, quantize
from moe_ep.sf_layout import swizzle_sf, unswizzle_sf

WRONG_LOADS = {
    "path": (3, None, ["model"]),
    "layer": (None, 3.0, True, [3]),
    "shape": (None, (8, 2, 256, 128), {"num_experts": 8}),
    "format": (None, 3, ["hf"]),
    "parallel": (None, 1, ["ep"]),
    "rank": ("0", None, 0.0, -1, True),
    "num_ranks": ("1", None, 2.0, 0, torch.tensor(2)),
    "expert_map": ("identity", [0, 1, 2, 3, 4, 5, 6, 7]),
    "gate_up_order": (1, ["gate_first"], True),
    "round_fp16": ("no", 1, None),
    "allow_nonfinite": ("no", 1, None),
    "device": ("bogus", None, 3.5, "cuda:99", ["cpu"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("hf_fused"), make("hf_fused").tensors)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG_LOADS.items() for value in values]
)
def test_load_names_the_argument(folder, name, value):
    arguments = {"path": folder, "layer": 3, "shape": SHAPE, "format": "hf_fused"} | {name: value}
    if name == "parallel":
        arguments["num_ranks"] = 2
    path, layer = arguments.pop("path"), arguments.pop("layer")
    with pytest.raises(MoEEpConfigError, match=name):
        moe_ep.load(path, layer, **arguments)


def nvfp4() -> QuantizedTensor:
    return quantize(torch.ones(16, 32), "nvfp4")


def weights() -> MoEWeights:
    return make_weights(SHAPE)


def given(**fields: object) -> Callable[[], MoEWeights]:
    """The same weights by their fields, some of them wrong."""
    return lambda: MoEWeights(**vars(weights()) | fields)


def update(named: dict, **options: object) -> None:
    layer = MoEEpLayer(SHAPE, weights(), max_tokens_per_rank=8)
    layer.update_weights(named, **{"format": "hf"} | options)


MAP = ExpertMap.identity(8)
CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "Checkpoint(None)": ("path", lambda: Checkpoint(None)),
    "from_dense: list": ("w13 must be a tensor", lambda: MoEWeights.from_dense([1], [2])),
    "from_dense: one dimension": ("w13", lambda: MoEWeights.from_dense(torch.ones(1), None)),
    "from_dense: b2": (
        "b2 must be a tensor",
        lambda: MoEWeights.from_dense(weights().w13, weights().w2, b2=[0.0]),
    ),
    "nvfp4: list": ("w13", lambda: MoEWeights.nvfp4([], 0, 0, 0, up_scale=0, down_scale=0)),
    "mxfp4: sf": (
        "w13_sf must be a tensor",
        lambda: MoEWeights.mxfp4(
            torch.zeros(1, 64, 16).byte(), [127], torch.zeros(1, 32, 16).byte(), [127]
        ),
    ),
    "MoEWeights: w13": ("w13 must be a tensor", given(w13=None)),
    "MoEWeights: num_experts": ("num_experts must be an int", given(num_experts="8")),
    "MoEWeights: expert_ids": ("expert_ids must be a tuple of ints", given(expert_ids=[0] * 8)),
    "MoEWeights: an id": ("expert_ids must be a tuple of ints", given(expert_ids=("0",) * 8)),
    "MoEWeights: rank": ("rank must be an int", given(rank=None)),
    "MoEWeights: format": ("weights_format", given(weights_format=16)),
    "quantize weights": ("weights_format", lambda: weights().quantize(4)),
    "dequantize weights": ("dtype must be one of", lambda: weights().dequantize(torch.int8)),
    "to": ("device 'bogus' cannot be used", lambda: weights().to("bogus")),
    "shard: rank": ("rank must be an int, got '0'", lambda: weights().shard("ep", "0", 2)),
    "quantize: list": ("tensor must be a tensor, got", lambda: quantize([1.0], "nvfp4")),
    "quantize: spec": ("format must be", lambda: quantize(torch.ones(16, 32), None)),
    "quantize: unknown": ("'fp4' is not known", lambda: quantize(torch.ones(16, 32), "fp4")),
    "quantize: out of another spec": (
        "out is of",
        lambda: quantize(torch.ones(16, 32), QuantSpec(format="nvfp4", sf_max=256), out=nvfp4()),
    ),
    "quantize: out of another shape": (
        "out is of",
        lambda: quantize(torch.ones(32, 32), "nvfp4", out=nvfp4()),
    ),
    "quantize: out of torch": (
        "out must be a QuantizedTensor, got Tensor",
        lambda: quantize(torch.ones(16, 32), "nvfp4", out=torch.ones(16, 32)),
    ),
    "quantize: out elsewhere": (
        "shape .16, 32., on meta; allowed: .*, on cpu",
        lambda: quantize(
            torch.ones(16, 32),
            "nvfp4",
            out=QuantizedTensor.empty((16, 32), QuantSpec(format="nvfp4"), "meta"),
        ),
    ),
    "quantize: non-finite": (
        "allow_nonfinite must be a bool",
        lambda: quantize(torch.ones(16, 32), "nvfp4", allow_nonfinite="no"),
    ),
    "quantize: meta": (
        "w is on meta; allowed: a tensor with values",
        lambda: quantize(torch.ones(16, 32, device="meta"), "nvfp4", name="w"),
    ),
    "qdq: integers": ("must be BF16, FP16 or FP32", lambda: qdq(torch.ones(16, 32).int(), "mxfp4")),
    "qdq: list": ("must be a tensor", lambda: qdq([1.0], "mxfp4")),
    "QuantSpec: list": ("format must be", lambda: QuantSpec(format=["nvfp4"])),
    "QuantSpec: option": ("sf_max must be one of", lambda: QuantSpec(format="nvfp4", sf_max="448")),
    "dequantize: tensor": ("q must be", lambda: dequantize(torch.ones(2, 2))),
    "dequantize: dtype": ("dtype must be one of", lambda: dequantize(nvfp4(), torch.int32)),
    "dequantize: dtype's name": ("dtype must be one of", lambda: dequantize(nvfp4(), "float32")),
    "swizzle: list": ("sf must be a tensor", lambda: swizzle_sf([1])),
    "swizzle: vector": ("at least 2 dimensions", lambda: swizzle_sf(torch.zeros(4).byte())),
    "swizzle: wide": ("one-byte", lambda: swizzle_sf(torch.zeros(4, 4))),
    "unswizzle: rows": ("rows", lambda: unswizzle_sf(torch.zeros(512).byte(), "4", 4)),
    "unswizzle: scalar": ("dimensions", lambda: unswizzle_sf(torch.zeros(()).byte(), 4, 4)),
    "ExpertMap: None": ("physical_to_logical", lambda: ExpertMap(8, None)),
    "ExpertMap: floats": ("physical_to_logical", lambda: ExpertMap(2, (0.5, 1.0))),
    "ExpertMap: words": ("physical_to_logical", lambda: ExpertMap(2, "01")),
    "ExpertMap: count": ("num_experts must be an int", lambda: ExpertMap("8", (0,))),
    "ExpertMap: none": ("num_experts must be at least 1", lambda: ExpertMap(0, ())),
    "place: weights": ("weights must be MoEWeights", lambda: place(None, MAP)),
    "place: map": ("expert_map must be an ExpertMap", lambda: place(weights(), [0])),
    "update: name": ("name of a tensor must be a str", lambda: update({5: torch.ones(1)})),
    "update: prefix": ("prefix must be a str", lambda: update({"5": torch.ones(1)}, prefix=5)),
    "update: tensor": (
        "5.up_proj.weight must be a tensor",
        lambda: update({"5.up_proj.weight": [1.0]}),
    ),
    "update: format": ("format must be", lambda: update({"5": torch.ones(1)}, format=["hf"])),
    "update: pairs": ("weights must be MoEWeights, got list, or a mapping", lambda: update([])),
    "update: a name": (
        "weights must be MoEWeights, got str, or",
        lambda: update("5.up_proj.weight"),
    ),
    "update: rounding": (
        "round_fp16 must be a bool",
        lambda: update({"5": torch.ones(1)}, round_fp16="no"),
    ),
    "update: non-finite": (
        "allow_nonfinite must be a bool",
        lambda: update({"5": torch.ones(1)}, allow_nonfinite=1),
    ),
    "update: meta": (
        "5.up_proj.weight is on meta; allowed: a tensor with values",
        lambda: update({"5.up_proj.weight": torch.ones(SHAPE.intermediate, 256, device="meta")}),
    ),
    "update: order": ("gate_up_order", lambda: update({"5": torch.ones(1)}, gate_up_order=3)),
}


@pytest.mark.parametrize("case", CALLS)
def test_every_other_function_names_the_argument(case):
    message, call = CALLS[case]
    with pytest.raises(MoEEpConfigError, match=message):
        call()


def test_numpy_and_torch_integers_are_slots_of_a_map():
    assert ExpertMap(3, torch.tensor([2, 0, 1])) == ExpertMap(3, (2, 0, 1))


def test_a_message_stays_short_whatever_the_value():
    with pytest.raises(MoEEpConfigError) as raised:
        moe_ep.load("x" * 10_000, list(range(10_000)), shape=SHAPE, format="hf")
    assert len(str(raised.value)) < 200
