"""What to train on: four losses for one student, in one function for the loop.

    ce      next-token cross-entropy
    logits  T^2 KL(teacher || student) on softened logits
    hidden  distance of the student's layers to the teacher's
    masked  tokens are replaced by a mask and predicted (the DLM objective), with a forward pass of its own

The first three share one forward pass. Every term is a sum over the supervised tokens of a batch, as the loop wants
it, so that micro-batches add up to the large batch; one in which nothing is supervised or masked adds zero. Only
what has a weight is computed. The weights are fixed, or set by one of the modules in `mixing`. `objective.seen()`
gives the means without the weights: the write-up logged other numbers than it trained on.

The teacher answers on the unmasked tokens, and keeps the rules of `distill.check_teacher`.

Footgun: under causal attention masking token i hides nothing from position i - 1, which never saw it. The masked
objective of a causal model is next-token prediction with a damaged past, not bidirectional denoising.
"""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor, nn

from nblib import losses
from nblib.methods import alignment, distill, divergences, loss_weights

NAMES = ("ce", "logits", "hidden", "masked")


def logit_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    *,
    temperature: float,
) -> Tensor:
    """T^2 KL of the teacher's next-token distribution to the student's, (B, T, D) each, logits chunk by chunk."""
    T = torch.tensor(float(temperature), device=labels.device)
    scores = divergences.live(T, teacher_weight.detach().to(teacher_hidden.dtype))
    return distill.distillation(hidden, weight, labels, (teacher_hidden,), scores, temperature=T)[0]


def check_mask_id(tokenizer, mask_id: int) -> list[int]:
    """The special ids of a tokenizer, `mask_id` being one of them, or an error: masking with an ordinary token teaches
    the model that this word stands for any other. The write-up masked with id 0, which in Qwen3 is "!"."""
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    if mask_id not in special:
        inside = isinstance(mask_id, int) and 0 <= mask_id < len(tokenizer)
        what = f"the ordinary token {tokenizer.decode([mask_id])!r}" if inside else "not in the vocabulary"
        raise ValueError(f"mask_id = {mask_id} is {what}: allowed are the special tokens {sorted(special)}")
    return sorted(special)


def mask_tokens(
    ids: Tensor, *, mask_id: int, probability: float, special_ids: Iterable[int] = (), among: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Replace each token with `probability` by the mask; special tokens never, nor any outside `among`. (B, T) twice.

    Drawn from the global generator, whose state is in the checkpoint.
    """
    if not 0 < probability <= 1:
        raise ValueError(f"probability = {probability}: must be above 0 and at most 1")
    kept = torch.isin(ids, ids.new_tensor([mask_id, *special_ids]))
    chosen = (torch.rand(ids.shape, device=ids.device) < probability) & ~kept
    chosen = chosen if among is None else chosen & among
    return ids.masked_fill(chosen, mask_id), chosen


def masked_tokens(
    model: nn.Module,
    batch: dict[str, Tensor],
    *,
    mask_id: int,
    probability: float = 0.15,
    special_ids: Iterable[int] = (),
    complementary: bool = False,
) -> Tensor:
    """Cross-entropy of masked tokens, token i from the logits at i - 1, for the sum over all that can be masked.

    Each token counts with probability p, so dividing by p makes the expectation that sum whatever p is. Dividing by
    the number masked would be a mean per micro-batch, which does not add up. `complementary` adds a second view that
    masks exactly the rest: every token counts once and nothing is divided, but the views are damaged differently.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    among = labels != losses.IGNORED
    among[:, 0] = False  # nothing predicts the first token, so masking it would only take context away
    options = dict(mask_id=mask_id, special_ids=tuple(special_ids))
    seen, chosen = mask_tokens(ids, probability=probability, among=among, **options)
    if complementary:
        rest, others = mask_tokens(ids, probability=1.0, among=among & ~chosen, **options)
        seen, chosen, labels = torch.cat([seen, rest]), torch.cat([chosen, others]), labels.repeat(2, 1)
        batch = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    hidden, weight, _ = distill.states_of(model, batch | {"input_ids": seen})
    rows, targets = losses.shifted_rows(hidden, labels.masked_fill(~chosen, losses.IGNORED))
    return losses.chunked_loss(rows, weight, targets) / (1.0 if complementary else probability)


@dataclass
class Objective:
    """A loss for the loop: the weighted sum of what `weights` names, fixed or from a `mixing.Curriculum`.

    A `mixing.Router` comes on top: what it makes of the plain losses is still multiplied by those weights.
    """

    weights: dict[str, float] | loss_weights.Curriculum
    _: KW_ONLY
    teacher: nn.Module | None = field(default=None, repr=False)
    temperature: float = 1.0
    distance: str = "mse"  # of hidden states
    layers: str | Sequence[float] = "uniform"  # weights of the layers
    mask_id: int | None = None
    mask_probability: float = 0.15
    special_ids: Sequence[int] = ()  # never masked: what check_mask_id returns
    complementary: bool = False
    router: loss_weights.Router | None = None
    _seen: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)  # name -> loss, term, tokens

    def __post_init__(self):
        phases = [self.weights] if isinstance(self.weights, dict) else self.weights.all()
        used = sorted({name for phase in phases for name, w in loss_weights.check(phase, NAMES).items() if w})
        if self.teacher is None and (needs := [n for n in ("logits", "hidden") if n in used]):
            raise ValueError(f"teacher = None: needed for {' and '.join(needs)}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: must be above 0")
        if self.mask_id is None and "masked" in used:
            raise ValueError("mask_id = None: masked needs one of the tokenizer's special tokens, see check_mask_id")
        if self.router is not None and set(self.router.names) != set(used):
            raise ValueError(f"the router mixes {', '.join(self.router.names)}; with a weight are {', '.join(used)}")

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self._check(model)
        weights = self.weights if isinstance(self.weights, dict) else self.weights()
        weights = {name: w for name, w in weights.items() if w}
        plain, tokens = self._sums(model, batch, weights), losses.supervised(batch["labels"])
        mixed = plain if self.router is None else self.router.mix(plain, tokens)
        terms = {name: weights.get(name, 1.0) * value for name, value in mixed.items()}
        if model.training:
            for name, value in plain.items():
                now = torch.stack([value.detach(), terms[name].detach(), tokens.to(value.dtype)])
                self._seen[name] = self._seen.get(name, 0) + now.double()
        return terms

    def seen(self) -> dict[str, float]:
        """Since this was last asked, over the supervised tokens it was computed on: the mean of every loss without its
        weight, and as `weight_...` what it was multiplied by. Of this process, and in no checkpoint."""
        found = {name: each.tolist() for name, each in self._seen.items()}
        self._seen = {}
        means = {name: loss / max(1.0, tokens) for name, (loss, _, tokens) in found.items()}
        return means | {f"weight_{name}": term / loss for name, (loss, term, _) in found.items() if loss}

    def _sums(self, model: nn.Module, batch: dict[str, Tensor], on: Iterable[str]) -> dict[str, Tensor]:
        sums, labels = {}, batch["labels"]
        if {"ce", "logits", "hidden"} & set(on):
            hidden, weight, states = distill.states_of(model, batch, layers="hidden" in on)
        if {"logits", "hidden"} & set(on):
            with torch.no_grad():
                t_hidden, t_weight, t_states = distill.states_of(self.teacher, batch, layers="hidden" in on)
        if "ce" in on:
            rows, targets = losses.shifted_rows(hidden, labels)
            sums["ce"] = losses.chunked_loss(rows, weight, targets)
        if "logits" in on:
            sums["logits"] = logit_distillation(
                hidden, weight, t_hidden, t_weight, labels, temperature=self.temperature
            )
        if "hidden" in on:
            sums["hidden"] = alignment.hidden_distillation(
                states[1:], t_states[1:], labels, kind=self.distance, weights=self.layers
            )
        if "masked" in on:
            sums["masked"] = masked_tokens(
                model,
                batch,
                mask_id=self.mask_id,
                probability=self.mask_probability,
                special_ids=self.special_ids,
                complementary=self.complementary,
            )
        return sums

    def _check(self, model: nn.Module) -> None:
        if self.teacher is not None:
            distill.check_teacher(self.teacher, model)
        inside = set(map(id, model.modules()))
        for part in (self.weights, self.router):
            if isinstance(part, nn.Module) and id(part) not in inside:
                raise ValueError(
                    f"the {type(part).__name__} is not attached to the model, so no checkpoint would hold its state: "
                    "model.mixer = ..."
                )
