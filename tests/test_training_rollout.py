"""A model trained on `qdq` weights and the same model served from NVFP4 agree.

Trainer: transformers' eager experts over BF16 weights that `qdq` rounds in the forward pass.
Rollout: the same master weights, quantised to NVFP4 and run by `MoEEpLayer` (W4A16). Between them
stand the BF16 rounding of q * s * D in the trainer and the order of sums. The yardstick is the
trainer's own noise, BF16 against FP32.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
import transformers as hf
from model_cases import NUM_EXPERTS, build_model
from model_errors import oracle_fp64, recorded_calls
from oracles import relative_error
from torch.nn.utils import parametrize

from moe_ep.integrations.transformers import (
    experts_shape,
    experts_weights,
    replace_moe_layers,
)
from moe_ep.quantize import qdq

NUM_TOKENS = 64


def experts_of(model: hf.PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Experts modules by name; `find_experts` does not know parametrized classes."""
    named = model.named_modules()
    return {name: module for name, module in named if name.endswith(".mlp.experts")}


class QdqMatrices(torch.nn.Module):
    """[E, rows, cols] weights rounded through NVFP4, `num_halves` matrices in each expert."""

    def __init__(self, num_halves: int) -> None:
        super().__init__()
        self.num_halves = num_halves

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return qdq(w.unflatten(1, (self.num_halves, -1)), "nvfp4").flatten(1, 2)


@pytest.fixture(scope="module")
def master() -> hf.PreTrainedModel:
    return build_model("Qwen3-MoE")


@pytest.fixture(scope="module")
def trainer(master) -> hf.PreTrainedModel:
    model = copy.deepcopy(master)
    for experts in experts_of(model).values():
        parametrize.register_parametrization(experts, "gate_up_proj", QdqMatrices(2))
        parametrize.register_parametrization(experts, "down_proj", QdqMatrices(1))
    return model


@pytest.fixture(scope="module")
def rollout(master) -> Iterator[hf.PreTrainedModel]:
    model = copy.deepcopy(master)
    layers = replace_moe_layers(model, max_tokens_per_rank=NUM_TOKENS, weights_format="nvfp4")
    yield model
    for layer in layers.values():
        layer.destroy()


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.randint(256, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


def log_probabilities(model: hf.PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), parametrize.cached():
        return model(prompt, use_cache=False).logits[0].double().log_softmax(dim=-1)


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> float:
    """Mean KL(p || q) over the tokens."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean().item()


def test_experts_of_trainer_and_rollout_give_the_same_outputs(master, trainer, rollout, prompt):
    with recorded_calls(experts_of(trainer)) as calls:
        log_probabilities(trainer, prompt)
    assert len(calls) == 2
    for name, x, ids, topk_weights, _ in calls:
        weights = experts_weights(experts_of(master)[name]).quantize("nvfp4")
        shape = experts_shape(experts_of(master)[name])
        want = oracle_fp64(weights, shape, x, ids, topk_weights)
        with torch.no_grad(), parametrize.cached():
            trained = experts_of(trainer)[name](x, ids, topk_weights)
            served = experts_of(rollout)[name](x, ids, topk_weights)
        assert relative_error(served, want) < 0.0032  # a term 0.0026, the output's rounding 0.0017
        assert relative_error(served, want) < relative_error(trained, want) < 0.0085
        assert relative_error(served, trained) < 0.0085


def test_token_distributions_differ_less_than_bf16_noise(master, trainer, rollout, prompt):
    in_bf16 = log_probabilities(trainer, prompt)
    noise = divergence(log_probabilities(in_fp32(master, trainer), prompt), in_bf16)
    assert divergence(in_bf16, log_probabilities(rollout, prompt)) <= noise
    # Serving what was not trained for is far outside: the bound tells them apart.
    untrained = log_probabilities(master, prompt)
    assert divergence(untrained, log_probabilities(rollout, prompt)) > 3 * noise


def in_fp32(master: hf.PreTrainedModel, trainer: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """The trainer's rounded BF16 weights, everything computed in FP32."""
    model = copy.deepcopy(master)
    for name, experts in experts_of(trainer).items():
        for matrix in ("gate_up_proj", "down_proj"):
            getattr(model.get_submodule(name), matrix).data = getattr(experts, matrix).detach()
    return model.float()


def test_training_reaches_the_master_weights_through_the_rounding(trainer, prompt):
    model = copy.deepcopy(trainer)
    with parametrize.cached():
        model(prompt, labels=prompt, use_cache=False).loss.backward()
    for experts in experts_of(model).values():
        for name in ("gate_up_proj", "down_proj"):
            grad = experts.parametrizations[name].original.grad
            assert torch.isfinite(grad).all()
            assert (grad.flatten(1).abs().amax(dim=1) > 0).sum() >= NUM_EXPERTS // 2
