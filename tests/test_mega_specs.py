"""Which builds of the mega kernel a layer gets, and what it does not take, in plain integers."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from layer_cases import make_weights

from moe_ep import MegaConfig, MoEShape, mega_limits
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.config import MegaKernelConfig
from moe_ep.megakernel import mega_moe
from moe_ep.megakernel.formats import prepare
from moe_ep.megakernel.knobs import KNOB_TABLE, MAX_LOCAL_EXPERTS, MAX_SMEM_BYTES, choose_knobs
from moe_ep.megakernel.mega_spec import (
    MAX_LENDING_WIDTH,
    choose_bucket,
    fit_spec,
    make_buckets,
    make_layout,
)
from moe_ep.megakernel.problem import WEIGHT_FORMATS

CAPACITIES = (1, 8, 98, 99, 512, 8192)


def make_shape(**changes: int) -> MoEShape:
    fields = {"num_experts": 32, "top_k": 8, "hidden": 7168, "intermediate": 2048} | changes
    return MoEShape(**fields)


def make_spec(name: str, knobs, shape: MoEShape, num_ranks: int = 1):
    buckets = make_buckets(name, shape, 64, num_ranks)
    layout = make_layout(shape, num_ranks, 64, buckets)
    options = {"weights_format": name, "has_bias13": False, "has_bias2": False}
    return fit_spec(shape=shape, layout=layout, knobs=knobs, **options)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_buckets_ascend_to_the_capacity(name, capacity, num_ranks):
    buckets = make_buckets(name, make_shape(), capacity, num_ranks)
    limits = [bucket.max_tokens for bucket in buckets]
    assert limits == sorted(set(limits)) and limits[-1] == capacity
    widths = [bucket.knobs.max_tile_width for bucket in buckets]
    assert widths == sorted(widths)


def test_a_call_takes_the_narrowest_build_that_its_bound_allows():
    buckets = make_buckets("nvfp4", make_shape(), 2048, 1)
    last = len(buckets) - 1
    assert last >= 3
    assert choose_bucket(buckets, None) == choose_bucket(buckets, 2048) == last
    assert choose_bucket(buckets, 0) == choose_bucket(buckets, buckets[0].max_tokens) == 0
    for i in range(last):
        assert choose_bucket(buckets, buckets[i].max_tokens + 1) == i + 1


def test_builds_of_one_layer_agree_where_every_region_lies():
    """They share the memory, and ranks may launch different builds."""
    shape = make_shape()
    buckets = make_buckets("nvfp4", shape, 4096, 2)
    specs = [make_spec("nvfp4", bucket.knobs, shape, 2) for bucket in buckets]
    assert len({spec.layout.max_tile_width for spec in specs}) > 1
    assert len({tuple(spec.layout.offsets.items()) for spec in specs}) == 1
    assert len({spec.layout.counters for spec in specs}) == 1


@pytest.mark.parametrize("row", KNOB_TABLE, ids=lambda row: f"{row.formats[0]}-{row.max_rows}")
@pytest.mark.parametrize("num_experts", [1, 32, 256, MAX_LOCAL_EXPERTS])
@pytest.mark.parametrize("hidden", [128, 2880, 7168, 8192])
def test_every_build_fits_shared_memory_for_many_experts_and_wide_rows(row, num_experts, hidden):
    for name in row.formats:
        shape = make_shape(num_experts=num_experts, top_k=1, hidden=hidden)
        spec = make_spec(name, row.knobs, shape)
        assert spec.smem_bytes <= MAX_SMEM_BYTES
        assert 2 <= spec.knobs.stages <= row.knobs.stages
        assert spec.num_lent_stages < spec.knobs.stages
        lent = max(spec.stage_weight_bytes, spec.stage_token_bytes) * spec.num_lent_stages
        assert spec.num_lent_stages == 0 or lent >= spec.row_buffer_bytes


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_builds_for_many_rows_lend_nothing_to_dispatch(name):
    shape = make_shape()
    wide = [
        bucket
        for bucket in make_buckets(name, shape, 8192, 1)
        if bucket.knobs.max_tile_width > MAX_LENDING_WIDTH
    ]
    assert wide
    for bucket in wide:
        spec = make_spec(name, bucket.knobs, shape)
        assert spec.knobs == bucket.knobs and spec.knobs.stages >= 3
        assert spec.num_lent_stages == 0


def test_few_experts_keep_all_stages():
    knobs = choose_knobs("nvfp4", 8)
    assert make_spec("nvfp4", knobs, make_shape()).knobs == knobs


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
def test_hidden_and_intermediate_are_multiples_of_16(name):
    make_spec("bf16", choose_knobs("bf16", 8), make_shape(**{name: 528}))
    with pytest.raises(MoEEpConfigError, match=f"{name} must be a multiple of 16"):
        make_spec("bf16", choose_knobs("bf16", 8), make_shape(**{name: 536}))


def test_a_bound_call_keeps_nothing_alive(monkeypatch):
    """Neither the layer nor its weights wait for a collection of garbage."""
    sms = SimpleNamespace(multi_processor_count=132)
    memory = SimpleNamespace(
        num_launched=1,
        heaps=torch.zeros(1),
        local=torch.zeros(1),
        post_mortem=SimpleNamespace(address=0),
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    monkeypatch.setattr(mega_moe.workspace_memory, "acquire", lambda group, layout: memory)
    monkeypatch.setattr(mega_moe, "load", lambda build: build)
    monkeypatch.setattr(mega_moe, "BoundCall", lambda function, cells: (function, cells))
    shape = make_shape(hidden=256, intermediate=128)
    mega = mega_moe.MegaMoE(EpGroup.single("cpu"), shape, "nvfp4", max_tokens_per_rank=8)
    weights = prepare(make_weights(shape, "nvfp4"))
    call = mega._call_for(0, False, weights)
    assert mega._call_for(0, False, weights) is call
    assert mega._call_for(0, True, weights) is not call
    held = [weakref.ref(mega), weakref.ref(weights)]
    gc.disable()
    try:
        del mega, weights
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


# ---- what a layer is told


def reason(shape: MoEShape, config: MegaConfig | None = None, **division) -> str | None:
    division = {"parallel": "ep", "num_ranks": 1} | division
    return mega_limits.layer_misfit(shape, "nvfp4", config or MegaConfig(), **division)


def test_it_can_be_kept_from_layers(monkeypatch):
    monkeypatch.setattr(mega_limits, "PENDING", "not today")
    assert reason(make_shape()) == "not today"


def test_knobs_are_the_tables_tuned_or_given_if_all_their_stages_fit():
    def of(knobs) -> str | None:
        return reason(make_shape(), MegaConfig(megakernel=MegaKernelConfig(knobs=knobs)))

    knobs = choose_knobs("nvfp4", 8)
    assert of(None) is None and of("auto") is None and of(knobs) is None
    assert "knobs have 9 stages; allowed for this layer: at most 5" in of(replace(knobs, stages=9))


def test_several_ranks_need_nvshmem(monkeypatch):
    monkeypatch.setattr(mega_limits, "find_spec", lambda name: None)
    assert "nvshmem4py" in reason(make_shape(), num_ranks=2)
    assert reason(make_shape(), num_ranks=1) is None
    monkeypatch.setattr(mega_limits, "find_spec", lambda name: name)
    assert reason(make_shape(), num_ranks=2) is None


def test_tp_keeps_every_expert_and_divides_the_intermediate(monkeypatch):
    monkeypatch.setattr(mega_limits, "find_spec", lambda name: name)
    tp = {"parallel": "tp", "num_ranks": 8}
    assert reason(make_shape(intermediate=8 * 16), **tp) is None
    assert reason(make_shape(num_experts=3, top_k=2), **tp) is None
    assert reason(make_shape(num_experts=MAX_LOCAL_EXPERTS), **tp) is None
    assert "at most 384" in reason(make_shape(num_experts=MAX_LOCAL_EXPERTS + 1), **tp)
    for intermediate in (8 * 16 + 16, 8 * 8):
        said = reason(make_shape(intermediate=intermediate), **tp)
        assert "multiple of 128 over 8 tp ranks" in said and str(intermediate) in said


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_builds_for_tp_fit_and_round_nothing_before_the_owner(num_ranks):
    shape = make_shape(num_experts=256)
    buckets = make_buckets("nvfp4", shape, 512, num_ranks, "tp")
    layout = make_layout(shape, num_ranks, 512, buckets, "tp")
    options = {"weights_format": "nvfp4", "has_bias13": False, "has_bias2": False}
    for bucket in buckets:
        spec = fit_spec(shape=shape, layout=layout, knobs=bucket.knobs, **options)
        assert spec.layout.num_local_experts == 256
        assert spec.fc1.num_channels == spec.fc2.num_cols == 2048 // num_ranks
        assert spec.fc2.is_fp32 and not spec.fc1.is_fp32


@pytest.mark.parametrize(
    "division, most, said",
    [
        ({"num_ranks": 1}, (2**31 - 1) // 8, "num_ranks * max_tokens_per_rank * top_k"),
        ({"num_ranks": 8}, (2**31 - 1) // 64, "num_ranks * max_tokens_per_rank * top_k"),
        (
            {"num_ranks": 8, "parallel": "tp"},
            2**32 // (8 * 7168),
            "num_ranks * max_tokens_per_rank * hidden",
        ),
    ],
)
def test_the_capacity_ends_where_rows_or_parts_have_no_number(monkeypatch, division, most, said):
    monkeypatch.setattr(mega_limits, "find_spec", lambda name: name)
    shape = make_shape(num_experts=64)
    assert reason(shape, max_tokens_per_rank=most, **division) is None
    assert said in reason(shape, max_tokens_per_rank=most + 1, **division)


def test_each_limit_is_named_at_one_past_it():
    assert reason(make_shape(num_experts=MAX_LOCAL_EXPERTS)) is None
    assert "at most 384" in reason(make_shape(num_experts=MAX_LOCAL_EXPERTS + 1))
    assert reason(make_shape(top_k=32)) is None
    assert "top_k must be at most 32" in reason(make_shape(num_experts=64, top_k=33))
    assert "hidden must be a multiple of 16" in reason(make_shape(hidden=7176))
    said = reason(make_shape(hidden=1 << 17))
    most = int(said.rpartition(" ")[2])
    assert most > 16384 and reason(make_shape(hidden=most)) is None
    assert reason(make_shape(hidden=most + 16)) == said.replace(str(1 << 17), str(most + 16))
    wide = {"num_experts": 2 * MAX_LOCAL_EXPERTS}
    assert "at most 384" in reason(make_shape(num_experts=2 * MAX_LOCAL_EXPERTS + 1), num_ranks=2)
    assert "at most 384" not in (reason(make_shape(**wide), num_ranks=2) or "")
    assert "at least one" in reason(make_shape(num_experts=8), num_ranks=9)
    fp8 = MegaConfig(megakernel=MegaKernelConfig(activations="fp8"))
    assert "activations='fp8'" in reason(make_shape(), fp8)
    assert "preprocess_weights" in reason(make_shape(), MegaConfig(preprocess_weights=False))
