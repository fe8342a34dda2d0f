"""Adapters with noise: on which input a divergence is taken, what a prior averages, what may be called uncertainty.

An ARD adapter draws a latent for each token, at a cost in KL (nblib/methods/ard.py). Its failures are silent: the loss
falls, every tensor moves, and a number that people trust means something else. They are shown on a byte-level model,
and on a regression whose answer is known because it was planted.

Footgun: B starts at zero, so at first an adapter's noise reaches nothing and its cross-entropy gradient is zero too.
The models compared here have been trained for some steps, or were given values.
"""

from types import SimpleNamespace

import peft
import torch
from torch import Tensor, nn

from lessons.pitfalls import WITH_PEFT, Pitfall
from lessons.pitfalls.bench import base, batches, checkpointed, flow, held_out_loss, learn, quiet, stream, trained, wake
from nblib import wiring
from nblib.methods import ard, ard_ranks, uncertainty

RANK, KINDS = 4, ("q_proj", "v_proj")


def adapted(model: nn.Module | None = None, **options) -> nn.Module:
    model = trained() if model is None else model
    return ard.attach(model, rank=RANK, alpha=2 * RANK, targets=ard.projections(model, KINDS), **options)


# P55: the input the adapter never sees


LOUD = 15.0  # brings the last block's stream near the rms of 30 that models of billions of parameters have


def loud(times: float = LOUD) -> nn.Module:
    """The same model with a residual stream `times` as large, as deep models have it: every norm undoes it."""
    model = trained()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # the head stands after the last norm
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
                p.mul_(times)
    return model


def _stream_kl(model: nn.Module, streams: dict[str, Tensor]) -> Tensor:
    """The KL of every adapter on the hidden states that enter its block, as `output_hidden_states` returns them."""
    total = 0
    for name, a in ard.adapters(model).items():
        mean, logvar = a.latent(streams[name.split(".self_attn")[0]])
        total = total + ard.divergence(mean, logvar, a.prior).sum()
    return total


def _charged(on: str, logvar: str = "bounded", beta: float = 0.01, steps: int = 40) -> dict:
    """Train with the KL taken on `on`: the KL reported, and what the latents that were drawn really cost."""
    model, streams = adapted(loud(), logvar=logvar), {}
    for name, block in model.named_modules():
        if name.startswith("model.layers.") and name.count(".") == 2:
            block.register_forward_pre_hook(lambda _, args, name=name: streams.update({name: args[0]}))
    own_input, first = ard.loss(model, beta=1.0), {}

    def loss(model: nn.Module, batch: dict) -> dict:
        terms = own_input(model, batch)
        reported = terms["kl"] if on == "the projection's input" else _stream_kl(model, streams)
        first.setdefault("KL reported", float(reported.detach()) / batch["labels"].numel())
        first.setdefault("KL of what was drawn", float(terms["kl"].detach()) / batch["labels"].numel())
        return {"ce": terms["ce"], "kl": beta * reported}

    before = held_out_loss(model, "code")
    records = learn(model, steps=steps, lr=1e-2, data=batches("code"), loss=loss)
    return {
        "KL taken on": on,
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


def _by_shape(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """The estimate with the sum over the tokens that are there, and alpha from the shape of the batch."""
    for latents, mask in ard.passes(model, [batch]):
        for name, (latent,) in latents.items():
            square = latent.mean.square() + latent.logvar.exp()
            ard.adapters(model)[name].prior.copy_(square[mask].sum(0) / mask.numel())


def _priors(how: str, *, text: float, padding: bool) -> dict:
    """Prior variances from rows that hold `text` of a full row, against those from full rows."""
    model, full, batch = adapted(), padded(share=1.0), padded(share=text)
    if not padding:
        batch = {name: tensor[:, : int(text * tensor.shape[1])] for name, tensor in batch.items()}

    def mean() -> float:
        return float(torch.cat([a.prior for a in ard.adapters(model).values()]).mean())

    ard_ranks.estimate_priors(model, [full])
    reference = mean()
    if how == "shape of the batch":
        _by_shape(model, batch)
    else:
        ard_ranks.estimate_priors(model, [batch])
    return {
        "divided by": how,
        "tokens of text": int(batch["attention_mask"].sum()),
        "positions": batch["input_ids"].numel(),
        "mean prior variance": mean(),
        "from full rows": reference,
        "ratio": mean() / reference,
    }


# P57: MonteCLoRA under checkpointing


def monteclora(checkpointing: str, *, fresh: bool = False, dropout: float = 0.0) -> dict:
    """Gradients of one step against those without checkpointing, from the same noise.

    `fresh` leaves nothing in the sampler's buffer, so that each forward draws from the generator, which checkpointing
    puts back for the recomputation. `dropout` takes plain LoRA with dropout instead."""
    flows = []
    for mode in ("none", checkpointing):
        torch.manual_seed(0)
        if dropout:
            config = peft.LoraConfig(r=RANK, target_modules=list(KINDS), lora_dropout=dropout)
        else:
            noise = peft.MontecloraConfig(sample_scaler=1.0, buffer_size=1 if fresh else 8)
            config = peft.LoraConfig(r=RANK, target_modules=list(KINDS), monteclora_config=noise)
        model = wake(quiet(peft.get_peft_model, base(), config)[0]).train()
        for m in model.modules():
            if fresh and hasattr(m, "sampler"):
                m.sampler.index = m.sampler.buffer_size
        torch.manual_seed(1)
        flows.append(flow(checkpointed(model, mode)))
    straight, recomputed = (f["gradients"] for f in flows)
    both = {n: (g, recomputed[n]) for n, g in straight.items() if g is not None and recomputed[n] is not None}
    alike = [float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)) for a, b in both.values() if a.any()]
    return {
        "noise": f"dropout {dropout}" if dropout else "MonteCLoRA",
        "drawn": "in the forward pass" if fresh or dropout else "ahead, into a buffer",
        "checkpointing": checkpointing,
        "raised": flows[1]["raised"],
        "warned": flows[1]["warned"],
        "tensors with a gradient": len(both),
        "lowest cosine": min(alike),
        "share with the right direction": sum(c > 0.999 for c in alike) / len(alike),
    }


# P58: relevance read from the prior variance


class Regression(nn.Module):
    """A projection of fixed random inputs: the smallest thing that priors can be estimated on."""

    base_model_prefix, config = "", SimpleNamespace()

    def __init__(self, n: int = 512):
        super().__init__()
        self.inputs, self.proj = nn.Embedding(n, 16), nn.Linear(16, 12, bias=False)

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> Tensor:
        return self.proj(self.inputs(input_ids))


def planted(*, deterministic: bool = False, steps: int = 600, every: int = 50) -> nn.Module:
    """Six ranks learn a noisy map of rank three, of strengths 2, 1 and 0.5, by the evidence bound, with new priors
    `every` so many steps."""
    model, ids, noise = Regression(), torch.arange(512)[None], 0.1
    left, right = (torch.linalg.qr(torch.randn(n, n))[0][:, :3] for n in (12, 16))
    planted_map = left @ torch.diag(torch.tensor([2.0, 1.0, 0.5])) @ right.T
    targets = model(ids)[0].detach() + model.inputs.weight.detach() @ planted_map.T + noise * torch.randn(512, 12)
    ard.attach(model, rank=6, alpha=6, targets=[model.proj], deterministic=deterministic).train()
    adam = torch.optim.Adam(wiring.trainable(model).values(), lr=2e-2)
    for step in range(steps):
        with ard.collect(model) as latents:
            misfit = 0.5 * (model(ids)[0] - targets).square().sum() / noise**2
        adam.zero_grad()
        ((misfit + ard.kl(latents)) / 512).backward()
        adam.step()
        if step % every == every - 1:
            ard_ranks.estimate_priors(model, [{"input_ids": ids}])
    return model


def _graded(by: str, every: int = 50) -> dict:
    """A word for each of six ranks, of which three carry what was planted and the others hardly anything."""
    model = planted(every=every)
    v, signal = (ard_ranks.relevance(model, by=by)["proj"] for by in ("variance", "signal"))
    share = signal / signal.max()
    words = [ard_ranks.grade(x) for x in (v if by == "variance" else share).tolist()]
    idle = share < 0.01
    return {
        "graded by": by,
        "steps between prior updates": every,
        "prior variances": [round(x, 2) for x in v.tolist()],
        "shares of the largest signal": [round(x, 4) for x in share.tolist()],
        "words": words,
        "idle ranks": int(idle.sum()),
        "idle ranks called High": sum(word == "High" for word, off in zip(words, idle) if off),
    }


# P59: uncertainty of a point estimate


def _calibration(samples: int, shift: float = 4.0) -> dict:
    """Calibration, and whether it changes when every log-variance is shifted."""
    model = adapted()
    loss = ard.loss(model, beta=0.01 / RANK)
    learn(model, steps=20, lr=1e-2, data=batches("code"), loss=loss, clip=0)
    rows = stream("code", "held_out")[: 64 * 64].view(64, 64)
    options = dict(batches=[{"input_ids": rows, "labels": rows}], samples=samples, sampling=ard.sampling)
    first = uncertainty.measure(model, **options)
    with torch.no_grad():
        for a in ard.adapters(model).values():
            a.lora_middle.add_(shift)
    shifted = uncertainty.measure(model, **options)
    return {
        "predicts by": f"the mean of {samples} draws" if samples else "the mean latent",
        **{name: first[name] for name in ("accuracy", "nll", "ece")},
        "log-variances shifted by": shift,
        "nll then": shifted["nll"],
        "the noise is in the numbers": shifted["nll"] != first["nll"],
    }


PITFALLS = [
    Pitfall(
        id="P55",
        title="A divergence on hidden states the adapter never sees",
        symptom="The KL is in the thousands, nearly every step is clipped, and the text is learned late or not at all.",
        claim="the log-variances run away and must be clamped (a fine-tuning repository)",
        verdict="Unbounded log-variances at the same weight train. The KL was taken on `hidden_states[l]`, the "
        "residual stream before the norm, while q_proj and v_proj see it after the norm. With post-norm blocks the "
        "two are the same; in a pre-norm model the stream grows with depth, and the KL with its square. "
        f"Seen on {WITH_PEFT}.",
        fix="Compute the KL in the adapter's own forward pass, on the input it is given.",
        broken=lambda: _charged("the hidden states"),
        fixed=lambda: _charged("the projection's input"),
        seen=lambda facts: facts["reported / drawn"] > 10 and facts["steps clipped"] > facts["of"] / 2,
        claimed=lambda: _charged("the projection's input", "raw"),
    ),
    Pitfall(
        id="P56",
        title="Prior variances that count padding",
        symptom="The same model and text look less relevant as soon as batches are padded further.",
        claim="short texts carry less information (folklore)",
        verdict="Short rows without padding give the same variances as long ones. The sum ran over the tokens that "
        f"were there and was divided by a count that knew only the shape of the batch. Seen on {WITH_PEFT}.",
        fix="Take both from the attention mask: the sum and the count.",
        broken=lambda: _priors("shape of the batch", text=0.5, padding=True),
        fixed=lambda: _priors("tokens that were summed", text=0.5, padding=True),
        seen=lambda facts: not 0.8 < facts["ratio"] < 1.25,
        claimed=lambda: _priors("shape of the batch", text=0.5, padding=False),
    ),
    Pitfall(
        id="P57",
        title="Noise drawn ahead, under recomputation",
        symptom="With activation checkpointing MonteCLoRA trains without an error, and ends somewhere else.",
        claim="checkpointing loses the random state (folklore)",
        verdict="Dropout under the same checkpointing has exact gradients: the state is put back. The sampler takes "
        "its noise from a buffer filled ahead, so the recomputed forward takes the next one, and the gradients are "
        f"those of another model. Nothing is raised or warned. Seen on {WITH_PEFT}.",
        fix="Draw in the forward pass (a buffer of one, emptied before the first step), or do without checkpointing.",
        broken=lambda: monteclora("non-reentrant"),
        fixed=lambda: monteclora("non-reentrant", fresh=True),
        seen=lambda facts: facts["raised"] is None and facts["lowest cosine"] < 0.9,
        claimed=lambda: monteclora("non-reentrant", dropout=0.3),
    ),
    Pitfall(
        id="P58",
        title="Relevance read from the prior variance",
        symptom="Every rank is called High, and there is nothing to prune.",
        claim="the priors were updated too rarely (folklore)",
        verdict="Rare updates grade the idle ranks Low if the signal is what is graded. A rank that nobody needs rests "
        "at its prior, whatever that is, and its variance stays there; and the same map with the latent doubled and B "
        f"halved has four times the variance. Seen on {WITH_PEFT}.",
        fix="Grade what a rank adds to the output: the mean square of its latent times its column of B.",
        broken=lambda: _graded("variance"),
        fixed=lambda: _graded("signal"),
        seen=lambda facts: facts["idle ranks called High"] > 0,
        claimed=lambda: _graded("signal", every=300),
    ),
    Pitfall(
        id="P59",
        title="Uncertainty of a point estimate",
        symptom="Accuracy, likelihood and calibration stay the same to the last digit, however loud the noise.",
        claim="the noise is too small to matter (folklore)",
        verdict="A fiftieth of the variance changes the likelihood once it is drawn. In evaluation the latent is its "
        f"mean, so nobody asks the log-variances; what was measured is a deterministic LoRA. Seen on {WITH_PEFT}.",
        fix="Draw several times in evaluation and average the probabilities; put the point estimate beside it.",
        broken=lambda: _calibration(samples=0),
        fixed=lambda: _calibration(samples=2),
        seen=lambda facts: not facts["the noise is in the numbers"],
        claimed=lambda: _calibration(samples=2, shift=-4.0),
    ),
]
