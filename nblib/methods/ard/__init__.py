"""ARD-LoRA: LoRA with a latent variable per rank, whose prior says which ranks a layer needs.
README.md has formula and use.

layer          the layer, its loss, attach
ranks          priors from data, relevance, pruning
uncertainty    likelihood, calibration and ranking of answers
adapter_files  save, load, and export to peft
"""

from nblib.methods.ard import adapter_files, ranks, uncertainty
from nblib.methods.ard.adapter_files import export_peft, load, preflight, save
from nblib.methods.ard.layer import (
    LOGVARS,
    ARDLinear,
    Latent,
    adapters,
    attach,
    check_shape,
    collect,
    divergence,
    install,
    kl,
    loss,
    passes,
    projections,
    sampling,
    warm,
)
from nblib.methods.ard.ranks import estimate_priors, grade, prune, relevance

__all__ = [
    "LOGVARS",
    "ARDLinear",
    "Latent",
    "adapter_files",
    "adapters",
    "attach",
    "check_shape",
    "collect",
    "divergence",
    "estimate_priors",
    "export_peft",
    "grade",
    "install",
    "kl",
    "load",
    "loss",
    "passes",
    "preflight",
    "projections",
    "prune",
    "ranks",
    "relevance",
    "sampling",
    "save",
    "uncertainty",
    "warm",
]
