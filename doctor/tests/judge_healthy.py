"""Sixteen healthy training programs that look like faulty ones, written without sight of the doctor's checks."""

import contextlib
import copy
import itertools
import tempfile

import peft
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn

import train_doctor as doctor

from .bench import batches, in_four_bits, lm
from .judge_faulty import one_process_group
from .judge_parts import LoRALinear, NanoGPT, sequence_logp


def warm_up_from_zero_with_lora():
    """The rate is exactly 0 at the first step and tiny after it; lora_A has no gradient while lora_B is zero."""
    torch.manual_seed(101)
    config = peft.LoraConfig(r=8, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(lm("gpt2", hidden=48), config)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = tf.get_linear_schedule_with_warmup(optimizer, 4, 100)
    with doctor.watch(model, optimizer=optimizer, steps=12, say=False) as report:
        for ids in batches(12):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return report


class Experts(nn.Module):
    """Top-1 routing over sixteen experts, each called only when a token chose it."""

    def __init__(self, width, count=16):
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x):
        flat = x.flatten(0, -2)
        weight, choice = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for e in choice.unique().tolist():
            rows = (choice == e).nonzero().squeeze(-1)
            out = out.index_add(0, rows, weight[rows, None] * self.experts[e](flat[rows]))
        return out.view_as(x)


def experts_nobody_chose_yet():
    """Two short rows per step and sixteen experts: some are not routed to for many steps and have no gradient."""
    torch.manual_seed(102)
    model = NanoGPT(vocab=128, width=32)
    for block in model.h:
        block.mlp = Experts(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with doctor.watch(model, optimizer=optimizer, steps=10, say=False) as report:
        for ids in batches(10, rows=2, length=10, vocab=128):
            _, loss = model(ids[:, :-1], ids[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return report


def dpo_with_adapter_switched_off():
    """A 4-bit base; the reference is the model with its adapter disabled, under no_grad and checkpointing (warns)."""
    torch.manual_seed(103)
    with tempfile.TemporaryDirectory() as folder:
        lm("llama", hidden=64).save_pretrained(folder)
        base = in_four_bits(folder).train()
    base.requires_grad_(False)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    with doctor.watch(model, optimizer=optimizer, steps=8, say=False) as report:
        for chosen, rejected in zip(batches(8), batches(8, seed=77)):
            rejected[:, :8] = chosen[:, :8]
            both = torch.cat([chosen, rejected])
            with torch.no_grad(), model.disable_adapter():
                ref_win, ref_lose = sequence_logp(model, both, 8).chunk(2)
            win, lose = sequence_logp(model, both, 8).chunk(2)
            loss = -F.logsigmoid(0.1 * ((win - ref_win) - (lose - ref_lose))).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def scaler_skips_its_first_steps():
    """The first scale overflows fp16, so the scaler skips three steps and lowers it: that is its job."""
    torch.manual_seed(104)
    model = NanoGPT(vocab=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=0.125)
    with doctor.watch(model, optimizer=optimizer, steps=12, say=False) as report:
        for ids in batches(12, vocab=128):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                _, loss = model(ids[:, :-1], ids[:, 1:])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return report


def long_prompts_short_answers():
    """Left padding with its own position ids, 90 % of the labels masked, pads and prompts both at -100."""
    torch.manual_seed(105)
    model = lm("llama", hidden=64, pad_token_id=0, eos_token_id=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    make = torch.Generator().manual_seed(5)
    with doctor.watch(model, optimizer=optimizer, steps=10, say=False) as report:
        for ids in batches(10, rows=6, length=48):
            pads = torch.randint(0, 16, (6,), generator=make)
            mask = (torch.arange(48) >= pads[:, None]).long()
            ids = ids.masked_fill(mask == 0, 0)
            ids[:, -1] = 2
            labels = ids.clone()
            labels[:, :43] = -100
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            out = model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels)
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
    return report


def frozen_tied_embeddings():
    """Embedding and head are one tensor and frozen on purpose, with the lower block; dropout is off by config."""
    torch.manual_seed(106)
    model = lm("gpt2", hidden=48, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model.transformer.wte.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    model.eval()  # nothing in it depends on the mode
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=5e-3)
    with doctor.watch(model, steps=8, say=False) as report:
        for ids in batches(8):
            logits = model(ids).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return report


def nanogpt_pretraining():
    """Documents concatenated with a separator and no isolation, targets shifted by the loader, evaluations between."""
    torch.manual_seed(107)
    stream = torch.cat([torch.cat([row, torch.tensor([0])]) for ids in batches(30) for row in ids])
    model = NanoGPT(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))

    def get_batch():
        starts = torch.randint(len(stream) - 49, (4,))
        x = torch.stack([stream[i : i + 48] for i in starts])
        return x, torch.stack([stream[i + 1 : i + 49] for i in starts])

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        mean = sum(model(*get_batch())[1].item() for _ in range(2)) / 2
        model.train()
        return mean

    with doctor.watch(model, optimizer=optimizer, steps=12, say=False, from_scratch=True) as report:
        for step in range(12):
            if step % 4 == 0:
                estimate_loss()
            _, loss = model(*get_batch())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return report


def uneven_micro_batches_by_token():
    """Sums of cross-entropy divided by the step's total of supervised tokens: every micro-loss is a sum, and right."""
    torch.manual_seed(108)
    model = lm("qwen3", hidden=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = iter(batches(24, rows=2))
    with doctor.watch(model, optimizer=optimizer, steps=8, say=False) as report:
        for _ in range(8):
            micro = [(ids, ids.clone()) for ids in itertools.islice(data, 3)]
            for i, (_, labels) in enumerate(micro):
                labels[:, : 2 + 12 * i] = -100
            total = sum((labels[:, 1:] != -100).sum() for _, labels in micro)
            for ids, labels in micro:
                logits = model(input_ids=ids).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / total
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return report


def muon_beside_adamw():
    """Hidden matrices in Muon, the rest in AdamW, a scheduler for each; neither optimizer holds all parameters."""
    torch.manual_seed(109)
    model = lm("llama", hidden=64, tie_word_embeddings=False)
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    known = {id(p) for p in hidden}
    others = [p for p in model.parameters() if id(p) not in known]
    optimizers = [torch.optim.Muon(hidden, lr=0.02, weight_decay=0.0), torch.optim.AdamW(others, lr=3e-3)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 3)) for o in optimizers]
    with doctor.watch(model, optimizer=optimizers, steps=8, say=False) as report:
        for ids in batches(8):
            model(input_ids=ids, labels=ids).loss.backward()
            for optimizer, scheduler in zip(optimizers, schedulers):
                optimizer.step()
                scheduler.step()
            model.zero_grad(set_to_none=True)
    return report


class RoundedAdam(torch.optim.Optimizer):
    """Adam for bf16 weights that adds in fp32 and rounds stochastically: small updates survive on average."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p, dtype=torch.float32))
                    state["v"] = torch.zeros_like(state["m"])
                state["t"] += 1
                g = p.grad.float()
                state["m"].lerp_(g, 0.1)
                state["v"].lerp_(g * g, 0.001)
                m, v = state["m"] / (1 - 0.9 ** state["t"]), state["v"] / (1 - 0.999 ** state["t"])
                exact = p.float() - group["lr"] * m / (v.sqrt() + 1e-8)
                bits = exact.view(torch.int32) + torch.randint_like(exact, 0, 1 << 16, dtype=torch.int32)
                p.copy_((bits & -65536).view(torch.float32))


def bf16_with_stochastic_rounding():
    """All weights bf16 and a rate of 5e-5: most elements stay where they are in a step, but not on average."""
    torch.manual_seed(110)
    model = lm("llama", hidden=64).bfloat16()
    optimizer = RoundedAdam(model.parameters(), lr=5e-5)
    with doctor.watch(model, optimizer=optimizer, steps=12, say=False) as report:
        for ids in batches(12):
            loss = model.forward(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def sequence_classifier_nothing_declared():
    """One label per row, not per token; the score head is new; the doctor is given nothing at all."""
    torch.manual_seed(111)
    shape = dict(vocab_size=128, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = tf.Qwen3Config(**shape, intermediate_size=96, head_dim=12, num_labels=4, pad_token_id=0)
    model = tf.AutoModelForSequenceClassification.from_config(config).train()
    groups = [{"params": model.model.parameters(), "lr": 2e-3}, {"params": model.score.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups)
    with doctor.watch(steps=10, say=False) as report:
        for ids in batches(10, rows=16, length=12, vocab=128):
            labels = ids[:, -1] % 4
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return report


def distilling_into_a_pruned_copy():
    """The student starts as a copy of the teacher less one layer; T squared, batchmean, cross-entropy beside it."""
    torch.manual_seed(112)
    teacher = lm("gpt2", hidden=48, layers=3, attn_pdrop=0.0).requires_grad_(False).eval()
    student = copy.deepcopy(teacher).requires_grad_(True).train()
    del student.transformer.h[1]
    student.config.n_layer = 2
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    T = 2.0
    with doctor.watch(student, optimizer=optimizer, teacher=teacher, steps=8, say=False) as report:
        for ids in batches(8):
            with torch.inference_mode():
                target = (teacher(ids).logits / T).softmax(-1).flatten(0, 1)
            out = student(ids, labels=ids)
            soft = (out.logits / T).log_softmax(-1).flatten(0, 1)
            kd = F.kl_div(soft, target.clone(), reduction="batchmean") * T**2
            ce = out.loss
            report.terms(ce=0.3 * ce, kd=0.7 * kd)
            optimizer.zero_grad()
            (0.3 * ce + 0.7 * kd).backward()
            optimizer.step()
    return report


def trainer_with_accumulation():
    """The Trainer's own loss and three micro-batches of different length per step, right padding, warm-up, no_decay."""
    torch.manual_seed(113)
    model = lm("qwen3", hidden=48, pad_token_id=0, eos_token_id=2)
    rows = [row for ids in batches(30) for row in ids]
    data = [row[: 8 + 5 * (i % 5)].tolist() + [2] for i, row in enumerate(rows)]

    def collate(chosen):
        longest = max(map(len, chosen))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in chosen])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in chosen])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    with tempfile.TemporaryDirectory() as folder:
        arguments = tf.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=3,
            max_steps=8,
            warmup_steps=2,
            learning_rate=3e-3,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=True,
        )
        watcher = doctor.TrainerCallback(steps=8, say=False)
        tf.Trainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=[watcher]).train()
    return watcher.report


def packed_and_isolated():
    """Documents of different length packed with restarted positions, no 2-D mask and no cache: they do not leak."""
    torch.manual_seed(114)
    model = lm("qwen3", hidden=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lengths = [10, 17, 5, 16]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with doctor.watch(model, optimizer=optimizer, steps=8, say=False) as report:
        for ids in batches(8, rows=4, length=17):
            packed = torch.cat([row[:n] for row, n in zip(ids, lengths)])[None]
            labels = packed.masked_fill(positions == 0, -100)
            out = model(input_ids=packed, position_ids=positions, labels=labels, use_cache=False)
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
    return report


def ddp_with_no_sync():
    """The wrapper is called, no_sync holds the average back until the last micro-batch, only the save uses .module."""
    torch.manual_seed(115)
    with one_process_group():
        ddp = nn.parallel.DistributedDataParallel(lm("llama", hidden=48))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
        data = iter(batches(16))
        with doctor.watch(ddp, optimizer=optimizer, steps=8, say=False) as report:
            for _ in range(8):
                for last in (False, True):
                    ids = next(data)
                    with contextlib.nullcontext() if last else ddp.no_sync():
                        (ddp(input_ids=ids, labels=ids).loss / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
            ddp.module.state_dict()
    return report


def hand_lora_unfreezing_on_the_way():
    """Adapters first; at step 4 the final norm and the head are unfrozen and join the optimizer as a new group."""
    torch.manual_seed(116)
    model = NanoGPT(tie=False).requires_grad_(False)
    for block in model.h:
        block.c_attn, block.c_proj = LoRALinear(block.c_attn), LoRALinear(block.c_proj)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    with doctor.watch(model, steps=10, say=False) as report:
        for step, ids in enumerate(batches(10)):
            if step == 4:
                late = [*model.ln_f.parameters(), *model.lm_head.parameters()]
                for p in late:
                    p.requires_grad_(True)
                optimizer.add_param_group({"params": late, "lr": 3e-3})
            _, loss = model(ids[:, :-1], ids[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return report


HEALTHY = [
    warm_up_from_zero_with_lora,
    experts_nobody_chose_yet,
    dpo_with_adapter_switched_off,
    scaler_skips_its_first_steps,
    long_prompts_short_answers,
    frozen_tied_embeddings,
    nanogpt_pretraining,
    uneven_micro_batches_by_token,
    muon_beside_adamw,
    bf16_with_stochastic_rounding,
    sequence_classifier_nothing_declared,
    distilling_into_a_pruned_copy,
    trainer_with_accumulation,
    packed_and_isolated,
    ddp_with_no_sync,
    hand_lora_unfreezing_on_the_way,
]
