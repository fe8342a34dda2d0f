"""Two rivals of Muon: Polar Express orthogonalises better in as many rounds, NorMuon makes all rows move alike.

Muon's quintic has the same three coefficients in each of its five rounds and leaves singular values between 0.7 and
1.2. Polar Express (Amsel et al., 2025, arXiv:2505.16932) has three of its own for each round, the best for what the
rounds before have left. The matrix is divided by 1.01 times its norm, and all polynomials but the last are made for
values 1.01 times as large, so that rounding in bf16 cannot throw a singular value out of where they converge.

NorMuon (Li et al., 2025, arXiv:2510.05491) keeps one number per row, that is per neuron, of the orthogonalised O:

    v <- beta2 v + (1 - beta2) mean over columns of O^2        U = O / (sqrt(v) + eps)
    W <- (1 - lr wd) W - lr scale sqrt(min(out, in)) U / ||U||

With `adjust="match_rms_adamw"` the scale makes this the paper's 0.2 lr sqrt(out in) / ||U||. A matrix that is wide and
exactly orthogonal has equal rows already: then NorMuon is Muon. It changes what tall matrices and imperfect rounds do.

Both are `nblib.methods.muon.Muon` with another direction; all else, experts that rest included, is its code.

Footgun: v starts at 0 and is not corrected for it. The division by ||U|| makes up for that, because all rows are as far
from their mean. Without that division the first steps would be sqrt(1 / (1 - beta2)) times too long.
"""

from torch import Tensor

from nblib.methods import muon

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
    """Coefficients for `muon.orthogonalise` and `muon.response`, a triple for each round."""
    if steps < 1:
        raise ValueError(f"steps = {steps}: must be at least 1")
    rounds = [_of_larger(triple) for triple in POLAR[:-1]] + [POLAR[-1]] * max(1, steps - len(POLAR) + 1)
    return [_of_larger(rounds[0]), *rounds[1:steps]]  # the first also divides the matrix


def _of_larger(triple: tuple[float, float, float]) -> tuple[float, float, float]:
    """The polynomial of s / SAFETY."""
    a, b, c = triple
    return a / SAFETY, b / SAFETY**3, c / SAFETY**5


def equal_rows(O: Tensor, v: Tensor, *, beta2: float, active: Tensor | None = None) -> Tensor:
    """NorMuon's direction from O (N, out, in), of the size of an orthogonal matrix; v (N, out, 1) is updated in place.
    Where `active` (N, 1, 1) is 0, v stays."""
    v.lerp_(O.square().mean(dim=-1, keepdim=True), 1 - beta2 if active is None else (1 - beta2) * active)
    U = O / (v.sqrt() + EPS)
    return U * (min(O.shape[-2:]) ** 0.5 / U.norm(dim=(-2, -1), keepdim=True).clamp_(min=EPS))


class PolarExpress(muon.Muon):
    """Muon with the rounds of Polar Express."""

    rounds = polar_express()


class NorMuon(muon.Muon):
    """Muon whose rows move alike over time; None as `beta2` switches that off."""

    beta2: float | None = 0.95

    def _directions(self, updates: list[Tensor], group: dict, params: list[Tensor]) -> tuple[Tensor, ...]:
        directions = super()._directions(updates, group, params)
        if self.beta2 is None:
            return directions
        return tuple(self._equal_rows(p, O.float()) for p, O in zip(params, directions))

    def _equal_rows(self, p: Tensor, O: Tensor) -> Tensor:
        """O (N, out, in) of one parameter, whose row sizes are kept with it."""
        state, active = self.state[p], muon._active(muon._local(p.grad))
        if "row_squares" not in state:
            state["row_squares"] = O.new_zeros(*O.shape[:2], 1)
        if active is not None:  # of experts, which may be two maps each
            active = active.to(O.dtype).repeat_interleave(len(O) // len(active), dim=0)
        return equal_rows(O, state["row_squares"], beta2=self.beta2, active=active)
