"""What a call of the layer has to move and to compute, whatever runs it.

    memory       weights of every local expert that has a token, each once; rows in, terms out,
                 terms read again for the sum, and the result
    operations   2 P H (fc1_rows + I), P = rows (token, slot) that arrive at the rank
    link         what enters or leaves a rank, the larger: tokens once for each other rank that
                 they go to, terms for each slot

Under tp every rank has all rows and its part of I; terms are FP32 and are summed over the slots
before they leave, an FP32 row of each token for each rank.

Letters: T tokens of a rank, K slots, H hidden, I intermediate, R ranks.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from moe_ep.comm.group import EpGroup
from moe_ep.launch.peaks import Peaks
from moe_ep.launch.timing import all_reduce
from moe_ep.megakernel.problem import MoEShape, owned_experts, weight_format


@dataclass(frozen=True)
class Work:
    """Of the rank with the most of each."""

    num_bytes: int
    num_flops: int
    num_link_bytes: int

    def seconds(self, peaks: Peaks) -> dict[str, float]:
        """What each would take alone; the largest is the limit of a call."""
        return {
            "memory": self.num_bytes / peaks.bytes_per_s,
            "matmul": self.num_flops / peaks.flops_per_s,
            "link": self.num_link_bytes / peaks.link_bytes_per_s if peaks.link_bytes_per_s else 0.0,
        }


def most_work(
    shape: MoEShape,
    weights_format: str,
    ids: torch.Tensor,
    num_tokens: int,
    group: EpGroup,
    parallel: str = "ep",
) -> Work:
    """`ids`: [R * T, K] of all ranks in rank order. Collective."""
    if parallel == "tp":
        return _tp_work(shape, weights_format, ids, num_tokens, group.num_ranks)
    fmt = weight_format(weights_format)
    expert_bytes = fmt.num_bytes(shape.fc1_rows, shape.hidden)
    expert_bytes += fmt.num_bytes(shape.hidden, shape.intermediate)
    experts = owned_experts(shape.num_experts, group.num_ranks, group.rank)
    is_here = (ids >= experts.start) & (ids < experts.stop)
    num_rows = int(is_here.sum())
    num_hit = len(ids[is_here].unique())
    num_row_moves = 2 * num_rows + num_tokens * (shape.top_k + 1)
    work = torch.tensor(
        [
            num_hit * expert_bytes + 2 * shape.hidden * num_row_moves,
            2 * num_rows * shape.hidden * (shape.fc1_rows + shape.intermediate),
            2 * shape.hidden * _rows_over_links(shape, ids, num_tokens, is_here, group),
        ],
        device=group.device,
    )
    return Work(*all_reduce(work, dist.ReduceOp.MAX, group).tolist())


def _tp_work(
    shape: MoEShape, weights_format: str, ids: torch.Tensor, num_tokens: int, num_ranks: int
) -> Work:
    """The same on every rank."""
    fmt, hidden = weight_format(weights_format), shape.hidden
    part = replace(shape, intermediate=shape.intermediate // num_ranks)
    expert_bytes = fmt.num_bytes(part.fc1_rows, hidden)
    expert_bytes += fmt.num_bytes(hidden, part.intermediate)
    is_routed = ids >= 0
    num_rows, num_hit = int(is_routed.sum()), len(ids[is_routed].unique())
    # BF16 rows in; FP32 terms out and in again; a sum of each token out, and each rank's in again.
    row_bytes = 2 * num_rows + 8 * num_rows + 8 * num_ranks * num_tokens + 2 * num_tokens
    return Work(
        num_bytes=num_hit * expert_bytes + hidden * row_bytes,
        num_flops=2 * num_rows * hidden * (part.fc1_rows + part.intermediate),
        num_link_bytes=(num_ranks - 1) * num_tokens * hidden * (2 + 4),
    )


def _rows_over_links(
    shape: MoEShape, ids: torch.Tensor, num_tokens: int, is_here: torch.Tensor, group: EpGroup
) -> int:
    own = slice(group.rank * num_tokens, (group.rank + 1) * num_tokens)
    is_own = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    is_own[own] = True
    tokens_in = int(is_here[~is_own].any(dim=1).sum())
    terms_in = int((~is_here[own] & (ids[own] >= 0)).sum())
    terms_out = int(is_here[~is_own].sum())
    tokens_out = 0
    for rank in range(group.num_ranks):
        if rank != group.rank:
            experts = owned_experts(shape.num_experts, group.num_ranks, rank)
            is_there = (ids[own] >= experts.start) & (ids[own] < experts.stop)
            tokens_out += int(is_there.any(dim=1).sum())
    return max(tokens_in + terms_in, tokens_out + terms_out)
