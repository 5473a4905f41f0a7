"""The layer that a model calls, and its life: build, warm up, forward, refit, destroy."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from moe_ep.backends import choose_backend, describe
from moe_ep.comm.errors import (
    MoEEpConfigError,
    MoEEpStateError,
    MoEEpTimeoutError,
    MoEEpTransportError,
)
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.config import Backend
from moe_ep.construction import (
    check_arguments,
    check_timeout,
    make_backend,
    make_experts,
    resolve_group,
    why_apart,
)
from moe_ep.fingerprint import agree, fingerprint
from moe_ep.inputs import MoEInputs, check_inputs, check_tensor
from moe_ep.megakernel.problem import MoEShape
from moe_ep.placement import ExpertMap, PhysicalIds, check_placed, slots_shape
from moe_ep.rebalance import agree_on_moves, move_experts
from moe_ep.refit import check_update, stage
from moe_ep.weights import MoEWeights


class MoEEpLayer(torch.nn.Module):
    """One Mixture-of-Experts layer over the ranks of a group. A module without parameters.

    Building it is collective: every rank of the group builds its layers in the same order. All
    ranks raise if one rank's arguments do not pass, or if they disagree with rank 0's.

    shape                what the model knows of the layer
    weights              this rank's part, `weights.shard(parallel, rank, num_ranks)`; kept, not
                         copied, and overwritten by `update_weights`
    max_tokens_per_rank  capacity, the most tokens that a rank may bring to one call
    backend              "auto" (the first that can run), `MegaConfig` or `SplitConfig`
    group                `EpGroup` or any ProcessGroup; default: all ranks of the job, or this
                         process alone where torch.distributed is not initialised
    device               default: where the weights are; with an `EpGroup`, none but its own
    expert_map           which expert each slot holds (`moe_ep.placement`); `weights` are then those
                         of the slots. Default: every expert once, in order
    timeout_s            seconds that a call waits for the other ranks, 0.001 to 1e6; may differ
                         between ranks

    Raises `MoEEpConfigError` for arguments, `MoEEpUnavailableError` for a backend that cannot run
    here, `MoEEpTimeoutError` naming ranks that did not come.
    """

    def __init__(
        self,
        shape: MoEShape,
        weights: MoEWeights,
        *,
        max_tokens_per_rank: int,
        backend: Backend | str = "auto",
        group: EpGroup | torch.distributed.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        expert_map: ExpertMap | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__()
        check_timeout(timeout_s)
        asked_device = device
        if device is None:
            device = weights.device if isinstance(weights, MoEWeights) else "cpu"
        self._group = resolve_group(group, device)
        apart = why_apart(self._group, timeout_s)
        fields = refusal = None
        try:
            check_arguments(
                shape, weights, max_tokens_per_rank, self._group, expert_map, asked_device
            )
            slots = slots_shape(shape, expert_map)
            choice = choose_backend(
                slots,
                weights.weights_format,
                backend,
                self._group.device,
                parallel=weights.parallel,
                num_ranks=self._group.num_ranks,
                apart=apart,
                max_tokens_per_rank=max_tokens_per_rank,
            )
            experts = make_experts(slots, weights, choice.backend)
            fields = fingerprint(
                slots, weights, max_tokens_per_rank, choice.backend, self._group.device
            )
            fields["expert_map"] = repr(expert_map)
        except Exception as error:  # told to the other ranks, then raised
            refusal = error
        layer_id = agree(self._group, fields, refusal, timeout_s)

        self.shape = shape
        self.max_tokens_per_rank = max_tokens_per_rank
        self._timeout_s = timeout_s
        self._expert_map = expert_map
        self._to_slots = None
        if expert_map is not None:
            self._to_slots = PhysicalIds(expert_map, self._group.rank, self._group.device)
        self._form = weights.to("meta")  # what an update must look like; the kernel has the bytes
        self._choice = choice
        self._unusable: str | None = None
        self._liveness = (
            Liveness(self._group, layer_id, timeout_s) if self._group.num_ranks > 1 else None
        )
        self._backend = make_backend(
            *(choice.backend, experts, slots, weights, self._group, max_tokens_per_rank),
            *(self._liveness, layer_id, timeout_s),
        )

    @property
    def backend(self) -> Backend:
        """The backend that runs."""
        return self._choice.backend

    @property
    def group(self) -> EpGroup:
        return self._group

    def forward(
        self,
        inputs: MoEInputs,
        out: torch.Tensor | None = None,
        max_tokens: int | None = None,
    ) -> torch.Tensor:
        """BF16 [T, H] of this rank's tokens. Collective: every rank calls it equally often.

        out         BF16 [T, H] to write, any strides; default: a fresh tensor
        max_tokens  bound on T that the caller knows to be the same on all ranks; default: the
                    capacity

        Raises `MoEEpConfigError` on every rank if one rank's input does not pass, naming rank and
        argument (the next call works); `MoEEpTimeoutError` or `MoEEpTransportError` if ranks are
        lost (only `destroy` works then); `MoEEpStateError` in a layer that is not usable, and for a
        capture in a CUDA graph that the backend does not allow or that comes before `warmup`.
        Where kernels check the ids, a bad id of an earlier call is raised here.
        """
        self._require_usable()
        bound = self.max_tokens_per_rank if max_tokens is None else max_tokens
        try:
            self._backend.require_callable()
            try:
                self._check_call(inputs, out, bound)
            except MoEEpConfigError as refusal:
                self._backend.refuse(str(refusal))
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                if self._to_slots is not None:
                    inputs = replace(inputs, topk_ids=self._to_slots(inputs.topk_ids))
                return self._backend.forward(inputs, bound, out)
        except (MoEEpConfigError, MoEEpStateError):
            raise  # all ranks raise it, so they are still in step, or none has started
        except BaseException as error:
            self._poison(error)
            raise

    def warmup(self) -> None:
        """Compile and allocate everything, and make the first contact of the ranks. Collective."""
        self._require_usable()
        try:
            self._backend.warmup()
        except BaseException as error:
            self._poison(error)  # tells the other ranks, which wait in the forward below
            raise
        device, top_k = self._group.device, self.shape.top_k
        token = MoEInputs(
            torch.zeros(1, self.shape.hidden, dtype=torch.bfloat16, device=device),
            torch.arange(top_k, device=device)[None],
            torch.zeros(1, top_k, dtype=torch.float32, device=device),
        )
        self.forward(token)

    def update_weights(
        self,
        weights: MoEWeights | Mapping[str, torch.Tensor],
        *,
        format: str | None = None,
        prefix: str = "",
        gate_up_order: str | None = None,
        round_fp16: bool = False,
        allow_nonfinite: bool = False,
    ) -> None:
        """Refit in place, so that addresses stay. Not collective: call it on every rank between
        the same two forwards.

        weights   `MoEWeights` of the same kind; or checkpoint name -> whole tensor, for all of the
                  layer or a part of it ({"5.up_proj.weight": ...}), the same on every rank
        format    of named tensors, and `gate_up_order`, `round_fp16`, `allow_nonfinite`: as in
                  `moe_ep.load`
        prefix    before the names that the format has, "model.layers.3.mlp.experts."

        Named tensors are put together on copies of the experts that they change.

        Raises `MoEEpConfigError`, having written nothing, for a name that is not known, and unless
        format, ownership and every tensor's dtype, shape and device are those the layer was built
        with. A kernel that refuses values while it prepares them leaves a layer that is not usable.
        """
        self._require_usable()
        if isinstance(weights, Mapping):
            slots = self._form.expert_ids
            write = stage(
                weights,
                self._backend.held,
                self._form,
                num_experts=self.shape.num_experts,
                experts=self._expert_map.logical_of(slots) if self._expert_map else slots,
                format=format,
                prefix=prefix,
                gate_up_order=gate_up_order,
                round_fp16=round_fp16,
                allow_nonfinite=allow_nonfinite,
            )
        else:
            check_update(weights, self._form, self._group.device)
            if format is not None or prefix:
                raise MoEEpConfigError("format and prefix go with named tensors, not MoEWeights")
            check_placed(weights, self._expert_map)
            write = partial(self._backend.update_weights, weights)
        self._write_weights(write)

    def rebalance(self, expert_map: ExpertMap) -> None:
        """Move experts, weights and scales together, to the slots of another map, in place; outputs
        keep their bits. Collective, between the same two forwards.

        Needs memory for the experts that this rank sends and receives. For a layer built with an
        `expert_map` (`ExpertMap.identity` has no copies), on as many slots as that one.

        Raises `MoEEpConfigError` on every rank, having moved nothing, if a rank's map does not pass
        or differs; `MoEEpTimeoutError` or `MoEEpTransportError` if ranks are lost.
        """
        self._require_usable()
        if self._expert_map is None:
            raise MoEEpConfigError("rebalance needs a layer built with expert_map, this has none")
        moves = agree_on_moves(self._group, self._expert_map, expert_map, self._timeout_s)
        place = (self._group, self._liveness, self._backend.held, self._form)
        self._write_weights(partial(move_experts, *place, moves, self._timeout_s))
        self._expert_map = expert_map
        self._to_slots.update(expert_map)

    def _write_weights(self, write: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():  # which may write to tensors made inside it, and to others
                write()
        except BaseException as error:
            self._poison(error)
            raise

    def check(self) -> None:
        """Raise `MoEEpStateError` in a layer that is not usable, and any error that a kernel found
        and that no call has raised yet; waits for the GPU where a kernel checks the ids."""
        self._require_usable()
        try:
            self._backend.check()
        except MoEEpTimeoutError as error:
            self._poison(error)
            raise

    def explain(self) -> str:
        """Which backend runs and why; why each other one of "auto" does not."""
        group, form = self._group, self._form
        where = f"rank {group.rank} of {group.num_ranks} on {group.device}"
        if self._backend is not None:
            sizes = [f"{n} {size / 1e6:.1f} MB" for n, size in self._backend.memory.items()]
            where += (
                f", {form.num_local_experts} of {form.num_experts} experts in "
                f"{form.weights_format}, {', '.join(sizes)}"
            )
        return f"{where}\n{self._choice.explain()}"

    def destroy(self) -> None:
        """Release weights and transport. Idempotent, allowed in every state, not collective."""
        self._unusable = "the layer was destroyed"
        if self._backend is not None:
            self._backend.destroy()
            self._backend = None

    def extra_repr(self) -> str:
        return f"{self.shape}, max_tokens_per_rank={self.max_tokens_per_rank}, " + describe(
            self.backend
        )

    def _check_call(self, inputs: MoEInputs, out: torch.Tensor | None, bound: int) -> None:
        if not isinstance(inputs, MoEInputs):
            raise MoEEpConfigError(f"inputs must be MoEInputs, got {type(inputs).__name__}")
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise MoEEpConfigError(f"max_tokens must be an int, got {bound!r}")
        if not 0 <= bound <= self.max_tokens_per_rank:
            raise MoEEpConfigError(
                f"max_tokens is {bound}; allowed: 0 to max_tokens_per_rank "
                f"{self.max_tokens_per_rank}"
            )
        reads_ids = not self._backend.finds_bad_ids
        check_inputs(inputs, self.shape, bound, self._group.device, reads_ids=reads_ids)
        if out is None:
            return
        wanted = inputs.hidden_states.shape
        check_tensor("out", out, (torch.bfloat16,), wanted, self._group.device)
        end = 0  # of what the narrower dimensions cover
        for stride, length in sorted(zip(out.stride(), wanted, strict=True)):
            if length > 1 and stride <= end:
                raise MoEEpConfigError(
                    f"out has strides {out.stride()}; allowed: no element that stands for several"
                )
            end += stride * (length - 1)

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise MoEEpStateError(f"{self._unusable}; only destroy() is allowed, then a new layer")

    def _poison(self, error: BaseException) -> None:
        """Nobody knows how far the other ranks got: no further call can be in step with them."""
        self._unusable = f"an earlier call failed ({type(error).__name__}: {error})"
        if self._liveness and not isinstance(error, MoEEpTimeoutError | MoEEpTransportError):
            self._liveness.announce(f"{type(error).__name__}: {error}")

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise MoEEpStateError(
            "MoEEpLayer is bound to its device, format and ranks: .to(), .half(), .cuda() and the "
            "like are not allowed; convert MoEWeights and build a new layer"
        )

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise MoEEpStateError("MoEEpLayer is bound to its ranks: it cannot be copied")

    def __reduce_ex__(self, protocol: int) -> NoReturn:
        raise MoEEpStateError("MoEEpLayer is bound to its ranks: it cannot be copied or pickled")
