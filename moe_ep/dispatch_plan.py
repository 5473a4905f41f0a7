"""Where each routed slot goes: the expert-sorted order of one rank's rows, and the way back.

For anyone who brings a transport of their own, and the specification of the kernels in
`megakernel/permute_sm90.py` and `megakernel/combine_sm90.py`. Plain torch, CPU and GPU, without
host synchronisation except in `check`.

Three tokens, two slots, the rank that holds experts 4 and 5 of 8:

    topk_ids = [[5, 4], [-1, 5], [7, 4]]      slot numbers  0 1 | 2 3 | 4 5
                                              -1 is masked, expert 7 lives on another rank
    counts   = [2, 2]                         two rows for expert 4, two for expert 5
    offsets  = [0, 2, 4]                      expert 4 has pool rows 0..1, expert 5 rows 2..3
    src_slot = [1, 5, 0, 3, -1, -1]           pool row 0 is slot 1 (token 0), row 1 slot 5 (token 2)
    pool_row = [[2, 0], [-1, 3], [-1, 1]]     the inverse; -1 for a slot without a row here

Letters: T tokens, K slots, e local experts, P = offsets[e] rows of the pool, H hidden.
"""

from dataclasses import dataclass

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.reference import combine_terms


@dataclass(frozen=True)
class DispatchPlan:
    """The pool of one rank: its rows sorted by (expert, token, slot).

    counts     [e] int32, rows of each local expert
    offsets    [e + 1] int32, first pool row of each local expert; offsets[e] = P, all rows
    src_slot   [T * K] int32, slot of each pool row as token * K + slot; -1 from row P on
    pool_row   [T, K] int32, pool row of each slot; -1 for one that has none on this rank
    status     [1] int32, 0, or 1 + the first slot whose id is not an expert (that slot has no row)

    For the tokens of several ranks stack their `topk_ids` in rank order: the rows of an expert are
    then sorted by (rank, token, slot), and tokens are numbered over all ranks.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    src_slot: torch.Tensor
    pool_row: torch.Tensor
    status: torch.Tensor

    @classmethod
    def from_topk_ids(
        cls, topk_ids: torch.Tensor, *, num_experts: int, local_experts: range | None = None
    ) -> "DispatchPlan":
        """The plan for `topk_ids` [T, K] int32 or int64; a negative id is a masked slot.

        `local_experts` are the ids held by this rank (contiguous, see `owned_experts`), by default
        all. Raises `MoEEpConfigError` for another dtype or shape.
        """
        local_experts = range(num_experts) if local_experts is None else local_experts
        if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.dim() != 2:
            raise MoEEpConfigError(
                f"topk_ids must be [T, K] int32 or int64, got {list(topk_ids.shape)} "
                f"{topk_ids.dtype}"
            )
        if local_experts.step != 1 or not 0 <= local_experts.start <= local_experts.stop <= (
            num_experts
        ):
            raise MoEEpConfigError(
                f"local_experts must be contiguous ids below num_experts {num_experts}, "
                f"got {local_experts}"
            )
        num_local_experts, device = len(local_experts), topk_ids.device
        ids = topk_ids.reshape(-1).long()
        is_local = (ids >= local_experts.start) & (ids < local_experts.stop)
        # Slots without a row here sort behind every expert.
        sort_key = torch.where(is_local, ids - local_experts.start, num_local_experts)
        counts = torch.zeros(num_local_experts + 1, dtype=torch.long, device=device)
        counts.scatter_add_(0, sort_key, torch.ones_like(sort_key))
        offsets = torch.zeros(num_local_experts + 1, dtype=torch.long, device=device)
        torch.cumsum(counts[:-1], 0, out=offsets[1:])

        slots_in_order = torch.argsort(sort_key, stable=True)
        slot_numbers = torch.arange(len(ids), device=device)
        src_slot = torch.where(slot_numbers < offsets[-1], slots_in_order, -1)
        pool_row = torch.empty_like(ids)
        pool_row[slots_in_order] = slot_numbers
        pool_row = torch.where(is_local, pool_row, -1)

        first_bad = torch.where(ids >= num_experts, slot_numbers, len(ids))
        first_bad = torch.cat([first_bad, first_bad.new_full((1,), len(ids))]).min()
        status = torch.where(first_bad < len(ids), first_bad + 1, 0)
        return cls(
            counts=counts[:-1].int(),
            offsets=offsets.int(),
            src_slot=src_slot.int(),
            pool_row=pool_row.int().view(topk_ids.shape),
            status=status.int().view(1),
        )

    def gather(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Token rows [T, H] in the order of the pool: [T * K, H], zero from row P on."""
        top_k = self.pool_row.shape[1]
        is_row = (self.src_slot >= 0)[:, None]
        rows = hidden_states[self.src_slot.clamp(min=0) // top_k]
        return torch.where(is_row, rows, 0)

    def combine(self, terms_PH: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """BF16 terms of the pool rows and FP32 routing weights [T, K] -> BF16 [T, H].

        Slot order, FP32, multiply then add, one rounding; slots without a row are skipped.
        """
        terms_TKH = terms_PH[self.pool_row.clamp(min=0)]
        return combine_terms(terms_TKH, self.pool_row, topk_weights)

    def check(self, topk_ids: torch.Tensor, num_experts: int) -> None:
        """Raises `MoEEpConfigError` naming the first id that is not an expert. Synchronises."""
        status = int(self.status)
        if status:
            token_idx, slot_idx = divmod(status - 1, topk_ids.shape[1])
            raise MoEEpConfigError(
                f"topk_ids[{token_idx}, {slot_idx}] is {int(topk_ids[token_idx, slot_idx])}; "
                f"allowed: negative (masked) or below num_experts {num_experts}"
            )
