"""What the number stands for that the loop differentiates: F3 to F5, F40, N6, N17.

Footgun: at the start of training every token costs about ln(vocabulary), so values alone separate
little; where the targets were seen, they decide.
"""

import itertools
import math

import torch
from torch import Tensor, nn

from loopdoctor import fed
from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.loss_inputs import judged, raised
from loopdoctor.checks.seen import HABIT, no_habit, spoilt
from loopdoctor.evidence import Backward, Call, Clip, Evidence, Fed, Gradients, Step, weight_of
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown
from loopdoctor.fingerprint import Reading
from loopdoctor.targets import IGNORED, shifted

# times as far as the targets, from which first answers lie beyond them; how far at least
FAR, LEAST = 20.0, 5.0
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
DRAWN = 0.5  # spread of a table that was left as it was drawn, with one of 1
WIDE, WEIGHTS = 3.0, 64  # spread of weights in 1/sqrt(inputs), as N(0, 1) has; fewer tell nothing
PASSED = 3  # losses that are not finite, from where on it is no accident
SQUASHED = {"Sigmoid": "a sigmoid", "Relu": "a ReLU", "Tanh": "a tanh"}
MISSING = {  # faults where logits stand for log-probabilities
    "nll_loss": "wrong-loss/no-softmax",
    "kl_div": "wrong-loss/no-softmax-before-kl",
    "ctc_loss": "wrong-loss/no-softmax-before-ctc",
}


@check("F3")
def wrong_target(e: Evidence) -> Fired | Verdict:
    """Return the loss is stuck high, or falls to nearly zero at once; text comes out senseless or
    as a copy.

    The targets, found in the loss, are laid against the ids: one ahead is right; two ahead is a
    shift too many, none at all asks a model for the token it has just read. Sums over tokens, a
    softmax too many, and the divergence that is averaged over the vocabulary are named as well. Of
    every loss of torch (cross-entropy, NLL, binary cross-entropy, divergence), on any shape, it is
    read whether it is given the logits, probabilities or logarithms that it asks for, and whether a
    mean is divided again. Masked and encoder-decoder models, heads that predict several tokens
    ahead, label smoothing, auxiliary losses, and a divergence divided by the tokens of a row are
    left alone.

    ERROR or WARN wrong-loss/unshifted: The labels are not shifted (off by one): the model is asked
    to repeat the token it has just read. Fix: Compare logits[:, :-1] with input_ids[:, 1:].
    WARN wrong-loss/backwards: The labels are shifted the wrong way: the model is asked for tokens
    before the one it has just read. Fix: Compare logits[:, :-1] with input_ids[:, 1:].
    ERROR wrong-loss/shifted-twice: The labels are shifted twice (a double shift): every position
    learns the token after the next one. Fix: Shift once: either in the data, or in the loss, or
    leave it to the model.
    ERROR wrong-loss/decoder-told: The decoder is given the token it must predict: decoder_input_ids
    were not shifted right. Fix: Leave decoder_input_ids out (the model shifts the labels itself),
    or shift them right by one.
    ERROR wrong-loss/double-softmax: A double softmax: cross_entropy applies one itself, so the loss
    can hardly move from ln(vocabulary). Fix: Give cross_entropy the logits.
    ERROR wrong-loss/no-softmax: A softmax is missing: nll_loss takes log-probabilities, and with
    logits it falls without end. Fix: Use cross_entropy, or log_softmax before nll_loss.
    WARN wrong-loss/summed-over-row: batchmean divides by the first size only, so the distillation
    term is a sum over the {t} tokens of a row and that many times too large. Fix: Flatten to
    (tokens, classes) before kl_div.
    WARN wrong-loss/averaged-over-vocabulary: The distillation term (KL) is averaged over the
    vocabulary as well (reduction='mean'), so it hardly counts. Fix: Flatten to (tokens, classes)
    and use reduction='batchmean', or sum over classes and average over tokens.
    WARN wrong-loss/summed: The loss is a sum over tokens or rows (reduction='sum'): gradients are
    that many times too large, and grow with the batch. Fix: Use reduction='mean', or divide by the
    number of supervised tokens.
    WARN wrong-loss/divided-twice: The loss is divided by the size of the batch twice:
    reduction='mean' has done it already, so gradients are that many times too small. Fix: Leave the
    division out, or use reduction='sum' with it.
    WARN wrong-loss/divided-by-masked: The summed loss is divided by a count that has tokens in it
    which are not supervised: it is printed {share:.0%} of what it is, and gradients are that much
    too small. Fix: Mask the labels first, then count the labels that are not the ignored index, and
    divide by that.
    WARN wrong-loss/squashed-logits: Logits go through {by} before cross_entropy, which wants them
    as they are; the loss cannot come near 0. Fix: Remove it: give cross_entropy what the last
    linear layer gives.
    ERROR wrong-loss/no-logarithm: {name} takes log-probabilities and is given probabilities: a
    softmax without its logarithm. Fix: Use log_softmax before it (or cross_entropy on the logits).
    ERROR wrong-loss/no-softmax-before-kl: A softmax is missing: kl_div takes log-probabilities as
    its input, and is given logits. Fix: Use log_softmax on the student's logits, and softmax on the
    teacher's.
    ERROR wrong-loss/no-softmax-before-ctc: A softmax is missing: ctc_loss takes log-probabilities,
    and is given logits. Fix: Give it logits.log_softmax(-1).
    ERROR wrong-loss/over-the-batch: The softmax is taken over the wrong dimension (the batch), so
    the rows of a batch compete with each other. Fix: Use dim=-1 (classes) in softmax or
    log_softmax.
    ERROR wrong-loss/mixed: Classes and positions are mixed: (N, C, ...) was reshaped to (rows, C)
    without a permute, so scores and targets do not line up. Fix: Move the classes last before the
    reshape (permute(0, 2, 3, 1)), or give cross_entropy the (N, C, ...) as it is.
    ERROR wrong-loss/crossed: Scores were flattened from ({first}, {second}, classes) and targets
    from ({second}, {first}), so each place is scored against that of another row. Fix: Put the rows
    first on both sides before they are flattened: logits.transpose(0, 1).
    ERROR wrong-loss/logits-into-bce: binary_cross_entropy takes probabilities and is given logits:
    a sigmoid is missing. Fix: Use binary_cross_entropy_with_logits (BCEWithLogitsLoss), or a
    sigmoid before it.
    ERROR wrong-loss/double-sigmoid: A double sigmoid: the loss is given the probabilities of a
    sigmoid (or softmax) and applies one itself. Fix: Give binary_cross_entropy_with_logits
    (BCEWithLogitsLoss) the logits, or use binary_cross_entropy (BCELoss) with one sigmoid.
    ERROR wrong-loss/exponential-twice: The exponential is taken twice: poisson_nll_loss wants the
    logarithm of the rate (log_input=True, the default) and is given a rate. Fix: Give it the last
    layer's numbers, or say log_input=False.
    """
    backwards = e.of(Backward)
    readings = [b.reading for b in backwards if b.reading is not None]
    if (found := odd_input(e)) is not None:
        return found
    if len(crossed := e.habits["F3 crossed"]) > 1:
        first, second = next(iter(crossed.values()))
        what = (
            f"in {len(crossed)} steps scores of ({first}, {second}, ...) met targets of "
            f"({second}, {first})"
        )
        return fires(
            what,
            "one order of rows and places",
            fault="wrong-loss/crossed",
            first=first,
            second=second,
        )
    if len(turned := e.habits["F3 turned"]) > 1:
        first, second = next(iter(turned.values()))
        what = (
            f"in {len(turned)} steps the targets ({second}, {first}) were the next tokens "
            f"of ids ({first}, {second})"
        )
        return fires(
            what,
            "one order of rows and places",
            fault="wrong-loss/crossed",
            first=first,
            second=second,
        )
    if len(columns := e.habits["F3 in columns"]) > 1:
        shift = next(iter(columns.values()))
        what = (
            f"in {len(columns)} steps the target at place t of ids (places, texts) was that "
            f"of place t + {shift}"
        )
        fault = "wrong-loss/backwards" if shift < 0 else "wrong-loss/shifted-twice"
        return fires(what.replace("+ -", "- "), "that of place t + 1", fault=fault)
    tests = (
        _probabilities,
        _told,
        _offset,
        _divergence,
        _summed,
        _divided_by_masked,
        _summed_over_batch,
    )
    for test in tests:
        if (found := test(e, backwards, readings)) is not None:
            return found
    if (found := divided_twice(e)) is not None:
        return found
    if judged(e):
        return OK
    if not any(r.offset is not None for r in readings):
        return (
            not_applicable("the loss is none that is known")
            if readings
            else unknown("no loss could be read")
        )
    return OK


def _offset(e: Evidence, backwards: list[Backward], readings: list[Reading]) -> Fired | None:
    """Targets at another distance than the next token.

    The order is the meaning: first it is asked whether the distance is known for sure (enough
    tokens, one distance in all losses, seen more than once where it was only inferred from the
    value), then how far the model itself looks ahead, because only the difference of the two is a
    fault: 0 repeats, 2 or more skips, less than 0 looks back.
    """
    known = [r for r in readings if r.offset is not None]
    if not known or (tokens := sum(r.tokens or 0 for r in known)) < 32:
        return None
    offset = known[0].offset
    if any(r.offset != offset or 1 in r.offsets for r in known) or len(known) < 0.8 * len(readings):
        # a model that shifts its input itself reads one token less
        reach = e.probes.get("reach")
        if not (all(r.offset == 1 for r in known) and reach == -1):
            return None
    if known[0].how == "enumerated" and len(known) < 2:
        return None
    reach = e.probes.get("reach")
    looks = reach if reach is not None else 0 if _causal(e) else None
    if looks is None or looks > 0:
        return None
    ahead = offset - looks
    if ahead == 1:
        return None
    if ahead == 0:
        return fires(
            f"the target at position t is input_ids[t], which the model has read ({tokens} tokens)",
            "the target at position t is input_ids[t + 1]",
            # else something was put in the input's place
            ERROR if all(_exactly(r, offset) for r in known) else WARN,
            fault="wrong-loss/unshifted",
        )
    if ahead < 0:
        return fires(
            f"the target at position t is input_ids[t - {-ahead}] ({tokens} tokens)",
            "the target at position t is input_ids[t + 1]",
            fault="wrong-loss/backwards",
        )
    if ahead >= 2:
        return fires(
            f"the target at position t is input_ids[t + {ahead}] ({tokens} tokens)",
            "the target at position t is input_ids[t + 1]",
            fault="wrong-loss/shifted-twice",
        )
    return None


def _exactly(reading: Reading, offset: int) -> bool:
    """Whether every target is the id at that distance."""
    if reading.targets is None or reading.ids is None:
        return True
    asked = (reading.targets != IGNORED) & shifted(
        torch.ones_like(reading.ids, dtype=torch.bool), offset, False
    )
    return bool((reading.targets == shifted(reading.ids, offset, IGNORED))[asked].all())


def _causal(e: Evidence) -> bool:
    kinds = [type(m).__name__ for m in e.models]
    return any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds) and not getattr(
        e.config, "is_encoder_decoder", False
    )


def _told(e: Evidence, backwards: list[Backward], readings: list[Reading]) -> Fired | None:
    """Return an encoder-decoder whose decoder reads at each position the very token it is asked for
    there.
    """
    if len(seen := e.habits["F3 told"]) > 1 and not any(e.echoed.values()):  # else F33 says it
        return fires(
            f"in {len(seen)} steps the tokens that the loss asked for "
            f"({next(iter(seen.values()))} of the first) were "
            "decoder_input_ids at their own position",
            "decoder_input_ids are the labels shifted right by one, with the start token in front",
            fault="wrong-loss/decoder-told",
        )
    calls = [c for c in e.forwards if c.decoder is not None and c.labels is not None]
    calls = [c for c in calls if c.decoder.shape == c.labels.shape]
    asked = sum(int((c.labels != -100).sum()) for c in calls)
    same = sum(int(((c.labels == c.decoder) & (c.labels != -100)).sum()) for c in calls)
    if asked < 32 or same < 0.95 * asked:
        return None
    return fires(
        f"{same} of {asked} supervised labels equal decoder_input_ids at their own position",
        "decoder_input_ids are the labels shifted right by one, with the start token in front",
        fault="wrong-loss/decoder-told",
    )


def _probabilities(e: Evidence, backwards: list[Backward], readings: list[Reading]) -> Fired | None:
    odd = [r.odd for r in readings]
    if not odd or not odd[0] or len(set(odd)) > 1:
        return None
    if odd[0] == "probabilities":
        return fires(
            "every row given to cross_entropy is positive and sums to 1",
            "logits",
            fault="wrong-loss/double-softmax",
        )
    return fires(
        "rows given to nll_loss hold positive numbers, which no logarithm of a probability is",
        "log-probabilities",
        fault="wrong-loss/no-softmax",
    )


def _divergence(e: Evidence, backwards: list[Backward], readings: list[Reading]) -> Fired | None:
    seen = [n for b in backwards for n in b.entropies if n.name == "kl_div" and n.connected]
    averaged = [n for n in seen if n.reduction == "mean" and (n.width or 0) >= 16]
    longer = [
        n
        for n in seen
        if n.reduction == "batchmean" and len(n.shape) == 3 and min(n.shape[1:]) >= 16
    ]
    longer = [
        n for n in longer if not any(abs(number * n.shape[1] - 1) < 0.01 for number in n.factors)
    ]
    if longer and len(longer) == len(seen):
        b, t, _ = longer[0].shape
        return fires(
            f"kl_div(reduction='batchmean') on {tuple(longer[0].shape)}: the divergence is "
            f"divided by {b}, not {b * t}",
            "a divergence per token: reduction='batchmean' on (tokens, classes)",
            fault="wrong-loss/summed-over-row",
            t=t,
        )
    if not averaged or 2 * len(averaged) < len(seen):  # some also log the right one
        return None
    width = averaged[0].width
    return fires(
        f"kl_div(reduction='mean') over {width} classes: the divergence is divided by {width}",
        "a divergence per token: reduction='batchmean' on (tokens, classes)",
        fault="wrong-loss/averaged-over-vocabulary",
    )


def _summed(e: Evidence, backwards: list[Backward], readings: list[Reading]) -> Fired | None:
    known = [r for r in readings if r.offset == 1 and r.ratio is not None and (r.tokens or 0) >= 32]
    if not known or len(known) < len(readings) or _divided_by_hand(e):
        return None
    if any(abs(r.ratio / r.tokens - 1) > 0.01 for r in known):
        return None
    first = next(b for b in backwards if b.reading is known[0])
    return fires(
        f"the loss {first.value:.4g} is {known[0].tokens} tokens times {known[0].mean:.4g} nats",
        f"a mean over tokens, {known[0].mean:.4g}",
        fault="wrong-loss/summed",
    )


def _divided_by_masked(
    e: Evidence, backwards: list[Backward], readings: list[Reading]
) -> Fired | None:
    """Return a sum over the supervised tokens that is divided by all positions.

    One backward a step: of several, each may be divided by the tokens of the whole step. The
    divisor must be the number of positions to a part in a thousand, in each of at least three
    steps.
    """
    if len(readings) < 3 or any(len(each) > 1 for each in e.by_round(Backward).values()):
        return None
    for r in readings:
        if r.reduction != "sum" or not r.ratio or not r.tokens or r.ids is None or r.tokens < 32:
            return None
        rows, length = r.ids.shape
        divisor = r.tokens / r.ratio
        counts = (rows * length, rows * (length - 1))
        if r.tokens > 0.9 * counts[1] or all(abs(divisor / count - 1) > 1e-3 for count in counts):
            return None
    first = readings[0]
    return fires(
        f"{first.tokens} tokens are supervised, and their summed loss is divided by "
        f"{first.tokens / first.ratio:.0f}",
        f"a sum over {first.tokens} tokens divided by {first.tokens}",
        fault="wrong-loss/divided-by-masked",
        share=first.ratio,
    )


def _summed_over_batch(
    e: Evidence, backwards: list[Backward], readings: list[Reading]
) -> Fired | None:
    """Return the same of classes without tokens, where the summed cross-entropy is the whole
    loss.
    """
    if any(r.offset is not None for r in readings) or _divided_by_hand(e):
        return None
    early = [b for b in backwards if any(n.fed is not None for n in b.entropies)]
    for b in early:
        used = [n for n in b.entropies if n.used]
        whole = (
            len(used) == 1
            and used[0].fed is not None
            and used[0].number is not None
            and b.value is not None
        )
        if not whole or used[0].name not in fed.CLASSES or used[0].reduction != "sum":
            return None
        if used[0].fed.shape[:1] < (16,) or abs(b.value - used[0].number) > 1e-4 * abs(b.value):
            return None
    if not early:
        return None
    rows = early[0].entropies[0].shape[0]
    return fires(
        f"the loss {early[0].value:.4g} is a sum over {rows} rows",
        f"a mean over them, {early[0].value / rows:.4g}",
        fault="wrong-loss/summed",
    )


def _divided_by_hand(e: Evidence) -> bool:
    """Gradients were made smaller between backward and step, other than by clipping."""
    for number, steps in e.by_round(Step).items():
        backwards = [b for b in e.of(Backward, round=number) if b.norm]
        if not backwards:
            continue
        clips = [c.total for c in e.of(Clip, round=number) if c.total is not None]
        scale = backwards[-1].scale or 1.0
        now = min(clips) if clips else steps[0].norm
        if now is not None and now < 0.67 * backwards[-1].norm / scale:
            return True
    return False


@check("F4")
def first_loss(e: Evidence) -> Fired | Verdict:
    """Return a model that knows nothing starts with a loss far from ln(vocabulary), or from
    ln(classes).

    Where from_scratch=True says that the model is untrained: much less means that it sees the
    answer, much more that its first weights are too large. Of any model it is asked whether its
    first mean cross-entropy is five times what guessing costs, and 3 nats more; of a regression
    whether its first answers reach 20 times as far as its targets, and layers have weights three
    times as wide as 1/sqrt(inputs), or more.

    WARN first-loss/too-low: The untrained model already knows the answer: it sees its targets, or
    it is not untrained. Fix: Check the shift of the labels and the causal mask.
    WARN first-loss/too-high: The first weights are too large, so the untrained model is sure of
    wrong answers. Fix: Initialise the output layer and embeddings smaller (0.02, or 1/sqrt(width)).
    WARN first-loss/far-beyond-targets: The first weights are far too large for the width of their
    layers (nn.init.normal_ has a spread of 1 unless it is given), so the first answers lie far
    beyond all targets. Fix: nn.init.kaiming_normal_, or torch's own first weights.
    WARN first-loss/worse-than-guessing: The model begins sure of wrong answers: its logits are far
    too large, so the first steps only undo that. Fix: Look at the size of the first weights, of the
    inputs, and of what the logits are multiplied by; torch's own first weights begin near
    ln(classes).
    WARN first-loss/wide-head: The weights of {name}, which make the logits, were drawn with a
    spread of about 1 (as {kind} does it), so the logits of {features} features have one of about
    sqrt({features}) = {size:.2g}, and the model begins sure of wrong answers. Fix:
    nn.init.normal_({name}.weight, std=0.02), or 1/sqrt(features).
    """
    if not e.declared.get("from_scratch"):
        return _worse_than_guessing(e)
    first = next(iter(e.of(Backward)), None)
    call = next((c for c in first.calls if c.vocabulary), None) if first is not None else None
    reading = first.reading if first is not None else None
    if call is None or reading is None or reading.mean is None:
        return unknown("no loss could be read")
    if 0.7 <= (ratio := reading.mean / math.log(call.vocabulary)) <= 1.5:
        return OK
    return fires(
        f"the first loss is {reading.mean:.3g} nats per token, {ratio:.2g} times "
        f"ln({call.vocabulary})",
        f"about {math.log(call.vocabulary):.3g}",
        fault="first-loss/too-low" if ratio < 1 else "first-loss/too-high",
    )


def _worse_than_guessing(e: Evidence) -> Fired | Verdict:
    first = next(iter(e.of(Backward)), None)
    if e.late or first is None or first.round:
        return unknown("the first backward was not seen")
    if e.habits["F4"]:
        return not_applicable("the logits are cosines times a scale, which begin far from guessing")
    losses = [
        n for n in first.entropies if n.used and n.fed is not None and (n.fed.classes or 0) > 1
    ]
    means = [n for n in losses if n.reduction == "mean" and n.name in ("cross_entropy", "nll_loss")]
    # of one that was called by a name of the user's own
    alone = first.value if len(losses) == 1 else None
    means = [(n.fed.classes, n.number if n.number is not None else alone) for n in means]
    means = [(classes, number) for classes, number in means if number is not None]
    binary = [
        n for n in first.entropies if n.used and n.name == fed.BINARY[1] and n.reduction == "mean"
    ]
    means += [(2, n.number) for n in binary if n.number is not None]
    if not means:
        return _far_beyond_targets(
            e, [n.fed for n in first.entropies if n.used and n.name in fed.PLAIN]
        )
    for classes, number in means:
        guess = math.log(classes)
        if math.isfinite(number) and number > max(5 * guess, guess + 3):
            if (wide := _wide_head(e, classes)) is not None:
                name, weight, kind = wide
                features, spread = weight.shape[1], float(weight.detach().float().std())
                return fires(
                    f"the first cross-entropy over {classes} classes is {number:.3g}, and "
                    f"{name} has a spread of "
                    f"{spread:.2g}",
                    f"about {guess:.3g}, which guessing costs",
                    fault="first-loss/wide-head",
                    name=name,
                    kind=kind,
                    features=features,
                    size=features**0.5,
                )
            return fires(
                f"the first cross-entropy over {classes} classes is {number:.3g}",
                f"about {guess:.3g}, which guessing costs",
                fault="first-loss/worse-than-guessing",
            )
    return OK


def _wide_head(e: Evidence, classes: int) -> tuple[str, Tensor, str] | None:
    """Return the one matrix that can make these logits, where its weights are as wide as
    nn.Embedding's first ones.

    Footgun: a table of as many words is right with such weights where it is no head. So it must be
    the only matrix with as many rows or columns as there are classes.
    """
    ends = {
        id(p): p
        for p in e.parameters().values()
        if p.dim() > 1 and classes in (p.shape[0], p.shape[-1])
    }
    if len(ends) != 1:
        return None
    weight = next(iter(ends.values()))
    spread = float(weight.detach().float().std())
    holders = [
        (n, m)
        for n, m in e.modules()
        if isinstance(m, nn.Embedding | nn.Linear) and weight_of(m) is weight
    ]
    wide = weight.dim() == 2 and weight.shape[0] == classes and DRAWN <= spread <= 1 / DRAWN
    if not holders or not wide or spread * weight.shape[1] ** 0.5 < WIDE:
        return None
    table = any(isinstance(m, nn.Embedding) for _, m in holders)
    return holders[0][0], weight, "nn.Embedding" if table else "nn.init.normal_"


def _far_beyond_targets(e: Evidence, given: list) -> Fired | Verdict:
    """Return the first answers of a regression, and the weights that made them."""
    given = [f for f in given if f is not None and f.target_low is not None and f.low is not None]
    if not given:
        return not_applicable(
            "no mean cross-entropy in the first step, and from_scratch=True was not declared"
        )
    first = given[0]
    reach = max(abs(first.low), abs(first.high))
    wanted = max(abs(first.target_low), abs(first.target_high))
    if not wanted or not max(FAR * wanted, LEAST) <= reach < math.inf:
        return OK
    layers = [(name, weight_of(m)) for name, m in e.modules() if isinstance(m, LAYERS)]
    layers = [(name, w) for name, w in layers if w is not None and w.requires_grad]
    spreads = [
        (name, float(w.detach().float().std()), w[0].numel())
        for name, w in layers
        if w.numel() > WEIGHTS
    ]
    wide = [(name, std, fan) for name, std, fan in spreads if std * fan**0.5 >= WIDE]
    if not wide:
        return OK
    name, std, fan = wide[0]
    return fires(
        f"the first answers reach {reach:.3g}, the targets {wanted:.3g}; weights of {name} "
        f"spread {std:.2g}",
        f"a spread near 1/sqrt({fan}) = {fan**-0.5:.2g}, as torch begins",
        fault="first-loss/far-beyond-targets",
    )


@check("N6")
def accumulation(e: Evidence) -> Fired | Verdict:
    """Return the same batch split into micro-batches gives another gradient: larger losses, or
    short answers count more.

    For rounds of several backwards on different batches, the loss of each is set against its
    cross-entropy per token, or, from three backwards on, against the mean that a loss of torch
    gave. Undivided means sum up to k times the gradient; means divided by k alike, though the
    numbers of tokens differ much, weigh tokens unequally. Losses that share a batch, gradients
    divided by hand before the step and losses divided by the whole batch's tokens are left alone.

    WARN accumulation-scale/undivided: Gradient accumulation without a division: the losses of {k}
    micro-batches are added up and not averaged, so the gradient is {k} times too large. Fix: Divide
    each loss by {k}, or divide summed losses by the number of tokens in the whole step.
    WARN accumulation-scale/other-divisor: Gradient accumulation divides by another number
    ({divisor}) than the micro-batches of a step ({k}). Fix: Divide by the number of backward calls
    between two optimizer steps; use one variable for both.
    WARN accumulation-scale/mean-of-means: A mean of means in gradient accumulation: each
    micro-batch counts the same however few tokens it has, so tokens in short ones weigh more. Fix:
    Sum the losses and divide by the number of supervised tokens in the whole step
    (num_items_in_batch).
    """
    if Backward in e.crowded:
        return unknown("a step has more backwards than are kept")
    several = [[b for b in bs if not b.inputs] for bs in e.by_round(Backward).values()]
    several = [bs for bs in several if len(bs) > 1 and e.of(Step, round=bs[0].round)]
    rounds = [bs for bs in several if _accumulates(bs)]
    if not rounds and len(added := [len(bs) for bs in several if _adds_means(bs)]) >= 2:
        # asks for one batch's loss at many weights
        searches = any("LBFGS" in o.kind.__name__ for o in e.optimizers)
        if len(e.models) == 1 and not searches and not _divided_by_hand(e):
            return fires(
                f"{added[0]} losses per step, each a whole mean over its own batch",
                f"losses divided by {added[0]}",
                fault="accumulation-scale/undivided",
                k=added[0],
            )
    if not rounds:
        return not_applicable("no step was made from several batches")
    readings = [[b.reading for b in bs] for bs in rounds]
    readings = [
        rs for rs in readings if not any(r is None or r.ratio is None or not r.tokens for r in rs)
    ]
    if not readings:
        return unknown("the loss of a micro-batch could not be read")
    if len(e.models) > 1:
        return not_applicable("several models are trained")
    k = max(len(rs) for rs in readings)
    totals = [sum(r.ratio for r in rs) for rs in readings]
    whole = all(abs(r.ratio - 1) < 0.01 for rs in readings for r in rs)
    if whole and not _divided_by_hand(e):
        return fires(
            f"{k} losses per step, each a whole mean, summing to {totals[0]:.3g} times the "
            "loss per token",
            f"losses that sum to the loss per token (each divided by {k}, or by the step's tokens)",
            fault="accumulation-scale/undivided",
            k=k,
        )
    shares = [r.ratio for rs in readings for r in rs]
    divisor = round(1 / shares[0]) if 0 < shares[0] < 0.75 else 1
    same = (
        all(abs(share * divisor - 1) < 0.01 for share in shares)
        and len({len(rs) for rs in readings}) == 1
    )
    if divisor > 1 and same and divisor != k and not _divided_by_hand(e):
        return fires(
            f"each loss is divided by {divisor}, and {k} of them make a step: "
            f"{k / divisor:.3g} times the mean",
            f"each loss divided by {k}",
            fault="accumulation-scale/other-divisor",
            divisor=divisor,
            k=k,
        )
    uneven = [max(r.tokens for r in rs) / min(r.tokens for r in rs) for rs in readings]
    equal = all(
        max(r.ratio for r in rs) - min(r.ratio for r in rs) < 0.01 * max(r.ratio for r in rs)
        for rs in readings
    )
    if equal and not whole and sorted(uneven)[len(uneven) // 2] >= 2.5:
        return fires(
            f"micro-batches of one step hold from 1 to {max(uneven):.3g} parts of the tokens "
            "and count alike",
            "each micro-batch counts by its tokens",
            fault="accumulation-scale/mean-of-means",
        )
    return OK


def _accumulates(backwards: list[Backward]) -> bool:
    """Each backward has a forward of its own, on a batch of its own."""
    ids = []
    for b in backwards:
        calls = [c for c in b.calls if c.role == "model" and c.grad and c.ids is not None]
        if not calls:
            return False
        ids.append(calls[0].ids)
    return not any(
        a.shape == b.shape and bool((a == b).all()) for i, a in enumerate(ids) for b in ids[:i]
    )


def _adds_means(backwards: list[Backward]) -> bool:
    """Each backward has a forward and a batch of its own, and is of nothing but the mean that one
    loss gave. Two are left alone: real and fake, or two tasks. So are several tasks on one batch.
    """
    used = [[n for n in b.entropies if n.used] for b in backwards]
    if len(backwards) < 3 or any(
        len(ns) != 1 or ns[0].reduction != "mean" or not ns[0].number for ns in used
    ):
        return False
    calls = [[c for c in b.calls if c.role == "model" and c.grad] for b in backwards]
    marks = [cs[0].mark for cs in calls if cs and cs[0].mark is not None]
    if any(a.shape == b.shape and torch.equal(a, b) for a, b in itertools.combinations(marks, 2)):
        return False
    whole = all(
        abs(b.value - ns[0].number) <= 1e-4 * abs(ns[0].number)
        for b, ns in zip(backwards, used)
        if b.value
    )
    kinds = {(ns[0].name, ns[0].shape[1:]) for ns in used}
    return (
        set(map(len, calls)) == {1}
        and whole
        and len(kinds) == 1
        and len({b.value for b in backwards}) == len(backwards)
    )


@check("N17")
def hidden_nan(e: Evidence) -> Fired | Verdict:
    """Return the log reads 0.0, or nan, and the model answers nonsense.

    Fires when a loss given to backward was not finite. The Trainer of transformers prints 0.0 for
    it. Under a gradient scaler an infinite loss now and then is part of the search for a scale; a
    NaN is not. A bad batch whose step was left out, so that the weights are sound, gives a warning.
    Also when three losses or more were asked whether they are finite, were not, and no backward was
    made of them.

    ERROR or WARN loss-not-finite: The loss is NaN or infinite from step {step} on: {why}. Weights
    updated with it are lost; the Trainer of transformers prints 0.0 for such a loss. Fix: Stop, go
    back to the last good weights, and look at that step; logging_nan_inf_filter=False shows it.
    WARN loss-not-finite/passed-over: Losses are NaN or infinite again and again, and their batches
    are passed over: they teach nothing, and no log shows it. Fix: Look at the first such batch: a
    logarithm of 0 (torch.xlogy(p, p) for p * p.log()), a division by 0, a mean over nothing.
    """
    backwards = [b for b in e.of(Backward) if b.value is not None]
    if not backwards:
        return unknown("no scalar loss was seen")
    bad = [b for b in backwards if not math.isfinite(b.value)]
    passed = len(e.habits["N17 skipped"])
    if passed >= PASSED and not bad:
        what = (
            f"{passed} losses were not finite, beside {len(e.shown)} steps that were made meanwhile"
        )
        return fires(what, "finite losses", WARN, "loss-not-finite/passed-over")
    if not bad or (all(math.isinf(b.value) and b.scale for b in bad) and len(bad) <= 2):
        return OK
    return fires(
        f"the loss is {bad[0].value} at step {bad[0].round + 1}, and in {len(bad)} of "
        f"{len(backwards)} backwards",
        "a finite loss",
        ERROR if spoilt(e) or 2 * len(bad) > len(backwards) else WARN,
        step=bad[0].round + 1,
        why=_why(e, bad[0]),
    )


def _why(e: Evidence, event: Backward) -> str:
    reading = event.reading
    calls: list[Call] = [c for c in event.calls if c.role == "model" and c.finite is not None]
    if reading is not None and reading.tokens == 0:
        return "it is a mean over no tokens at all"
    if event.source:
        return event.source
    updates = [u.relative for s in e.of(Step) if s.round < event.round for u in s.updates]
    spoilt_by = [g.round for g in e.of(Gradients) if g.round < event.round and _broken(g)]
    rooted = next((g for g in e.of(Gradients) if g.root and g.round < event.round), None)
    if rooted is not None:
        return (
            f"in the backward pass of step {rooted.round + 1} {rooted.root}; add a small "
            "number under it (1e-8)"
        )
    if spoilt_by and not any(b.scale for b in e.of(Backward)):
        return (
            f"step {spoilt_by[0] + 1} used gradients with NaN or infinity though its loss was "
            "finite: they were made "
            "in the backward pass (a square root or norm at 0, a logarithm of 0, 0 times infinity)"
        )
    if event.round and any(not u < 0.3 for u in updates):
        return "the updates before it were so large that the weights blew up"
    if calls and all(c.finite for c in calls):
        return (
            "the logits are finite, so it was made in the loss (the logarithm of 0, or a "
            "division by 0)"
        )
    return "the model's output was not finite"


def _broken(event: Gradients) -> bool:
    return any(norm is not None and not math.isfinite(norm) for norm in event.norms.values())


@check("F5")
def not_finite(e: Evidence) -> Fired | Verdict:
    """Return the loss is NaN from the first step, or from one special batch on.

    Fires when a loss was not finite and the logits it came from were not either, while the weights
    were. The batch is run again, and the first module whose output is not finite though its input
    was is named, with the range of what went into it; so it is where a model gives no logits.
    Logits that are minus infinity on purpose (a vocabulary filled up, a mask) give a finite loss
    and are left alone.

    ERROR or WARN output-not-finite: The model's own output is NaN or infinite: something in this
    module divides by 0 or takes the logarithm or root of what is not positive. Fix: Add a small
    number inside the division, logarithm or root.
    ERROR or WARN output-not-finite/overflow: The model's own output is NaN or infinite: an
    overflow: float16 (fp16) ends at 65504 and an activation went over it. Fix: Use bfloat16, or
    keep this module in float32.
    ERROR or WARN output-not-finite/masked-row: The model's own output is NaN or infinite: rows of
    the attention mask are masked from end to end (padding at the left), and a softmax over nothing
    is NaN. Fix: Let padding attend to itself, use a large negative number in place of -inf, or pad
    at the right.
    """
    wrong = [b for b in e.of(Backward) if b.value is not None and not math.isfinite(b.value)]
    if not e.forwards:
        return unknown("no forward of the model was seen")
    if not wrong:
        return OK
    calls = [c for c in wrong[0].calls if c.role == "model" and c.finite is False]
    name, kind, fact, inputs = e.probes.get("broken") or ("", "", "", "")
    if not calls and kind:
        calls = [c for c in wrong[0].calls if c.role == "model"]
    if fact == "weights":
        return not_applicable("the weights themselves are not finite")
    if not calls:
        seen = any(c.finite for c in wrong[0].calls) or "broken" in e.probes
        return OK if seen else unknown("no logits were seen, and the batch could not be run again")
    if not kind and wrong[0].round > 0:
        return unknown("the batch could not be run again")
    where = (
        f"the first is the output of {name or kind} ({kind}, {fact.split(' ')[0]})"
        if kind
        else "in the logits"
    )
    where += f", into which went {inputs}" if inputs else ""
    return fires(
        f"non-finite values in the forward of step {wrong[0].round + 1}; {where}",
        "finite activations",
        ERROR if spoilt(e) or len(wrong) > 1 or len(e.of(Backward)) == 1 else WARN,
        _cause(calls[0], kind, fact),
    )


def _cause(call: Call, kind: str, fact: str) -> str:
    if (
        fact.startswith("float16")
        or call.autocast is not None
        and str(call.autocast) == "torch.float16"
    ):
        return "output-not-finite/overflow"
    left = call.mask is not None and bool((call.mask[:, 0] == 0).any())
    return "output-not-finite/masked-row" if left or "ttention" in kind else "output-not-finite"


@check("F40")
def divergence_summed(e: Evidence) -> Fired | Verdict:
    """Return a VAE gives the same blurred answer to all data, and its divergence falls to zero at
    once.

    Knows the divergence from a standard normal by its graph. Fires when it is a sum over all rows
    with its usual factor of one half, and another term of the loss is a mean over the same rows.
    Fires as well when each row's divergence is a sum, and the reconstruction a mean over 64 numbers
    of a row or more, or when the divergence is a mean over all of its numbers and another term a
    sum over all of its own. Or when a divergence of a thousand weights or more is added as it is to
    a mean over rows. A weight in front of it, and sums (or means) in both terms, are left alone.

    WARN divergence-summed: The divergence (KL) is summed over the {rows} rows of the batch and the
    other term is a mean over them, so it weighs {rows} times too much, and the posterior collapses.
    Fix: Sum it over its dimensions and take the mean over the rows: kl.sum(1).mean().
    WARN divergence-summed/over-numbers: The reconstruction is a mean over the {numbers} numbers of
    a row and the divergence (KL) is their sum in each row, so it weighs {numbers} times too much,
    and the posterior collapses. Fix: Sum the reconstruction over a row's numbers too
    (reduction="sum", divided by the rows), or give the divergence a weight.
    WARN divergence-summed/averaged: The reconstruction is a sum over the batch and the divergence
    (KL) a mean over all its {numbers} numbers, so it costs that many times too little, and samples
    from the prior are nothing like the data. Fix: Sum both: -0.5 * torch.sum(1 + logvar - mu.pow(2)
    - logvar.exp()).
    WARN divergence-summed/weights: The divergence (KL) of {numbers} weights is added as it is to a
    mean over rows, so it weighs as much as the whole data, and the weights stay at their prior.
    Fix: loss = nll.mean() + kl / len(train_data).
    """
    if len(seen := e.habits["F40"]) >= HABIT:
        what, numbers = next(iter(seen.values()))
        told = {
            "averaged": f"a divergence was a mean over its {numbers} numbers, beside a sum",
            "weights": f"a divergence of {numbers} weights was added as it is, beside a mean",
        }[what]
        wanted = {
            "averaged": "both a sum over the rows",
            "weights": "divided by the rows of all data",
        }[what]
        return fires(
            f"in {len(seen)} steps {told}",
            wanted,
            fault=f"divergence-summed/{what}",
            numbers=numbers,
        )
    if (verdict := no_habit(e, e.summed)) is not None:
        if no_habit(e, e.over_numbers) is not None:
            return verdict
        numbers = next(iter(e.over_numbers.values()))
        return fires(
            f"in {len(e.over_numbers)} steps a divergence was summed in each row, beside a "
            f"mean over {numbers} numbers",
            "both terms a sum in each row",
            fault="divergence-summed/over-numbers",
            numbers=numbers,
        )
    shape = next(iter(e.summed.values()))
    return fires(
        f"in {len(e.summed)} steps a divergence of {shape} was summed over all rows, beside a "
        "mean over them",
        "both terms a mean over the rows",
        rows=shape[0],
    )


# ----------------------------------------------------------------------------------- what is fed in
def odd_input(e: Evidence) -> Fired | None:
    """Return a loss that is given something else than it asks for."""
    n = raised(e, "all elements of input should be between 0 and 1")
    if (
        n is not None
        and n.fed is not None
        and n.fed.low is not None
        and math.isfinite(n.fed.low + n.fed.high)
    ):
        return fires(
            f"numbers from {n.fed.low:.3g} to {n.fed.high:.3g} given to {n.name}",
            "probabilities, from 0 to 1",
            fault="wrong-loss/logits-into-bce",
        )
    for (name, _), losses in judged(e).items():
        found = [_odd(name, n.fed) for n in losses if name != fed.COUNTS or n.log_input] or [None]
        if None not in found:
            return found[0]
    return None


def _odd(name: str, f: Fed) -> Fired | None:
    if name in fed.CLASSES and f.mixed:
        return fires(
            f"{f.mixed} was reshaped to {f.shape}, so a row has neighbouring numbers of one class",
            f"a row with one number of each of the {f.classes} classes",
            fault="wrong-loss/mixed",
        )
    if name == "cross_entropy":
        return _into_cross_entropy(f)
    if name in ("nll_loss", *fed.LOGGED):
        return _into_logarithms(name, f)
    if name in fed.BINARY:
        return _into_binary(name, f)
    if name == fed.COUNTS and f.makers[:1] and f.makers[0] in ("Exp", "Softplus"):
        return fires(
            f"the output of {f.makers[0].lower()} is given to {name}, which takes its exponential",
            "the logarithm of a rate",
            fault="wrong-loss/exponential-twice",
        )
    return _over_the_batch(name, f) if name in fed.PLAIN else None


def _sum_to_one(f: Fed) -> bool:
    return (
        f.sums is not None
        and f.rows > 3
        and (f.classes or 0) > 1
        and f.low >= 0
        and f.sums < f.tolerance
    )


def _told_of(f: Fed, what: str = "every row") -> str:
    numbers = f"{what} is positive and sums to 1" if _sum_to_one(f) else ""
    made = (
        f"they come straight from a {f.makers[0].lower()}"
        if f.makers[:1] in (["Softmax"], ["Sigmoid"])
        else ""
    )
    return "; ".join(text for text in (numbers, made) if text)


def _into_cross_entropy(f: Fed) -> Fired | None:
    if f.makers[:2] == ["LogSoftmax", "Softmax"]:
        return fires(
            "the log_softmax is taken of a softmax",
            "one softmax",
            fault="wrong-loss/double-softmax",
        )
    if f.makers[:1] == ["Softmax"] or _sum_to_one(f):
        return fires(
            f"rows given to cross_entropy: {_told_of(f)}",
            "logits",
            fault="wrong-loss/double-softmax",
        )
    if f.makers[:1] and f.makers[0] in SQUASHED and (f.classes or 0) > 1:
        return fires(
            f"numbers from {f.low:.3g} to {f.high:.3g}, straight from {SQUASHED[f.makers[0]]}, "
            "given to cross_entropy",
            "logits, which may be any number",
            fault="wrong-loss/squashed-logits",
            by=SQUASHED[f.makers[0]],
        )
    return None


def _into_logarithms(name: str, f: Fed) -> Fired | None:
    if f.makers[:2] == ["LogSoftmax", "Softmax"]:
        return fires(
            "the log_softmax is taken of a softmax",
            "one softmax",
            fault="wrong-loss/double-softmax",
        )
    if f.makers[:1] == ["Softmax"] or (_sum_to_one(f) and not f.logged):
        return fires(
            f"rows given to {name}: {_told_of(f)}",
            "log-probabilities, which are negative",
            fault="wrong-loss/no-logarithm",
            name=name,
        )
    if name == "ctc_loss" and not f.logged and f.over_classes is not None and f.over_classes > 0.05:
        return fires(
            "the exponentials of rows given to ctc_loss do not sum to 1 (logarithm of a sum: "
            f"{f.over_classes:.3g})",
            "log-probabilities",
            fault=MISSING[name],
        )
    if f.high is not None and math.isfinite(f.high) and f.high > 1e-3 and not f.logged:
        return fires(
            f"rows given to {name} hold positive numbers (up to {f.high:.3g}), which no "
            "logarithm of a probability is",
            "log-probabilities",
            fault=MISSING[name],
        )
    if f.softmax_over == 0 and len(f.shape) == 2:
        return fires(
            f"{name} is given a log_softmax with dim=0 of a matrix whose rows it judges",
            f"log_softmax over the {f.classes} classes, dim=1",
            fault="wrong-loss/over-the-batch",
        )
    if f.over_rows is not None and f.over_rows < 1e-3 and f.over_classes > 0.05:
        return fires(
            f"the probabilities given to {name} sum to 1 over the batch, not over the "
            f"{f.classes} classes",
            "log_softmax over the classes",
            fault="wrong-loss/over-the-batch",
        )
    return None


def _over_the_batch(name: str, f: Fed) -> Fired | None:
    if f.softmax_over != 0:
        return None
    return fires(
        f"{name} is given a softmax with dim=0 of a matrix whose rows it judges",
        "a softmax over the classes, dim=1",
        fault="wrong-loss/over-the-batch",
    )


def _into_binary(name: str, f: Fed) -> Fired | None:
    if f.makers[:1] == ["Softmax"] and (found := _over_the_batch(name, f)):
        return found
    twice = f.makers[:2] == ["Sigmoid", "Sigmoid"]
    if twice or (name.endswith("logits") and f.makers[:1] in (["Sigmoid"], ["Softmax"])):
        what = "a sigmoid of a sigmoid" if twice else f"the output of a {f.makers[0].lower()}"
        return fires(
            f"{what} is given to {name}"
            + (f", from {f.low:.3g} to {f.high:.3g}" if f.low is not None else ""),
            "probabilities" if not name.endswith("logits") else "logits, which may be any number",
            fault="wrong-loss/double-sigmoid",
        )
    if name.endswith("logits") and f.makers[:1] in (["Relu"], ["Tanh"]):
        return fires(
            f"numbers straight from {SQUASHED[f.makers[0]]} are given to {name}",
            "logits, which may be any number",
            fault="wrong-loss/squashed-logits",
            by=SQUASHED[f.makers[0]],
        )
    cut = f.low is not None and (f.low == 0.0 or f.high == 1.0)
    if (
        not name.endswith("logits")
        and cut
        and f.makers[:1] == ["Clamp"]
        and f.makers[1:2] in (["Addmm"], ["Add"])
    ):
        return fires(
            f"logits cut to 0 and 1 (clamp) are given to {name}",
            "a sigmoid",
            fault="wrong-loss/logits-into-bce",
        )
    return None


def divided_twice(e: Evidence) -> Fired | None:
    """Return a mean over the batch that is divided by the batch once more.

    As many micro-batches as rows are no sign of it.
    """
    rounds = e.by_round(Backward).values()
    seen = [
        found
        for among in rounds
        for b in among
        if (found := _rows_and_whether_twice(b, len(among)))
    ]
    if len(seen) < 3 or not all(wrong for _, wrong in seen):
        return None
    return fires(
        f"the loss is a mean over the batch, divided by its {seen[0][0]} rows again",
        "a mean, divided once",
        fault="wrong-loss/divided-twice",
    )


def _rows_and_whether_twice(b: Backward, micro_batches: int) -> tuple[int, bool] | None:
    """Return the rows of the one mean that this backward's loss was made of, and whether the loss
    is that mean over them.
    """
    losses = [n for n in b.entropies if n.fed is not None and n.used and n.number]
    if len(losses) != 1 or not b.value or losses[0].reduction != "mean" or not losses[0].fed.shape:
        return None
    rows = losses[0].fed.shape[0]
    return rows, rows >= 8 and rows != micro_batches and abs(
        b.value * rows / losses[0].number - 1
    ) < 1e-3
