"""What is wired wrongly though every part is sound: B8, S21, N26, N27, D9, F22, D10.

Footgun: each of these is legal, and somewhere somebody means it. So they ask for a measured effect, and most of them
warn only.
"""

import math
from statistics import median

from torch import nn

from train_doctor import graphs, histograms, places
from train_doctor.check import Fired, check, fires
from train_doctor.checks.arithmetic import no_habit
from train_doctor.checks.losses import judged
from train_doctor.evidence import Backward, Evidence, Step
from train_doctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

STEPS = 3
DECAY = 0.1  # a weight decay from which on the gradient is compared with it
OF_ROWS, ROWS, SELDOM, PULLED = 5e-3, 32, 0.2, 5e-3  # weight_decay; rows; of these not asked for; taken in a step
DIVIDES, DIVIDED = ("Adam", "NAdam", "RAdam", "Adamax"), 0.2  # by the size of the gradient; its share, from which on
TINY = 0.02  # largest number of data that were scaled twice
RAW = 30.0  # root mean square of data that are as they were measured
TAKEN = 0.01  # of a weight in a step, by a decay that is not part of the gradient
LARGE = 6  # inputs of which most are above 2^LARGE


@check("B8")
def nothing_for_the_optimizer(e: Evidence) -> Fired | Verdict:
    """Losses are differentiated and the optimizer steps, and the weights stay exactly as they were.

    Fires when an optimizer made steps, and no tensor of it had a gradient at any of them. An error where there is no
    other that had some.

    ERROR or WARN no-gradient-at-the-steps: No tensor in the optimizer got a gradient: the losses were computed with
    other tensors (a deep copy, an adapted copy, weights that were replaced), and their gradients stay there. Fix:
    Compute the loss with the tensors that the optimizer holds, or carry the gradients over (p.grad = copy.grad) before
    the step.
    WARN no-gradient-at-the-steps/held-twice: {kind} holds the very tensors of another optimizer and steps after a loss
    that does not reach them; what that loss does reach is in no optimizer (copy and paste). Fix: Give each optimizer
    the parameters of its own network, here critic.parameters().
    """
    steps, backwards = e.of(Step), [b for b in e.of(Backward) if b.requires_grad and not b.raised]
    if len(steps) < STEPS or len({b.round for b in backwards}) < STEPS:
        return unknown("fewer than three steps with a backward were seen")
    for number, optimizer in enumerate(e.optimizers):
        mine = [s for s in steps if s.optimizer == number]
        if len(mine) < 2 or not optimizer.ids or optimizer.live or any(s.own is not None for s in mine):
            continue
        twice = any(optimizer.ids <= other.ids for n, other in enumerate(e.optimizers) if n != number)
        return fires(
            f"none of the {len(optimizer.ids)} tensors of {optimizer.kind.__name__} had a gradient in its {len(mine)} "
            f"steps, and {len(backwards)} losses were differentiated",
            "gradients on the tensors that an optimizer holds",
            ERROR if len(mine) == len(steps) else WARN,
            "no-gradient-at-the-steps/held-twice" if twice else "",
            kind=optimizer.kind.__name__,
        )
    return OK


@check("S21")
def batch_as_time(e: Evidence) -> Fired | Verdict:
    """The answer to one row depends on the other rows of its batch, and the order within a row counts for nothing.

    Fires when an attention or recurrent module without batch_first was given (rows, length, features): its first size
    is that of the loss, its second one is not in the loss. Or when it was given what a table has for ids that were
    stacked from rows of words, or picked by an index. Tables with attention along both axes are left alone.

    WARN batch-as-time: {name} takes (time, batch, features) unless batch_first=True, and is given (batch, time,
    features): it runs along the batch and mixes its rows. Fix: Build it with batch_first=True, or transpose(0, 1)
    before and after it.
    WARN batch-as-time/columns: {name} takes (batch, time, features) with batch_first=True, and is given (time, batch,
    features): it runs from text to text. Fix: Build it without batch_first, or transpose the ids.
    """
    if len(seen := e.habits["S21 columns"]) >= STEPS:
        name, shape = next(iter(seen.values()))
        what = f"{name} with batch_first=True was given ids {shape}, whose next tokens stand in the next row"
        return fires(what, "(batch, time)", name=f"nn.{name.upper()}", fault="batch-as-time/columns")
    if e.habits["both axes"]:
        return OK  # attention between the columns of a table, and between its rows
    if len(seen := e.habits["S21"]) >= STEPS:
        name, shape = next(iter(seen.values()))
        return fires(f"{name} is given {shape}, of ids (rows, length)", "(time, batch, features)", name=name)
    if not e.sequences:
        return not_applicable("no attention or recurrent module without batch_first was called")
    shapes = [n.fed.shape for calls in judged(e).values() for n in calls]
    if not shapes:
        return unknown("no loss of torch was seen, whose rows would tell")
    for name, given in e.sequences.items():
        wrong = [s for s in given if all(_along(s, loss) for loss in shapes)]
        if wrong and len(wrong) == len(given):
            return fires(
                f"{name} is given {wrong[0]}, and the loss has {shapes[0]}", "(time, batch, features)", name=name
            )
    return OK


@check("S23")
def place_in_batch(e: Evidence) -> Fired | Verdict:
    """A model gets worse where batches are of another size or order, and single rows are answered otherwise.

    Makes one call again before the first step, in eval mode, with the rows in another order. Fires when a row is
    answered otherwise at another place, although it does not see the other rows. Models with state for each row are
    left alone, and so are those whose rows see each other.

    WARN place-in-batch: The answer to a row hangs on its place in the batch: positions (or something else that has one
    value for each place) are added along the batch and not along the sequence. Fix: Index positions by the dimension
    of time: pe[: x.size(1)] for (batch, time, features).
    """
    moved = e.probes.get("moved")
    if moved is None:
        no_call = "no call of a model could be made again with its rows in another order"
        return unknown(e.opaque) if e.opaque else not_applicable(no_call)
    if moved.turned < places.SEEN or moved.stayed > places.STILL:
        return OK
    return fires(
        f"at other places the answers to the same rows move by up to {moved.turned:.2g} of their spread", "0 of it"
    )


@check("S53")
def rows_see_each_other(e: Evidence) -> Fired | Verdict:
    """A model is good in training and worse in use: its answer to a row is another one when it is asked for alone.

    Makes one call again before the first step, in eval mode, with the first half of its rows. Fires when their answers
    are not what they were among all rows, and the loss has as many rows as what the model is given. Normalisations by a
    batch, spreads and scales of everything are left alone, and so are nodes of graphs, times of a series, recurrent
    modules, and tables with attention along both axes.

    WARN rows-see-each-other: The answer to a row hangs on the other rows of its batch: a mean, a softmax, an attention
    or a normalisation runs along dim 0, where the rows are. Fix: Look for dim=0, for a mean without a dim, and for an
    attention without batch_first; a row must be answered alone as it is among others.
    """
    moved = e.probes.get("moved")
    if moved is None or moved.alone is None:
        no_call = "no call of a model could be made again with half of its rows"
        return unknown(e.opaque) if e.opaque else not_applicable(no_call)
    if moved.alone < places.SEEN or e.habits["both axes"]:
        return OK
    shapes = [n.fed.shape for calls in judged(e).values() for n in calls if n.fed.shape]
    if not shapes or not all(_one_each(given, loss) for given in moved.given for loss in shapes):
        return unknown("which dimension holds the rows can't be told from the shape of the loss")
    what = f"the answers to half of the rows move by up to {moved.alone:.2g} of their spread without the other half"
    return fires(what, "0 of it")


def _one_each(given: tuple[int, ...], loss: tuple[int, ...]) -> bool:
    """Whether the first size is that of the rows of the loss, and no other one can be."""
    return len(given) > 1 and given[0] == loss[0] and given[0] not in given[1:] and not set(given[1:2]) & set(loss[1:])


def _along(given: tuple[int, ...], loss: tuple[int, ...]) -> bool:
    return len(given) == 3 and min(given[:2]) > 1 and bool(loss) and loss[0] == given[0] and given[1] not in loss[1:]


@check("N26")
def decay_outweighs(e: Evidence) -> Fired | Verdict:
    """The weights shrink towards zero, and the outputs of the model become alike.

    Looks at optimizers that add weight_decay times the weight to its gradient. Fires when that is 0.1 or more, and more
    than the gradient itself in most of the tensors followed; Adam divides both by the gradient's size, so a fifth of it
    is enough there, but for models of one layer. Rows of a table that a batch does not ask for have the decay as their
    only gradient, so there 0.005 is enough, if Adam takes half a percent of the weights in a step. Where an optimizer
    shrinks the weights directly, as AdamW does, the rate times a weight_decay of 0.1 or more is looked at: 0.01 in a
    step or more.

    WARN decay-outweighs: weight_decay = {decay:g} pulls harder than the gradient, so the weights shrink to
    nothing{why}. Fix: Use a weight_decay of 0.01 or less{fix}.
    WARN decay-outweighs/adam: {kind} adds weight_decay = {decay:g} to the gradient and divides by the gradient's size
    (coupled L2): {decay:g} is a number for AdamW, which shrinks weights by the rate times it, and here it pulls about
    {share:.0%} as hard as the gradient from the start. Fix: torch.optim.AdamW, or a weight_decay of 1e-4 or less.
    WARN decay-outweighs/rows: {kind} adds weight_decay = {decay:g} to the gradient and divides by the gradient's size
    (coupled L2): {decay:g} is a number for AdamW, and here it takes about {share:.1%} of {name} in a step, whose rows
    are seldom asked for and have little else. Fix: torch.optim.AdamW, or a weight_decay of 1e-5 or less.
    WARN decay-outweighs/decoupled: weight_decay = {decay:g} at a rate of {rate:g} takes {share:.1%} of each weight in
    every step, so the weights shrink to nothing. Fix: Use a weight_decay of 0.1 or less.
    """
    if not e.of(Step):
        return unknown("no optimizer step was seen")
    names = {id(p): name for name, p in e.parameters().items()}
    tables = {name for name, owner in e.owners().items() if isinstance(owner, nn.Embedding | nn.EmbeddingBag)}
    for number, optimizer in enumerate(e.optimizers):
        updates = [u for s in e.of(Step, optimizer=number) for u in s.updates if u.gradient]
        for group in optimizer.object.param_groups if optimizer.object is not None else ():
            decay, mine = group.get("weight_decay") or 0.0, {names.get(id(p)) for p in group["params"]}
            taken = decay * float(group.get("lr") or 0.0)
            if decay >= DECAY and taken >= TAKEN and _decoupled(optimizer.kind.__name__, group) and updates:
                return fires(
                    f"the rate times weight_decay is {taken:.3g}, which without gradients would leave "
                    f"{(1 - min(1, taken)) ** 100:.1%} of a weight after 100 steps",
                    f"less than {TAKEN:g}",
                    fault="decay-outweighs/decoupled",
                    decay=decay,
                    rate=float(group["lr"]),
                    share=taken,
                )
            if not _added(optimizer.kind.__name__, group):
                continue
            if (
                decay >= OF_ROWS
                and optimizer.kind.__name__ in DIVIDES
                and (found := _of_rows(updates, mine & tables, decay))
            ):
                share, name = found
                return fires(
                    f"weight_decay = {decay:g}, divided by the gradient's size, takes {share:.2g} of {name} in a step",
                    "a decay of its own, as AdamW's",
                    fault="decay-outweighs/rows",
                    kind=optimizer.kind.__name__,
                    decay=decay,
                    share=share,
                    name=name,
                )
            if decay < DECAY:
                continue
            sizes = {name: float(p.detach().norm()) for name, p in e.parameters().items() if name in mine}
            shares = [decay * sizes[u.name] / u.gradient for u in updates if u.name in sizes and len(u.shape) > 1]
            if len(shares) < STEPS:
                return unknown("there is a large weight_decay, and fewer than three steps to compare it with")
            kind = optimizer.kind.__name__
            deep = len({u.name for u in updates if u.name in sizes and len(u.shape) > 1}) > 1
            if deep and kind in DIVIDES and 1 >= median(shares) > DIVIDED:
                return fires(
                    f"weight_decay = {decay:g} times the weights is {median(shares):.2g} times their gradient (median)",
                    "a decay of its own, as AdamW's",
                    fault="decay-outweighs/adam",
                    kind=kind,
                    decay=decay,
                    share=median(shares),
                )
            if median(shares) > 1:
                slip = decay >= 0.5 and group.get("momentum") == 0
                return fires(
                    f"weight_decay = {decay:g} times the weights is {median(shares):.2g} times their gradient (median)",
                    "a decay that the gradient can hold against",
                    decay=decay,
                    why=": a momentum was given as weight_decay" if slip and decay >= 0.8 else "",
                    fix=f", and momentum={decay:g} if that was meant" if slip else "",
                )
    return OK


def _of_rows(updates: list, mine: set, decay: float) -> tuple[float, str] | None:
    """What the decay takes of a table in a step, where a fifth of its rows or more are not asked for."""
    taken: dict[str, list[float]] = {}
    for u in updates:
        if u.name in mine and len(u.shape) == 2 and u.shape[0] >= ROWS and (u.silent or 0.0) >= SELDOM:
            taken.setdefault(u.name, []).append(u.lr * decay * math.sqrt(math.prod(u.shape)) / u.gradient)
    shares = {name: median(each) for name, each in taken.items() if len(each) >= STEPS and median(each) > PULLED}
    return max((share, name) for name, share in shares.items()) if shares else None


def _decoupled(kind: str, group: dict) -> bool:
    """The weights shrink by the rate times weight_decay."""
    return kind == "AdamW" or kind in ("Adam", "NAdam", "RAdam") and bool(group.get("decoupled_weight_decay"))


def _added(kind: str, group: dict) -> bool:
    """To the gradient, and not to the weights directly as AdamW does."""
    known = ("SGD", "Adam", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax")
    return kind in known and not group.get("decoupled_weight_decay")


@check("N27")
def graphs_kept(e: Evidence) -> Fired | Verdict:
    """Memory grows from step to step, and with retain_graph=True each step takes longer than the one before.

    Fires when the graphs of three or more of the first five steps are still alive at the end of the watch, or those of
    answers of the model for which there was no backward. Those of the
    last two steps do not count, nor what only a circle of Python's references holds.

    WARN graphs-kept/summed: The graphs of all steps are kept alive: something sums or collects losses or outputs as
    tensors. Fix: Collect numbers: total += loss.item(), or loss.detach().
    WARN graphs-kept/carried: Each backward runs through the graphs of all steps before it: a state is passed on with
    its graph, and retain_graph=True hides the error. Fix: Detach the state between steps (h = h.detach()) and leave
    retain_graph out.
    WARN graphs-kept/answers: Answers of the model that no backward was called for are kept with their graphs: a
    validation outside no_grad collects losses or outputs as tensors. Fix: Evaluate under torch.no_grad(), and collect
    numbers (loss.item()).
    WARN graphs-kept/averaged: The average of the weights (a target network, an EMA) is made with the graph of the
    weights: it grows at every step, and a loss that uses it has gradients through all earlier weights. Fix: Update it
    under torch.no_grad(), or with p.detach().
    """
    if len(e.graphs) < 2 + STEPS:
        return unknown("fewer than five steps with a graph were seen")
    kept = graphs.alive(e)
    past = graphs.past(e)
    if len(kept) < STEPS or 2 * len(kept) < len(past):
        answers = graphs.answers_alive(e)
        if len(answers) < STEPS:
            return OK
        return fires(
            f"the graphs of the model's answers in {len(answers)} of the first steps are still alive after {e.rounds}",
            "graphs that end with their step",
            fault="graphs-kept/answers",
        )
    if averaged := e.habits["N27"]:
        return fires(
            f"in {len(averaged)} steps an average of weights that has a graph met the weights again, and the graphs of "
            f"{len(kept)} of the {len(past)} first steps are still alive after {e.rounds}",
            "an average without a graph",
            fault="graphs-kept/averaged",
        )
    carried = all(b.retained for b in e.of(Backward))
    return fires(
        f"the graphs of {len(kept)} of the {len(past)} first steps are still alive after {e.rounds}",
        "graphs that end with their step",
        fault="graphs-kept/carried" if carried else "graphs-kept/summed",
    )


@check("D9")
def inputs_not_scaled(e: Evidence) -> Fired | Verdict:
    """The loss jumps to huge numbers in the first steps, or a smaller rate seems to be needed.

    Fires when most numbers that go into the first layer, a linear or convolutional one, are above 64 and carry no
    gradient, and the first steps changed weights by more than their own size. Behind a normalisation large inputs do
    no harm. In a model without any, inputs of a root mean square of 30 or more in each of three steps are enough.

    WARN inputs-not-scaled: The data are given to the model as they are: numbers this large make steps this large. Fix:
    Scale them to about -1 to 1 (pixels: divide by 255 before subtracting the mean), or normalise them in the model.
    WARN inputs-not-scaled/raw: The data are given to the model as they are, from {low:.4g} to {high:.4g}, and its first
    weights were drawn for numbers of about 1. Fix: Scale them to about -1 to 1 (pixels: divide by 255 before
    subtracting the mean), or normalise them in the model.
    WARN inputs-not-scaled/tiny: What the model is given lies between {low:.3g} and {high:.3g}: it was scaled twice (a
    division by 255 of what was divided before), or not at all, and its first weights were drawn for numbers of about
    1. Fix: Scale it once, to about -1 to 1.
    """
    if len(e.scales) >= STEPS and not any("norm" in type(m).__name__.lower() for _, m in e.modules()):
        if all(RAW <= size < math.inf for size, *_ in e.scales.values()):
            size, low, high, shape, _ = next(iter(e.scales.values()))
            return fires(
                f"what a layer is given, {shape}, has a root mean square of {size:.3g} in {len(e.scales)} steps",
                "inputs of about 1",
                fault="inputs-not-scaled/raw",
                low=low,
                high=high,
            )
        if all(max(-low, high) < TINY and size > 0 and full for size, low, high, _, full in e.scales.values()):
            size, low, high, shape, _ = next(iter(e.scales.values()))
            return fires(
                f"what a layer is given, {shape}, lies between {low:.3g} and {high:.3g} in {len(e.scales)} steps",
                "inputs of about 1",
                fault="inputs-not-scaled/tiny",
                low=low,
                high=high,
            )
    given = e.histograms.get(histograms.GIVEN, {})
    if not given:
        return unknown("no layer was seen with what it is given")
    if not e.raw:
        return not_applicable("no linear or convolutional layer is given data as they are")
    name = e.raw[0]
    counts = next(iter(given[name].values())) if name in given else []
    first = 1 + (LARGE - histograms.LOW) // histograms.WIDTH
    high, there = sum(counts[first : histograms.BINS + 1]), sum(counts)
    if not there or 2 * high <= there:
        return OK
    changes = [u.relative for s in e.of(Step) if s.round < 3 for u in s.updates if len(u.shape) > 1]
    if not changes:
        return unknown("the inputs are large, and no step was seen that would tell what comes of it")
    if not max(changes) > 1:
        return OK
    return fires(
        f"{high / there:.0%} of what {name or 'the model'} is given are above {2**LARGE}, and a step changed a matrix "
        f"by {max(changes):.2g} of its norm",
        "inputs of about 1",
    )


@check("F22")
def sampled_without_gradient(e: Evidence) -> Fired | Verdict:
    """What makes the parameters of a distribution learns from other terms alone, and what is rebuilt stays blurred.

    Fires when samples of a distribution whose parameters learn were drawn without a gradient and given to a module as
    they are, three times or more, and none of them was ever scored with log_prob.

    WARN sampled-without-gradient: {kind}.sample() cuts the graph: no loss behind the sample reaches the parameters of
    the distribution. Fix: Draw with rsample(), or score the sample with log_prob if it is an action.
    WARN sampled-without-gradient/valued: The loss asks for actions of a higher value, and sample() cuts the graph
    between the value and what draws them, so the critic's answer moves nothing in the policy. Fix: Draw with rsample().
    """
    if len(e.valued) >= 2:
        return fires(
            f"in {len(e.valued)} steps a loss was the value of what normal gave without a gradient",
            "a sample with a gradient",
            fault="sampled-without-gradient/valued",
        )
    if not e.latents:
        return not_applicable("no distribution that learns was sampled without a gradient")
    entered = [latent for latent in e.latents if latent.entered]
    if len(entered) < STEPS or any(latent.scored for latent in e.latents):
        return OK
    return fires(
        f"{len(entered)} of {len(e.latents)} samples were given to a module, and none was scored",
        "a sample with a gradient",
        kind=entered[0].kind,
    )


@check("D10")
def padding_that_stands_for_data(e: Evidence) -> Fired | Verdict:
    """One user, item or category is never learned: its row in the table stays what it was.

    Fires when a table with a padding_idx is given one id per row, where nothing can be padding, and some of these ids
    are the padding's.

    WARN padding-stands-for-data: padding_idx={pad} of {name} keeps the gradient of that row at zero, and the id is
    among the data. Fix: Leave padding_idx out, or number the data from 1. If the id means "none", this is right.
    """
    tables = {id(m): (name, m) for name, m in e.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
    if not tables:
        return not_applicable("no table has a padding_idx")
    for key, (calls, many, dims) in e.padded.items():
        if key in tables and calls and many and dims == 1:
            name, table = tables[key]
            return fires(
                f"{many} ids in {calls} calls with one id per row are {table.padding_idx}",
                "a padding_idx that is no id of the data",
                pad=table.padding_idx,
                name=name,
            )
    return OK


@check("D12")
def loader_restarted(e: Evidence) -> Fired | Verdict:
    """The training loss falls to nearly nothing, and on other data the model is no better than at the start.

    Fires when the model, or the parts of it that are called, was given the same batch in every step, and a DataLoader
    of several batches was begun anew in each of them, the same one or another. One batch that is taken before the loop,
    to learn it by heart, is left alone, and so is a loader that comes to its end (a step for each pass, whose gradients
    are added up), or that begins with another batch (a shuffled one, beside a graph or prompts that stay).

    WARN loader-restarted: next(iter(loader)) stands inside the loop: it begins the data anew at each step, and gives
    the first batch for ever. Fix: for batch in loader, or make the iterator once before the loop; shuffle=True, and no
    generator that is seeded anew.
    """
    if not e.restarted:
        return not_applicable("no DataLoader was begun in the watched steps")
    if e.rounds < STEPS:
        return unknown("fewer than three steps were seen")
    first = {}
    for call in e.forwards:
        first.setdefault(call.round, call.ids if call.ids is not None else call.mark)
    given = [x for x in first.values() if x is not None]
    in_parts = not given and len(e.habits["D12"]) >= STEPS - 1  # each is compared with the step before
    if len(given) < STEPS and not in_parts:
        return not_applicable("what the model is given can't be told from step to step")
    same = in_parts or all(x.shape == given[0].shape and bool((x == given[0]).all()) for x in given)
    begun = set().union(*(rounds for n, rounds, data in e.restarted.values() if n != 1 and data not in e.passed))
    if same and len(begun) >= max(STEPS, e.rounds - 1):
        batches = max(batches for batches, *_ in e.restarted.values())
        return fires(
            f"a DataLoader of {batches or 'many'} batches was begun in {len(begun)} of {e.rounds} steps, and each of "
            "them was given the same batch",
            "one pass over the data for each iter()",
        )
    return OK


@check("D54")
def pairs_of_two_loaders(e: Evidence) -> Fired | Verdict:
    """What is learned is the mean of all targets, whatever the input.

    Fires when what goes into the model comes from one DataLoader, what the loss asks for from another one of as many
    rows, and each of them shuffles for itself.

    WARN pairs-of-two-loaders: Inputs and targets come from two loaders that shuffle for themselves, so a row and its
    target do not belong together. Fix: One loader over pairs: DataLoader(TensorDataset(inputs, targets), shuffle=True).
    """
    if (verdict := no_habit(e, seen := e.habits["D54"])) is not None:
        return verdict
    rows = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps two loaders of {rows} rows were compared row by row", "one loader of pairs")


@check("S66")
def first_state_read(e: Evidence) -> Fired | Verdict:
    """A recurrent network does no better than with the first step of each row alone.

    Fires when all that is read of the answer of an LSTM, GRU or RNN of one direction is its first place.

    WARN first-state-read: The state after the first of {steps} steps is read, and the rest of each row has no part in
    it. Fix: output[:, -1] with batch_first=True (output[-1] without), or the last state that the network returns.
    """
    if (verdict := no_habit(e, seen := e.habits["S66"])) is not None:
        return verdict
    steps = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps place 0 of {steps} was read, and no other", "the last place", steps=steps)


@check("S67")
def asked_twice(e: Evidence) -> Fired | Verdict:
    """Two things that should differ (a mean and a variance, queries and keys) are one and the same.

    Fires when a layer was called twice with the same input, both answers are in the loss, and a layer beside it, of the
    same shape, is in no way to the loss.

    WARN asked-twice: {layer} was called where {idle} was meant: it is called twice with the same input, and {idle} not
    at all. Fix: Call {idle} in one of the two places, or remove it.
    """
    if (verdict := no_habit(e, seen := e.habits["S67"])) is not None:
        return verdict
    layer, idle = next(iter(seen.values()))
    what = f"in {len(seen)} steps {layer} answered the same input twice, and {idle} did nothing"
    return fires(what, "each of them once", layer=layer, idle=idle)


@check("S62")
def norm_of_several_layers(e: Evidence) -> Fired | Verdict:
    """The training loss is good, and in eval mode the same data are answered badly.

    Fires when one batch normalisation with running statistics was given, in one forward in training, what layers with
    different weights made, one behind the other. One that comes again with its layer (an encoder that is called twice,
    a recurrent cell, a head for several levels), branches side by side, and weights that are made anew are left alone.

    WARN norm-of-several-layers: One batch normalisation{name} stands behind {layers} layers, so its running statistics
    are a mixture that fits none of them in eval mode. Fix: Give each layer an nn.BatchNorm of its own.
    """
    if (verdict := no_habit(e, seen := e.habits["S62"])) is not None:
        return verdict
    layers, name = next(iter(seen.values()))
    what = f"in {len(seen)} steps one batch normalisation was given the outputs of {layers} layers in turn"
    return fires(what, "one layer", layers=layers, name=f" ({name})" if name else "")
