"""The thresholds of health that the write-up on spiking distillation gives, against a run.

    rows(history, spikes, correlation)    a row per threshold: what was measured, and whether it
                                          holds

`history` are the records of the training loop, `spikes` what `spiking` returns. The correlation is
that of the student's and the teacher's scores: `correlation(s, t)`, the mean over tokens of
Pearson's r over the vocabulary.

Footgun: a threshold that a healthy run breaks is no guard. Measure it on a run that you trust
before you obey it.
"""

from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from nblib import wiring
from nblib.methods.goose import Spike

CLIP = 1.0  # the loop's largest gradient norm


def correlation(s: Tensor, t: Tensor) -> float:
    """Of scores (..., V) of the same tokens."""
    centred = [z - z.mean(-1, keepdim=True) for z in (s.float(), t.float())]
    return float(torch.cosine_similarity(*centred, dim=-1).mean())


def rows(history: list[dict], spikes: dict[str, float], correlation: float) -> list[dict]:
    clipped = sum(record["grad_norm"] > CLIP for record in history) / len(history)
    return [
        {"threshold": name, "measured": value, "holds": holds}
        for name, value, holds in (
            ("clipped in under 10 % of the steps", clipped, clipped < 0.1),
            ("under 5 % dead channels", spikes["dead"], spikes["dead"] < 0.05),
            ("firing rate 0.2 to 0.6", spikes["rate"], 0.2 <= spikes["rate"] <= 0.6),
            ("logits correlate above 0.9 with the teacher's", correlation, correlation > 0.9),
        )
    ]


@torch.no_grad()
def spiking(model: nn.Module, rows: Tensor, *, always: float = 0.99) -> dict[str, float]:
    """Over rows (R, T): the share of spikes that are not 0, of channels that never fired (dead),
    and of channels that fired at `always` of the positions or more (saturated); all layers
    together, and the rate per kind.
    """
    fired: dict[str, Tensor] = {}

    def note(_, __, out: Tensor, *, name: str) -> None:
        fired[name] = (out != 0).float().mean((0, 1))

    with ExitStack() as hooks, wiring.evaluating(model):
        for name, m in model.named_modules():
            if isinstance(m, Spike):
                hooks.enter_context(m.register_forward_hook(partial(note, name=name)))
        model.model(rows)
    rates = torch.stack(list(fired.values()))  # (2 L, D): how often each channel fired
    facts = {
        "rate": rates.mean(),
        "dead": (rates == 0).float().mean(),
        "saturated": (rates >= always).float().mean(),
    }
    for kind in ("spike_k", "spike_v"):
        facts[f"rate_{kind[-1]}"] = torch.stack(
            [x for name, x in fired.items() if name.endswith(kind)]
        ).mean()
    return {name: float(value) for name, value in facts.items()}
