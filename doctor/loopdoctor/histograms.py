"""How large the numbers are: counts by power of two, of each tensor's gradient and of what each
layer was given.

    0  |  below 2^-40 ... 24 bins, each two powers of two wide ... from 2^6 on  |  NaN and infinite

A mean hides what such a picture shows: gradients that fall with the depth, a layer that is given
mostly zeros, numbers near the edge of a 16-bit dtype. At most 32 tensors of a kind are counted, and
of each at most 1024 numbers; they are looked at in the steps 1, 8 and 64, all at once. The first
and the last of these are kept: a few kilobytes.

Footgun: the numbers are evenly spread ones, not all. A single large number among millions is easily
missed, so a picture without an infinity does not prove that there was none.
"""

from functools import lru_cache

import torch
from torch import Tensor, nn

from loopdoctor import measures
from loopdoctor.attach import Attachments, Part, quietly
from loopdoctor.evidence import Evidence
from loopdoctor.reading import readable

LOOKS = (0, 7, 63)  # rounds
TENSORS, NUMBERS = 32, 1024
GOLDEN = 0.6180339887498949  # its multiples, without their whole parts, lie evenly between 0 and 1
LOW, WIDTH, BINS = -40, 2, 24  # the first bin ends at 2^(LOW + WIDTH)
COLUMNS = BINS + 2  # zeros before them, NaN and infinities after them
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
GRADIENTS, GIVEN = "gradients", "given to layers"


def few(t: Tensor, most: int = NUMBERS) -> Tensor | None:
    """Return a copy of at most so many of its numbers; None where they cannot be had without
    more.
    """
    if type(t) not in (Tensor, torch.nn.Parameter) or not readable(t) or t.layout != torch.strided:
        return None
    if not t.is_floating_point() or t.dtype.itemsize < 2 or not t.numel():
        return None
    count = t.numel()
    # a mode of the program's own (checkpoints have one) must not see it
    with torch._C._DisableTorchDispatch():
        if count <= most:
            return t.detach().reshape(-1).clone()
        # not a stride: one of 1025 would see the diagonal of a matrix that is 1024 wide, and
        # nothing else
        return t.detach().take(_places(count, most).to(t.device))


@lru_cache(256)
def _places(count: int, most: int) -> Tensor:
    """Places in a tensor of so many numbers, evenly spread."""
    return (torch.arange(most, dtype=torch.float64, device="cpu") * GOLDEN % 1 * count).long()


def counted(numbers: list[Tensor]) -> list[list[int]]:
    """Return a histogram for each. One synchronisation for all, where they are on one device."""
    if len({n.device for n in numbers}) > 1:
        numbers = [n.cpu() for n in numbers]
    every = torch.cat(numbers).cpu().double().abs()
    column = every.log2().sub(LOW).div(WIDTH).floor().clamp(0, BINS - 1).add(1)
    column = torch.where(every == 0, 0.0, column)
    column = torch.where(every.isfinite(), column, BINS + 1.0).long()
    sizes = torch.tensor([n.numel() for n in numbers], device="cpu")
    begins = torch.arange(len(numbers), device="cpu").repeat_interleave(sizes) * COLUMNS
    return (
        torch.bincount(begins + column, minlength=len(numbers) * COLUMNS).view(-1, COLUMNS).tolist()
    )


def note(e: Evidence, kind: str, samples: dict[str, Tensor]) -> None:
    """Count them, and keep the histograms of the first time and of this one."""
    for name, counts in zip(samples, counted(list(samples.values())) if samples else []):
        kept = e.histograms.setdefault(kind, {}).setdefault(name, {})
        for round in list(kept)[1:]:
            del kept[round]
        kept[e.rounds] = counts


def gradients(e: Evidence) -> None:
    have = {name: p.grad for name, p in e.trainable().items() if p.grad is not None}
    samples = {name: few(have[name]) for name in measures.spread(list(have), TENSORS)}
    note(e, GRADIENTS, {name: sample for name, sample in samples.items() if sample is not None})


class Given(Part):
    """Samples of what layers are given, from the first call of each in a step until that step is
    noted.
    """

    def __init__(self, at: Attachments):
        super().__init__(at)
        self.waiting: dict[int, Tensor] = {}  # id(module) -> sample
        self.chosen: dict[int, str] = {}  # id(module) -> name
        self.open = True  # the step under way is wanted

    def meet(self, model: nn.Module) -> None:
        """Choose, once, whom to look at: layers evenly over the depth."""
        if not self.chosen:
            names = {
                name: m
                for name, m in model.named_modules()
                if next(iter(m._parameters.values()), None) is not None
            }
            self.chosen = {id(names[name]): name for name in measures.spread(list(names), TENSORS)}

    def called(self, module: nn.Module, args: tuple) -> None:
        """Before the call of a part of the model with gradients."""
        if self.open and args and id(module) in self.chosen and id(module) not in self.waiting:
            self._take(module, args[0])

    @quietly
    def _take(self, module: nn.Module, given: Tensor) -> None:
        if not self.at.depth and (sample := few(given)) is not None:
            self.waiting[id(module)] = sample
            if not self.e.rounds and isinstance(module, LAYERS) and not given.requires_grad:
                self.e.raw.append(self.chosen[id(module)])

    def noted(self) -> None:
        """Before the first optimizer of a step."""
        ordered = {
            name: self.waiting[key] for key, name in self.chosen.items() if key in self.waiting
        }
        self.waiting, self.open = {}, self.e.rounds + 1 in LOOKS
        note(self.e, GIVEN, ordered)


def plain(e: Evidence) -> dict:
    """For the record: what each column counts, and the counts by tensor and step."""
    if not e.histograms:
        return {}
    kinds = {
        kind: {
            name: {str(round + 1): counts for round, counts in kept.items()}
            for name, kept in tensors.items()
        }
        for kind, tensors in e.histograms.items()
    }
    return {"columns": ["zero", *_bins(), "not finite"]} | kinds


def _bins() -> list[str]:
    inner = [f"2^{LOW + WIDTH * n} to 2^{LOW + WIDTH * (n + 1)}" for n in range(1, BINS - 1)]
    return [f"below 2^{LOW + WIDTH}", *inner, f"from 2^{LOW + WIDTH * (BINS - 1)}"]
