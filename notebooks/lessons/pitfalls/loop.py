"""P36, P38 and P74: a loop that averages wrongly, one that does not resume as the same run, one
that counts too early.

A loss curve shows neither. So each is compared with something exact: the gradient of the whole
batch, and the run that was never stopped.

Footgun: Adam hides a gradient that is k times too large, because it divides by the gradient's size.
SGD and gradient clipping do not hide it.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lessons.pitfalls import VERSIONS, Pitfall
from lessons.pitfalls.bench import byte_model, byte_rows
from nblib import losses, runtime

EVEN, RAGGED = (48, 48, 48, 48), (48, 8, 8, 8)
PROMPT = 32  # tokens of a row of 49 that are no part of the answer


# --------------------------------------------------------------------------------- P36 accumulation
def _gradient(model: nn.Module) -> Tensor:
    """All gradients end to end; clears them."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


def micro_batches(lengths: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """Micro-batches of one row; their answers have these lengths in tokens."""
    micro = [
        {"input_ids": row[None], "labels": row[None].clone()} for row in byte_rows(len(lengths), 49)
    ]
    for batch, length in zip(micro, lengths):
        batch["labels"][:, 1 + length :] = losses.IGNORED
    return micro


def mean_of_means(model: nn.Module, micro_batches: list[dict]) -> None:
    for batch in micro_batches:
        loss = model(**batch).loss  # the mean over the answer of this micro-batch
        (loss / len(micro_batches)).backward()  # at fault: answers differ in length


def mean_over_tokens(model: nn.Module, micro_batches: list[dict]) -> None:
    tokens = sum(losses.supervised(batch["labels"]) for batch in micro_batches)
    for batch in micro_batches:
        loss = losses.causal_lm(model, batch)["ce"]  # the sum over the answer
        (loss / tokens).backward()


def _undivided(model: nn.Module, micro_batches: list[dict]) -> None:
    for batch in micro_batches:
        model(**batch).loss.backward()


def accumulated(how: str, lengths: tuple[int, ...]) -> dict:
    """Return the gradient of four micro-batches whose answers have `lengths` tokens, against that
    of the whole batch.
    """
    model, micro = byte_model(heads=4), micro_batches(lengths)
    tokens = sum(int(losses.supervised(batch["labels"])) for batch in micro)
    whole = {name: torch.cat([batch[name] for batch in micro]) for name in ("input_ids", "labels")}
    (losses.causal_lm(model, whole)["ce"] / tokens).backward()
    right = _gradient(model)
    {"undivided": _undivided, "by_count": mean_of_means, "by_tokens": mean_over_tokens}[how](
        model, micro
    )
    mine = _gradient(model)
    return {
        "tokens": lengths,
        "norm_ratio": float(mine.norm() / right.norm()),
        "error": float((mine - right).norm() / right.norm()),
        "cosine": float(F.cosine_similarity(mine, right, dim=0)),
    }


def trained(how: str, optimizer: str, steps: int = 25) -> float:
    """Return the loss after some steps on four equal micro-batches whose losses are divided or
    not.
    """
    model = byte_model(heads=4)
    make = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    }
    step, rows = make[optimizer](model.parameters()), byte_rows(4, 49)
    for _ in range(steps):
        for row in rows:
            loss = model(row[None], labels=row[None]).loss
            (loss if how == "undivided" else loss / len(rows)).backward()
        step.step()
        step.zero_grad()
    with torch.no_grad():
        return float(model(rows, labels=rows).loss)


# ---------------------------------------------------------------------------- P74 counted too early
def counted_before_the_mask(model: nn.Module, ids: Tensor) -> Tensor:
    tokens = losses.supervised(ids)  # at fault: the prompts are counted too
    labels = ids.clone()
    labels[:, :PROMPT] = losses.IGNORED
    summed = losses.causal_lm(model, {"input_ids": ids, "labels": labels})["ce"]
    return summed / tokens


def counted_after_the_mask(model: nn.Module, ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[:, :PROMPT] = losses.IGNORED
    tokens = losses.supervised(labels)
    summed = losses.causal_lm(model, {"input_ids": ids, "labels": labels})["ce"]
    return summed / tokens


def counted(how: str, steps: int = 0) -> dict:
    """Return the loss that a loop prints after some steps, beside the mean over the answers, and
    the gradient's norm.
    """
    model, rows = byte_model(heads=4), byte_rows(4, 49)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_of = {"before": counted_before_the_mask, "after": counted_after_the_mask}[how]
    for _ in range(steps):
        loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    printed = loss_of(model, rows)
    printed.backward()
    norm = float(_gradient(model).norm())
    with torch.no_grad():
        logits = model(rows).logits[:, PROMPT - 1 : -1].flatten(0, 1)
        mean = float(F.cross_entropy(logits, rows[:, PROMPT:].flatten()))
    return {
        "printed": float(printed.detach()),
        "mean over the answers": mean,
        "gradient_norm": norm,
    }


# --------------------------------------------------------------------------------------- P38 resume
PIECES = ("optimizer", "scheduler", "generators", "order", "position")


class _Epochs:
    """Sixteen rows in an order drawn anew each epoch from a generator of its own, two at a time."""

    def __init__(self):
        self.rows, self.draw = byte_rows(16, 32), torch.Generator().manual_seed(5)
        self.begin()

    def begin(self) -> None:
        # an order can only be drawn again from the state before the draw
        self.at_start = self.draw.get_state()
        self.order, self.position = torch.randperm(len(self.rows), generator=self.draw), 0

    def __next__(self) -> Tensor:
        if self.position == len(self.order):
            self.begin()
        self.position += 2
        return self.rows[self.order[self.position - 2 : self.position]]


class _Run:
    """A GPT-2 with dropout, AdamW, a schedule and data: everything that changes while training."""

    def __init__(self):
        runtime.seed_all(0)
        self.model = byte_model(family="gpt2", hidden=32, heads=4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 8)
        )
        self.data = _Epochs()

    def train(self, steps: int) -> list[float]:
        curve = []
        for _ in range(steps):
            ids = next(self.data)
            batch = {"input_ids": ids, "labels": ids}
            loss = losses.causal_lm(self.model, batch)["ce"] / losses.supervised(ids)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            curve.append(float(loss.detach()))
        return curve

    def save(self) -> dict:
        state = {
            "weights": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "generators": runtime.generators(),
            "order": self.data.at_start,
            "position": self.data.position,
        }
        return copy.deepcopy(state)

    def save_the_usual_three(self) -> dict:
        state = {  # at fault: no random generators, no order of the rows, no position in it
            "weights": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        return copy.deepcopy(state)

    def load(self, state: dict) -> None:
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["weights"])
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        if "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        if "order" in state:
            self.data.draw.set_state(state["order"])
            self.data.begin()
        if "position" in state:
            self.data.position = state["position"]
        if "generators" in state:
            runtime.set_generators(state["generators"])


def resumed_without(*missing: str, stop_at: int = 10, steps: int = 24) -> dict:
    """Return a run that was stopped and continued without some pieces, against the run that never
    stopped.
    """

    def save(run: _Run) -> dict:
        return {name: piece for name, piece in run.save().items() if name not in missing}

    return resumed_from(save, stop_at=stop_at, steps=steps)


def resumed_from(save: Callable[[_Run], dict], *, stop_at: int = 10, steps: int = 24) -> dict:
    """Return the same, for what `save` stores."""
    before = runtime.generators()
    try:
        straight = _Run().train(steps)
        first = _Run()
        losses_before = first.train(stop_at)
        state = save(first)
        second = _Run()  # a new process starts from the same seed
        torch.rand(7)  # and has drawn from it before training begins
        second.load(state)
        resumed = losses_before + second.train(steps - stop_at)
    finally:
        runtime.set_generators(before)
    apart = [abs(a - b) for a, b in zip(straight, resumed)]
    return {
        "missing": ", ".join(piece for piece in PIECES if piece not in state) or "nothing",
        "first_step_apart": next((i + 1 for i, gap in enumerate(apart) if gap), None),
        "largest_gap": max(apart),
        "straight": straight,
        "resumed": resumed,
    }


PITFALLS = [
    Pitfall(
        id="P36",
        title="Gradient accumulation: two ways to average wrongly",
        symptom="the same rows give another gradient when they come in several micro-batches",
        claim="the loss was not divided by the number of micro-batches (the write-ups' checklist)",
        verdict="Without that division the gradient is k times too large, for k micro-batches, "
        "so the claim holds. But "
        "the division is right only when all micro-batches have equally many supervised "
        "tokens. Otherwise the mean of "
        "means weighs a token in a short answer more than one in a long answer, and the "
        "gradient points elsewhere. "
        f"Seen with {VERSIONS}.",
        fix="sum the losses, divide by the supervised tokens of the whole step",
        broken=lambda: accumulated("by_count", RAGGED),
        fixed=lambda: accumulated("by_tokens", RAGGED),
        claimed=lambda: accumulated("undivided", EVEN),
        claim_holds=True,
        seen=lambda facts: facts["error"] > 1e-3,
        check="N6",
        wrong=mean_of_means,
        right=mean_over_tokens,
    ),
    Pitfall(
        id="P74",
        title="Tokens counted before the prompts are masked",
        symptom="the printed loss is far below the mean over the supervised tokens, from the "
        "first step on",
        claim="a low first loss shows that the model knows the task already",
        verdict="The loss is a sum over the answers, divided by a count that has the prompts "
        "in it. So it is too "
        "small by the share of the answers, and the gradient with it: here by two thirds. Rows "
        "with long prompts "
        "count less than rows with short ones. A model that does know its rows prints their "
        f"mean. Seen with {VERSIONS}.",
        fix="mask labels where batches are made, and count after; nblib.train.step compares "
        "both counts and raises",
        broken=lambda: counted("before"),
        fixed=lambda: counted("after"),
        claimed=lambda: counted("after", steps=20),  # a model that knows its rows
        seen=lambda facts: abs(facts["printed"] / facts["mean over the answers"] - 1) > 0.01,
        wrong=counted_before_the_mask,
        right=counted_after_the_mask,
    ),
    Pitfall(
        id="P38",
        title="A resumed run that is not the same run",
        symptom="after resuming, the losses are not those of the run that was never stopped",
        claim="resumed runs always differ a little, because of rounding",
        verdict="Rounding is not the cause: with all of its state restored, a run on a CPU "
        "resumes bit for bit. "
        "Weights, optimizer and scheduler are not all of the state. The random generators, the "
        "order of the rows in "
        f"this epoch and the position in it are missing. Seen with {VERSIONS}.",
        fix="nblib.checkpoint.capture and restore; test that a resumed run equals the straight one",
        broken=lambda: resumed_from(_Run.save_the_usual_three),
        fixed=lambda: resumed_from(_Run.save),
        claimed=resumed_without,  # nothing is missing: rounding is all that could make a difference
        seen=lambda facts: facts["largest_gap"] > 0,
        wrong=_Run.save_the_usual_three,
        right=_Run.save,
    ),
]
