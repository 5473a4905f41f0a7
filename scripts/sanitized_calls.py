"""The calls that `scripts/sanitize.sh` watches: small, values checked, waits without a time-out.

    python3 scripts/sanitized_calls.py [split] [ep] [tp]      default: all

The split layer's four kernels; the fused kernel under ep and under tp, on one rank and on two
virtual ones, on few SMs; twice each, so that both banks of counters are used. Everything is made on
the CPU: a checker that follows initialisation then sees copies, and no kernel of torch.
"""

import sys
from dataclasses import fields, replace
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("tests", "tests/field")]
from field_ranks import S0, assert_near, parts_of, weights_of, with_junk  # noqa: E402
from layer_cases import gathered, joined  # noqa: E402

from moe_ep import MoEEpLayer, MoEInputs, SplitConfig  # noqa: E402
from moe_ep.comm.group import EpGroup  # noqa: E402
from moe_ep.config import GroupedGemmConfig  # noqa: E402
from moe_ep.megakernel.formats import prepare  # noqa: E402
from moe_ep.megakernel.knobs import choose_row  # noqa: E402
from moe_ep.megakernel.mega_moe import MegaMoE  # noqa: E402
from moe_ep.reference import moe_oracle_fp64  # noqa: E402

CAPACITY = 16
MAX_SMS = 8  # a checker slows every CTA down that waits
COUNTS = (5, 11)
NAMES = ("hidden_states", "topk_ids", "topk_weights")


def on_gpu(thing):
    """A frozen dataclass with its tensors on the GPU."""
    values = {field.name: getattr(thing, field.name) for field in fields(thing)}
    return replace(
        thing,
        **{n: value.cuda() for n, value in values.items() if isinstance(value, torch.Tensor)},
    )


def run_mega(num_ranks: int, parallel: str) -> None:
    weights, knobs = weights_of(S0, "nvfp4"), choose_row("nvfp4", 1).knobs
    group = EpGroup.virtual(num_ranks) if num_ranks > 1 else EpGroup.single("cuda")
    mega = MegaMoE(
        *(group, S0, "nvfp4"),
        max_tokens_per_rank=CAPACITY,
        parallel=parallel,
        knobs=knobs,
        max_sms=MAX_SMS,
        is_bounded=False,
    )
    prepared, counts = prepare(weights), COUNTS[:num_ranks]
    if parallel == "tp":
        shards = [weights.shard("tp", rank, num_ranks) for rank in range(num_ranks)]
        prepared = joined([prepare(shard) for shard in shards])
    prepared = on_gpu(prepared)
    for seed in (0, 10):
        parts = parts_of(S0, counts, seed)
        if num_ranks == 1:
            inputs = [getattr(parts[0], name).cuda() for name in NAMES]
            options = {}
        else:
            inputs = [
                torch.stack([with_junk(getattr(part, name), CAPACITY) for part in parts]).cuda()
                for name in NAMES
            ]
            options = {"num_tokens": torch.tensor(counts, dtype=torch.int32).cuda()}
        out = torch.zeros(inputs[0].shape, dtype=torch.bfloat16).cuda()
        mega.forward(*inputs, prepared, out, **options)
        torch.cuda.synchronize()
        mega.check()
        held = out.cpu().view(num_ranks, -1, S0.hidden)
        output = torch.cat([held[rank, :count] for rank, count in enumerate(counts)])
        assert_near(output, moe_oracle_fp64(gathered(parts), weights, S0))
    print(f"mega, {num_ranks} ranks, {parallel}: values are right", flush=True)


def run_split() -> None:
    weights = weights_of(S0, "nvfp4")
    kernel = GroupedGemmConfig(knobs=choose_row("nvfp4", 1).knobs)
    layer = MoEEpLayer(
        *(S0, weights.to("cuda")),
        max_tokens_per_rank=CAPACITY,
        backend=SplitConfig(kernel=kernel),
    )
    for seed in (0, 10):
        (part,) = parts_of(S0, COUNTS[:1], seed)
        output = layer(MoEInputs(*(getattr(part, name).cuda() for name in NAMES)))
        layer.check()
        assert_near(output.cpu(), moe_oracle_fp64(part, weights, S0))
    print("split: values are right", flush=True)


if __name__ == "__main__":
    calls = sys.argv[1:] or ["split", "ep", "tp"]
    if "split" in calls:
        run_split()
    for parallel in ("ep", "tp"):
        for num_ranks in (1, 2) if parallel in calls else ():
            run_mega(num_ranks, parallel)
