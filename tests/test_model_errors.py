"""Weight formats x models: the error against FP64 and against the model's own BF16 noise.

The oracle of the experts is `moe_oracle_fp64` on the weights as the format holds them and on what
the model gave its experts; that of the logits is the untouched model with those weights, whose own
noise is its BF16 run against its FP32 run. The README's table is what this prints:

    pytest -q -rP tests/test_model_errors.py | grep '^|'
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import transformers as hf
from model_cases import FAMILIES, NUM_EXPERTS, build_model, prompts, run_model, untouched

from moe_ep import EpGroup, MoEInputs
from moe_ep.integrations.transformers import (
    count_flips,
    experts_shape,
    experts_weights,
    find_experts,
    replace_moe_layers,
)
from moe_ep.reference import moe_oracle_fp64

FORMATS = ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block")


@contextmanager
def recorded_experts(model: hf.PreTrainedModel) -> Iterator[list[tuple]]:
    """(name of the experts module, hidden states, ids, weights, output) of every call."""
    calls: list[tuple] = []
    handles = [
        experts.register_forward_hook(
            lambda _module, args, output, name=name: calls.append((name, *args, output))
        )
        for name, experts in find_experts(model).items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def relative(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    a, b = torch.cat(got).double(), torch.cat(want).double()
    return ((a - b).norm() / b.norm()).item()


@dataclass(frozen=True)
class Measured:
    """Relative errors of the experts' outputs, ours and the untouched BF16 model's; logits' mean
    and largest difference in units of the noise; tokens routed otherwise, by us and by the noise.
    """

    error: float
    eager_error: float
    mean: float
    largest: float
    flips: int
    noise_flips: int


@torch.inference_mode()
def measure(family: str, weights_format: str) -> Measured:
    model = build_model(family)
    found = find_experts(model)
    shapes = {name: experts_shape(experts) for name, experts in found.items()}
    weights = {n: experts_weights(e).quantize(weights_format) for n, e in found.items()}
    layers = replace_moe_layers(
        model, EpGroup.single("cpu"), max_tokens_per_rank=64, weights_format=weights_format
    )
    with recorded_experts(model) as calls:
        replaced = [run_model(model, prompt) for prompt in prompts()]
    models = untouched(family, weights_format)
    eager, exact = ([run_model(one, prompt) for prompt in prompts()] for one in models)
    eager_experts = find_experts(models[0])
    oracle = [
        moe_oracle_fp64(
            MoEInputs(x, ids.masked_fill(ids == NUM_EXPERTS, -1), topk_weights.float()),
            weights[name],
            shapes[name],
        )
        for name, x, ids, topk_weights, _ in calls
    ]
    error = relative([output for *_, output in calls], oracle)
    eager_error = relative([eager_experts[name](*args) for name, *args, _ in calls], oracle)
    logits = [torch.cat([logits for logits, _ in runs]) for runs in (replaced, eager, exact)]
    difference, noise = (logits[0] - logits[1]).abs(), (logits[1] - logits[2]).abs()
    flips, noise_flips = (
        sum(count_flips(one, other)[0] for (_, one), (_, other) in zip(runs, eager, strict=True))
        for runs in (replaced, exact)
    )
    for layer in layers.values():
        layer.destroy()
    mean, largest = difference.mean() / noise.mean(), difference.max() / noise.max()
    return Measured(error, eager_error, mean.item(), largest.item(), flips, noise_flips)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_exact_to_rounding_and_logits_within_the_models_noise(family):
    measured = [measure(family, weights_format) for weights_format in FORMATS]
    cells = [f"{one.error:.4f}, {one.mean:.2f} / {one.largest:.2f}" for one in measured]
    flips = f"{sum(one.flips for one in measured)} ({sum(one.noise_flips for one in measured)})"
    print(f"| {family} | {' | '.join(cells)} | {measured[0].eager_error:.4f} | {flips} |")
    for one in measured:
        assert one.error < 0.0032  # a term 0.0026, the output's rounding 0.0017
        assert one.error < one.eager_error
        assert one.mean <= 1
        assert one.largest <= 2
