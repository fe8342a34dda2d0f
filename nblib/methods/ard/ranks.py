"""Which ranks matter: prior variances fitted to held-out text, relevance read from them, and
pruning by it.

Each rank k of an adapter has a prior N(0, v_k). With beta_k = 1/2 sum of E z_k^2 over n real tokens
and alpha = n / 2, the inverse-gamma estimate

    v_k = beta_k / alpha = mean over tokens of (mu_k^2 + e^l_k)

is also the variance at which the sum of the KL terms (ard/layer.py) is smallest, so fitting v and
training the adapter pull the same way. n counts real tokens, and so does beta: with padding in one
of them only, v depends on how a batch was padded. E z^2 is taken exactly, not by drawing, so an
update uses no random numbers and a run resumes bit for bit. The adapters below draw nothing either.
In training they do, which makes E z^2 larger there, so v_k is a little below its best. With `noisy`
they draw here too, from a generator of their own; the KL of the training is then smallest in v.

The rows come from a pool that training never sees, and are drawn anew each epoch. Fitted to
training text, the priors would believe what the adapter has learned by heart.

Footgun: v_k alone is no relevance. z_k * c with B[:, k] / c is the same model with v_k * c^2, and a
rank that nobody needs rests at its prior, mu = 0 and e^l = v, at whatever v was: it need not
shrink. What a rank adds to the output in evaluation is s mu_k B[:, k]. Its mean square, "signal",
is what pruning should go by.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from nblib import runtime, wiring
from nblib.methods.ard.layer import adapters, check_shape, passes, sampling
from nblib.train import Batch

Scores = dict[str, Tensor]  # adapter -> one number per rank
MEASURES = ("signal", "weighted", "variance")
FLOOR = 1e-6  # of a prior variance


class HeldOut:
    """`count` rows drawn anew each epoch from a pool that training never sees.

    What an epoch draws is a function of seed and epoch alone, so there is nothing to save for a
    resumed run: `pool.set_epoch(batches.epoch)` and iterate. `rows` is (R, T), or a dict of such
    with an attention mask.
    """

    def __init__(self, rows: Tensor | Batch, *, count: int, batch: int = 8, seed: int = 0):
        self.rows = {"input_ids": rows, "labels": rows} if isinstance(rows, Tensor) else rows
        self.size, self.count, self.batch, self.seed, self.epoch = (
            len(self.rows["input_ids"]),
            count,
            batch,
            seed,
            0,
        )
        if not 1 <= count <= self.size:
            raise ValueError(f"count = {count}: allowed are 1 to {self.size}, the rows of the pool")

    def set_epoch(self, epoch: int) -> "HeldOut":
        self.epoch = epoch
        return self

    def __iter__(self) -> Iterator[Batch]:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        for at in torch.randperm(self.size, generator=draw)[: self.count].split(self.batch):
            yield {name: tensor[at] for name, tensor in self.rows.items()}


@torch.no_grad()
def estimate_priors(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    machine: runtime.Machine | None = None,
    noisy: bool = False,
) -> int:
    """Fit every prior variance to the latents of these batches; returns the number of real tokens.

    With `noisy` the inputs of a layer carry the noise of those below, as in training. The
    generators stay as they are.
    """
    layers, tokens = adapters(model), 0
    sums = {
        name: torch.zeros(2, a.rank, dtype=torch.float64, device=a.lora_mean.device)
        for name, a in layers.items()
    }
    with runtime.seeded(0), sampling(model) if noisy else nullcontext():
        for seen, mask in passes(model, batches, machine=machine):
            tokens += int(mask.sum())
            for name, latents in seen.items():
                for latent in latents:
                    check_shape(name, latent, mask)
                    # (n, r)
                    mean, logvar = (
                        x.reshape(mask.numel(), -1)[mask.flatten()].double() for x in latent[:2]
                    )
                    square = mean.square()
                    # of E z^2
                    sums[name] += torch.stack([0.5 * (square + logvar.exp()).sum(0), square.sum(0)])
    if not tokens:
        raise ValueError("batches: no real token to estimate the priors from")
    for name, (beta, power) in sums.items():
        layers[name].prior.copy_((beta / (tokens / 2)).clamp_min(FLOOR))  # alpha = tokens / 2
        layers[name].power.copy_(power / tokens)
    return tokens


# ------------------------------------------------------------------ relevance and pruning


def relevance(model: nn.Module, *, by: str = "signal") -> Scores:
    """One number per rank, from the last `estimate_priors`.

    signal     mean of |s mu_k B_k|^2: what the rank adds to the output in evaluation, which draws
               nothing
    weighted   v_k |s B_k|^2: the same with the noise counted in
    variance   v_k, as the method was first written; it does not know how loud B is
    """
    if by not in MEASURES:
        raise ValueError(f"by = {by!r}: allowed are {', '.join(MEASURES)}")
    if not any(a.power.any() for a in adapters(model).values()):
        raise ValueError("the priors were never estimated: call estimate_priors first")
    scores = {}
    for name, a in adapters(model).items():
        gain = 1.0 if by == "variance" else (a.scale * a.lora_up.detach()).square().sum(0)  # (r,)
        scores[name] = (a.power if by == "signal" else a.prior) * gain
    return scores


def grade(value: float, thresholds: tuple[float, float] = (0.01, 0.1)) -> str:
    """Return a word for a prior variance: above the second threshold, above the first, or
    neither.
    """
    if not thresholds[0] < thresholds[1]:
        raise ValueError(f"thresholds = {thresholds}: the first must be below the second")
    return "High" if value > thresholds[1] else "Medium" if value > thresholds[0] else "Low"


def prune(model: nn.Module, scores: Scores, *, keep: int) -> dict[str, int]:
    """Keep the `keep` ranks with the highest scores, over all layers together, and remove the
    others for good.

    A layer without ranks gets its plain projection back. s stays what it was, so a rank that stays
    acts as before. Returns the ranks left per layer. Optimizers made before hold the old tensors:
    make new ones.
    """
    layers = adapters(model)
    if scores.keys() != layers.keys() or any(
        len(scores[name]) != a.rank for name, a in layers.items()
    ):
        raise ValueError(
            f"scores: one number per rank of each of the {len(layers)} adapters is needed"
        )
    everything = torch.cat([s.detach().cpu().double() for s in scores.values()])
    if not 0 <= keep <= len(everything):
        raise ValueError(
            f"keep = {keep}: allowed are 0 to {len(everything)}, the ranks of all layers"
        )
    best = torch.zeros(len(everything), dtype=torch.bool)
    best[everything.argsort(descending=True, stable=True)[:keep]] = True
    left = {}
    for (name, adapter), ranks in zip(
        layers.items(), best.split([a.rank for a in layers.values()])
    ):
        left[name] = int(ranks.sum())
        adapter.keep(ranks)
    wiring.swap(model, lambda name, a: None if left[name] else a.base, layers)
    return left
