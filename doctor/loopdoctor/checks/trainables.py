"""Who trains, and which optimizer holds it: S1 to S4, S8, S18, S19, S22, S30, N24.

Footgun: several optimizers are normal (Muon for matrices, AdamW for the rest). What counts is the
union of all that stepped. A group may rest on purpose until a schedule wakes it, so only one that
rests in every step is named.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loopdoctor import graphs, measures, owners, places
from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import (
    Backward,
    Entropy,
    Evidence,
    Gradients,
    Step,
    asked,
    is_adapter,
    weight_of,
)
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

LONE = 3  # rounds that left gradients on a layer of its own
PACKED = (
    "Linear4bit",
    "LinearNF4",
    "LinearFP4",
    "Linear8bitLt",
    "QuantLinear",
    "WQLinear_GEMM",
    "HQQLinear",
)
LAYERS = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
PLAIN = (torch.nn.Parameter, Tensor)
LEAST = 256  # elements, from which on a uniform distribution can be told from others
MISSPELT = re.compile(r"requires?d?_?(grad|gard|gradient)s?_?", re.IGNORECASE)
NOT_TRANSPOSED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
FEW, GENTLE = 4, 0.6  # groups; the factor from one to the next of a decay by layers
NOTHING = 2e-4  # of the largest rate
NEAR = 5  # nodes of what a module keeps of a parameter
INSIDE, LISTED = 2, 1024  # lists in lists that are looked into; things in one and those in it


def _fires_at_optimizers(e: Evidence, *seen, **blanks) -> Fired:
    """Say what was seen, and name the lines that made the optimizers."""
    return fires(*seen, at=[places.made(o.object) for o in e.optimizers], **blanks)


@check("S1")
def nothing_trainable(e: Evidence) -> Fired | Verdict:
    """Return the loss stays where it is and no parameter changes, or backward says that no element
    requires a gradient.

    Fires when not one parameter of the model requires a gradient. A run that trains something
    outside the model (a soft prompt) holds those tensors in its optimizer and is left alone.

    ERROR nothing-trainable: Nothing can learn: the whole model is frozen. Fix: Unfreeze what should
    learn.
    ERROR nothing-trainable/adapter: Nothing can learn: all {count} adapter tensors are frozen: the
    adapter was loaded with is_trainable=False (the default of PeftModel.from_pretrained), or the
    model was prepared for k-bit training after it was attached. Fix: Load it with
    is_trainable=True, and prepare before attaching.
    WARN nothing-trainable/tied-head: Next to nothing can learn, only {names}: the output layer
    shares its weight with the embedding (tied), and was frozen with it. Fix: Give it a weight of
    its own: model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone()), with
    tie_word_embeddings = False.
    """
    if e.model is None:
        return unknown("no model was seen")
    every = e.parameters()
    left, head = e.trainable(), e.head()
    norm = all(
        "norm" in type(owner).__name__.lower() for name, owner in e.owners().items() if name in left
    )
    norm = (
        norm
        and left
        and len(left) <= 2
        and all(p.dim() == 1 for p in left.values())
        and len(e.models) == 1
    )
    if (
        norm
        and head is not None
        and head is e.embedding()
        and not head.requires_grad
        and len(every) > 8
    ):
        what = (
            f"{len(left)} of {len(every)} parameter tensors require a gradient: {', '.join(left)}"
        )
        fault = "nothing-trainable/tied-head"
        return fires(what, "the output layer among them", WARN, fault, names=", ".join(left))
    # what is frozen after the training is nothing
    if e.trainable() or any(g.norms for g in e.of(Gradients)):
        return OK
    if e.optimized() - {id(p) for p in every.values()}:
        return not_applicable("the optimizer trains something outside the model")
    hooked = any(getattr(m, "_require_grads_hooks", None) for _, m in e.modules())
    if (
        not e.optimizers
        and not hooked
        and any(b.requires_grad and not b.leaf for b in e.of(Backward))
    ):
        return not_applicable(
            "no optimizer, and the loss hangs on something outside the model (its input)"
        )
    adapters = sum(is_adapter(name) for name in every)
    return fires(
        f"0 of {len(every)} parameter tensors require a gradient",
        "at least one",
        fault="nothing-trainable/adapter" if adapters else "nothing-trainable",
        count=adapters,
    )


@check("S2")
def empty_optimizer(e: Evidence) -> Fired | Verdict:
    """Return the loss wanders but never falls, the logged gradient norm is 0.0; or: optimizer got
    an empty parameter list.

    Fires when all optimizers together hold not one parameter, whether they stepped or were only
    named. torch refuses an empty list but accepts groups that are empty, which is what the HF
    Trainer makes of a frozen model. One empty optimizer beside a full one (no matrices for Muon,
    say) is nothing.

    ERROR empty-optimizer: The optimizer was given no parameter, so its step changes nothing: it was
    built while everything was frozen, from a generator already used up, or with a filter that no
    name passes. Fix: Build the optimizer last, from [p for p in model.parameters() if
    p.requires_grad], as a list.
    """
    refused = "empty parameter list" in e.complaint
    if not e.optimizers and not refused:
        return unknown("no optimizer was seen")
    if e.optimized() and not refused:
        return OK
    groups = sum(len(o.object.param_groups) for o in e.optimizers if o.object is not None)
    where = (
        "torch refused to make an optimizer of an empty list"
        if refused
        else f"0 parameters in {groups} groups"
    )
    return _fires_at_optimizers(
        e,
        f"{where}; the model has {len(e.trainable())} trainable tensors",
        "every trainable parameter in an optimizer",
    )


@dataclass
class Coverage:
    """Which trainable parameters with a gradient the optimizers hold, and what else these hold."""

    held: dict[str, Tensor]
    missing: dict[str, Tensor]
    foreign: set[int]  # ids in optimizers that belong to no model seen
    dead: set[int]  # foreign ones that never had a gradient


def coverage(e: Evidence) -> Coverage:
    """Compare what got a gradient with what the optimizers hold.

    Left out: tensors updated as they are made (a hook after accumulation), those that moved all the
    same (fp32 masters in the optimizer, updates by hand), and a model that is in the graph as a
    teacher, of which F8 speaks.
    """
    got = {name for g in e.of(Gradients) for name, norm in g.norms.items() if norm is not None}
    mine, trainable = e.optimized(), e.trainable()
    held = {n: p for n, p in trainable.items() if id(p) in mine}
    aside = {id(p) for m in in_graph_only(e) for p in m.parameters()}
    missing = {
        n: p
        for n, p in trainable.items()
        if n in got
        and id(p) not in mine
        and id(p) not in aside
        and not getattr(p, "_post_accumulate_grad_hooks", None)
    }
    followed = [n for n in missing if n in e.first]
    if any(moved(e, n) for n in followed):
        missing = {n: p for n, p in missing.items() if n in e.first and not moved(e, n)}
        # something outside torch's optimizers is updating them
        if len(missing) < len(followed) / 2:
            missing = {}
    every = {id(p) for m in (*e.models, *e.teachers) for p in m.parameters()}
    foreign = mine - every
    live = set().union(*(o.live for o in e.optimizers)) if e.optimizers else set()
    return Coverage(held, missing, foreign, foreign - live)


def moved(e: Evidence, name: str) -> bool:
    """Whether a followed parameter differs from what it was at the start."""
    now, (_, first) = measures.strided(e.parameters()[name]), e.first[name]
    return now.shape != first.shape or not torch.equal(now, first.to(now.device))


def in_graph_only(e: Evidence) -> list:
    """Models with the logits of a language model of which no optimizer holds anything, beside one
    that is trained.
    """
    mine = e.optimized()
    idle = [m for m in e.models if not any(id(p) in mine for p in m.parameters())]
    if len(idle) == len(e.models):
        return []
    sizes = {c.vocabulary for c in e.forwards if c.vocabulary and not _called(c, idle)}
    return [m for m in idle if any(c.vocabulary in sizes for c in e.forwards if _called(c, [m]))]


def _called(call, models: list) -> bool:
    module = call.module()
    return any(module is m for m in models)


@check("S3")
def optimizer_misses_trainables(e: Evidence) -> Fired | Verdict:
    """Gradients are there and the loss is printed, but it does not fall, or only part of the model
    learns.

    Fires when a parameter requires a gradient, gets one, and no optimizer holds it. It is an error
    where nobody can want it: all adapters left out, an optimizer full of tensors from elsewhere, an
    old embedding kept in place of the new one, Muon with nothing for the embeddings. Otherwise (a
    probe on a backbone that was not frozen) a warning, and so is what only shows after the watched
    steps: layers that are unfrozen later, a part that is replaced. A model in eval mode of which no
    optimizer holds anything rests behind what they do hold: a picture, a latent, a prompt.

    WARN optimizer-misses-trainables: Part of the model is trainable and gets gradients, but no
    optimizer was given it: a filter or a list of groups left it out, it was added after the
    optimizer was built, or it was meant to be frozen. Fix: Give those parameters to an optimizer,
    or freeze them with requires_grad_(False) if they should stay.
    WARN optimizer-misses-trainables/of-the-loss: The loss or head is a module with weights of its
    own (log variances, centres, a temperature), which get gradients and are in no optimizer, so
    they stay as they began. Fix: Give the optimizer [*model.parameters(), *criterion.parameters()].
    WARN optimizer-misses-trainables/lone-layer: A layer that stands by itself beside the model
    ({name}) gets gradients and is in no optimizer, so it stays as it began. Fix: Give the optimizer
    [*model.parameters(), *layer.parameters()], or freeze the layer.
    WARN optimizer-misses-trainables/lone-parameter: A parameter of its own beside the model (of
    shape {shape}) gets gradients and is in no optimizer, so it stays as it began. Fix: Give the
    optimizer [*model.parameters(), parameter].
    ERROR optimizer-misses-trainables/holds-the-teacher: The optimizer was given the parameters of
    the teacher (or reference), and the model that gets the gradients is in none. Fix: Build the
    optimizer from the student's parameters.
    ERROR optimizer-misses-trainables/held-twice: Two optimizers hold the same network, and another
    one, which gets gradients, is in none: the second optimizer was meant for it. Fix: Give each
    optimizer the parameters of its own network.
    ERROR optimizer-misses-trainables/holds-another-instance: The optimizer was built on another
    instance of the model (a deepcopy, the model before it was loaded again or sharded, weights
    replaced by assign=True), so its steps change tensors nobody uses. Fix: Build the optimizer from
    the very model that is called in the loop, after it has its final weights.
    ERROR or WARN optimizer-misses-trainables/adapter-came-later: The optimizer holds none of the
    adapter's (LoRA) tensors: it was built before the adapter was attached (get_peft_model, or the
    replacement of layers by LoRA layers). Fix: Attach the adapter first, then build the optimizer
    from what is trainable.
    ERROR optimizer-misses-trainables/ends-replaced: The embedding or output layer was replaced
    after the optimizer was built (resize_token_embeddings makes new tensors), and the optimizer
    still holds the old one. Fix: Resize the embeddings first, then build the optimizer.
    ERROR or WARN optimizer-misses-trainables/part-replaced: Part of the model was replaced after
    the optimizer was built, and the optimizer still holds the tensors that were there before. Fix:
    Finish all changes to the model, then build the optimizer.
    ERROR optimizer-misses-trainables/muon-alone: Muon alone is training: it takes only hidden
    matrices, and no second optimizer was built for embeddings, output layer and norms, so these
    stay as they are. Fix: Put everything Muon does not take into an AdamW and step both.
    """
    if e.model is None or not e.stepped:
        return unknown("no model, or no optimizer step, was seen")
    if not e.optimized():
        return not_applicable("no optimizer holds anything")
    if owners.resting(e):
        return not_applicable(
            "the model rests in eval mode, and the optimizer holds what stands in front of it"
        )
    if (left := owners.forgotten(e)) is not None:
        return _fires_at_optimizers(
            e,
            f"two optimizers hold the same tensors, and {type(left).__name__}, which gets "
            "gradients, is in none",
            "each network in an optimizer of its own",
            ERROR,
            "optimizer-misses-trainables/held-twice",
        )
    c = coverage(e)
    if not c.missing:
        weights = loss_weights(e)
        if not weights and (lone := lone_layers(e)):
            return _fires_at_optimizers(
                e,
                f"{len(lone)} layers of their own got gradients and are in no optimizer: "
                f"{', '.join(lone[:3])}",
                "0 missing over all optimizers together",
                WARN,
                "optimizer-misses-trainables/lone-layer",
                name=lone[0],
            )
        lone = next(iter(e.habits["S3 parameter"].values()), {})
        if not weights and (
            shapes := [shape for p, shape in lone.items() if p not in e.optimized()]
        ):
            what = f"{len(shapes)} parameters of no module got gradients and are in no optimizer"
            needed = "0 missing over all optimizers together"
            return _fires_at_optimizers(
                e, what, needed, WARN, "optimizer-misses-trainables/lone-parameter", shape=shapes[0]
            )
        if not weights:
            return OK
        return _fires_at_optimizers(
            e,
            f"{len(weights)} tensors that got a gradient are in no optimizer: "
            f"{', '.join(weights[:3])}",
            "0 missing over all optimizers together",
            WARN,
            "optimizer-misses-trainables/of-the-loss",
        )
    severity, fault = _reason(e, c)
    names = ", ".join(list(c.missing)[:3]) + (" ..." if len(c.missing) > 3 else "")
    total = len(c.held) + len(c.missing)
    stale = (
        f"; it holds {len(c.dead)} tensors of no model seen, none with a gradient" if c.dead else ""
    )
    return _fires_at_optimizers(
        e,
        f"{len(c.missing)} of {total} trainable tensors that got a gradient are in no "
        f"optimizer: {names}{stale}",
        "0 missing over all optimizers together",
        severity,
        fault,
    )


def loss_weights(e: Evidence) -> list[str]:
    """Weights of losses that have a gradient, which no optimizer holds and nobody has written
    to.
    """
    found, mine = [], e.optimized()
    for holder, versions in e.criteria.values():
        module = holder()
        for name, p in module.named_parameters() if module is not None else ():
            still = p.requires_grad and p.grad is not None and versions.get(name) == p._version
            if still and id(p) not in mine and not getattr(p, "_post_accumulate_grad_hooks", None):
                found.append(f"{type(module).__name__}.{name}")
    return found


def lone_layers(e: Evidence) -> list[str]:
    """Layers without parts that were called by themselves, got gradients, are in no optimizer, and
    that nobody wrote to.
    """
    mine, found = e.optimized(), []
    for layer in e.teachers:
        ps, versions = list(layer.parameters()), e.lone.get(id(layer), {})
        still = len(set(versions.values())) == 1
        if len(versions) >= LONE and still and not any(id(p) in mine for p in ps):
            found.append(f"{type(layer).__name__}{tuple(ps[0].shape)}")
    return found


def _reason(e: Evidence, c: Coverage) -> tuple[str, str]:
    """Severity and fault of S3.

    The order is the meaning: each question is only asked where those before it were denied, and the
    surest sign comes first. What the optimizer holds tells more than what it lacks, so first come
    optimizers that hold nothing of this model (the teacher's tensors, another instance's), then a
    whole kind that is missing (adapters), then tensors replaced after it was built, at the two ends
    before anywhere else, because there it is sure. Muon alone explains what is missing only if
    nothing was replaced. What is left may be on purpose.
    """
    adapters = [n for n in e.trainable() if is_adapter(n)]
    ends = {id(x) for x in (e.embedding(), e.head()) if x is not None}
    only_ends = all(id(p) in ends or _beside(n, e, ends) for n, p in c.missing.items())
    muon = [o for o in e.optimizers if "muon" in o.kind.__name__.lower()]
    alive = bool(c.foreign - c.dead)
    above = {id(p) for t in e.teachers for p in t.parameters()}
    name = "optimizer-misses-trainables"
    if not c.held and e.optimized() <= above:
        return ERROR, f"{name}/holds-the-teacher"
    if c.dead and c.dead == e.optimized() and not _head_alone(e, c):
        return ERROR, f"{name}/holds-another-instance"
    if (
        adapters
        and all(n in c.missing for n in adapters if n in c.missing or n in c.held)
        and not alive
    ):
        if any(is_adapter(n) for n in c.missing):
            others = [n for n in e.trainable() if not is_adapter(n)]
            # a stage that trains something else
            chosen = 0 < sum(n in c.held for n in others) < len(others)
            return WARN if chosen else ERROR, f"{name}/adapter-came-later"
    if c.dead and only_ends:
        return ERROR, f"{name}/ends-replaced"
    if c.dead and not alive:
        # a WARN: it may be for a later stage
        return ERROR if _replaced(e, c) else WARN, f"{name}/part-replaced"
    if (
        muon
        and len(muon) == len(e.optimizers)
        and any(id(p) in ends or p.dim() < 2 for p in c.missing.values())
    ):
        return ERROR, f"{name}/muon-alone"
    return WARN, name


def _head_alone(e: Evidence, c: Coverage) -> bool:
    """Whether all that the optimizer holds for nothing is as many tensors as are missing, some of
    another shape, while the rest of the model is frozen: a head that was replaced.
    """
    held = [p for o in e.optimizers if o.object for g in o.object.param_groups for p in g["params"]]
    shapes = [sorted(tuple(p.shape) for p in side) for side in (held, c.missing.values())]
    return (
        len(e.trainable()) < len(e.parameters())
        and len(held) == len(c.missing)
        and shapes[0] != shapes[1]
    )


def _replaced(e: Evidence, c: Coverage) -> bool:
    """Whether what the optimizer holds for nothing has the shape, but for the number of rows, of
    something missing.
    """
    held = [p for o in e.optimizers if o.object for g in o.object.param_groups for p in g["params"]]
    return any(
        p.dim() == m.dim() and (p.shape == m.shape or p.dim() > 1 and p.shape[1:] == m.shape[1:])
        for p in held
        if id(p) in c.dead
        for m in c.missing.values()
    )


def _beside(name: str, e: Evidence, ends: set[int]) -> bool:
    """Whether a parameter (a bias) belongs to the same module as one of the two ends."""
    return any(id(p) in ends for p in e.owners()[name].parameters(recurse=False))


@check("S4")
def stale_in_optimizer(e: Evidence) -> Fired | Verdict:
    """Memory is higher than it should be, and part of what the optimizer holds belongs to no model.

    Fires for tensors in an optimizer that are in no model seen and never got a gradient. A
    learnable temperature or a soft prompt beside the model gets one and is left alone.

    WARN stale-in-optimizer: The optimizer still holds tensors that the model no longer uses: a
    layer was replaced, or weights were tied, after it was built. Fix: Build the optimizer after the
    last change to the model.
    """
    if e.model is None or not e.stepped:
        return unknown("no model, or no optimizer step, was seen")
    ours = {id(p) for m in (*e.models, *e.teachers) for p in m.parameters()}
    # of a model trained later, which was never seen
    elsewhere = [o.ids for o in e.optimizers if not o.ids & ours]
    dead = coverage(e).dead - set().union(*elsewhere)
    if not dead:
        return OK
    return _fires_at_optimizers(
        e,
        f"{len(dead)} of {len(e.optimized())} tensors in the optimizers belong to no model "
        "seen and got no gradient",
        "0",
    )


@check("S8")
def quantised_without_adapter(e: Evidence) -> Fired | Verdict:
    """Return a 4-bit or 8-bit model "fine-tunes": the loss hardly falls, or everything is frozen.

    Fires when linear layers are packed, so that they cannot train, and no adapter was attached:
    then only what happened to stay in floating point (norms, embeddings) learns, or nothing. A new
    head on a frozen packed base, or a soft prompt outside of it, is a choice somebody made and is
    left alone.

    ERROR or WARN quantised-without-adapter: The model is quantised (4-bit or 8-bit) and has no
    adapter (LoRA): packed weights cannot train, so at best norms and embeddings do. Fix:
    prepare_model_for_kbit_training, then get_peft_model with a LoRA configuration, then the
    optimizer.
    """
    if e.model is None:
        return unknown("no model was seen")
    packed = [n for n, m in e.modules() if type(m).__name__ in PACKED and not _floats(m)]
    if not packed:
        return not_applicable("no layer is quantised")
    trainable, every = e.trainable(), e.parameters()
    if any(is_adapter(n) for n in every):
        return OK if trainable else not_applicable("there are adapters, but frozen: see S1")
    if e.optimized() - {id(p) for p in every.values()}:
        return not_applicable("the optimizer trains something outside the model")
    into, norms = e.embedding(), [n for n, p in trainable.items() if p.dim() == 1]
    nobody_chose = bool(norms) and into is not None and into.requires_grad
    if trainable and not norms:
        return OK
    return fires(
        f"{len(packed)} quantised layers, 0 adapters; {len(trainable)} tensors train"
        + (f", {len(norms)} of them vectors of norms or biases" if norms else ""),
        "an adapter beside the quantised layers",
        ERROR if nobody_chose or not trainable else WARN,
    )


def _floats(module: torch.nn.Module) -> bool:
    """Return a layer of somebody's own with such a name, whose weight is trained as it is and only
    rounded on its way.
    """
    weight = weight_of(module)
    return (
        type(weight) is torch.nn.Parameter and weight.is_floating_point() and weight.requires_grad
    )


@check("S22")
def frozen_at_start(e: Evidence) -> Fired | Verdict:
    """Transfer from a pretrained model gives no more than a random one; or adapters train and
    change nothing.

    Looks at weights of linear and convolution layers that are frozen inside a model that trains.
    Fires when two or more of them, and half of the model, have exactly the distribution that torch
    draws at the start, or when a frozen matrix that is no layer's own weight holds nothing but
    zeros. Copies of layers that train beside them (a target network), layers of a teacher, layers
    with adapters, and an adapter that rests while another one trains are left alone. One layer is
    enough where it makes the scores of the classes and nothing else is frozen, but that may be
    meant (FedBABU). Of a model for classes in transformers that trains by adapters, the head is
    looked at: whether it is frozen as it was drawn.

    WARN frozen-at-start: {count} frozen layers hold the random numbers that torch drew at the
    start: no trained weights came into them. Fix: Load with strict=True and read what
    load_state_dict returns: a prefix in the names ("module.") and strict=False load nothing.
    WARN frozen-at-start/zero: {name} is frozen at zero, so it gives nothing and never will: it was
    made to be trained. Fix: Freeze the base before the adapters are put in, or unfreeze them by
    name.
    NOTE frozen-at-start/scores: {name}, which makes the scores of the classes, is frozen at its
    random start, and what comes before it trains. Fix: Freeze the backbone, and let the head learn,
    unless it is to stay random.
    WARN frozen-at-start/head: The new head of the classes is frozen with the base, so its random
    numbers stay as they were drawn. Fix: LoraConfig(task_type="SEQ_CLS"), or modules_to_save with
    the head's name.
    """
    ps, learns = e.parameters(), e.optimized()
    if e.model is None or not e.trainable():
        return unknown("no model was seen that trains")
    if (
        any(map(is_adapter, e.trainable()))
        and (head := _new_head(e.model, ps, e.called)) is not None
    ):
        return fires(
            f"{head} is frozen, and as it was drawn",
            "a head that trains",
            fault="frozen-at-start/head",
        )
    frozen = {
        n: p for n, p in ps.items() if not p.requires_grad and id(p) not in learns and p.dim() > 1
    }
    frozen = {
        n: p
        for n, p in frozen.items()
        if p.is_floating_point() and p.layout == torch.strided and not p.is_meta
    }
    if not frozen:
        return not_applicable("no part of the model is frozen")
    owners = e.owners()
    for name, p in frozen.items():
        own = not isinstance(owners[name], (*LAYERS, torch.nn.Embedding))
        if own and p.numel() > 1 and not p.any() and not _rests(e, name):
            return fires(
                f"{name} {tuple(p.shape)} is frozen and zero",
                "trained",
                fault="frozen-at-start/zero",
                name=name,
            )
    layers = {
        n: p for n, p in frozen.items() if isinstance(owners[n], LAYERS) and p.numel() >= LEAST
    }
    shared = {id(p) for teacher in e.teachers for p in teacher.parameters()}
    layers = {n: p for n, p in layers.items() if _alone(n, p, ps) and id(p) not in shared}
    if any(_has_frozen_layer(name, layers) for name in e.trainable()):
        return OK  # adapters: what they are tried on may be random
    drawn = [n for n, p in layers.items() if _as_drawn(p)]
    classes = {n.fed.classes for n in e.of(Entropy) if n.fed is not None}
    if len(frozen) == len(drawn) == 1 and len(ps[drawn[0]]) in classes:
        what = f"{drawn[0]} is frozen: uniform up to 1 / sqrt(inputs), as torch draws it"
        return fires(what, "a head that trains", fault="frozen-at-start/scores", name=drawn[0])
    if len(drawn) < 2 or 2 * sum(ps[n].numel() for n in drawn) < sum(
        p.numel() for p in ps.values()
    ):
        return OK
    names = ", ".join(drawn[:3])
    return fires(
        f"{names}: uniform up to 1 / sqrt(inputs), as torch draws them",
        "trained weights",
        count=len(drawn),
    )


def _rests(e: Evidence, name: str) -> bool:
    """Whether it belongs to one of several adapters, and another of them is active or trains in its
    place: B.0 beside B.1, or adapters.0.B beside adapters.1.B.
    """
    held, _, key = name.rpartition(".")
    around, _, _ = held.rpartition(".")
    layers, ps = dict(e.modules()), e.parameters()
    active, others, several = (
        getattr(layers.get(around), "active_adapters", None),
        layers.get(held),
        layers.get(around),
    )
    if isinstance(others, torch.nn.ParameterDict):
        return bool(active and key not in active) or any(
            p.requires_grad for k, p in others.items() if k != key
        )
    if isinstance(others, torch.nn.ParameterList):
        begin, end = f"{held}.", ""
    elif isinstance(several, (torch.nn.ModuleList, torch.nn.ModuleDict)) and not any(
        others.children()
    ):
        begin, end = f"{around}.", f".{key}"  # a layer with an adapter of its own holds more
    else:
        return False
    like = [
        p
        for n, p in ps.items()
        if n.startswith(begin) and n.endswith(end) and n.count(".") == name.count(".")
    ]
    return any(p.requires_grad and p.shape == ps[name].shape for p in like)


def _from(weight: Tensor, tables: list[Tensor | None]) -> bool:
    """Whether its first row is one of a table: a head of words."""
    fit = [
        t
        for t in tables
        if t is not None and t.shape[1:] == weight.shape[1:] and t.device == weight.device
    ]
    return any(bool((t == weight[:1]).all(1).any()) for t in fit)


def _new_head(model: torch.nn.Module, ps: dict[str, Tensor], called: dict[int, int]) -> str | None:
    """Return the name of a frozen head of classes that was never trained: its biases are all 0, or,
    where it has none, it holds what transformers draws, N(0, initializer_range).
    """
    ids = {
        id(p): name
        for name, p in ps.items()
        if not p.requires_grad and not p.is_meta and type(p) in PLAIN
    }
    tables = [weight_of(m) for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    for whole in model.modules():
        config = vars(whole).get("config")
        labels, spread = (asked(config, name) for name in ("num_labels", "initializer_range"))
        if (
            "For" not in type(whole).__name__
            or not isinstance(labels, int)
            or not isinstance(spread, float)
        ):
            continue
        for head in (m for m in whole.children() if isinstance(m, torch.nn.Linear)):
            weight = weight_of(head)
            mine = id(weight) in ids and head.out_features == labels
            if (
                mine
                and spread > 0
                and labels > 0
                and called.get(id(head))
                and not _from(weight, tables)
            ):
                w = weight.detach().double()
                near = abs(float(w.std()) / spread - 1) < 3 / math.sqrt(2 * w.numel())
                if near and head.bias is None or head.bias is not None and not head.bias.any():
                    return ids[id(weight)]
    return None


def _has_frozen_layer(name: str, layers: Iterable[str]) -> bool:
    """Whether a frozen layer is in the module that holds this tensor, or in the one around that."""
    around = [".".join(name.split(".")[:-n]) for n in (1, 2)]
    return any(layer.startswith(f"{path}.") for path in around if path for layer in layers)


def _alone(name: str, p: Tensor, ps: dict[str, Tensor]) -> bool:
    """Whether no layer that trains is one like it under another name."""
    own = name.split(".")[1:]
    return not any(
        q.requires_grad and q.shape == p.shape and n.split(".")[1:] == own for n, q in ps.items()
    )


def _as_drawn(p: Tensor) -> bool:
    return within_bound(measures.strided(p).float(), p[0].numel())


def within_bound(values: Tensor, inputs: int) -> bool:
    """Uniform between -1 / sqrt(inputs) and 1 / sqrt(inputs): the largest touches the bound and the
    spread fits.
    """
    bound = inputs**-0.5
    most, spread = float(values.abs().max()), float(values.std())
    return 0.97 * bound < most <= bound * (1 + 1e-6) and abs(spread * 3**0.5 / bound - 1) < 0.1


@check("S18")
def misspelt_flag(e: Evidence) -> Fired | Verdict:
    """Layers that were frozen go on learning; or layers that were set to learn stay as they are.

    Fires when a parameter carries a flag whose name is nearly requires_grad, or a module carries
    requires_grad itself, and the parameters do the opposite of what it says.

    ERROR misspelt-flag/parameter: `{name}` is no flag of a parameter: setting it does nothing. Fix:
    Write p.requires_grad = {value}, or p.requires_grad_({value}).
    ERROR misspelt-flag/module: requires_grad is no flag of a module: setting it does nothing to its
    parameters. Fix: Write module.requires_grad_({value}).
    """
    if not e.models:
        return unknown("no model was seen")
    for name, p in e.parameters().items():
        for flag, value in vars(p).items():
            if isinstance(value, bool) and MISSPELT.fullmatch(flag) and value != p.requires_grad:
                return fires(
                    f"{name}.{flag} = {value}, and {name}.requires_grad = {p.requires_grad}",
                    "flags that parameters have",
                    fault="misspelt-flag/parameter",
                    name=flag,
                    value=value,
                )
    for name, module in e.modules():
        ps = list(module.parameters())
        for flag, value in vars(module).items():
            against = isinstance(value, bool) and ps and all(p.requires_grad != value for p in ps)
            if against and MISSPELT.fullmatch(flag) and flag not in _own(module):
                return fires(
                    f"{name or type(module).__name__}.{flag} = {value}, and its {len(ps)} "
                    "parameters do the opposite",
                    "module.requires_grad_()",
                    fault="misspelt-flag/module",
                    value=value,
                )
    return OK


def _own(module: nn.Module) -> set[str]:
    """Names that the module's own code reads: an option of that name is its author's business."""
    kinds = [kind for kind in type(module).__mro__ if kind not in (nn.Module, object)]
    codes = [f.__code__ for kind in kinds for f in vars(kind).values() if hasattr(f, "__code__")]
    return {name for code in codes for name in (*code.co_names, *code.co_varnames)}


@check("N24")
def group_at_rest(e: Evidence) -> Fired | Verdict:
    """Part of the model does not change at all, while the rest learns.

    Fires when the rate of one group of an optimizer was exactly zero in all steps, three or more,
    while another group's was not; or less than a five-thousandth of the largest one's.

    WARN group-at-rest: A group of parameters has the learning rate 0 in every step, so what is in
    it does not learn. Fix: Give the group a rate; if it should rest, freeze it with
    requires_grad_(False) and leave it out.
    WARN group-at-rest/next-to-nothing: A group of parameters has the rate {rate:.2g}, {times:.2g}
    times less than another one: what is in it hardly moves. Fix: Look at how the rates are made; a
    decay by layers is 0.65 or more a layer.
    """
    steps = e.of(Step)
    weights = {
        id(weight_of(m)) for _, m in e.modules() if isinstance(m, (*NOT_TRANSPOSED, nn.Embedding))
    }
    for number, optimizer in enumerate(e.optimizers):
        mine = [s.rates for s in steps if s.optimizer == number]
        if len(mine) < 3 or len({len(rates) for rates in mine}) > 1:
            continue
        columns = list(zip(*mine))
        resting = [k for k, rates in enumerate(columns) if all(r == 0 for r in rates)]
        if resting and any(any(r > 0 for r in rates) for rates in columns):
            return fires(
                f"group {resting[0]} of {optimizer.kind.__name__} had the rate 0 in all "
                f"{len(mine)} steps",
                "a rate above zero",
            )
        groups = optimizer.object.param_groups if optimizer.object is not None else ()
        held = [any(id(p) in weights for p in group["params"]) for group in groups]
        means = [sum(rates) / len(rates) for rates in columns]
        low = min(means, default=0.0)
        if (
            not 0 < low < NOTHING * max(means)
            or len(held) != len(means)
            or not held[means.index(low)]
        ):
            continue
        even = len(means) > FEW and (low / max(means)) ** (1 / (len(means) - 1)) > GENTLE
        if not even and not any(rates[-1] > rates[0] or 0 in rates for rates in columns):
            what = (
                f"group {means.index(low)} of {optimizer.kind.__name__} has {low:.2g}, "
                f"another one {max(means):.2g}"
            )
            fault = "group-at-rest/next-to-nothing"
            return fires(what, "rates of one order", fault=fault, rate=low, times=max(means) / low)
    return OK if len(steps) >= 3 else unknown("fewer than three steps were seen")


@check("S19")
def not_registered(e: Evidence) -> Fired | Verdict:
    """Return a layer or tensor of the model is used and never learns, it is missing in the saved
    file, or .to() leaves it.

    Fires when a module holds a tensor that requires a gradient as a plain attribute, as a buffer,
    or in a Python list or dict (also inside modules in such a list), so that model.parameters()
    does not have it, and it got a gradient. Also when a plain attribute of zeros is added to what
    learns, in each step that is looked at.

    WARN not-registered: model.parameters() does not have this tensor, because it is {how}; so no
    optimizer is given it. Fix: {fix}.
    WARN not-registered/unsaved: An optimizer trains this tensor, but the model does not have it in
    its state_dict, because it is {how}; a saved model loses it. Fix: {fix}.
    WARN not-registered/zeros: {name} is a plain tensor of zeros, which nothing trains, so adding it
    changes nothing. Fix: self.pos_embed = nn.Parameter(torch.zeros(1, n, d)).
    """
    if not e.models:
        return unknown("no model was seen")
    held = e.optimized()
    listed = [m for _, holder in e.modules() for m in _listed(holder)]
    parts = {id(m) for m in listed if not any(id(p) in held for p in m.parameters())}
    known = {id(p) for m in (*e.models, *e.teachers) if id(m) not in parts for p in m.parameters()}
    teaching = {id(m) for m in e.teachers if id(m) not in parts}
    found: dict[int, tuple[str, str, Tensor]] = {}
    for prefix, module in e.modules():
        for name, how, t in _loose(module, teaching):
            if t.requires_grad and t.grad_fn is not None and how == "a plain tensor":
                t, how = _made_of(t), "made of an nn.Parameter and no longer one"
            if (
                t is not None
                and id(t) not in known
                and t.requires_grad
                and t.is_leaf
                and t.is_floating_point()
            ):
                found.setdefault(id(t), (f"{prefix}.{name}".removeprefix("."), how, t))
    zeros = set(e.habits["S19"].values())
    still = [
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in e.modules()
        for name, how, t in _loose(module, teaching)
        if how == "a plain tensor"
        and t is not None
        and id(t) in zeros
        and not t.requires_grad
        and not t.any()
    ]  # an id alone may be a later tensor's
    if still:
        what = f"{still[0]} was added in {len(e.habits['S19'])} steps, and is 0 everywhere"
        return fires(
            what, "an nn.Parameter, or other numbers", fault="not-registered/zeros", name=still[0]
        )
    used = [each for each in found.values() if each[2].grad is not None or not e.trainable()]
    if not used:
        return OK
    missing = [each for each in used if id(each[2]) not in held]
    name, how, _ = (missing or used)[0]
    names = [each[0] for each in missing or used]
    fixes = {
        "a plain tensor": "Make it an nn.Parameter",
        "made of an nn.Parameter and no longer one": "Make it whole first: "
        "nn.Parameter(torch.zeros(1, n, d))",
        "a buffer": "Make it an nn.Parameter: a buffer is no parameter even if it requires a "
        "gradient",
        "in a Python list": "Use nn.ModuleList, nn.ModuleDict, nn.ParameterList or "
        "nn.ParameterDict",
    }
    return fires(
        f"{len(names)} tensors that require a gradient are held by the model and are none of "
        "its parameters: "
        f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}",
        "every tensor that should learn in model.parameters()",
        fault="not-registered" if missing else "not-registered/unsaved",
        how=how
        if how != "in a Python list"
        else "in a Python list or dict, into which torch does not look",
        fix=fixes[how],
    )


def _made_of(t: Tensor) -> Tensor | None:
    """Return the one parameter that a tensor was made of in a few steps (unsqueeze, a factor,
    to).
    """
    nodes = list(graphs.walk(t, NEAR + 1))
    ways = [n.variable for n in nodes if hasattr(n, "variable")]
    return (
        ways[0]
        if len(nodes) <= NEAR and len(ways) == 1 and isinstance(ways[0], nn.Parameter)
        else None
    )


def _loose(module: nn.Module, teaching: set[int]) -> Iterator[tuple[str, str, Tensor]]:
    """Tensors that a module holds past its registers: name, how, tensor."""
    for name, value in module._buffers.items():
        if value is not None:
            yield name, "a buffer", value
    for name, value in vars(module).items():
        if name.startswith("_") and name in vars(nn.Module()):
            continue
        if isinstance(value, Tensor):
            yield name, "a plain tensor", value
        elif isinstance(value, (list, tuple, dict)):
            for path, t in _inside(value, teaching, INSIDE, iter(range(LISTED))):
                yield f"{name}{path}", "in a Python list", t


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in its lists of several, which were found as models of their own where it is not
    called by its name.
    """
    for value in vars(module).values():
        if isinstance(value, list | tuple) and len(value) > 1:
            parts = [m for m in value if isinstance(m, nn.Module)]
            yield from (m for m in parts if any(p.grad is not None for p in m.parameters()))


def _inside(
    holder, teaching: set[int], depth: int, left: Iterator[int]
) -> Iterator[tuple[str, Tensor]]:
    items = holder.items() if isinstance(holder, dict) else enumerate(holder)
    for (key, value), _ in zip(items, left):
        if isinstance(value, Tensor):
            yield f"[{key!r}]", value
        elif isinstance(value, nn.Module) and id(value) not in teaching:
            yield from ((f"[{key!r}].{n}", p) for n, p in value.named_parameters())
        elif isinstance(value, (list, tuple, dict)) and depth:
            yield from (
                (f"[{key!r}]{path}", t) for path, t in _inside(value, teaching, depth - 1, left)
            )


@check("S30")
def one_layer_many_times(e: Evidence) -> Fired | Verdict:
    """Return a model has far fewer parameters than it should, and more layers hardly help.

    Fires when a ModuleList or Sequential holds one and the same module with weights at all of its
    places, three or more. Weights that are shared by name (ALBERT, a loop over one layer) are left
    alone.

    WARN one-layer-many-times: {name} holds one layer {times} times, and not {times} layers: [layer]
    * {times} repeats a reference. Fix: nn.ModuleList([make_layer() for _ in range({times})]).
    """
    if not e.models:
        return unknown("no model was seen")
    for name, m in e.modules():
        if isinstance(m, nn.ModuleList | nn.Sequential):
            parts = [part for part in m._modules.values() if part is not None]
            one = len(parts) > 2 and len({id(p) for p in parts}) == 1
            if one and any(p.requires_grad for p in parts[0].parameters()):
                times = len(parts)
                return fires(
                    f"{times} places of {name}, one layer",
                    "a layer for each",
                    name=name,
                    times=times,
                )
    return OK
