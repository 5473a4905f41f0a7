"""Reading and writing single experts of the weights that a layer holds, canonical or prepared."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from moe_ep.megakernel.formats import PreparedWeights, prepare, restore
from moe_ep.megakernel.tiles import TILE_FORMATS
from moe_ep.weights import MoEWeights

HeldWeights = MoEWeights | PreparedWeights


def read_experts(
    held: HeldWeights, form: MoEWeights, local_experts: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Copies of some experts by their position here, as tensors of `MoEWeights` by name.

    `form` says what the layer's weights look like (it may be on meta). Prepared weights come back
    with the values they hold: codes under a zero scale factor are zero.
    """
    if isinstance(held, MoEWeights):
        index = torch.tensor(local_experts, dtype=torch.long, device=held.device)
        return {name: select_experts(tensor, index) for name, tensor in held.tensors.items()}
    if not local_experts:
        return {
            name: torch.empty(0, *tensor.shape[1:], dtype=tensor.dtype, device=held.w13.device)
            for name, tensor in form.tensors.items()
        }
    experts = [_restored(held, form, idx) for idx in local_experts]
    return {name: torch.stack([expert[name] for expert in experts]) for name in form.tensors}


def write_experts(
    held: HeldWeights,
    form: MoEWeights,
    tensors: dict[str, torch.Tensor],
    local_experts: Sequence[int],
) -> None:
    """Put experts, as `read_experts` gives them, at these positions, in place.

    Raises `MoEEpConfigError` for values that `prepare` does not take, where weights are prepared.
    """
    for source, idx in enumerate(local_experts):
        if isinstance(held, MoEWeights):
            for name, tensor in held.tensors.items():
                tensor[idx].copy_(tensors[name][source])
        else:
            one = {name: tensor[source : source + 1] for name, tensor in tensors.items()}
            prepare(some_experts(form, [idx], one), out=_prepared_expert(held, idx))


def some_experts(
    form: MoEWeights, local_experts: Sequence[int], tensors: dict[str, torch.Tensor]
) -> MoEWeights:
    """`tensors` as weights of these experts of `form`. Under tp, where a rank holds all experts of
    its layer, they are numbered anew."""
    num_experts, ids = form.num_experts, tuple(form.expert_ids[idx] for idx in local_experts)
    if form.parallel == "tp":
        num_experts, ids = len(ids), tuple(range(len(ids)))
    return replace(form, **tensors, num_experts=num_experts, expert_ids=ids)


def select_experts(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor; FP8 as bytes, which index_select takes on every device."""
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).index_select(0, index).view(tensor.dtype)
    return tensor.index_select(0, index)


def _prepared_expert(prepared: PreparedWeights, idx: int) -> PreparedWeights:
    """Views of one expert, as prepared weights of it alone."""
    names = ("w13", "w2", "w13_alpha", "w2_alpha", "b13", "b2")
    tensors = {name: getattr(prepared, name) for name in names}
    return replace(
        prepared, **{n: None if t is None else t[idx : idx + 1] for n, t in tensors.items()}
    )


def _restored(prepared: PreparedWeights, form: MoEWeights, idx: int) -> dict[str, torch.Tensor]:
    """Tensors of one expert by their name in `MoEWeights`."""
    fmt = TILE_FORMATS[prepared.weights_format]
    tensors: dict[str, torch.Tensor | None] = {}
    for name, rows, cols, halves in (
        ("w13", form.fc1_rows, form.hidden, form.num_halves),
        ("w2", form.hidden, form.local_intermediate, 1),
    ):
        alpha = getattr(prepared, f"{name}_alpha")[idx]
        max_e8m0 = None
        if prepared.weights_format.startswith("mx"):
            max_e8m0 = int(torch.log2(alpha[0].double())) - fmt.alpha_log2
        tensors[name], sf = restore(
            getattr(prepared, name)[idx],
            prepared.weights_format,
            rows,
            cols,
            is_paired=halves == 2,
            max_e8m0=max_e8m0,
        )
        if fmt.num_tile_sf:  # one per row: take the first of each block
            sf = sf.unflatten(0, (halves, -1))[:, ::128].flatten(0, 1)
        tensors[f"{name}_sf"] = sf
        scales = alpha * 2.0**-fmt.alpha_log2
        if name == "w2":
            tensors["down_scale"] = scales[0]
        else:
            tensors["gate_scale"], tensors["up_scale"] = scales
    for name in ("b13", "b2"):
        bias = getattr(prepared, name)
        tensors[name] = None if bias is None else bias[idx]
    return {
        name: tensors[name].to(wanted.dtype) if name.startswith("b") else _as(tensors[name], wanted)
        for name, wanted in form.tensors.items()
    }


def _as(tensor: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The same bytes in the canonical dtype."""
    return tensor.contiguous().view(wanted.dtype) if tensor.dtype != wanted.dtype else tensor
