"""P36 and P38: a loop that adds up its micro-batches wrongly, and one that resumes as another run.

Neither shows in a loss curve. So each is measured against something exact: the gradient of the whole batch, and the run
that was never stopped.

Footgun: Adam hides a gradient that is k times too large, because it divides by its size. SGD and the clip do not.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lessons.pitfalls import Pitfall
from lessons.pitfalls.bench import byte_model, byte_rows
from nblib import losses, runtime

EVEN, RAGGED = (48, 48, 48, 48), (48, 8, 8, 8)


# ------------------------------------------------------------------------------------------------- P36 accumulation
def _gradient(model: nn.Module) -> Tensor:
    """All gradients end to end; clears them."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


def micro_batches(lengths: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """One row each, whose answers have these lengths in tokens."""
    micro = [{"input_ids": row[None], "labels": row[None].clone()} for row in byte_rows(len(lengths), 49)]
    for batch, length in zip(micro, lengths):
        batch["labels"][:, 1 + length :] = losses.IGNORED
    return micro


def accumulated(how: str, lengths: tuple[int, ...]) -> dict:
    """The gradient of four micro-batches whose answers have `lengths` tokens, against that of the whole batch."""
    model, micro = byte_model(heads=4), micro_batches(lengths)
    tokens = sum(int(losses.supervised(batch["labels"])) for batch in micro)
    whole = {name: torch.cat([batch[name] for batch in micro]) for name in ("input_ids", "labels")}
    (losses.causal_lm(model, whole)["ce"] / tokens).backward()
    right = _gradient(model)
    divide = {
        "undivided": lambda ce, mine: ce / mine,  # what `model(...).loss` is
        "by_count": lambda ce, mine: ce / mine / len(micro),  # a mean of means
        "by_tokens": lambda ce, mine: ce / tokens,
    }[how]
    for batch in micro:
        divide(losses.causal_lm(model, batch)["ce"], int(losses.supervised(batch["labels"]))).backward()
    mine = _gradient(model)
    return {
        "tokens": lengths,
        "norm_ratio": float(mine.norm() / right.norm()),
        "error": float((mine - right).norm() / right.norm()),
        "cosine": float(F.cosine_similarity(mine, right, dim=0)),
    }


def trained(how: str, optimizer: str, steps: int = 25) -> float:
    """The loss after some steps on four equal micro-batches whose losses are divided or not."""
    model = byte_model(heads=4)
    make = {"SGD": lambda p: torch.optim.SGD(p, lr=0.5), "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True)}
    step, rows = make[optimizer](model.parameters()), byte_rows(4, 49)
    for _ in range(steps):
        for row in rows:
            loss = model(row[None], labels=row[None]).loss
            (loss if how == "undivided" else loss / len(rows)).backward()
        step.step()
        step.zero_grad()
    with torch.no_grad():
        return float(model(rows, labels=rows).loss)


# ---------------------------------------------------------------------------------------------------- P38 resume
PIECES = ("optimizer", "scheduler", "generators", "order", "position")


class _Epochs:
    """Sixteen rows in an order drawn anew each epoch from a generator of its own, two at a time."""

    def __init__(self):
        self.rows, self.draw = byte_rows(16, 32), torch.Generator().manual_seed(5)
        self.begin()

    def begin(self) -> None:
        self.at_start = self.draw.get_state()  # an order can only be drawn again from the state before the draw
        self.order, self.position = torch.randperm(len(self.rows), generator=self.draw), 0

    def __next__(self) -> Tensor:
        if self.position == len(self.order):
            self.begin()
        self.position += 2
        return self.rows[self.order[self.position - 2 : self.position]]


class _Run:
    """A GPT-2 with dropout, AdamW, a schedule and data: everything that moves."""

    def __init__(self):
        runtime.seed_all(0)
        self.model = byte_model(family="gpt2", hidden=32, heads=4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 8))
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
    """A run that was stopped and continued without some pieces, against the run that never stopped."""
    before = runtime.generators()
    try:
        straight = _Run().train(steps)
        first = _Run()
        losses_before = first.train(stop_at)
        state = {name: piece for name, piece in first.save().items() if name not in missing}
        second = _Run()  # a new process starts from the same seed
        torch.rand(7)  # and has drawn from it before it comes to training
        second.load(state)
        resumed = losses_before + second.train(steps - stop_at)
    finally:
        runtime.set_generators(before)
    apart = [abs(a - b) for a, b in zip(straight, resumed)]
    return {
        "missing": ", ".join(missing) or "nothing",
        "first_step_apart": next((i + 1 for i, gap in enumerate(apart) if gap), None),
        "largest_gap": max(apart),
        "straight": straight,
        "resumed": resumed,
    }


PITFALLS = [
    Pitfall(
        id="P36",
        title="Accumulation undivided, and the mean of means",
        symptom="the same rows give another gradient when they come in several micro-batches",
        claim="the loss was not divided by the number of micro-batches (the write-ups' checklist)",
        verdict="undivided, the gradient is k times too large, and that division is needed. But it is right only when "
        "all micro-batches supervise equally many tokens; otherwise the mean of means points elsewhere (torch 2.13).",
        fix="sum the losses, divide by the supervised tokens of the whole step",
        broken=lambda: accumulated("by_count", RAGGED),
        fixed=lambda: accumulated("by_tokens", RAGGED),
        claimed=lambda: accumulated("undivided", EVEN),
        claim_holds=True,
        seen=lambda facts: facts["error"] > 1e-3,
        check="N6",
    ),
    Pitfall(
        id="P38",
        title="A resumed run that is another run",
        symptom="after resuming, the losses are not those of the run that was never stopped",
        claim="resumed runs always differ a little, that is rounding",
        verdict="with everything that moves restored, a CPU resumes bit for bit. Weights, optimizer and scheduler are "
        "not everything: the random generators, the epoch's order and the position in it are missing (torch 2.13).",
        fix="nblib.checkpoint.capture and restore; test that a resumed run equals the straight one",
        broken=lambda: resumed_without("generators", "order", "position"),  # all that tutorials leave out
        fixed=resumed_without,
        claimed=resumed_without,
        seen=lambda facts: facts["largest_gap"] > 0,
    ),
]
