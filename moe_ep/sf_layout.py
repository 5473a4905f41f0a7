"""The 128x4 layout in which Blackwell's tensor cores, cuBLAS and torch take block scale factors.

An R x C matrix of one-byte scale factors is padded with zeros to multiples of 128 x 4 and cut into
atoms of 128 x 4, 512 contiguous bytes each, in row-major order of the atoms. Inside an atom the
element (r, c) stands at (r mod 32) * 16 + (r div 32) * 4 + c.
"""

import torch

from moe_ep.arguments import check_int, check_kind
from moe_ep.comm.errors import MoEEpConfigError

ATOM_ROWS, ATOM_COLS = 128, 4


def swizzle_sf(sf: torch.Tensor) -> torch.Tensor:
    """Linear scale factors [..., R, C] of one byte -> [..., ceil128(R) * ceil4(C)], same dtype.

    Each leading index (expert) is padded by itself. Raises `MoEEpConfigError` for wider elements.
    """
    _check_bytes("sf", sf, 2)
    *lead, rows, cols = sf.shape
    padding = (0, -cols % ATOM_COLS, 0, -rows % ATOM_ROWS)
    padded = torch.nn.functional.pad(sf.view(torch.uint8), padding)
    row_atoms, col_atoms = padded.shape[-2] // ATOM_ROWS, padded.shape[-1] // ATOM_COLS
    atoms = padded.view(*lead, row_atoms, 4, 32, col_atoms, ATOM_COLS)
    swizzled = atoms.movedim((-2, -4), (-4, -2)).contiguous()
    return swizzled.flatten(len(lead)).view(sf.dtype)


def unswizzle_sf(swizzled: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of `swizzle_sf`: [..., ceil128(R) * ceil4(C)] -> linear [..., R, C].

    Raises `MoEEpConfigError` if the last dimension is not that of R x C.
    """
    _check_bytes("swizzled", swizzled, 1)
    check_int("rows", rows, 0)
    check_int("cols", cols, 0)
    row_atoms, col_atoms = -(-rows // ATOM_ROWS), -(-cols // ATOM_COLS)
    size = row_atoms * col_atoms * ATOM_ROWS * ATOM_COLS
    if swizzled.shape[-1] != size:
        raise MoEEpConfigError(
            f"swizzled scale factors of {rows} x {cols} take {size} bytes, got {swizzled.shape[-1]}"
        )
    lead = swizzled.shape[:-1]
    atoms = swizzled.view(torch.uint8).reshape(*lead, row_atoms, col_atoms, 32, 4, ATOM_COLS)
    padded = atoms.movedim((-4, -2), (-2, -4)).reshape(
        *lead, row_atoms * ATOM_ROWS, col_atoms * ATOM_COLS
    )
    return padded[..., :rows, :cols].contiguous().view(swizzled.dtype)


def _check_bytes(name: str, sf: torch.Tensor, num_dims: int) -> None:
    check_kind(name, sf, torch.Tensor, "a tensor")
    if sf.itemsize != 1:
        raise MoEEpConfigError(f"the 128x4 layout is for one-byte scale factors, got {sf.dtype}")
    if sf.dim() < num_dims:
        raise MoEEpConfigError(
            f"{name} must have at least {num_dims} dimensions, got shape {list(sf.shape)}"
        )
