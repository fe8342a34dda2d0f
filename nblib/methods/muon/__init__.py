"""Muon: momentum, orthogonalised. README.md has formula and use.

muon        the optimizer
groups      which parameters are Muon's and which AdamW's
variants    Polar Express and NorMuon
audit       what is wrong with an assignment that somebody else made
bf16_adamw  AdamW whose updates survive in bf16 weights
"""

from nblib.methods.muon import audit, bf16_adamw, groups, variants
from nblib.methods.muon.groups import Assignment, Together, assign, optimizers
from nblib.methods.muon.muon import (
    ADJUST,
    BAND,
    BATCH_ENTRIES,
    EPS,
    ITERATIONS,
    QUINTIC,
    Muon,
    map_shape,
    orthogonalise,
    response,
    scale,
    step_rms,
)

__all__ = [
    "ADJUST",
    "BAND",
    "BATCH_ENTRIES",
    "EPS",
    "ITERATIONS",
    "QUINTIC",
    "Assignment",
    "Muon",
    "Together",
    "assign",
    "audit",
    "bf16_adamw",
    "groups",
    "map_shape",
    "optimizers",
    "orthogonalise",
    "response",
    "scale",
    "step_rms",
    "variants",
]
