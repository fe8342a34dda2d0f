"""Mixtures of experts, and Muon: M1, M2.

Footgun: a mixture is known by what it does, a choice by `topk` or `max` among scores that a layer gave. A router that
chooses by other means (a sort, a learned threshold, expert choice) is not seen.
"""

import torch

from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import Evidence, Step
from loopdoctor.finding import OK, WARN, Verdict, not_applicable, unknown

STEPS = 3


@check("M1")
def muon_overwrites_its_momentum(e: Evidence) -> Fired | Verdict:
    """Muon learns worse with weights in bf16 than in fp32, and its momentum seems to have no effect.

    Fires for torch's own Muon with nesterov=False on weights of bf16, where the installed torch overwrites the momentum
    (its bf16 copy of the buffer is the buffer itself, and is divided in place): a step on a small matrix is tried.

    WARN momentum-overwritten: torch.optim.Muon with nesterov=False normalises the momentum of bf16 weights in place, so
    each step keeps a direction and forgets its size. Fix: nesterov=True, or weights in fp32 under autocast.
    """
    kind = getattr(torch.optim, "Muon", None)
    mine = [o for o in e.optimizers if kind is not None and o.kind is kind and o.object is not None]
    if not mine:
        return not_applicable("no Muon of torch's")
    if not e.of(Step):
        return unknown("no step was seen")
    groups = [group for o in mine for group in o.object.param_groups if not group.get("nesterov", True)]
    halves = [p for group in groups for p in group["params"] if p.dtype is torch.bfloat16]
    if not halves or not _overwrites(kind):
        return OK
    return fires(
        f"{len(halves)} matrices in bfloat16, nesterov=False, torch {torch.__version__}",
        "a momentum that is kept from step to step",
        WARN,
    )


def _overwrites(kind: type) -> bool:
    """Whether this torch does: the first momentum of a gradient g is (1 - momentum) g, or g, but never of norm 1."""
    weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    weight.grad = 8 * torch.eye(4, dtype=torch.bfloat16)
    optimizer = kind([weight], lr=0.0, momentum=0.5, nesterov=False, weight_decay=0.0)
    optimizer.step()
    held = [t for t in optimizer.state[weight].values() if isinstance(t, torch.Tensor) and t.shape == weight.shape]
    return bool(held) and float(held[0].float().norm()) < 1.5


@check("M2")
def router_of_a_mixture(e: Evidence) -> Fired | Verdict:
    """The experts of a mixture are used unevenly, though there is a balance loss; or its router does not learn.

    Looked at where experts are chosen by topk or max among scores that are a softmax or a sigmoid of what a layer gave.
    Fires when a softmax with a gradient is taken of scores that are a softmax already; when the scores are a sigmoid
    and a softmax of the same logits has a gradient; and when the weight of the only expert of a row is divided by
    itself. Each in three steps. A softmax of two weights or more, and shares of a sigmoid's scores, are left alone.

    WARN router-balance: The balance loss takes a softmax of probabilities, which is nearly flat whatever the router
    says, so it hardly pushes. Fix: Give it the router's logits, or take the probabilities as they are.
    WARN router-balance/of-another-score: Tokens are routed by a sigmoid of the logits, and the balance loss is made of
    their softmax: it balances numbers that nobody routes by. Fix: Divide the sigmoid's scores by their sum over the
    experts, and balance these.
    WARN router-balance/weight-of-one: Each token has one expert, and its weight is divided by itself: it is 1 whatever
    the router says, so the loss of the task has no slope in the router. Fix: With one expert multiply its output with
    the score as it is; renormalise for two or more.
    """
    for key, fault, what in (
        ("M2 twice", "router-balance", "a softmax was taken of the router's probabilities"),
        ("M2 mixed", "router-balance/of-another-score", "experts were picked by a sigmoid, and a softmax was balanced"),
        ("M2 one", "router-balance/weight-of-one", "the weights of all rows were 1"),
    ):
        if len(seen := e.habits[key]) >= STEPS:
            return fires(f"in {len(seen)} steps {what}", "a router that learns from the loss", WARN, fault)
    if len(e.shown) < STEPS:
        return unknown("fewer than three steps were seen function by function")
    return OK
