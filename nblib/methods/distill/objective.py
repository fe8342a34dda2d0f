"""What to train on: up to four losses of one student, and a teacher, in one loss for the loop.

    ce      cross-entropy with the next token
    logits  T^2 D(softmax(t / T), softmax(s / T)), the teacher's whole distribution of the next
            token (distillation)
    hidden  distance of the student's layers to the teacher's
    masked  tokens are replaced by a mask and predicted (the DLM objective), with a forward pass of
            its own

The first three share one forward pass. Every term is a sum over the supervised tokens of a batch,
so micro-batches add up to the large batch. Only what has a weight is computed.

Without T^2 the gradient of `logits` falls as 1 / T^2 where T is large, so a new T would also be a
new rate (Hinton et al., arXiv:1503.02531). With T^2 a large T means fitting the logits themselves.
The head is applied to a chunk of rows at a time (nblib/losses.py). The teacher's logits exist for
the same chunk, or come from a cache.

The teacher is frozen, in evaluation mode, asked without a graph and without a KV cache, and no part
of the student: `check_teacher` names the rule that is broken. `no_grad` and not `inference_mode`:
autograd cannot save what was made in the latter, and a learned T saves the teacher's logits (P33).
To spare memory, checkpoint the student's blocks alone (`compiling.checkpoint_blocks`): the teacher
keeps nothing. `compiling.compile_blocks` works on both.

Footguns: before training, `logits` is T^2 (ln V - entropy of the teacher's p), not ln V. Judge the
start by that (P44). Under causal attention, masking token i hides nothing from position i - 1,
which never saw it. So the masked objective of a causal model is next-token prediction with a
damaged past, not bidirectional denoising.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nblib import compiling, losses
from nblib.batch import Batch, supervised_rows
from nblib.losses import Terms
from nblib.methods.distill import divergences, teacher_cache

Teacher = nn.Module | teacher_cache.Cache
Layers = Sequence[Tensor]  # (B, T, D) each
NAMES = ("ce", "logits", "hidden", "masked")
# a batch may carry (B, T) weights of its labels, for what `distillation` computes
TOKEN_WEIGHTS = "token_weights"
DISTANCES = {  # of two tensors (n, D), one number per row; in fp32 or better
    "mse": lambda s, t: (s - t).square().mean(-1),
    "relative": lambda s, t: (s - t).square().sum(-1) / t.square().sum(-1).clamp_min(1e-12),
    # 2 / D cosine
    "normalised": lambda s, t: (F.normalize(s, dim=-1) - F.normalize(t, dim=-1)).square().mean(-1),
    "cosine": lambda s, t: 1 - F.cosine_similarity(s, t, dim=-1),
}
# of logits at once; a divergence with all its gradients holds about eight copies
CHUNK_ENTRIES = 2**25


@dataclass
class Objective:
    """A loss for the loop: the weighted sum of what `weights` names.

    weights      by name; or a schedule: called, it gives those of now, and its `all()` lists all
                 that it may give
    teacher      a frozen model; for `logits` also the `teacher_cache.Cache` of one, with
                 `teacher_cache.Cached` batches
    temperature  a number, or a module of nblib/methods/distill/temperature.py
    divergence   of `logits`: forward, reverse, js, soft_ce
    tail         how to read what a cache knows of all other tokens: drawn, spread, bucket, none
                 (the trap)
    one_pass     `logits` and `ce` from the same logits, with their weights, as one term:
                 `distillation`
    distance, layers  of `hidden`: the distance, and a number per layer (alignment.py makes some)
    alignment    a module: (student layers, teacher layers, labels) -> one more term (alignment.py)
    mask_id, mask_probability, special_ids, complementary  of `masked`, see `masked_tokens`
    router       with `names` and `mix(plain losses, tokens)`; what it makes of them is still
                 multiplied by `weights`

    Attach what is a module to the model (`model.mixer = router`), so that it is clipped and saved
    with it.
    """

    weights: dict[str, float] | Callable[[], dict[str, float]]
    _: KW_ONLY
    teacher: Teacher | None = field(default=None, repr=False)
    temperature: float | nn.Module = 1.0
    divergence: str = "forward"
    tail: str = "drawn"
    one_pass: bool = False
    distance: str = "mse"
    layers: Sequence[float] = ()
    alignment: nn.Module | None = None
    mask_id: int | None = None
    mask_probability: float = 0.15
    special_ids: Sequence[int] = ()
    complementary: bool = False
    router: nn.Module | None = None
    chunk: int | None = None  # rows whose logits exist at a time
    # name -> loss, weighted, tokens
    _seen: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        phases = [self.weights] if isinstance(self.weights, dict) else self.weights.all()
        used = sorted({name for phase in phases for name, w in check_weights(phase).items() if w})
        needs = [n for n in ("logits", "hidden") if n in used] + ["alignment"] * (
            self.alignment is not None
        )
        if self.teacher is None and needs:
            raise ValueError(f"teacher = None: needed for {' and '.join(needs)}")
        if isinstance(self.teacher, teacher_cache.Cache) and set(needs) - {"logits"}:
            raise ValueError(
                f"{needs[-1]}: a cache holds no hidden states, it needs the live teacher"
            )
        if not isinstance(self.temperature, nn.Module) and not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature}: must be above 0")
        divergences.check(self.divergence, self.tail, self.teacher)
        if isinstance(self.temperature, nn.Module) and "logits" in used:
            divergences.check_learned(self.temperature, self.divergence, self.tail, self.teacher)
        if self.mask_id is None and "masked" in used:
            raise ValueError(
                "mask_id = None: masked needs one of the tokenizer's special tokens, see "
                "check_mask_id"
            )
        if self.router is not None and set(self.router.names) != set(used):
            raise ValueError(
                f"the router mixes {', '.join(self.router.names)}; with a weight are "
                f"{', '.join(used)}"
            )
        if self.router is not None and self.one_pass:
            raise ValueError("one_pass = True: the router needs every loss by itself")

    def __call__(self, model: nn.Module, batch: Batch) -> Terms:
        self._check(model)
        batch = Batch.of(batch)
        weights = self.weights if isinstance(self.weights, dict) else self.weights()
        weights = {name: w for name, w in weights.items() if w}
        plain, added = self._losses(model, batch, weights)
        tokens = losses.supervised(batch["labels"])
        mixed = plain if self.router is None else self.router.mix(plain, tokens)
        weighted = {name: weights.get(name, 1.0) * value for name, value in mixed.items()}
        for name, value in plain.items() if model.training else ():
            self._note(name, value, weighted[name], tokens)
        inside = ("ce", "logits") if "distillation" in added else ()
        return {name: value for name, value in weighted.items() if name not in inside} | added

    def _losses(
        self, model: nn.Module, batch: Batch, weights: dict[str, float]
    ) -> tuple[Terms, Terms]:
        """Every loss without its weight; and the terms that come with theirs. In one pass `ce` and
        `logits` are figures only, and the term `distillation` has the gradient.
        """
        plain, added, labels = {}, {}, batch.labels
        by_layer, one_pass = (
            "hidden" in weights or self.alignment is not None,
            self.one_pass and "logits" in weights,
        )
        if by_layer or set(weights) != {"masked"}:
            student = states_of(model, batch, layers=by_layer)
        teacher = None
        if by_layer or ("logits" in weights and isinstance(self.teacher, nn.Module)):
            with torch.no_grad():
                teacher = states_of(self.teacher, batch, layers=by_layer)
        if "ce" in weights and not one_pass:
            rows, targets = losses.shifted_rows(student.last, batch)
            plain["ce"] = losses.chunked_loss(rows, student.head, targets)
        if "logits" in weights:
            T, tokens = self.temperature, losses.supervised(labels)
            T = T() if isinstance(T, nn.Module) else torch.full((), float(T), device=labels.device)
            answers, scores = self._answers(batch, teacher, T.detach())
            options = dict(temperature=T, divergence=self.divergence, chunk=self.chunk)
            options |= dict(kd=weights["logits"], ce=weights.get("ce", 0.0)) if one_pass else {}
            options["token_weights"] = batch.get(TOKEN_WEIGHTS)
            value, parts = distillation(
                student.last, student.head, batch, answers, scores, **options
            )
            plain |= parts if one_pass else {"logits": value}
            added |= {"distillation": value} if one_pass else {}
            if hasattr(self.temperature, "penalty"):  # the loop divides by all tokens of the step
                added["temperature"] = self.temperature.penalty() * tokens
            if model.training:
                self._note("temperature", T * tokens, T * tokens, tokens)
        if "hidden" in weights:
            options = dict(kind=self.distance, weights=self.layers)
            plain["hidden"] = hidden_distillation(
                student.layers[1:], teacher.layers[1:], batch, **options
            )
        if "masked" in weights:
            options = dict(
                mask_id=self.mask_id,
                probability=self.mask_probability,
                special_ids=self.special_ids,
            )
            plain["masked"] = masked_tokens(
                model, batch, complementary=self.complementary, **options
            )
        if self.alignment is not None:
            added["alignment"] = self.alignment(student.layers, teacher.layers, batch)
        return plain, added

    def _answers(
        self, batch: Batch, teacher: "States | None", T: Tensor
    ) -> tuple[tuple[Tensor, ...], divergences.Scores]:
        """Return what the teacher says of the next tokens, live or as the cache has it, and how
        scores are made of that.
        """
        if teacher is not None:
            # On a card the scores are a product in the autocast dtype, as the student's are; on a
            # CPU in fp32.
            low = teacher.last.is_cuda and torch.is_autocast_enabled("cuda")
            last = teacher.last.to(torch.get_autocast_dtype("cuda")) if low else teacher.last
            return (last,), divergences.live(T, teacher.head.detach().to(last.dtype))
        if teacher_cache.VALUES not in batch:
            raise ValueError(
                "no answers in the batch: train on teacher_cache.Cached(batches, cache)"
            )
        answers = tuple(
            teacher_cache.widened(batch[name]) for name in teacher_cache.KEYS if name in batch
        )
        at = None if isinstance(self.temperature, nn.Module) else float(self.temperature)
        return answers, divergences.stored(T, self.teacher, tail=self.tail, at=at)

    def _note(self, name: str, loss: Tensor, weighted: Tensor, tokens: Tensor) -> None:
        now = torch.stack([loss.detach(), weighted.detach(), tokens.to(loss.dtype)])
        self._seen[name] = self._seen.get(name, 0) + now.double()

    def seen(self) -> dict[str, float]:
        """Return the mean of every loss without its weight, over the supervised tokens since the
        last call. As `weight_...` what it was multiplied by, and `temperature`. Of this process,
        and in no checkpoint.
        """
        sums, self._seen = {name: entry.tolist() for name, entry in self._seen.items()}, {}
        means = {name: loss / max(1.0, tokens) for name, (loss, _, tokens) in sums.items()}
        weights = {
            name: weighted / loss
            for name, (loss, weighted, _) in sums.items()
            if loss and name in NAMES
        }
        return means | {f"weight_{name}": weight for name, weight in weights.items()}

    def _check(self, model: nn.Module) -> None:
        if isinstance(self.teacher, nn.Module):
            check_teacher(self.teacher, model)
        inside = set(map(id, model.modules()))
        for name in ("weights", "router", "temperature", "alignment"):
            part = getattr(self, name)
            if isinstance(part, nn.Module) and id(part) not in inside:
                raise ValueError(
                    f"{name}: the {type(part).__name__} is not attached to the model, so it "
                    "would be neither clipped "
                    f"nor saved: model.{name} = ..."
                )


def check_weights(weights: dict[str, float]) -> dict[str, float]:
    """Return the same weights, or an error that says what is wrong with them."""
    if unknown := [name for name in weights if name not in NAMES]:
        raise ValueError(f"objective {unknown[0]!r}: allowed are {', '.join(NAMES)}")
    if not any(weights.values()) or not all(0 <= w < math.inf for w in weights.values()):
        raise ValueError(f"weights = {weights}: must be numbers from 0 up, not all zero")
    return dict(weights)


def from_teacher(
    teacher: Teacher,
    temperature: float | nn.Module = 2.0,
    *,
    kd: float = 1.0,
    ce: float = 0.0,
    **options,
) -> Objective:
    """Distillation: kd `logits` + ce `ce` in one pass, as the term `distillation`; `options` are
    the objective's.
    """
    if not (0 < kd < math.inf and 0 <= ce < math.inf):
        raise ValueError(f"kd = {kd}, ce = {ce}: kd must be above 0, ce from 0 up")
    return Objective(
        {"logits": kd, "ce": ce}, teacher=teacher, temperature=temperature, one_pass=True, **options
    )


def distillation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | Batch,
    answers: tuple[Tensor, ...],
    scores: divergences.Scores,
    *,
    temperature: Tensor,
    divergence: str = "forward",
    kd: float = 1.0,
    ce: float = 0.0,
    token_weights: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Terms]:
    """kd T^2 D + ce (cross-entropy), summed over the supervised tokens, and `logits` and `ce`
    without their factors.

    hidden (B, T, D), weight (V, D), labels (B, T). `answers` are the teacher's: tensors (B, T or T
    - 1, ...), at t what predicts label t + 1, in the form that `scores` (`divergences.live` or
    `stored`) understands.
    """
    rows, targets = losses.shifted_rows(hidden, labels)  # (n, D), (n,)
    if isinstance(labels, Batch):
        which, T = labels.supervised, labels.labels.shape[1]
    else:
        which, T = supervised_rows(labels), labels.shape[1]
    answers = [tensor[:, : T - 1].flatten(0, 1)[which] for tensor in answers]
    exact = torch.promote_types(hidden.dtype, torch.float32)
    weights = torch.ones_like(targets, dtype=exact)
    if token_weights is not None:
        weights = token_weights[:, 1:].flatten()[which].to(exact)
    parts, function = {}, divergences.DIVERGENCES[divergence]
    row_loss = divergences.mixed_rows(function, temperature, scores, kd=kd, ce=ce, tally=parts)
    chunk = chunk or max(16, CHUNK_ENTRIES // len(weight))
    value = losses.chunked_loss(
        rows, weight, targets, weights, *answers, rows=row_loss, chunk=chunk
    )
    # the same value, whose backward also reaches T
    if temperature.requires_grad and "slope" in parts:
        value = value + (temperature - temperature.detach()) * parts.pop("slope")
    return value, parts


def check_teacher(teacher: nn.Module, student: nn.Module) -> None:
    """Raise with the reason if a teacher would train, drop out, be saved with the student, or break
    its backward.
    """
    inside = set(map(id, student.modules()))
    if any(id(m) in inside for m in teacher.modules()):
        raise ValueError(
            "the teacher is inside the student's module tree: student.train() would switch on "
            "its dropout, and "
            "checkpoints would hold it; keep it in a variable of its own"
        )
    if training := [name or "all of it" for name, m in teacher.named_modules() if m.training]:
        raise ValueError(
            f"the teacher is in training mode ({training[0]}), where dropout makes it "
            "contradict itself: "
            "models.as_teacher(teacher)"
        )
    if trains := [name for name, p in teacher.named_parameters() if p.requires_grad]:
        raise ValueError(
            f"the teacher is not frozen ({trains[0]} requires a gradient): "
            "models.as_teacher(teacher)"
        )
    if any(p.is_inference() for p in teacher.parameters()):
        raise ValueError(
            "the teacher was made in torch.inference_mode: backward cannot save what it computes"
        )
    sizes = [len(losses.backbone_and_head(m, needed=True)[1]) for m in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            "the student scores {} tokens, the teacher {}: they need one vocabulary".format(*sizes)
        )


class States(NamedTuple):
    last: Tensor  # (B, T, D), after the final norm
    head: Tensor  # (V, D)
    # what enters the first block, what leaves each, and the last after the final norm; or empty
    layers: list[Tensor]


def states_of(model: nn.Module, batch: Batch, *, layers: bool = False) -> States:
    """Return the model's hidden states, those of every layer on request.

    By hooks of our own on what enters the blocks. The hooks of transformers' `output_hidden_states`
    stay on the model. They break the graph of a compiled block (ContextVar, torch 2.13). A block
    that is checkpointed as well then runs uncompiled, without a message.
    """
    backbone, head = losses.backbone_and_head(model, needed=True)
    extra = {"labels", TOKEN_WEIGHTS, *teacher_cache.KEYS}
    states: list[Tensor] = []

    def add(block: nn.Module, inputs: tuple) -> None:
        states.append(inputs[0])

    hooks = (
        [block.register_forward_pre_hook(add) for block in compiling.blocks(backbone)]
        if layers
        else []
    )
    try:
        last = losses.forward(backbone, batch, but=extra).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return States(last, head, [*states, last] if layers else [])


def hidden_distillation(
    student: Layers,
    teacher: Layers,
    labels: Tensor | Batch,
    *,
    kind: str = "mse",
    weights: Sequence[float] = (),
) -> Tensor:
    """Weighted mean over layers of the distance between hidden states, summed over the positions
    cross-entropy uses.

    One per block, the last after the final norm: the layers of `states_of` without the first. Later
    blocks have larger activations, so `mse` is mostly about them and a few of their features;
    `relative` divides by the teacher's square.
    """
    if kind not in DISTANCES:
        raise ValueError(f"kind = {kind!r}: allowed are {', '.join(DISTANCES)}")
    weights, total = weights or [1.0] * len(student), 0.0
    shapes = [[tuple(h.shape) for h in layers] for layers in (student, teacher)]
    if shapes[0] != shapes[1] or not student:
        sides = [f"{len(layers)} of {layers[-1:]}" for layers in shapes]
        raise ValueError(
            f"hidden states: student {sides[0]}, teacher {sides[1]}; allowed: as many, as wide"
        )
    if (
        len(weights) != len(student)
        or not all(0 <= w < math.inf for w in weights)
        or not any(weights)
    ):
        raise ValueError(
            f"weights = {weights}: allowed are {len(student)} numbers, none negative, not all zero"
        )
    for share, s, t in zip(weights, student, teacher):
        if share:
            exact = torch.promote_types(s.dtype, torch.float32)
            (s, _), (t, _) = losses.shifted_rows(s, labels), losses.shifted_rows(t.detach(), labels)
            total = total + share / sum(weights) * DISTANCES[kind](s.to(exact), t.to(exact)).sum()
    return total


def check_mask_id(tokenizer, mask_id: int) -> list[int]:
    """Return the special ids of a tokenizer; an error if `mask_id` is none of them. Masking with an
    ordinary token teaches the model that this word stands for any other. The write-up masked with
    id 0, which in Qwen3 is "!".
    """
    special = set(tokenizer.all_special_ids) | {
        i for i, t in tokenizer.added_tokens_decoder.items() if t.special
    }
    if mask_id not in special:
        inside = isinstance(mask_id, int) and 0 <= mask_id < len(tokenizer)
        what = (
            f"the ordinary token {tokenizer.decode([mask_id])!r}"
            if inside
            else "not in the vocabulary"
        )
        raise ValueError(
            f"mask_id = {mask_id} is {what}: allowed are the special tokens {sorted(special)}"
        )
    return sorted(special)


def mask_tokens(
    ids: Tensor,
    *,
    mask_id: int,
    probability: float,
    special_ids: Iterable[int] = (),
    among: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Replace each token with `probability` by the mask; special tokens never, nor any outside
    `among`. (B, T) twice.

    Drawn from the global generator, whose state is in the checkpoint.
    """
    if not 0 < probability <= 1:
        raise ValueError(f"probability = {probability}: must be above 0 and at most 1")
    special = torch.isin(ids, ids.new_tensor([mask_id, *special_ids]))
    chosen = (torch.rand(ids.shape, device=ids.device) < probability) & ~special
    chosen = chosen if among is None else chosen & among
    return ids.masked_fill(chosen, mask_id), chosen


def masked_tokens(
    model: nn.Module,
    batch: Batch,
    *,
    mask_id: int,
    probability: float = 0.15,
    special_ids: Iterable[int] = (),
    complementary: bool = False,
) -> Tensor:
    """Cross-entropy of masked tokens, token i from the logits at i - 1, for the sum over all that
    can be masked.

    Each token counts with probability p, so dividing by p makes the expectation that sum whatever p
    is. Dividing by the number masked would be a mean per micro-batch, which does not add up.
    `complementary` adds a second view that masks exactly the rest: every token counts once and
    nothing is divided, but the views are damaged differently.
    """
    batch = Batch.of(batch)
    ids, labels = batch["input_ids"], batch["labels"]
    among = labels != losses.IGNORED
    # nothing predicts the first token, so masking it would only take context away
    among[:, 0] = False
    options = dict(mask_id=mask_id, special_ids=tuple(special_ids))
    masked, chosen = mask_tokens(ids, probability=probability, among=among, **options)
    if complementary:
        rest, others = mask_tokens(ids, probability=1.0, among=among & ~chosen, **options)
        masked, chosen, labels = (
            torch.cat([masked, rest]),
            torch.cat([chosen, others]),
            labels.repeat(2, 1),
        )
        batch = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    hidden, weight, _ = states_of(model, {**batch, "input_ids": masked})
    rows, targets = losses.shifted_rows(hidden, labels.masked_fill(~chosen, losses.IGNORED))
    return losses.chunked_loss(rows, weight, targets) / (1.0 if complementary else probability)
