"""Formulas of methods with a piece missing: the ends of episodes (F56), the router of a mixture
(M2).

Footgun: a mixture is known by what it does, a choice by `topk` or `max` among scores that a layer
gave. A router that chooses by other means (a sort, a learned threshold, expert choice) is not seen.
"""

from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import no_habit
from loopdoctor.evidence import Evidence
from loopdoctor.finding import OK, WARN, Verdict, unknown

STEPS = 3


@check("F56")
def ends_ignored(e: Evidence) -> Fired | Verdict:
    """In Q-learning all values run to one and the same limit, and the policy does not avoid the end
    of an episode.

    Fires when a target holds the largest value of the next state, or a reward and a discount times
    a value, and flags of zeros and ones of its length were drawn and went into nothing before the
    loss. Where any such flag is used, nothing is said. Also when there are no flags at all, and
    states that are reached again and again in three steps are never left in any of them, while most
    others are.

    WARN ends-ignored: The value of the next state is counted where there is none: the ends of
    episodes were drawn from memory and are not part of the target. Fix: target = reward + gamma *
    next_q * (1 - done).
    WARN ends-ignored/not-kept: The value of the next state is counted in states from which nothing
    is ever done: they end an episode, the memory does not say so, and their values are never
    learned. Fix: Keep done in the memory, and target = reward + gamma * next_q * (1 - done).
    """
    if found := e.habits["F56 never left"]:
        states, rows, all_rows = next(iter(found.values()))
        what = (
            f"{states} states were reached in {rows} of {all_rows} rows and left in none, "
            "and their values are counted"
        )
        return fires(what, "a factor of 0 where nothing comes after", fault="ends-ignored/not-kept")
    if (verdict := no_habit(e, e.endless)) is not None:
        return verdict
    rows = next(iter(e.endless.values()))
    return fires(
        f"in {len(e.endless)} steps {rows} flags of zeros and ones had no use",
        "a factor (1 - done)",
    )


@check("M2")
def router_of_a_mixture(e: Evidence) -> Fired | Verdict:
    """Return the experts of a mixture are used unevenly, though there is a balance loss; or its
    router does not learn.

    Looked at where experts are chosen by topk or max among scores that are a softmax or a sigmoid
    of what a layer gave. Fires when a softmax with a gradient is taken of scores that are a softmax
    already; when the scores are a sigmoid and a softmax of the same logits has a gradient; and when
    the weight of the only expert of a row is divided by itself. Each in three steps. A softmax of
    two weights or more, and shares of a sigmoid's scores, are left alone.

    WARN router-balance: The balance loss takes a softmax of probabilities, which is nearly flat
    whatever the router says, so it hardly pushes. Fix: Give it the router's logits, or take the
    probabilities as they are.
    WARN router-balance/of-another-score: Tokens are routed by a sigmoid of the logits, and the
    balance loss is made of their softmax: it balances numbers that nobody routes by. Fix: Divide
    the sigmoid's scores by their sum over the experts, and balance these.
    WARN router-balance/weight-of-one: Each token has one expert, and its weight is divided by
    itself: it is 1 whatever the router says, so the loss of the task has no slope in the router.
    Fix: With one expert multiply its output with the score as it is; renormalise for two or more.
    """
    for key, fault, what in (
        ("M2 twice", "router-balance", "a softmax was taken of the router's probabilities"),
        (
            "M2 mixed",
            "router-balance/of-another-score",
            "experts were picked by a sigmoid, and a softmax was balanced",
        ),
        ("M2 one", "router-balance/weight-of-one", "the weights of all rows were 1"),
    ):
        if len(seen := e.habits[key]) >= STEPS:
            return fires(
                f"in {len(seen)} steps {what}", "a router that learns from the loss", WARN, fault
            )
    if len(e.shown) < STEPS:
        return unknown("fewer than three steps were seen function by function")
    return OK
