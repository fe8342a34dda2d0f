"""What one training step of each method asks of a card: waits, copies, fp32 products, casts,
launches.

    python tests/card/count.py [METHOD ...] [--lines] [--json FILE]

Runs the loop itself, `nblib.train.steps`, on a card of shapes (card_shapes.py) in bf16. A step with
one micro-batch and a step with two are counted, so that what happens per step is told from what
happens per micro-batch. The models have two layers and a vocabulary of 4,096. Waits and copies do
not depend on the width. Launches, and the waits of a mixture's experts, grow with the layers.
test_card_steps.py holds the bounds.
"""

import card_shapes  # isort: skip  # before torch
import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from nblib import losses, runtime, train
from nbworkbook.method_steps import METHODS, Size, Training, adamw, batches, dense, model

MACHINE = runtime.Machine(torch.device("cuda:0"), "bf16", "a card that is not there")
NAMES = ("waits", "copies", "unpinned", "products", "casts", "launches")
SIZE = Size()


def waiting(net: nn.Module, batch: dict) -> dict:
    """A loss with a planted wait and a planted product in fp32, which the tests look for by
    line.
    """
    terms = losses.causal_lm(net, batch)
    float(terms["ce"])
    with torch.autocast("cuda", enabled=False):
        weight = losses.backbone_and_head(net)[1]
        return terms | {"planted": (weight @ weight.T).sum()}


def planted(size: Size) -> Training:
    return adamw(model(size), loss=waiting)


def counted(
    make: Callable[[Size], Training], *, accumulate: int, watch: card_shapes.Watch
) -> card_shapes.Count:
    """One step of the loop, after a first one that makes the optimizer's state."""
    net, optimizers, loss, more = make(SIZE)
    options = dict(total=3, accumulate=accumulate, machine=MACHINE, loss=loss)
    steps = train.steps(net, batches(SIZE, more), optimizers, **options)
    next(steps)
    watch.count = count = card_shapes.Count()
    next(steps)
    watch.count = None
    steps.close()
    return count


def measure(make: Callable[[Size], Training]) -> dict[str, dict[str, dict[str, int]]]:
    """What is counted -> 'step' and 'micro' -> line -> times."""
    with card_shapes.world() as watch:
        one, two = (counted(make, accumulate=n, watch=watch) for n in (1, 2))
    found = {}
    for name in NAMES:
        once, twice = getattr(one, name), getattr(two, name)
        micro = Counter(
            {line: twice[line] - once[line] for line in twice if twice[line] != once[line]}
        )
        step = Counter(
            {line: once[line] - micro[line] for line in once if once[line] != micro[line]}
        )
        found[name] = {"step": dict(step), "micro": dict(micro)}
    return found


def figures(measured: dict) -> dict[str, int]:
    """The sums that are bounded."""
    total = {
        (name, when): sum(measured[name][when].values())
        for name in NAMES
        for when in ("step", "micro")
    }
    return {
        "waits per step": total["waits", "step"],
        "waits per micro-batch": total["waits", "micro"],
        "copies per micro-batch": total["copies", "micro"],
        "unpinned copies": total["unpinned", "micro"],
        "fp32 products per step": total["products", "step"],
        "fp32 products per micro-batch": total["products", "micro"],
        "casts per step": total["casts", "step"],
        "casts per micro-batch": total["casts", "micro"],
        "launches per step": total["launches", "step"],
        "launches per micro-batch": total["launches", "micro"],
    }


def table(measured: dict[str, dict]) -> str:
    """One line per method."""
    sums = {method: figures(counts) for method, counts in measured.items()}
    heads = list(next(iter(sums.values())))
    width = max(map(len, sums))
    lines = [f"{'':{width}}  " + "  ".join(heads)]
    for method, row in sums.items():
        lines.append(
            f"{method:{width}}  " + "  ".join(f"{row[head]:{len(head)}d}" for head in heads)
        )
    return "\n".join(lines)


def by_line(counts: dict, name: str) -> list[str]:
    return [
        f"  {name} per {'step' if when == 'step' else 'micro-batch'}  {times:4d}  {line}"
        for when in ("step", "micro")
        for line, times in sorted(counts[name][when].items(), key=lambda item: -item[1])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="what one training step of each method asks of a card"
    )
    parser.add_argument(
        "methods", nargs="*", metavar="METHOD", help=f"{', '.join(METHODS)}; default all"
    )
    parser.add_argument("--lines", action="store_true", help="all but launches, by line of source")
    parser.add_argument("--json", type=Path, help="a file for everything that was counted")
    options = parser.parse_args()
    known = METHODS | {"planted": planted, "dense again": dense}
    if unknown := [name for name in options.methods if name not in known]:
        parser.error(f"METHOD = {unknown[0]!r}: allowed are {', '.join(known)}")
    measured = {name: measure(known[name]) for name in options.methods or METHODS}
    if options.json:
        options.json.write_text(json.dumps(measured))
    print(table(measured))
    for method, counts in measured.items() if options.lines else ():
        print(method, *(row for name in NAMES[:-1] for row in by_line(counts, name)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
