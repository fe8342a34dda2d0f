"""Notebook 13: the teacher, the student and the cache between them; and what a cut-off distribution
teaches.

The second drawing is computed, from made-up scores of a thousand tokens. It shows one token's
target, which is what the student's probabilities are pulled to: the gradient of KL with respect to
the student's scores is q - target.

Footgun: the vertical axis is logarithmic, so what is exactly zero cannot be drawn. It lies on the
lower edge.
"""

import torch
from matplotlib.figure import Figure

from lessons.drawings import COMPUTED, FROZEN, LOSS, STORED, TRAINED, Sketch
from nbworkbook import show

K, DRAWS, MANY = 32, 4, 50_000


def teacher_and_student() -> show.Picture:
    """Both models read the same rows; the teacher may be asked once and read from disk."""
    sketch = Sketch(7.4, 2.7)
    ids = sketch.box(0.65, 1.35, "input_ids", width=0.95)
    teacher = sketch.box(2.0, 2.25, "teacher", width=0.95, fill=FROZEN)
    student = sketch.box(2.0, 0.45, "student", width=0.95, fill=TRAINED)
    cache = sketch.box(
        3.35, 1.35, "cache: k values,\ntail, drawn", width=1.45, height=0.5, fill=STORED
    )
    p = sketch.box(4.55, 2.25, "p = softmax(t / T)", width=1.6, fill=COMPUTED)
    q = sketch.box(4.55, 0.45, "q = softmax(s / T)", width=1.6, fill=COMPUTED)
    loss = sketch.box(6.5, 1.35, "T² KL(p ‖ q)", width=1.3, fill=LOSS)
    sketch.arrow(ids, teacher)
    sketch.arrow(ids, student)
    sketch.arrow(teacher, p, "t")
    sketch.arrow(student, q, "s")
    sketch.arrow(teacher, cache)
    sketch.arrow(cache, p)
    sketch.arrow(p, loss)
    sketch.arrow(q, loss)
    sketch.arrow(loss, q, dashed=True, bend=-0.35, color="#b03a2e")
    sketch.arrow(q, student, dashed=True, bend=-0.25, color="#b03a2e")
    return sketch.picture(
        "Teacher and student score the same rows: t and s, one number per token of the "
        "vocabulary. Grey is frozen, "
        "blue is trained, yellow is stored on disk, red is the loss. The dashed arrows are the "
        "gradient: it reaches "
        "the student alone. The path through the cache replaces the teacher in training.",
        title="Distillation: the student learns the teacher's probabilities",
    )


def one_target() -> show.Picture:
    """Return the probabilities that one token of the cache teaches, by the way its tail is read."""
    draw = torch.Generator().manual_seed(0)
    rank = torch.arange(1, 1001)
    # as words are: the hundredth is about a hundred times rarer than the first
    p = (-1.1 * rank.log()).softmax(0)
    cut = torch.where(rank <= K, p / p[:K].sum(), 0.0)
    tail = p[K:].sum()
    drawn = torch.multinomial(p[K:] / tail, MANY * DRAWS, replacement=True, generator=draw)
    counts = torch.bincount(drawn, minlength=len(p) - K)
    mean = torch.cat([p[:K], tail * counts / counts.sum()])
    once = drawn[:DRAWS].sort().values
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(rank, p, "k", linewidth=2.5, label="the teacher")
    axes.plot(rank[:K], cut[:K], "tab:red", linewidth=1.5, label="the rest dropped")
    axes.plot(
        [K, K, 1000], [float(cut[K - 1]), 2e-5, 2e-5], "tab:red", linewidth=1.5, linestyle=":"
    )
    axes.plot(rank, mean, "tab:blue", linewidth=0.8, label="the rest drawn, many times")
    axes.plot(
        rank[K:][once],
        (tail / DRAWS).expand(DRAWS),
        "o",
        color="tab:blue",
        label="the rest drawn, once",
    )
    axes.set(
        xscale="log",
        yscale="log",
        ylim=(2e-5, 1),
        xlabel="token, the likeliest first",
        ylabel="probability taught",
    )
    figure.legend(frameon=False, loc="outside right center", fontsize=9)
    return show.Picture(
        figure,
        "What one position teaches, of 1,000 made-up tokens. Black: the teacher. Red: only "
        f"the {K} largest are kept, "
        "and scaled up to add to one; all others are taught as impossible. Blue dots: the mass "
        "of the others goes to "
        f"{DRAWS} tokens drawn from them. Blue line: the mean of many such draws, which is the "
        "teacher.",
        title="Dropping the rest is always wrong; drawing from it is right on average",
    )
