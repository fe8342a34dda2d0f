"""nblib: what a person imports in a training script of their own. One idea per file, in reading order:

runtime     seeds, device and precision, the environment   paths       where things are
files       files that are never half written              text        corpora and packed batches
models      tiny and real transformers models              base        the stored base model
start       a model with its corpus, for a method          losses      losses that never hold all logits
wiring      freeze, select, swap, who trains, the canary   compiling   checkpointing and compile by block
memory      bytes of a step, estimated and measured        train       THE loop
checkpoint  save everything, verify on reading             guards      NaN, spikes, clipping, a starved loop
hf          the Hugging Face Trainer, corrected            doctor      the package train_doctor
closure     which code a notebook can reach                cli         the command `nblib`
methods/    one training method per file                   run/        what makes notebooks a workbook
"""

import logging

__version__ = "0.1.0"

# Whoever imports bitsandbytes (peft, the HF Trainer) on a CPU with AVX-512 BF16 hears on stderr that an optional
# kernel could not be fetched. Said here once for all, because it must be said before the import.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
