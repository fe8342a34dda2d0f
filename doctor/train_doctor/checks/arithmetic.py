"""What the program's own arithmetic shows, function by function, in three early steps: N28, F23 to F27, F29 to
F32, F34 and D11.

These are faults in plain lines between the calls of models and losses. What is seen is collected by the parts of the
eye (eye.py); here it is asked whether it is a habit. A fault must show in two steps.

Footgun: each of these lines is right in some other program. They are warnings, and each page says what is left alone.
"""

import linecache
from collections.abc import Sized
from pathlib import Path

from train_doctor.check import Fired, check, fires
from train_doctor.evidence import Evidence
from train_doctor.finding import OK, WARN, Verdict, not_applicable, unknown
from train_doctor.watchers.dropped import GRADIENT

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


@check("N51")
def adaptation_cut(e: Evidence) -> Fired | Verdict:
    """A meta-learner (MAML) hardly learns, though its inner steps do what they should.

    Fires when a loss reaches weights only through a derivative with respect to them, which was taken off a copy of
    their numbers (p.data, p.detach()). A loss that also reaches something else which another optimizer holds, or none,
    is left alone: then that is what learns.

    WARN adaptation-cut: The adapted weights are made of the weights' numbers without their graph, so the loss reaches
    the weights through the second derivatives alone, and the straight way is cut. Fix: fast = p - rate * g, with the
    weight p itself and not p.data or p.detach().
    """
    seen = {step: many for step, many in e.habits["N51"].items() if step not in e.habits["N51 straight"]}
    if (verdict := no_habit(e, seen)) is not None:
        return verdict
    what = f"in {len(seen)} steps the loss reached {next(iter(seen.values()))} weights through their derivatives alone"
    return fires(what, "the weights themselves in the adapted ones")


@check("F23")
def another_draw(e: Evidence) -> Fired | Verdict:
    """A diffusion model's loss stays at the variance of the noise, which is 1.

    Fires when a regression asks for a normal draw, scaled perhaps, that nothing in the answer was computed from, and
    the answer was computed from something to which another draw of the same size was added. A random target for data
    without noise is left alone.

    WARN another-draw: The model is asked for noise that is not in its input: the noise was drawn twice, once for the
    input and once for the target. Fix: Draw it once and use that tensor for both (q_sample(x0, t, noise)).
    """
    if len(e.shown) < STEPS:
        return BLIND
    wrong, right = e.noise.get(False, set()), e.noise.get(True, set())
    if not wrong and not right:
        return not_applicable("no regression asks for a normal draw")
    if len(wrong) < STEPS or right:
        return OK
    return fires(
        f"in {len(wrong)} steps the target is a draw that the answer carries nothing of; it carries another one",
        "a target that is in the input",
    )


@check("F24")
def scored_another(e: Evidence) -> Fired | Verdict:
    """A policy gradient learns nothing: the reward stays at chance, and the gradient is noise.

    Fires when, in a step, one sample of a distribution that learns was only ever given to log_prob, and another one of
    the same size was used and never scored, or that log_prob was multiplied by weights. Each alone is left alone: an
    estimate of the entropy, an evaluation.

    WARN scored-another: The action whose log-probability is taken is not the one that was taken: it was drawn a second
    time. Fix: action = dist.sample() once, and log_prob(action) of that.
    """
    if (verdict := no_habit(e, e.misscored)) is not None:
        return verdict
    kind = next(iter(e.misscored.values()))
    return fires(
        f"in {len(e.misscored)} steps a sample of {kind} was scored and used for nothing else",
        "one sample for both",
    )


@check("F29")
def factor_learns(e: Evidence) -> Fired | Verdict:
    """The critic or the baseline drifts to huge values, or the policy and the critic work against each other.

    Fires when, in each step, the log-probability of a sample of a distribution that learns was multiplied, number by
    number, by something that has a gradient and is not made of log-probabilities itself; or the ratio of PPO, which is
    known by its cut around 1.

    WARN factor-learns: What the log-probability is multiplied by has a gradient, so the policy's loss also pushes what
    made it (the critic) to be large where an action was likely. Fix: log_prob * advantage.detach(), and a loss of its
    own for the critic.
    """
    if len(e.shown) < STEPS:
        return BLIND
    if len(ratios := e.habits["F29"]) >= STEPS:
        what = f"in {len(ratios)} steps a ratio that was cut was multiplied by a tensor that requires a gradient"
        return fires(what, "a factor without a gradient")
    wrong = e.factors.get(True, set())
    if len(wrong) < STEPS or e.factors.get(False):
        return OK
    return fires(
        f"in {len(wrong)} steps the log-probability of a sample was multiplied by a tensor that requires a gradient",
        "a factor without a gradient",
    )


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


@check("D11")
def rows_apart(e: Evidence) -> Fired | Verdict:
    """The model learns nothing, or only the mean, although data and targets are right before they are batched.

    Follows the order of rows: which permutation, selection or slice each tensor of a batch went through since it was
    last known. Fires when the answer and its target, in a loss of torch or a product or difference by hand, differ by
    one permutation of all rows, or were selected by two different ones. Or when three tensors or more, of one length,
    were each picked from with a draw of their own, and what was picked met. Or when pieces of sorted rows are put
    together and meet rows that were never sorted. Where rows of several orders are mixed
    (mixup), or the answer also meets a target in its own order, nothing is said.

    WARN rows-apart: Data and targets do not belong together: {why}. Fix: Index both with the same permutation (x[perm],
    y[perm]), also where rows are sorted by length or time.
    WARN rows-apart/fields: {fields} tensors of {rows} rows each are picked from with an index of their own, so states,
    actions and rewards are of different rows. Fix: One index for all: at = torch.randint(n, (rows,)); S[at], A[at].
    WARN rows-apart/sorted: Rows {shape} were sorted, given to several parts in pieces and put together, and meet rows
    that were not sorted: each token gets what was computed for another. Fix: out = out[order.argsort()], or write each
    piece to its places: out[order] = torch.cat(pieces).
    WARN rows-apart/texts: The targets of most of the {rows} texts are the next words of another text of the batch: one
    side was shuffled and the other was not. Fix: Index both with the same permutation (x[perm], y[perm]).
    """
    if len(texts := e.habits["D11 texts"]) >= STEPS:
        rows = next(iter(texts.values()))
        what = f"in {len(texts)} steps the targets went on with the texts of other rows"
        return fires(what, "the next words of the same text", fault="rows-apart/texts", rows=rows)
    if len(seen := e.habits["D11 sorted"]) >= STEPS:
        what = f"in {len(seen)} steps pieces of sorted rows met rows in the order of the data"
        return fires(what, "rows in one order", fault="rows-apart/sorted", shape=next(iter(seen.values()))[0])
    if len(fields := e.habits["D11 fields"]) >= STEPS:
        count, rows = next(iter(fields.values()))
        what = f"in {len(fields)} steps {count} tensors were picked from with {count} draws"
        return fires(what, "one draw", fault="rows-apart/fields", fields=count, rows=rows)
    if (verdict := no_habit(e, e.apart)) is not None:
        return verdict
    name, why = next(iter(e.apart.values()))
    return fires(f"in {len(e.apart)} steps {name} was given rows in two orders", "rows in one order", why=why)


@check("F26")
def flags_turned(e: Evidence) -> Fired | Verdict:
    """Targets are far too large, or a mask lets everything through, and values grow without end.

    Fires when `~` was used on a tensor of whole numbers that holds only 0 and 1, and the result went into arithmetic
    with floats or was made a bool. Turning bits before `&` and indexing from the end are left alone.

    WARN flags-turned: ~ on {dtype} turns bits: 0 and 1 become {gives}, and not 1 and 0. Fix: 1 - flag, or flag.bool()
    before ~.
    """
    if (verdict := no_habit(e, e.turned)) is not None:
        return verdict
    dtype = next(iter(e.turned.values()))
    return fires(
        f"in {len(e.turned)} steps ~ was used on zeros and ones of {dtype}, and the result as a number or a bool",
        "a bool",
        dtype=dtype,
        gives="255 and 254" if dtype.startswith("uint") else "-1 and -2",
    )


@check("F27")
def one_view_twice(e: Evidence) -> Fired | Verdict:
    """A contrastive loss falls to its end at once, and what was learned separates nothing.

    Fires when both sides of a similarity or distance (or the halves of a batch put together for one) have a gradient,
    are equal to the last bit, and were made by the same functions of the same weights; or when two batches of data that
    are put together are equal. Dropout makes two answers of one input, which is left alone.

    WARN one-view-twice: Both sides of the comparison are the same: the network was given one view twice. Fix: Augment
    twice (two calls of the transform), and give the network both.
    """
    if len(e.same_data) >= STEPS:
        shape = next(iter(e.same_data.values()))
        many = len(e.same_data)
        return fires(f"in {many} steps two equal batches {shape} were put together", "two views that differ")
    if (verdict := no_habit(e, e.same_views)) is not None:
        return verdict
    name, shape = next(iter(e.same_views.values()))
    return fires(
        f"in {len(e.same_views)} steps {name} was given two equal tensors of {shape}, from two calls of one network",
        "two views that differ",
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


@check("F31")
def sum_overwritten(e: Evidence) -> Fired | Verdict:
    """Sums over neighbours, segments or words are too small, and the model learns less than it could.

    Fires when `total[index] += values` was run with indices of which some stand there more than once. Indices without
    repetition are left alone, and so is a plain `total[index] = values`.

    WARN sum-overwritten: {repeated} of {count} values of a sum were lost: total[index] += values keeps one value for
    each place, however often the index names it. Fix: total.index_add_(0, index, values), or scatter_add_.
    """
    if (verdict := no_habit(e, e.overwritten)) is not None:
        return verdict
    count, repeated = next(iter(e.overwritten.values()))
    return fires(
        f"in {len(e.overwritten)} steps a sum was written to {count} places, {repeated} of them named before",
        "indices that name each place once, or index_add_",
        count=count,
        repeated=repeated,
    )


@check("F32")
def slope_flat(e: Evidence) -> Fired | Verdict:
    """The part of a loss that asks for a derivative does not fall, whatever the rate.

    Fires when torch.autograd.grad with create_graph gave a derivative with respect to an input that is exactly zero in
    every place. A network of ReLU is made of straight pieces, so its second derivative is zero. Derivatives that are
    zero in some places are left alone.

    WARN slope-flat: A derivative with respect to the input is zero in every place, so a loss that asks for it can't
    change it: the network is made of straight pieces (ReLU). Fix: Use a smooth activation (tanh, SiLU, sine).
    """
    if (verdict := no_habit(e, e.flat)) is not None:
        return verdict
    return fires(f"in {len(e.flat)} steps a derivative was zero in every place", "one that depends on the weights")


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


@check("F35")
def ratio_of_itself(e: Evidence) -> Fired | Verdict:
    """A policy does not improve, the ratio is 1 and the share of clipped ratios is 0, at every step.

    Fires when the exponential was taken of a difference that is zero in every place, whose two sides both have a graph:
    the same functions of the same weights. A side without a graph (logp.detach(), numbers of the rollout) is right.

    WARN ratio-of-itself: The ratio of new and old probabilities is the policy's with itself: the old log-probabilities
    were computed again with the weights of now and their graph, so the ratio is always 1 and its gradient exactly 0.
    Fix: Keep the log-probabilities of the rollout, computed under torch.no_grad() when the actions were drawn.
    WARN ratio-of-itself/no-exponential: What is cut to {low:g} .. {high:g} is a difference of logarithms, about 0, and
    no ratio: the exponential is missing, so the cut is always at work and its gradient 0. Fix: ratio = torch.exp(logp -
    old).
    """
    if len(e.unraised) >= STEPS:
        low, high = next(iter(e.unraised.values()))
        return fires(
            f"in {len(e.unraised)} steps a difference near 0 was cut to {low:g} .. {high:g}",
            "a ratio, which is about 1",
            fault="ratio-of-itself/no-exponential",
            low=low,
            high=high,
        )
    if (verdict := no_habit(e, e.ratios)) is not None:
        return verdict
    shape = next(iter(e.ratios.values()))
    return fires(
        f"in {len(e.ratios)} steps exp(a - b) of {shape} had two equal sides, both with a graph to the same weights",
        "an old side without a graph",
    )


@check("F36")
def classes_blended(e: Evidence) -> Fired | Verdict:
    """A segmentation is wrong along all edges, with classes that are not there, or an id is out of range.

    Follows whole numbers as floats into a function that interpolates, and back to whole numbers. Fires when they are
    the classes of a cross-entropy, of which there are more than two. Masks of 0 and 1, pictures, and mode="nearest" are
    left alone.

    WARN classes-blended: The masks of classes were resized with mode="{mode}", which mixes ids like colours: between
    class 1 and class 5 it writes class 3. Fix: mode="nearest" (or "nearest-exact") for masks; only pictures are
    smoothed.
    """
    if (verdict := no_habit(e, e.blended)) is not None:
        return verdict
    mode = next(iter(e.blended.values()))
    return fires(
        f'in {len(e.blended)} steps the targets of a cross-entropy were interpolated with mode="{mode}"',
        "classes that were there before",
        mode=mode,
    )


@check("F37")
def cosines_shrunk(e: Evidence) -> Fired | Verdict:
    """A contrastive loss stays near the logarithm of the number of rows.

    Follows the product of vectors of length one through factors that are plain numbers. Fires when what a cross-entropy
    is given can't leave -0.5 to 0.5, or is cosines as they are, of 64 rows or more. A factor that learns is left alone,
    and so is attention.

    WARN cosines-shrunk: The logits are cosines multiplied by {factor:.3g}, so they lie between -{factor:.3g} and
    {factor:.3g} and the softmax stays flat whatever is learned: the temperature multiplies where it should divide.
    Fix: similarity / temperature.
    WARN cosines-shrunk/as-they-are: The logits are cosines, from -1 to 1, so the softmax over many rows stays nearly
    flat whatever is learned: there is no temperature. Fix: similarity / 0.07, or a factor that learns.
    """
    if (verdict := no_habit(e, e.cosines)) is not None:
        return verdict
    factor = next(iter(e.cosines.values()))
    return fires(
        f"in {len(e.cosines)} steps a cross-entropy was given cosines times {factor:.3g}",
        "cosines divided by a temperature below 1",
        fault="cosines-shrunk" + ("/as-they-are" if factor == 1 else ""),
        factor=factor,
    )


@check("F38")
def choice_cuts(e: Evidence) -> Fired | Verdict:
    """A VQ-VAE rebuilds blurred pictures and uses few of its codes.

    Follows the nearest row of a table from a distance with a graph, over argmin, to the row that is looked up. Fires
    when that row enters a layer as it is, or detached. z + (q - z).detach() is left alone, and so are a table of
    another model and a function of the program's own.

    WARN choice-cuts-the-graph: The codes that were chosen by argmin enter {layer} as they are, so nothing behind them
    reaches the encoder that they were chosen for: the straight-through step is missing. Fix: q = z + (q - z).detach(),
    after the loss that pulls both together.
    """
    if (verdict := no_habit(e, e.chosen)) is not None:
        return verdict
    layer = next(iter(e.chosen.values()))
    return fires(
        f"in {len(e.chosen)} steps {layer} was given the nearest rows of a table, without the graph of what is near",
        "z + (q - z).detach()",
        layer=layer,
    )


@check("F39")
def largest_not_taken(e: Evidence) -> Fired | Verdict:
    """Q-learning runs and its loss falls, and the policy is no better than chance.

    Fires when in a regression the side that learns is a maximum over actions, and the target holds a maximum over as
    many values without a graph, added to something that has a number for each row. Or the target holds the maximum of
    all rows together, added to something that has a number for each row; or one of the values of the very states that
    learn, and of no other (with double Q-learning: a value that was picked, and scaled by a discount).

    WARN largest-not-taken: What learns is the value of the best action and not of the action that was taken, so rewards
    are credited to another action. Fix: q = net(states).gather(1, actions.unsqueeze(1)).squeeze(1).
    WARN largest-not-taken/of-all: The target holds the largest value of all rows and actions together, {shape}, and not
    that of each row's next state. Fix: target_net(next_states).max(dim=1).values.
    WARN largest-not-taken/own-state: The target looks ahead from the state that the action was taken in, and not from
    the one that it led to: it is given the wrong one, or both were stored as one tensor that the environment writes
    into. Fix: target = reward + gamma * target_net(next_states).max(1).values; buffer.push(state.copy(), ...), or
    clone().
    """
    if (verdict := no_habit(e, seen := e.habits["F39"])) is not None:
        return verdict
    fault, shape = next(iter(seen.values()))
    what = {
        "": f"both sides of a loss were maxima over the columns of {shape}",
        "of-all": f"one number of all {shape} values was part of each row's target",
        "own-state": f"the values {shape} in the target were of the states whose values learn",
    }[fault]
    wanted = {"": "gather", "of-all": "the largest of each row", "own-state": "values of the next states"}[fault]
    fault = "largest-not-taken" + (f"/{fault}" if fault else "")
    return fires(f"in {len(seen)} steps {what}", wanted, fault=fault, shape=shape)


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


@check("F44")
def divergence_negated(e: Evidence) -> Fired | Verdict:
    """The loss of a VAE falls below zero and on without end, and its samples are noise.

    Knows the divergence from a standard normal by its graph, and follows its sign to the loss.

    ERROR divergence-negated: The divergence (KL) is taken away from the loss: 1 + logvar - mean^2 - exp(logvar) is
    minus twice what it costs, so training drives the posterior as far off as it can. Fix: Multiply it by -0.5.
    """
    if (verdict := no_habit(e, e.negated)) is not None:
        return verdict
    shape = next(iter(e.negated.values()))
    return fires(f"in {len(e.negated)} steps a larger variance in {shape} made the loss smaller", "a larger loss")


@check("F43")
def spread_of_noise(e: Evidence) -> Fired | Verdict:
    """The samples of a VAE are far more spread than its data, or all of its latents are off to one side.

    Knows the logarithm of a variance from the divergence, where it stands once as it is and once in an exponential.
    Fires when noise is multiplied by the exponential of just that tensor or by the tensor itself, or is not normal.

    WARN variance-as-spread: The noise of the latent is multiplied by exp(logvar), the variance, in place of its root.
    Fix: torch.exp(0.5 * logvar).
    WARN variance-as-spread/logarithm: The noise of the latent is multiplied by the logarithm of the variance itself, so
    the decoder is given other draws than those that the divergence is of. Fix: torch.exp(0.5 * logvar).
    WARN variance-as-spread/uniform: The noise of the latent comes from torch.rand, from 0 to 1, and the divergence is
    that of a normal one. Fix: torch.randn_like(mean).
    """
    if (verdict := no_habit(e, e.spreads)) is not None:
        return verdict
    by = next(iter(e.spreads.values()))
    what = {"uniform": "noise from 0 to 1 was used", "logarithm": "noise was multiplied by a logarithm"}
    return fires(
        f"in {len(e.spreads)} steps {what.get(by, 'noise was multiplied by a variance')}",
        "a standard normal number times the root of the variance",
        fault="" if by == "variance" else f"variance-as-spread/{by}",
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


@check("F47")
def outputs_dropped(e: Evidence) -> Fired | Verdict:
    """The training loss stays far above the evaluation's, and a regression answers too small or too noisily.

    Fires when a loss is given what a dropout gave, with nothing but views between.

    WARN outputs-dropped: The answers themselves go through a dropout of {share:g}: that share of them is 0 in each
    step, whatever was learned. Fix: Put the dropout before the last layer.
    """
    if (verdict := no_habit(e, e.wet)) is not None:
        return verdict
    name, share = next(iter(e.wet.values()))
    return fires(
        f"in {len(e.wet)} steps {name} was given what a dropout of {share:g} gave",
        "the last layer's numbers",
        share=share,
    )


@check("F48")
def attention_over_askers(e: Evidence) -> Fired | Verdict:
    """Attention learns little, all places answer alike, and nothing is raised.

    Follows the product of two tensors that learn through scaling and masks into a softmax, and from there into the
    product with the values. Fires when that product sums over another axis than the softmax did. Along the edges of a
    graph: when exponentials of scores are divided by their sum over one end of the edges, and rows of that end,
    weighted with them, are added up at the other.

    WARN attention-over-askers: The weights of attention, {shape}, sum to 1 over axis {axis}, and the values are summed
    over axis {other}: the softmax is over the places that ask. Fix: softmax(dim=-1) of scores (..., asking, asked).
    WARN attention-over-askers/edges: The weights of attention along {edges} edges sum to 1 over the edges that leave a
    node, and the messages are added up over those that reach it. Fix: Sum exp(scores) at the index at which the
    messages are added up: total.index_add(0, dst, e)[dst].
    WARN attention-sharpened: The scores are multiplied by the root of the width where they should be divided by it, so
    the softmax picks a single place from the start and its gradient is nearly 0. Fix: scores / math.sqrt(width).
    """
    sharp = {turn: what for turn, what in e.unmasked.items() if what == "sharpened"}
    if len(sharp) >= STEPS:
        return fires(
            f"in {len(sharp)} steps scores were multiplied by the root of their width",
            "scores divided by it",
            fault="attention-sharpened",
        )
    if no_habit(e, along := e.habits["F48"]) is None:
        edges = next(iter(along.values()))
        what = f"in {len(along)} steps weights of {edges} edges were normalised at one end and summed at the other"
        return fires(what, "one and the same end", fault="attention-over-askers/edges", edges=edges)
    if (verdict := no_habit(e, e.attending)) is not None:
        return verdict
    shape, axis, other = next(iter(e.attending.values()))
    return fires(
        f"in {len(e.attending)} steps weights {shape} had their softmax over axis {axis} and their sum over {other}",
        "one and the same axis",
        shape=shape,
        axis=axis,
        other=other,
    )


@check("F49")
def overlap_of_logits(e: Evidence) -> Fired | Verdict:
    """The Dice or IoU loss of a segmentation turns negative or jumps, and the masks are everything or nothing.

    Fires when answers of both signs were multiplied by a mask of zeros and ones, summed, and divided by something that
    learns.

    WARN overlap-of-logits: An overlap is computed from numbers between {low:.3g} and {high:.3g}, so the loss has no
    lower end: the sigmoid is missing. Fix: probabilities = torch.sigmoid(logits) (softmax for several classes) before
    the overlap.
    """
    seen = {turn: told for turn, told in e.overlaps.items() if told[0] == "overlap"}
    if (verdict := no_habit(e, seen)) is not None:
        return verdict
    _, low, high = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps answers from {low:.3g} to {high:.3g} went into an overlap with a mask",
        "probabilities",
        low=low,
        high=high,
    )


@check("S27")
def nothing_between_layers(e: Evidence) -> Fired | Verdict:
    """A deep network learns no more than a linear model, and more layers change nothing.

    Follows what linear layers and convolutions give into the next one, in three steps. Fires when there are two such
    pairs, or one in a network that does not bend elsewhere. Narrow waists, residual paths, and what is used twice are
    left alone.

    WARN nothing-between-layers: There is no activation between layers ({sizes}), and the product of two matrices is
    one matrix: together they can do no more than a single layer. Fix: Put a ReLU or another activation between them.
    """
    if (verdict := no_habit(e, e.unbent)) is not None:
        return verdict
    pairs = next(iter(e.unbent.values()))
    sizes = ", ".join(" to ".join(map(str, pair)) for pair in pairs[:3])
    return fires(
        f"nothing between layers in {len(pairs)} places: {sizes}", "an activation after each layer", sizes=sizes
    )


@check("F53")
def mask_without_effect(e: Evidence) -> Fired | Verdict:
    """A model with padding or with a causal mask behaves as if it had none.

    Follows the product of two tensors that learn into a softmax and on to the values. Fires when scores were filled
    with a number that hides nothing, or zeros and ones were added to them or multiplied with them before the softmax,
    or multiplied with the weights after it. Scores of -10 and below hide.

    WARN mask-without-effect/filled: What should be hidden is given a score near 0, which is a score like any other.
    Fix: masked_fill(mask, float("-inf")), or -1e9.
    WARN mask-without-effect/multiplied: Scores are multiplied by a mask of zeros and ones before the softmax, and a
    score of 0 hides nothing. Fix: scores.masked_fill(mask == 0, float("-inf")).
    WARN mask-without-effect/added: A mask of zeros and ones is added to the scores, so what is hidden has a score
    that is 1 smaller. Fix: Add 0 and float("-inf"), or use masked_fill with a mask of bools.
    WARN mask-without-effect/after: The weights are multiplied by a mask after the softmax: what is hidden has taken
    its share, and the weights that are left do not sum to 1. Fix: masked_fill(mask == 0, float("-inf")) before the
    softmax.
    """
    seen = {turn: what for turn, what in e.unmasked.items() if what != "sharpened"}
    if (verdict := no_habit(e, seen)) is not None:
        return verdict
    what = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps a mask was {'multiplied with the weights' if what == 'after' else what}",
        "scores of minus infinity where something is hidden",
        fault=f"mask-without-effect/{what}",
    )


@check("S28")
def state_of_strangers(e: Evidence) -> Fired | Verdict:
    """A recurrent model is worse in use than in training, and rows are answered differently after other rows.

    Fires when a recurrent network begins with the state that the batch before left behind, and the batch is as large as
    those of a loader that shuffles. Pieces of one long text, in their order, are left alone.

    WARN state-of-strangers: The state {shape} of the last batch is passed on, and the rows of the next one are others:
    the loader shuffles. Fix: Begin each batch with no state, or give the rows in their order (shuffle=False).
    """
    if (verdict := no_habit(e, e.carried)) is not None:
        return verdict
    shape = next(iter(e.carried.values()))
    return fires(f"in {len(e.carried)} steps the state {shape} came from the batch before", "a new state", shape=shape)


@check("S29")
def statistics_of_few(e: Evidence) -> Fired | Verdict:
    """A model with batch normalisation learns little in training, and is as good as random in evaluation.

    Fires when a batch normalisation in training was given at most four numbers for each feature, in two steps.

    WARN statistics-of-few: A batch normalisation of {shape} has {numbers} numbers for each feature: their mean and
    spread are noise. Fix: Larger batches, or a normalisation that does not look at the batch (GroupNorm, LayerNorm).
    WARN statistics-of-few/one: {name} of {shape} normalises each number by itself, which leaves 0 of it and no
    gradient. Fix: Fewer groups, or the dimension of the features.
    """
    if len(ones := e.habits["S29 one"]) >= STEPS:
        name, shape = next(iter(ones.values()))
        what = f"in {len(ones)} steps {name} of {shape} had one number for each mean"
        return fires(what, "several", fault="statistics-of-few/one", name=name, shape=shape)
    if (verdict := no_habit(e, e.few)) is not None:
        return verdict
    shape, numbers = next(iter(e.few.values()))
    return fires(
        f"in {len(e.few)} steps {shape} was normalised, {numbers} numbers for each feature",
        "dozens of numbers for each feature",
        shape=shape,
        numbers=numbers,
    )
