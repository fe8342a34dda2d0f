"""LRC's pitfalls: ternary layers with a low-rank correction, as the write-up on LRC trained them.

The write-up reports runs on large cards. It called one of them healthy although its loss was flat.
It blames frozen embeddings, the weighting of several losses, the rank and compile. Here each of
these is run alone, on the layers of `nblib.methods.lrc`, beside the cause that holds. The general
cases are P04 (both factors zero), P11 (rounding) and P19 (logits).

Footgun: LRC trains two thin factors in every layer, so with most faults something still trains and
the loss still falls. Always compare with a run that lacks the fault.
"""

import copy
from collections.abc import Callable
from functools import cache

import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional as F

from lessons.pitfalls import WITH_PEFT, Pitfall, bench
from lessons.pitfalls.bench import fresh_dynamo, seeded
from nblib import compiling, losses, memory, models, train, wiring
from nblib.methods import lrc
from nblib.methods.distill import loss_weights, objective

GIB = 2**30


def corrected(
    init: str = "svd_residual",
    layer: type[lrc.LRCLinear] = lrc.LRCLinear,
    model: nn.Module | None = None,
) -> nn.Module:
    """Return the byte model, unless another is given, with ternary weights; every correction starts
    as `init` says, in layers of this class.
    """
    model = bench.trained() if model is None else model
    with seeded():
        lrc.attach(model, init=init)
    for module in lrc.layers(model).values():
        module.__class__ = layer
    return model.train()


# P49: both factors zero, and the frozen embeddings take the blame


def zeros(W: Tensor, Q: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    U = torch.zeros(W.shape[0], rank)
    V = torch.zeros(W.shape[1], rank)  # dU is a product with V, dV with U: both stay 0
    return U, V


def svd_of_the_error(W: Tensor, Q: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    P, S, Zh = torch.linalg.svd(W - Q, full_matrices=False)
    root = S[:rank].sqrt()
    U = P[:, :rank] * root
    V = Zh[:rank].T * root  # U V^T is the best correction of this rank
    return U, V


def started(factors: Callable, *, hook: bool, steps: int = 10, lr: float = 2e-3) -> dict:
    """Train from these first factors.

    `hook` makes the embedding's output require a gradient, the prescribed cure.
    """
    model = bench.trained()
    lrc.attach(model, init="zeros", keep_original=True)
    for layer in lrc.layers(model).values():
        layer.U.data, layer.V.data = factors(layer.original, layer.weight, layer.U.shape[1])
    if hook:
        model.enable_input_require_grads()
    before = {name: p.detach().clone() for name, p in wiring.trainable(model).items()}
    first = bench.held_out_loss(model)
    records = bench.learn(model, steps=steps, lr=lr, data=bench.batches(rows=4))
    return {
        "first U and V": factors.__name__.replace("_", " "),
        "hook on the embeddings": hook,
        "validation before": first,
        "validation after": bench.held_out_loss(model),
        "largest gradient norm": max(r["grad_norm"] for r in records),
        "tensors that moved": sum(
            not torch.equal(p, before[n]) for n, p in wiring.trainable(model).items()
        ),
        "of": len(before),
    }


# P50: the inputs are rounded without a straight-through estimator


def rounded(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-5)  # of each token
    whole = (x * (127 / largest)).round()  # slope 0: only `largest` passes a gradient
    return whole * (largest / 127)


def rounded_straight_through(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-5)
    whole = (x * (127 / largest)).round()
    y = whole * (largest / 127)
    return y.detach() + (x - x.detach())  # the value is y, the gradient is that of x


def not_rounded(x: Tensor) -> Tensor:
    return x


class Rounding(lrc.LRCLinear):
    """An LRC layer whose inputs go through `rounding`."""

    rounding: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        U, V = self.factors()
        return F.linear(self.rounding(x), self.weight, self.bias) + F.linear(x @ V, U)


def rounding_by(rounding: Callable) -> nn.Module:
    model = corrected("kaiming", Rounding)
    for layer in lrc.layers(model).values():
        layer.rounding = rounding
    return model


def lower_gradients(rounding: Callable) -> Tensor:
    """All gradients of the first block's corrections, end to end."""
    model = rounding_by(rounding)
    bench.mean_loss(model, next(bench.batches(seed=1))).backward()
    return torch.cat(
        [p.grad.flatten() for n, p in wiring.trainable(model).items() if ".layers.0." in n]
    )


def share_handed_down(rounding: Callable) -> float:
    """Return the share of entries of one layer's input gradient that are not zero, while its
    correction is still zero.
    """
    module = next(iter(lrc.layers(rounding_by(rounding)).values()))
    x = torch.randn(32, module.in_features, requires_grad=True)
    module(x).square().sum().backward()
    return float((x.grad != 0).double().mean())


@cache
def gain(rounding: Callable, lr: float, steps: int = 30) -> float:
    """How far the held-out loss falls."""
    with seeded():
        model = rounding_by(rounding)
        before = bench.held_out_loss(model)
        bench.learn(model, steps=steps, lr=lr, data=bench.batches(rows=4))
        return before - bench.held_out_loss(model)


def inputs_rounded(rounding: Callable, *, lr: float = 1e-2) -> dict:
    """Return compared with the same corrections over inputs that are not rounded, whose gradient
    needs no estimator.
    """
    exact = lower_gradients(not_rounded)
    return {
        "inputs": rounding.__name__.replace("_", " "),
        "learning rate": lr,
        "share of gradient handed down": share_handed_down(rounding),
        "cosine in the first block": float(
            F.cosine_similarity(lower_gradients(rounding), exact, dim=0)
        ),
        "gain": gain(rounding, lr),
        "gain with inputs as they are": gain(not_rounded, 1e-2),
    }


# P51: the rank takes the blame for the logits


def step_bytes(percent: float, logits: str, *, rows: int = 2, layers: int = 2) -> dict:
    """Return the write-up's step by the estimate: Qwen3-0.6B's width and vocabulary, a few of its
    28 layers.
    """
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
    kinds = memory.estimate(
        config,
        rows=rows,
        length=1024,
        attach=lambda model: lrc.attach(model, percent=percent, init="kaiming"),
        precision="bf16",
        checkpointing=True,
        logits=logits,
    )
    trained = kinds["gradients"] + kinds["optimizer"]
    sizes = {
        "logits": kinds["logits"],
        "gradients and state of the corrections": trained,
        "peak": kinds["peak"],
    }
    return {"rank %": percent, "loss": logits, "layers": layers} | {
        f"{k} GiB": v / GIB for k, v in sizes.items()
    }


# P52 and P53 use a language of 30 words, which a model learns in seconds

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
        learn_chain(model, losses.causal_lm, steps=80)
    return model


def learn_chain(
    model: nn.Module, loss, *, steps: int, router: nn.Module | None = None
) -> list[dict]:
    optimizers = [train.adamw(model, lr=1e-2)]
    if router is not None:
        model.mixer = router
        optimizers.append(torch.optim.Adam(router.parameters(), lr=1e-2))
    data = ({"input_ids": ids, "labels": ids} for ids in iter(lambda: chain(16), None))
    return bench.learn(model, steps=steps, optimizers=optimizers, data=data, loss=loss, clip=0)


def speaker() -> nn.Module:
    """Return a model that speaks the language, ternary and corrected."""
    model = copy.deepcopy(_speaker())
    lrc.attach(model)
    return model


# P52: the router gives all weight to the smaller loss


def weights_minimise_the_total(router: nn.Module, losses: Tensor) -> tuple:
    weights = router.net(losses.detach()).softmax(-1)
    weighted = weights * losses  # smallest with no weight on the larger loss
    spread = weighted.max() - weighted.min()
    return weighted, router.penalty * spread, weights.detach()


def weights_minimise_the_spread(router: nn.Module, losses: Tensor) -> tuple:
    relative = losses / router.running_means(losses.detach())
    weights = router.net(relative.detach()).softmax(-1)
    shares = weights * relative.detach()  # the weights learn from this spread alone
    spread = shares.max() - shares.min()
    return weights.detach() * relative, router.penalty * spread, weights.detach()


class Ruled(loss_weights.Router):
    """The router with one of the two rules above. Both objectives are present in every batch."""

    rule: Callable[[nn.Module, Tensor], tuple]

    def running_means(self, losses: Tensor) -> Tensor:
        return self._scale(losses, torch.ones_like(losses, dtype=torch.bool))

    def forward(self, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.rule(self, losses)


def routed(rule: Callable | None = None, *, steps: int = 30, **options) -> dict:
    """Next words and masked words, weighted by LDC-MTL's router; judged on the harder one, masked
    words.
    """
    model, ids = speaker(), chain(64)
    router = (Ruled if rule else loss_weights.Router)(("ce", "masked"), **options)
    router.rule = rule
    loss = objective.Objective({"ce": 1.0, "masked": 1.0}, mask_id=SPECIAL, router=router)

    @torch.no_grad()
    def judged() -> float:
        with seeded():  # the same masks each time
            batch = {"input_ids": ids, "labels": ids}
            total = objective.masked_tokens(model.eval(), batch, mask_id=SPECIAL)
        return float(total) / ids[:, 1:].numel()

    before = judged()
    records = learn_chain(model, loss, steps=steps, router=router)
    means, totals = loss.seen(), [r["loss"] for r in records]
    with torch.no_grad():
        weights = router.eval()(torch.tensor([means["ce"], means["masked"]]))[2]
    return {
        "losses divided by": {"none": "nothing", "running": "their running means"}[
            router.normalise
        ],
        "weights minimise the": router.learns,
        "first total": totals[0],
        "last total": totals[-1],
        "largest rise in a step": max(b - a for a, b in zip(totals, totals[1:])),
        "weight of masked words": float(weights[1]),
        "masked words before": before,
        "masked words after": judged(),
    }


# P53: a mask that is also a word


def mask_with_a_word(ids: Tensor, chosen: Tensor) -> Tensor:
    mask_id = 0  # taken for the unknown token; in Qwen3 id 0 is "!", a word of the text
    return ids.masked_fill(chosen, mask_id)


def mask_with_its_own_token(ids: Tensor, chosen: Tensor) -> Tensor:
    mask_id = 31  # a special token, which no text contains
    return ids.masked_fill(chosen, mask_id)


def masked_with(mask: Callable, *, probability: float = 0.15, steps: int = 25) -> dict:
    """Return the write-up's two objectives.

    Judged on plain text: the loss after the word of id 0, and after other words.
    """
    model, rows = speaker(), chain(256)

    def loss(model: nn.Module, batch: dict) -> dict:
        chosen = torch.rand(batch["input_ids"].shape) < probability
        chosen[:, 0] = False  # nothing predicts the first word
        damaged = mask(batch["input_ids"], chosen)
        hidden, head, _ = objective.states_of(model, batch | {"input_ids": damaged})
        labels = batch["labels"].masked_fill(damaged == batch["input_ids"], losses.IGNORED)
        scored, targets = losses.shifted_rows(hidden, labels)
        masked = losses.chunked_loss(scored, head, targets) / probability
        return losses.causal_lm(model, batch) | {"masked": 0.5 * masked}

    @torch.no_grad()
    def judged() -> tuple[float, float]:
        scores = model.eval()(input_ids=rows).logits[:, :-1]
        nats = F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        word = (rows[:, :-1] == 0).flatten()
        return float(nats[word].mean()), float(nats[~word].mean())

    mask_id = int(mask(torch.tensor(1), torch.tensor(True)))
    before = judged()
    learn_chain(model, loss, steps=steps)
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
    """The layer as a port got it wrong: the correction is divided by its rank, alpha / r with alpha
    at 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        U, V = self.factors()
        return F.linear(self.once(x), self.weight, self.bias) + F.linear(x @ V, U) / U.shape[1]


def there_and_close(eager: dict[str, Tensor], compiled: dict[str, Tensor]) -> dict:
    there = all(g is not None for g in compiled.values())
    pairs = [(compiled[name], g) for name, g in eager.items()]
    close = all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in pairs)
    passes = there and close  # passes if every gradient is zero in both
    return {"all there": there, "all close": close, "check passes": passes}


def alive_and_close(eager: dict[str, Tensor], compiled: dict[str, Tensor]) -> dict:
    there = all(g is not None for g in compiled.values())
    pairs = [(compiled[name], g) for name, g in eager.items()]
    close = all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in pairs)
    passes = there and close and all(bool(g.any()) for g in eager.values())
    return {"all there": there, "all close": close, "check passes": passes}


def eager_against_compiled(init: str, layer: type, check: Callable) -> dict:
    """Return the test of a compiled layer against the eager one, by this check of their gradients.
    One block of random weights does: what it computes is compared, not what it knows.
    """
    batch = next(bench.batches(rows=2))

    def made(init: str, layer: type = lrc.LRCLinear) -> nn.Module:
        return corrected(init, layer, bench.byte_model(layers=1))

    def gradients(model: nn.Module) -> dict[str, Tensor | None]:
        bench.mean_loss(model, batch).backward()
        return {name: p.grad for name, p in wiring.trainable(model).items()}

    eager = gradients(made(init))
    with fresh_dynamo():
        compiled = gradients(compiling.compile_blocks(made(init, layer), backend="aot_eager"))
    wrong, right = gradients(made("svd_residual", layer)), gradients(made("svd_residual"))
    return {
        "init": init,
        "layer": layer.__name__,
        **check(eager, compiled),
        "eager gradients that are not zero": sum(bool(g.any()) for g in eager.values()),
        "of": len(eager),
        "error of the layer": max(
            float((wrong[n] - g).norm() / g.norm()) for n, g in right.items()
        ),
    }


PITFALLS = [
    Pitfall(
        id="P49",
        title="Corrections that start at zero",
        symptom="Training raises nothing, and the validation loss is the same number from "
        "first to last.",
        claim="frozen embeddings break the gradients, so call enable_input_require_grads() "
        "(the write-up on LRC)",
        verdict="With U = V = 0 every gradient is exactly zero and nothing moves, even with "
        "the prescribed hook. The "
        "gradient of U is a product with V, and the gradient of V a product with U. With a "
        "start from an SVD every "
        "tensor trains and the validation loss falls, although the embeddings are frozen and "
        "have no hook. "
        f"Seen on {WITH_PEFT}.",
        fix="init='svd_residual' (or 'kaiming', where V is random and U zero), and a canary "
        "before the run.",
        broken=lambda: started(zeros, hook=True),
        fixed=lambda: started(svd_of_the_error, hook=True),
        seen=lambda facts: (
            facts["tensors that moved"] == 0
            and facts["validation after"] == facts["validation before"]
        ),
        claimed=lambda: started(svd_of_the_error, hook=False),
        check="B3",
        wrong=zeros,
        right=svd_of_the_error,
    ),
    Pitfall(
        id="P50",
        title="Frozen weights, and rounded inputs without a straight-through estimator",
        symptom="Every correction gets a gradient and moves, and the loss hardly falls.",
        claim="the learning rate is too small (folklore; the code of the write-up on LRC has "
        "the fault, unnoticed)",
        verdict="The held-out loss falls by less than half of what it could. Rounding lets one "
        "entry per token of the "
        "gradient through, the largest, so the gradients of the lower layers point elsewhere. "
        "With the estimator the "
        "loss falls as far as with inputs that are not rounded. At a third of the rate it "
        "falls nearly as far. "
        f"Seen on {WITH_PEFT}.",
        fix="Use the estimator on the inputs even where W is frozen: ternary.int8. Compare the "
        "gradients once with "
        "those of inputs that are not rounded.",
        broken=lambda: inputs_rounded(rounded),
        fixed=lambda: inputs_rounded(rounded_straight_through),
        seen=lambda facts: facts["gain"] < 0.5 * facts["gain with inputs as they are"],
        claimed=lambda: inputs_rounded(rounded_straight_through, lr=3e-3),
        slow=True,
        wrong=rounded,
        right=rounded_straight_through,
    ),
    Pitfall(
        id="P51",
        title="The rank takes the blame for the logits",
        symptom="CUDA out of memory with 0.6 billion parameters, most of them frozen, on a "
        "large card.",
        claim="a rank of 25 % is too high, take 15 % (the write-up on LRC)",
        verdict="Most of the peak is logits, at the write-up's width and vocabulary. The lower "
        "rank saves very little. "
        "Scoring the vocabulary in chunks saves almost all of the logits, at the higher rank "
        "too. The runs here have "
        "fewer layers and rows than the write-up's: the sizes differ, the order of the causes "
        "does not. "
        f"Estimated on {WITH_PEFT}.",
        fix="losses.causal_lm, or any other loss that scores the vocabulary in chunks.",
        broken=lambda: step_bytes(15, "full"),  # with the claimed cure
        fixed=lambda: step_bytes(15, "chunked"),
        seen=lambda facts: facts["logits GiB"] > 0.5 * facts["peak GiB"],
        claimed=lambda: step_bytes(25, "chunked"),
        slow=True,
        wrong=memory.in_full,
        right=memory.in_chunks,
    ),
    Pitfall(
        id="P52",
        title="Learned weights that drop the harder objective",
        symptom="The total loss falls as it should, but the second objective hardly improves.",
        claim="LDC-MTL's learned weights make training unstable (the write-up on LRC)",
        verdict="Training is stable: no step rises more than with the routers that work. But "
        "the router gives the "
        "larger loss almost no weight within tens of steps, and nothing reports it. The "
        "weights minimise the total, "
        "which is smallest that way. Masked words then improve only in the first steps, and "
        "through what is learned "
        "from next words. Learned weights on losses of one size keep both objectives for as "
        "long as these runs "
        f"last. Seen on {WITH_PEFT}.",
        fix="loss_weights.Router with its defaults: each loss is divided by its running mean, "
        "and the weights learn "
        "from the spread alone. Log the weights.",
        broken=lambda: routed(weights_minimise_the_total, normalise="none", learns="total"),
        fixed=lambda: routed(weights_minimise_the_spread),
        seen=lambda facts: (
            facts["weight of masked words"] < 0.05 and facts["last total"] < facts["first total"]
        ),
        claimed=lambda: routed(normalise="running", learns="total"),
        slow=True,
        wrong=weights_minimise_the_total,
        right=weights_minimise_the_spread,
    ),
    Pitfall(
        id="P53",
        title="A mask that is also a word",
        symptom="Since masked tokens were added, the model predicts worse what follows an "
        "exclamation mark.",
        claim="masking damages the past, so the objective harms all next words (folklore)",
        verdict="Only the words after the mask's id get worse; masking twice as many tokens "
        "with a token of its own "
        "harms none. The write-up on LRC masked with id 0 and took it for the unknown token; "
        "in Qwen3 it is '!'. The "
        "model cannot tell the word from the mask, so it forgets what follows the word. "
        f"Seen on {WITH_PEFT}.",
        fix="Mask with a special token of the tokenizer; objective.check_mask_id refuses any "
        "other.",
        broken=lambda: masked_with(mask_with_a_word),
        fixed=lambda: masked_with(mask_with_its_own_token),
        seen=lambda facts: facts["after word 0"] > facts["after word 0, before"] + 0.1,
        claimed=lambda: masked_with(mask_with_its_own_token, probability=0.3),
        slow=True,
        wrong=mask_with_a_word,
        right=mask_with_its_own_token,
    ),
    Pitfall(
        id="P54",
        title="Gradients compared while all of them are zero",
        symptom="The test of the compiled layer passes, but the compiled run does not learn as "
        "the eager one does.",
        claim="compile computes other gradients than eager mode (what a comparison of the two "
        "runs suggests)",
        verdict="The right layer has the same gradients compiled and eager. The compiled run "
        "had a wrong layer, "
        "divided by its rank, and the test passed it. It asked only that gradients exist and "
        "are close. With both "
        f"factors at zero every layer, right or wrong, has gradients of zero. Seen on {WITH_PEFT}.",
        fix="Start where every gradient is alive, assert that it is, and then compare the values.",
        broken=lambda: eager_against_compiled("zeros", Scaled, there_and_close),
        fixed=lambda: eager_against_compiled("svd_residual", Scaled, alive_and_close),
        seen=lambda facts: facts["check passes"] and facts["error of the layer"] > 0.1,
        claimed=lambda: eager_against_compiled("svd_residual", lrc.LRCLinear, alive_and_close),
        slow=True,
        wrong=there_and_close,
        right=alive_and_close,
    ),
]
