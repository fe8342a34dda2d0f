"""Healthy training programs that look alarming, by a third writer who had not seen the doctor's checks.

Each learns (`learnt`), or shows in another way that it does what it says."""

import contextlib
import copy
import math
import tempfile
import warnings

import peft
import torch
import torch.nn.functional as F
import transformers as tf

import train_doctor as doctor

from .bench import batches, lm
from .judge2_parts import learnt, real
from .judge_parts import NanoGPT, sequence_logp

QV = ["q_proj", "v_proj"]


def two_steps_at_rate_zero():
    """LambdaLR whose first two values are exactly 0, then a warm-up; the first steps change nothing on purpose."""
    torch.manual_seed(0)
    model = NanoGPT()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, max(0, s - 1) / 4))
    losses = []
    with doctor.watch(model, optimizer=opt, steps=12, say=False) as report:
        for ids in batches(12, length=33):
            opt.zero_grad(set_to_none=True)
            _, loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            schedule.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def top_one_of_sixteen_experts():
    """Qwen3-MoE, one expert per token, one short row per micro-batch: most experts have no or no new gradient."""
    torch.manual_seed(0)
    model = lm("qwen3_moe", hidden=32, num_experts=16, num_experts_per_tok=1, moe_intermediate_size=32)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, experts = [], [p for n, p in model.named_parameters() if "experts" in n and p.dim() == 3]
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for i, ids in enumerate(batches(2, rows=1, length=10) * 8):
            loss = model(input_ids=ids, labels=ids).loss / 2
            loss.backward()
            losses.append(2 * loss.item())
            if i % 2:
                opt.step()
                if i < 15:
                    opt.zero_grad()
    learnt(losses)
    real(any(p.grad is None or bool((p.grad == 0).flatten(1).all(1).any()) for p in experts), "some were never chosen")
    return report


def frozen_reference_under_reentrant_checkpointing():
    """DPO on adapters; the separate reference is checkpointed too and warns 'None of the inputs have requires_grad'."""
    torch.manual_seed(0)
    base = lm("llama")
    ref = copy.deepcopy(base).requires_grad_(False).train()  # a Llama has no dropout; checkpointing wants train mode
    policy = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=32, target_modules=QV))
    for m in (policy, ref):
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    policy.enable_input_require_grads()
    opt = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=5e-3)
    good, bad = batches(1, rows=3)[0], batches(1, rows=3, seed=9)[0]
    bad[:, :12] = good[:, :12]
    losses = []
    with doctor.watch(policy, optimizer=opt, teacher=ref, steps=8, say=False) as report:
        for _ in range(8):
            with torch.no_grad():
                ref_gap = sequence_logp(ref, good, 12) - sequence_logp(ref, bad, 12)
            gap = sequence_logp(policy, good, 12) - sequence_logp(policy, bad, 12)
            loss = -F.logsigmoid(0.2 * (gap - ref_gap)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    real(abs(losses[0] - math.log(2)) < 1e-4, "starts at ln 2")
    learnt(losses)
    return report


class RoundingSGD(torch.optim.Optimizer):
    """SGD with momentum for bf16 weights, rounded up or down by chance, so that nothing is lost on average."""

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                velocity = state.setdefault("velocity", torch.zeros_like(p, dtype=torch.float32))
                velocity.mul_(group["momentum"]).add_(p.grad.float())
                exact = p.float() - group["lr"] * velocity
                noise = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32)
                p.copy_(((exact.view(torch.int32) + noise) & -65536).view(torch.float32).bfloat16())


def bf16_gpt2_rounded_by_chance():
    """A bf16 GPT-2 and an SGD that rounds stochastically: most elements do not move in one step, the mean does."""
    torch.manual_seed(0)
    model = lm("gpt2", hidden=48, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).bfloat16()
    opt = RoundingSGD(model.parameters(), lr=0.05)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for ids in batches(10, rows=6):
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses, by=0.005)
    return report


def scaler_that_starts_far_too_high():
    """fp16 autocast with an initial scale of 2^22: the scaler skips until it fits, then clips after unscale_."""
    torch.manual_seed(0)
    model = lm("llama")
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    losses, scales = [], []
    with doctor.watch(model, optimizer=opt, steps=12, say=False) as report:
        for ids in batches(12):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(input_ids=ids, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
    real(scales[2] < 2.0**22 and len(set(scales)) < 8, "steps were skipped, and most were not")
    learnt(losses)
    return report


def one_supervised_token_per_row():
    """A classification put as text: only the last real token of a right-padded row has a label, 97 % are -100."""
    torch.manual_seed(0)
    model = lm("qwen3", pad_token_id=0)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for ids in batches(10, rows=6):
            keep, labels = torch.ones_like(ids), torch.full_like(ids, -100)
            for row in range(6):
                end = 31 - 3 * row
                ids[row, end] = 10 + int(ids[row, 1] > 120)
                labels[row, end] = ids[row, end]
                ids[row, end + 1 :], keep[row, end + 1 :] = 0, 0
            loss = model(input_ids=ids, attention_mask=keep, labels=labels).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses, by=0.1)
    return report


def adapters_over_frozen_tied_ends():
    """LoRA on GPT-2: wte and head are one frozen tensor; the base has dropout 0 and stays in eval, adapters train."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        lm("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).save_pretrained(folder)
        base = tf.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=8, lora_alpha=64, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = peft.get_peft_model(base, config).eval()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids, losses = batches(1)[0], []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for _ in range(10):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    learnt(losses)
    return report


def concatenated_llama_pretraining():
    """Documents joined by EOS and cut at any place, positions run through, no mask; the cache is on by default."""
    torch.manual_seed(0)
    model = lm("llama", eos_token_id=2, use_cache=True)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    stream = torch.cat([b.flatten() for b in batches(12, rows=4, length=48)])
    stream[37::53] = 2
    blocks = stream[: len(stream) // 128 * 128].view(-1, 2, 64)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in blocks[:12]:
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def pad_is_eos_but_masked_by_attention():
    """pad_token = eos_token, labels masked by the attention mask: the real EOS is supervised, the pads are not."""
    torch.manual_seed(0)
    model = lm("llama", eos_token_id=2, pad_token_id=2)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for ids in batches(10):
            keep = torch.ones_like(ids)
            for row, end in enumerate((31, 24, 18, 12)):
                ids[row, end:] = 2
                keep[row, end + 1 :] = 0
            labels = torch.where(keep == 1, ids, -100)
            loss = model(input_ids=ids, attention_mask=keep, labels=labels).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def teacher_seen_through_its_top_eight():
    """KD from the teacher's eight likeliest tokens; soft targets computed beforehand in inference_mode and cloned."""
    torch.manual_seed(0)
    teacher = lm("gpt2").eval().requires_grad_(False)
    student = lm("qwen3", hidden=32, layers=1)
    data = batches(10)
    with torch.inference_mode():
        stored = [teacher(input_ids=ids).logits.topk(8, -1) for ids in data]
    stored = [(values.clone(), places.clone()) for values, places in stored]
    opt = torch.optim.AdamW(student.parameters(), lr=4e-3)
    losses = []
    with doctor.watch(student, optimizer=opt, steps=10, say=False) as report:
        for ids, (values, places) in zip(data, stored, strict=True):
            out = student(input_ids=ids, labels=ids)
            mine = out.logits.log_softmax(-1).gather(-1, places)
            kd = -(values.softmax(-1) * mine).sum(-1).mean()
            loss = 0.3 * kd + 0.7 * out.loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def head_first_then_everything():
    """LP-FT: for three steps only norm and head train, then all; the optimizer holds every parameter from the start."""
    torch.manual_seed(0)
    model = lm("llama", tie_word_embeddings=False)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    trunk = [*model.model.layers.parameters(), *model.model.embed_tokens.parameters()]
    for p in trunk:
        p.requires_grad_(False)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for step, ids in enumerate(batches(10)):
            if step == 3:
                for p in trunk:
                    p.requires_grad_(True)
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def evaluated_with_averaged_weights():
    """Every third step the moving average is swapped in for an evaluation, and the weights are put back."""
    torch.manual_seed(0)
    model = NanoGPT(dropout=0.1)
    opt = torch.optim.NAdam(model.parameters(), lr=3e-3)
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = []

    @contextlib.contextmanager
    def averaged():
        kept = {n: p.detach().clone() for n, p in model.named_parameters()}
        model.eval()
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(average[n])
            yield
            for n, p in model.named_parameters():
                p.copy_(kept[n])
        model.train()

    held_out = batches(1, length=33, seed=5)[0]
    with doctor.watch(model, optimizer=opt, steps=9, say=False) as report:
        for step, ids in enumerate(batches(9, length=33)):
            _, loss = model(ids[:, :-1], ids[:, 1:])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
            for n, p in model.named_parameters():
                average[n].lerp_(p.detach(), 0.1)
            if step % 3 == 2:
                with averaged():
                    model(held_out[:, :-1], held_out[:, 1:])
    learnt(losses)
    return report


def adafactor_sets_its_own_rate():
    """transformers' Adafactor with relative steps: the group's lr is None, the real rate lies in the optimizer."""
    torch.manual_seed(0)
    model = lm("qwen3")
    opt = tf.optimization.Adafactor(
        model.parameters(), lr=None, scale_parameter=True, relative_step=True, warmup_init=False
    )
    losses = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for ids in batches(10):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    learnt(losses, by=0.005)
    return report


def preflight_of_mixtral_adapters():
    """preflight(model, step) with LoRA on a Mixtral's attention, the router's auxiliary loss added, bf16 autocast."""
    torch.manual_seed(0)
    base = lm("mixtral", hidden=32, num_local_experts=4, output_router_logits=True)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=64, target_modules=QV))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids, losses = batches(1, rows=2)[0], []

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        return loss

    report = doctor.preflight(model, step, opt, steps=8, say=False)
    real(losses[-1] < losses[0], "it learns")
    return report


def trainer_with_flattened_rows():
    """The Trainer with DataCollatorWithFlattening: one long row, restarted positions, no mask, pads nowhere."""
    torch.manual_seed(0)
    model = lm("llama", attn_implementation="sdpa")
    rows = [dict(input_ids=row[: 12 + 3 * i % 17].tolist()) for ids in batches(10) for i, row in enumerate(ids)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = tf.TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=8, learning_rate=4e-3, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, logging_steps=1, lr_scheduler_type="cosine", warmup_steps=2,
        )  # fmt: skip
        callback = doctor.TrainerCallback(say=False)
        trainer = tf.Trainer(
            model, args, train_dataset=rows, data_collator=tf.DataCollatorWithFlattening(), callbacks=[callback]
        )
        with contextlib.redirect_stdout(None):
            trainer.train()
    learnt([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return callback.report


def optimizer_made_anew_halfway():
    """ReLoRA-like: after step 4 the optimizer is thrown away and a new one, with a new warm-up, goes on."""
    torch.manual_seed(0)
    model = lm("llama")
    losses = []
    with doctor.watch(model, steps=10, say=False) as report:
        for step, ids in enumerate(batches(10)):
            if step in (0, 4):
                opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
                schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=2)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            opt.step()
            schedule.step()
            opt.zero_grad()
            losses.append(loss.item())
    learnt(losses)
    return report


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(group["lr"] * m.lerp(p.grad, 1 - b1).sign())
                    m.lerp_(p.grad, 1 - b2)


def hand_written_lion_with_gradients_as_none_or_zero():
    """Lion by hand, every element moves by exactly lr; a wide loss scale of its own (sum over rows, mean over time)."""
    torch.manual_seed(0)
    model = NanoGPT()
    opt = Lion(model.parameters(), lr=2e-3, weight_decay=0.1)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for ids in batches(10, length=33):
            logits, _ = model(ids[:, :-1])
            per_token = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            loss = per_token.mean(1).mean()
            opt.zero_grad(set_to_none=False)
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def new_tokens_by_their_indices():
    """Tokens added before LoRA, trained by trainable_token_indices; the rest of the tied embedding is frozen."""
    torch.manual_seed(0)
    base = lm("llama", vocab=250)
    base.resize_token_embeddings(256)
    config = peft.LoraConfig(r=8, lora_alpha=64, target_modules=QV, trainable_token_indices=list(range(250, 256)))
    model = peft.get_peft_model(base, config)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    ids, losses = batches(1, vocab=250)[0], []
    ids[:, ::5] = torch.arange(250, 256).repeat(5)[: ids[:, ::5].shape[1]]
    with doctor.watch(model, optimizer=opt, steps=10, say=False, orig_vocab=250) as report:
        for _ in range(10):
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


class Gated(torch.nn.Module):
    """ReZero: x + alpha * block(x) with alpha = 0 at first, so what is inside gets a gradient of exactly 0."""

    def __init__(self, block):
        super().__init__()
        self.block, self.alpha = block, torch.nn.Parameter(torch.zeros(()))

    def forward(self, x, mask=None):
        return x + self.alpha * (self.block(x, mask) - x)


def rezero_gates_start_closed():
    """Every block sits behind a gate of exactly 0: at the first step only the gates and the embedding learn."""
    torch.manual_seed(0)
    model = NanoGPT()
    model.h = torch.nn.ModuleList(Gated(block) for block in model.h)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False, from_scratch=True) as report:
        for ids in batches(10, length=33):
            _, loss = model(ids[:, :-1], ids[:, 1:])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def head_of_zeros():
    """A speed-run start: the untied head is all zeros, the first loss exactly ln V, the trunk's first gradient 0."""
    torch.manual_seed(0)
    model = NanoGPT(tie=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False, from_scratch=True) as report:
        for ids in batches(10, length=33):
            _, loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    real(abs(losses[0] - math.log(256)) < 1e-4, "ln V exactly")
    learnt(losses)
    return report


def two_tokens_ahead_as_well():
    """Multi-token prediction: the usual loss, and a second head that predicts the token after the next, on purpose."""
    torch.manual_seed(0)
    model = lm("llama")
    second = torch.nn.Linear(64, 256, bias=False)
    opt = torch.optim.AdamW([*model.parameters(), *second.parameters()], lr=4e-3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for ids in batches(10):
            out = model(input_ids=ids, labels=ids, output_hidden_states=True)
            ahead = second(out.hidden_states[-1])[:, :-2]
            loss = out.loss + 0.3 * F.cross_entropy(ahead.flatten(0, 1), ids[:, 2:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def layers_left_out_by_chance():
    """Stochastic depth: each block is skipped with probability 0.4, also while its gradients of before are None."""
    torch.manual_seed(0)
    model = NanoGPT(layers=4)

    class Sometimes(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x, mask=None):
            return x if self.training and torch.rand(()) < 0.4 else self.block(x, mask)

    model.h = torch.nn.ModuleList(Sometimes(block) for block in model.h)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for ids in batches(10, length=33):
            _, loss = model(ids[:, :-1], ids[:, 1:])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def one_batch_learnt_by_heart():
    """The usual sanity check: the same batch again and again with a high rate and no regularisation, to a low loss."""
    torch.manual_seed(0)
    model = lm("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    ids, losses = batches(1, rows=2, length=16)[0], []
    with doctor.watch(model, optimizer=opt, steps=12, say=False) as report:
        for _ in range(12):
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses, by=0.3)
    return report


HEALTHY = [
    two_steps_at_rate_zero,
    top_one_of_sixteen_experts,
    frozen_reference_under_reentrant_checkpointing,
    bf16_gpt2_rounded_by_chance,
    scaler_that_starts_far_too_high,
    one_supervised_token_per_row,
    adapters_over_frozen_tied_ends,
    concatenated_llama_pretraining,
    pad_is_eos_but_masked_by_attention,
    teacher_seen_through_its_top_eight,
    head_first_then_everything,
    evaluated_with_averaged_weights,
    adafactor_sets_its_own_rate,
    preflight_of_mixtral_adapters,
    trainer_with_flattened_rows,
    optimizer_made_anew_halfway,
    hand_written_lion_with_gradients_as_none_or_zero,
    new_tokens_by_their_indices,
    rezero_gates_start_closed,
    head_of_zeros,
    two_tokens_ahead_as_well,
    layers_left_out_by_chance,
    one_batch_learnt_by_heart,
]
