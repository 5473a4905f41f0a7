"""Field cases about which build of a kernel runs: chosen by rank, tuned too early, failed on one.

No build is chosen by a timing: `make_buckets` is a function of shape, format, capacity and number
of ranks, `choose_bucket` of the bound on tokens, which are the same on all ranks.
"""

import threading
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from field_ranks import S0, TIMEOUT_S, device_of, on, places
from layer_cases import make_inputs
from test_lifecycle import build

from moe_ep.comm.errors import MoEEpError
from moe_ep.launch import spawn
from moe_ep.megakernel import compile_cache
from moe_ep.megakernel.knobs import choose_knobs
from moe_ep.megakernel.mega_moe import choose_bucket, make_buckets

TOKENS = (1, 4, 16, 64, 256, 1024)


@contextmanager
def busy(device: str):
    """A thread that multiplies matrices meanwhile."""
    is_over = threading.Event()

    def work() -> None:
        matrix = torch.randn(512, 512, device=device)
        stream = torch.cuda.Stream() if device != "cpu" else None
        while not is_over.is_set():
            with torch.cuda.stream(stream):
                matrix = matrix @ matrix / 512
            if stream is not None:
                stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    is_over.set()
    thread.join()


@on("cpu2", "mega@2")
def test_A08_a_loaded_rank_takes_the_builds_of_an_idle_one(ranks):
    def chosen() -> list[str]:
        buckets = make_buckets("nvfp4", S0, 1024, ranks.num_ranks)
        if ranks.kind == "mega":
            layer = ranks.module(S0, ranks.weights(), 1024, takes_table=True)
            layer.warmup()
            buckets = layer._backend._mega.buckets
        return [repr(buckets[choose_bucket(buckets, tokens)]) for tokens in TOKENS]

    if ranks.rank == 1:
        with busy(ranks.device):
            mine = [chosen() for _ in range(10)]
    else:
        mine = [chosen() for _ in range(10)]
    held = [None] * ranks.num_ranks
    dist.all_gather_object(held, mine)
    assert all(builds == held[0][0] for rank in held for builds in rank)
    assert len(set(held[0][0])) > 1


def fail_on_rank_one(rank: int, num_ranks: int, kind: str) -> tuple[str, str]:
    """One build of rank 1 does not compile."""
    layer = build(kind, rank, num_ranks, timeout_s=TIMEOUT_S)

    def fails() -> None:
        raise MoEEpError("kernel mega_moe did not compile for this rank")

    if rank == 1:
        (layer._backend._mega if kind == "mega" else layer._backend).warmup = fails
    with pytest.raises(MoEEpError) as error:
        layer.warmup()
    layer.destroy()
    if kind == "mega":  # gloo cannot go on: rank 0 was in the call that follows
        build(kind, rank, num_ranks).warmup()
    return str(error.value), type(error.value).__name__


@pytest.mark.parametrize(("kind", "num_ranks"), places(("cpu", 2), ("mega", 2)))
def test_A09_a_build_that_fails_on_one_rank_raises_on_all(kind, num_ranks):
    (text_0, _), (text_1, _) = spawn.run(
        fail_on_rank_one, num_ranks, kind, device=device_of(kind), timeout_s=60.0
    )
    assert text_1 == "kernel mega_moe did not compile for this rank"
    assert "rank 1" in text_0 and text_1 in text_0


@on("mega1", "split1")
def test_A09_a_build_that_fails_leaves_a_layer_that_says_so_and_the_next_one_works(
    ranks, monkeypatch, tmp_path
):
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_cache, "_loaded", {})
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache.sys, "executable", "/bin/false")
        layer = ranks.module(S0, ranks.weights())
        with pytest.raises(MoEEpError, match="did not compile for .*exit code 1"):
            layer.warmup()
        with pytest.raises(MoEEpError, match="an earlier call failed"):
            layer.check()
        layer.destroy()
    monkeypatch.undo()
    inputs = make_inputs(S0, 16, seed=0)
    ranks.assert_right(ranks.layer(S0, ranks.weights())([inputs]), [inputs], ranks.weights())


def test_A91_the_build_for_many_tokens_is_the_tables_whatever_was_called_before():
    for name in ("nvfp4", "bf16"):
        buckets = make_buckets(name, S0, 4096, 1)
        for tokens in (4, 1024, 4, 4096):
            knobs = buckets[choose_bucket(buckets, tokens)].knobs
            assert tokens <= buckets[choose_bucket(buckets, tokens)].max_tokens
            mean_rows = tokens * S0.top_k / S0.num_experts
            wanted = choose_knobs(name, mean_rows + 1.5 * mean_rows**0.5)
            assert knobs.tile_widths == wanted.tile_widths


@on("mega2")
def test_A91_a_first_call_of_few_tokens_does_not_fix_the_build_of_many(ranks, monkeypatch):
    few, many = ranks.parts(S0, 4), ranks.parts(S0, 1024, seed=9)
    outputs, taken = [], []
    for order in ((0, 1), (1, 0)):
        layer = ranks.layer(S0, ranks.weights(), 1024, takes_table=True)
        bind = layer.mega._bind
        monkeypatch.setattr(
            layer.mega, "_bind", lambda *a, bind=bind: taken.append(a[0]) or bind(*a)
        )
        calls = [layer.bind(few, max_tokens=4), layer.bind(many, max_tokens=1024)]
        for which in order:
            calls[which].launch()
        layer.check()
        outputs.append([*calls[0].outputs(), *calls[1].outputs()])
        layer.destroy()
    last = len(make_buckets("nvfp4", S0, 1024, 2)) - 1
    assert taken == [0, last, last, 0]
    assert all(map(torch.equal, *outputs))
    ranks.assert_right(outputs[0], few + many, ranks.weights())
