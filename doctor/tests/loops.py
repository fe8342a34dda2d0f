"""What the doctor's test programs share: tiny models, batches of text-like ids, and how a diagnosis
is judged.

A program is a function that builds a model, trains it for a few steps under `doctor.watch` the way
people write loops, and returns the report. Programs differ from each other in shape on purpose;
only their raw material is shared here.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as tf
from torch import Tensor, nn

from loopdoctor import ERROR, NOTE, Report

VOCABULARY = 256
# for processes that import from tests
ELSEWHERE = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
CONFIGS = {
    "qwen3": tf.Qwen3Config,
    "llama": tf.LlamaConfig,
    "gpt2": tf.GPT2Config,
    "qwen3_moe": tf.Qwen3MoeConfig,
    "mixtral": tf.MixtralConfig,
}


def lm(
    family: str = "qwen3",
    *,
    vocab: int = VOCABULARY,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    seed: int = 0,
    **config,
) -> nn.Module:
    """A tiny causal language model of transformers, in train mode; the caller's generator is left
    as it was.
    """
    shape = dict(
        vocab_size=vocab,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    if family == "gpt2":
        shape |= dict(n_embd=hidden, n_layer=layers, n_head=heads, n_positions=256)
    else:
        shape |= dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads)
        shape |= dict(
            max_position_embeddings=256,
            intermediate_size=3 * hidden,
            num_key_value_heads=heads // 2,
        )
    if family.startswith("qwen3"):
        shape["head_dim"] = hidden // heads
    if family == "qwen3_moe":
        shape |= dict(num_experts_per_tok=2, num_experts=8, moe_intermediate_size=hidden)
    if family == "mixtral":
        shape |= dict(num_experts_per_tok=2, num_local_experts=8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = tf.AutoModelForCausalLM.from_config(
            CONFIGS[family](**(shape | config)), dtype=torch.float32
        )
    return made.train()


def in_four_bits(folder: str) -> nn.Module:
    """A model loaded as bitsandbytes packs it, kept from repacking itself for inference, which has
    no backward.
    """
    from bitsandbytes.nn import Linear4bit

    packed = tf.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu", quantization_config=packed
    )
    for m in model.modules():
        if isinstance(m, Linear4bit):
            m.support_avx512bf16_for_cpu = False
    return model


class FusedCrossEntropy(torch.autograd.Function):
    """Summed over rows without logits in the graph, as fused kernels do it: the gradients are made
    in the forward.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chances, rows = (hidden @ weight.T).softmax(-1), torch.arange(len(targets))
        loss = -chances[rows, targets].log().sum()
        chances[rows, targets] -= 1  # now the slope of the loss in the logits: p - onehot
        ctx.save_for_backward(chances @ weight, chances.T @ hidden)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        into_hidden, into_weight = ctx.saved_tensors
        return grad * into_hidden, grad * into_weight, None


class RoundingAdamW(torch.optim.Optimizer):
    """AdamW with fp32 moments that writes bf16 weights, up or down by chance, so that the mean is
    exact.
    """

    def __init__(self, params, lr: float):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    exact = p.float() + self._update(p, group["lr"])
                    # bf16 is fp32's upper half
                    noise = torch.randint_like(exact, 1 << 16, dtype=torch.int32)
                    p.copy_(
                        (exact.view(torch.int32) + noise).bitwise_and(-65536).view(torch.float32)
                    )

    def _update(self, p: Tensor, lr: float) -> Tensor:
        s = self.state[p]
        if not s:
            s.update(
                step=0,
                m=torch.zeros_like(p, dtype=torch.float32),
                v=torch.zeros_like(p, dtype=torch.float32),
            )
        s["step"] += 1
        s["m"].lerp_(p.grad.float(), 0.1)
        s["v"].lerp_(p.grad.float().square(), 0.001)
        size = (s["v"] / (1 - 0.999 ** s["step"])).sqrt_().add_(1e-8)
        return -lr / (1 - 0.9 ** s["step"]) * s["m"] / size


def batches(
    count: int, rows: int = 4, length: int = 32, *, vocab: int = VOCABULARY, seed: int = 0
) -> list[torch.Tensor]:
    """Token ids (rows, length) that can be learnt: each token mostly follows from the one
    before.
    """
    make = torch.Generator().manual_seed(seed)
    table = torch.randint(3, vocab, (vocab,), generator=make)
    made = []
    for _ in range(count):
        ids = torch.randint(3, vocab, (rows, length), generator=make)
        for t in range(1, length):
            follow = torch.rand(rows, generator=make) < 0.7
            ids[:, t] = torch.where(follow, table[ids[:, t - 1]], ids[:, t])
        made.append(ids)
    return made


def quiet(program: Callable[[], Report]) -> Report:
    """Run a program without its warnings; one that ends in an exception must have caught it
    itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return program()


def assert_root(report: Report, *checks: str) -> None:
    """The first cause named is one of these, and watching itself had no fault."""
    assert report.done and not report.faults, report.faults
    assert report.root is not None and report.root.check in checks, f"expected {checks}\n{report}"


def assert_healthy(report: Report, *, warnings_allowed: tuple[str, ...] = ()) -> None:
    """No error at all, no warning but those allowed, and something was really looked at."""
    assert report.done and not report.faults, report.faults
    wrong = [f for f in report.findings if f.severity == ERROR]
    wrong += [
        f
        for f in report.findings
        if f.severity not in (ERROR, NOTE) and f.check not in warnings_allowed
    ]
    assert not wrong, f"\n{report}"
    assert sum(v.state == "OK" for v in report.verdicts.values()) >= 3


def said(report) -> set[str]:
    """Ids of what a report says above a note."""
    assert report.done and not report.faults, report.faults
    return {f.check for f in report.findings if f.severity != NOTE}
