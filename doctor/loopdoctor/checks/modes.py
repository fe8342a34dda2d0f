"""Train or eval, and dropout that does not ask which: S11, N16, S24.

Footgun: each module has a flag of its own, and the root's says nothing of the rest. A model that
was loaded in eval mode and then wrapped (peft) is a root in train mode around modules in eval mode.
"""

import itertools

from torch import nn

from loopdoctor import owners
from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.seen import BLIND, HABIT, hidden
from loopdoctor.evidence import Backward, Call, Evidence
from loopdoctor.finding import NOTE, OK, WARN, Verdict, not_applicable, unknown

BATCHES = nn.modules.batchnorm._BatchNorm


def live_dropouts(e: Evidence) -> dict[str, tuple[float, bool]]:
    """Every dropout with p > 0 of the trained models: p, and whether it was in train mode.

    Modules count when they were called with gradients on. Attention often has no module and passes
    a number that its own module keeps (`self.attention_dropout`, `self.dropout`); that number
    counts with the flag of that module. Of what is compiled the flags are all that can be seen.
    """
    found, modes, inside = {}, _modes(e), hidden(e)
    over = modes and modes[-1] and not e.model.training  # an evaluation came after the training
    for name, m in e.modules():
        if id(m) in e.dropouts:
            _, training, p = e.dropouts[id(m)]
            found[name] = p, training
            continue
        if id(m) in inside and isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0:
            found[name] = m.p, m.training or bool(over)
        for attribute, value in vars(m).items():
            if "dropout" in attribute and isinstance(value, float) and 0.0 < value < 1.0:
                found[f"{name}.{attribute}".lstrip(".")] = value, m.training or bool(over)
    return found


def _modes(e: Evidence) -> list[bool]:
    """Return the flag of the root at each forward that a backward was made from, in order."""
    trained = [
        c for b in e.of(Backward) for c in b.calls if c.role == "model" and c.grad and not c.raised
    ]
    return [c.training for c in trained or e.forwards]


def _flipped(modes: list[bool]) -> bool:
    return bool(modes) and modes[0] and not modes[-1]


@check("S11")
def eval_mode_training(e: Evidence) -> Fired | Verdict:
    """Return it overfits sooner than it should; the configured dropout seems to do nothing.

    Fires when the steps were made from forwards in eval mode while the model has dropout with p >
    0. transformers' from_pretrained returns a model in eval mode, and peft's wrapper around it says
    train while the inside does not. A model without dropout and batch norm loses nothing, and a
    part put in eval mode on purpose under a root in train mode is left alone. So is a model of
    which nothing trains, or that is in no optimizer, where a prompt or a picture in front of it is;
    and a policy that is compared with itself (the ratio of PPO and GRPO, which begins at one).

    WARN eval-mode-training: The model trains in eval mode: model.train() was never called
    (from_pretrained returns eval mode), so its dropout is off. Fix: Call model.train() before the
    loop; or set dropout to 0 in the config if it should be off.
    WARN eval-mode-training/after-evaluation: The model trains in eval mode, so its dropout is off:
    it was evaluated before the first step, and nothing has put it back. Fix: Call model.train()
    after each evaluation.
    WARN eval-mode-training/norm: All weights train in eval mode, so batch norm neither uses nor
    learns the statistics of the batches. Fix: Call model.train() before the loop and after each
    evaluation.
    """
    modes = _modes(e)
    if e.model is None or not modes or not e.of(Backward):
        return unknown("no training forward was seen")
    if e.parameters() and not e.trainable() or owners.resting(e):
        return not_applicable("nothing of the model trains: it rests behind what does")
    if _flipped(modes):
        return not_applicable("the mode changed during the loop: see N16")
    if e.habits["S11 ratio"] and not any(modes):
        return not_applicable(
            "the policy rests, so that the ratio to what it said before begins at one"
        )
    drops = live_dropouts(e)
    norms = [
        n
        for n, m in e.modules()
        if isinstance(m, BATCHES) and m.track_running_stats and not m.training
    ]
    if (
        norms
        and not any(modes)
        and not drops
        and all(p.requires_grad for p in e.parameters().values())
    ):
        return fires(
            f"{len(norms)} batch norms used their running statistics in every training forward "
            f"({norms[0]})",
            "those of the batch while all weights train",
            fault="eval-mode-training/norm",
        )
    if not drops and len(asleep := e.habits["S11"]) > 1 and not any(modes):
        return fires(
            f"in {len(asleep)} steps F.dropout was told training=False (p = "
            f"{next(iter(asleep.values())):g})",
            "training=True while training",
        )
    if not drops:
        return OK
    # records decide if an evaluation came after
    wrapped = not _inside(e).training and _inside(e) is not e.model
    asleep = {n: p for n, (p, training) in drops.items() if not training}
    if (any(modes) and not wrapped) or not asleep:
        return OK
    name, p = next(iter(asleep.items()))
    return fires(
        f"{len(asleep)} of {len(drops)} dropouts with p > 0 are in eval mode while training "
        f"({name}, p = {p:g})",
        "0 of them in eval mode",
        fault="eval-mode-training" + "/after-evaluation" * _evaluated_first(e),
    )


def _evaluated_first(e: Evidence) -> bool:
    """Whether the model was called in eval mode without gradients before it was called with
    them.
    """
    calls = itertools.takewhile(lambda call: not call.grad, e.of(Call, role="model"))
    return any(not call.training for call in calls)


def _inside(e: Evidence):
    """Return the transformers model within peft's wrapper, or the model itself."""
    base = getattr(e.model, "get_base_model", None)
    return base() if callable(base) else e.model


@check("N16")
def mode_flip(e: Evidence) -> Fired | Verdict:
    """After the first evaluation the training loss drops a little and from then on the model
    overfits.

    Fires when the first training forwards were in train mode and the last ones in eval mode: an
    evaluation called model.eval() and nobody called model.train() after it. Forwards of the
    evaluation itself do not count, only those that a backward was made from. After the watched
    steps the flags of all dropouts and normalisations are looked at whenever the optimizer steps;
    it fires where all were in eval mode up to the last of these steps.

    WARN or NOTE mode-flip: The model was put into eval mode during training {after}and never put
    back, so dropout is off from then on. Fix: Call model.train() after each evaluation, before the
    next training forward.
    """
    modes = _modes(e)
    if len(modes) < 2 or not e.of(Backward):
        return unknown("fewer than two training forwards were seen")
    if not _flipped(modes):
        return OK
    at = len(modes) - modes[::-1].index(True)
    drops = live_dropouts(e)
    if drops and all(training for _, training in drops.values()):
        return OK  # the part that learns was put back, under a root that was not
    stateful = [n for n, m in e.modules() if "BatchNorm" in type(m).__name__]
    between = [c for c in e.of(Call) if c.role == "model" and not c.grad]
    after = "after an evaluation pass " if between else ""
    return fires(
        f"training forwards 1 to {at} in train mode, {at + 1} to {len(modes)} in eval mode; "
        f"{len(drops)} dropouts",
        f"all {len(modes)} in train mode",
        WARN if drops or stateful else NOTE,
        after=after,
    )


@check("S24")
def dropout_unaware(e: Evidence) -> Fired | Verdict:
    """Return the finished model gives another answer each time, though model.eval() was called.

    Reads the line that calls a dropout of torch.nn.functional. Fires when it does not say whether
    the model trains and nothing in the function around it asks for that. nn.Dropout knows it by
    itself. The dropout of an attention is asked about as well; and it is seen when a model in eval
    mode is called during the first steps.

    WARN dropout-unaware: A functional dropout is called without training=self.training, and its
    default is True: it drops numbers after model.eval() as well. Fix: F.dropout(x, p,
    training=self.training), or nn.Dropout in __init__.
    WARN dropout-unaware/attention: scaled_dot_product_attention is given a dropout_p in eval mode
    as well, and it drops whatever it is given, so answers and validations are random. Fix:
    dropout_p=self.dropout if self.training else 0.0.
    """
    if len(e.shown) < HABIT:
        return BLIND
    if seen := e.habits["S24 attention"]:
        return fires(
            f"in {next(iter(seen.values()))}",
            "dropout_p=0 in eval mode",
            fault="dropout-unaware/attention",
        )
    if not e.unaware:
        return OK
    return fires(f"in {next(iter(e.unaware.values()))}", "training=self.training")
