"""Distillation: the student learns the whole distribution that a teacher gives to the next token.

    L = kd T^2 D(softmax(t / T), softmax(s / T)) + ce (cross-entropy with the label)

One pass over the logits: the head is applied to a chunk of rows, both losses and their gradient come out, and the
logits are gone (nblib/losses.py); the teacher's exist for the same chunk, or come from a cache. Without T^2 the
gradient falls as 1 / T^2 where T is large, so that changing T would change the rate (Hinton et al.,
arXiv:1503.02531); with it the limit is that of fitting the logits themselves.

The teacher is frozen, in evaluation mode, asked without a graph and without a KV cache, and no part of the student:
`check_teacher` says which rule is broken. `no_grad` and not `inference_mode`: what that made cannot be saved for a
backward pass, and a learned T saves the teacher's logits (P33). To spare memory, checkpoint the student's blocks
alone (`compiling.checkpoint_blocks`): the teacher keeps nothing. `compiling.compile_blocks` works on both.

Footgun: before training the first term is T^2 (ln V - entropy of the teacher's p), not ln V. Judge the start by that
(P44).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nblib import compiling, losses
from nblib.methods import teacher_cache
from nblib.methods.divergences import DIVERGENCES, TAILS, live, mixed_rows, stored

TOKEN_WEIGHTS = "token_weights"  # a batch may carry (B, T) weights of its labels
CHUNK_ENTRIES = 2**25  # of logits at once; a divergence with all its gradients holds about eight copies


def distillation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: tuple[Tensor, ...],
    scores,
    *,
    temperature: Tensor,
    divergence: str = "forward",
    kd: float = 1.0,
    ce: float = 0.0,
    token_weights: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss summed over supervised tokens, and its parts without their factors.

    hidden (B, T, D), weight (V, D), labels (B, T); `teacher` are tensors (B, T or T - 1, ...), the position that
    predicts label t + 1 at t, which `scores` (`divergences.live` or `stored`) understands.
    """
    rows, targets = losses.shifted_rows(hidden, labels)  # (n, D), (n,)
    keep = labels[:, 1:] != losses.IGNORED
    said = [tensor[:, : keep.shape[1]][keep] for tensor in teacher]
    exact = torch.promote_types(hidden.dtype, torch.float32)
    weights = torch.ones_like(targets, dtype=exact) if token_weights is None else token_weights[:, 1:][keep].to(exact)
    tally: dict[str, Tensor] = {}
    row_loss = mixed_rows(DIVERGENCES[divergence], temperature, scores, kd=kd, ce=ce, tally=tally)
    chunk = chunk or max(16, CHUNK_ENTRIES // len(weight))
    value = losses.chunked_loss(rows, weight, targets, weights, *said, rows=row_loss, chunk=chunk)
    if temperature.requires_grad and "slope" in tally:  # the same value, whose backward also reaches T
        value = value + (temperature - temperature.detach()) * tally.pop("slope")
    return value, tally


def check_teacher(teacher: nn.Module, student: nn.Module) -> None:
    """Raise with the reason if a teacher would train, drop out, be saved with the student, or break its backward."""
    inside = set(map(id, student.modules()))
    if any(id(m) in inside for m in teacher.modules()):
        raise ValueError(
            "the teacher is inside the student's module tree: student.train() would switch on its dropout, and "
            "checkpoints would hold it; keep it in a variable of its own"
        )
    if loud := [name or "all of it" for name, m in teacher.named_modules() if m.training]:
        raise ValueError(
            f"the teacher is in training mode ({loud[0]}), where dropout makes it contradict itself: "
            "models.as_teacher(teacher)"
        )
    if trains := [name for name, p in teacher.named_parameters() if p.requires_grad]:
        raise ValueError(f"the teacher is not frozen ({trains[0]} requires a gradient): models.as_teacher(teacher)")
    if any(p.is_inference() for p in teacher.parameters()):
        raise ValueError("the teacher was made in torch.inference_mode: what it says cannot be saved for backward")
    ours, theirs = (len(_parts(m)[1]) for m in (student, teacher))
    if ours != theirs:
        raise ValueError(f"the student scores {ours} tokens, the teacher {theirs}: they need one vocabulary")


@dataclass
class Distillation:
    """A loss for the loop. Its term is `distillation`; beside it `temperature` and `alignment` where there are any.

    teacher      a frozen model, or the `teacher_cache.Cache` of one, with batches from `teacher_cache.Cached`
    temperature  a number, or a module of nblib/methods/temperature.py attached to the student
    kd, ce       factors of the two losses
    tail         how to read what a cache says of all other tokens: drawn, spread, bucket, none (the trap)
    alignment    a module of nblib/methods/alignment.py attached to the student; needs the live teacher
    """

    teacher: nn.Module | teacher_cache.Cache
    temperature: float | nn.Module = 2.0
    divergence: str = "forward"
    kd: float = 1.0
    ce: float = 0.0
    tail: str = "drawn"
    alignment: nn.Module | None = None
    chunk: int | None = None
    _seen: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence = {self.divergence!r}: allowed are {', '.join(DIVERGENCES)}")
        if not isinstance(self.temperature, nn.Module) and not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: must be above 0")
        if not (0 < self.kd < float("inf") and 0 <= self.ce < float("inf")):
            raise ValueError(f"kd = {self.kd}, ce = {self.ce}: kd must be above 0, ce from 0 up")
        if self.tail not in TAILS:
            raise ValueError(f"tail = {self.tail!r}: allowed are {', '.join(TAILS)}")
        cached = not self._live and self.teacher.k
        if cached and self.tail in ("drawn", "none") and self.divergence not in ("forward", "soft_ce"):
            raise ValueError(
                f"tail = {self.tail!r}: it excludes tokens, which divergence = {self.divergence!r} cannot measure; use "
                "'spread' or 'bucket'"
            )
        if cached and self.tail == "drawn" and not self.teacher.draws:
            raise ValueError("tail = 'drawn': the cache was made with draws = 0")
        if self.alignment is not None and not self._live:
            raise ValueError("alignment: a cache holds no hidden states, it needs the live teacher")

    @property
    def _live(self) -> bool:
        return isinstance(self.teacher, nn.Module)

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self._check(model)
        labels, T, layers = batch["labels"], self.temperature, self.alignment is not None
        T = T() if isinstance(T, nn.Module) else torch.tensor(float(T), device=labels.device)
        hidden, weight, states = states_of(model, batch, layers=layers)
        if self._live:
            with torch.no_grad():
                t_hidden, t_weight, t_states = states_of(self.teacher, batch, layers=layers)
            teacher, scores = (t_hidden,), live(T.detach(), t_weight.detach().to(t_hidden.dtype))
        else:
            if teacher_cache.VALUES not in batch:
                raise ValueError(
                    f"the batch has no {teacher_cache.VALUES}: train on teacher_cache.Cached(batches, cache)"
                )
            teacher = tuple(batch[name] for name in teacher_cache.KEYS if name in batch)
            scores = stored(T.detach(), self.teacher, tail=self.tail)
        options = dict(temperature=T, divergence=self.divergence, kd=self.kd, ce=self.ce, chunk=self.chunk)
        weights = batch.get(TOKEN_WEIGHTS)
        value, parts = distillation(hidden, weight, labels, teacher, scores, token_weights=weights, **options)
        tokens = losses.supervised(labels)
        if model.training:
            now = parts | {"temperature": T.detach() * tokens, "tokens": tokens}
            self._seen = {name: self._seen.get(name, 0) + part for name, part in now.items()}
        terms = {"distillation": value}
        if hasattr(self.temperature, "penalty"):
            terms["temperature"] = self.temperature.penalty() * tokens  # the loop divides by all tokens of the step
        if layers:
            terms["alignment"] = self.alignment(states, t_states, labels)
        return terms

    def seen(self) -> dict[str, float]:
        """Means over the supervised tokens since this was last asked: kd (with T^2) and ce without their factors, and
        the temperature. Of this process, and in no checkpoint."""
        sums, self._seen = {name: float(value) for name, value in self._seen.items()}, {}
        tokens = max(1.0, sums.pop("tokens", 0.0))
        return {name: value / tokens for name, value in sums.items()}

    def _check(self, model: nn.Module) -> None:
        if self._live:
            check_teacher(self.teacher, model)
        inside = set(map(id, model.modules()))
        for name in ("temperature", "alignment"):
            part = getattr(self, name)
            if isinstance(part, nn.Module) and id(part) not in inside:
                raise ValueError(
                    f"the {name} is a module and not attached to the model, so that it would be neither clipped nor "
                    f"saved: model.{name} = ..."
                )


def states_of(model: nn.Module, batch: dict[str, Tensor], *, layers: bool = False) -> tuple[Tensor, Tensor, list]:
    """Last hidden states (B, T, D), the head (V, D), and on request the states of every layer: what enters the first
    block, what leaves each, and the last after the final norm.

    Asked by hooks of our own on what enters the blocks: those of transformers' `output_hidden_states` stay, break the
    graph of a compiled block (ContextVar, torch 2.13), and where it is checkpointed as well leave it uncompiled without
    a word.
    """
    backbone, head = _parts(model)
    extra = {"labels", TOKEN_WEIGHTS, *teacher_cache.KEYS}
    inputs = {name: tensor for name, tensor in batch.items() if name not in extra}
    states: list[Tensor] = []

    def keep(block: nn.Module, entering: tuple) -> None:
        states.append(entering[0])

    hooks = [block.register_forward_pre_hook(keep) for block in compiling.blocks(backbone)] if layers else []
    try:
        last = backbone(**inputs, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return last, head, [*states, last] if layers else []


def _parts(model: nn.Module) -> tuple[nn.Module, Tensor]:
    parts = losses.backbone_and_head(model)
    if parts is None:
        raise ValueError(f"{type(model).__name__}: the head must be one matrix product, without adapter or soft cap")
    return parts
