"""Two rivals of Muon: Polar Express orthogonalises better in as many rounds, NorMuon makes all rows
move alike.

Muon's quintic has the same three coefficients in each of its five rounds and leaves singular values
between 0.7 and 1.2. Polar Express (Amsel et al., 2025, arXiv:2505.16932) has three of its own for
each round, the best for what the rounds before have left. The matrix is divided by 1.01 times its
norm, and all polynomials but the last are made for values 1.01 times as large, so that rounding in
bf16 cannot throw a singular value out of where they converge.

NorMuon (Li et al., 2025, arXiv:2510.05491) keeps one number per row, that is per neuron, of the
orthogonalised O:

    v <- beta2 v + (1 - beta2) mean over columns of O^2        U = O / (sqrt(v) + eps)
    W <- (1 - lr wd) W - lr scale sqrt(min(out, in)) U / ||U||

With `adjust="match_rms_adamw"` the scale makes this the paper's 0.2 lr sqrt(out in) / ||U||. A
matrix that is wide and exactly orthogonal has equal rows already: then NorMuon is Muon. It changes
what tall matrices and imperfect rounds do.

Both are `nblib.methods.muon.Muon` with another direction, switched off its arithmetic to the bit.

Footgun: v starts at 0 and is not corrected for it. The division by ||U|| makes up for that, because
all rows are as far from their mean. Without that division the first steps would be sqrt(1 / (1 -
beta2)) times too long.
"""

import torch
from torch import Tensor

from nblib.methods.muon import muon

POLAR = [  # Algorithm 1 of the paper: one triple per round, the last for all further ones
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]
SAFETY = 1.01
EPS = 1e-8


def polar_express(steps: int = muon.ITERATIONS) -> list[tuple[float, float, float]]:
    """Coefficients for `orthogonalise` and `response`, a triple for each round."""
    if steps < 1:
        raise ValueError(f"steps = {steps}: must be at least 1")
    rounds = [_of_larger(triple) for triple in POLAR[:-1]] + [POLAR[-1]] * max(
        1, steps - len(POLAR) + 1
    )
    return [_of_larger(rounds[0]), *rounds[1:steps]]  # the first also divides the matrix


def _of_larger(triple: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return the polynomial of s / SAFETY."""
    a, b, c = triple
    return a / SAFETY, b / SAFETY**3, c / SAFETY**5


def equal_rows(O: Tensor, v: Tensor, *, beta2: float, active: Tensor | None = None) -> Tensor:
    """NorMuon's direction from O (N, out, in), of the size of an orthogonal matrix; v (N, out, 1)
    is updated in place. Where `active` (N, 1, 1) is 0, v stays.
    """
    v.lerp_(
        O.square().mean(dim=-1, keepdim=True), 1 - beta2 if active is None else (1 - beta2) * active
    )
    U = O / (v.sqrt() + EPS)
    return U * (min(O.shape[-2:]) ** 0.5 / U.norm(dim=(-2, -1), keepdim=True).clamp_(min=EPS))


def orthogonalise(G: Tensor, rounds: list[tuple], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """`muon.orthogonalise` of matrices (N, out, in) with coefficients of its own for each round."""
    tall = G.shape[-2] > G.shape[-1]
    X = G.to(dtype).mT if tall else G.to(dtype)
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp_(min=muon.EPS)
    parts = list(X.split(max(1, muon._most(X.device) // X[0].numel())))
    for a, b, c in rounds:
        parts = [muon._iterate(part, 1, a, b, c) for part in parts]
    X = torch.cat(parts)
    return X.mT if tall else X


def response(s: Tensor, rounds: list[tuple]) -> Tensor:
    """Return what the rounds make of a singular value in [0, 1]."""
    for triple in rounds:
        s = muon.response(s, steps=1, coefficients=triple)
    return s


class Rival(muon.Muon):
    """Muon with a direction of its own for each bundle of matrices of one shape."""

    rounds = [muon.QUINTIC] * muon.ITERATIONS

    def _turned(self, p: Tensor, O: Tensor) -> Tensor:
        """Return what a parameter's orthogonal matrices (N, out, in) become."""
        return O

    def _update(self, group: dict, params: list[Tensor]) -> None:
        beta, updates, busy = group["momentum"], [], []
        for p in params:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            g, m = muon._local(p.grad), muon._local(state["momentum_buffer"])
            busy.append(muon._active(g))
            m.lerp_(g, 1 - beta if busy[-1] is None else (1 - beta) * busy[-1])
            update = g.lerp(m, beta) if group["nesterov"] else m
            updates.append(muon._matrices(muon._whole(update, p), group))
        dtype = muon._precision(group["compute"], updates[0].device)
        together = orthogonalise(torch.cat(updates), self.rounds, dtype=dtype)
        rate = group["lr"] * muon.scale(*muon.map_shape(params[0].shape, group), group["adjust"])
        decay = group["lr"] * group["weight_decay"]
        for p, active, O in zip(params, busy, together.split([len(u) for u in updates])):
            u, w = self._turned(p, O), muon._local(p)
            u = muon._own(u.reshape(p.shape if p.ndim == 2 else w.shape), p)
            w.mul_(1 - decay if active is None else 1 - decay * active)
            w.add_(u if active is None else u * active, alpha=-rate)


class PolarExpress(Rival):
    """Muon with the rounds of Polar Express."""

    rounds = polar_express()


class NorMuon(Rival):
    """Muon whose rows move alike over time; None as `beta2` switches that off."""

    beta2: float | None = 0.95

    def _turned(self, p: Tensor, O: Tensor) -> Tensor:
        if self.beta2 is None:
            return O
        state, active = self.state[p], muon._active(muon._local(p.grad))
        if "row_squares" not in state:
            state["row_squares"] = O.new_zeros(*O.shape[:2], 1, dtype=torch.float32)
        if active is not None:  # of experts, which may be two maps each
            active = active.float().repeat_interleave(len(O) // len(active), dim=0)
        return equal_rows(O.float(), state["row_squares"], beta2=self.beta2, active=active)
