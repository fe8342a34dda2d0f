"""LRC, low-rank correction of a ternary-quantised model: y = T(W) x + U (V^T x). README.md has
formula and use.

layer      the layer, its starting points, attach, save and load
ternary    codes and scales, straight-through gradients, bytes
packed     the layer at inference: two bits a code in memory, whole-number products
export     the model for peft and for BitNet of transformers
gguf       the model as one file for llama.cpp; imported by its name, since it needs the package
           gguf
"""

from nblib.methods.lrc import export, packed, ternary
from nblib.methods.lrc.layer import (
    DAMPING,
    INITS,
    RECIPE,
    WEIGHTS,
    LRCLinear,
    attach,
    balanced,
    facts,
    input_moments,
    layers,
    linear_layers,
    load,
    rank_of,
    recovered,
    residual_energy,
    save,
    ternarise,
    truncated_svd,
)

__all__ = [
    "DAMPING",
    "INITS",
    "RECIPE",
    "WEIGHTS",
    "LRCLinear",
    "attach",
    "balanced",
    "export",
    "facts",
    "input_moments",
    "layers",
    "linear_layers",
    "load",
    "packed",
    "rank_of",
    "recovered",
    "residual_energy",
    "save",
    "ternarise",
    "ternary",
    "truncated_svd",
]
