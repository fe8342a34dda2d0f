"""QK-clip: after a step, heads whose attention logits grew too large have their queries and keys
scaled down.

    S_h = max q . k / sqrt(d) over all positions that head h attends to, in the forward passes of
    this step S_h > tau:   W_q, W_k of the head  <-  sqrt(tau / S_h) W_q, sqrt(tau / S_h) W_k
    (Kimi K2, 2025, tau = 100)

Muon's updates have full rank, so its logits grow faster than AdamW's; MuonClip is Muon with this
after each step. The logits are linear in both weights, so on the same input the head comes to tau
exactly. The others keep every bit.

    clip = qk_clip.attach(model, optimizer)          from now on, once per step of this optimizer
    clip.clipped                                     heads scaled so far
    clip.largest()                                   S of every head since the last step, by module,
                                                     (H,)

Grouped queries share a key head. It is scaled once, by the square root of what the worst head of
its group needs. Each query head of the group is then scaled by what remains for it: a head above
tau comes to tau, one below keeps its logits, up to rounding. Other groups keep every bit.

Where q and k are normed (Qwen3, OLMoE), the size of W_q and W_k is divided away, and the norms'
weights are scaled in their place. Qwen3 has one such weight for all heads of a layer, so there all
heads of the layer shrink as its worst needs. Norms bound these logits by sqrt(d) times the norms'
largest weights, so few trainings need the clip.

Footgun: the fused kernels never hold the logits. To find the largest, q k^T is multiplied once
more, so a step of attention costs about a quarter more and, for a moment, length x length numbers
per head.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_qk_clip"  # of the attention function in transformers
LARGEST = "largest_logit"  # of the buffer (H,)


class Clip:
    """What `attach` returns: the watched modules by name, and the heads scaled so far."""

    def __init__(self, watched: dict[str, nn.Module], tau: float):
        self.watched, self.tau, self.clipped = watched, tau, 0

    def largest(self) -> dict[str, Tensor]:
        return {name: getattr(m, LARGEST).clone() for name, m in self.watched.items()}

    @torch.no_grad()
    def __call__(self, *_) -> None:
        """Scale what passed tau, and forget what was seen."""
        for m in self.watched.values():
            largest = getattr(m, LARGEST)
            if dist.is_initialized():  # each process has seen other rows, and all must scale alike
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            if isinstance(m.q_proj.weight, DTensor):
                raise ValueError(
                    "QK-clip scales whole weights, and fsdp has cut them among processes: use "
                    "mesh=ddp"
                )
            if bool((largest > self.tau).any()):
                self.clipped += int((scale(m, largest, tau=self.tau) < 1).sum())
            largest.fill_(-torch.inf)


class Side(NamedTuple):
    """The tensors that decide the size of the queries or keys, with rows for each head, or the same
    ones for all.
    """

    parts: list[Tensor]
    heads: int
    for_all: bool = False


def attach(model: nn.Module, optimizer: Optimizer, *, tau: float = 100.0) -> Clip:
    """Watch the logits of every attention while training, and clip after each step of
    `optimizer`.
    """
    if not tau > 0:
        raise ValueError(f"tau = {tau}: must be above 0")
    watched = {
        name: m
        for name, m in model.named_modules()
        if hasattr(m, "q_proj") and hasattr(m, "k_proj")
    }
    if not watched:
        raise ValueError(f"{type(model).__name__} has no attention with q_proj and k_proj to scale")
    for name, m in watched.items():
        if hasattr(m, LARGEST):
            raise ValueError(f"{name} is clipped already: attach once")
        sides(m, name)  # refuses what cannot be scaled
        nothing = m.q_proj.weight.new_full(
            (m.q_proj.weight.shape[0] // m.head_dim,), -torch.inf, dtype=torch.float32
        )
        m.register_buffer(LARGEST, nothing, persistent=False)
    AttentionInterface.register(NAME, _watching)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    clip = Clip(watched, tau)
    optimizer.register_step_post_hook(clip)
    return clip


def sides(m: nn.Module, name: str = "attention") -> tuple[Side, Side]:
    """Return what of a module is to be scaled for its queries and for its keys."""
    found = []
    for letter in "qk":
        linear, norm = getattr(m, f"{letter}_proj"), getattr(m, f"{letter}_norm", None)
        heads = linear.weight.shape[0] // m.head_dim
        if norm is None:
            found.append(Side([p for p in (linear.weight, linear.bias) if p is not None], heads))
            continue
        if not _scales_with_its_weight(norm):
            raise ValueError(
                f"{name}.{letter}_norm is a {type(norm).__name__}, whose output its weight "
                "does not scale"
            )
        found.append(
            Side([norm.weight], heads, for_all=heads > 1 and norm.weight.numel() == m.head_dim)
        )
    if found[0].for_all != found[1].for_all and found[1].heads > 1:
        raise ValueError(
            f"{name}: its heads share a norm of the queries or of the keys, and not of both"
        )
    return found[0], found[1]


@torch.no_grad()
def _scales_with_its_weight(norm: nn.Module) -> bool:
    """Return some norms multiply by 1 + weight."""
    weight = norm.weight
    x = torch.linspace(0.5, 2, len(weight), device=weight.device, dtype=weight.dtype)
    kept, once = weight.clone(), norm(x)
    weight.mul_(2)
    twice = norm(x)
    weight.copy_(kept)
    return getattr(norm, "bias", None) is None and torch.allclose(twice, 2 * once)


@torch.no_grad()
def scale(m: nn.Module, largest: Tensor, *, tau: float) -> Tensor:
    """Scale the queries and keys of one module by its largest logits (H,); the factor of each
    head's logits, (H,).
    """
    queries, keys = sides(m)
    needed = (tau / largest).clamp(max=1)  # (H,), of the product; 1 where nothing is to be done
    needed = torch.where(largest > tau, needed, torch.ones_like(needed))
    if queries.for_all:  # all heads of the layer together
        root = needed.min().sqrt()
        for p in (*queries.parts, *keys.parts):
            p.mul_(root)
        return needed.min().expand_as(needed)
    of_key = needed.view(keys.heads, -1).amin(dim=1).sqrt()  # (K,), what its worst head needs
    _multiply(keys, of_key)
    _multiply(queries, needed / of_key.repeat_interleave(queries.heads // keys.heads))
    return needed


def _multiply(side: Side, factors: Tensor) -> None:
    for p in side.parts:  # the rows of one head stand together; times 1 keeps every bit
        p.view(len(factors), -1).mul_(factors.to(p.dtype)[:, None])


def _watching(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **options
):
    """Return transformers' attention, and on the side the largest logit of each head while the
    module trains.
    """
    if module.training and hasattr(module, LARGEST):
        seen = largest_logits(query, key, attention_mask, scaling=options.get("scaling"))
        mine = getattr(module, LARGEST)
        mine.copy_(torch.maximum(mine, seen.to(mine.dtype)))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


@torch.no_grad()
def largest_logits(
    query: Tensor, key: Tensor, mask: Tensor | None, *, scaling: float | None = None
) -> Tensor:
    """(H,) of queries (B, H, T, d) and keys (B, K, T, d), over the positions that are attended
    to.
    """
    B, H, T, d = query.shape
    scaling = d**-0.5 if scaling is None else scaling
    # (B, K, H / K, T, T)
    logits = query.view(B, key.shape[1], -1, T, d) @ key[:, :, None].mT * scaling
    logits = logits.float().view(B, H, T, key.shape[2])
    if mask is None:
        mask = torch.ones(T, key.shape[2], dtype=torch.bool, device=key.device).tril(
            key.shape[2] - T
        )
    mask = mask[..., : key.shape[2]]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return logits.masked_fill(~seen, -torch.inf).amax(dim=(0, 2, 3))
