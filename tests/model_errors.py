"""What replacing a model's experts changes: measured against FP64 and the model's own BF16 noise.

The oracle of the experts is `moe_oracle_fp64` on the weights as the format holds them and on what
the model gave its experts; that of the logits is the untouched model with those weights, whose own
noise is its BF16 run against its FP32 run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from model_cases import NUM_EXPERTS, build_model, prompts, run_model, untouched
from oracles import relative_error

from moe_ep import EpGroup, MoEInputs, MoEShape, MoEWeights
from moe_ep.config import Backend
from moe_ep.integrations.transformers import (
    count_flips,
    experts_shape,
    experts_weights,
    find_experts,
    replace_moe_layers,
)
from moe_ep.reference import moe_oracle_fp64


@contextmanager
def recorded_calls(experts: dict[str, torch.nn.Module]) -> Iterator[list[tuple]]:
    """(name of the experts module, hidden states, ids, weights, output) of every call."""
    calls: list[tuple] = []
    handles = [
        module.register_forward_hook(
            lambda _module, args, output, name=name: calls.append((name, *args, output))
        )
        for name, module in experts.items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


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
def measure(
    family: str, weights_format: str, *, device: str = "cpu", backend: Backend | str = "auto"
) -> Measured:
    """A replaced model on one rank on `device` against the untouched one there."""
    model = build_model(family)
    found = find_experts(model)
    shapes = {name: experts_shape(experts) for name, experts in found.items()}
    weights = {n: experts_weights(e).quantize(weights_format) for n, e in found.items()}
    layers = replace_moe_layers(
        model.to(device),
        EpGroup.single(device),
        max_tokens_per_rank=64,
        weights_format=weights_format,
        backend=backend,
    )
    given = [prompt.to(device) for prompt in prompts()]
    with recorded_calls(find_experts(model)) as calls:
        replaced = [run_model(model, prompt) for prompt in given]
    models = [one.to(device) for one in untouched(family, weights_format)]
    eager, exact = ([run_model(one, prompt) for prompt in given] for one in models)
    eager_experts = find_experts(models[0])
    oracle = torch.cat(
        [oracle_fp64(weights[name], shapes[name], *args) for name, *args, _ in calls]
    )
    error = relative_error(torch.cat([output for *_, output in calls]).cpu(), oracle)
    eager_outputs = [eager_experts[name](*args) for name, *args, _ in calls]
    eager_error = relative_error(torch.cat(eager_outputs).cpu(), oracle)
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


def oracle_fp64(
    weights: MoEWeights,
    shape: MoEShape,
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
) -> torch.Tensor:
    """FP64 [T, H] on the CPU of what transformers gives an experts module."""
    ids_TK = ids_TK.masked_fill(ids_TK == NUM_EXPERTS, -1)
    inputs = MoEInputs(x_TH.cpu(), ids_TK.cpu(), topk_weights_TK.float().cpu())
    return moe_oracle_fp64(inputs, weights, shape)


def assert_within_noise(measured: Measured) -> None:
    assert measured.error < 0.0032  # a term 0.0026, the output's rounding 0.0017
    assert measured.error < measured.eager_error
    assert measured.mean <= 1
    assert measured.largest <= 2
