"""The host side of the layer over the mega kernel, on a CPU: the kernel is the specification."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from layer_cases import make_inputs, make_weights

from moe_ep import MoEInputs, MoEShape, mega
from moe_ep.comm.errors import (
    MoEEpConfigError,
    MoEEpStateError,
    MoEEpTimeoutError,
    MoEEpTransportError,
)
from moe_ep.comm.group import EpGroup
from moe_ep.config import MegaKernelConfig
from moe_ep.megakernel.knobs import KNOB_TABLE
from moe_ep.megakernel.mega_spec import Bucket
from moe_ep.reference import moe_reference

SHAPE = MoEShape(num_experts=4, top_k=2, hidden=32, intermediate=32)
CAPACITY = 8


class FakeMega:
    """`MegaMoE` for one rank; refuses tensors that the kernel could not take."""

    def __init__(self, group, shape, weights_format, **options) -> None:
        self.shape, self.options = shape, options
        self.buckets = (Bucket(3, None), Bucket(options["max_tokens_per_rank"], None))
        if isinstance(options["knobs"], tuple):
            self.buckets = options["knobs"]
        self.num_bytes, self.num_warmups, self.calls = 1000, 0, []
        self.found, self.codes = None, []

    def warmup(self) -> None:
        self.num_warmups += 1

    def forward(self, x, topk_ids, topk_weights, weights, out, *, max_tokens=None) -> None:
        for tensor in (x, topk_ids, topk_weights, out):
            assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        self.calls.append((len(x), topk_ids.dtype, max_tokens))
        out.copy_(moe_reference(MoEInputs(x, topk_ids, topk_weights), weights, self.shape))

    def refuse(self, code, weights) -> None:
        self.codes.append(code)

    def check(self, refusals=()) -> None:
        assert refusals == mega.ARGUMENTS
        if self.found:
            error, self.found = self.found, None
            raise error

    def destroy(self) -> None:
        self.calls = None


def fake_prepare(weights, out=None):
    if out is None:
        return weights
    for name, tensor in out.tensors.items():
        tensor.copy_(getattr(weights, name))
    return out


@pytest.fixture
def cuda(monkeypatch) -> SimpleNamespace:
    state = SimpleNamespace(is_capturing=False, agreed=[])
    monkeypatch.setattr(mega, "MegaMoE", FakeMega)
    monkeypatch.setattr(mega, "prepare", fake_prepare)
    monkeypatch.setattr(mega, "agree", lambda *args: state.agreed.append(args[-1]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.is_capturing)
    return state


def make_backend(
    num_ranks: int = 1, liveness=None, parallel: str = "ep", **config
) -> mega.MegaBackend:
    group = EpGroup(
        rank=num_ranks - 1,
        num_ranks=num_ranks,
        device=torch.device("cpu"),
        global_ranks=tuple(range(num_ranks)),
    )
    kernel = MegaKernelConfig(**config)
    return mega.MegaBackend(
        *(SHAPE, make_weights(SHAPE), group, CAPACITY, kernel, liveness, 60.0), parallel=parallel
    )


def test_a_call_is_the_layer_for_any_strides_and_any_out(cuda):
    backend, inputs = make_backend(), make_inputs(SHAPE, 5, seed=1, masked=0.2)
    expected = moe_reference(inputs, make_weights(SHAPE), SHAPE)
    assert torch.equal(backend.forward(inputs, CAPACITY), expected)
    strided = MoEInputs(
        torch.stack([inputs.hidden_states] * 2, dim=1)[:, 1],
        inputs.topk_ids.long().T.contiguous().T,
        inputs.topk_weights.repeat(1, 2)[:, :2],
    )
    out = torch.empty(5, 2 * SHAPE.hidden, dtype=torch.bfloat16)[:, ::2]
    assert backend.forward(strided, 5, out) is out
    assert torch.equal(out, expected)
    whole = torch.empty(5, SHAPE.hidden, dtype=torch.bfloat16)
    assert backend.forward(inputs, 5, whole) is whole
    assert torch.equal(whole, expected)
    assert backend._mega.calls[-2:] == [(5, torch.int64, 5), (5, torch.int32, 5)]


def test_warm_up_launches_every_build_with_both_kinds_of_ids_once(cuda):
    backend = make_backend()
    backend.forward(make_inputs(SHAPE, 2, seed=1), CAPACITY)
    backend.forward(make_inputs(SHAPE, 2, seed=2), CAPACITY)
    assert backend._mega.num_warmups == 1
    warm = [(n, dtype, n) for dtype in (torch.int32, torch.int64) for n in (3, CAPACITY)]
    assert backend._mega.calls[:4] == warm
    assert len(backend._mega.calls) == 6


def test_a_capture_needs_a_warm_layer(cuda):
    backend = make_backend()
    cuda.is_capturing = True
    with pytest.raises(MoEEpStateError, match="warm up first"):
        backend.require_callable()
    with pytest.raises(MoEEpStateError, match="outside the capture"):
        backend.check()
    cuda.is_capturing = False
    backend.warmup()
    cuda.is_capturing = True
    backend.require_callable()


def test_what_a_kernel_found_is_raised_by_the_next_call_and_by_check(cuda):
    backend = make_backend()
    for raised in (backend.require_callable, backend.check):
        backend._mega.found = MoEEpConfigError("topk_ids[0, 1] was 9")
        with pytest.raises(MoEEpConfigError, match="was 9"):
            raised()
        raised()


def test_an_update_goes_to_the_same_addresses(cuda):
    backend, inputs = make_backend(), make_inputs(SHAPE, 4, seed=3)
    address, other = backend._prepared.w13.data_ptr(), make_weights(SHAPE, seed=7)
    backend.update_weights(other)
    assert backend._prepared.w13.data_ptr() == address
    assert torch.equal(backend.forward(inputs, 4), moe_reference(inputs, other, SHAPE))


def test_settings_reach_the_kernel_and_memory_is_told(cuda):
    backend = make_backend(max_sms=20)
    options = backend._mega.options
    assert options["max_sms"] == 20 and options["timeout_s"] == 60.0
    assert options["max_tokens_per_rank"] == CAPACITY and not options["has_bias13"]
    assert options["parallel"] == "ep"
    assert backend.memory["shared workspace"] == 1000
    assert backend.memory["prepared weights"] == make_weights(SHAPE).num_bytes
    assert cuda.agreed == ["workspace"]


def test_a_workspace_that_a_peer_could_not_have_is_given_back(cuda, monkeypatch):
    made = []
    monkeypatch.setattr(mega, "MegaMoE", lambda *a, **o: made.append(FakeMega(*a, **o)) or made[0])

    def peer_fails(group, record, refusal, timeout_s, phase):
        raise MoEEpConfigError("rank 0: the workspace needs more")

    monkeypatch.setattr(mega, "agree", peer_fails)
    with pytest.raises(MoEEpConfigError, match="rank 0"):
        make_backend(2)
    assert made[0].calls is None  # destroyed


def test_a_layer_of_tp_weights_divides_the_intermediate(cuda):
    backend = make_backend(parallel="tp")
    assert backend._mega.options["parallel"] == "tp"


def test_one_rank_refuses_by_itself(cuda):
    backend = make_backend()
    with pytest.raises(MoEEpConfigError, match="^hidden_states has 9 tokens"):
        backend.refuse("hidden_states has 9 tokens")
    assert not backend._mega.codes


# ---- knobs="auto"


class FakeTuner:
    """`Tuner` that knows `kept`, and finds `FOUND`."""

    FOUND = (Bucket(5, "tuned"), Bucket(CAPACITY, "tuned"))
    kept = None
    num_runs = 0

    def __init__(self, group, shape, prepared, max_tokens, *, parallel, max_sms, timeout_s):
        assert (max_tokens, parallel, max_sms) == (CAPACITY, "ep", 7)

    def known(self):
        return FakeTuner.kept

    def run(self):
        FakeTuner.num_runs += 1
        return SimpleNamespace(buckets=self.FOUND)


@pytest.fixture
def tuner(cuda, monkeypatch) -> type[FakeTuner]:
    monkeypatch.setattr(mega, "Tuner", FakeTuner)
    monkeypatch.setattr(FakeTuner, "kept", None)
    monkeypatch.setattr(FakeTuner, "num_runs", 0)
    return FakeTuner


def test_warm_up_tunes_once_and_never_a_call(tuner):
    backend, inputs = make_backend(knobs="auto", max_sms=7), make_inputs(SHAPE, 4, seed=3)
    table = backend._mega
    expected = backend.forward(inputs, 4)
    assert tuner.num_runs == 0 and backend._mega is table and table.options["knobs"] is None
    for _ in range(2):
        backend.warmup()
        assert tuner.num_runs == 1 and backend._mega.buckets == tuner.FOUND
    assert table.calls is None  # destroyed
    assert torch.equal(backend.forward(inputs, 4), expected)


def test_builds_tuned_earlier_are_taken_at_once(tuner, monkeypatch):
    monkeypatch.setattr(tuner, "kept", (Bucket(2, "kept"), Bucket(CAPACITY, "kept")))
    backend = make_backend(knobs="auto", max_sms=7)
    assert backend._mega.buckets == tuner.kept
    backend.warmup()
    assert tuner.num_runs == 0 and backend._mega.buckets == tuner.kept


def test_knobs_that_are_given_or_the_tables_are_not_tuned(tuner):
    for knobs in (None, KNOB_TABLE[0].knobs):
        backend = make_backend(knobs=knobs)
        backend.warmup()
        assert backend._mega.options["knobs"] == knobs
    assert tuner.num_runs == 0


# ---- several ranks: each call is one launch, whatever it raises


@pytest.mark.parametrize(
    ("reason", "argument"),
    [
        ("inputs must be MoEInputs, got None", "inputs"),
        ("topk_weights has dtype torch.float64", "topk_weights"),
        ("max_tokens is 9; allowed: 0 to 8", "max_tokens"),
        ("out has strides (0, 1)", "out"),
    ],
)
def test_a_refusing_rank_launches_its_part_and_names_itself(cuda, reason, argument):
    backend = make_backend(num_ranks=2)
    with pytest.raises(MoEEpConfigError, match=f"^rank 1: {argument}"):
        backend.refuse(reason)
    assert backend._mega.num_warmups == 1  # as the others, in their forward
    assert [mega.ARGUMENTS[code] for code in backend._mega.codes] == [argument]


def test_in_a_capture_a_refusal_launches_nothing(cuda):
    backend = make_backend(num_ranks=2)
    backend.warmup()
    cuda.is_capturing = True
    with pytest.raises(MoEEpConfigError, match="rank 1: out"):
        backend.refuse("out is None")
    assert not backend._mega.codes


def test_what_an_earlier_call_left_is_raised_once_after_the_own_step(cuda):
    backend, inputs = make_backend(num_ranks=2), make_inputs(SHAPE, 4, seed=3)
    backend.warmup()
    num_launched = len(backend._mega.calls)
    backend._mega.found = MoEEpConfigError("rank 0 refused its topk_ids")
    backend.require_callable()
    out = torch.zeros_like(inputs.hidden_states)
    with pytest.raises(MoEEpConfigError, match="rank 0 refused"):
        backend.forward(inputs, 4, out)
    assert len(backend._mega.calls) == num_launched + 1
    assert torch.equal(out, moe_reference(inputs, make_weights(SHAPE), SHAPE))
    backend.require_callable()
    backend.forward(inputs, 4, out)


def test_what_a_cold_first_call_finds_of_another_layer_does_not_keep_it_from_its_step(cuda):
    """Layers of one geometry share the record; the other ranks have launched and wait."""
    backend, inputs = make_backend(num_ranks=2), make_inputs(SHAPE, 4, seed=3)
    backend.require_callable()
    backend._mega.found = MoEEpConfigError("topk_ids[0, 0] was 99 in an earlier call")
    out = torch.zeros_like(inputs.hidden_states)
    with pytest.raises(MoEEpConfigError, match="was 99 in an earlier call"):
        backend.forward(inputs, 4, out)
    assert backend.is_warm and torch.equal(out, moe_reference(inputs, make_weights(SHAPE), SHAPE))
    backend.require_callable()
    backend.forward(inputs, 4, out)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_time_out_keeps_the_record_and_names_ranks_without_a_sign_of_life(cuda, is_lost):
    def raise_failure(phase, step, cause):
        assert (phase, step) == ("fc1", 7)
        if is_lost:
            raise MoEEpTimeoutError("no sign of life from rank 3", ranks=[3])
        raise MoEEpTransportError("every rank is alive")

    backend = make_backend(num_ranks=4, liveness=SimpleNamespace(raise_failure=raise_failure))
    backend._mega.found = MoEEpTimeoutError(
        "step 7", phase="fc1", step=7, ranks=[2], expert=5, expected=64, seen=63
    )
    with pytest.raises(MoEEpTimeoutError, match="rank 3" if is_lost else "alive") as error:
        backend.require_callable()
    found = error.value
    assert found.ranks == ((3,) if is_lost else (2,))
    assert (found.phase, found.step, found.expert) == ("fc1", 7, 5)
    assert (found.expected, found.seen) == (64, 63)


def test_all_ranks_agree_that_workspace_and_kernels_are_there(cuda, monkeypatch):
    def fail(self) -> None:
        raise MoEEpConfigError("kernel does not compile")

    def agree(group, fields, refusal, timeout_s, topic) -> None:
        assert timeout_s >= 60.0
        if refusal is not None:
            raise refusal

    monkeypatch.setattr(mega, "agree", agree)
    monkeypatch.setattr(FakeMega, "warmup", fail)
    backend = make_backend(num_ranks=2)
    with pytest.raises(MoEEpConfigError, match="does not compile"):
        backend.warmup()
    assert not backend._mega.calls
