"""The thresholds of health that the write-up on spiking distillation gives, against a run.

    rows(history, spikes, correlation)    a row per threshold: what was measured, and whether it holds

`history` are the records of the training loop, `spikes` what `goose.spiking` returns. The correlation is that of the
student's and the teacher's scores: `correlation(s, t)`, the mean over tokens of Pearson's r over the vocabulary.

Footgun: a threshold that a healthy run breaks is no guard. Measure it on a run that you trust before you obey it.
"""

import torch
from torch import Tensor

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
