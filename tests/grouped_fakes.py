"""Plain torch in the place of the Hopper kernels and of torch.cuda, so that the layer around them
runs on a CPU. The kernels themselves are held to the same specification in tests/gpu.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from moe_ep import DispatchPlan, MoEWeights, grouped, grouped_limits
from moe_ep.megakernel import launch_order
from moe_ep.megakernel.formats import PreparedWeights, restore
from moe_ep.megakernel.permute_sm90 import PermuteConfig
from moe_ep.reference import activate, combine_terms, fc1_sums, fc2_sums

POISON = float("nan")


class FakeGemm:
    """`GroupedGemm` for bf16 weights, read back from their prepared bytes."""

    def __init__(self, weights_format: str, **options: object) -> None:
        assert weights_format == "bf16"
        self.activation = options["activation"]
        self.terms_are_fp32 = options["terms_are_fp32"]

    def kernel_builds(self) -> list:
        return []

    def warmup(self) -> None:
        pass

    def fc1(self, x_pool, offsets, prepared, out_hidden) -> None:
        weights, bounds = dense(prepared), offsets.tolist()
        for expert in range(prepared.num_local_experts):
            rows = slice(bounds[expert], bounds[expert + 1])
            sums = fc1_sums(x_pool[rows], weights, expert)
            out_hidden[rows] = activate(sums, self.activation).bfloat16()

    def fc2(self, hidden, offsets, prepared, out_terms) -> None:
        weights, bounds = dense(prepared), offsets.tolist()
        for expert in range(prepared.num_local_experts):
            rows = slice(bounds[expert], bounds[expert + 1])
            sums = fc2_sums(hidden[rows], weights, expert)
            out_terms[rows] = sums if self.terms_are_fp32 else sums.bfloat16()


def dense(prepared: PreparedWeights) -> MoEWeights:
    hidden, intermediate = prepared.hidden, prepared.intermediate
    fc1_rows = (2 if prepared.is_gated else 1) * intermediate
    w13 = [restore(e, "bf16", fc1_rows, hidden, is_paired=prepared.is_gated) for e in prepared.w13]
    w2 = [restore(e, "bf16", hidden, intermediate, is_paired=False) for e in prepared.w2]
    w13, w2 = (torch.stack([codes for codes, _ in experts]) for experts in (w13, w2))
    biases = {"b13": prepared.b13, "b2": prepared.b2}
    return MoEWeights.from_dense(w13, w2, is_gated=prepared.is_gated, **biases)


class FakePermute:
    def __init__(self, config: PermuteConfig) -> None:
        self.config = config

    def __call__(
        self, topk_ids, *, num_experts, first_expert, status, hidden_states, out_pool, **outputs
    ) -> None:
        for tensor in (topk_ids, hidden_states):
            assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        assert (topk_ids.dtype == torch.int64) == self.config.ids_are_int64
        plan = DispatchPlan.from_topk_ids(topk_ids, num_experts=num_experts)
        num_rows = int(plan.offsets[-1])
        out_pool.fill_(POISON)
        out_pool[:num_rows] = plan.gather(hidden_states)[:num_rows]
        for name in ("counts", "offsets", "src_slot", "pool_row"):
            value = getattr(plan, name)
            outputs[f"out_{name}"].view(-1)[: value.numel()] = value.view(-1)
        if int(plan.status):
            status.copy_(plan.status)


class FakeCombine:
    def __init__(self, _config: object) -> None:
        pass

    def __call__(self, terms, pool_row, topk_weights, out) -> None:
        self.last_out = out
        for tensor in (topk_weights, out):
            assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        rows = pool_row.long().clamp(min=0)
        out.copy_(combine_terms(terms[rows], pool_row, topk_weights))


def use_fakes(replace: Callable[[object, str, object], None] = setattr) -> SimpleNamespace:
    """Put the fakes in place; `replace` is `setattr` or `monkeypatch.setattr`.

    What comes back steers torch.cuda: `is_capturing`, `stream`, and `compiled`, all builds that
    were asked for.
    """
    state = SimpleNamespace(is_capturing=False, stream=FakeStream(), compiled=[])
    replace(grouped, "GroupedGemm", FakeGemm)
    replace(grouped, "Permute", FakePermute)
    replace(grouped, "Combine", FakeCombine)
    replace(grouped, "compile_all", state.compiled.extend)
    replace(grouped_limits, "device_misfit", lambda device: None)
    replace(torch.cuda, "is_current_stream_capturing", lambda: state.is_capturing)
    replace(torch.cuda, "current_stream", lambda device=None: state.stream)
    replace(launch_order, "stream_handle", lambda device: id(state.stream))
    replace(torch.cuda, "synchronize", lambda device=None: None)
    replace(torch.cuda, "device", nullcontext)
    replace(torch.cuda, "current_device", lambda: None)
    return state


class FakeStream:
    """Remembers what it was told to wait for."""

    def __init__(self) -> None:
        self.waited_for = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited_for.append(other)
