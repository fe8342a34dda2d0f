"""ARD-LoRA: each rank of an adapter is a noisy latent with a KL cost, which reveals the ranks that
nobody uses.

Beside a frozen projection W runs a low-rank path whose r latents are drawn anew for every token x:

    mu = M x,
    l = log-variance(G x),
    z ~ N(mu, e^l) in training, z = mu in evaluation,
    y = W x + s B z

with s = alpha / rank. The cost of what z tells about x is its divergence from a prior with one
variance per rank,

    KL(x) = sum over k of 1/2 [ log v_k - l_k + (e^l_k + mu_k^2) / v_k - 1 ]
    (nats per token)
    loss  = ( sum over supervised tokens of CE  +  beta * sum over real tokens, layers and ranks of
          KL ) / supervised

The KL is *summed* over layers and ranks, not averaged. So beta = 1 is the evidence bound. For each
single latent, beta says how many nats of CE a nat of KL costs; more layers or ranks do not change
that. (A mean over ranks, as often written, is this with beta / rank.) Prompts that are not
supervised pay too, because their latents speak to the answer through attention; padding does not.

Each adapter computes the KL per token in its own forward pass, on the very input of its projection.
The loss reads it with `collect` and drops the padding. So the mask need not travel into the model,
and nothing runs twice. Non-reentrant checkpointing runs its second forward pass when nobody
collects, so that pass cannot be counted.

What v_k say about relevance, and pruning by it, is in nblib/methods/ard/ranks.py; what surrounds a
run in adapter_files.py. "bounded" log-variances stay in (low, high) by a tanh and begin at `start`;
"raw" ones are l = G x, as first written, whose first variance is 1, half of the signal's.

Footgun: everything here is fp32 on purpose. An adapter cast to bf16 with its model loses small
updates (notebook 03), and e^l loses digits. Autocast is switched off inside the adapter for the
same reason. `ard_run.preflight` checks the dtype.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from nblib import losses, models, runtime, wiring
from nblib.train import Batch, Terms

LOGVARS = ("bounded", "raw")
# model -> the hook that counts its steps
_COUNTING: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Latent(NamedTuple):
    """What one call of an adapter computed: (..., r), (..., r) and (...,); only the KL is in the
    graph.

    Without noise the log-variance is -inf and the KL None.
    """

    mean: Tensor
    logvar: Tensor
    kl: Tensor | None


def divergence(mean: Tensor, logvar: Tensor, variance: Tensor) -> Tensor:
    """KL of N(mean, e^logvar) from N(0, variance), elementwise."""
    return 0.5 * (variance.log() - logvar + (logvar.exp() + mean.square()) / variance - 1)


class ARDLinear(nn.Module):
    """A frozen projection with r noisy latents beside it.

    Tensors are named lora_*, so that others see an adapter.
    """

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        scale: float,
        *,
        deterministic: bool = False,
        bounds: tuple[float, float] | None = (-8.0, 4.0),
        start: float = -2.0,
    ):
        super().__init__()
        (out, width), device = wiring.shape(base), base.weight.device
        self.base, self.scale, self.bounds = base.requires_grad_(False), scale, bounds
        fp32 = dict(device=device, dtype=torch.float32)
        self.lora_mean = nn.Parameter(
            torch.empty(rank, width, **fp32).uniform_(-1, 1).mul_(math.sqrt(6 / width))
        )
        self.lora_up = nn.Parameter(torch.zeros(out, rank, **fp32))
        near_zero = torch.empty(rank, width, **fp32).uniform_(1e-3 / math.sqrt(2), 1e-3)
        self.lora_logvar = None if deterministic else nn.Parameter(near_zero)
        middle = (
            None
            if deterministic or bounds is None
            else nn.Parameter(torch.full((rank,), start, **fp32))
        )
        self.lora_middle = middle  # without it the first variance is 1, half of the signal's
        self.register_buffer("prior", torch.ones(rank, **fp32))  # v_k
        # mean of mu_k^2, from the same tokens
        self.register_buffer("power", torch.zeros(rank, **fp32))
        self.sampled = False  # draw in evaluation too
        self.seen: list[Latent] | None = None  # open while somebody collects

    @property
    def rank(self) -> int:
        return len(self.lora_mean)

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        draws = self.lora_logvar is not None and (self.training or self.sampled)
        with torch.autocast(x.device.type, enabled=False):
            h = x.to(self.lora_mean.dtype)
            # In training always the same operations, collected or not: recomputation must repeat
            # the first pass.
            if draws or self.seen is not None:
                mean, logvar = self.latent(h)  # (..., r)
                # (...,)
                kl = (
                    None
                    if self.lora_logvar is None
                    else divergence(mean, logvar, self.prior).sum(-1)
                )
                z = mean + torch.randn_like(mean) * (0.5 * logvar).exp() if draws else mean
                if self.seen is not None:
                    self.seen.append(Latent(mean.detach(), logvar.detach(), kl))
            else:
                z = F.linear(h, self.lora_mean)
            update = F.linear(z, self.lora_up) * self.scale
        return out + update.to(out.dtype)

    def latent(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance for inputs (..., in); the latter is -inf where nothing is drawn."""
        if self.lora_logvar is None:
            mean = F.linear(h, self.lora_mean)
            return mean, torch.full_like(mean, -math.inf)
        mean, raw = F.linear(h, torch.cat([self.lora_mean, self.lora_logvar])).chunk(2, dim=-1)
        if self.bounds is None:
            return mean, raw
        low, high = self.bounds
        centre, half = (low + high) / 2, (high - low) / 2
        raw = raw + self.lora_middle
        # near the centre the identity
        return mean, centre + half * torch.tanh((raw - centre) / half)

    def keep(self, ranks: Tensor) -> None:
        """Drop all other ranks: the tensors get smaller.

        Optimizers that hold the old ones must be made again.
        """
        ranks = ranks.to(self.lora_mean.device)
        for name in ("lora_mean", "lora_logvar", "lora_middle"):
            if (p := getattr(self, name)) is not None:
                setattr(
                    self,
                    name,
                    nn.Parameter(p.detach()[ranks].clone(), requires_grad=p.requires_grad),
                )
        self.lora_up = nn.Parameter(
            self.lora_up.detach()[:, ranks].clone(), requires_grad=self.lora_up.requires_grad
        )
        self.prior, self.power = self.prior[ranks].clone(), self.power[ranks].clone()

    def extra_repr(self) -> str:
        kind = "raw" if self.bounds is None else f"bounded {self.bounds}"
        return (
            f"rank={self.rank}, scale={self.scale:g}, "
            f"{'deterministic' if self.lora_logvar is None else kind}"
        )


# ------------------------------------------------------------------ attach


def projections(model: nn.Module, kinds: Iterable[str] = ("q_proj", "v_proj")) -> list[nn.Module]:
    """Return the linear layers whose own name is exactly one of `kinds`, as modules."""
    linear, kinds = wiring.select(model), list(kinds)
    allowed = sorted({name.rpartition(".")[2] for name in linear})
    if unknown := [kind for kind in kinds if kind not in allowed]:
        raise ValueError(
            f"kinds = {kinds}: the model has no {unknown[0]!r}; allowed are {', '.join(allowed)}"
        )
    return [m for name, m in linear.items() if name.rpartition(".")[2] in kinds]


def attach(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    targets: Iterable[nn.Module] | None = None,
    deterministic: bool = False,
    logvar: str = "bounded",
    bounds: tuple[float, float] = (-8.0, 4.0),
    start: float = -2.0,
) -> nn.Module:
    """Freeze the model and put an adapter beside each target, given as modules (default: every
    linear layer but the head). `deterministic` leaves out the noise: plain LoRA. `logvar="raw"` is
    l = G x, unbounded and without a bias.
    """
    if rank < 1 or not alpha > 0:
        raise ValueError(f"rank = {rank}, alpha = {alpha}: both must be positive")
    if logvar not in LOGVARS:
        raise ValueError(f"logvar = {logvar!r}: allowed are {', '.join(LOGVARS)}")
    if not bounds[0] < start < bounds[1]:
        raise ValueError(f"start = {start}: must lie inside bounds = {bounds}")
    chosen = list(wiring.select(model).values() if targets is None else targets)
    linear = {name: m for name, m in model.named_modules() if wiring.is_linear(m)}
    names = [name for name, m in linear.items() if any(m is target for target in chosen)]
    if not chosen or len(names) != len({id(m) for m in chosen}):
        raise ValueError(
            f"targets: {len(chosen)} modules, of which {len(names)} are linear layers of this model"
        )
    bounds = bounds if logvar == "bounded" else None
    spec = dict(
        rank=rank, scale=alpha / rank, deterministic=deterministic, bounds=bounds, start=start
    )
    return install(model, {name: spec for name in names})


def install(model: nn.Module, specs: dict[str, dict]) -> nn.Module:
    """Freeze the model and put an ARDLinear with these options in the place of each named
    module.
    """
    if adapters(model):
        raise ValueError(
            f"the model has adapters already, the first is {next(iter(adapters(model)))}"
        )
    projected = {name: model.get_submodule(name) for name in specs}
    for name, m in projected.items():
        _check_target(name, m)
    if any(not (type(m) is nn.Linear or wiring.is_conv1d(m)) for m in projected.values()):
        models.keep_differentiable(model)
    model.requires_grad_(False)
    wiring.swap(model, lambda name, m: ARDLinear(m, **specs[name]).train(m.training), projected)
    # Optimizer steps taken, for the warm-up of beta. A buffer, so that a resumed run goes on where
    # it was.
    device = next(iter(projected.values())).weight.device
    model.register_buffer("ard_steps", torch.zeros((), dtype=torch.long, device=device))
    return model


def _check_target(name: str, m: nn.Module) -> None:
    if type(m) is nn.Linear or wiring.is_conv1d(m):
        return
    if type(m).__name__ != "Linear4bit":
        raise ValueError(
            f"{name} is a {type(m).__name__}: allowed are nn.Linear, GPT-2's Conv1D and "
            "bitsandbytes Linear4bit"
        )
    if getattr(getattr(m.weight, "quant_state", None), "packing_format_for_cpu", False):
        raise ValueError(
            f"{name} was repacked for inference, its gradients are wrong: load the model again"
        )


def adapters(model: nn.Module) -> dict[str, ARDLinear]:
    """By name, in the order of the model; found by what they are."""
    return {name: m for name, m in model.named_modules() if isinstance(m, ARDLinear)}


# ------------------------------------------------------------------ the loss


@contextmanager
def collect(model: nn.Module) -> Iterator[dict[str, list[Latent]]]:
    """Collect what every adapter computes in the forward passes inside, by name."""
    latents = {name: [] for name in adapters(model)}
    for name, adapter in adapters(model).items():
        adapter.seen = latents[name]
    try:
        yield latents
    finally:
        for adapter in adapters(model).values():
            adapter.seen = None


@contextmanager
def sampling(model: nn.Module) -> Iterator[None]:
    """Draw latents in evaluation mode too, for averages over samples."""
    for adapter in adapters(model).values():
        adapter.sampled = True
    try:
        yield
    finally:
        for adapter in adapters(model).values():
            adapter.sampled = False


def kl(seen: dict[str, list[Latent]], mask: Tensor | None = None) -> Tensor:
    """Return collected KL summed over layers, ranks and the tokens of `mask` (B, T); None means
    that all are real.
    """
    for name, latents in seen.items():
        if not latents:
            raise ValueError(
                f"the adapter {name} was not reached by the forward pass: its KL is unknown"
            )
        for latent in latents:
            check_shape(name, latent, mask)
    every = [latent for latents in seen.values() for latent in latents]
    drawn = [latent.kl.flatten() for latent in every if latent.kl is not None]  # (tokens,) each
    if not drawn:
        return every[0].mean.new_zeros(())
    total = sum(drawn)
    if torch.is_grad_enabled() and not total.requires_grad:
        raise ValueError(
            "the KL has no graph: the adapters are frozen, or checkpointing is reentrant and "
            "ran them without "
            "gradients; use_reentrant=False"
        )
    return total.sum() if mask is None else total.masked_fill(~mask.bool().flatten(), 0).sum()


def check_shape(name: str, latent: Latent, mask: Tensor | None) -> None:
    """(rows, tokens), or the same laid end to end.

    A router's choice of tokens cannot be told from padding.
    """
    if mask is not None and latent.mean.shape[:-1] not in (mask.shape, (mask.numel(),)):
        raise ValueError(
            f"{name} saw {tuple(latent.mean.shape[:-1])} tokens, the attention mask is "
            f"{tuple(mask.shape)}: only "
            "projections that see every token once can be masked"
        )


def passes(
    model: nn.Module, batches: Iterable[Batch], *, machine: runtime.Machine | None = None
) -> Iterator[tuple[dict[str, list[Latent]], Tensor]]:
    """Run batches through the model in evaluation mode, without its head: (latents by adapter, mask
    of real tokens).
    """
    device = next(iter(adapters(model).values())).lora_mean.device
    with wiring.evaluating(model):
        for batch in batches:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with (
                torch.no_grad(),
                machine.autocast() if machine else nullcontext(),
                collect(model) as seen,
            ):
                if losses.hidden_states(model, batch) is None:
                    model(
                        **{name: tensor for name, tensor in batch.items() if name != "labels"},
                        use_cache=False,
                    )
            yield seen, batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def loss(
    model: nn.Module,
    *,
    beta: float,
    warmup: int = 0,
    optimizer: Optimizer | None = None,
    language: Callable[[nn.Module, Batch], Terms] = losses.causal_lm,
) -> Callable[[nn.Module, Batch], Terms]:
    """Return a loss for the loop: `language`, and "kl" weighted by beta, which rises linearly over
    `warmup` optimizer steps.

    A hook of the optimizer counts the steps, so accumulation does not matter, in a buffer that
    checkpoints hold.
    """
    if beta < 0 or warmup < 0:
        raise ValueError(f"beta = {beta}, warmup = {warmup}: neither may be negative")
    if not adapters(model):
        raise ValueError("the model has no adapters: attach first")
    if warmup and optimizer is None:
        raise ValueError(f"warmup = {warmup}: give the optimizer whose steps are counted")
    if previous := _COUNTING.pop(model, None):
        previous.remove()  # or a second loss would count every step twice
    if optimizer is not None:
        _COUNTING[model] = optimizer.register_step_post_hook(lambda *_: model.ard_steps.add_(1))

    def terms(running: nn.Module, batch: Batch) -> Terms:
        with collect(running) as seen:
            values = language(running, batch)
        return values | {"kl": kl(seen, batch.get("attention_mask")) * beta * warm(model, warmup)}

    return terms


def warm(model: nn.Module, warmup: int) -> Tensor | float:
    """Return the share of beta in force: 1/warmup at the first step, 1 from the last step of the
    warm-up on.
    """
    return ((model.ard_steps + 1) / warmup).clamp(max=1.0) if warmup else 1.0
