"""Memory of the grouped GEMM kernel: prepared weights, and the workspace of a one-rank layer.

Plain integers first, for `moe-ep estimate` and the allocation alike. Letters: C capacity in tokens,
K slots, H hidden, I intermediate, e experts, P = C * K pool rows.

    region    shape      written by -> read by
    counts    [e]        permute: rows of each expert
    offsets   [e + 1]    permute -> FC1, FC2
    src_slot  [P]        permute: slot of each pool row
    pool_row  [C, K]     permute -> combine
    pool      [P, H]     permute -> FC1, then FC2 -> combine: the terms take the place of the rows
    hidden    [P, I]     FC1 -> FC2

FC2 may write over the rows because it waits for the end of FC1 before it reads its first tokens.
"""

from weakref import WeakValueDictionary

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.launch_order import LaunchOrder
from moe_ep.megakernel.problem import MoEShape
from moe_ep.megakernel.tiles import TILE_FORMATS
from moe_ep.megakernel.workspace import Region

# Slots and the output's 16-byte vectors have 32-bit numbers, and so do threads behind the last one.
MAX_NUMBERED = 2**31 - 4096
VECTOR_ELEMENTS = 8
_DTYPES = {"int32": torch.int32, "bfloat16": torch.bfloat16}


def workspace_regions(
    shape: MoEShape, num_local_experts: int, max_tokens: int
) -> tuple[Region, ...]:
    """The regions for up to `max_tokens` tokens in a call.

    Raises `MoEEpConfigError` for more tokens than the kernels can number.
    """
    if misfit := capacity_misfit(shape, max_tokens):
        raise MoEEpConfigError(misfit)
    rows = max_tokens * shape.top_k
    sizes = (
        ("counts", "int32", (num_local_experts,)),
        ("offsets", "int32", (num_local_experts + 1,)),
        ("src_slot", "int32", (rows,)),
        ("pool_row", "int32", (max_tokens, shape.top_k)),
        ("pool", "bfloat16", (rows, shape.hidden)),
        ("hidden", "bfloat16", (rows, shape.intermediate)),
    )
    return tuple(Region(name, dtype, size, "local") for name, dtype, size in sizes)


def prepared_bytes(
    shape: MoEShape,
    weights_format: str,
    num_local_experts: int,
    *,
    has_bias13: bool = False,
    has_bias2: bool = False,
) -> int:
    """`PreparedWeights.num_bytes`, before anything is prepared."""
    fmt = TILE_FORMATS[weights_format]
    is_gated = shape.activation.is_gated
    codes = fmt.matrix_bytes(shape.fc1_rows, shape.hidden, is_paired=is_gated)
    codes += fmt.matrix_bytes(shape.hidden, shape.intermediate, is_paired=False)
    # FP32: two scales of each matrix, biases.
    num_floats = 4 + shape.fc1_rows * has_bias13 + shape.hidden * has_bias2
    return num_local_experts * (codes + 4 * num_floats)


def max_capacity(shape: MoEShape) -> int:
    """Most tokens of one call that the kernels can number."""
    return MAX_NUMBERED // max(shape.top_k, shape.hidden // VECTOR_ELEMENTS)


def capacity_misfit(shape: MoEShape, max_tokens: int) -> str | None:
    """Why a one-rank layer cannot hold so many tokens, or None."""
    limit = max_capacity(shape)
    if max_tokens <= limit:
        return None
    return (
        f"max_tokens_per_rank is {max_tokens}; allowed for GroupedGemmConfig at top_k "
        f"{shape.top_k} and hidden {shape.hidden}: at most {limit}"
    )


def workspace_bytes(regions: tuple[Region, ...]) -> int:
    return sum(region.num_bytes for region in regions)


class GroupedWorkspace:
    """The regions in a GPU's memory: `workspace["pool"]` is a tensor.

    Layers that share it take turns: `order` puts a call behind the one before it. What a CUDA graph
    replays is ordered by whoever replays it, with every other use of these layers.
    """

    def __init__(self, regions: tuple[Region, ...], device: torch.device) -> None:
        self.regions, self.device = regions, device
        self.order = LaunchOrder(device)
        self._tensors = {
            region.name: torch.empty(region.shape, dtype=_DTYPES[region.dtype], device=device)
            for region in regions
        }
        self["pool"][:1].zero_()  # a slot without a row reads row 0 and drops what it finds there

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    @property
    def num_bytes(self) -> int:
        return workspace_bytes(self.regions)


_shared: WeakValueDictionary[tuple, GroupedWorkspace] = WeakValueDictionary()


def shared_workspace(regions: tuple[Region, ...], device: torch.device) -> GroupedWorkspace:
    """The one workspace of these regions on `device`, for as long as a layer holds it."""
    key = (regions, device)
    workspace = _shared.get(key)
    if workspace is None:
        workspace = _shared[key] = GroupedWorkspace(regions, device)
    return workspace
