"""LRC's pitfalls: ternary layers with a low-rank correction, as the write-up trained them, and what it blamed.

A write-up of runs on large cards declared its run healthy while its loss was flat, and its notes name frozen
embeddings, the weighting of objectives, the rank and compile. Each of these is run alone here, on the layers of
`lrc`, beside what held. The general cases are P04 (two zeros), P11 (rounding) and P19 (logits).

Footgun: LRC's ordinary form trains two thin factors per layer, so most faults leave it training something. Compare
with a run that lacks the fault; a loss that falls is no evidence.
"""

import copy
from functools import cache

import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional as F

from lessons.pitfalls import WITH_PEFT, Pitfall, byte_model
from lessons.pitfalls.bench import fresh_dynamo, seeded
from nblib import compiling, losses, memory, models, train, wiring
from nblib.methods import loss_weights, lrc, objective, ternary

GIB = 2**30


def corrected(init: str = "svd_residual", layer: type[lrc.LRCLinear] = lrc.LRCLinear) -> nn.Module:
    """The byte model with ternary weights; every correction at the given start, in layers of the given kind."""
    model = byte_model.trained()
    with seeded():
        lrc.attach(model, init=init)
    for module in lrc.layers(model).values():
        module.__class__ = layer
    return model.train()


def learn(model: nn.Module, *, steps: int, lr: float = 1e-2, loss=losses.causal_lm, others=()) -> list[dict]:
    optimizers = [train.adamw(model, lr=lr), *others]
    batches = byte_model.batches(rows=4)
    return train.fit(model, batches, optimizers, total=steps, loss=loss, machine=byte_model.CPU)


# P49: both factors zero, and the frozen embeddings take the blame


def started(init: str, *, hook: bool, steps: int = 8) -> dict:
    """`hook` makes the embedding's output require a gradient, the cure that was prescribed."""
    model = corrected(init)
    if hook:
        model.enable_input_require_grads()
    before = {name: p.detach().clone() for name, p in wiring.trainable(model).items()}
    first = byte_model.held_out_loss(model)
    records = learn(model, steps=steps)
    return {
        "init": init,
        "hook on the embeddings": hook,
        "validation before": first,
        "validation after": byte_model.held_out_loss(model),
        "largest gradient norm": max(r["grad_norm"] for r in records),
        "tensors that moved": sum(not torch.equal(p, before[n]) for n, p in wiring.trainable(model).items()),
        "of": len(before),
    }


# P50: the rounded inputs without a straight-through estimator


class Rounded(lrc.LRCLinear):
    """The write-up's frozen form: autograd goes through the rounding itself."""

    def rounded(self, x: Tensor) -> Tensor:
        g = x.abs().amax(-1, keepdim=True).clamp_min(ternary.SMALLEST)
        return (x * (ternary.LEVELS / g)).round() * (g / ternary.LEVELS)

    def forward(self, x: Tensor) -> Tensor:
        U, V = self.factors()
        return F.linear(self.rounded(x), self.weight, self.bias) + F.linear(x @ V, U)


class AsTheyAre(Rounded):
    """Inputs that are not rounded: an ordinary product, and its ordinary gradient."""

    def rounded(self, x: Tensor) -> Tensor:
        return x


def lower_gradients(layer: type, init: str) -> Tensor:
    """All gradients of the first block's corrections, end to end."""
    model = corrected(init, layer)
    byte_model.mean_loss(model, next(byte_model.batches(seed=1))).backward()
    return torch.cat([p.grad.flatten() for n, p in wiring.trainable(model).items() if ".layers.0." in n])


def share_handed_down(layer: type) -> float:
    """Share of entries of the input's gradient that are not zero, in one layer whose correction is still zero."""
    module = next(iter(lrc.layers(corrected("kaiming", layer)).values()))
    x = torch.randn(32, module.in_features, requires_grad=True)
    module(x).square().sum().backward()
    return float((x.grad != 0).double().mean())


@cache
def gain(layer: type, init: str, lr: float, steps: int = 30) -> float:
    """Fall of the held-out loss."""
    with seeded():
        model = corrected(init, layer)
        before = byte_model.held_out_loss(model)
        learn(model, steps=steps, lr=lr)
        return before - byte_model.held_out_loss(model)


def inputs_rounded(layer: type, *, lr: float = 1e-2, init: str = "kaiming") -> dict:
    """Against the same corrections over inputs as they are, whose gradient nobody has to estimate."""
    exact = lower_gradients(AsTheyAre, init)
    return {
        "layer": layer.__name__,
        "init": init,
        "rate": lr,
        "share of gradient handed down": share_handed_down(layer),
        "cosine in the first block": float(F.cosine_similarity(lower_gradients(layer, init), exact, dim=0)),
        "gain": gain(layer, init, lr),
        "gain with inputs as they are": gain(AsTheyAre, init, 1e-2),
    }


# P51: the rank takes the blame for the logits


def step_bytes(percent: float, logits: str, *, rows: int = 4, layers: int = 2) -> dict:
    """The write-up's step by the estimate: Qwen3-0.6B's width and vocabulary, a few of its 28 layers."""
    config = tf.Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
        use_cache=False,
    )
    found = memory.estimate(
        config,
        rows=rows,
        length=1024,
        attach=lambda model: lrc.attach(model, percent=percent, init="kaiming"),
        precision="bf16",
        checkpointing=True,
        logits=logits,
    )
    trained = found["gradients"] + found["optimizer"]
    sizes = {"logits": found["logits"], "gradients and state of the corrections": trained, "peak": found["peak"]}
    return {"rank %": percent, "loss": logits, "layers": layers} | {f"{k} GiB": v / GIB for k, v in sizes.items()}


# P52 and P53 speak a language of 30 words, which is learnt in seconds

WORDS, SPECIAL = 30, 31  # ids 0 to 29 occur in the text, 31 is the mask token


def chain(rows: int, length: int = 32) -> Tensor:
    """Rows in which nine of ten words follow from the word before."""
    follows = torch.randperm(WORDS, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(WORDS, (rows, length))
    for t in range(1, length):
        ids[:, t] = torch.where(torch.rand(rows) < 0.9, follows[ids[:, t - 1]], ids[:, t])
    return ids


@cache
def _speaker() -> nn.Module:
    with seeded():
        model = models.tiny(32, hidden=64, layers=2, heads=2, length=32)
        learn_chain(model, losses.causal_lm, steps=120)
    return model


def learn_chain(model: nn.Module, loss, *, steps: int, router: nn.Module | None = None) -> list[dict]:
    optimizers = [train.adamw(model, lr=1e-2)]
    if router is not None:
        model.mixer = router
        optimizers.append(torch.optim.Adam(router.parameters(), lr=1e-2))
    batches = ({"input_ids": ids, "labels": ids} for ids in iter(lambda: chain(16), None))
    return train.fit(model, batches, optimizers, total=steps, loss=loss, clip=0, machine=byte_model.CPU)


def speaker() -> nn.Module:
    """A model that speaks the language, ternary and corrected."""
    model = copy.deepcopy(_speaker())
    lrc.attach(model)
    return model


# P52: the router gives all weight to the smaller loss


def routed(*, steps: int = 60, **options) -> dict:
    """Next words and masked words, weighted by LDC-MTL's router; what is judged is the harder one, masked words."""
    model, ids = speaker(), chain(64)
    router = loss_weights.Router(("ce", "masked"), **options)
    loss = objective.Objective({"ce": 1.0, "masked": 1.0}, mask_id=SPECIAL, router=router)

    @torch.no_grad()
    def judged() -> float:
        with seeded():  # the same masks each time
            batch = {"input_ids": ids, "labels": ids}
            found = objective.masked_tokens(model.eval(), batch, mask_id=SPECIAL)
        return float(found) / ids[:, 1:].numel()

    before = judged()
    records = learn_chain(model, loss, steps=steps, router=router)
    means, totals = loss.seen(), [r["loss"] for r in records]
    with torch.no_grad():
        weights = router.eval()(torch.tensor([means["ce"], means["masked"]]))[2]
    return {
        **options,
        "first total": totals[0],
        "last total": totals[-1],
        "largest rise in a step": max(b - a for a, b in zip(totals, totals[1:])),
        "weight of masked words": float(weights[1]),
        "masked words before": before,
        "masked words after": judged(),
    }


# P53: a mask that is also a word


def masked_with(mask_id: int, *, probability: float = 0.15, steps: int = 40) -> dict:
    """The write-up's two objectives; what is judged is plain text, after the word of id 0 and after the others."""
    model, rows = speaker(), chain(256)

    @torch.no_grad()
    def judged() -> tuple[float, float]:
        scores = model.eval()(input_ids=rows).logits[:, :-1]
        nats = F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        word = (rows[:, :-1] == 0).flatten()
        return float(nats[word].mean()), float(nats[~word].mean())

    weights = {"ce": 1.0, "masked": 0.5}
    before = judged()
    learn_chain(model, objective.Objective(weights, mask_id=mask_id, mask_probability=probability), steps=steps)
    after = judged()
    return {
        "mask": mask_id,
        "probability": probability,
        "share of it in the text": float((rows == mask_id).double().mean()),
        "after word 0, before": before[0],
        "after word 0": after[0],
        "after the others, before": before[1],
        "after the others": after[1],
    }


# P54: a comparison of gradients that are all zero


class Scaled(lrc.LRCLinear):
    """The layer as a port got it wrong: the correction is divided by its rank, alpha / r with alpha at 1."""

    def forward(self, x: Tensor) -> Tensor:
        U, V = self.factors()
        return F.linear(self.once(x), self.weight, self.bias) + F.linear(x @ V, U) / U.shape[1]


def eager_against_compiled(init: str, layer: type, *, strict: bool) -> dict:
    """The check of a compiled step against the eager layer; `strict` also wants gradients that are not all zero."""
    batch = next(byte_model.batches(rows=2))

    def gradients(model: nn.Module) -> dict[str, Tensor | None]:
        byte_model.mean_loss(model, batch).backward()
        return {name: p.grad for name, p in wiring.trainable(model).items()}

    eager = gradients(corrected(init))
    with fresh_dynamo():
        got = gradients(compiling.compile_blocks(corrected(init, layer), backend="aot_eager"))
    there = all(g is not None for g in got.values())
    close = there and all(torch.allclose(got[n], g, rtol=1e-3, atol=1e-6) for n, g in eager.items())
    alive = sum(bool(g.any()) for g in eager.values())
    wrong = gradients(corrected("svd_residual", layer))
    right = gradients(corrected("svd_residual"))
    return {
        "init": init,
        "layer": layer.__name__,
        "all there": there,
        "all close": close,
        "eager gradients that are not zero": alive,
        "of": len(eager),
        "check passes": there and close and (alive == len(eager) or not strict),
        "error of the layer": max(float((wrong[n] - g).norm() / g.norm()) for n, g in right.items()),
    }


PITFALLS = [
    Pitfall(
        id="P49",
        title="Corrections that start at zero, and the embeddings that were blamed",
        symptom="Training runs without a word, and the validation loss is the same number from first to last.",
        claim="frozen embeddings break the gradients, so call enable_input_require_grads() (a write-up of LRC runs)",
        verdict="With U = V = 0 every gradient is exactly zero and nothing moves, with the prescribed hook in place. "
        f"Frozen embeddings without the hook train every tensor once U and V come from an SVD. Seen on {WITH_PEFT}.",
        fix="init='svd_residual' (or kaiming: V random, U zero); a canary before the run.",
        broken=lambda: started("zeros", hook=True),
        fixed=lambda: started("svd_residual", hook=True),
        seen=lambda facts: facts["tensors that moved"] == 0 and facts["validation after"] == facts["validation before"],
        claimed=lambda: started("svd_residual", hook=False),
        check="B3",
    ),
    Pitfall(
        id="P50",
        title="Frozen weights, and rounded inputs without a straight-through estimator",
        symptom="Every correction gets a gradient and moves, and the loss hardly falls.",
        claim="the learning rate is too small (folklore; the write-up's code has the fault and never noticed)",
        verdict="Rounding hands down one entry per token, the largest, so below the top layers the gradient "
        "points elsewhere, and the held-out loss does not fall at all. With the "
        f"estimator a third of the rate learns as much as inputs that are not rounded. Seen on {WITH_PEFT}.",
        fix="The estimator belongs on the inputs even where W is frozen: ternary.int8. Compare gradients with those of "
        "inputs as they are.",
        broken=lambda: inputs_rounded(Rounded),
        fixed=lambda: inputs_rounded(lrc.LRCLinear),
        seen=lambda facts: facts["gain"] < 0.5 * facts["gain with inputs as they are"],
        claimed=lambda: inputs_rounded(lrc.LRCLinear, lr=3e-3),
    ),
    Pitfall(
        id="P51",
        title="The rank takes the blame for the logits",
        symptom="CUDA out of memory with 0.6 billion parameters, most of them frozen, on a large card.",
        claim="a rank of 25 % is too high, take 15 % (the write-up's analysis of its error)",
        verdict="At its width and vocabulary most of the peak are logits. The lower rank saves next to nothing, chunks "
        "of logits almost all of them, at the higher rank too. The runs here have fewer layers and rows than the "
        f"write-up's, which changes the proportions, not the order. Estimated on {WITH_PEFT}.",
        fix="losses.causal_lm or any other loss that scores the vocabulary in chunks.",
        broken=lambda: step_bytes(15, "full"),  # the cure of the claim is in
        fixed=lambda: step_bytes(15, "chunked"),
        seen=lambda facts: facts["logits GiB"] > 0.5 * facts["peak GiB"],
        claimed=lambda: step_bytes(25, "chunked"),
    ),
    Pitfall(
        id="P52",
        title="The router pays itself for the easy objective",
        symptom="The total falls as it should, and the second objective might as well not be there.",
        claim="LDC-MTL's learned weights destabilise training (the write-up)",
        verdict="Nothing is unstable: no step rises more than with the routers that work. The published total is "
        "smallest with no weight on the larger loss, and there it goes in tens of steps, in silence; masked "
        "words gain only from the first steps and from next words. Learned weights on losses of one "
        f"size keep both alive, at least that long. Seen on {WITH_PEFT}.",
        fix="loss_weights.Router as it is: losses over their running means, weights that learn from the spread alone. "
        "And log the weights.",
        broken=lambda: routed(normalise="none", learns="total"),
        fixed=lambda: routed(),
        seen=lambda facts: facts["weight of masked words"] < 0.05 and facts["last total"] < facts["first total"],
        claimed=lambda: routed(normalise="running", learns="total"),
    ),
    Pitfall(
        id="P53",
        title="A mask that is also a word",
        symptom="Since masked tokens were added, text with an exclamation mark is continued worse.",
        claim="masking damages the past, so the objective harms next words at large (folklore)",
        verdict="The write-up masked with id 0 and took it for the unknown token; in Qwen3 it is '!'. The model cannot "
        "tell the word from the mask, and forgets what follows it, and only there. Twice the masking with a token of "
        f"its own harms no word. Seen on {WITH_PEFT}.",
        fix="A special token of the tokenizer; objective.check_mask_id refuses any other.",
        broken=lambda: masked_with(0),
        fixed=lambda: masked_with(SPECIAL),
        seen=lambda facts: facts["after word 0"] > facts["after word 0, before"] + 0.1,
        claimed=lambda: masked_with(SPECIAL, probability=0.3),
    ),
    Pitfall(
        id="P54",
        title="Gradients compared while all of them are zero",
        symptom="The test of the compiled step passes; the run made with it does not learn as the eager one does.",
        claim="compile computes other gradients than eager mode (what comparing the two runs suggests)",
        verdict="Compiled, the right layer has the eager gradients. The layer was wrong, divided by its rank, and the "
        "test could not see it: it asked for gradients that are there and close, and from zeros in both factors every "
        f"layer has zeros, right or wrong. Seen on {WITH_PEFT}.",
        fix="Compare values, from a start at which every gradient is alive, and assert that it is.",
        broken=lambda: eager_against_compiled("zeros", Scaled, strict=False),
        fixed=lambda: eager_against_compiled("svd_residual", Scaled, strict=True),
        seen=lambda facts: facts["check passes"] and facts["error of the layer"] > 0.1,
        claimed=lambda: eager_against_compiled("svd_residual", lrc.LRCLinear, strict=True),
    ),
]
