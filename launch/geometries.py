"""Layers of published models under the short names that the command line takes."""

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import MoEShape


def _shape(hidden: int, intermediate: int, num_experts: int, top_k: int) -> MoEShape:
    return MoEShape(num_experts=num_experts, top_k=top_k, hidden=hidden, intermediate=intermediate)


GEOMETRIES = {
    # name: hidden, intermediate, experts, top-k
    "v3": _shape(7168, 2048, 256, 8),  # DeepSeek-V3
    "v4flash": _shape(4096, 2048, 256, 6),  # DeepSeek-V4 Flash
    "v4pro": _shape(7168, 3072, 384, 6),  # DeepSeek-V4 Pro
    "glm5": _shape(6144, 2048, 256, 8),  # GLM-5
    "qwen3": _shape(2048, 768, 128, 8),  # Qwen3-30B-A3B
    "tiny": _shape(256, 128, 16, 4),  # seconds on any CPU
}


def geometry(name: str) -> MoEShape:
    """The layer of that name; raises `MoEEpConfigError` listing the names."""
    if name not in GEOMETRIES:
        raise MoEEpConfigError(f"geometry {name!r} is not known; allowed: {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]
