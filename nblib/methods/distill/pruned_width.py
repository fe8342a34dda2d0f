"""A student cut out of the teacher in width: the heads, inner channels and hidden channels that
matter most.

    importance = pruned_width.importance(teacher, batches)
    student = pruned_width.narrowed(teacher, importance, key_heads=1, inner=384)

Importance is read off the activations of some batches, without gradients (Minitron, Muralidharan et
al., 2024, arXiv:2407.14679):

    heads of keys    mean |what the heads of the group give| over positions; query heads stay with
                     their key head
    inner            mean |what enters down_proj| of each channel
    hidden           mean |what leaves the norms| of each channel, summed over all norms

What is kept keeps its order and its weights. All layers stay. Heads and inner channels leave the
residual stream as it is wide, so each block gives less of the same sum. Hidden channels are cut out
of everything.

Footgun: with hidden channels gone a norm divides by the mean square of those that are left, which
are the larger ones. So what leaves a norm shrinks: less where a few channels hold most of the
square, as they do in large models.
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nblib import compiling, losses, wiring

NORMS = ("input_layernorm", "post_attention_layernorm")


def importance(teacher: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """For each block the importance of its key heads (L, K) and inner channels (L, I); of the
    hidden channels, (D,).
    """
    blocks, sums, hooks = _blocks(teacher), {}, []

    def add(name: str, at: int, x: Tensor) -> None:
        table = sums.setdefault(
            name, x.new_zeros(len(blocks) + 1, x.shape[-1], dtype=torch.float64)
        )
        table[at] += x.abs().double().flatten(0, -2).mean(dim=0)

    def of_heads(x: Tensor) -> Tensor:
        attention = blocks[0].self_attn
        per_head = x.unflatten(-1, (-1, attention.head_dim)).norm(dim=-1)  # (B, T, H)
        return per_head.unflatten(-1, (_key_heads(attention), -1)).norm(dim=-1)  # (B, T, K)

    for at, block in enumerate(blocks):
        into_o = lambda _, x, at=at: add("heads", at, of_heads(x[0]))  # noqa: E731
        hooks.append(block.self_attn.o_proj.register_forward_pre_hook(into_o))
        hooks.append(
            block.mlp.down_proj.register_forward_pre_hook(
                lambda _, x, at=at: add("inner", at, x[0])
            )
        )
        for norm in NORMS:
            hooks.append(
                getattr(block, norm).register_forward_hook(
                    lambda m, _, y, at=at: add("hidden", at, y)
                )
            )
    try:
        with torch.no_grad(), wiring.evaluating(teacher):
            for batch in batches:
                teacher.base_model(input_ids=batch["input_ids"], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not sums:
        raise ValueError("batches: none was given, so no channel is more important than another")
    return {
        "heads": sums["heads"][:-1],
        "inner": sums["inner"][:-1],
        "hidden": sums["hidden"].sum(dim=0),
    }


def narrowed(
    teacher: nn.Module,
    found: dict[str, Tensor],
    *,
    key_heads: int | None = None,
    inner: int | None = None,
    hidden: int | None = None,
) -> nn.Module:
    """Return a student with so many key heads, inner and hidden channels, the most important ones;
    weights of its own in fp32 that train. None keeps all.
    """
    blocks, now = _blocks(teacher), copy.deepcopy(teacher).float()
    attention = blocks[0].self_attn
    had = {
        "key_heads": _key_heads(attention),
        "inner": found["inner"].shape[1],
        "hidden": len(found["hidden"]),
    }
    want = {"key_heads": key_heads, "inner": inner, "hidden": hidden}
    want = {name: had[name] if size is None else size for name, size in want.items()}
    for name, size in want.items():
        if not 1 <= size <= had[name]:
            raise ValueError(
                f"{name} = {size}: must be from 1 to {had[name]}, those of the teacher"
            )
    config, group = (
        copy.deepcopy(teacher.config),
        attention.q_proj.weight.shape[0] // attention.head_dim,
    )
    group //= had["key_heads"]
    config.num_attention_heads, config.num_key_value_heads = (
        group * want["key_heads"],
        want["key_heads"],
    )
    config.intermediate_size, config.hidden_size = want["inner"], want["hidden"]
    config.head_dim = attention.head_dim
    channels = _largest(found["hidden"], want["hidden"])
    state = {}
    for name, p in now.state_dict().items():
        state[name] = (
            p.index_select(-1, channels) if p.shape[-1] == had["hidden"] and _reads(name) else p
        )
    for at in range(len(blocks)):
        heads, few = (
            _largest(found["heads"][at], want["key_heads"]),
            _largest(found["inner"][at], want["inner"]),
        )
        keys = _spread(heads, attention.head_dim)
        queries = _spread(heads, group * attention.head_dim)
        own = [n for n in state if f".{at}." in n]
        for name in own:
            for part, rows in {
                "q_proj": queries,
                "k_proj": keys,
                "v_proj": keys,
                "gate_proj": few,
                "up_proj": few,
            }.items():
                if f".{part}." in name:
                    state[name] = state[name].index_select(0, rows)
            for part, columns in {"o_proj": queries, "down_proj": few}.items():
                if name.endswith(f"{part}.weight"):
                    state[name] = state[name].index_select(1, columns).index_select(0, channels)
                elif f".{part}." in name:
                    state[name] = state[name].index_select(0, channels)
    student = type(teacher)(config)
    student.load_state_dict(state)
    return student.float().train().requires_grad_(True)


def _blocks(teacher: nn.Module) -> list[nn.Module]:
    blocks = list(compiling.blocks(losses.backbone_and_head(teacher)[0]))
    parts = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.down_proj",
        *NORMS,
    )
    named = [dict(block.named_modules()) for block in blocks]
    if missing := [part for part in parts if any(part not in names for names in named)]:
        raise ValueError(
            f"{type(teacher).__name__}: its blocks have no {missing[0]}; only those like "
            "Llama's are cut"
        )
    return blocks


def _reads(name: str) -> bool:
    """Whether the last dimension of a parameter is the hidden one, where it is as long."""
    return not any(part in name for part in ("o_proj", "down_proj", "q_norm", "k_norm", "bias"))


def _key_heads(attention: nn.Module) -> int:
    return attention.k_proj.weight.shape[0] // attention.head_dim


def _largest(values: Tensor, count: int) -> Tensor:
    """Return indices of the `count` largest, in their order."""
    return values.topk(count).indices.sort().values


def _spread(heads: Tensor, size: int) -> Tensor:
    """Rows of the heads, `size` each."""
    return (heads[:, None] * size + torch.arange(size, device=heads.device)).flatten()
