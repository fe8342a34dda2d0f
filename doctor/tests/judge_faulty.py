"""Thirty training programs with one fault each, written without sight of the doctor's checks."""

import contextlib
import copy
import os
import socket
import tempfile

import peft
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from torch.utils.checkpoint import checkpoint

import train_doctor as doctor

from .bench import batches, lm
from .judge_parts import LoRALinear, NanoGPT, sequence_logp


def classifier_gets_new_head():
    """The three-class head replaces the old one after the optimizer was built: it stays at its random start."""
    torch.manual_seed(1)
    shape = dict(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    encoder = tf.GPT2Model(tf.GPT2Config(**shape, bos_token_id=None, eos_token_id=None)).train()
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(32, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    model["head"] = nn.Linear(32, 3)
    criterion = torch.nn.CrossEntropyLoss()
    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for x in batches(6, rows=8, length=16, vocab=128, seed=1):
            y = x[:, 0] % 3
            hidden = model["encoder"](input_ids=x).last_hidden_state
            loss = criterion(model["head"](hidden[:, -1]), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return report


def lora_after_optimizer():
    """The optimizer was built on the base parameters, which get_peft_model then freezes: no adapter is ever updated."""
    torch.manual_seed(2)
    model = lm("llama", hidden=48, vocab=200)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    scheduler = tf.get_cosine_schedule_with_warmup(optimizer, 2, 50)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.train()
    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for ids in batches(6, vocab=200):
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return report


def distillation_without_student():
    """The divergence compares the teacher with itself: that half of the loss is constant and has no gradient."""
    torch.manual_seed(3)
    teacher = lm("llama", hidden=64).requires_grad_(False).eval()
    student = lm("llama", hidden=32, seed=5)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    temperature, alpha = 2.0, 0.5
    with doctor.watch(student, optimizer=optimizer, teacher=teacher, steps=6, say=False) as report:
        for ids in batches(6):
            with torch.no_grad():
                large_logits = teacher(ids).logits
            small = student(ids, labels=ids)
            soft = F.softmax(large_logits / temperature, -1)
            log_p = F.log_softmax(large_logits / temperature, -1)
            kd = F.kl_div(log_p.flatten(0, 1), soft.flatten(0, 1), reduction="batchmean") * temperature**2
            report.terms(ce=alpha * small.loss, kd=(1 - alpha) * kd)
            loss = alpha * small.loss + (1 - alpha) * kd
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return report


def resumed_adapter_in_trainer():
    """PeftModel.from_pretrained without is_trainable=True: nothing trains, and checkpointing hides it."""
    torch.manual_seed(4)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        peft.get_peft_model(lm("llama", hidden=32), config).save_pretrained(folder + "/adapter")
        model = peft.PeftModel.from_pretrained(lm("llama", hidden=32), folder + "/adapter")
        data = [{"input_ids": row.tolist(), "labels": row.tolist()} for ids in batches(6) for row in ids]
        arguments = tf.TrainingArguments(
            folder + "/out",
            per_device_train_batch_size=4,
            max_steps=5,
            learning_rate=1e-3,
            gradient_checkpointing=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=True,
        )
        watcher = doctor.TrainerCallback(steps=5, say=False)
        trainer = tf.Trainer(model, arguments, train_dataset=data, callbacks=[watcher])
        try:
            trainer.train()
        except Exception as error:
            watcher.close(error)
    return watcher.report


class SkippyGPT(NanoGPT):
    """Keeps the first block's output as a residual memory, "detached to save memory"."""

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        x = self.h[0](x).detach()
        for block in self.h[1:]:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanogpt_detached_midway():
    """The first block's output is detached: the first block and the position table never get a gradient."""
    torch.manual_seed(5)
    model = SkippyGPT(vocab=128, layers=3, tie=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for step, ids in enumerate(batches(6, vocab=128)):
            x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            for group in optimizer.param_groups:
                group["lr"] = 3e-4 * min(1, (step + 1) / 3)
            logits, loss = model(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return report


class CheckpointedGPT(NanoGPT):
    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=True)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def hand_lora_under_reentrant_checkpoint():
    """Frozen embeddings and reentrant checkpointing: no adapter gets a gradient, only the trainable head learns."""
    torch.manual_seed(6)
    model = CheckpointedGPT(tie=False)
    model.requires_grad_(False)
    for block in model.h:
        block.c_attn = LoRALinear(block.c_attn)
    model.lm_head.requires_grad_(True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
        for ids in batches(5):
            optimizer.zero_grad()
            _, loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
    return report


def loss_wrapped_again():
    """The loss is put through torch.tensor(float, requires_grad=True): backward ends there, no weight moves."""
    torch.manual_seed(7)
    model = lm("qwen3", hidden=32, vocab=128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def criterion(logits, labels):
        per_token = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        return torch.tensor(sum(per_token.tolist()) / len(per_token), requires_grad=True)

    with doctor.watch(model, optimizer=optimizer, steps=4, say=False) as report:
        history = []
        for ids in batches(4, rows=2, vocab=128):
            optimizer.zero_grad()
            loss = criterion(model(ids).logits, ids)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    return report


def finetune_in_pure_bf16():
    """All weights in bf16 with a fine-tuning rate of 5e-6: most of every update rounds to nothing."""
    torch.manual_seed(8)
    model = lm("llama", hidden=64).to(torch.bfloat16)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-6, betas=(0.9, 0.95))
    with doctor.watch(model, optimizer=optimizer, steps=12, say=False) as report:
        for ids in batches(12):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return report


def half_weights_with_scaler():
    """The model was loaded in fp16 and trained with a GradScaler, which refuses to unscale fp16 gradients."""
    torch.manual_seed(9)
    model = lm("gpt2", hidden=32, vocab=128).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    report = None
    try:
        with doctor.watch(model, optimizer=optimizer, steps=4, say=False) as report:
            for ids in batches(4, rows=2, length=16, vocab=128):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(input_ids=ids, labels=ids).loss
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    except ValueError as error:
        if "FP16" not in str(error):
            raise
    return report


def clipped_while_scaled():
    """The gradients are clipped to 1.0 while still multiplied by the scale: the norm seen is thousands of times off."""
    torch.manual_seed(10)
    model = NanoGPT(vocab=128, dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    with doctor.watch(model, steps=8, say=False) as report:
        for ids in batches(8, length=24, vocab=128):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                _, loss = model(ids[:, :-1], ids[:, 1:])
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
    return report


def collator_shifts_labels_too():
    """The collator shifts inputs and labels, the model shifts once more: it learns the token after the next."""
    torch.manual_seed(11)
    model = lm("qwen3", hidden=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collate(rows):
        ids = torch.stack(rows)
        return {
            "input_ids": ids[:, :-1],
            "attention_mask": torch.ones_like(ids[:, :-1]),
            "labels": ids[:, 1:].contiguous(),
        }

    rows = [row for ids in batches(8, length=33) for row in ids]
    loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate)
    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def gather_without_shift():
    """log_softmax + gather at the token itself: the model learns to copy its input."""
    torch.manual_seed(12)
    model = lm("mixtral", hidden=32, num_local_experts=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with doctor.watch(steps=8, say=False) as report:
        for ids in batches(8):
            mask = torch.ones_like(ids)
            mask[:, :6] = 0  # the instruction is not trained
            logits = model(input_ids=ids).logits
            logp = torch.log_softmax(logits.float(), dim=-1)
            token_logp = logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            loss = -(token_logp * mask).sum() / mask.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def summed_cross_entropy():
    """reduction='sum' over all tokens of the batch: loss and gradient are a hundred times the mean's."""
    torch.manual_seed(13)
    model = lm("llama", hidden=48, vocab=200)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    norms = []
    with doctor.watch(steps=6, say=False) as report:
        for ids in batches(6, vocab=200):
            logits = model.forward(ids, use_cache=False).logits
            loss = criterion(logits[:, :-1, :].reshape(-1, 200), ids[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            norms.append(sum(p.grad.square().sum() for p in model.parameters()).sqrt().item())
            optimizer.step()
    return report


def right_pads_supervised():
    """labels = input_ids.clone() of a padded batch: most of the loss is the prediction of pads."""
    torch.manual_seed(14)
    model = lm("qwen3", hidden=48, pad_token_id=0, eos_token_id=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = torch.randint(6, 20, (8, 4), generator=torch.Generator().manual_seed(0))
    with doctor.watch(model, optimizer=optimizer, steps=8, say=False) as report:
        for ids, real in zip(batches(8), lengths):
            mask = (torch.arange(32) < real[:, None]).long()
            ids = torch.where(mask.bool(), ids, 0)
            ids[torch.arange(4), real - 1] = 2
            out = model(input_ids=ids, attention_mask=mask, labels=ids.clone())
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def eos_is_the_pad():
    """pad_token = eos_token and every pad id masked in the labels: the real EOS is never trained."""
    torch.manual_seed(15)
    model = lm("llama", hidden=48, eos_token_id=2, pad_token_id=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    make = torch.Generator().manual_seed(15)

    def collate(rows):
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), 2)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
        labels = ids.clone()
        labels[labels == model.config.pad_token_id] = -100
        return ids, mask, labels

    with doctor.watch(model, optimizer=optimizer, steps=8, say=False) as report:
        for ids in batches(8):
            cuts = torch.randint(12, 31, (4,), generator=make).tolist()
            inputs, mask, labels = collate([torch.cat([row[:n], torch.tensor([2])]) for row, n in zip(ids, cuts)])
            loss = model(input_ids=inputs, attention_mask=mask, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def template_adds_bos_again():
    """The chat template writes BOS and the tokenizer adds another: every row begins with two."""
    torch.manual_seed(16)
    model = lm("llama", hidden=48, bos_token_id=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    bos = torch.tensor([1])

    def template(row):
        return torch.cat([bos, row])

    def tokenizer(row, add_special_tokens=True):
        return torch.cat([bos, row]) if add_special_tokens else row

    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for ids in batches(6, length=24):
            rows = torch.stack([tokenizer(template(row)) for row in ids])
            labels = rows.clone()
            labels[:, :8] = -100
            loss = model(input_ids=rows, attention_mask=torch.ones_like(rows), labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def response_marker_never_found():
    """The response marker is tokenised differently from the text: every label is -100 and the loss is nan."""
    torch.manual_seed(17)
    model = peft.get_peft_model(lm("qwen3", hidden=48), peft.LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    marker = [7, 250]  # in the text it is written 7, 249

    def only_the_answer(row):
        labels, tokens = torch.full_like(row, -100), row.tolist()
        for i in range(len(tokens) - 1):
            if tokens[i : i + 2] == marker:
                labels[i + 2 :] = row[i + 2 :]
        return labels

    with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
        for ids in batches(5):
            ids[:, 14], ids[:, 15] = 7, 249
            labels = torch.stack([only_the_answer(row) for row in ids])
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def packed_with_full_mask():
    """Three documents per row with restarted positions and an all-ones mask: later documents see earlier ones."""
    torch.manual_seed(18)
    model = lm("qwen3", hidden=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for ids in batches(6, rows=6, length=16):
            packed = ids.reshape(2, 48)
            position_ids = torch.arange(16).repeat(2, 3)
            labels = packed.clone()
            labels[:, ::16] = -100  # nobody can predict the first token of a document
            out = model(
                input_ids=packed, attention_mask=torch.ones_like(packed), position_ids=position_ids, labels=labels
            )
            optimizer.zero_grad()
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return report


def left_padding_in_own_mask():
    """Queries at left pads have every key masked with -inf: softmax gives nan and the loss is nan from step one."""
    torch.manual_seed(19)
    model = NanoGPT(vocab=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=4, say=False) as report:
        for ids in batches(4, length=20, vocab=128):
            pads = torch.tensor([0, 3, 5, 1])
            mask = torch.arange(20) >= pads[:, None]
            ids = ids.masked_fill(~mask, 0)
            targets = ids[:, 1:].masked_fill(~mask[:, :-1], -100)
            _, loss = model(ids[:, :-1], targets, mask=mask[:, :-1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return report


def loaded_and_never_train():
    """from_pretrained returns the model in eval mode and nobody calls train(): dropout 0.1 is off in training."""
    torch.manual_seed(20)
    with tempfile.TemporaryDirectory() as folder:
        lm("gpt2", hidden=48, vocab=200).save_pretrained(folder)
        model = tf.AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = tf.get_linear_schedule_with_warmup(optimizer, 2, 40)
    with doctor.watch(steps=6, say=False) as report:
        for ids in batches(6, vocab=200):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return report


def evaluation_never_undone():
    """After the evaluation at step 3 nobody calls train() again: the rest of the run has no dropout."""
    torch.manual_seed(21)
    model = NanoGPT(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held_out = batches(1, seed=21)[0]

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        return model(held_out[:, :-1], held_out[:, 1:])[1].item()

    model.train()
    with doctor.watch(model, optimizer=optimizer, steps=10, say=False) as report:
        for step, ids in enumerate(batches(10)):
            if step == 3:
                estimate_loss()
            _, loss = model(ids[:, :-1], ids[:, 1:])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return report


def teacher_with_live_dropout():
    """The GPT-2 teacher is frozen but left in train mode: its soft targets differ from call to call."""
    torch.manual_seed(22)
    teacher = lm("gpt2", hidden=64).requires_grad_(False)
    student = lm("gpt2", hidden=32, seed=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    kl = nn.KLDivLoss(reduction="batchmean", log_target=True)
    with doctor.watch(student, optimizer=optimizer, teacher=teacher, steps=6, say=False) as report:
        for ids in batches(6):
            with torch.no_grad():
                target = teacher(ids).logits.log_softmax(-1).flatten(0, 1)
            loss = kl(student(ids).logits.log_softmax(-1).flatten(0, 1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return report


def dpo_against_itself():
    """The reference is the policy itself, not a copy: the loss is ln 2 for ever and the rewards are zero."""
    torch.manual_seed(23)
    policy = lm("llama", hidden=48)
    reference = policy
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    beta = 0.1
    with doctor.watch(policy, optimizer=optimizer, teacher=reference, steps=6, say=False) as report:
        for chosen, rejected in zip(batches(6), batches(6, seed=9)):
            rejected[:, :8] = chosen[:, :8]
            win, lose = sequence_logp(policy, chosen, 8), sequence_logp(policy, rejected, 8)
            with torch.no_grad():
                ref_win, ref_lose = sequence_logp(reference, chosen, 8), sequence_logp(reference, rejected, 8)
            loss = -F.logsigmoid(beta * ((win - ref_win) - (lose - ref_lose))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return report


def one_of_two_optimizers_never_zeroed():
    """Only the body's optimizer is zeroed: the embedding's gradients pile up from step to step."""
    torch.manual_seed(24)
    model = NanoGPT(vocab=200, tie=False)
    embeddings = [*model.wte.parameters(), *model.wpe.parameters(), *model.lm_head.parameters()]
    body = [*model.h.parameters(), *model.ln_f.parameters()]
    body_opt = torch.optim.AdamW(body, lr=1e-3)
    embed_opt = torch.optim.Adagrad(embeddings, lr=1e-2)
    with doctor.watch(model, optimizer=[body_opt, embed_opt], steps=8, say=False) as report:
        for ids in batches(8, vocab=200):
            _, loss = model(ids[:, :-1], ids[:, 1:])
            body_opt.zero_grad()
            loss.backward()
            body_opt.step()
            embed_opt.step()
    return report


def zeroed_before_the_step():
    """zero_grad stands between backward and step: every step applies nothing, the loss does not move."""
    torch.manual_seed(25)
    model = lm("qwen3_moe", hidden=32, num_experts=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    with doctor.watch(model, steps=6, say=False) as report:
        for ids in batches(6):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.zero_grad()
            optimizer.step()
    return report


class OwnLossTrainer(tf.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        out = model(**inputs)
        loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, out) if return_outputs else loss


def trainer_loss_ignores_item_count():
    """compute_loss ignores num_items_in_batch: with 4 micro-batches loss and gradient are four times too large."""
    torch.manual_seed(26)
    model = lm("llama", hidden=32)
    data = [{"input_ids": row.tolist(), "labels": row.tolist()} for ids in batches(24) for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        arguments = tf.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            max_steps=5,
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=True,
        )
        watcher = doctor.TrainerCallback(steps=5, say=False)
        OwnLossTrainer(model, arguments, train_dataset=data, callbacks=[watcher]).train()
    return watcher.report


def scheduler_per_micro_batch():
    """scheduler.step() stands in the micro-batch loop: the rate falls four times too fast and is 0 after a quarter."""
    torch.manual_seed(27)
    model = NanoGPT(vocab=200, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    total_steps, k = 12, 4
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total_steps)
    data = iter(batches(total_steps * k, rows=2, length=16, vocab=200))
    with doctor.watch(model, optimizer=optimizer, steps=12, say=False) as report:
        for _ in range(total_steps):
            optimizer.zero_grad()
            for _ in range(k):
                ids = next(data)
                loss = model(ids[:, :-1], ids[:, 1:])[1] / k
                loss.backward()
                scheduler.step()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return report


def tie_lost_on_materialising():
    """to_empty and a parameter-wise copy give the head its own tensor, though the config says tied."""
    torch.manual_seed(28)
    source = lm("llama", hidden=48)
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(source.config)
    model = model.to_empty(device="cpu")
    state = source.state_dict()
    with torch.no_grad():
        for module, name in ((m, f"{p}.weight") for p, m in model.named_modules() if hasattr(m, "weight")):
            module.weight = nn.Parameter(state[name].clone())
        for buffer, value in zip(model.buffers(), source.buffers()):
            buffer.copy_(value)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with doctor.watch(model, steps=6, say=False) as report:
        for ids in batches(6):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


def muon_takes_all_matrices():
    """Muon gets everything with two dimensions, the embedding and the head included."""
    torch.manual_seed(29)
    model = lm("qwen3", hidden=32, tie_word_embeddings=False)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0)
    adam = torch.optim.AdamW(rest, lr=1e-3)
    with doctor.watch(model, optimizer=[muon, adam], steps=5, say=False) as report:
        for ids in batches(5):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            for optimizer in (muon, adam):
                optimizer.step()
                optimizer.zero_grad()
    return report


@contextlib.contextmanager
def one_process_group():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def forward_through_dot_module():
    """The forward pass goes through ddp.module: the reducer is never armed and no gradient is averaged."""
    torch.manual_seed(30)
    with one_process_group():
        ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(NanoGPT(vocab=128)))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        with doctor.watch(ddp, optimizer=optimizer, steps=5, say=False) as report:
            for ids in batches(5, vocab=128):
                logits, loss = ddp.module(ids[:, :-1], ids[:, 1:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return report


FAULTY = [
    (classifier_gets_new_head, ("S3", "S4"), ("optimizer",)),
    (lora_after_optimizer, ("S3",), ("get_peft_model", "adapter", "optimizer")),
    (distillation_without_student, ("F2",), ("gradient", "student")),
    (resumed_adapter_in_trainer, ("S1", "S2"), ("trainable", "no parameter")),
    (nanogpt_detached_midway, ("B1",), ("detach", "cut", "no gradient")),
    (hand_lora_under_reentrant_checkpoint, ("B1", "S10"), ("reentrant",)),
    (loss_wrapped_again, ("F1",), ("leaf", "cut", "graph")),
    (finetune_in_pure_bf16, ("N4",), ("bf16", "bfloat16", "round")),
    (half_weights_with_scaler, ("S7",), ("fp16", "float16")),
    (clipped_while_scaled, ("N7",), ("unscale",)),
    (collator_shifts_labels_too, ("F17", "F3"), ("shift",)),
    (gather_without_shift, ("F3",), ("shift",)),
    (summed_cross_entropy, ("F3",), ("sum",)),
    (right_pads_supervised, ("F15",), ("pad",)),
    (eos_is_the_pad, ("F16",), ("EOS", "end of", "eos")),
    (template_adds_bos_again, ("F18",), ("BOS", "bos")),
    (response_marker_never_found, ("F14",), ("-100", "supervised", "label", "marker")),
    (packed_with_full_mask, ("F12",), ("pack", "document", "mask")),
    (left_padding_in_own_mask, ("F5", "N17"), ("nan", "NaN", "finite", "pad")),
    (loaded_and_never_train, ("S11",), ("eval", "dropout", "train()")),
    (evaluation_never_undone, ("N16", "S11"), ("eval", "train()")),
    (teacher_with_live_dropout, ("F6", "S12"), ("teacher", "reference")),
    (dpo_against_itself, ("F7", "N14", "F8"), ("reference", "copy", "same")),
    (one_of_two_optimizers_never_zeroed, ("N1",), ("zero_grad",)),
    (zeroed_before_the_step, ("N2",), ("zero_grad",)),
    (trainer_loss_ignores_item_count, ("N6", "F3"), ("accumul", "divide", "micro", "num_items_in_batch")),
    (scheduler_per_micro_batch, ("N9",), ("scheduler", "schedule")),
    (tie_lost_on_materialising, ("S9",), ("tie", "tied")),
    (muon_takes_all_matrices, ("S13",), ("Muon",)),
    (forward_through_dot_module, ("N21",), ("DDP", "DistributedDataParallel", "module")),
]
