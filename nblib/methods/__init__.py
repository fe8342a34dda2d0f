"""One training method per file; none imports another unless it openly builds on it.

LRC            ternary, lrc            ARD-LoRA       ard, ard_ranks, ard_run, uncertainty
mixtures       moe, mixture_of_depths, multi_token    Muon           muon, param_groups
distillation   objective, divergences, temperature, alignment, loss_weights, teacher_cache; goose, a student
"""
