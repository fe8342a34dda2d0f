"""Replays of the first batch: what changes when something is changed that must not matter?

A model that looks ahead, packed documents that see each other, padding that is not masked, a teacher that answers
differently each time: gradients and shapes show none of it, one more forward pass with a changed input does. Replays
run without gradients before the first optimizer step; generators, buffers and modes are put back.

Footgun: a replay must repeat the call as it was made, autocast and all, or it measures the difference it made itself.
"""

import torch

from nblib.doctor import replays
from nblib.doctor.evidence import Evidence


def run(e: Evidence) -> None:
    """Fill e.probes."""
    replays.run(e)


def generators() -> tuple:
    """State of torch's generators (the CPU's and every CUDA device's, if CUDA is in use)."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


def restore(state: tuple) -> None:
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
