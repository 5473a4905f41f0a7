"""The demo: real text, fixed steps, and an exit code that says whether its questions passed."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_ep.launch import demo
from moe_ep.launch.demo_report import Deviation, Report

# Three demos in a row, as a user starts them: half a minute each on an idle machine.
pytestmark = pytest.mark.timeout(600)

PASSED = Report(
    backend="split",
    device="cpu",
    num_ranks=2,
    num_prompts=2,
    prompt_bytes=10,
    new_tokens=4,
    prompt_bytes_per_s=1.0,
    tokens_per_s=1.0,
    one_rank_tokens_per_s=1.0,
    tokens_per_expert=[1] * 16,
    owner_of_expert=[0] * 8 + [1] * 8,
    difference=Deviation(total=1.0, count=2, largest=2.0, flips=0, routings=4),
    noise=Deviation(total=1.0, count=2, largest=1.0, flips=1, routings=4),
    logits_identical=True,
    tokens_identical=True,
    text_digest="00",
    digest="00",
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[int, dict]:
    """Number of ranks -> the report of `moe-ep demo` as a user starts it, exit code 0."""
    folder = tmp_path_factory.mktemp("demo")
    found = {}
    for ranks in (1, 2, 4):
        path = folder / f"{ranks}.json"
        command = [sys.executable, "-m", "moe_ep.launch.cli", "demo", f"--ranks={ranks}"]
        done = subprocess.run(
            [*command, "--prompts=4", "--new-tokens=4", f"--json={path}"],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "bit-identical to the run on one rank" in done.stdout
        found[ranks] = json.loads(path.read_text())
    return found


def test_logits_and_tokens_have_the_same_bits_on_1_2_and_4_ranks(reports):
    assert len({report["text_digest"] for report in reports.values()}) == 1
    assert len({report["digest"] for report in reports.values()}) == 1
    assert [report["num_ranks"] for report in reports.values()] == [1, 2, 4]


def test_every_routed_slot_is_counted_once_for_any_number_of_ranks(reports):
    tokens = sum(demo.prompt_lengths(4)) + 4 * 4
    for report in reports.values():
        assert sum(report["tokens_per_expert"]) == tokens * demo.TOP_K * demo.NUM_LAYERS
    assert reports[1]["tokens_per_expert"] == reports[4]["tokens_per_expert"]


def test_prompts_are_real_text_of_different_lengths():
    prompts = [bytes(prompt[0].tolist()) for prompt in demo.real_text_prompts([448, 464, 480, 496])]
    readme = (Path(demo.__file__).resolve().parent.parent / "README.md").read_bytes()
    assert list(map(len, prompts)) == [448, 464, 480, 496]
    assert prompts[0].startswith(readme[:448])
    assert len(set(prompts)) == len(prompts)
    assert b"statement" in b"".join(prompts[1::2])


def test_generate_takes_the_greedy_tokens_of_transformers_own_generate():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    prompts = [torch.randint(256, (1, length)) for length in (5, 9)]
    generation = demo.generate(model, prompts, new_tokens=12)
    for prompt, tokens, logits in zip(prompts, generation.tokens, generation.logits, strict=True):
        want = model.generate(prompt, do_sample=False, max_new_tokens=12, eos_token_id=None)
        assert torch.equal(tokens, want[0, prompt.shape[1] :])
        assert logits.shape == (prompt.shape[1] + 11, 256)


def test_report_at_the_limits_passes():
    assert PASSED.failures() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logits_identical": False}, "logits differ"),
        ({"tokens_identical": False}, "tokens differ"),
        ({"difference": replace(PASSED.difference, total=1.1)}, "mean ratio 1.10 is above 1"),
        ({"difference": replace(PASSED.difference, largest=2.1)}, "largest ratio 2.10 is above 2"),
        ({"difference": replace(PASSED.difference, total=float("nan"))}, "mean ratio nan"),
    ],
)
def test_each_criterion_alone_fails_the_demo(monkeypatch, capsys, change, reason):
    report = replace(PASSED, **change)
    monkeypatch.setattr(demo, "run_on_rank", lambda *_: report)
    args = argparse.Namespace(ranks=1, prompts=2, new_tokens=4, backend="auto", json=None)
    assert demo.run(args) == 1
    assert reason in capsys.readouterr().out


def test_logits_that_differ_in_one_bit_are_not_identical():
    logits = torch.zeros(4, dtype=torch.bfloat16)
    assert demo._same_bits(logits, logits.clone())
    assert not demo._same_bits(logits, torch.tensor([0, 0, 0, -0.0], dtype=torch.bfloat16))
