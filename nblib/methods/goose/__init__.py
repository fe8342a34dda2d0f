"""SpikingGoose: an RWKV-7 in whose blocks a neuron fires or is silent.

README.md has formula and use.
"""

from nblib.methods.goose.model import (
    SCANS,
    Block,
    GooseConfig,
    GooseForCausalLM,
    GooseModel,
    GoosePreTrainedModel,
    Past,
    Recurrent,
    Spike,
    Zero,
    scan,
    sequential,
    tiny,
)

__all__ = [
    "SCANS",
    "Block",
    "GooseConfig",
    "GooseForCausalLM",
    "GooseModel",
    "GoosePreTrainedModel",
    "Past",
    "Recurrent",
    "Spike",
    "Zero",
    "scan",
    "sequential",
    "tiny",
]
