"""A minute to remember: adapters that never train, the check that names them, the doctor on fifteen
lines of code.

    make demo            or: python -m lessons.demo

Prints what it does and writes a page, outputs/demo/index.html. It needs no base model and no
download; every number on the page was measured in the run that wrote it.

Footgun: the models are tiny, so the losses say nothing about language. What is shown is who gets a
gradient.
"""

import base64
import html
import textwrap
import time
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

import nblib  # noqa: F401 - before peft, so that a library's remark about a missing kernel is not printed
from lessons import programs
from lessons.pitfalls.bench import quiet
from nblib import doctor, files, paths, wiring
from nbworkbook import show

# the adapters of the first program
STEPS, LAYERS, KINDS = 20, 2, ("q_proj", "v_proj", "up_proj", "down_proj")
PROGRAM = f"""\
import torch
from lessons import programs
from nblib import models

torch.manual_seed(0)
model = models.tiny(256, hidden=64, layers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for ids in programs.batches({STEPS}):
    inputs, labels = ids[:, :-1], ids[:, 1:]  # predict the next token
    loss = model(input_ids=inputs, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""
FIX = "ids[:, :-1], ids[:, 1:]", "ids, ids"
STYLE = """body {font: 16px/1.5 sans-serif; max-width: 52em; margin: 2em auto; padding: 0 1em}
img {max-width: 100%}
table {border-collapse: collapse}
td, th {padding: .2em .8em; border-bottom: 1px solid #ccc}
pre {overflow-x: auto}"""


def main() -> None:
    began, page = time.monotonic(), []
    # models this small spend more time meeting at a barrier than computing
    torch.set_num_threads(1)

    _say(page, "1. The loss falls, and the adapters never train", tag="h2")
    _say(
        page,
        "LoRA in the blocks, a head above them that trains too, activation checkpointing to "
        "save memory.",
    )
    broken, mended = programs.adapters_cut_off(), programs.adapters_cut_off()
    mended.model.get_base_model().enable_input_require_grads()  # the whole fix
    before = {
        name: p.detach().clone()
        for name, p in wiring.trainable(broken.model).items()
        if "lora_" in name
    }
    losses, warned = quiet(programs.train, broken, STEPS)
    moved = sum(
        not torch.equal(p, before[n])
        for n, p in wiring.trainable(broken.model).items()
        if n in before
    )
    fell = (
        f"In {STEPS} steps the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}. Nothing "
        "was raised."
    )
    _say(page, f"{fell} One warning passed by: {warned[0].strip()}" if warned else fell)
    _say(page, f"But {moved} of {len(before)} adapter tensors moved: the head learned alone.")
    ids, programs_by_name = programs.batches(1)[0], {"as above": broken, "with the fix": mended}
    for p in programs_by_name.values():
        p.model.zero_grad()
        quiet(lambda p=p: p.loss(ids).backward())
    _show(page, _heat({name: _norms(p.model) for name, p in programs_by_name.items()}))

    _say(page, "2. The canary names them before training", tag="h2")
    _say(
        page,
        "Two small real steps on a fresh model: did every trainable tensor get a gradient, and "
        "did it move?",
    )
    programs_by_name["as above"] = programs.adapters_cut_off()
    verdicts = {
        n: quiet(wiring.canary, p.model, lambda p=p: p.loss(ids))[0]
        for n, p in programs_by_name.items()
    }
    _show(
        page,
        show.Table(
            [
                {"program": n, "alive": v.alive, "the canary": v.sentence}
                for n, v in verdicts.items()
            ]
        ),
    )
    _say(page, "The fix is one line: model.enable_input_require_grads()")

    _say(page, "3. The doctor names a fault that raises nothing", tag="h2")
    _say(page, "A training program of fifteen lines, as people write it. Do you see the fault?")
    _say(page, PROGRAM, tag="pre")
    report, losses = _watched(PROGRAM)
    _say(
        page,
        f"Its loss falls from {losses[0]:.2f} to {losses[-1]:.2f}. The doctor watched the same "
        f"{STEPS} steps:",
    )
    _show(page, report)
    root = _watched(PROGRAM.replace(*FIX))[0].root
    verdict = f"{root.check} {root.name}" if root else "no fault found"
    _say(page, f"With inputs, labels = {FIX[1]} the doctor says: {verdict}.")

    _say(page, "What next", tag="h2")
    _say(
        page,
        "make lab opens the notebooks: 01_freeze_and_adapters shows more ways to train less "
        "than you think,",
    )
    _say(
        page,
        "05_doctor puts the doctor on your own loop. make pitfalls prints all pitfalls by symptom.",
    )
    path = files.make_folder(paths.outputs() / "demo") / "index.html"
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>nblib: a '
        f"demo</title><style>{STYLE}</style>"
    )
    files.write(path, f"{head}<h1>Two faults that raise nothing</h1>{''.join(page)}</html>\n")
    print(f"\nDone in {time.monotonic() - began:.0f} s. Open the page: {path}")


def _watched(program: str) -> tuple[doctor.Report, list[float]]:
    """Return the doctor's report on the program, and the program's losses."""
    variables: dict[str, Any] = {}
    with doctor.watch(say=False, steps=STEPS) as report:
        quiet(exec, program, variables)
    return report, variables["losses"]


def _norms(model: nn.Module) -> list[list[float]]:
    """Norm of the gradients at each place of an adapter, (layer, kind); NaN where no tensor has
    one.
    """

    def norm(layer: int, kind: str) -> float:
        here = [
            p.grad
            for n, p in wiring.trainable(model).items()
            if f"layers.{layer}." in n and f".{kind}." in n
        ]
        alive = [g.square().sum() for g in here if g is not None]
        return float(sum(alive).sqrt()) if alive else float("nan")

    return [[norm(layer, kind) for kind in KINDS] for layer in range(LAYERS)]


def _heat(norms: dict[str, list[list[float]]]) -> show.Picture:
    figure = Figure(figsize=(7.5, 2.6), layout="constrained")
    top = max(v for rows in norms.values() for row in rows for v in row if v == v)
    for axes, (title, rows) in zip(figure.subplots(1, 2), norms.items()):
        axes.set_facecolor("0.8")
        image = axes.imshow(rows, aspect="auto", vmin=0, vmax=top)
        axes.set(
            title=title,
            xticks=range(len(KINDS)),
            xticklabels=KINDS,
            yticks=range(LAYERS),
            ylabel="layer",
        )
    figure.colorbar(image, ax=figure.axes, label="gradient norm")
    dead = [f"{title} {sum(v != v for row in rows for v in row)}" for title, rows in norms.items()]
    places = LAYERS * len(KINDS)
    return show.Picture(
        figure, f"Adapters without any gradient (grey), of {places}: {', '.join(dead)}."
    )


def _say(page: list[str], text: str, tag: str = "p") -> None:
    lines = {"h2": f"\n{text}\n{'-' * len(text)}", "pre": f"\n{textwrap.indent(text, '    ')}"}
    print(lines.get(tag) or textwrap.fill(text, 110), flush=True)
    page.append(f"<{tag}>{html.escape(text)}</{tag}>")


def _show(page: list[str], thing: Any) -> None:
    bundle = thing._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    print(f"\n{data['text/plain']}\n", flush=True)
    if "image/png" in data:
        picture, text = (
            base64.b64encode(data["image/png"]).decode(),
            html.escape(data["text/plain"]),
        )
        data["text/html"] = f'<img src="data:image/png;base64,{picture}" alt="{text}"><p>{text}</p>'
    page.append(data["text/html"])


if __name__ == "__main__":
    main()
