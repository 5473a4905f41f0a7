"""Weight formats x models on a CPU, as `model_errors` measures. For the table of the README:

pytest -q -rP tests/test_model_errors.py | grep '^|'
"""

import pytest
from model_cases import FAMILIES
from model_errors import assert_within_noise, measure

from moe_ep.megakernel.problem import WEIGHT_FORMATS


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_exact_to_rounding_and_logits_within_the_models_noise(family):
    measured = [measure(family, weights_format) for weights_format in WEIGHT_FORMATS]
    cells = [f"{one.error:.4f}, {one.mean:.2f} / {one.largest:.2f}" for one in measured]
    flips = f"{sum(one.flips for one in measured)} ({sum(one.noise_flips for one in measured)})"
    print(f"| {family} | {' | '.join(cells)} | {measured[0].eager_error:.4f} | {flips} |")
    for one in measured:
        assert_within_noise(one)
