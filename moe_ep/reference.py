"""The specification: one MoE layer in plain torch, every rounding point visible.

    fc1   = x w13^T               FP32 sums; times the global scale; plus bias
    h     = activation(fc1)       FP32, then one rounding to BF16
    term  = h w2^T                FP32 sums; times the global scale; plus bias; one rounding to BF16
    y     = sum over the slots of topk_weight * term, in slot order, FP32; one rounding to BF16

Letters: P rows of one expert, T tokens, K slots, H hidden, I intermediate, E experts.

On CPU a row's bits must not depend on the rows beside it: matmuls run in FP32 as `cpu_matmul.py`
says, and activations are built from `exp` and `tanh`, because torch's own matmuls and activations
change bits with the number of rows, threads and tails. Weights are decoded and upcast one matrix at
a time; the memory beside them is that one FP32 matrix, of every thread.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from moe_ep import cpu_matmul
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.cpu_matmul import Result, padded, run_tasks
from moe_ep.inputs import MoEInputs
from moe_ep.megakernel.problem import Activation, MoEShape
from moe_ep.weights import MoEWeights


def activate(fc1_PN: torch.Tensor, activation: Activation) -> torch.Tensor:
    """FP32 [P, N] (gate half, then up half; up alone when not gated) -> FP32 [P, I].

    The formulas are `Activation`'s, built from exp, tanh, * and / alone. NaN passes the clamps.
    """
    if not activation.is_gated:
        up = torch.clamp(fc1_PN, min=0)
        return up * up
    gate, up = fc1_PN.chunk(2, dim=-1)
    if activation.limit is not None:
        gate = torch.clamp(gate, max=activation.limit)
        up = torch.clamp(up, min=-activation.limit, max=activation.limit)
    alpha, beta = activation.alpha, activation.beta
    match activation.kind:
        case "swiglu":
            if beta != 0:
                up = up + beta
            return _times_sigmoid(gate, gate if alpha == 1 else gate * alpha).mul_(up)
        case "geglu_tanh":
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * (gate * gate * gate))
            return 0.5 * gate * (1 + torch.tanh(inner)) * up
        case "reglu":
            return torch.clamp(gate, min=0) * up
        case "situ":
            if beta > 0:
                up = beta * torch.tanh(up / beta)
            return _times_sigmoid(alpha * torch.tanh(gate / alpha), gate).mul_(up)
    raise AssertionError(activation.kind)


def _times_sigmoid(value: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """value * sigmoid(z) = value / (1 + exp(-z)), a fresh tensor."""
    denominator = torch.neg(z).exp_().add_(1)
    return torch.div(value, denominator, out=denominator)


def expert_terms(
    x_PH: torch.Tensor, weights: MoEWeights, local_expert_idx: int, activation: Activation
) -> torch.Tensor:
    """One expert on its rows: BF16 [P, H] -> terms [P, H].

    Terms are BF16 under ep. Under tp they are this rank's FP32 part of the FC2 sums, not rounded.
    """
    task = partial(_expert_sums, x_PH, weights, local_expert_idx, activation)
    return _run([task], x_PH)[0].to(_term_dtype(weights))


def grouped_expert_terms(
    x_PH: torch.Tensor,
    num_rows_per_expert: Sequence[int],
    weights: MoEWeights,
    activation: Activation,
) -> torch.Tensor:
    """All local experts on expert-sorted rows: BF16 [P, H] -> terms [P, H].

    `num_rows_per_expert` has one count for each local expert; their sum is P.
    """
    terms_PH = torch.empty(x_PH.shape, dtype=_term_dtype(weights), device=x_PH.device)
    rows = torch.split(x_PH, list(num_rows_per_expert))
    terms = torch.split(terms_PH, list(num_rows_per_expert))

    def compute(local_expert_idx: int) -> None:
        sums = _expert_sums(rows[local_expert_idx], weights, local_expert_idx, activation)
        terms[local_expert_idx].copy_(sums)

    _run([partial(compute, i) for i, x_pH in enumerate(rows) if len(x_pH)], x_PH)
    return terms_PH


def _run(tasks: Sequence[Callable[[], Result]], x: torch.Tensor) -> list[Result]:
    """On a GPU one after the other, else as `cpu_matmul` says."""
    return [task() for task in tasks] if x.is_cuda else run_tasks(tasks)


def _term_dtype(weights: MoEWeights) -> torch.dtype:
    return torch.float32 if weights.parallel == "tp" else torch.bfloat16


def fc1_sums(x_PH: torch.Tensor, weights: MoEWeights, local_expert_idx: int) -> torch.Tensor:
    """x w13^T of one expert, scaled, plus bias: BF16 [P, H] -> FP32 [P, fc1_rows]."""
    return _run([partial(_linear, x_PH, weights, "w13", local_expert_idx)], x_PH)[0]


def fc2_sums(hidden_PI: torch.Tensor, weights: MoEWeights, local_expert_idx: int) -> torch.Tensor:
    """h w2^T of one expert, scaled, plus bias: BF16 [P, I] -> FP32 [P, H], not rounded yet."""
    return _run([partial(_linear, hidden_PI, weights, "w2", local_expert_idx)], hidden_PI)[0]


def _expert_sums(
    x_PH: torch.Tensor, weights: MoEWeights, local_expert_idx: int, activation: Activation
) -> torch.Tensor:
    """One expert on its rows: BF16 [P, H] -> FP32 [P, H], before the rounding to a term."""
    fc1_PN = fc1_sums(x_PH, weights, local_expert_idx)
    hidden_PI = activate(fc1_PN, activation).to(torch.bfloat16)
    return fc2_sums(hidden_PI, weights, local_expert_idx)


def combine_parts(
    terms_TKH: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Sum over the slots 0..K-1: FP32 [T, H], not rounded.

    The sum starts at +0; each slot multiplies, then adds, each rounded to FP32 (two kernels, so
    that nothing contracts them to an FMA). A masked slot (negative id) is skipped: whatever its
    term holds, NaN included, has no effect.
    """
    num_tokens, top_k, hidden = terms_TKH.shape
    total_TH = torch.zeros(num_tokens, hidden, dtype=torch.float32, device=terms_TKH.device)
    product_TH = torch.empty_like(total_TH)
    keep_TK = -(topk_ids >= 0).int()  # all bits, or none
    for slot_idx in range(top_k):
        torch.mul(terms_TKH[:, slot_idx], topk_weights[:, slot_idx, None], out=product_TH)
        # Skipped: cleared to +0 bit by bit, whatever it was; the total is never -0.
        product_TH.view(torch.int32).bitwise_and_(keep_TK[:, slot_idx, None])
        total_TH += product_TH
    return total_TH


def combine_terms(
    terms_TKH: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """BF16 terms [T, K, H] and FP32 routing weights [T, K] -> BF16 [T, H], one rounding."""
    return combine_parts(terms_TKH, topk_ids, topk_weights).to(torch.bfloat16)


def moe_reference(inputs: MoEInputs, weights: MoEWeights, shape: MoEShape) -> torch.Tensor:
    """The layer on gathered tensors, `weights` holding every expert: BF16 [T, H]."""
    terms_TKH = _slot_terms(inputs, weights, shape)
    return combine_terms(terms_TKH, inputs.topk_ids, inputs.topk_weights)


def moe_reference_tp(
    inputs: MoEInputs, shards: Sequence[MoEWeights], shape: MoEShape
) -> torch.Tensor:
    """The layer with every expert's intermediate divided over `shards`: BF16 [T, H].

    Each rank combines its FP32 FC2 sums; the parts are added in rank order; one rounding.
    """
    total_TH = torch.zeros_like(inputs.hidden_states, dtype=torch.float32)
    for shard in shards:
        terms_TKH = _slot_terms(inputs, shard, shape)
        total_TH += combine_parts(terms_TKH, inputs.topk_ids, inputs.topk_weights)
    return total_TH.to(torch.bfloat16)


def moe_oracle_fp64(inputs: MoEInputs, weights: MoEWeights, shape: MoEShape) -> torch.Tensor:
    """The layer in FP64 on exactly dequantised weights, no rounding in between: FP64 [T, H]."""
    terms_TKH = terms_oracle_fp64(inputs, weights, shape)
    is_used_TK = inputs.topk_ids >= 0
    weights_TK = torch.where(is_used_TK, inputs.topk_weights.double(), 0)
    return (weights_TK[..., None] * terms_TKH).sum(dim=1)


def terms_oracle_fp64(inputs: MoEInputs, weights: MoEWeights, shape: MoEShape) -> torch.Tensor:
    """FP64 terms [T, K, H] of all slots, 0 for masked ones."""
    terms_TKH = torch.zeros(*inputs.topk_ids.shape, shape.hidden, dtype=torch.float64)
    for local_expert_idx, expert_idx in enumerate(weights.expert_ids):
        tokens, slots = (inputs.topk_ids == expert_idx).nonzero(as_tuple=True)
        matrices = [
            weights.dequantize_expert(n, local_expert_idx, torch.float64) for n in ("w13", "w2")
        ]
        biases = [
            b if b is None else b[local_expert_idx].double() for b in (weights.b13, weights.b2)
        ]
        fc1_PN = F.linear(inputs.hidden_states[tokens].double(), matrices[0], biases[0])
        hidden_PI = _activate_fp64(fc1_PN, shape.activation)
        terms_TKH[tokens, slots] = F.linear(hidden_PI, matrices[1], biases[1])
    return terms_TKH


def _activate_fp64(fc1_PN: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activate` in FP64 from torch's own functions."""
    kind, alpha, beta = activation.kind, activation.alpha, activation.beta
    if kind == "relu2":
        return F.relu(fc1_PN).square()
    gate, up = fc1_PN.tensor_split(2, dim=1)
    if activation.limit is not None:
        gate = gate.minimum(gate.new_tensor(activation.limit))
        up = F.hardtanh(up, -activation.limit, activation.limit)
    if kind == "swiglu":
        return gate * torch.sigmoid(alpha * gate) * (up + beta)
    if kind == "geglu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if kind == "reglu":
        return F.relu(gate) * up
    capped = beta * torch.tanh(up / beta) if beta > 0 else up
    return alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * capped


def _slot_terms(inputs: MoEInputs, weights: MoEWeights, shape: MoEShape) -> torch.Tensor:
    """Terms [T, K, H] of every routed slot; those of masked slots are left unwritten."""
    ids_TK = inputs.topk_ids
    if ids_TK.numel() and int(ids_TK.max()) >= shape.num_experts:
        raise MoEEpConfigError(
            f"topk_ids holds {int(ids_TK.max())}; allowed: negative (masked) or below "
            f"num_experts {shape.num_experts}"
        )
    terms_TKH = torch.empty(
        *ids_TK.shape, shape.hidden, dtype=_term_dtype(weights), device=ids_TK.device
    )
    for local_expert_idx, expert_idx in enumerate(weights.expert_ids):
        tokens, slots = (ids_TK == expert_idx).nonzero(as_tuple=True)
        if len(tokens):
            terms_TKH[tokens, slots] = expert_terms(
                inputs.hidden_states[tokens], weights, local_expert_idx, shape.activation
            )
    return terms_TKH


def _linear(x_PC: torch.Tensor, weights: MoEWeights, name: str, expert: int) -> torch.Tensor:
    """FP32 [P, N]: the rows times one expert's matrix, its global scales and its bias."""
    is_cuda = x_PC.is_cuda
    rows_PC, matmul = (x_PC, _matmul_cuda) if is_cuda else (padded(x_PC), cpu_matmul.matmul)
    w_NC = weights.unscaled(name, expert)
    if weights.weights_format == "fp8_block":
        # acc = acc + s * partial for each 128 columns, ascending; multiply and add each rounded.
        out_PN = 0
        for block_idx, sf_N in enumerate(weights.fp8_scales(name, expert).t()):
            columns = slice(128 * block_idx, 128 * (block_idx + 1))
            out_PN = matmul(rows_PC[:, columns], w_NC[:, columns]).mul_(sf_N).add_(out_PN)
    else:
        out_PN = matmul(rows_PC, w_NC)
    for rows, scale in weights.global_scales(name, expert):
        out_PN[:, rows] *= scale
    bias = weights.b13 if name == "w13" else weights.b2
    if bias is not None:
        out_PN += bias[expert]
    return out_PN[: len(x_PC)]


def _matmul_cuda(x_PC: torch.Tensor, w_NC: torch.Tensor) -> torch.Tensor:
    """x w^T with FP32 sums, on tensor cores: both hold BF16 values."""
    return torch.mm(x_PC, w_NC.bfloat16().t(), out_dtype=torch.float32)
