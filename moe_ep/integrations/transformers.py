"""Mixture-of-Experts models of Hugging Face transformers, their experts run by `MoEEpLayer`.

transformers (5.x) keeps the experts of a layer in one module with fused parameters and looks up who
runs them by a name in the model's configuration. Here "moe_ep" is that name: routers, shared
experts, attention and generation stay the model's own code, and only the routed experts change.

    layers = replace_moe_layers(model, max_tokens_per_rank=512)     # on every rank of the job
    with torch.inference_mode():
        model(input_ids)                                # every rank, the same number of times

Shape suffixes: E experts, N rows of FC1 (gate then up), H hidden, I intermediate, T tokens,
K slots of a token.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_ep.arguments import check_kind
from moe_ep.comm.errors import MoEEpConfigError, MoEEpError, MoEEpStateError
from moe_ep.comm.group import EpGroup
from moe_ep.config import Backend
from moe_ep.fingerprint import agree
from moe_ep.inputs import MoEInputs
from moe_ep.layer import MoEEpLayer
from moe_ep.megakernel.problem import Activation, MoEShape, weight_format
from moe_ep.weights import MoEWeights

T = TypeVar("T")
EXPERTS_IMPLEMENTATION = "moe_ep"
_TIMEOUT_S = 60.0  # as that of MoEEpLayer

# hidden_act of a transformers configuration -> kind of activation, for act(gate) * up.
GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "relu": "reglu",
}


def _plain(experts: nn.Module) -> Activation:
    name = experts.config.hidden_act
    if name not in GATED_ACTIVATIONS:
        raise MoEEpConfigError(
            f"hidden_act {name!r} of {type(experts).__name__} is not known; "
            f"allowed: {', '.join(GATED_ACTIVATIONS)}"
        )
    return Activation(GATED_ACTIVATIONS[name])


def _clamped(experts: nn.Module) -> Activation:
    return Activation(_plain(experts).kind, limit=experts.limit)


def _gpt_oss(experts: nn.Module) -> Activation:
    return Activation("swiglu", alpha=experts.alpha, beta=1.0, limit=experts.limit)


@dataclass(frozen=True)
class KnownModel:
    """A model family and how its experts' gate is written down in transformers."""

    family: str
    activation: Callable[[nn.Module], Activation]


# Class of the experts module in transformers -> what we know of it. The layout (concatenated,
# transposed, biased) is declared by the module itself; only the activation is not.
KNOWN_MODELS = {
    "MixtralExperts": KnownModel("Mixtral", _plain),
    "Qwen3MoeExperts": KnownModel("Qwen3-MoE", _plain),
    "Qwen3_5MoeExperts": KnownModel("Qwen3.5-MoE", _plain),
    "DeepseekV3Experts": KnownModel("DeepSeek-V3", _plain),
    "DeepseekV4Experts": KnownModel("DeepSeek-V4", _clamped),
    "Glm4MoeExperts": KnownModel("GLM-4-MoE", _plain),
    "GptOssExperts": KnownModel("gpt-oss", _gpt_oss),
}


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> experts module, in the model's order.

    Raises `MoEEpConfigError`, listing the model families that are known, if the model has none or
    has experts of another family.
    """
    known = ", ".join(entry.family for entry in KNOWN_MODELS.values())
    experts = _experts_modules(model)
    unknown = {type(mod).__name__ for mod in experts.values()} - KNOWN_MODELS.keys()
    if unknown:
        raise MoEEpConfigError(
            f"model {type(model).__name__} has experts of class {', '.join(sorted(unknown))}, "
            f"which are not known; known models: {known}"
        )
    if not experts:
        raise MoEEpConfigError(
            f"model {type(model).__name__} has no routed experts that transformers can dispatch; "
            f"known models: {known}"
        )
    return experts


def _experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Those with the attribute that transformers' experts decorator puts on every one."""
    return {name: mod for name, mod in model.named_modules() if hasattr(mod, "is_concatenated")}


def experts_shape(experts: nn.Module) -> MoEShape:
    """Shape and activation of one experts module."""
    num_experts, dim_1, dim_2 = experts.down_proj.shape
    hidden, intermediate = (dim_2, dim_1) if experts.is_transposed else (dim_1, dim_2)
    return MoEShape(
        num_experts=num_experts,
        top_k=experts.config.num_experts_per_tok,
        hidden=hidden,
        intermediate=intermediate,
        activation=KNOWN_MODELS[type(experts).__name__].activation(experts),
    )


def experts_weights(experts: nn.Module) -> MoEWeights:
    """All E experts of one module in the canonical layout, BF16; views if the layout is.

    transposed      stored [E, H, N] and [E, I, H] instead of [E, N, H] and [E, H, I]
    concatenated    gate rows, then up rows; else gate and up alternate (gpt-oss)

    Raises `MoEEpConfigError` if the parameters are not BF16.
    """
    for name, parameter in experts.named_parameters():
        if parameter.dtype != torch.bfloat16:
            raise MoEEpConfigError(
                f"{name} of {type(experts).__name__} is {parameter.dtype}; allowed: "
                "torch.bfloat16 (load the model with dtype=torch.bfloat16)"
            )
    w13_ENH, w2_EHI = experts.gate_up_proj.detach(), experts.down_proj.detach()
    b13_EN = b2_EH = None
    if experts.has_bias:
        b13_EN, b2_EH = experts.gate_up_proj_bias.detach(), experts.down_proj_bias.detach()
    if experts.is_transposed:
        w13_ENH, w2_EHI = w13_ENH.mT, w2_EHI.mT
    if not experts.is_concatenated:
        w13_ENH = torch.cat((w13_ENH[:, 0::2], w13_ENH[:, 1::2]), dim=1)
        if b13_EN is not None:
            b13_EN = torch.cat((b13_EN[:, 0::2], b13_EN[:, 1::2]), dim=1)
    return MoEWeights.from_dense(w13_ENH.contiguous(), w2_EHI.contiguous(), b13=b13_EN, b2=b2_EH)


def _layer_weights(
    name: str, experts: nn.Module, group: EpGroup, weights_format: str, parallel: str
) -> MoEWeights:
    """This rank's weights. Quantised before the cut where the cut divides a matrix (tp)."""
    try:
        weights = experts_weights(experts)
        if parallel == "tp":
            return weights.quantize(weights_format).shard(parallel, group.rank, group.num_ranks)
        return weights.shard(parallel, group.rank, group.num_ranks).quantize(weights_format)
    except MoEEpConfigError as error:
        raise MoEEpConfigError(f"{name}: {error}") from None


def _replaceable_shapes(model: PreTrainedModel, weights_format: str) -> dict[str, MoEShape]:
    """Name of each experts module -> its shape, or an error if the model cannot be replaced."""
    weight_format(weights_format)
    found = find_experts(model)
    for name, experts in found.items():
        if hasattr(experts, "moe_ep_layer"):
            raise MoEEpStateError(f"{name} runs a MoEEpLayer already; load the model anew")
    return {name: experts_shape(experts) for name, experts in found.items()}


def _on_all_ranks(group: EpGroup, prepare: Callable[[], T], **fields: str | int) -> T:
    """`prepare()`, unless a rank refuses or one of `fields` differs: then all raise. Collective."""
    prepared = refusal = None
    try:
        prepared = prepare()
    except MoEEpError as error:
        refusal = error
    agree(group, fields, refusal, _TIMEOUT_S, topic="replace_moe_layers")
    return prepared


def _forward(
    experts: nn.Module,
    hidden_states_TH: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
) -> torch.Tensor:
    """What transformers calls instead of its own loop over the experts: [T, H] BF16."""
    layer = getattr(experts, "moe_ep_layer", None)
    if layer is None:
        raise MoEEpStateError(
            f"experts_implementation {EXPERTS_IMPLEMENTATION!r} is set, but this "
            f"{type(experts).__name__} holds no MoEEpLayer; call replace_moe_layers(model, ...) "
            "(a model that shares another's config object shares the setting: give it a copy)"
        )
    # transformers marks a masked slot with id == E, moe_ep with a negative id; some routers return
    # BF16 weights, which are exact in FP32.
    topk_ids_TK = topk_ids_TK.masked_fill(topk_ids_TK == experts.num_experts, -1)
    return layer.forward(MoEInputs(hidden_states_TH, topk_ids_TK, topk_weights_TK.float()))


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, _forward)


def replace_moe_layers(
    model: PreTrainedModel,
    group: EpGroup | torch.distributed.ProcessGroup | None = None,
    *,
    max_tokens_per_rank: int,
    backend: Backend | str = "auto",
    weights_format: str = "bf16",
    parallel: str = "ep",
) -> dict[str, MoEEpLayer]:
    """Let `MoEEpLayer` run the routed experts of `model`, in place. Collective over `group`.

    model                a transformers model in BF16 that holds all experts, on every rank
    group                `EpGroup` or any ProcessGroup; None is every rank of the job
    max_tokens_per_rank  most tokens (batch x sequence) of one forward on one rank
    weights_format       what the BF16 experts are quantised to
    parallel             "ep" (experts over ranks) or "tp" (every expert's intermediate over ranks)

    Returns name of the experts module -> its layer, for `explain()` and `destroy()`. The model's
    own expert parameters are released: afterwards a rank holds its share alone, and
    `save_pretrained` would write a model without experts. Every rank must then call the model the
    same number of times.

    Raises `MoEEpConfigError` on every rank for a model that is not known, naming the module for
    parameters that are not BF16 or cannot be quantised, and for what `MoEEpLayer` refuses; the
    model is untouched if the reason was seen before the first layer was built.
    """
    check_kind("model", model, PreTrainedModel, "a transformers model")
    if group is None:
        group = EpGroup.default(model.device)
    elif not isinstance(group, EpGroup):
        group = EpGroup.from_process_group(group, model.device)
    shapes = _on_all_ranks(
        group,
        partial(_replaceable_shapes, model, weights_format),
        model=type(model).__name__,
        experts_modules=len(_experts_modules(model)),
    )
    layers = {}
    for name, shape in shapes.items():
        experts = model.get_submodule(name)
        prepare = partial(_layer_weights, name, experts, group, weights_format, parallel)
        layers[name] = MoEEpLayer(
            shape,
            _on_all_ranks(group, prepare),
            max_tokens_per_rank=max_tokens_per_rank,
            backend=backend,
            group=group,
        )
        for parameter in [parameter for parameter, _ in experts.named_parameters(recurse=False)]:
            setattr(experts, parameter, None)
        experts.moe_ep_layer = layers[name]
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    return layers


@contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Collect what the routers chose: name of the experts module -> [T, K] int64 ids, one per call.

    Works for the untouched model and for a replaced one.
    """
    routing: dict[str, list[torch.Tensor]] = defaultdict(list)

    def hook(name: str) -> Callable[..., None]:
        def keep(_experts: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            routing[name].append(args[1].detach().to("cpu", torch.int64))

        return keep

    handles = [
        experts.register_forward_pre_hook(hook(name))
        for name, experts in find_experts(model).items()
    ]
    try:
        yield routing
    finally:
        for handle in handles:
            handle.remove()


def count_flips(
    routing: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]
) -> tuple[int, int]:
    """(tokens whose set of experts differs, tokens), over all layers and calls of two recordings.

    The order of the slots does not count: routers may return the same experts in another order.
    """
    flips = total = 0
    for name, calls in routing.items():
        for ids_TK, other_TK in zip(calls, other[name], strict=True):
            differs_T = (ids_TK.sort(dim=-1).values != other_TK.sort(dim=-1).values).any(dim=-1)
            flips += int(differs_T.sum())
            total += differs_T.numel()
    return flips, total
