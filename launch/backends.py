"""Backends under the short names that the command line takes."""

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.config import (
    Backend,
    GroupedGemmConfig,
    MegaConfig,
    NcclEpConfig,
    SplitConfig,
    TorchCommConfig,
    TorchGemmConfig,
)

BACKENDS: dict[str, Backend | str] = {
    "auto": "auto",
    "mega": MegaConfig(),
    "split-torch": SplitConfig(comm=TorchCommConfig(), kernel=TorchGemmConfig()),
    "split-grouped": SplitConfig(comm=TorchCommConfig(), kernel=GroupedGemmConfig()),
    "nccl-ep-ll": SplitConfig(comm=NcclEpConfig(mode="ll"), kernel=GroupedGemmConfig()),
    "nccl-ep-ht": SplitConfig(comm=NcclEpConfig(mode="ht"), kernel=GroupedGemmConfig()),
}


def named_backend(name: str) -> Backend | str:
    """The backend of that name; raises `MoEEpConfigError` listing the names."""
    if name not in BACKENDS:
        raise MoEEpConfigError(f"backend {name!r} is not known; allowed: {', '.join(BACKENDS)}")
    return BACKENDS[name]
