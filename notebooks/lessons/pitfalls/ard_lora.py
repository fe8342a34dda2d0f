"""Adapters with noise: where the KL is taken, what a prior averages over, and what may be called
uncertainty.

An ARD adapter draws a latent for each token and pays for it with a KL term
(nblib/methods/ard/layer.py). Its failures raise nothing: the loss falls, every tensor moves, and a
number that people trust means something else. They are shown on a byte-level model, and on a
regression whose answer is known because it was planted.

Footgun: B starts at zero. So at first an adapter's noise does not reach the output, and the
gradient of the cross-entropy is zero for all its other tensors. The models compared here have been
trained for some steps, or were given random values.
"""

import copy
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import peft
import torch
from torch import Tensor, nn

from lessons.pitfalls import WITH_PEFT, Pitfall
from lessons.pitfalls.bench import (
    base,
    batches,
    checkpointed,
    flow,
    held_out_loss,
    learn,
    quiet,
    seeded,
    stream,
    trained,
    wake,
)
from nblib import losses, wiring
from nblib.methods import ard
from nblib.methods.ard import ranks, uncertainty

RANK, KINDS = 4, ["q_proj", "v_proj"]


def adapted(model: nn.Module | None = None, **options) -> nn.Module:
    model = trained() if model is None else model
    return ard.attach(
        model, rank=RANK, alpha=2 * RANK, targets=ard.projections(model, KINDS), **options
    )


# P55: an input that the adapter never sees


# brings the last block's stream near the rms of 30 that models of billions of parameters have
LOUD = 15.0


def loud(times: float = LOUD) -> nn.Module:
    """Return the model with a residual stream `times` as large, as in deep models.

    Every norm divides it out again.
    """
    model = trained()
    # the head stands after the last norm
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
                p.mul_(times)
    return model


def kl_of_the_stream(model: nn.Module, hidden_states: dict, latents: dict) -> Tensor:
    total = 0
    for name, adapter in ard.adapters(model).items():
        h = hidden_states[name.split(".self_attn")[0]]  # q_proj and v_proj get norm(h)
        mean, logvar = adapter.latent(h)
        total = total + ard.divergence(mean, logvar, adapter.prior).sum()
    return total


def kl_of_the_input(model: nn.Module, hidden_states: dict, latents: dict) -> Tensor:
    total = 0
    for name in ard.adapters(model):
        (own,) = latents[name]  # from the adapter's forward, on its own input
        total = total + own.kl.sum()
    return total


def _charged(kl: Callable, logvar: str = "bounded", beta: float = 0.01, steps: int = 25) -> dict:
    """Train with this KL: what it reports, and the KL of the latents that were really drawn."""
    model, hidden_states, first = adapted(loud(), logvar=logvar), {}, {}
    for name, block in model.named_modules():
        if name.startswith("model.layers.") and name.count(".") == 2:
            block.register_forward_pre_hook(
                lambda _, args, name=name: hidden_states.update({name: args[0]})
            )

    def loss(model: nn.Module, batch: dict) -> dict:
        with ard.collect(model) as latents:
            terms = losses.causal_lm(model, batch)
        reported = kl(model, hidden_states, latents)
        first.setdefault("KL reported", float(reported.detach()) / batch["labels"].numel())
        first.setdefault(
            "KL of what was drawn", float(ard.kl(latents).detach()) / batch["labels"].numel()
        )
        return terms | {"kl": beta * reported}

    before = held_out_loss(model, "code")
    records = learn(model, steps=steps, lr=1e-2, data=batches("code"), loss=loss)
    return {
        "KL taken on": "the hidden states" if kl is kl_of_the_stream else "the projection's input",
        "log-variances": logvar,
        "residual stream scaled by": LOUD,
        **first,
        "reported / drawn": first["KL reported"] / first["KL of what was drawn"],
        "first gradient norm": records[0]["grad_norm"],
        "steps clipped": sum(r["grad_norm"] > 1 for r in records),
        "of": steps,
        "held-out loss won": before - held_out_loss(model, "code"),
    }


# P56: priors that count padding


def padded(rows: int = 16, length: int = 64, share: float = 0.5) -> dict[str, Tensor]:
    """Rows of code, of which only a share is text."""
    ids = stream("code")[: rows * length].view(rows, length).clone()
    mask = torch.zeros_like(ids)
    mask[:, : int(share * length)] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


def divided_by_the_shape(square: Tensor, mask: Tensor) -> Tensor:
    total = square[mask].sum(0)  # of the real tokens
    return total / mask.numel()  # counts the padding


def divided_by_the_tokens(square: Tensor, mask: Tensor) -> Tensor:
    total = square[mask].sum(0)
    return total / mask.sum()


def _priors(mean_of: Callable[[Tensor, Tensor], Tensor], *, text: float, padding: bool) -> dict:
    """Prior variances from rows that hold `text` of a full row, against those from full rows."""
    model, full, batch = adapted(), padded(share=1.0), padded(share=text)
    if not padding:
        batch = {name: tensor[:, : int(text * tensor.shape[1])] for name, tensor in batch.items()}

    def mean() -> float:
        return float(torch.cat([a.prior for a in ard.adapters(model).values()]).mean())

    ranks.estimate_priors(model, [full])
    reference = mean()
    for latents, mask in ard.passes(model, [batch]):
        for name, (latent,) in latents.items():
            square = latent.mean.square() + latent.logvar.exp()  # E z^2
            ard.adapters(model)[name].prior.copy_(mean_of(square, mask))
    return {
        "divided by": mean_of.__name__.removeprefix("divided_by_").replace("_", " "),
        "tokens of text": int(batch["attention_mask"].sum()),
        "positions": batch["input_ids"].numel(),
        "mean prior variance": mean(),
        "from full rows": reference,
        "ratio": mean() / reference,
    }


# P57: MonteCLoRA under checkpointing


def drawn_ahead(model: nn.Module) -> nn.Module:
    noise = peft.MontecloraConfig(sample_scaler=1.0, buffer_size=8)  # eight draws ahead
    where = dict(r=4, target_modules=["q_proj", "v_proj"])
    lora = peft.LoraConfig(monteclora_config=noise, **where)
    return peft.get_peft_model(model, lora)


def drawn_in_the_forward(model: nn.Module) -> nn.Module:
    noise = peft.MontecloraConfig(sample_scaler=1.0, buffer_size=1)
    where = dict(r=4, target_modules=["q_proj", "v_proj"])
    lora = peft.LoraConfig(monteclora_config=noise, **where)
    model = peft.get_peft_model(model, lora)
    for module in model.modules():
        if hasattr(module, "sampler"):
            module.sampler.index = 1  # the buffer is used up: the next forward draws
    return model


def dropped_out(model: nn.Module) -> nn.Module:
    return peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, target_modules=KINDS, lora_dropout=0.3)
    )


def noisy(attach: Callable[[nn.Module], nn.Module], checkpointing: str = "non-reentrant") -> dict:
    """Gradients of one step with and without checkpointing, from the same noise. Checkpointing puts
    the generator's state back before it recomputes, so noise that the forward pass draws is drawn
    again.
    """
    flows = []
    for mode in ("none", checkpointing):
        torch.manual_seed(0)
        model = wake(quiet(attach, base())[0]).train()
        torch.manual_seed(1)
        flows.append(flow(checkpointed(model, mode)))
    straight, recomputed = (f["gradients"] for f in flows)
    both = {
        n: (g, recomputed[n])
        for n, g in straight.items()
        if g is not None and recomputed[n] is not None
    }
    alike = [
        float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0))
        for a, b in both.values()
        if a.any()
    ]
    return {
        "noise": "dropout 0.3" if attach is dropped_out else "MonteCLoRA",
        "drawn": "ahead, into a buffer" if attach is drawn_ahead else "in the forward pass",
        "checkpointing": checkpointing,
        "raised": flows[1]["raised"],
        "warned": flows[1]["warned"],
        "tensors with a gradient": len(both),
        "lowest cosine": min(alike),
        "share with the right direction": sum(c > 0.999 for c in alike) / len(alike),
    }


# P58: relevance read from the prior variance


class Regression(nn.Module):
    """A projection of fixed random inputs: the smallest model that priors can be estimated on."""

    base_model_prefix, config = "", SimpleNamespace()

    def __init__(self, n: int = 512):
        super().__init__()
        self.inputs, self.proj = nn.Embedding(n, 16), nn.Linear(16, 12, bias=False)

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> Tensor:
        return self.proj(self.inputs(input_ids))


@cache
def planted(
    *, seed: int = 0, deterministic: bool = False, steps: int = 600, every: int = 50
) -> nn.Module:
    """Six ranks learn a noisy map of rank three, with strengths 2, 1 and 0.5, by the evidence
    bound. The priors are estimated anew every `every` steps. Trained once per process: read it, and
    change nothing in it.
    """
    with seeded(seed):
        return _planted(deterministic, steps, every)


def _planted(deterministic: bool, steps: int, every: int) -> nn.Module:
    model, ids, noise = Regression(), torch.arange(512)[None], 0.1
    left, right = (torch.linalg.qr(torch.randn(n, n))[0][:, :3] for n in (12, 16))
    planted_map = left @ torch.diag(torch.tensor([2.0, 1.0, 0.5])) @ right.T
    targets = (
        model(ids)[0].detach()
        + model.inputs.weight.detach() @ planted_map.T
        + noise * torch.randn(512, 12)
    )
    ard.attach(model, rank=6, alpha=6, targets=[model.proj], deterministic=deterministic).train()
    adam = torch.optim.Adam(wiring.trainable(model).values(), lr=2e-2)
    for step in range(steps):
        with ard.collect(model) as latents:
            misfit = 0.5 * (model(ids)[0] - targets).square().sum() / noise**2
        adam.zero_grad()
        ((misfit + ard.kl(latents)) / 512).backward()
        adam.step()
        if step % every == every - 1:
            ranks.estimate_priors(model, [{"input_ids": ids}])
    return model


def words_by_variance(adapter: ard.ARDLinear) -> list[str]:
    score = adapter.prior  # an unused rank keeps the variance it had
    return [ranks.grade(s) for s in score.tolist()]


def words_by_signal(adapter: ard.ARDLinear) -> list[str]:
    column = (adapter.scale * adapter.lora_up.detach()).square().sum(0)  # |s B_k|^2
    score = adapter.power * column  # mean of mu_k^2 times that: what it adds
    return [ranks.grade(s) for s in (score / score.max()).tolist()]


def _graded(words_of: Callable[[ard.ARDLinear], list[str]], every: int = 50) -> dict:
    """Return a word for each of six ranks, of which three carry what was planted and the others
    hardly anything.
    """
    model = planted(every=every)
    v, signal = (ranks.relevance(model, by=by)["proj"] for by in ("variance", "signal"))
    share, words = signal / signal.max(), words_of(model.proj)
    idle = share < 0.01
    return {
        "graded by": words_of.__name__.removeprefix("words_by_"),
        "steps between prior updates": every,
        "prior variances": [round(x, 2) for x in v.tolist()],
        "shares of the largest signal": [round(x, 4) for x in share.tolist()],
        "words": words,
        "idle ranks": int(idle.sum()),
        "idle ranks called High": sum(word == "High" for word, off in zip(words, idle) if off),
    }


# P59: uncertainty of a point estimate


def point_estimate(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model.eval()(ids).logits  # z = mu: the log-variances are not read
    return logits.softmax(-1)


def mean_of_draws(model: nn.Module, ids: Tensor) -> Tensor:
    with ard.sampling(model.eval()):  # z is drawn, as in training
        draws = [model(ids).logits.softmax(-1) for _ in range(2)]
    return torch.stack(draws).mean(0)


@torch.no_grad()
def measured(predict: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, ids: Tensor) -> dict:
    """Accuracy, likelihood and calibration of the next byte, with the same noise each time."""
    with seeded():
        p, targets = predict(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()  # (n, V), (n,)
    confidence, guess = p.max(-1)
    nats = -p.gather(1, targets[:, None]).log()
    ece = uncertainty.ece(uncertainty.reliability(confidence, guess == targets))
    return {
        "accuracy": float((guess == targets).double().mean()),
        "nll": float(nats.double().mean()),
        "ece": ece,
    }


@cache
def _on_code() -> nn.Module:
    """Adapters after a few steps of code, trained once per process: copy before you change them."""
    with seeded():
        model = adapted()
        loss = ard.loss(model, beta=0.01 / RANK)
        learn(model, steps=20, lr=1e-2, data=batches("code"), loss=loss, clip=0)
    return model


def _calibration(predict: Callable[[nn.Module, Tensor], Tensor], shift: float = 4.0) -> dict:
    """Calibration, and whether it changes when every log-variance is shifted."""
    model = copy.deepcopy(_on_code())
    rows = stream("code", "held_out")[: 64 * 64].view(64, 64)
    first = measured(predict, model, rows)
    with torch.no_grad():
        for a in ard.adapters(model).values():
            a.lora_middle.add_(shift)
    shifted = measured(predict, model, rows)
    return {
        "predicts by": "the mean latent" if predict is point_estimate else "the mean of 2 draws",
        **first,
        "log-variances shifted by": shift,
        "nll then": shifted["nll"],
        "the noise is in the numbers": shifted["nll"] != first["nll"],
    }


PITFALLS = [
    Pitfall(
        id="P55",
        title="A KL on hidden states that the adapter never sees",
        symptom="The KL is in the thousands, nearly every step is clipped, and the text is "
        "learned late or not at all.",
        claim="the log-variances run away and must be clamped (the write-up on ARD-LoRA)",
        verdict="Unbounded log-variances train well with the same weight of the KL. The KL was "
        "taken on "
        "`hidden_states[l]`, the residual stream before the norm, but q_proj and v_proj get "
        "the stream after the norm. "
        "In a model whose norms stand after the blocks the two are the same. In a pre-norm "
        "model the stream grows with "
        f"depth, and the KL with its square. Seen on {WITH_PEFT}.",
        fix="Compute the KL in the adapter's own forward pass, on the input that it is given.",
        broken=lambda: _charged(kl_of_the_stream),
        fixed=lambda: _charged(kl_of_the_input),
        seen=lambda facts: (
            facts["reported / drawn"] > 10 and facts["steps clipped"] > facts["of"] / 2
        ),
        claimed=lambda: _charged(kl_of_the_input, "raw"),
        wrong=kl_of_the_stream,
        right=kl_of_the_input,
    ),
    Pitfall(
        id="P56",
        title="Prior variances that count padding",
        symptom="The same model and text look less relevant as soon as the batches have more "
        "padding.",
        claim="short texts carry less information (folklore)",
        verdict="Short rows without padding give the same variances as long rows. The sum ran "
        "over the real tokens, "
        f"but it was divided by all positions of the batch, padding included. Seen on {WITH_PEFT}.",
        fix="Take both the sum and the count from the attention mask.",
        broken=lambda: _priors(divided_by_the_shape, text=0.5, padding=True),
        fixed=lambda: _priors(divided_by_the_tokens, text=0.5, padding=True),
        seen=lambda facts: not 0.8 < facts["ratio"] < 1.25,
        claimed=lambda: _priors(divided_by_the_shape, text=0.5, padding=False),
        wrong=divided_by_the_shape,
        right=divided_by_the_tokens,
    ),
    Pitfall(
        id="P57",
        title="Noise drawn ahead, and activation checkpointing",
        symptom="With activation checkpointing MonteCLoRA trains without an error, but ends at "
        "other weights.",
        claim="checkpointing loses the random state (folklore)",
        verdict="Dropout under the same checkpointing has exact gradients, so the random state "
        "is put back. MonteCLoRA "
        "takes its noise from a buffer that was filled ahead. The recomputed forward pass "
        "takes the next entries of "
        "the buffer, and the gradients belong to another model. Nothing is raised or warned. "
        f"Seen on {WITH_PEFT}.",
        fix="Draw in the forward pass (a buffer of one, emptied before the first step), or do "
        "without checkpointing.",
        broken=lambda: noisy(drawn_ahead),
        fixed=lambda: noisy(drawn_in_the_forward),
        seen=lambda facts: facts["raised"] is None and facts["lowest cosine"] < 0.9,
        claimed=lambda: noisy(dropped_out),
        wrong=drawn_ahead,
        right=drawn_in_the_forward,
    ),
    Pitfall(
        id="P58",
        title="Relevance read from the prior variance",
        symptom="Every rank is called High, and there is nothing to prune.",
        claim="the priors were updated too rarely (folklore)",
        verdict="Graded by their signal, the unused ranks are called Low, with rare updates "
        "too. The prior variance "
        "cannot tell them apart: an unused rank stays at its prior and keeps the variance it "
        "had. The variance also "
        "depends on scale: with the latent doubled and B halved the model is the same and the "
        "variance four times as "
        f"large. Seen on {WITH_PEFT}.",
        fix="Grade what a rank adds to the output: the mean square of its latent times that of "
        "its column of B.",
        broken=lambda: _graded(words_by_variance),
        fixed=lambda: _graded(words_by_signal),
        seen=lambda facts: facts["idle ranks called High"] > 0,
        claimed=lambda: _graded(words_by_signal, every=300),
        wrong=words_by_variance,
        right=words_by_signal,
    ),
    Pitfall(
        id="P59",
        title="Uncertainty of a point estimate",
        symptom="Accuracy, likelihood and calibration stay the same to the last digit, however "
        "large the noise is.",
        claim="the noise is too small to matter (folklore)",
        verdict="Even a fiftieth of the variance changes the likelihood as soon as it is "
        "drawn. In evaluation the "
        "latent is its mean, so the log-variances are never read: what was measured is a "
        "deterministic LoRA. "
        f"Seen on {WITH_PEFT}.",
        fix="In evaluation draw several times and average the probabilities. Report the point "
        "estimate beside it.",
        broken=lambda: _calibration(point_estimate),
        fixed=lambda: _calibration(mean_of_draws),
        seen=lambda facts: not facts["the noise is in the numbers"],
        claimed=lambda: _calibration(mean_of_draws, shift=-4.0),
        wrong=point_estimate,
        right=mean_of_draws,
    ),
]
