"""Distillation on the student's own words: the student continues a prompt, and the teacher judges
what it wrote.

    row = [prompt | the student's own continuation]
    loss = T^2 D(teacher, student) at every position of the row

A student that learns on text alone never sees its own mistakes; when it writes, each one takes it
further from what it knows. Here a share of the micro-batches is written by the student, with its
weights of that step (Agarwal et al., 2024, generalised knowledge distillation; there the divergence
is a weighted Jensen-Shannon, here any of `divergences`).

The prompt is judged too, so a row supervises as many tokens as before, and the loop's mean stays a
mean. What is drawn comes from the global generator, which is in the checkpoint: a run that goes on
is the straight run.

Footgun: labels mean nothing on a row that the student wrote, so the weight of `ce` must be 0. And
no cache can answer: the teacher has never seen these rows.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from nblib import wiring
from nblib.losses import Batch, Terms
from nblib.methods.distill.objective import Objective


def on_policy(loss: Objective, *, share: float, prompt: int) -> Callable[[nn.Module, Batch], Terms]:
    """Return the same loss, with this share of the micro-batches continued by the student after
    `prompt` tokens.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share = {share}: must be from 0 to 1")
    if not isinstance(loss.teacher, nn.Module):
        raise ValueError(
            "the teacher must be live: a cache has no answers to what the student writes"
        )
    if not isinstance(loss.weights, dict) or loss.weights.get("ce") or loss.weights.get("masked"):
        raise ValueError(
            f"weights = {loss.weights}: on the student's own words only a teacher can judge, "
            "ce must be 0"
        )

    def terms(model: nn.Module, batch: Batch) -> Terms:
        if model.training and float(torch.rand(())) < share:  # on the host, so no wait
            ids = continued(model, batch["input_ids"], prompt=prompt)
            # the same positions are supervised, so nothing is counted again
            batch = replace(Batch.of(batch), ids=ids, labels=ids.clone())
        return loss(model, batch)

    return terms


@torch.no_grad()
def continued(model: nn.Module, ids: Tensor, *, prompt: int) -> Tensor:
    """Rows (B, T): their first `prompt` tokens, and what the model draws after them."""
    if not 1 <= prompt < ids.shape[1]:
        raise ValueError(
            f"prompt = {prompt}: must be from 1 to {ids.shape[1] - 1}, the rows less a token"
        )
    now, past, row = ids[:, :prompt], None, [ids[:, :prompt]]
    # a compiled block would be compiled again as the cache grows
    with wiring.evaluating(model), torch.compiler.set_stance("force_eager"):
        for _ in range(ids.shape[1] - prompt):
            out = model(input_ids=now, past_key_values=past, use_cache=True)
            past = out.past_key_values
            now = torch.multinomial(out.logits[:, -1].float().softmax(dim=-1), 1)  # (B, 1)
            row.append(now)
    return torch.cat(row, dim=1)


@torch.no_grad()
def on_own_words(
    student: nn.Module, teacher: nn.Module, ids: Tensor, *, prompt: int
) -> dict[str, float]:
    """Return what the student writes after these prompts: the teacher's loss on it, and KL(student,
    teacher) per token.
    """
    written = continued(student, ids, prompt=prompt)
    with wiring.evaluating(student):
        # (B, T - prompt, V)
        log_q = student(input_ids=written).logits[:, prompt - 1 : -1].float().log_softmax(-1)
    log_p = teacher(input_ids=written).logits[:, prompt - 1 : -1].float().log_softmax(-1)
    nats = -log_p.gather(-1, written[:, prompt:, None]).mean()
    return {
        "teacher's loss on it": float(nats),
        "KL": float((log_q.exp() * (log_q - log_p)).sum(-1).mean()),
    }
