"""One thing taken for another: S33 to S37, F81 to F84, D20 to D22, D32, S43, N36 and N37.

Rows for places, a network for its own target, a tensor for its neighbour, a generator for a seed, the weights of one
optimizer for another's. All were noted step by step by watchers; here it is asked whether they are a habit.

Footgun: each of these lines is right somewhere (watchers/ says where), so these checks warn.
"""

import linecache
from pathlib import Path

from torch.optim import LBFGS

from train_doctor.check import Fired, check, fires
from train_doctor.checks.arithmetic import STEPS, no_habit
from train_doctor.checks.losses import judged
from train_doctor.evidence import Evidence
from train_doctor.finding import OK, Verdict, not_applicable

ROWS, STRONG = 48, 0.5  # shares of noise that are known, and of which one is above
DOUBLED = 0.25  # of a row's negatives


@check("S33")
def softmax_over_the_batch(e: Evidence) -> Fired | Verdict:
    """A model with attention or shares is worse than it should be, and answers a row alone differently than in a batch.

    Fires when a softmax of something that learns was taken over dim 0, and what came of it met a target with one row
    for each of these rows in a loss. Matrices of all pairs, tables that learn and series whose time
    comes first are left alone. Or when the shares of maps were taken along one of their sides, and the loss takes them
    for shares of classes, which lie in dim 1. Or when classes or experts were picked along another axis than that of
    the softmax.

    WARN softmax-over-the-batch: A softmax is taken over dim 0, the {rows} rows of the batch, so the answer to a row
    hangs on the others. Fix: Name the dim in which the places of one row lie: softmax(scores, dim=1) or dim=-1.
    WARN softmax-over-the-batch/places: A softmax of maps is taken over dim {dim}, their places, and the loss takes what
    comes out for shares of the classes in dim 1. Fix: softmax(dim=1).
    WARN softmax-over-the-batch/picked: Shares were made along dim {dim}, and are used as those of the classes (or
    experts) in dim {along}. Fix: log_softmax(dim={along}), softmax(dim={along}).
    """
    if len(picked := e.habits["S33 picked"]) >= 3:
        dim, along = next(iter(picked.values()))
        what = f"in {len(picked)} steps a softmax was taken along dim {dim}, and its classes lie in dim {along}"
        fault = "softmax-over-the-batch/picked"
        return fires(what, "one axis for both", fault=fault, dim=dim, along=along)
    axis = e.habits["S33 axis"]
    if len(axis) >= 3:
        dim = next(iter(axis.values()))
        what = f"in {len(axis)} steps shares along dim {dim} were held against classes of dim 1"
        return fires(what, "shares along dim 1", fault="softmax-over-the-batch/places", dim=dim)
    if (verdict := no_habit(e, seen := e.habits["S33"])) is not None:
        return verdict
    rows = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps {rows} rows shared out a softmax among them", "one within each row", rows=rows)


@check("F81")
def targets_that_learn(e: Evidence) -> Fired | Verdict:
    """Values come out wrong though the error falls well, or features of a comparison lose what they could tell.

    Fires when a difference has on one side what a network answered, and on the other a plain number (a reward) more
    than a multiple of what the same network answered, both with a gradient; or when both sides of a regression loss (or
    of a square by hand) came from the same last layer, which the loss reaches by this error alone, and one side is made
    of other weights too.

    WARN targets-that-learn/value: The target is made by the network that is trained and keeps its graph, so the loss
    also pulls the next value towards this one. Fix: with torch.no_grad(): target = reward + gamma * value(next).
    WARN targets-that-learn/features: The features in which two things are compared are trained by that comparison
    itself, and are soonest alike where they tell nothing. Fix: Freeze them: features.requires_grad_(False), and leave
    them out of the optimizer; or detach the side of the target.
    """
    if (verdict := no_habit(e, seen := e.habits["F81"])) is not None:
        return verdict
    what = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps both sides of a difference had a gradient into the same weights",
        "a target without one",
        fault=f"targets-that-learn/{what}",
    )


@check("S34")
def beside_itself(e: Evidence) -> Fired | Verdict:
    """A decoder with skip connections loses what is fine, and works no better than one without.

    Fires when a tensor that learns is put together with itself, along another dim than the first, and goes into a
    layer.

    WARN beside-itself: torch.cat is given the same tensor {shape} twice, so one half tells nothing that the other does
    not: another tensor was meant. Fix: torch.cat([upsampled, skip], dim=1).
    """
    if (verdict := no_habit(e, seen := e.habits["S34"])) is not None:
        return verdict
    shape = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps a tensor {shape} stood beside itself", "two tensors", shape=shape)


@check("S35")
def anchor_not_cloned(e: Evidence) -> Fired | Verdict:
    """A penalty that should hold weights near where they began is 0 for ever, and what was known is forgotten.

    Fires when a weight and a tensor with the same memory are subtracted from each other, and the result is squared.
    Also when a line gives model.state_dict() to something that is called best..., and its tensors, which nothing was
    done with and which were not saved, are still there at the next backward.

    WARN anchor-not-cloned: The old weights are the live ones: detach() and .data share their memory, so the difference
    is always 0. Fix: p.detach().clone().
    WARN anchor-not-cloned/best: The best weights are kept as model.state_dict(), whose tensors are the live ones, so
    they are those of the last step in the end. Fix: copy.deepcopy(model.state_dict()).
    """
    if (verdict := no_habit(e, seen := e.habits["S35"])) is not None:
        return verdict
    if next(iter(seen.values())) == "best":
        what = f"in {len(seen)} steps the tensors that were kept as the best were the weights themselves"
        return fires(what, "a copy", fault="anchor-not-cloned/best")
    return fires(f"in {len(seen)} steps a weight {next(iter(seen.values()))} was taken from itself", "a copy of it")


@check("S36")
def holds_its_adversary(e: Evidence) -> Fired | Verdict:
    """A GAN's discriminator knows less with every step, and its samples do not come to look like the data.

    Fires when two optimizers want opposite answers of a network to what another one made, and one of them holds all
    weights that the other does, and more.

    WARN holds-its-adversary: The {more} that trains one network holds the weights of the other one too, so each of its
    steps undoes what the other's did. Fix: torch.optim.Adam(generator.parameters()), without the discriminator's.
    """
    if len(e.optimizers) < 2:
        return not_applicable("there are no two optimizers")
    if (verdict := no_habit(e, seen := e.habits["S36"])) is not None:
        return verdict
    more, shared = next(iter(seen.values()))
    return fires(f"{shared} tensors are in both optimizers, which want the opposite of them", "one for each", more=more)


@check("D20")
def same_draw_each_step(e: Evidence) -> Fired | Verdict:
    """A model that is trained with noise, masks or samples knows these by heart and fails with any other.

    Fires when the same random numbers were drawn in three steps, with gradients on, and were added to or multiplied
    with something of their size that was another each time. And when what looks like standard normal draws was the same
    in three steps, as the input of a first layer that learns or the target of a regression, while all other inputs were
    others each time. Rows whose classes are kept as well are the memory of an earlier task, and left alone. And when
    the program's generator stood at the same place after the first dropout of three steps.

    WARN same-draw-each-step: {name} gives the same numbers in every step: its generator, or the program's, is seeded
    anew each time. Fix: Make the generator once, before the loop.
    WARN same-draw-each-step/kept: The noise {shape} was drawn once and is used in every step, while data change: the
    model learns these numbers by heart. Fix: Draw it in each step, z = torch.randn(...), inside of the loop.
    WARN same-draw-each-step/dropout: The dropout drops the same units in every step, because the generator is seeded
    anew each time (torch.manual_seed in the loop). Fix: Seed once, before the loop.
    """
    searches = any(issubclass(o.kind, LBFGS) for o in e.optimizers)  # and asks for one loss several times
    if len(masks := e.habits["D20 dropout"]) >= 3 and not searches:
        what = f"in {len(masks)} steps the generator stood at the same place after the first dropout"
        return fires(what, "another place in each", fault="same-draw-each-step/dropout")
    if (verdict := no_habit(e, seen := e.habits["D20"])) is not None:
        return verdict
    name, shape = next(iter(seen.values()))
    if name == "kept":
        what = f"in {len(seen)} steps the same {shape} numbers were used, beside other data each time"
        return fires(what, "others in each step", fault="same-draw-each-step/kept", shape=shape)
    return fires(f"in {len(seen)} steps {name} drew the same {shape} numbers", "others in each step", name=name)


@check("D21")
def hidden_cells_shown(e: Evidence) -> Fired | Verdict:
    """A model that fills in what is missing is perfect in training and useless where something is missing.

    Fires when a loss asks for cells that a mask of random numbers picks, the whole target was among the inputs, and the
    mask was put on nothing else; or when it asks for just those cells that the mask has left in the input.

    WARN hidden-cells-shown: The cells that the loss asks for stand in the input, so the model copies them. Fix:
    model(x * observed), and the loss on the others.
    WARN hidden-cells-shown/left: The loss asks for the cells that the mask has left in the input, and never for those
    that it has hidden: one of the two takes the mask the other way round. Fix: (error * hidden).sum() / hidden.sum().
    """
    if (verdict := no_habit(e, seen := e.habits["D21"])) is not None:
        return verdict
    if next(iter(seen.values())) == "left":
        what = f"in {len(seen)} steps the mask of the loss was that of what the input kept"
        return fires(what, "the other cells", fault="hidden-cells-shown/left")
    return fires(
        f"in {len(seen)} steps the input was the target, whole", "an input without the cells that are asked for"
    )


@check("D29")
def labels_laid_across(e: Evidence) -> Fired | Verdict:
    """Frames, patches or words of a clip are classified hardly better than by guessing.

    Fires when labels were repeated as a whole (repeat), the pieces of as many rows were laid one after the other, all
    of the first row and then those of the next, and both meet in a loss.

    WARN labels-laid-across: The {rows} labels are repeated as a whole and the {pieces} pieces of each row lie side by
    side, so most pieces get the label of another row. Fix: labels.repeat_interleave({pieces}).
    """
    if (verdict := no_habit(e, seen := e.habits["D29"])) is not None:
        return verdict
    rows, pieces = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps {rows} labels were repeated {pieces} times, beside rows of {pieces} pieces",
        "each label repeated in its place",
        rows=rows,
        pieces=pieces,
    )


@check("D30")
def grid_turned(e: Evidence) -> Fired | Verdict:
    """A warp, a spatial transformer or a flow learns nothing useful, and what it samples lies on its side.

    Fires when in each picture of a batch the first number of grid_sample's places changes from row to row and the
    second one along a row.

    WARN grid-turned: grid_sample takes (x, y), how far across and how far down, and is given (y, x), so rows and
    columns of the picture are exchanged. Fix: torch.stack((xs, ys), dim=-1).
    """
    if (verdict := no_habit(e, seen := e.habits["D30"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps the places {next(iter(seen.values()))} were (y, x)", "(x, y)")


@check("F82")
def scale_and_its_logarithm(e: Evidence) -> Fired | Verdict:
    """A flow or a predicted spread collapses or grows without end while the loss falls below every bound.

    Fires when a tensor is a sum in the loss and stands in an exp that multiplies something, with the same sign in both,
    and with no other sign anywhere in that loss. What is multiplied by several numbers has no one sign. Also when of
    several such scales of one shape the loss holds some and not the others; or none, though each was summed and the
    loss has the squares or the log-probabilities of what came out. Or when these are a mean over the numbers of a row,
    of which the logarithms are a sum; one scale for several numbers counts once for each.

    WARN scale-and-its-logarithm: The loss holds the logarithm of a scale with the sign that the scale itself has in its
    exponent, so both pull one way: a plus is a minus, or the other way round. Fix: loss = -(prior.log_prob(z) +
    log_det).mean() for z = x * exp(s), log_det = s.sum(1); of a spread, error**2 * exp(-s) + s.
    WARN scale-and-its-logarithm/of-some: {total} scales of one shape stretch the data, and the loss holds the
    logarithms of {held} of them: the others can grow or shrink for nothing. Fix: log_det = log_det + s.sum(1) in each
    layer.
    WARN scale-and-its-logarithm/averaged: The density of what comes out is a mean over the {numbers} numbers of a row
    and the logarithms of the scales are summed over them, so the density weighs {numbers} times too little and what
    comes out grows. Fix: prior.log_prob(z).sum(1) + log_det, and the mean of that.
    """
    if (verdict := no_habit(e, seen := e.habits["F82"])) is not None:
        return verdict
    if isinstance(fact := next(iter(seen.values())), tuple) and fact[0] == "averaged":
        what = f"in {len(seen)} steps a density was a mean over {fact[1]} numbers, beside sums over them"
        return fires(what, "both a sum", fault="scale-and-its-logarithm/averaged", numbers=fact[1])
    if isinstance(fact, tuple):
        held, total = fact
        what = f"in {len(seen)} steps the loss held {held} of {total} logarithms"
        return fires(what, "all of them", fault="scale-and-its-logarithm/of-some", held=held, total=total)
    sign = "+" if next(iter(seen.values())) > 0 else "-"
    return fires(f"in {len(seen)} steps the loss held {sign}s, and exp({sign}s) was a factor", "opposite signs")


@check("F83")
def probabilities_as_logits(e: Evidence) -> Fired | Verdict:
    """A policy stays nearly random however much it is rewarded.

    Fires when a Categorical or a Bernoulli is given as logits, or gumbel_softmax is given, what comes straight from a
    softmax or a sigmoid.

    WARN probabilities-as-logits: {name} is given probabilities where it takes logits, so its choices are nearly the
    same whatever they are. Fix: Categorical(probs=...), or leave the softmax out.
    """
    if (verdict := no_habit(e, seen := e.habits["F83"])) is not None:
        return verdict
    name = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps {name} was given the result of a softmax or sigmoid", "logits", name=name)


@check("F84")
def noise_never_strong(e: Evidence) -> Fired | Verdict:
    """A diffusion model's loss falls well, and what it samples from noise is noise.

    Fires when data and noise are mixed with a share of each for each row, whose squares add up to 1, and of 48 rows
    or more no share of noise was above 0.5.

    WARN noise-never-strong: The largest share of noise is {most:.2f}, so the model never sees what a sampler begins
    with: alphas[t] stands where their product up to t was meant. Fix: torch.cumprod(1 - betas, 0)[t].
    """
    if (verdict := no_habit(e, seen := e.habits["F84"])) is not None:
        return verdict
    rows, most = sum(n for n, _ in seen.values()), max(share for _, share in seen.values())
    if rows < ROWS or most > STRONG:
        return OK
    return fires(f"of {rows} shares of noise the largest was {most:.2f}", "one near 1", most=most)


@check("S37")
def one_way_hardly_read(e: Evidence) -> Fired | Verdict:
    """A bidirectional network is hardly better than one that reads one way.

    Fires when output[:, -1] (output[-1] where time comes first), whole, is taken of a recurrent network that reads both
    ways.

    WARN one-way-hardly-read: The last place of the output holds the last state of the forward half, and of the backward
    half its first one, which has read a single place ({half} numbers). Fix: torch.cat([h_n[-2], h_n[-1]], dim=1), or a
    mean over all places.
    """
    if (verdict := no_habit(e, seen := e.habits["S37"])) is not None:
        return verdict
    half = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps the last place of a bidirectional output was taken", "both ends", half=half)


@check("N37")
def result_thrown_away(e: Evidence) -> Fired | Verdict:
    """A line seems to do something (adds positions, detaches a state, clamps numbers) and does nothing.

    Fires when a function that gives a new tensor and does nothing else stands on a line of its own, in the program's
    own code, in two steps or more.

    WARN result-thrown-away: Line {line} throws away what {name} gives: the tensor stays as it is. Fix: Give the result
    a name (x = x.clamp(0, 1)), or take the form that works in place (x.clamp_(0, 1)).
    """
    if (verdict := no_habit(e, seen := e.habits["N37"])) is not None:
        return verdict
    name, file, line = next(iter(seen.values()))
    text = linecache.getline(file, line).strip()[:60]
    where = f"{Path(file).name}:{line}" + (f" `{text}`" if text else "")
    return fires(
        f"in {len(seen)} steps the result of {where} was dropped", "a result that is used", name=name, line=line
    )


@check("N36")
def average_goes_back(e: Evidence) -> Fired | Verdict:
    """A target network stays what it was at the start, and the network that learns is drawn back to it.

    Fires when weights that an optimizer holds are written to with what was made of the weights of a network that is
    asked for targets, in two steps or more, and those are never written to. Also when the weights are replaced, after a
    pass without gradients and between two steps, by a mean of most of the states that they had been in.

    WARN average-goes-back: The average is written into the network that is trained, and the target network never moves:
    the two are swapped. Fix: target.lerp_(online, tau) for each pair of weights.
    WARN average-goes-back/left-in-place: After a validation the model goes on from an average of its earlier weights:
    these were put in for the validation and not taken out again, and nearly all that the steps had changed is lost.
    Fix: Keep the weights before, and put them back after the validation (ema.restore), or validate a copy.
    """
    if back := e.habits["N36 back"]:
        at, left = next(iter(back.items()))
        what = f"after step {at} and a pass without gradients the weights became a mean of all that they had been"
        what += f", {left:.0%} of the way that they had gone"
        return fires(what, "the weights of the last step", fault="average-goes-back/left-in-place")
    if (verdict := no_habit(e, seen := e.habits["N36"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps {next(iter(seen.values()))} trained weights were drawn to a target's", "none")


@check("S61")
def groups_of_others(e: Evidence) -> Fired | Verdict:
    """Reinforcement with groups of answers (GRPO, RLOO) learns little, above all when prompts differ in what they pay.

    Looks at rewards that are cut into groups of which a mean is taken away, and at what the model is given. Fires when,
    in three steps, the answers to one prompt stand as far apart as there are groups, and not side by side; or the other
    way round. Or when scores are cut into two parts that are subtracted from each other, and nearly all pairs that
    begin alike, or are of one item that a DataLoader handed to its collate function, stand side by side, or half a
    batch apart, and few of those that are compared do.

    WARN groups-of-others: The rewards of {size} answers that stand side by side are compared, and these are answers to
    different prompts: the prompts were laid one after the other and then again, {size} times. Fix:
    prompts.repeat_interleave({size}, dim=0); or rewards.view({size}, -1) with the mean over dim 0.
    WARN groups-of-others/neighbours: The rewards of {size} answers that stand far apart are compared, and these are
    answers to different prompts: those to one prompt stand side by side. Fix: rewards.view(-1, {size}) with the mean
    over dim 1.
    WARN groups-of-others/halves: The first half of the scores is compared with the second, and these are answers to
    different prompts: the two answers to one prompt stand side by side. Fix: scores[0::2] and scores[1::2], or a batch
    of all chosen and then all rejected.
    WARN groups-of-others/pairs: Scores that stand side by side are compared, and these are answers to different
    prompts: the two answers to one prompt stand half a batch apart. Fix: scores.chunk(2).
    """
    if len(pairs := e.habits["S61 pairs"]) >= STEPS:
        what = f"in {len(pairs)} steps scores were subtracted of which few belong to answers that begin alike"
        return fires(what, "two answers to one prompt", fault=f"groups-of-others/{next(iter(pairs.values()))}")
    if len(pairs := e.habits["S61 items"]) >= STEPS:
        what = f"in {len(pairs)} steps scores were subtracted of which few belong to one item of the data set"
        return fires(what, "two answers of one item", fault=f"groups-of-others/{next(iter(pairs.values()))}")
    if (verdict := no_habit(e, seen := e.habits["S61"])) is not None:
        return verdict
    prompts, size, over = next(iter(seen.values()))
    what = f"in {len(seen)} steps groups of {size} rewards were of several of {prompts} prompts"
    return fires(what, "groups of one prompt", fault="groups-of-others" + "/neighbours" * (not over), size=size)


@check("D22")
def edges_not_moved(e: Evidence) -> Fired | Verdict:
    """A network of graphs learns hardly more than from nodes alone, when a batch has several graphs.

    Fires when nodes are summed into eight graphs or more, something is summed along edges into the same nodes, and all
    edges end in the first few graphs, a quarter at most.

    WARN edges-not-moved: The edges of {touched} of {graphs} graphs are all that there is: the edges of each graph
    count its nodes from 0 and were put together without the offset of their graph. Fix: edge_index + offset, with
    offset += len(x) in the collate function.
    """
    if (verdict := no_habit(e, seen := e.habits["D22"])) is not None:
        return verdict
    touched, graphs = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps edges ended in {touched} of {graphs} graphs", "in all", touched=touched, graphs=graphs
    )


@check("S43")
def own_messages(e: Evidence) -> Fired | Verdict:
    """A network of graphs learns hardly more than from nodes alone.

    Fires when rows are taken at an index (x[src]), go through functions that have nothing else of edges, and are summed
    at the same index. Messages of both ends, and those with numbers of their edges, are left alone.

    WARN own-messages: Messages are summed at the nodes that they come from, so a node is told what it is
    itself, and nothing of its neighbours. Fix: Sum them at the other end: index_add(0, dst, message).
    """
    if (verdict := no_habit(e, seen := e.habits["S43"])) is not None:
        return verdict
    edges = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps {edges} rows were summed at the index that they were taken at", "at another")


@check("S65")
def one_place_for_all(e: Evidence) -> Fired | Verdict:
    """A transformer is no better than one that is told no order, though it has a table of positions.

    Fires when every place of a text looks up one and the same row of a table that has a row for each of them, beside
    the table of words. Where rising numbers are looked up as well, or angles are made (rotary), it is taken for types.
    So it is where vectors of places are added, or a recurrent layer or a convolution tells the order.

    WARN one-place-for-all: All {places} places of the text are given the same row of a table of {rows}, so the model is
    told no order. Fix: positions = torch.arange(T, device=ids.device); position_ids that count.
    WARN one-place-for-all/turned: All {places} places of the text are turned by the same angles (rotary positions), so
    attention is told no order. Fix: position_ids that count, or none: the model makes them itself.
    """
    if (verdict := no_habit(e, seen := e.habits["S65"])) is not None:
        return verdict
    places, rows = next(iter(seen.values()))
    if not rows:
        what = f"in {len(seen)} steps {places} places had the same angles"
        return fires(what, "angles that grow", fault="one-place-for-all/turned", places=places)
    what = f"in {len(seen)} steps {places} places looked up one row of a table of {rows}"
    return fires(what, "a row for each place", places=places, rows=rows)


@check("D53")
def one_text_in_a_batch(e: Evidence) -> Fired | Verdict:
    """The loss is that of one text, and the batch is no better than a single row.

    Fires when all rows of what the tables of words are given are one and the same text, in each step, and the
    cross-entropy asks all of them for the same.

    WARN one-text-in-a-batch: All {rows} rows of the batch are the same text of {places} tokens, so the batch is worth
    one row. Fix: Look at the data set's __getitem__ (does it use its index?) and at the draw of rows; expand() and
    repeat() make copies.
    """
    if (verdict := no_habit(e, seen := e.habits["D53"])) is not None:
        return verdict
    rows, places = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps {rows} rows were alike", "rows that differ", rows=rows, places=places)


@check("D45")
def edges_once(e: Evidence) -> Fired | Verdict:
    """A network of graphs learns hardly more than from nodes alone.

    Fires when all edges along which rows are taken and summed go from a lower number to a higher one, or all of them
    the other way, with eight different distances or more, and several at each end. Trees, grids and sums in both
    directions are left alone.

    WARN edges-once: Each edge is listed once and goes {way}, as in half of a symmetric matrix: in a graph without
    directions a node hears from a part of its neighbours only. Fix: torch.cat([edge_index, edge_index.flip(0)], dim=1);
    where edges do have a direction, ignore this.
    """
    if (verdict := no_habit(e, seen := e.habits["D45"])) is not None:
        return verdict
    up, edges = next(iter(seen.values()))
    way = "from the lower number to the higher one" if up else "from the higher number to the lower one"
    return fires(f"in {len(seen)} steps all of {edges} edges went {way}", "both ways", way=way)


@check("D46")
def reference_of_others(e: Evidence) -> Fired | Verdict:
    """Preference training (DPO, IPO) moves the model about, and its answers get no better, or worse.

    Fires when the log-probabilities of the policy and of the reference, row by row, do not go together, neither for the
    chosen nor for the rejected ones (correlations below 0.3). Of a reference's difference that was kept, it is asked
    whether the values under the numbers that the loader gives are near the policy's, and those that are used are not.

    WARN reference-of-others: The reference's log-probabilities are not those of the same rows: they were kept in
    another order than the one in which the rows are drawn. Fix: Keep them under the number of their row, and look them
    up by it: reference[index].
    WARN reference-of-others/teacher: The teacher's probabilities are sure of something and wrong about this text: they
    are those of other rows, kept in another order than the one in which the rows are drawn. Fix: Keep them under the
    number of their row, and look them up by it: soft[index].
    WARN reference-of-others/crossed: The chosen answers are held against the reference's log-probabilities of the
    rejected ones, and the other way round. Fix: (pi_chosen - ref_chosen) - (pi_rejected - ref_rejected).
    WARN reference-of-others/added: The reference's difference is added to the policy's, so what the reference prefers
    is preferred still more. Fix: (pi_chosen - pi_rejected) - (ref_chosen - ref_rejected).
    WARN reference-of-others/places: The divergence holds the student's answers from place {student} on against those of
    the teacher from place {teacher} on, so it learns what the teacher says of other words. Fix: One slice for both:
    [:, :-1].
    """
    if len(places := e.habits["D46 places"]) >= STEPS:
        student, teacher = next(iter(places.values()))
        what = f"in {len(places)} steps one side began at place {student}, and the other at place {teacher}"
        fault = "reference-of-others/places"
        return fires(what, "the same places", fault=fault, student=student, teacher=teacher)
    if len(teacher := e.habits["D46 teacher"]) >= 3:
        cost, entropy = next(iter(teacher.values()))
        what = (
            f"in {len(teacher)} steps the teacher gave the tokens of the text {cost:.2f} nats, and said {entropy:.2f}"
        )
        return fires(what, "about as many", fault="reference-of-others/teacher")
    for fault, expected in (("crossed", "each with its own"), ("added", "a difference of both")):
        if len(found := e.habits[f"D46 {fault}"]) >= STEPS:
            what = f"in {len(found)} steps the differences of policy and reference were {fault}"
            return fires(what, expected, fault=f"reference-of-others/{fault}")
    if (verdict := no_habit(e, seen := e.habits["D46"])) is not None:
        return verdict
    together = next(iter(seen.values()))
    what = f"in {len(seen)} steps policy and reference go together with a correlation of {together:.2f} at most"
    return fires(what, "nearly 1, as they begin as one model")


@check("F91")
def variance_and_spread(e: Evidence) -> Fired | Verdict:
    """A network that tells its own uncertainty is far too sure, or far too unsure.

    Reads the line that calls GaussianNLLLoss or makes a Normal. Fires when the first is given, for its variance, a
    tensor that the program names sigma or std, and when the second is given one named var for its spread.

    WARN variance-and-spread: {loss} takes a {wanted} there, and is given {name}, which is named as the other. Fix:
    {fix}.
    """
    if (verdict := no_habit(e, seen := e.habits["F91"])) is not None:
        return verdict
    loss, name = next(iter(seen.values()))
    variance = loss != "Normal"
    return fires(
        f"in {len(seen)} steps {loss} was given {name}",
        f"a {'variance' if variance else 'spread'}",
        loss=loss,
        name=name,
        wanted="variance" if variance else "spread (a standard deviation)",
        fix=f"{name} ** 2" if variance else f"{name}.sqrt()",
    )


@check("S38")
def cut_in_each_turn(e: Evidence) -> Fired | Verdict:
    """A recurrent model forgets what it saw early, and is hardly better than one that sees the last place alone.

    Fires when a state that hangs on trained weights is detached three times or more on the way to one loss, and nothing
    of what was cut off is in that loss. A state that is detached once, between two losses, is left alone. Or when the
    state of a rollout, which a network acted on, is detached three times and the loss asks for each of them.

    WARN cut-in-each-turn: The state is detached in each turn of the loop, so the loss reaches the last turn only and
    nothing teaches the model to keep what it saw before. Fix: Detach once, before the loop: h = h.detach().
    WARN cut-in-each-turn/rollout: The state is detached in each turn of the rollout, so what an action does to later
    turns never reaches the policy: it learns to mind the next turn alone. Fix: Detach before the rollout, if at all.
    """
    if (verdict := no_habit(e, seen := e.habits["S38"])) is not None:
        return verdict
    if (turns := next(iter(seen.values()))) < 0:
        what = f"in {len(seen)} steps the state of a rollout was detached {-turns} times before one loss"
        return fires(what, "once, or never", fault="cut-in-each-turn/rollout")
    return fires(f"in {len(seen)} steps a state was detached three times or more before its loss", "once, or never")


@check("S39")
def pooled_over_features(e: Evidence) -> Fired | Verdict:
    """A network on sets of points or words learns little, though it has the form of one that works.

    Fires when the features of each place, (B, N, C) with N equal to C, are reduced over the features and go into a
    layer that takes C numbers. The same along the places is what such networks do.

    WARN pooled-over-features: The features of each place are reduced to one number, and the next layer takes the N
    places for C features: as both are {size}, nothing is raised. Fix: Reduce over the places: features.max(dim=1).
    """
    if (verdict := no_habit(e, seen := e.habits["S39"])) is not None:
        return verdict
    shape = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps features were reduced to {shape}", "one number for each feature", size=shape[1])


@check("D23")
def another_range(e: Evidence) -> Fired | Verdict:
    """A recommender ranks some items far too high: those that never came up as negatives; or it confuses its columns.

    Fires when numbers drawn by randint look up rows of a table, and their limit is the size of another, smaller table
    that is looked up in the same steps. And when a table that is given rows of several ids has as many rows as the
    ranges of these columns together, over all steps that are looked at, and no id is beyond the widest range. Columns
    of one range (texts, boards), and those that leave much of their range unused, are left alone; so are counts that
    share one table, where its rows are more than all ranges together.

    WARN another-range: The rows of a table of {rows} are drawn by randint up to {high}, which is the size of another
    table: the rows from {high} on are never drawn. Fix: torch.randint({rows}, ...).
    WARN another-range/no-offsets: A table of {rows} rows has room for the ids of all columns, and they use its first
    {high} alone: id 3 of one column is that of another. Fix: table(ids + offsets), where offsets are the sizes of the
    columns before, summed up: torch.tensor([0, *sizes[:-1]]).cumsum(0).
    """
    if (verdict := no_habit(e, seen := e.habits["D23"])) is not None:
        return verdict
    *what, rows, high = next(iter(seen.values()))
    if what:
        told = f"in {len(seen)} steps the largest id was {high - 1}, in a table of {rows} rows for columns of ids"
        return fires(told, "rows of its own for each column", fault="another-range/no-offsets", rows=rows, high=high)
    return fires(
        f"in {len(seen)} steps {high} was the limit of draws from a table of {rows}",
        "draws from all rows",
        rows=rows,
        high=high,
    )


@check("N38")
def steps_on_anothers_loss(e: Evidence) -> Fired | Verdict:
    """A critic's values grow far above what can be had, and the policy follows them.

    Fires when a loss is the plain mean of what one optimizer's weights answer (and trains another's weights), gradients
    of a loss with targets still wait on them for their step, and that optimizer then steps on both. Also when the two
    losses are added, and differentiated at once.

    WARN steps-on-anothers-loss: Before the critic's {kind} steps, the loss of the actor has added its gradients to the
    critic's own, so the critic also learns to answer higher. Fix: Step the critic before the actor's loss is
    differentiated, or clear its gradients in between.
    """
    if len(e.optimizers) < 2:
        return not_applicable("there are no two optimizers")
    if (verdict := no_habit(e, seen := e.habits["N38"])) is not None:
        return verdict
    kind = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps of {kind} the gradients of two losses were added", "those of its own", kind=kind
    )


@check("F92")
def one_side_twice(e: Evidence) -> Fired | Verdict:
    """A network that makes sets of points (or boxes) makes them all in a few places.

    Fires when the minimum of one tensor of distances is taken twice over the same dim, in what is learned from. Or when
    two cross-entropies of pairs, whose labels count the rows, are given the same table.

    WARN one-side-twice: Both terms take the nearest over dim {dim} of the distances {shape}: one side has a near
    neighbour for each of its points, twice, and the other side for none. Fix: distances.min(dim=2) and
    distances.min(dim=1).
    WARN one-side-twice/of-pairs: The loss of {rows} pairs is taken twice of the same table, so one side is asked for
    its partners twice and the other never. Fix: F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own).
    """
    if len(again := e.habits["F92 again"]) >= 3:
        rows = next(iter(again.values()))
        what = f"in {len(again)} steps two cross-entropies were given the same table of {rows} pairs"
        return fires(what, "the table and its transpose", fault="one-side-twice/of-pairs", rows=rows)
    if (verdict := no_habit(e, seen := e.habits["F92"])) is not None:
        return verdict
    shape, dim = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps {shape} was reduced twice over dim {dim}", "once over each", shape=shape, dim=dim
    )


@check("F93")
def straight_through_cancels(e: Evidence) -> Fired | Verdict:
    """The encoder of a VQ-VAE, or what stands before a rounding, learns nothing from what comes after.

    Fires when a tensor is added to its own difference to another one, z + (q - z), and the difference has a gradient;
    or when it has none, and the tensor was looked up or rounded.

    WARN straight-through-cancels: z + (q - z) is q, with q's gradient alone: what goes to z is taken away again,
    because the difference is not detached. Fix: z + (q - z).detach().
    WARN straight-through-cancels/turned-round: q + (z - q).detach() has the value of z and gives q the gradient: what
    follows is trained on numbers that were not looked up or rounded, and what came before learns nothing from it. Fix:
    z + (q - z).detach().
    """
    if len(turned := e.habits["F93 turned"]) >= STEPS:
        what = f"in {len(turned)} steps a {next(iter(turned.values()))} that was looked up or rounded got the gradient"
        return fires(what, "the other one", fault="straight-through-cancels/turned-round")
    if (verdict := no_habit(e, seen := e.habits["F93"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps a {next(iter(seen.values()))} was added to its own difference", "a detach()")


@check("F94")
def partners_elsewhere(e: Evidence) -> Fired | Verdict:
    """A contrastive loss stays high, and what was learned separates nothing.

    Fires when two halves of a batch are put one after the other, their similarities go into a cross-entropy, and its
    labels name the neighbour (0 and 1, 2 and 3) as each row's partner; or when they take turns (stacked along dim 1 and
    flattened) and the partner is said to be half a batch away. Also when the similarities of each row with each
    go into it as they are, and all labels are 0. Rows that are much more alike than the columns are (views of one
    picture) are left alone.

    WARN partners-elsewhere: Row i and row i + {half} are the two views, and the labels pair row 0 with 1, 2 with 3:
    other data are drawn together, and the true partner is pushed away. Fix: (torch.arange(2 * n) + n) % (2 * n).
    WARN partners-elsewhere/turns: The two views take turns, row 0 and 1, 2 and 3, and the partner of row i is said to
    be row i + {half}: other data are drawn together, and the true partner is pushed away. Fix: torch.cat([z1, z2],
    dim=0).
    WARN partners-elsewhere/zeros: All {half} labels are 0, and the partner of row i stands in column i: every row is
    drawn to the first one. Fix: torch.arange(len(logits)); zeros belong to torch.cat([positive, negatives], dim=1).
    """
    if len(turns := e.habits["F94 turns"]) >= STEPS:
        half = next(iter(turns.values()))
        what = f"in {len(turns)} steps rows that take turns were paired with those {half} further on"
        return fires(what, "neighbours", fault="partners-elsewhere/turns", half=half)
    if (verdict := no_habit(e, seen := e.habits["F94"])) is not None:
        return verdict
    half = next(iter(seen.values()))
    if isinstance(half, tuple):
        rows, what = half
        what = f"partners-elsewhere/{what}"
        return fires(f"in {len(seen)} steps all of {rows} labels were 0", "one label each", fault=what, half=rows)
    return fires(
        f"in {len(seen)} steps neighbours were paired in {half} rows and {half} more", "i and i + n", half=half
    )


@check("F95")
def weights_without_a_sum(e: Evidence) -> Fired | Verdict:
    """The loss of a mixture density network falls on and on, and its densities are far from the data's.

    Fires when what a layer answers is added to log-densities as it is, or multiplies densities without a sum of one,
    and the sum over the components follows. Not where the sum (or logsumexp) of these weights is asked for as well. Or
    when the loss is minus a mean of sums over shares (a softmax) times what has a square in it, as log-densities have.

    WARN weights-without-a-sum: The {count} components of a mixture are weighted by numbers that are no shares: their
    sum is free, so the likelihood grows with them and without the data. Fix: F.log_softmax(weights, -1) in front of
    the sum.
    WARN weights-without-a-sum/of-logarithms: The loss is a sum of the {count} components' logarithms by their shares,
    and not the logarithm of their sum, so every component is drawn to all of the data. Fix: loss =
    -torch.logsumexp(log_pi + log_density, -1).mean().
    """
    if (verdict := no_habit(e, seen := e.habits["F95"])) is not None:
        return verdict
    if (count := next(iter(seen.values()))) < 0:
        what = f"in {len(seen)} steps {-count} log-densities were summed by their shares"
        return fires(what, "a logarithm of a sum", fault="weights-without-a-sum/of-logarithms", count=-count)
    return fires(
        f"in {len(seen)} steps {count} components had weights that do not sum to one", "a sum of 1", count=count
    )


@check("S40")
def half_kept(e: Evidence) -> Fired | Verdict:
    """Samples of a flow fit the data in some dimensions, and in the others are plain noise.

    Fires when some columns of the data are given to the normal density exactly as they went in, and the others were
    multiplied by an exponential: each coupling has left the same half as it is.

    WARN half-kept: {kept} of the {columns} columns of the data pass through all couplings of the flow unchanged, so
    nothing is learned of how they are spread. Fix: Turn the halves round in every second coupling (flip = k % 2 == 1).
    """
    if (verdict := no_habit(e, seen := e.habits["S40"])) is not None:
        return verdict
    kept, columns = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps {kept} of {columns} columns came out as they went in", "0", kept=kept, columns=columns
    )


@check("D24")
def states_stand_still(e: Evidence) -> Fired | Verdict:
    """An agent that learns from a replay memory gets no better than one that acts by chance.

    Fires when a batch has one state for two rows or more, on average, and at least twice as many next states. Rows that
    were repeated by a function (repeat, expand) are left alone.

    WARN states-stand-still: {rows} transitions have only {distinct} states, and at least twice as many next states: the
    state is not moved on after a step, so all of an episode are stored with that of its beginning. Fix: obs = next_obs
    after each step.
    """
    if (verdict := no_habit(e, seen := e.habits["D24"])) is not None:
        return verdict
    distinct, rows = next(iter(seen.values()))
    return fires(
        f"{distinct} states in {rows} rows", "about as many as there are next states", distinct=distinct, rows=rows
    )


@check("D25")
def fitted_and_asked(e: Evidence) -> Fired | Verdict:
    """A meta-learner fits each new task's few points, and errs everywhere else.

    Fires when each target of the loss that is differentiated in the end was given to the loss of an inner step, which
    took a derivative with a graph away from the optimizer's weights. Targets that are all alike are left alone.

    WARN fitted-and-asked: The outer loss has the targets that the inner step was fitted to: what is learned is to know
    these points by heart after a step, and not what lies between them. Fix: Take the outer loss on the query set.
    """
    if (verdict := no_habit(e, seen := e.habits["D25"])) is not None:
        return verdict
    return fires(
        f"in {len(seen)} steps inner and outer loss had one target, {next(iter(seen.values()))}", "a query set"
    )


@check("F96")
def rewards_of_the_past(e: Evidence) -> Fired | Verdict:
    """A policy gradient does not learn, though rewards differ and the loss is as it should be.

    Fires when sums r + gamma * sum meet the log-probabilities of an episode, and each later action has one sum more.

    WARN rewards-of-the-past: The returns are summed forward in time, or backwards into a list that was not turned round
    afterwards: each of {steps} actions is credited with what others caused. Fix: for r in reversed(rewards): running =
    r + gamma * running; returns.insert(0, running).
    """
    if (verdict := no_habit(e, seen := e.habits["F96"])) is not None:
        return verdict
    steps = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps later actions had more sums", "fewer", steps=steps)


@check("F97")
def scores_of_what_moves(e: Evidence) -> Fired | Verdict:
    """A policy with a normal distribution does not learn: its mean gets a gradient of zero.

    Fires when log_prob is asked of a sample that its own distribution made by rsample, and each row's is multiplied by
    a number that does not learn and is negative for some.

    WARN scores-of-what-moves: The actions come from rsample(), so they move with the mean, and their log_prob does not
    hang on it: the gradient of the score cancels out. Fix: dist.sample(), or action.detach() in log_prob.
    """
    if (verdict := no_habit(e, seen := e.habits["F97"])) is not None:
        return verdict
    return fires(f"in {len(seen)} steps log_prob of an rsample() was multiplied by an advantage", "a sample()")


@check("F98")
def class_as_padding(e: Evidence) -> Fired | Verdict:
    """A tagger finds names everywhere: it never answers that a word is none.

    Fires when labels that ignore_index leaves out stand between others in their rows, as a fifth of these or more, and
    at the ends as padding does, or are more than half of a map. Only for classes (0 and up, 64 at most).

    WARN class-as-padding: ignore_index={label} leaves out a class of the answer, and not only what is unknown or
    padding: {share:.0%} of the labels (within rows) are not trained on. Fix: Mark those alone with -100, which is the
    default ignore_index.
    """
    if (verdict := no_habit(e, seen := e.habits["F98"])) is not None:
        return verdict
    label, share = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps {share:.0%} of the labels (within rows) were {label}", "0%", label=label, share=share
    )


@check("D26")
def shifted_without_labels(e: Evidence) -> Fired | Verdict:
    """A model that labels each time of a series stays poor, and better without augmentation.

    Fires when a series is rolled along its times before it is given to the model, and a target with as many times was
    not, nor put together anew (cat, gather). A shift by one is left alone: it makes a decoder's input.

    WARN shifted-without-labels: The series is shifted in time (roll) and its labels, one for each of {times} times, are
    not, so each time is trained with the label of another. Fix: Roll the labels by the same number.
    """
    if (verdict := no_habit(e, seen := e.habits["D26"])) is not None:
        return verdict
    times = next(iter(seen.values()))[1]
    return fires(f"in {len(seen)} steps a series of {times} times was rolled, and its target not", "both", times=times)


@check("F99")
def least_of_masked(e: Evidence) -> Fired | Verdict:
    """A triplet loss stays at its margin: the nearest negative is always at distance zero.

    Fires when numbers that learn are multiplied by a mask, and their minimum over a dim is one of the masked zeros in
    nearly each row. Or when the least is taken of a table of distances of which only the diagonal was put out of the
    way, though a table of rows of one class was put on distances as well.

    WARN least-of-masked: The minimum is taken of numbers times a mask, and what is masked is 0, which is less than any
    distance: the answer is always 0 and has no gradient. Fix: distances.masked_fill(mask == 0, float("inf")).min(dim).
    WARN least-of-masked/own-class: The hardest negative of a row may be of its own class: only the row itself was left
    out of the minimum, so what belongs together is pushed apart. Fix: distances.masked_fill(labels[:, None] == labels,
    float("inf")).min(1).
    """
    if (verdict := no_habit(e, seen := e.habits["F99"])) is not None:
        return verdict
    if next(iter(seen.values())) == "itself":
        what = f"in {len(seen)} steps the least was taken of all distances but the diagonal"
        return fires(what, "those to other classes", fault="least-of-masked/own-class")
    return fires(f"in {len(seen)} steps the minimum of {next(iter(seen.values()))} was a masked zero", "a distance")


@check("D27")
def labels_in_order(e: Evidence) -> Fired | Verdict:
    """A classifier's loss falls to nothing and jumps up again, and it answers with the class it saw last.

    Fires when the labels of cross_entropy rise within each batch and from batch to batch, in all steps that are looked
    at, where a DataLoader gives the data and a batch has half of the classes at most. Also when each row's partner is
    to be told from those of the other rows of the batch, and a quarter of these or more are the same partner.

    WARN labels-in-order: The data come sorted by class: a batch of {rows} has {classes} of the classes, and the next
    ones follow. Fix: DataLoader(..., shuffle=True).
    WARN labels-in-order/negatives: {share:.0%} of a row's negatives are its own partner again, which the loss pushes
    away and draws near at once: the data come sorted by it, or have few partners. Fix: DataLoader(..., shuffle=True),
    and mask the columns of the same id: logits.masked_fill(same & ~eye, -inf).
    """
    tables = [n.fed.doubled for calls in judged(e).values() for n in calls if n.name == "cross_entropy"]
    if len(tables) >= STEPS and min(tables) >= DOUBLED:
        share = sum(tables) / len(tables)
        what = f"in {len(tables)} tables of a batch {share:.0%} of the other columns hold what the row's own does"
        return fires(what, "partners that differ", fault="labels-in-order/negatives", share=share)
    if (verdict := no_habit(e, seen := e.habits["D27"])) is not None:
        return verdict
    rows, classes = next(iter(seen.values()))
    return fires("labels rise within each batch and from batch to batch", "all classes", rows=rows, classes=classes)


@check("D32")
def made_of_other_labels(e: Evidence) -> Fired | Verdict:
    """A conditional GAN makes good samples, and of any class whatever label it is given.

    Fires when a network is given noise and labels, and what it makes goes into another optimizer's network together
    with other labels, in each call that is seen, and those are the labels with which that network is given the real
    data. Both are ids of tables with as many rows, or one-hot with as many columns. Translators, which are given data,
    are left alone, and so is a network that is shown the right labels as well, or the same ones by other numbers.

    WARN made-of-other-labels: The generator is given one set of {rows} labels, and the discriminator sees what it
    made beside another, that of the real data, so the generator learns to care for no label. Fix: discriminator(fake,
    made_for), with the labels that the generator was given.
    """
    if len(e.optimizers) < 2:
        return not_applicable("there are no two optimizers")
    if (verdict := no_habit(e, seen := e.habits["D32"])) is not None:
        return verdict
    rows = next(iter(seen.values()))
    return fires(
        f"in {len(seen)} steps fakes were judged under labels that they were not made for", "the same", rows=rows
    )


@check("F134")
def angles_along_another_axis(e: Evidence) -> Fired | Verdict:
    """A loss of cosines falls, and the directions or features that are learned are not those of the targets.

    Fires when F.cosine_similarity was given tensors of three or more dims and no dim, which is 1 then, and the features
    lie last: both sides come from a lookup, a layer norm or a recurrent network, or one holds vectors of length one
    along the last axis. Or when one side has a single number along the axis of the angle and the other several. Or when
    what F.normalize made to length one along dim 1 by default meets such vectors, or its products are summed along the
    last axis. Who writes dim=1 is left alone, and so are maps and what was transposed.

    WARN angles-along-another-axis: cosine_similarity takes dim=1 by default, and the features of {shape} lie last: the
    angles are those of each feature along dim 1. Fix: F.cosine_similarity(a, b, dim=-1).
    WARN angles-along-another-axis/one-number: The cosine of {shape} and {other} is taken along an axis in which one
    side has a single number, so it is no angle of two vectors. Fix: F.cosine_similarity(a, b, dim=-1).
    WARN angles-along-another-axis/lengths: F.normalize takes dim=1 by default, and the features of {shape} lie last, so
    no vector has length one. Fix: F.normalize(x, dim=-1).
    """
    if len(lengths := e.habits["F134 lengths"]) >= STEPS:
        shape = next(iter(lengths.values()))
        what = f"in {len(lengths)} steps lengths of {shape} were made one along dim 1, and used along the last"
        return fires(what, "one axis", fault="angles-along-another-axis/lengths", shape=shape)
    if (verdict := no_habit(e, seen := e.habits["F134"])) is not None:
        return verdict
    kind, shape, other = next(iter(seen.values()))
    fault = "angles-along-another-axis" + ("/one-number" if kind else "")
    what = f"in {len(seen)} steps the cosine of {shape} and {other} was not taken along the features"
    return fires(what, "the axis of the features", fault=fault, shape=shape, other=other)


@check("F135")
def logarithm_summed_over_rows(e: Evidence) -> Fired | Verdict:
    """A normalizing flow or a predicted spread runs to its bounds, and the likelihood of new data is bad.

    Fires when numbers of rows that layers made, and of which exponentials or logarithms were taken, were summed to
    one number over all rows and dims, this was added to a vector with a number for each row, and the mean of that is
    the loss. Sums with a factor, or divided by the rows, and logarithms of weights alone are left alone.

    WARN logarithm-summed-over-rows: A sum over all {rows} rows is added to the number of each row, so the term weighs
    {rows} times too much. Fix: x.flatten(1).sum(dim=1), one number for each row.
    """
    if (verdict := no_habit(e, seen := e.habits["F135"])) is not None:
        return verdict
    rows = next(iter(seen.values()))
    return fires(f"in {len(seen)} steps a sum over {rows} rows was added to each of them", "sums of a row", rows=rows)
