"""Forty programs, plain and watched: the same bits after every step, none crashed, none blamed.

After every step of an optimizer, and after every backward, hashes are taken of all parameters and buffers of what the
program has made, of the state of every optimizer that stepped, and of the random numbers of torch and Python. At the
end gradients count as well.
"""

import hashlib
import random
import struct
import warnings

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import train_doctor as doctor
from tests import forty
from train_doctor import NOTE


def digest(tensors) -> str:
    made = hashlib.blake2b(digest_size=16)
    for t in tensors:
        made.update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"-")
    return made.hexdigest()


def tensors_of(state) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [t for value in state.values() for t in tensors_of(value)]
    if isinstance(state, (list, tuple)):
        return [t for value in state for t in tensors_of(value)]
    return [torch.tensor(list(struct.pack("d", state)), dtype=torch.uint8)] if isinstance(state, (int, float)) else []


def kept() -> list[torch.Tensor]:
    found = []
    for thing in forty.KEPT:
        found += [*thing.parameters(), *thing.buffers()] if isinstance(thing, nn.Module) else [thing]
    return found


class Trace:
    """Hashes, one after each step and each backward."""

    def __init__(self):
        self.hashes: list[tuple] = []

    def note(self, *states) -> None:
        randoms = hashlib.blake2b(repr(random.getstate()).encode(), digest_size=8).hexdigest()
        rng = digest([torch.get_rng_state()])
        self.hashes.append((digest(kept()), digest(tensors_of(states)), rng, randoms))

    def stepped(self, optimizer, args, kwargs) -> None:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self.note(list(optimizer.state.values()), groups)

    def ended(self) -> list[tuple]:
        self.note([t.grad for t in kept() if t.grad is not None and not t.grad.is_sparse])
        return self.hashes


def traced(program, watched: bool):
    forty.KEPT.clear()
    torch.manual_seed(0)
    random.seed(0)
    trace, report, original = Trace(), None, torch.autograd.backward

    def backward(*args, **kwargs):
        original(*args, **kwargs)
        trace.note()

    hook = torch_optimizer.register_optimizer_step_post_hook(trace.stepped)
    torch.autograd.backward = backward
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if watched:
                with doctor.watch(say=False) as report:
                    program()
            else:
                program()
    finally:
        assert torch.autograd.backward is backward, "the watch puts back what it found"
        torch.autograd.backward = original
        hook.remove()
    hashes = trace.ended()
    forty.KEPT.clear()
    return hashes, report


def test_there_are_forty_of_them():
    assert len(forty.PROGRAMS) >= 40
    styles = {name.partition(":")[0] for name in forty.PROGRAMS}
    wanted = {"pytorch/examples", "nanoGPT", "accelerate", "peft", "TRL", "timm", "cleanrl", "GAN", "VAE", "diffusion"}
    assert wanted | {"RNN", "Lightning"} <= styles


@pytest.mark.parametrize("name", forty.PROGRAMS)
def test_the_same_bits_and_no_blame(name):
    if name.startswith(("accelerate", "peft")):
        pytest.importorskip(name.partition(":")[0])
    plain, _ = traced(forty.PROGRAMS[name], watched=False)
    hashes, report = traced(forty.PROGRAMS[name], watched=True)
    wrong = [n for n, (a, b) in enumerate(zip(plain, hashes)) if a != b]
    assert len(plain) == len(hashes) and not wrong, f"differs first after event {wrong[:1]} of {len(plain)}"
    assert len(plain) > 6 and len(set(plain)) > 3, "the hashes see the training"
    least = 1 if name == "makemore: by_tensors" else 3  # without a module nothing tells one step from the next
    assert report.done and not report.faults and report.rounds >= least, report.faults
    assert not [f for f in report.findings if f.severity != NOTE], f"\n{report}"


def test_a_watch_that_writes_would_be_seen():
    plain, _ = traced(forty.PROGRAMS["GAN: wgan_gp"], watched=False)

    def nudged():
        forty.PROGRAMS["GAN: wgan_gp"]()
        with torch.no_grad():
            forty.KEPT[0][0].weight[0, 0] += 1e-6

    hashes, _ = traced(nudged, watched=False)
    assert plain[:-1] == hashes[:-1] and plain[-1] != hashes[-1]
