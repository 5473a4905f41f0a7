"""Backends under the short names that the command line takes."""

import argparse
from collections.abc import Sequence

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
    "split": SplitConfig(comm=TorchCommConfig(), kernel=GroupedGemmConfig()),
    "split-torch": SplitConfig(comm=TorchCommConfig(), kernel=TorchGemmConfig()),
    "nccl-ep-ll": SplitConfig(comm=NcclEpConfig(mode="ll"), kernel=GroupedGemmConfig()),
    "nccl-ep-ht": SplitConfig(comm=NcclEpConfig(mode="ht"), kernel=GroupedGemmConfig()),
}


def named_backend(name: str) -> Backend | str:
    """The backend of that name; raises `MoEEpConfigError` listing the names."""
    if name not in BACKENDS:
        raise MoEEpConfigError(f"backend {name!r} is not known; allowed: {', '.join(BACKENDS)}")
    return BACKENDS[name]


class BackendNames(argparse.Action):
    """A list of the names, by blanks or commas: `mega split`, `mega,split`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        names = [name for word in values or () for name in str(word).split(",")]
        for name in names:
            try:
                named_backend(name)
            except MoEEpConfigError as error:
                raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, names)
