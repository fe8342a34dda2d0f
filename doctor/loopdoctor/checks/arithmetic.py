"""What the program's own arithmetic shows, function by function, in three early steps: N28, F23 to F27, F29 to
F32, F34 and D11.

These are faults in plain lines between the calls of models and losses. What is seen is collected by the parts of the
eye (eye.py); here it is asked whether it is a habit. A fault must show in two steps.

Footgun: each of these lines is right in some other program. They are warnings, and each page says what is left alone.
"""

import linecache
from collections.abc import Sized
from pathlib import Path

from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import Evidence
from loopdoctor.finding import OK, WARN, Verdict, not_applicable, unknown
from loopdoctor.watchers.dropped import GRADIENT

STEPS = 2
BLIND = unknown("no step was seen function by function: fewer than three steps, or something is compiled")


def no_habit(e: Evidence, seen: Sized) -> Verdict | None:
    """What is said where a fault was not seen in several steps."""
    return BLIND if len(e.shown) < STEPS else OK if len(seen) < STEPS else None


@check("N28")
def update_dropped(e: Evidence) -> Fired | Verdict:
    """Weight clipping, an average of weights or gradient clipping that was written down has no effect.

    Fires when arithmetic on weights or gradients, between a backward and the next forward, gave a tensor of the same
    shape that was never used by anything and is gone, at the same place in two steps. Norms and other numbers for a log
    are left alone, and so are copies and differences of weights.

    WARN update-dropped: The result of `{name}` on {what} is thrown away, and {what} stay as they are: the function
    gives a new tensor, and the name that it was given is only the loop's. Fix: Write into the tensor, under
    torch.no_grad(): {fix}.
    WARN update-dropped/adapted: Adapted weights (a weight minus a derivative) are computed and nothing is computed with
    them: the loss uses the weights as they were. Fix: torch.func.functional_call(model, adapted, (x,)).
    """
    if len(e.shown) < STEPS:
        return BLIND
    for (file, line, _, name), seen in e.dropped.items():
        if len({round for round, _ in seen}) < STEPS:
            continue
        kinds = frozenset().union(*(of for _, of in seen))
        what = "gradients" if kinds == {GRADIENT} else "weights"
        text = linecache.getline(file, line).strip()
        how = {"gradients": "p.grad.mul_(...), p.grad.clamp_(...)", "weights": "p.mul_(...).add_(...), p.clamp_(...)"}
        return fires(
            f"{len(seen)} results of {Path(file).name}:{line}"
            + (f" `{text[:60]}`" if text else "")
            + " were never used",
            "results that are used",
            name=name,
            what=what,
            fix=how[what] + ", or p.copy_(result)",
        )
    if len(seen := e.habits["N28"]) >= STEPS:
        return fires(
            f"in {len(seen)} steps {next(iter(seen.values()))} weights minus a derivative were never used",
            "results that are used",
            fault="update-dropped/adapted",
        )
    return OK


@check("F25")
def slope_without_graph(e: Evidence) -> Fired | Verdict:
    """A network that should solve a differential equation, or a gradient penalty, does not do what its loss asks for.

    Fires when the result of torch.autograd.grad with respect to an input, without create_graph, was part of the loss
    that was differentiated. Derivatives that only make another input, weigh a term, were detached, or are of something
    that hangs on no weight are left alone. Also when such a derivative was of the mean over rows that a network answers
    each by itself, or of all columns of an answer at once, and then met these columns one by one. Slopes of a mean that
    are summed over the rows, and those that meet the sum of the columns, are left alone.

    WARN slope-without-graph: A derivative with respect to the input is part of the loss and was computed without a
    graph, so the optimizer takes it for a constant. Fix: torch.autograd.grad(..., create_graph=True).
    WARN slope-without-graph/of-mean: The derivative is that of a mean over {rows} rows, so what is taken for the slope
    of each row is {rows} times too small. Fix: torch.autograd.grad(net(x).sum(), x, create_graph=True).
    WARN slope-without-graph/of-several: The derivative of {rows} columns at once is the sum of their derivatives, and
    it is used as that of each. Fix: One call of torch.autograd.grad for each column, of y[:, k].sum().
    """
    for_each = e.habits["F25"]
    if len(e.slopes) < STEPS <= len(for_each):
        what, rows = next(iter(for_each.values()))
        of = f"the mean over {rows} rows" if what == "of-mean" else f"all {rows} columns of an answer"
        fault = f"slope-without-graph/{what}"
        return fires(f"in {len(for_each)} steps the loss held the slope of {of}", "one's own", fault=fault, rows=rows)
    if (verdict := no_habit(e, e.slopes)) is not None:
        return verdict
    return fires(
        f"in {len(e.slopes)} steps the loss was computed from a derivative that has no graph",
        "create_graph=True for what the loss is computed from",
    )


@check("F30")
def axes_regrouped(e: Evidence) -> Fired | Verdict:
    """The loss falls some way and stays there; the same network on data in the right layout goes much further.

    Fires when a line of the program calls reshape or view on a tensor and what comes out has the same sizes in another
    order, like (32, 20, 40) of (32, 40, 20). That regroups the numbers along the memory. Sizes of 1 do not count, and
    equal sizes can't be seen. Reshapes to other sizes are left alone, but for a picture that is cut into as many pieces
    as it has squares of their size, and for rows that were two axes and are taken apart in the other order.

    WARN axes-regrouped: {name} makes {after} of {before}, which moves no axis: it cuts the same row of numbers in other
    places, so each of the new rows holds pieces of several old ones. Fix: transpose or permute, which move axes;
    F.pixel_shuffle for a larger picture.
    WARN axes-regrouped/patches: {name} makes {after} of {before}, which cuts each picture into pieces of its lines, and
    not into square patches. Fix: nn.Conv2d(C, D, p, stride=p), or x.reshape(B, C, H // p, p, W // p, p).permute(0, 2,
    4, 1, 3, 5).reshape(B, -1, C * p * p).
    WARN axes-regrouped/unfolded: The rows were {one} times {two}, and {name} takes them apart as {two} times {one}, so
    each of the new rows holds pieces of several old ones. Fix: features.view(B, T, -1), in the order in which
    flatten(0, 1) has put them, then transpose(0, 1).
    """
    if len(unfolded := e.habits["F30 unfolded"]) >= STEPS:
        name, one, two = next(iter(unfolded.values()))
        what = f"in {len(unfolded)} steps rows of {one} times {two} were taken apart as {two} times {one}"
        return fires(what, "one order", fault="axes-regrouped/unfolded", name=name, one=one, two=two)
    if (verdict := no_habit(e, seen := e.habits["F30"])) is not None:
        return verdict
    name, before, after, patches = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps {name} made a tensor of {before} into one of {after}",
        "transpose or permute where axes change places",
        fault="axes-regrouped" + ("/patches" if patches else ""),
        name=name,
        before=str(before),
        after=str(after),
    )


@check("F34")
def mask_inverted(e: Evidence) -> Fired | Verdict:
    """The model answers all texts of one length alike, and learns little more than the shares of the classes.

    Lays masks that become minus infinity on attention scores over the ids that went in. Fires when all ids that a mask
    shows are one and the same, the padding, and all others are hidden. Masks that show text are left alone, but where
    the first token of all rows is hidden and a table is asked for the padding in place of the types of the tokens.

    ERROR mask-inverted: The attention mask is inverted: it hides the text and shows the padding. Fix: For torch's
    key_padding_mask True means hidden: pass ids == pad_id. For scores by hand: masked_fill(~keep, -inf).
    ERROR mask-inverted/past: The mask hides each place from itself and from all before it, and shows what comes later:
    in nn.MultiheadAttention and nn.Transformer True hides. Fix: torch.ones(T, T).triu(1).bool(), or
    nn.Transformer.generate_square_subsequent_mask(length).
    WARN mask-inverted/ones: An attention of torch is given a mask of the numbers 0 and 1, which it adds to the scores:
    it hides nothing. Fix: A mask of bools (in nn.MultiheadAttention and nn.Transformer True hides, in
    scaled_dot_product_attention it shows), or 0 and float("-inf").
    WARN mask-inverted/first-tokens: The attention mask hides the first token of each row, which is no padding:
    something else was given in its place (the types of the tokens, without a name). Fix: Give it by its name,
    model(input_ids=ids, attention_mask=mask, token_type_ids=types).
    """
    calls = [c for c in e.forwards if c.ids is not None and c.mask is not None and c.mask.shape == c.ids.shape]
    if len(calls) >= STEPS and (pad := e.token("pad")) is not None:
        if all(bool(((c.mask[:, 0] == 0) & (c.ids[:, 0] != pad)).all()) for c in calls):
            what = f"in {len(calls)} calls the mask was 0 at the first token of all rows, which is not the padding"
            return fires(what, "1 there", WARN, "mask-inverted/first-tokens")
    if len(e.shown) < STEPS:
        return BLIND
    if len(past := e.habits["F34 past"]) >= STEPS:
        what = f"in {len(past)} steps a mask {next(iter(past.values()))} hid the past and showed the future"
        return fires(what, "a mask that hides the future", fault="mask-inverted/past")
    if len(ones := e.habits["F34 ones"]) >= STEPS:
        what = f"in {len(ones)} steps {next(iter(ones.values()))} was given a mask of 0 and 1 in floating point"
        return fires(what, "bools, or 0 and minus infinity", WARN, "mask-inverted/ones")
    if len(exchanged := e.habits["F34 exchanged"]) >= STEPS:
        what = f"in {len(exchanged)} steps attention hid the first token of all rows, and a table was given the padding"
        return fires(what, "the padding as the mask", WARN, "mask-inverted/first-tokens")
    if not e.hiding:
        return not_applicable("no attention mask with a place for each token was seen")
    if not all(e.hiding.values()) or len(e.hiding) < STEPS:
        return OK
    return fires(f"in {len(e.hiding)} steps the mask showed padding alone, and hid all else", "a mask that hides it")


@check("F40")
def divergence_summed(e: Evidence) -> Fired | Verdict:
    """A VAE gives the same blurred answer to all data, and its divergence falls to zero at once.

    Knows the divergence from a standard normal by its graph. Fires when it is a sum over all rows with its usual factor
    of one half, and another term of the loss is a mean over the same rows. Fires as well when each row's divergence is
    a sum, and the reconstruction a mean over 64 numbers of a row or more, or when the divergence is a mean over all of
    its numbers and another term a sum over all of its own. Or when a divergence of a thousand weights or more is added
    as it is to a mean over rows. A weight in front of it, and sums (or means) in both terms, are left alone.

    WARN divergence-summed: The divergence (KL) is summed over the {rows} rows of the batch and the other term is a mean
    over them, so it weighs {rows} times too much, and the posterior collapses. Fix: Sum it over its dimensions and take
    the mean over the rows: kl.sum(1).mean().
    WARN divergence-summed/over-numbers: The reconstruction is a mean over the {numbers} numbers of a row and the
    divergence (KL) is their sum in each row, so it weighs {numbers} times too much, and the posterior collapses. Fix:
    Sum the reconstruction over a row's numbers too (reduction="sum", divided by the rows), or give the divergence a
    weight.
    WARN divergence-summed/averaged: The reconstruction is a sum over the batch and the divergence (KL) a mean over all
    its {numbers} numbers, so it costs that many times too little, and samples from the prior are nothing like the data.
    Fix: Sum both: -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()).
    WARN divergence-summed/weights: The divergence (KL) of {numbers} weights is added as it is to a mean over rows, so
    it weighs as much as the whole data, and the weights stay at their prior. Fix: loss = nll.mean() + kl /
    len(train_data).
    """
    if len(seen := e.habits["F40"]) >= STEPS:
        what, numbers = next(iter(seen.values()))
        told = {
            "averaged": f"a divergence was a mean over its {numbers} numbers, beside a sum",
            "weights": f"a divergence of {numbers} weights was added as it is, beside a mean",
        }[what]
        wanted = {"averaged": "both a sum over the rows", "weights": "divided by the rows of all data"}[what]
        return fires(f"in {len(seen)} steps {told}", wanted, fault=f"divergence-summed/{what}", numbers=numbers)
    if (verdict := no_habit(e, e.summed)) is not None:
        if no_habit(e, e.over_numbers) is not None:
            return verdict
        numbers = next(iter(e.over_numbers.values()))
        return fires(
            f"in {len(e.over_numbers)} steps a divergence was summed in each row, beside a mean over {numbers} numbers",
            "both terms a sum in each row",
            fault="divergence-summed/over-numbers",
            numbers=numbers,
        )
    shape = next(iter(e.summed.values()))
    return fires(
        f"in {len(e.summed)} steps a divergence of {shape} was summed over all rows, beside a mean over them",
        "both terms a mean over the rows",
        rows=shape[0],
    )


@check("S24")
def dropout_unaware(e: Evidence) -> Fired | Verdict:
    """The finished model gives another answer each time, though model.eval() was called.

    Reads the line that calls a dropout of torch.nn.functional. Fires when it does not say whether the model trains and
    nothing in the function around it asks for that. nn.Dropout knows it by itself. The dropout of an attention is asked
    about as well; and it is seen when a model in eval mode is called during the first steps.

    WARN dropout-unaware: A functional dropout is called without training=self.training, and its default is True: it
    drops numbers after model.eval() as well. Fix: F.dropout(x, p, training=self.training), or nn.Dropout in
    __init__.
    WARN dropout-unaware/attention: scaled_dot_product_attention is given a dropout_p in eval mode as well, and it drops
    whatever it is given, so answers and validations are random. Fix: dropout_p=self.dropout if self.training else 0.0.
    """
    if len(e.shown) < STEPS:
        return BLIND
    if seen := e.habits["S24 attention"]:
        return fires(f"in {next(iter(seen.values()))}", "dropout_p=0 in eval mode", fault="dropout-unaware/attention")
    if not e.unaware:
        return OK
    return fires(f"in {next(iter(e.unaware.values()))}", "training=self.training")


@check("S25")
def state_after_padding(e: Evidence) -> Fired | Verdict:
    """A recurrent model is good with rows of full length and poor with short ones.

    Looks at what recurrent networks are given and what is taken of their answers. Fires when rows end in one and the
    same vector, in runs of several lengths, and the last state or output[:, -1] is used. Packed sequences, and states
    that are taken at the rows' own lengths, are left alone.

    A mean over all places of such rows is looked for as well, where no mask has multiplied them, and h[:, -1] of them.

    WARN state-after-padding: Rows are filled up at their ends, and the state that is used comes after the filling: it
    has gone through as many steps of padding as the row was short. Fix: pack_padded_sequence(x, lengths, ...,
    enforce_sorted=False), or output[torch.arange(len(x)), lengths - 1].
    WARN state-after-padding/last: Rows are filled up at their ends, and what is read is the last place, which is
    padding in most rows. Fix: h[torch.arange(len(h)), mask.sum(1) - 1].
    WARN state-after-padding/mean: Rows are filled up at their ends, and the mean over places takes the filling along,
    so a short row is mostly that. Fix: (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).
    """
    lasts = e.habits["S25 last"]
    if len(e.endings) < STEPS <= len(lasts):
        padded, rows = next(iter(lasts.values()))
        what = f"in {len(lasts)} steps {padded} of {rows} rows ended in padding, and the last place was read"
        return fires(what, "the last place of each row's own", fault="state-after-padding/last")
    pooled = e.habits["S25"]
    if len(e.endings) < STEPS <= len(pooled):
        padded, rows = next(iter(pooled.values()))
        return fires(
            f"in {len(pooled)} steps {padded} of {rows} rows ended in padding, and the mean was over all places",
            "a mean over each row's own places",
            fault="state-after-padding/mean",
        )
    if (verdict := no_habit(e, e.endings)) is not None:
        return verdict
    padded, rows = next(iter(e.endings.values()))
    return fires(
        f"in {len(e.endings)} steps {padded} of {rows} rows ended in padding, and the last state was used",
        "the state at each row's own end",
    )


@check("D13")
def data_overwritten(e: Evidence) -> Fired | Verdict:
    """The first epoch goes well, and then the model gets worse from epoch to epoch, on the training data too.

    Watches DataLoaders that fetch in this process. Fires when numbers were written into a tensor that the data set
    keeps, or arithmetic was done on it in place, and an item of the same batch lies in that tensor. Copies, and data
    sets that keep what they have read, are left alone; workers are not seen. Without a DataLoader, it fires when
    numbers that were drawn in this step are written into a slice of a tensor that stays, and then the model is given
    that slice; buffers that are filled anew, chains of a sampler, and what is read once from one end to the other (it
    may be a copy for one epoch) are left alone.

    WARN data-overwritten: The augmentation of {name} writes into the data that are stored, for an item is a view of
    them: what one epoch has masked or shifted stays so in the next. Fix: x = self.data[index].clone() before anything
    in place.
    WARN data-overwritten/slices: Noise or a mask is written into the data themselves: the batch {shape} is a slice of
    them, and no copy, so what one step has changed stays so, and the next visit adds to it. Fix: x * a + noise * b in
    place of x.mul_(a).add_(noise * b), or data[i:j].clone().
    """
    if len(slices := e.habits["D13 slices"]) >= STEPS and e.habits["D13 elsewhere"]:
        shape = next(iter(slices.values()))
        what = f"in {len(slices)} steps drawn numbers were written into a slice {shape} of a tensor that stays"
        return fires(what, "a copy of the slice", fault="data-overwritten/slices", shape=shape)
    if (verdict := no_habit(e, e.stored)) is not None:
        return verdict
    name = next(iter(e.stored.values()))
    return fires(
        f"in {len(e.stored)} steps items of a {name} were changed in place where they are stored",
        "items that are copies",
        name=name,
    )
