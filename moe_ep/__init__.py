"""Expert-parallel Mixture-of-Experts layers. Names load on first use; import alone stays light."""

from importlib import import_module

_HOME = {
    "Activation": "moe_ep.megakernel.problem",
    "DispatchPlan": "moe_ep.dispatch_plan",
    "EpGroup": "moe_ep.comm.group",
    "ExpertMap": "moe_ep.placement",
    "MegaConfig": "moe_ep.config",
    "MoEEpError": "moe_ep.comm.errors",
    "MoEEpLayer": "moe_ep.layer",
    "MoEInputs": "moe_ep.inputs",
    "MoEShape": "moe_ep.megakernel.problem",
    "MoEWeights": "moe_ep.weights",
    "SplitConfig": "moe_ep.config",
    "load": "moe_ep.checkpoint",
    "supports": "moe_ep.backends",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'moe_ep' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
