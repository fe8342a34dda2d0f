"""A student beside its teacher: where they agree, and what each costs.

Perplexity says how well a student predicts the text. Agreement says how well it stands in for the
teacher, which is another question: a student trained on labels alone may have the same perplexity
and choose other words. Both are told by position, because a student with a short memory falls
behind where the context is long, and the mean hides it.

Footgun: agreement of the likeliest token counts coin flips as disagreement. Where the teacher
itself is unsure, two equally good models differ. Read it beside the KL, or beside the agreement of
the teacher with itself under dropout.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from lessons.progress import each
from nblib import losses, memory, models, runtime, wiring
from nblib.methods.distill import objective
from nblib.methods.distill.divergences import forward_kl
from nbworkbook import show

POSITIONS = 256  # whose logits exist at a time


@torch.no_grad()
def agreement(
    student: nn.Module,
    teacher: nn.Module,
    rows: Tensor,
    *,
    machine: runtime.Machine,
    batch: int = 16,
    parts: int = 8,
) -> dict:
    """Over rows (R, T): the share of positions at which both find the same token likeliest, and
    KL(teacher || student) per token; both also as lists over `parts` equal stretches of the row
    (the last takes what is left).
    """
    T = rows.shape[1] - 1
    if not 1 <= parts <= T:
        raise ValueError(f"parts = {parts}: must be from 1 to the {T} positions of a row")
    top1, kl = torch.zeros(T, dtype=torch.float64), torch.zeros(T, dtype=torch.float64)
    with wiring.evaluating(student):
        for few in rows.split(batch):
            ids, length = {"input_ids": few.to(machine.device)}, max(1, POSITIONS // len(few))
            with machine.autocast():
                hidden = [objective.states_of(model, ids) for model in (student, teacher)]
            for start in range(0, T, length):
                span = slice(start, min(T, start + length))
                s, t = (
                    (h.last[:, span] @ h.head.to(h.last.dtype).T).float().flatten(0, 1)
                    for h in hidden
                )
                row_kl, _, _ = forward_kl(t.log_softmax(1), s.log_softmax(1))
                same = (s.argmax(1) == t.argmax(1)).double()
                for sums, values in ((top1, same), (kl, row_kl.double())):
                    sums[span] += values.view(len(few), -1).sum(0).cpu()
    top1, kl = top1 / len(rows), kl / len(rows)
    size = T // parts
    cuts = [(i * size, T if i == parts - 1 else (i + 1) * size) for i in range(parts)]
    return {
        "top1": float(top1.mean()),
        "kl": float(kl.mean()),
        "up_to": [end for _, end in cuts],
        "top1_by_position": [float(top1[a:b].mean()) for a, b in cuts],
        "kl_by_position": [float(kl[a:b].mean()) for a, b in cuts],
    }


def picture(found: dict[str, dict], *, title: str) -> show.Picture:
    """Return what `agreement` found for students by name, along the row: the same likeliest token,
    and the KL.
    """
    figure = Figure(figsize=(7.6, 2.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, student in found.items():
        left.plot(student["up_to"], student["top1_by_position"], marker=".", label=name)
        right.plot(student["up_to"], student["kl_by_position"], marker=".")
    left.set(xlabel="position in the row, up to", ylabel="same likeliest token", ylim=(0, None))
    right.set(xlabel="position in the row, up to", ylabel="KL, nats per token")
    figure.legend(frameon=False, loc="outside right center", fontsize=9)
    shares = ", ".join(f"{name} {student['top1']:.0%}" for name, student in found.items())
    words = (
        "One colour per student, the same on both sides. Left: how often student and "
        "teacher find the same token"
    )
    return show.Picture(
        figure,
        f"{words} likeliest ({shares}). Right: KL(teacher ‖ student), lower is closer.",
        title=title,
    )


def cost_rows(
    models_of: dict[str, nn.Module], ids: Tensor, *, machine: runtime.Machine
) -> list[dict]:
    """Return a row per model of a table of `costs`, with the bytes of a step in MiB."""
    rows = []
    for name in each(models_of, "models measured"):
        measured = costs(models_of[name], ids, machine=machine)
        mib = measured.pop("step_bytes") / 2**20
        rows.append({"model": name, **measured, "MiB of a step": mib})
    return rows


def costs(
    model: nn.Module, ids: Tensor, *, machine: runtime.Machine, times: int = 3
) -> dict[str, float]:
    """One training step and one evaluation on rows (B, T): tokens per second (the median of
    `times`), and the most bytes that the step held beyond the model. The model loses its gradients.
    """
    if times < 1:
        raise ValueError(f"times = {times}: must be at least 1")
    ids = ids.to(machine.device)
    batch = {"input_ids": ids, "labels": ids}

    def train() -> None:
        with machine.autocast():
            loss = losses.causal_lm(model, batch)["ce"]
        loss.backward()
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate() -> None:
        with machine.autocast():
            losses.causal_lm(model, batch)

    def seconds(step: Callable[[], None]) -> float:
        taken = []
        for _ in range(times + 1):  # the first is a warm-up
            started = time.perf_counter()
            step()
            if machine.device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        return median(taken[1:])

    with wiring.evaluating(model):  # for the modes that it restores
        model.train()
        speed = {"train_tokens_per_s": ids.numel() / seconds(train)}
        with memory.peak(machine.device) as peak:
            train()
        model.eval()
        speed["eval_tokens_per_s"] = ids.numel() / seconds(evaluate)
    return {"parameters": models.count(model)["all"], **speed, "step_bytes": peak.bytes}
