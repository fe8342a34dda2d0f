"""LRC: a ternary model whose rounding error is corrected by a trained matrix of low rank.

    y = Q(W) Q(x) + U (V^T x)
    U (out, r), V (in, r), r = max(1, floor(min(in, out) * percent / 100))

The large product runs on -s, 0, s; the small one gets x unrounded and learns what rounding took
away. In the usual, frozen form W is rounded once and only U and V train. In the joint form W trains
too and is rounded at each forward pass.

The start of U and V decides most of the result. R = W - Q(W) is what rounding took away. Its
truncated singular value decomposition is the best U V^T of that rank in squared error (Eckart and
Young, 1936). But what counts is the error of the output, R x. So `svd_activation` decomposes R
C^(1/2), with C the inputs' second moments over a few batches, and multiplies by C^(-1/2) afterwards
(QERA, Zhang et al., 2024; LQER is the same with the diagonal of C alone). Any L with L L^T = C
gives the same U V^T; that of Cholesky takes a tenth of the time. Once U V^T is known, W - U V^T can
be rounded in the place of W, and so on in turns: `rounds`.

The scale of Q(W) matters as much (ternary.py). With the mean of |W|, every layer's output is too
small; a correction of low rank mends that for the few strongest inputs alone and so tilts the rest.
At small ranks it is then worse than none.

Footgun: with `zeros` in both factors each one's gradient is a product with the other, zero for
ever. The loss curve is flat and nothing is raised. `init` allows it only to show that (notebook
10).
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from nblib import files, losses, models, runtime, wiring
from nblib.methods.lrc import ternary

INITS = ("svd_residual", "svd_activation", "kaiming", "zeros")
# of the mean second moment, added to all: some directions did not occur in the few batches
DAMPING = 0.01
# Not model.safetensors: under that name stock transformers would load the folder as a model with
# random projections.
WEIGHTS, RECIPE = "lrc.safetensors", "lrc.json"


class LRCLinear(nn.Module):
    """A linear layer as ternary weight and low-rank correction.

    `weight` holds Q(W), or W itself in the joint form.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        rank: int,
        *,
        joint=False,
        bits=0,
        once=None,
        scale="mean",
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.joint, self.bits, self.once, self.scale = joint, bits, once or ternary.Once(), scale
        # see models.hold; W itself is rounded first
        self.read_by_products = () if joint else ("weight", "bias")
        self.weight = nn.Parameter(weight, requires_grad=joint)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.U = nn.Parameter(weight.new_zeros(self.out_features, rank))
        self.V = nn.Parameter(weight.new_zeros(self.in_features, rank))

    def factors(self) -> tuple[Tensor, Tensor]:
        return (
            tuple(ternary.grouped(f, self.bits) for f in (self.U, self.V))
            if self.bits
            else (self.U, self.V)
        )

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        weight = ternary.ternary(self.weight, self.scale) if self.joint else self.weight
        U, V = self.factors()
        return models.product(self.once(x), weight, self.bias) + F.linear(x @ V, U)

    def extra_repr(self) -> str:
        return (
            f"in={self.in_features}, out={self.out_features}, rank={self.U.shape[1]}, "
            f"joint={self.joint}"
        )


def rank_of(out_features: int, in_features: int, percent: float) -> int:
    return max(1, int(min(out_features, in_features) * percent / 100))


def attach(
    model: nn.Module,
    *,
    percent: float = 15.0,
    rank: int = 0,
    init: str = "svd_residual",
    scale: str = "",
    rounds: int = 0,
    moments: dict[str, Tensor] | None = None,
    randomised: bool = False,
    joint: bool = False,
    bits: int = 0,
    keep_original: bool = False,
) -> list[str]:
    """Make every linear layer of a causal model an `LRCLinear`, freeze the rest, and return the
    layers' names.

    percent  rank as a share of each matrix's smaller side; `rank` above 0 sets it directly
    init     svd_residual, svd_activation (needs `moments`), kaiming (V random, U zero), zeros (a
             pitfall)
    scale    mean, least_squares or rows (ternary.py); by default least_squares, in the joint form
             mean
    rounds   so often W - U V^T is rounded again and U V^T made anew for what is left; not in the
             joint form
    bits     4 or 8 rounds U and V as well, 0 does not
    keep_original  leaves W beside Q(W) as the buffer `original`; otherwise the frozen form drops it

    Embeddings and the head stay as they are, whether tied or not.
    """
    if init not in INITS:
        raise ValueError(f"init = {init!r}: allowed are {', '.join(INITS)}")
    if init == "svd_activation" and moments is None:
        raise ValueError(
            "init = 'svd_activation': needs moments = input_moments(model, batches) of the "
            "float model"
        )
    if scale and scale not in ternary.SCALES:
        raise ValueError(f"scale = {scale!r}: allowed are {', '.join(ternary.SCALES)}")
    if not 0 < percent <= 100:
        raise ValueError(f"percent = {percent}: must be above 0 and at most 100")
    if rank < 0 or bits not in (0, 4, 8):
        raise ValueError(
            f"rank = {rank}, bits = {bits}: rank must be at least 0, bits one of 0, 4, 8"
        )
    if rounds < 0 or (rounds and (joint or not init.startswith("svd"))):
        raise ValueError(
            f"rounds = {rounds}: allowed above 0 only where init starts with svd and joint is False"
        )
    if layers(model):
        raise ValueError(
            f"{type(model).__name__} has LRC layers already: attach to a fresh copy of the "
            "float model"
        )
    once, scale = ternary.Once(), scale or ("mean" if joint else "least_squares")

    def replace(name: str, linear: nn.Module) -> LRCLinear:
        W = wiring.matrix(linear)  # (out, in)
        r = min(rank, *W.shape) if rank else rank_of(*W.shape, percent)
        Q = W if W.is_meta else ternary.ternary(W, scale)
        root = _root(moments[name]) if init == "svd_activation" and not W.is_meta else None
        U, V = _start(W, Q, r, init, root, randomised)
        for _ in range(0 if W.is_meta else rounds):
            Q = ternary.ternary(W - (U @ V.T).to(W.dtype), scale)
            U, V = _start(W, Q, r, init, root, randomised)
        layer = LRCLinear(
            W if joint else Q, linear.bias, r, joint=joint, bits=bits, once=once, scale=scale
        )
        if keep_original and not joint:
            layer.register_buffer("original", W, persistent=False)
        layer.U.data, layer.V.data = (f.to(W.dtype).contiguous() for f in (U, V))
        return layer

    with torch.no_grad():
        names = wiring.swap(model, replace, linear_layers(model))
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no linear layer besides its head: nothing to make ternary"
        )
    wiring.freeze(model, train=[p for m in layers(model).values() for p in _trained(m)])
    return names


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return what `attach` replaces.

    Stacked experts are parameters, not linear layers, and stay as they are.
    """
    return wiring.select(model)


def layers(model: nn.Module) -> dict[str, LRCLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LRCLinear)}


def _trained(layer: LRCLinear) -> list[nn.Parameter]:
    return [layer.U, layer.V] + [layer.weight] * layer.joint


@torch.no_grad()
def ternarise(model: nn.Module, scale: str = "mean") -> list[str]:
    """Return the ternary model without a correction, to compare with: rank 1, and zero."""
    return attach(model, rank=1, init="zeros", scale=scale)


@torch.no_grad()
def input_moments(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of x x^T per linear layer over the tokens of a few batches, (in, in), in the layers' own
    order. Padding is left out, and documents that are packed into a row do not see each other.
    """
    sums, counts, mask = {}, {}, None

    def add(name: str, x: Tensor) -> None:
        x = x.flatten(0, -2).float()  # (B, T, in) -> (N, in)
        if mask is not None and len(mask) == len(x):
            x = x[mask]
        sums[name] = sums.get(name, 0) + x.T @ x
        counts[name] = counts.get(name, 0) + len(x)

    device, linears = next(model.parameters()).device, linear_layers(model).items()
    hooks = [
        m.register_forward_pre_hook(lambda _, args, name=name: add(name, args[0]))
        for name, m in linears
    ]
    try:
        with wiring.evaluating(model):
            for batch in batches:
                batch = {key: value.to(device) for key, value in batch.items()}
                mask = (
                    batch["attention_mask"].flatten().bool() if "attention_mask" in batch else None
                )
                losses.forward(model.base_model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: total / counts[name] for name, total in sums.items()}


def _root(C: Tensor) -> Tensor:
    """L with L L^T = C, the inputs' second moments, in float64."""
    C = C.double().clone()
    C.diagonal().add_((DAMPING * C.diagonal().mean()).clamp_min(1e-12))
    return torch.linalg.cholesky(C)


def _start(
    W: Tensor, Q: Tensor, r: int, init: str, L: Tensor | None, randomised: bool
) -> tuple[Tensor, Tensor]:
    U, V = W.new_zeros(W.shape[0], r), W.new_zeros(W.shape[1], r)
    if W.is_meta or init == "zeros":
        return U, V
    if init == "kaiming":
        return U, nn.init.kaiming_uniform_(V.T.contiguous(), a=5**0.5).T.contiguous()
    R = (W - Q).float()
    if init == "svd_residual":
        return truncated_svd(R, r, randomised=randomised)
    U, A = truncated_svd((R.double() @ L).float(), r, randomised=randomised)
    # V = L^(-T) A
    return balanced(U, torch.linalg.solve_triangular(L.T, A.double(), upper=True).float())


def truncated_svd(R: Tensor, r: int, *, randomised: bool = False) -> tuple[Tensor, Tensor]:
    """U (out, r) and V (in, r) with U V^T the best approximation of R; the singular values are
    shared equally.
    """
    # Halko, Martinsson and Tropp (2011): the same space but for the weakest directions
    if randomised:
        with runtime.seeded(0):
            P, s, Z = torch.svd_lowrank(R, q=min(r + 10, *R.shape), niter=2)
    else:
        P, s, Zh = torch.linalg.svd(R, full_matrices=False)
        Z = Zh.T
    root = s[:r].sqrt()
    return P[:, :r] * root, Z[:, :r] * root


def balanced(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same product from factors of equal size, so that one learning rate suits both."""
    (Qu, Ru), (Qv, Rv) = torch.linalg.qr(U), torch.linalg.qr(V)
    A, B = truncated_svd(Ru @ Rv.T, U.shape[1])
    return Qu @ A, Qv @ B


def residual_energy(weight: Tensor, scale: str = "least_squares") -> Tensor:
    """Share of ||W - Q(W)||^2 that the first 1, 2, ... singular directions hold, (min(out,
    in),).
    """
    energy = torch.linalg.svdvals(
        (weight - ternary.ternary(weight, scale)).detach().float()
    ).square()
    return energy.cumsum(0) / energy.sum()


def recovered(loss: float, *, rounded: float, full: float) -> float:
    """Share of what rounding cost that is won back; above 1 where the model became better than the
    full one.
    """
    if not rounded > full:
        raise ValueError(
            f"rounded = {rounded}, full = {full}: no gap to recover; train the model, or take "
            "more rows"
        )
    return (rounded - loss) / (rounded - full)


def facts(model: nn.Module) -> dict[str, int | float]:
    ranks, counts = [m.U.shape[1] for m in layers(model).values()], models.count(model)
    return {
        "layers": len(ranks),
        "smallest rank": min(ranks),
        "largest rank": max(ranks),
        "trainable": counts["trainable"],
        "all": counts["all"],
        "share that trains": counts["trainable"] / counts["all"],
    }


def save(
    model: nn.Module, folder: str | Path, *, tokenizer: tf.PreTrainedTokenizerBase | None = None
) -> int:
    """Write the model with two bits per ternary weight, as a folder of its own; returns its bytes
    on disk.

    A joint model is saved with its rounded weights, a rounded correction as whole numbers with
    their scales. So what comes back gives the same logits, but to train on, it has lost what
    rounding hides.
    """
    folder, corrected = Path(folder), layers(model)
    tensors, recipe = {}, {"layers": {}, "same": {}}
    for name, layer in corrected.items():
        weight = ternary.ternary(layer.weight, layer.scale) if layer.joint else layer.weight
        scale = (
            weight.abs().amax(dim=1, keepdim=True) if layer.scale == "rows" else weight.abs().max()
        )
        tensors |= {
            f"{name}.codes": ternary.pack(weight.sign()),
            f"{name}.scale": scale.to(layer.U.dtype),
        }
        for factor in ("U", "V"):
            tensors |= _stored(f"{name}.{factor}", getattr(layer, factor), layer.bits)
        recipe["layers"][name] = {
            "shape": list(weight.shape),
            "rank": layer.U.shape[1],
            "bits": layer.bits,
        }
    packed = {f"{name}.{part}" for name in corrected for part in ("weight", "U", "V")}
    rest, first = {name: t for name, t in model.state_dict().items() if name not in packed}, {}
    for name, tensor in rest.items():
        if first.setdefault(tensor.data_ptr(), name) == name:
            tensors[name] = tensor
        else:  # a tied head is its embedding
            recipe["same"][name] = first[tensor.data_ptr()]
    recipe["dtype"] = str(model.dtype).removeprefix("torch.")
    with files.replacing(folder) as partial:  # an earlier save stays whole until the end
        for part in filter(
            None, (model.config, getattr(model, "generation_config", None), tokenizer)
        ):
            part.save_pretrained(partial)
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, partial / WEIGHTS)
        (partial / RECIPE).write_text(json.dumps(recipe, indent=1))
        files.seal(partial)
    return sum(file.stat().st_size for file in folder.iterdir())


def load(folder: str | Path) -> nn.Module:
    """Return the model that `save` wrote, in the frozen form, on the CPU."""
    folder = Path(folder)
    if not (folder / RECIPE).exists():
        raise FileNotFoundError(
            f"folder {str(folder)!r}: no {RECIPE} in it, so lrc.save did not write (all of) it"
        )
    files.verify(folder)
    weights = folder / WEIGHTS
    weights = weights if weights.exists() else folder / "model.safetensors"  # as it was called once
    recipe, state = json.loads((folder / RECIPE).read_text()), load_file(weights)
    dtype, once = getattr(torch, recipe["dtype"]), ternary.Once()
    model = tf.AutoModelForCausalLM.from_config(models.load_config(str(folder)), dtype=dtype)
    for name, layer in recipe["layers"].items():
        shape, rank = torch.Size(layer["shape"]), layer["rank"]
        codes = ternary.unpack(state.pop(f"{name}.codes"), shape)
        state[f"{name}.weight"] = codes * state.pop(f"{name}.scale")
        for factor, size in (("U", shape[0]), ("V", shape[1])):
            if layer["bits"]:
                parts = (state.pop(f"{name}.{factor}.{part}") for part in ("codes", "scales"))
                state[f"{name}.{factor}"] = _opened(
                    *parts, torch.Size([size, rank]), layer["bits"]
                ).to(dtype)

    def replace(name: str, linear: nn.Module) -> LRCLinear:
        layer = recipe["layers"][name]
        return LRCLinear(
            torch.empty(layer["shape"], dtype=dtype), linear.bias, layer["rank"], once=once
        )

    wiring.swap(model, replace, {name: model.get_submodule(name) for name in recipe["layers"]})
    model.load_state_dict(state | {name: state[same] for name, same in recipe["same"].items()})
    wiring.freeze(model, train=[p for m in layers(model).values() for p in _trained(m)])
    return model.eval()


def _stored(name: str, factor: Tensor, bits: int) -> dict[str, Tensor]:
    if not bits:
        return {name: factor}
    codes, scales = ternary.group_codes(factor, bits)
    if bits == 4:  # two to a byte
        pairs = (codes + 8).to(torch.uint8).view(len(codes), -1, 2)
        codes = pairs[..., 0] | pairs[..., 1] << 4
    return {f"{name}.codes": codes, f"{name}.scales": scales}


def _opened(codes: Tensor, scales: Tensor, shape: torch.Size, bits: int) -> Tensor:
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).to(torch.int8) - 8
    return ternary.from_groups(codes, scales, shape)
