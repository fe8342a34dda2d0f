"""Drawings of notebook 00: the test that cannot see, one training step, and what a checkpoint
holds.

One optimizer step with micro-batches m and the supervised tokens N_m of each:

    loss = (sum over m of the summed losses of m) / (sum over m of N_m)

Footgun: `overfit_test` trains two small models, so it takes a second or two; the other two only
draw.
"""

from itertools import repeat

from matplotlib.figure import Figure

from lessons.drawings import COMPUTED, LOSS, STORED, TRAINED, Box, Sketch
from nbworkbook import show


def overfit_test() -> show.Picture:
    """Two models learn the same rows by heart, one of them with labels that were shifted twice."""
    from pydoc_data.topics import topics

    import torch

    from nblib import models, runtime, train

    words = " ".join(topics[name] for name in sorted(topics)).encode()[:128]
    ids = torch.tensor(list(words)).view(4, 32)  # bytes need no tokenizer
    # the loss shifts once more
    twice = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    figure = Figure(figsize=(7.0, 2.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    truth = {}
    for name, labels in {"labels as they are": ids, "labels shifted twice": twice}.items():
        model = models.tiny(256, hidden=64, layers=2, length=64)
        batch = {"input_ids": ids, "labels": labels}
        machine = runtime.Machine(torch.device("cpu"), "fp32", "small")
        adamw = train.adamw(model, lr=5e-3, weight_decay=0.0)
        records = train.fit(model, repeat(batch), adamw, total=60, machine=machine, clip=0)
        left.plot([record["loss"] for record in records])
        truth[name] = train.evaluate(model, ids, machine=machine)["loss"]
    left.set(xlabel="optimizer step", ylabel="training loss", yscale="log")
    right.barh(list(truth)[::-1], list(truth.values())[::-1], color=["C1", "C0"])
    right.set(xlabel="loss of the real next token")
    return show.Picture(
        figure,
        "Blue: labels as they are. Orange: labels shifted twice. Left: both training losses "
        "fall to almost nothing, so "
        "both models pass the overfit test. Right: the same models, asked for the token that "
        "really comes next. The "
        "orange one has learned to predict another token.",
        title="Two models pass the same test",
    )


def training_step() -> show.Picture:
    """From two micro-batches to one update of the parameters."""
    s = Sketch(7.4, 2.75)
    batches = s.box(0.62, 1.95, "batches", width=0.95, fill=STORED)
    micro = [s.box(1.95, y, f"micro[{i}]", width=0.95) for i, y in enumerate((2.4, 1.5))]
    model = s.box(3.25, 1.95, "model", width=0.95, fill=TRAINED)
    sums = [s.box(4.75, y, "summed\nlosses", width=0.95, height=0.5) for y in (2.4, 1.5)]
    loss = s.box(6.45, 1.95, "loss =\nsum / tokens", width=1.3, height=0.55, fill=LOSS)
    grad = s.box(6.45, 0.4, "p.grad", width=0.95)
    clip = s.box(4.75, 0.4, "clip", width=0.95)
    step = s.box(3.25, 0.4, "optimizer\n.step()", width=0.95, height=0.5)
    rate = s.box(1.6, 0.4, "lr * rate(step)", width=1.35)
    for part, total in zip(micro, sums):
        s.arrow(batches, part)
        s.arrow(part, model)
        s.arrow(model, total)
        s.arrow(total, loss)
    s.arrow(loss, grad, dashed=True)
    s.text(6.05, 1.05, "backward", size=8)
    s.arrow(grad, clip)
    s.arrow(clip, step)
    s.arrow(rate, step)
    s.arrow(step, model)
    s.text(2.9, 1.05, "update", size=8)
    return s.picture(
        "One optimizer step with two micro-batches. Their losses are added up and divided "
        "once, by the supervised "
        "tokens of both. The dashed arrow is the gradient, which adds up in p.grad; it is "
        "clipped once, and the "
        "schedule sets the rate of the one update.",
        title="One training step",
    )


def checkpoint() -> show.Picture:
    """Return the parts of a run that move, the files that keep them, and what is not kept."""
    s = Sketch(7.4, 3.1)
    moving = {
        "weights": "parameters that train, buffers",
        "optimizers": "two moments per parameter, rates",
        "batches": "where the next rows are read",
        "generators": "random numbers of each process",
        "progress": "step, tokens, recent losses",
    }
    weights = s.box(6.0, 2.75, "model.safetensors", width=1.8, fill=STORED)
    training = s.box(6.0, 1.4, "training.pt", width=1.8, fill=STORED)
    manifest = s.box(6.0, 0.3, "manifest.json", width=1.8, fill=STORED)
    for n, (name, words) in enumerate(moving.items()):
        y, fill = 2.75 - 0.6 * n, COMPUTED if n else TRAINED
        s.box(1.6, y, f"{name}\n{words}", width=2.9, height=0.5, fill=fill)
        # from the middle of its right edge
        s.arrow(Box(3.05, y, 0.01, 0.01), training if n else weights)
    s.arrow(training, manifest, dashed=True)
    s.text(6.5, 0.86, "SHA-256", size=8)
    return s.picture(
        "Left: everything that moves in a step. Right: the files of the folder step-00000120, "
        "which is written under "
        "another name and then renamed. The manifest holds the hashes of both files, so that a "
        "resume notices damage. "
        "Frozen parameters are not stored, only their hash.",
        title="What a checkpoint contains",
    )
