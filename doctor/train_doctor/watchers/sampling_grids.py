"""Places that are given to grid_sample the other way round: (y, x) where it takes (x, y).

    ys, xs = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
    grid = torch.stack((ys, xs), -1)            the picture comes out with rows and columns exchanged
    grid = torch.stack((xs, ys), -1)            was meant

The first number of a place says how far across it is, so it changes along a row of the grid, and the second one from
row to row. It is asked whether both do the opposite, in each picture of the batch.

Footgun: pictures may be turned by a quarter on purpose, some of a batch; so all of them must be.
"""

from torch import Tensor

from train_doctor.eye import Op, Watcher

CLEAR, LOOKED = 5.0, 2**22  # times as much; numbers


class SamplingGrids(Watcher):
    names = begins = {"grid_sample", "grid_sampler"}

    def saw(self, op: Op) -> None:
        grid = op.given[1] if len(op.given) > 1 else None
        if grid is None or grid.dim() != 4 or min(grid.shape[1:3]) < 2 or grid.numel() > LOOKED:
            return
        down, across = (self._change(grid.detach().float(), dim) for dim in (1, 2))  # (B, 2) each
        turned = (down[:, 0] > CLEAR * across[:, 0]) & (across[:, 1] > CLEAR * down[:, 1])
        if bool(turned.all()):
            self.note("D30", tuple(grid.shape))

    @staticmethod
    def _change(grid: Tensor, dim: int) -> Tensor:
        return grid.diff(dim=dim).abs().mean((1, 2))
