"""A student beside its teacher: where they agree, and what each costs.

Perplexity says how well a student predicts the text; agreement says how well it stands in for the teacher, which is
another question: a student trained on labels alone may have the same perplexity and choose other words. By position,
because a student with a short memory falls behind where the context is long, and the mean does not show it.

Footgun: agreement of the likeliest token counts coin flips as disagreement. Where the teacher itself is unsure, two
equally good models differ; read it beside the KL, or beside the agreement of the teacher with itself under dropout.
"""

import time
from statistics import median

import torch
from torch import Tensor, nn

from nblib import losses, memory, models, runtime
from nblib.methods.divergences import forward_kl

POSITIONS = 256  # whose logits exist at a time


@torch.no_grad()
def agreement(
    student: nn.Module, teacher: nn.Module, rows: Tensor, *, machine: runtime.Machine, batch: int = 16, parts: int = 8
) -> dict:
    """Over rows (R, T): the share of positions at which both find the same token likeliest, and KL(teacher || student)
    per token; both also as lists over `parts` equal stretches of the row (the last takes what is left)."""
    T = rows.shape[1] - 1
    if not 1 <= parts <= T:
        raise ValueError(f"parts = {parts}: must be from 1 to the {T} positions of a row")
    same, apart = torch.zeros(T, dtype=torch.float64), torch.zeros(T, dtype=torch.float64)
    was_training = student.training
    student.eval()
    try:
        for few in rows.split(batch):
            found = [_hidden(model, few.to(machine.device), machine) for model in (student, teacher)]
            for at in range(0, T, max(1, POSITIONS // len(few))):
                span = slice(at, min(T, at + max(1, POSITIONS // len(few))))
                ours, theirs = ((h[:, span] @ w.to(h.dtype).T).float().flatten(0, 1) for h, w in found)
                kl, _, _ = forward_kl(theirs.log_softmax(1), ours.log_softmax(1))
                equal = (ours.argmax(1) == theirs.argmax(1)).double()
                for sums, values in ((same, equal), (apart, kl.double())):
                    sums[span] += values.view(len(few), -1).sum(0).cpu()
    finally:
        student.train(was_training)
    same, apart = same / len(rows), apart / len(rows)
    size = T // parts
    cuts = [(i * size, T if i == parts - 1 else (i + 1) * size) for i in range(parts)]
    return {
        "top1": float(same.mean()),
        "kl": float(apart.mean()),
        "up_to": [end for _, end in cuts],
        "top1_by_position": [float(same[a:b].mean()) for a, b in cuts],
        "kl_by_position": [float(apart[a:b].mean()) for a, b in cuts],
    }


def _hidden(model: nn.Module, ids: Tensor, machine: runtime.Machine) -> tuple[Tensor, Tensor]:
    with machine.autocast():
        found = losses.hidden_states(model, {"input_ids": ids})
    if found is None:
        raise ValueError(f"{type(model).__name__}: the head must be one matrix product, without adapter or soft cap")
    return found


def costs(model: nn.Module, ids: Tensor, *, machine: runtime.Machine, times: int = 3) -> dict[str, float]:
    """One training step and one evaluation on rows (B, T): tokens per second (the median of some), and the most bytes
    the step held beyond the model. Gradients that the model has are lost."""
    if times < 1:
        raise ValueError(f"times = {times}: must be at least 1")
    ids, was_training = ids.to(machine.device), model.training
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

    def seconds(step) -> float:
        taken = []
        for _ in range(times + 1):  # the first is a warm-up
            started = time.perf_counter()
            step()
            if machine.device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        return median(taken[1:])

    model.train()
    speed = {"train_tokens_per_s": ids.numel() / seconds(train)}
    with memory.peak(machine.device) as peak:
        train()
    model.eval()
    speed["eval_tokens_per_s"] = ids.numel() / seconds(evaluate)
    model.train(was_training)
    return {"parameters": models.count(model)["all"], **speed, "step_bytes": peak.bytes}
