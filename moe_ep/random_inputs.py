"""Random tokens with uniform or skewed routing, for measuring: every rank makes its own.

Letters: T tokens of a rank, K slots, H hidden.
"""

import torch

from moe_ep.comm.group import EpGroup
from moe_ep.inputs import MoEInputs
from moe_ep.megakernel.problem import MoEShape


def random_inputs(
    shape: MoEShape,
    num_tokens: int,
    group: EpGroup,
    *,
    is_skewed: bool = False,
    id_dtype: torch.dtype = torch.int64,
) -> MoEInputs:
    """Normal tokens, uniform routing: K different experts for each token. Skewed: every second
    token has expert 0 among them."""
    generator = torch.Generator(group.device).manual_seed(1000 * num_tokens + group.rank)
    device = group.device
    x_TH = torch.randn(
        num_tokens, shape.hidden, dtype=torch.float32, device=device, generator=generator
    )
    scores_TE = torch.rand(
        num_tokens, shape.num_experts, dtype=torch.float32, device=device, generator=generator
    )
    if is_skewed:
        scores_TE[::2, 0] = 2.0
    top = scores_TE.topk(shape.top_k, dim=-1)
    return MoEInputs(x_TH.to(torch.bfloat16), top.indices.to(id_dtype), top.values.softmax(dim=-1))
