"""Drawings of notebook 05: where the doctor looks into a training step, and how findings fold under
their cause.
"""

from lessons.drawings import LOSS, STORED, TRAINED, Sketch
from loopdoctor.causes import CAUSES
from nbworkbook import show

FOUND = {  # what the checks of one program could find, with an independent second fault
    "S10": "S10 reentrant-checkpoint-cut",
    "N4": "N4 updates-rounded-away",
    "F1": "F1 loss-cut-off",
    "B1": "B1 called-but-no-gradient",
    "B3": "B3 gradients-exactly-zero",
}


def where_it_looks() -> show.Picture:
    """Return a training step from left to right, and below it what the doctor notes at each
    place.
    """
    sketch = Sketch(7.4, 2.9)
    parts = {
        "model(ids)": "#ffffff",
        "loss": LOSS,
        "backward()": "#ffffff",
        "optimizer.step()": TRAINED,
    }
    places = [
        sketch.box(0.95 + 1.85 * n, 2.6, name, width=1.4, fill=fill)
        for n, (name, fill) in enumerate(parts.items())
    ]
    for a, b in zip(places, places[1:]):
        sketch.arrow(a, b)
    notes = (
        "ids, labels,\nmode, logits",
        "value, targets",
        "gradient of\neach tensor",
        "weights before\nand after",
    )
    evidence = sketch.box(2.2, 0.4, "Evidence", width=1.3, fill=STORED)
    for place, note in zip(places, notes):
        seen = sketch.box(place.x, 1.5, note, width=1.4, height=0.6, fill=STORED)
        sketch.arrow(place, seen, dashed=True)
        sketch.arrow(seen, evidence)
    checks = sketch.box(4.4, 0.4, "checks", width=1.1)
    report = sketch.box(6.3, 0.4, "report.root", width=1.3)
    sketch.arrow(evidence, checks)
    sketch.arrow(checks, report, "CAUSES")
    return sketch.picture(
        "Top row: your training step, unchanged. Dashed arrows: hooks that only read. Yellow: "
        "what they note. After "
        "the watched steps the checks ask this evidence, and the graph of causes picks the "
        "root. Red: the loss. "
        "Blue: where weights move.",
        title="How the doctor sees",
    )


def cause_graph() -> show.Picture:
    """Five findings, of which two are roots; the arrows are those of CAUSES."""
    sketch = Sketch(7.4, 2.0)
    roots = [check for check in FOUND if not any(check in CAUSES[other] for other in FOUND)]
    effects = [check for check in FOUND if check not in roots]
    boxes = {
        check: sketch.box(1.4, 1.45 - n, FOUND[check], width=2.4, fill=LOSS)
        for n, check in enumerate(roots)
    }
    boxes |= {
        check: sketch.box(5.8, 1.7 - 0.65 * n, FOUND[check], width=2.4)
        for n, check in enumerate(effects)
    }
    for cause in roots:
        for effect in effects:
            if effect in CAUSES[cause]:
                sketch.arrow(
                    boxes[cause], boxes[effect], "explains" if effect == effects[0] else ""
                )
    return sketch.picture(
        "Five findings of one program. Red: the roots, which no other finding explains; the "
        "report begins with "
        "them. White: effects, folded under the cause that makes them certain. The second root "
        "has no arrow to "
        "them, so it stays a finding of its own.",
        title="From findings to roots",
    )
