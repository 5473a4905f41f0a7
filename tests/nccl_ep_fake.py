"""`nccl.core` and `nccl.ep` on CPUs, as far as `comm/nccl_ep.py` uses them, from their headers.

All ranks gather everything; rows land where the layout says. Rows that nobody wrote are NaN and
counts beyond the last one garbage, as memory of a GPU may be. One token with an expert in two of
its slots is an error: the library would bring it once.
"""

import sys
import types
from dataclasses import dataclass, field
from enum import IntEnum

import torch
import torch.distributed as dist


class Algorithm(IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class ExpertIdKind(IntEnum):
    LOCAL = 1


@dataclass
class GroupConfig:
    algorithm: Algorithm
    num_experts: int
    max_dispatch_tokens_per_rank: int
    max_recv_tokens_per_rank: int
    max_token_bytes: int
    timeout_ns: int
    num_topk: int


@dataclass
class Bundle:
    """Every struct of named tensors."""

    tokens: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    expert_counters: torch.Tensor | None = None
    recv_total_counter: torch.Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind | None = None


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor)
    return parts


@dataclass
class Handle:
    group: "Group"
    layout: Layout
    sources: list[tuple[int, int, int]] = field(default_factory=list)  # row, rank, token

    def update(self, ids: torch.Tensor, *, layout_info: Bundle | None, stream: int) -> None:
        config = self.group.config
        assert 0 < len(ids) <= config.max_dispatch_tokens_per_rank
        for row in ids.tolist():
            used = [expert for expert in row if expert >= 0]
            assert len(set(used)) == len(used) and all(e < config.num_experts for e in used)
        self.ids, self.info = ids, layout_info

    def dispatch(
        self, inputs: Bundle, outputs: Bundle, *, layout_info: Bundle | None, stream: int
    ) -> None:
        assert len(inputs.tokens) == len(self.ids)
        self.dispatched_ids = self.ids.clone()
        info = layout_info or self.info
        rows = outputs.tokens
        rows.fill_(float("nan"))
        if outputs.topk_idx is not None:
            filler = -1 if self.layout == Layout.RANK_MAJOR else 12345
            outputs.topk_idx.fill_(filler)
        weights = inputs.topk_weights
        weights = torch.zeros(self.ids.shape) if weights is None else weights
        arrived = zip(gathered(inputs.tokens), gathered(self.ids), gathered(weights), strict=True)
        place = {
            Layout.RANK_MAJOR: self._rank_major,
            Layout.FLAT: self._flat,
            Layout.EXPERT_MAJOR: self._expert_major,
        }[self.layout]
        self.sources = []
        place(list(arrived), outputs, info)

    def _local(self, ids: torch.Tensor) -> torch.Tensor:
        e = self.group.num_local_experts
        local = ids - self.group.rank * e
        return torch.where((local >= 0) & (local < e) & (ids >= 0), local, -1)

    def _rank_major(self, arrived: list, outputs: Bundle, info: Bundle) -> None:
        for rank, (x, ids, weights) in enumerate(arrived):
            local = self._local(ids)
            tokens = (local >= 0).any(1).nonzero().flatten().tolist()
            for row, token in enumerate(tokens):
                outputs.tokens[rank, row] = x[token]
                outputs.topk_idx[rank, row] = local[token].int()
                outputs.topk_weights[rank, row] = weights[token]
                capacity = outputs.tokens.shape[1]
                self.sources.append((rank * capacity + row, rank, token))

    def _flat(self, arrived: list, outputs: Bundle, info: Bundle) -> None:
        row = 0
        for rank, (x, ids, weights) in enumerate(arrived):
            local = self._local(ids)
            for token in (local >= 0).any(1).nonzero().flatten().tolist():
                outputs.tokens[row] = x[token]
                outputs.topk_idx[row] = local[token]
                outputs.topk_weights[row] = weights[token]
                self.sources.append((row, rank, token))
                row += 1
        info.recv_total_counter.fill_(row)

    def _expert_major(self, arrived: list, outputs: Bundle, info: Bundle) -> None:
        is_ll = self.group.config.algorithm == Algorithm.LOW_LATENCY
        row = 0
        for expert in range(self.group.num_local_experts):
            first = row = expert * outputs.tokens.shape[1] if is_ll else row
            flat = outputs.tokens.view(-1, outputs.tokens.shape[-1])
            for rank, (x, ids, weights) in enumerate(arrived):
                for token, slot in (self._local(ids) == expert).nonzero().tolist():
                    flat[row] = x[token]
                    if not is_ll:
                        outputs.topk_weights[row] = weights[token, slot]
                    self.sources.append((row, rank, token))
                    row += 1
            info.expert_counters[expert] = row - first

    def combine(self, inputs: Bundle, outputs: Bundle, *, stream: int) -> None:
        assert torch.equal(self.ids, self.dispatched_ids), "the handle reads ids until the combine"
        rows = inputs.tokens.reshape(-1, inputs.tokens.shape[-1])
        back = [(rank, token, rows[row].float(), row) for row, rank, token in self.sources]
        out = torch.zeros(outputs.tokens.shape)
        for sender, part in enumerate(gathered(back)):
            for rank, token, y, row in part:
                if rank != self.group.rank:
                    continue
                if outputs.topk_weights is not None:  # low latency, expert-major
                    e, per_expert = self.group.num_local_experts, inputs.tokens.shape[1]
                    expert = sender * e + row // per_expert
                    y = y * outputs.topk_weights[token][self.ids[token] == expert]
                out[token] += y
        outputs.tokens.copy_(out)

    def destroy(self) -> None:
        pass


@dataclass
class Group:
    config: GroupConfig
    rank: int
    num_local_experts: int

    @classmethod
    def create(cls, communicator: "Communicator", config: GroupConfig) -> "Group":
        return cls(config, communicator.rank, config.num_experts // communicator.num_ranks)

    def create_handle(
        self, layout: Layout, ids: torch.Tensor, *, layout_info: Bundle | None, stream: int
    ) -> Handle:
        handle = Handle(self, layout)
        handle.update(ids, layout_info=layout_info, stream=stream)
        return handle

    def destroy(self) -> None:
        pass


@dataclass
class Communicator:
    num_ranks: int
    rank: int

    @classmethod
    def init(cls, num_ranks: int, rank: int, unique_id: "UniqueId") -> "Communicator":
        assert unique_id.as_bytes == b"id of rank 0"
        return cls(num_ranks, rank)

    def abort(self) -> None:
        pass


@dataclass
class UniqueId:
    as_bytes: bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> "UniqueId":
        return cls(data)


def install() -> None:
    """Make `from nccl import core, ep` find these, and a CPU pass for a GPU."""
    nccl = types.ModuleType("nccl")
    nccl.core = types.SimpleNamespace(
        get_unique_id=lambda: UniqueId(b"id of rank 0"),
        UniqueId=UniqueId,
        Communicator=Communicator,
    )
    names = ("LayoutInfo", "DispatchInputs", "DispatchOutputs", "CombineInputs", "CombineOutputs")
    nccl.ep = types.SimpleNamespace(
        Algorithm=Algorithm,
        Layout=Layout,
        ExpertIdKind=ExpertIdKind,
        GroupConfig=GroupConfig,
        Group=Group,
        Tensor=lambda tensor: tensor,
        **dict.fromkeys(names, Bundle),
    )
    sys.modules["nccl"] = nccl
