"""What is wired wrongly though every part is sound: B8, S21, N26, N27, D9, F22, D10.

Footgun: each of these is legal, and somewhere somebody means it. So they ask for a measured effect, and most of them
warn only.
"""

from loopdoctor import graphs
from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.losses import judged
from loopdoctor.evidence import Backward, Evidence, Step
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown
from loopdoctor.places import Place

STEPS = 3
OF_ROWS, ROWS, SELDOM, PULLED = 5e-3, 32, 0.2, 5e-3  # weight_decay; rows; of these not asked for; taken in a step
DIVIDES, DIVIDED = ("Adam", "NAdam", "RAdam", "Adamax"), 0.2  # by the size of the gradient; its share, from which on


@check("B8")
def nothing_for_the_optimizer(e: Evidence) -> Fired | Verdict:
    """Losses are differentiated and the optimizer steps, and the weights stay exactly as they were.

    Fires when an optimizer made steps, and no tensor of it had a gradient at any of them. An error where there is no
    other that had some. Where what hangs on its tensors was cut off before the loss, the line of the cut is named.

    ERROR or WARN no-gradient-at-the-steps: No tensor in the optimizer got a gradient: the losses were computed with
    other tensors (a deep copy, an adapted copy, weights that were replaced), and their gradients stay there. Fix:
    Compute the loss with the tensors that the optimizer holds, or carry the gradients over (p.grad = copy.grad) before
    the step.
    ERROR or WARN no-gradient-at-the-steps/cut-off: What hangs on the tensors of {kind} was cut off by detach() (or
    .data) before the loss, so the loss does not reach them. Fix: Take the loss on the tensor itself, without detach().
    The detach belongs where the other network learns.
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
        cuts = _cut_off(e, number, optimizer.ids)
        twice = any(optimizer.ids <= other.ids for n, other in enumerate(e.optimizers) if n != number)
        return fires(
            f"none of the {len(optimizer.ids)} tensors of {optimizer.kind.__name__} had a gradient in its {len(mine)} "
            f"steps, and {len(backwards)} losses were differentiated",
            "gradients on the tensors that an optimizer holds",
            WARN if twice or len(mine) < len(steps) else ERROR,
            f"no-gradient-at-the-steps{'/held-twice' if twice else '/cut-off' if cuts else ''}",
            at=cuts,
            kind=optimizer.kind.__name__,
        )
    return OK


def _cut_off(e: Evidence, optimizer: int, ids: set[int]) -> list[Place]:
    """Lines that cut something off from the tensors of an optimizer, before the backward that its step follows."""
    found: dict[Place, None] = {}
    loss = None
    for event in e.events:
        if isinstance(event, Backward):
            loss = event.place
        elif isinstance(event, Step) and event.optimizer == optimizer and loss is not None:
            found |= dict.fromkeys(place for place, weights in e.cut_off.get(loss, ()) if weights & ids)
    return list(found)


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


def _along(given: tuple[int, ...], loss: tuple[int, ...]) -> bool:
    """Whether the rows of the loss stand first in what was given, and could not be its length."""
    if given[:1] == given[1:2]:
        return False
    return len(given) == 3 and min(given[:2]) > 1 and bool(loss) and loss[0] == given[0] and given[1] not in loss[1:]


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
