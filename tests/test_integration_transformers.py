"""Models of transformers with their experts run by MoEEpLayer, against the untouched models.

The oracle is transformers' own 'eager' loop over the experts. Every prompt is a batch of its own,
so that what surrounds the experts is computed alike for any number of ranks.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from model_cases import (
    FAMILIES,
    HIDDEN,
    NUM_EXPERTS,
    NUM_PROMPTS,
    SIZE,
    TOP_K,
    build_model,
    prompts,
    run_model,
    untouched,
)

from moe_ep import EpGroup, MoEEpError, MoEInputs
from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError
from moe_ep.integrations.transformers import (
    KNOWN_MODELS,
    count_flips,
    experts_shape,
    experts_weights,
    find_experts,
    replace_moe_layers,
)
from moe_ep.launch import spawn
from moe_ep.reference import moe_oracle_fp64

# Four processes import transformers and run seven models each: minutes on busy cores.
pytestmark = pytest.mark.timeout(900)


@dataclass
class Outcome:
    """One prompt through a replaced model, and how that stands to the untouched one."""

    logits: torch.Tensor
    difference: torch.Tensor  # |replaced - eager BF16|
    noise: torch.Tensor  # |eager BF16 - eager FP32|
    flips: tuple[int, int]
    noise_flips: tuple[int, int]
    shared_calls: list[int]  # of each shared-experts module


@dataclass(frozen=True)
class Case:
    """What is replaced, and how."""

    family: str
    parallel: str = "ep"
    weights_format: str = "bf16"

    @property
    def id(self) -> str:
        return f"{self.family}-{self.parallel}-{self.weights_format}"


DENSE_CASES = [Case(family, parallel) for family in FAMILIES for parallel in ("ep", "tp")]
QUANTIZED_CASES = [
    *(Case("Qwen3-MoE", "ep", fmt) for fmt in ("nvfp4", "mxfp4", "mxfp8", "fp8_block")),
    *(Case("gpt-oss", "ep", fmt) for fmt in ("nvfp4", "mxfp4", "mxfp8", "fp8_block")),
    Case("Qwen3-MoE", "tp", "nvfp4"),
    Case("gpt-oss", "tp", "mxfp4"),
]


def compare(case: Case, group: EpGroup, oracles: dict) -> dict[int, Outcome]:
    """Prompt index -> outcome, for this rank's share of the prompts. Collective over `group`.

    `oracles` keeps the untouched models' results, by family, format and prompt.
    """
    share = NUM_PROMPTS // group.num_ranks
    mine = range(group.rank * share, (group.rank + 1) * share)
    keys = {idx: (case.family, case.weights_format, idx) for idx in mine}
    if any(key not in oracles for key in keys.values()):
        models = untouched(case.family, case.weights_format)
        for idx, key in keys.items():
            oracles[key] = [run_model(model, prompts()[idx]) for model in models]
    model = build_model(case.family)
    layers = replace_moe_layers(
        model,
        group,
        max_tokens_per_rank=64,
        parallel=case.parallel,
        weights_format=case.weights_format,
    )
    calls: list[list[int]] = []
    for name, module in model.named_modules():
        if name.endswith(("shared_experts", "shared_expert")):
            calls.append([])
            module.register_forward_hook(lambda *_, seen=calls[-1]: seen.append(1))
    outcomes = {}
    for idx in mine:
        logits, routing = run_model(model, prompts()[idx])
        (eager, eager_routing), (exact, exact_routing) = oracles[keys[idx]]
        outcomes[idx] = Outcome(
            logits,
            (logits - eager).abs(),
            (eager - exact).abs(),
            count_flips(routing, eager_routing),
            count_flips(eager_routing, exact_routing),
            [len(seen) for seen in calls],
        )
        for seen in calls:
            seen.clear()
    for layer in layers.values():
        layer.destroy()
    return outcomes


def worker(rank: int, _num_ranks: int) -> dict[tuple[int, Case, int], Outcome]:
    """Four ranks together; of them ranks 0 and 1 as a pair, and rank 3 alone."""
    groups = [EpGroup.from_process_group(dist.group.WORLD, "cpu")]
    pair = dist.new_group([0, 1])
    if rank < 2:
        groups.append(EpGroup.from_process_group(pair, "cpu"))
    elif rank == 3:
        groups.append(EpGroup.single("cpu"))
    outcomes, oracles = {}, {}
    for group in groups:
        for case in DENSE_CASES + (QUANTIZED_CASES if group.num_ranks == 2 else []):
            for idx, outcome in compare(case, group, oracles).items():
                outcomes[group.num_ranks, case, idx] = outcome
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[int, Case, int], Outcome]:
    """(number of ranks, case, prompt index) -> outcome."""
    per_rank = spawn.run(worker, 4, timeout_s=840)
    return {key: outcome for found in per_rank for key, outcome in found.items()}


def ids(case: Case) -> str:
    return case.id


def assert_less_than_noise(found: list[Outcome]) -> None:
    """Prints the ratios and router flips too (`pytest -rP` shows them)."""
    difference = torch.cat([outcome.difference for outcome in found])
    noise = torch.cat([outcome.noise for outcome in found])
    mean_ratio = float(difference.mean() / noise.mean())
    largest_ratio = float(difference.max() / noise.max())
    flips, routings = map(sum, zip(*(outcome.flips for outcome in found), strict=True))
    noise_flips = sum(outcome.noise_flips[0] for outcome in found)
    print(
        f"mean ratio {mean_ratio:.2f}, largest ratio {largest_ratio:.2f}, "
        f"router flips {flips}, by BF16 noise {noise_flips}, of {routings}"
    )
    assert mean_ratio <= 1
    assert largest_ratio <= 2


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("case", DENSE_CASES, ids=ids)
def test_logits_differ_less_than_the_models_own_bf16_noise(outcomes, case, num_ranks):
    assert_less_than_noise([outcomes[num_ranks, case, idx] for idx in range(NUM_PROMPTS)])


@pytest.mark.parametrize("case", QUANTIZED_CASES, ids=ids)
def test_quantized_experts_are_as_good_as_the_model_with_those_values(outcomes, case):
    assert_less_than_noise([outcomes[2, case, idx] for idx in range(NUM_PROMPTS)])


@pytest.mark.parametrize("family", FAMILIES)
def test_ep_logits_have_the_same_bits_on_1_2_and_4_ranks(outcomes, family):
    logits = {
        ranks: torch.cat([outcomes[ranks, Case(family), i].logits for i in range(NUM_PROMPTS)])
        for ranks in (1, 2, 4)
    }
    assert logits[1].count_nonzero() > 0.9 * logits[1].numel()
    assert torch.equal(logits[1], logits[2])
    assert torch.equal(logits[1], logits[4])


@pytest.mark.parametrize("family", ["Qwen3.5-MoE", "DeepSeek-V3", "DeepSeek-V4", "GLM-4-MoE"])
def test_shared_experts_run_once_per_forward_on_every_rank(outcomes, family):
    for idx in range(NUM_PROMPTS):
        calls = outcomes[4, Case(family), idx].shared_calls
        assert calls
        assert set(calls) == {1}


@pytest.mark.parametrize("family", FAMILIES)
def test_canonical_weights_and_activation_give_the_eager_experts_in_fp64(family):
    experts = next(iter(find_experts(build_model(family)).values()))
    generator = torch.Generator().manual_seed(3)
    x_TH = torch.randn(40, HIDDEN, generator=generator).to(torch.bfloat16)
    ids_TK = torch.rand(40, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
    weights_TK = torch.rand(40, TOP_K, generator=generator)
    shape, weights = experts_shape(experts), experts_weights(experts)
    eager = copy.deepcopy(experts).double()
    want = eager(x_TH.double(), ids_TK, weights_TK.double())
    got = moe_oracle_fp64(MoEInputs(x_TH, ids_TK, weights_TK), weights, shape)
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)


def replaced_qwen3() -> hf.PreTrainedModel:
    model = build_model("Qwen3-MoE")
    replace_moe_layers(model, max_tokens_per_rank=64)
    return model


@torch.inference_mode()
def test_id_num_experts_is_a_masked_slot_as_in_transformers():
    eager = next(iter(find_experts(build_model("Qwen3-MoE")).values()))
    ours = next(iter(find_experts(replaced_qwen3()).values()))
    x_TH = torch.randn(3, HIDDEN).to(torch.bfloat16)
    ids_TK = torch.tensor([[0, NUM_EXPERTS], [NUM_EXPERTS, NUM_EXPERTS], [5, 2]])
    weights_TK = torch.tensor([[0.5, 0.7], [0.5, 0.5], [0.3, 0.6]])
    got, want = ours(x_TH, ids_TK, weights_TK), eager(x_TH, ids_TK, weights_TK)
    assert torch.equal(got[1], torch.zeros(HIDDEN, dtype=torch.bfloat16))
    assert (got - want).norm() < 0.01 * want.norm()


def test_replaced_model_releases_its_own_expert_parameters():
    model = replaced_qwen3()
    assert not [name for name in model.state_dict() if ".experts." in name]
    assert not [name for name, _ in model.named_parameters() if ".experts." in name]


@torch.inference_mode()
def test_a_model_is_replaced_once():
    model = build_model("Mixtral")
    replace_moe_layers(model, EpGroup.single("cpu"), max_tokens_per_rank=8)
    with pytest.raises(MoEEpStateError, match="runs a MoEEpLayer already"):
        replace_moe_layers(model, EpGroup.single("cpu"), max_tokens_per_rank=8)


def test_model_that_shares_a_replaced_models_config_raises():
    model = build_model("Qwen3-MoE")
    untouched = hf.Qwen3MoeForCausalLM(model.config).to(torch.bfloat16)
    replace_moe_layers(model, max_tokens_per_rank=64)
    with pytest.raises(MoEEpStateError, match="holds no MoEEpLayer"):
        untouched(input_ids=torch.zeros(1, 2, dtype=torch.int64))


def test_unknown_experts_are_refused_with_the_list_of_known_models():
    config = hf.OlmoeConfig(
        **SIZE, num_hidden_layers=1, intermediate_size=32, num_experts=4, num_experts_per_tok=2
    )
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with pytest.raises(MoEEpConfigError, match="OlmoeExperts") as raised:
        replace_moe_layers(model, max_tokens_per_rank=8)
    assert all(known.family in str(raised.value) for known in KNOWN_MODELS.values())


def test_model_without_experts_is_refused_with_the_list_of_known_models():
    config = hf.LlamaConfig(**SIZE, num_hidden_layers=1, intermediate_size=32)
    model = hf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(MoEEpConfigError, match="no routed experts.*Mixtral.*gpt-oss"):
        replace_moe_layers(model, max_tokens_per_rank=8)


def test_fp32_model_is_refused_naming_parameter_and_dtype():
    with pytest.raises(MoEEpError, match=r"gate_up_proj.*torch\.float32.*bfloat16"):
        replace_moe_layers(build_model("Qwen3-MoE").float(), max_tokens_per_rank=8)


def test_weights_that_cannot_be_quantised_are_named_with_their_module_and_expert():
    model = build_model("GLM-4-MoE")
    name, experts = list(find_experts(model).items())[-1]
    experts.down_proj.data[3, 5, 7] = float("nan")
    message = f"{name}: down matrix of expert 3 holds NaN or Inf"
    with pytest.raises(MoEEpConfigError, match=message):
        replace_moe_layers(model, max_tokens_per_rank=64, weights_format="nvfp4")


def refused_on_rank_1(rank: int, _num_ranks: int) -> list[str]:
    """What each rank raises where rank 1 alone has a reason; then a model that both replace."""
    raised = []
    for spoil in (spoil_expert_7, torch.nn.Module.float):
        model = build_model("Mixtral")
        if rank == 1:
            spoil(model)
        with pytest.raises(MoEEpConfigError) as refusal:
            replace_moe_layers(model, max_tokens_per_rank=64, weights_format="mxfp8")
        raised.append(str(refusal.value))
    deeper = build_model("Mixtral").config
    deeper.num_hidden_layers = 3
    for other in (build_model("Qwen3-MoE"), hf.MixtralForCausalLM(deeper).to(torch.bfloat16)):
        model = other if rank == 1 else build_model("Mixtral")  # of the same sizes
        with pytest.raises(MoEEpConfigError) as refusal:
            replace_moe_layers(model, max_tokens_per_rank=64)
        raised.append(str(refusal.value))
    replace_moe_layers(build_model("Mixtral"), max_tokens_per_rank=64, weights_format="mxfp8")
    return raised


def spoil_expert_7(model: hf.PreTrainedModel) -> None:
    """Which only the second of two ranks quantises."""
    next(iter(find_experts(model).values())).down_proj.data[7, 5, 7] = float("inf")


def test_what_one_rank_refuses_all_raise_at_once():
    for rank, raised in enumerate(spawn.run(refused_on_rank_1, 2, timeout_s=240)):
        assert all(("rank 1" in text) == (rank == 0) for text in raised[:2])
        assert "layers.0.mlp.experts: down matrix of expert 7 holds NaN or Inf" in raised[0]
        assert "is torch.float32; allowed: torch.bfloat16" in raised[1]
        assert "model is Qwen3MoeForCausalLM, rank 0 has MixtralForCausalLM" in raised[2]
        assert "experts_modules is 3, rank 0 has 2" in raised[3]


def test_count_flips_ignores_the_order_of_the_slots():
    routing = {"a": [torch.tensor([[0, 1], [2, 3]])]}
    assert count_flips(routing, {"a": [torch.tensor([[1, 0], [2, 4]])]}) == (1, 2)
