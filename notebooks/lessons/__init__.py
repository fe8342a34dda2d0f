"""lessons: code that only demonstrates, beside the notebooks that teach with it. The library itself is nblib.

    pitfalls, trials, facts       the catalogue, its runs side by side, what they measured
    exercises, resume             `from lessons import check` judges an answer; a resumed run beside the straight one
    each                          which of several runs a cell is making: 01 to 15
    demo, programs, peers, menus  the first minute; programs for the doctor and its peers; menus over a figure
    bf16_adamw                    updates that survive in bf16 weights: notebooks 03 and 05
    rounding, examining           what a bf16 weight keeps: 03; first steps, losses and updates looked at: 05
    wirings, step_memory, compile_gain, attention_kernels  tables and pictures of 01 and 02
    lrc_tables, ard_tables        tables and pictures of 10 and 11
    claims, drawings              the claims of the write-ups with their verdicts; mechanisms as boxes and arrows
    checkpointing_versions        the order of checkpointing and adapters under four versions of transformers: 01
    loss_weight_phases            where a router of losses gives up: 10
    uncertainty                   accuracy, likelihood and calibration of a model on a text: 11
    ard_callbacks, peft_adapters  ARD-LoRA in the HF Trainer, AdaLoRA and MonteCLoRA in our loop: 11
    jamba, muon_race              a small Jamba, Muon against AdamW and four suspects: 12 and 14
    token_kinds, weight_movement  where a router sends words, how far weights moved: 12
    muon_update, router_pictures  tables and pictures of an update, of routers: 12 and 14
    multi_token                   heads that predict several tokens ahead: 14
    skipping                      what the layers of a model do with the tokens that they skip: 14
    teacher_agreement, own_layers  a student beside its teacher, a student of its layers: 13 and 15
    refresh                       stores the outputs of an execution in the notebooks: all
    seeds, progress_line          two trainings at several seeds; a line for one of many: 13 and 15
    training_rules, spiking_health  rules and thresholds of a write-up: 15
    short_runs, comparing         six methods on the same rows; any runs over tokens, seconds and bytes: 20

Importing it is light: torch comes with the module that needs it.

Footgun: it is installed with the project (`make env`), so it imports from any folder; a copy of a notebook alone does
not bring it along.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`check` by name, and not by an import: it judges readers' answers, so its code is part of no run's key."""
    if name == "check":
        return import_module("lessons.exercises").check
    raise AttributeError(f"module 'lessons' has no attribute {name!r}")
