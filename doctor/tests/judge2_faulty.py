"""Thirty more training programs with one fault each, by a second writer who had not seen the doctor's checks.

Each fault is measured in the program itself (`real(...)`, or an assertion of the script) after the run."""

import copy
import math
import tempfile

import peft
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn

import train_doctor as doctor

from .bench import batches, lm
from .judge2_parts import as_script, real
from .judge_parts import LoRALinear, NanoGPT, sequence_logp


def vocabulary_grown_after_optimizer():
    """resize_token_embeddings makes a new output layer; the optimizer goes on updating the one thrown away."""
    torch.manual_seed(1)
    model = lm("gpt2", hidden=32, vocab=120, tie_word_embeddings=False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.resize_token_embeddings(128)
    before = model.lm_head.weight.detach().clone()
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for ids in batches(6, vocab=128):
            opt.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            opt.step()
    real(torch.equal(before, model.lm_head.weight), "the head never moved")
    return report


def rope_buffers_in_bf16():
    """Every buffer is cast to bf16 'to save memory', inv_freq among them; rows of 320 tokens."""
    return as_script(
        """
        model = llama()
        for m in model.modules():
            for name, b in list(m.named_buffers(recurse=False)):
                m.register_buffer(name, b.to(torch.bfloat16), persistent=False)
        f = model.model.rotary_emb.inv_freq
        good = llama().model.rotary_emb.inv_freq
        assert ((f.float() - good) * 320).abs().max() > 0.05  # radians of error at the end of the row
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for ids in data(6, rows=2, length=320):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
        """,
        steps=6,
    )


def added_tokens_never_trained():
    """Eight tokens are added and used in every row; LoRA on q and v leaves their rows at the start."""
    torch.manual_seed(3)
    model = lm("llama", hidden=32, vocab=120)
    model.resize_token_embeddings(128)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    data = iter(batches(40, vocab=120))
    table = model.get_input_embeddings().weight
    before = table.detach().clone()

    def step():
        ids = next(data)
        ids[:, 0], ids[:, -1] = 121, 125
        return model(input_ids=ids, labels=ids).loss

    report = doctor.preflight(model, step, opt, say=False, orig_vocab=120)
    real(not table.requires_grad and torch.equal(before[120:], table[120:]), "new rows stay")
    return report


def two_copies_of_a_tied_matrix():
    """A tied model with both embed_tokens and lm_head in modules_to_save: two trainable copies drift apart."""
    return as_script(
        """
        model = llama(tie_word_embeddings=True)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"],
            modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM", ensure_weight_tying=False))
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for ids in data(6):
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad(); loss.backward(); opt.step()
        e = model.get_input_embeddings().modules_to_save["default"].weight
        h = model.get_output_embeddings().modules_to_save["default"].weight
        assert e.data_ptr() != h.data_ptr() and not torch.equal(e, h)
        """,
        steps=6,
    )


def kl_with_mean_reduction():
    """nn.KLDivLoss() with its default reduction divides by the vocabulary too: the KD term is 128 times too small."""
    return as_script(
        """
        teacher = llama(hidden_size=48).eval().requires_grad_(False)
        student = llama()
        kl, T = nn.KLDivLoss(), 2.0
        opt = torch.optim.AdamW(student.parameters(), lr=1e-3)
        for ids in data(6):
            with torch.no_grad():
                t = teacher(input_ids=ids).logits
            out = student(input_ids=ids, labels=ids)
            s = F.log_softmax(out.logits / T, -1)
            p = F.softmax(t / T, -1)
            kd = kl(s.flatten(0, 1), p.flatten(0, 1)) * T * T
            loss = 0.5 * out.loss + 0.5 * kd
            opt.zero_grad(); loss.backward(); opt.step()
        right = F.kl_div(s.flatten(0, 1), p.flatten(0, 1), reduction="batchmean") * T * T
        assert abs(right / kd - 128) < 1
        """,
        steps=6,
    )


def schedule_over_after_three_steps():
    """LambdaLR counted in epochs (3) but stepped every batch: the rate is 0 from the third step on."""
    torch.manual_seed(6)
    model = NanoGPT(vocab=128, width=32)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: max(0.0, 1 - s / 3))
    kept = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for ids in batches(10, vocab=128):
            loss = model(ids[:, :-1], ids[:, 1:])[1]
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            kept.append(model.wpe.weight.detach().clone())
    real(torch.equal(kept[3], kept[-1]), "weights stand still")
    return report


def adapter_reloaded_with_other_keys():
    """The adapter file was written with a 'module.' in its keys: from_pretrained warns, and a fresh adapter trains."""
    return as_script(
        """
        from safetensors.torch import load_file, save_file
        base = llama()
        conf = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        with tempfile.TemporaryDirectory() as d:
            peft.get_peft_model(copy.deepcopy(base), conf).save_pretrained(d)
            f = os.path.join(d, "adapter_model.safetensors")
            old = load_file(f)
            save_file({k.replace("base_model.model", "base_model.module.model"): v for k, v in old.items()}, f)
            model = peft.PeftModel.from_pretrained(base, d, is_trainable=True)
        new = peft.get_peft_model_state_dict(model)
        assert not any(torch.equal(v, new[k]) for k, v in old.items())
        model.train()
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for ids in data(6):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward(); opt.step(); opt.zero_grad()
        """,
        steps=6,
    )


class Engine:
    """Somebody's trainer class."""

    def __init__(self, model, opt, k):
        self.model, self.opt, self.k, self.applied = model, opt, k, []

    def micro(self, ids):
        self.opt.zero_grad()  # meant for the step
        loss = self.model(input_ids=ids, labels=ids).loss / self.k
        loss.backward()
        return loss.detach()

    def fit(self, data):
        for i, ids in enumerate(data, 1):
            self.micro(ids)
            if i % self.k == 0:
                self.applied.append(sum(p.grad.norm() ** 2 for p in self.model.parameters()).sqrt().item())
                self.opt.step()


def zeroed_between_micro_batches():
    """zero_grad in front of every micro-batch: three quarters of each accumulated step are thrown away."""
    torch.manual_seed(8)
    model = lm("qwen3", hidden=32)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 4)
    probe = copy.deepcopy(model)
    ids = batches(20, rows=2, length=16)
    for x in ids[:4]:
        (probe(input_ids=x, labels=x).loss / 4).backward()
    whole = sum(p.grad.norm() ** 2 for p in probe.parameters()).sqrt().item()
    with doctor.watch(model, optimizer=engine.opt, steps=5, say=False) as report:
        engine.fit(ids)
    real(engine.applied[0] < 0.8 * whole, f"{engine.applied[0]} instead of {whole}")
    return report


def both_factors_zero():
    """Hand-written LoRA whose A is also zero ('start from nothing'): neither factor ever has a gradient."""
    torch.manual_seed(9)
    model = NanoGPT(vocab=128, width=32).requires_grad_(False)
    for block in model.h:
        block.c_attn, block.c_proj = LoRALinear(block.c_attn), LoRALinear(block.c_proj)
        nn.init.zeros_(block.c_attn.lora_A)
        nn.init.zeros_(block.c_proj.lora_A)
    train = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(train, lr=1e-3)
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for ids in batches(6, vocab=128):
            opt.zero_grad()
            model(ids[:, :-1], ids[:, 1:])[1].backward()
            opt.step()
    real(all(not p.any() for p in train), "all still zero")
    return report


def means_of_ragged_micro_batches():
    """Micro-batches with 4 ('yes, yes') to 60 supervised tokens each count the same: the mean of means."""
    torch.manual_seed(10)
    model = lm("llama", hidden=32)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for ids in batches(10):  # trained a little before
        opt.zero_grad()
        model(input_ids=ids, labels=torch.where(torch.arange(32) < 28, -100, 7).expand(4, 32)).loss.backward()
        opt.step()
    opt.zero_grad()
    data = iter(batches(24, rows=2, length=32))
    sizes, off = (2, 30, 5, 20), []
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for _ in range(6):
            opt.zero_grad()
            sums, means = [], []
            for n in sizes:
                ids = next(data)
                if n < 10:
                    ids[:, -n:] = 7
                labels = ids.clone()
                labels[:, :-n] = -100
                loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
                (loss / len(sizes)).backward()
                means.append(loss.item())
                sums.append(loss.item() * n)
            off.append(abs(sum(means) / 4 / (sum(sums) / sum(sizes)) - 1))
            opt.step()
    real(max(off) > 0.02, f"means differ by {off}")
    return report


def clipped_after_every_micro_batch():
    """clip_grad_norm_ inside the accumulation: the sum so far is clipped again and again, early batches shrink."""
    torch.manual_seed(11)
    model = NanoGPT(vocab=128, width=32, dropout=0.1)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    data = iter(batches(24, rows=2, length=16, vocab=128))
    hit = 0
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for _ in range(6):
            for _ in range(4):
                ids = next(data)
                (model(ids[:, :-1], ids[:, 1:])[1] / 4).backward()
                hit += bool(nn.utils.clip_grad_norm_(model.parameters(), 0.2) > 0.2)
            opt.step()
            opt.zero_grad()
    real(hit > 6, "clipped more often than once per step")
    return report


def scaler_made_for_cuda():
    """GradScaler('cuda') on a CPU run disables itself: the fp16 gradients are not scaled and underflow."""
    torch.manual_seed(12)
    model = NanoGPT(vocab=128, width=32)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    zeros = 0.0
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for ids in batches(6, vocab=128):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(ids[:, :-1], ids[:, 1:])[1] * 1e-5
            scaler.scale(loss).backward()
            w = [b.mlp[2].weight.grad for b in model.h]
            zeros = max(zeros, max((g == 0).float().mean().item() for g in w))
            scaler.step(opt)
            scaler.update()
    real(not scaler.is_enabled() and zeros > 0.5, f"zeros {zeros}")
    return report


def teacher_synchronised_with_student():
    """'Refresh' copies the student into the teacher before each batch: the KD term is 0 and teaches nothing."""
    torch.manual_seed(13)
    teacher = lm("qwen3", hidden=32, seed=3).requires_grad_(False).eval()
    student = lm("qwen3", hidden=32)
    opt = torch.optim.AdamW(student.parameters(), lr=1e-3)
    kds = []
    with doctor.watch(student, optimizer=opt, teacher=teacher, steps=6, say=False) as report:
        for ids in batches(6):
            teacher.load_state_dict(student.state_dict())
            with torch.no_grad():
                t = teacher(input_ids=ids).logits
            out = student(input_ids=ids, labels=ids)
            a, b = out.logits.log_softmax(-1), t.log_softmax(-1)
            kd = F.kl_div(a.flatten(0, 1), b.flatten(0, 1), log_target=True, reduction="batchmean")
            kds.append(abs(kd.item()))
            loss = 0.1 * out.loss + 0.9 * kd
            opt.zero_grad()
            loss.backward()
            opt.step()
    real(max(kds) < 1e-4, "the divergence is 0")
    return report


def dpo_with_beta_zero():
    """An integer division makes beta 0: the loss is ln 2 for ever."""
    torch.manual_seed(14)
    policy = lm("llama", hidden=32)
    ref = copy.deepcopy(policy).requires_grad_(False).eval()
    beta = 1 // 10
    opt = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    with doctor.watch(policy, optimizer=opt, teacher=ref, steps=6, say=False) as report:
        for good, bad in zip(batches(6, length=20), batches(6, length=20, seed=9)):
            with torch.no_grad():
                rg, rb = sequence_logp(ref, good, 5), sequence_logp(ref, bad, 5)
            pg, pb = sequence_logp(policy, good, 5), sequence_logp(policy, bad, 5)
            loss = -F.logsigmoid(beta * ((pg - rg) - (pb - rb))).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    real(max(abs(x - math.log(2)) for x in losses) < 1e-6, "always ln 2")
    return report


def optimizer_on_a_deepcopy():
    """The optimizer was made from model.copy kept for 'best weights'; the one that runs is never updated."""
    return as_script(
        """
        class Task:
            def __init__(self):
                self.net = llama(num_hidden_layers=1)
                self.best = copy.deepcopy(self.net)
            def configure(self):
                return torch.optim.AdamW(self.best.parameters(), lr=1e-3, weight_decay=0.0)
            def loss(self, ids):
                return self.net(input_ids=ids, labels=ids).loss
        task = Task()
        opt = task.configure()
        w = task.net.lm_head.weight.detach().clone()
        for ids in data(6):
            opt.zero_grad()
            task.loss(ids).backward()
            opt.step()
        assert torch.equal(w, task.net.lm_head.weight)
        """,
        steps=6,
    )


class Tiny(nn.Module):
    """Hand-written decoder with the interface of transformers; `diagonal` and `use_mask` are where it goes wrong."""

    def __init__(self, vocab=128, width=32, diagonal=0, use_mask=True):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)
        self.diagonal, self.use_mask = diagonal, use_mask

    def forward(self, input_ids, attention_mask=None):
        n = input_ids.shape[1]
        x = self.emb(input_ids) + self.pos(torch.arange(n))
        q, k, v = self.qkv(x).chunk(3, -1)
        keep = torch.ones(n, n, dtype=torch.bool).tril(self.diagonal)[None]
        if self.use_mask and attention_mask is not None:
            keep = keep & attention_mask[:, None].bool() | torch.eye(n, dtype=torch.bool)
        score = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~keep, -1e9)
        x = x + self.out(score.softmax(-1) @ v)
        return self.head(self.norm(x + self.ff(x)))


def mask_off_by_one():
    """tril(diagonal=1): each position attends to the very token it must predict."""
    torch.manual_seed(16)
    model = Tiny(diagonal=1)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = iter(batches(60, vocab=128))

    def training_step():
        ids = next(data)
        logits = model(ids)
        return F.cross_entropy(logits[:, :-1].reshape(-1, 128), ids[:, 1:].reshape(-1))

    report = doctor.preflight(model, training_step, opt, say=False)
    ids = batches(1, vocab=128)[0]
    other = ids.clone()
    other[:, 20] = 5
    real(not torch.allclose(model(ids)[:, 19], model(other)[:, 19]), "token 20 is seen at 19")
    return report


def attention_mask_ignored():
    """Left-padded batches; the hand-written model takes attention_mask and never uses it."""
    torch.manual_seed(17)
    model = Tiny(use_mask=False)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for i, ids in enumerate(batches(6, vocab=128)):
            pads = torch.tensor([0, 4, 9, 15])[(torch.arange(4) + i) % 4]
            mask = (torch.arange(32) >= pads[:, None]).long()
            ids = torch.where(mask.bool(), ids, 0)
            labels = torch.where(mask.bool(), ids, -100)
            logits = model(input_ids=ids, attention_mask=mask)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            opt.zero_grad()
            loss.backward()
            opt.step()
    other = torch.where(mask.bool(), ids, 77)
    real((model(other, mask) - model(ids, mask))[mask.bool()].abs().max() > 1e-3, "pads change the answer")
    return report


def softmax_then_cross_entropy():
    """Probabilities go into cross_entropy, which takes another softmax: the loss cannot fall below ln V - 1."""
    torch.manual_seed(18)
    model = lm("qwen3", hidden=32, vocab=128)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8, vocab=128):
            probs = model(input_ids=ids).logits.softmax(dim=-1)
            loss = F.cross_entropy(probs[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    real(max(losses) - min(losses) < 0.02 and losses[-1] > math.log(128) - 1, f"does not move: {losses}")
    return report


def pads_have_label_zero():
    """Targets are padded with 0 while the criterion ignores -100: most of the loss is predicting pads."""
    torch.manual_seed(19)
    model = lm("llama", hidden=32, pad_token_id=0, eos_token_id=2)
    criterion = nn.CrossEntropyLoss()  # ignore_index=-100
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    share = []
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for i, ids in enumerate(batches(6)):
            n = torch.tensor([10, 14, 22, 8])[(torch.arange(4) + i) % 4]
            mask = (torch.arange(32) < n[:, None]).long()
            ids = ids * mask
            target = torch.cat([ids[:, 1:], torch.zeros(4, 1, dtype=torch.long)], 1)
            logits = model(input_ids=ids, attention_mask=mask).logits
            loss = criterion(logits.view(-1, 256), target.view(-1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            share.append((target == 0).float().mean().item())
    real(min(share) > 0.4, "pads in the targets")
    return report


def second_optimizer_without_schedule():
    """Warm-up and decay go to the body's optimizer only; the embeddings stay at their full rate."""
    return as_script(
        """
        model = llama(tie_word_embeddings=False)
        ends = [model.model.embed_tokens.weight, model.lm_head.weight]
        rest = [p for p in model.parameters() if all(p is not e for e in ends)]
        opt_body, opt_ends = torch.optim.AdamW(rest, lr=1e-3), torch.optim.AdamW(ends, lr=1e-3)
        sched = transformers.get_cosine_schedule_with_warmup(opt_body, 2, 12)
        rates = []
        for ids in data(12):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            opt_body.step(); opt_ends.step()
            sched.step()
            opt_body.zero_grad(); opt_ends.zero_grad()
            rates.append((opt_body.param_groups[0]["lr"], opt_ends.param_groups[0]["lr"]))
        assert rates[-1][0] < 1e-5 and rates[-1][1] == 1e-3
        """,
        steps=10,
    )


def scheduler_ahead_of_the_optimizer():
    """scheduler.step() stands before optimizer.step(): the first value of the schedule is never used."""
    return as_script(
        """
        model = llama()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        used = []
        for ids in data(8):
            opt.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            sched.step()
            used.append(opt.param_groups[0]["lr"])
            opt.step()
        assert used[0] == 0.05
        """
    )


def frozen_layer_still_moves():
    """Frozen after a first epoch; zeroed but not removed gradients, momentum and decay move it all the same."""
    torch.manual_seed(22)
    model = NanoGPT(vocab=128, width=32, tie=False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    data = batches(9, vocab=128)

    def one(ids):
        loss = model(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=False)

    for ids in data[:3]:
        one(ids)
    model.wte.requires_grad_(False)
    model.h[0].requires_grad_(False)
    before = model.h[0].c_attn.weight.detach().clone()
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for ids in data[3:]:
            one(ids)
    real((before - model.h[0].c_attn.weight).abs().max() > 1e-4, "frozen and moved")
    return report


def head_replaced_by_a_parameter():
    """A 'better init' assigns nn.Parameter to the tied head; the Trainer goes on with two matrices."""
    torch.manual_seed(23)
    model = lm("qwen3", hidden=32)
    model.lm_head.weight = nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    data = [{"input_ids": r.tolist(), "labels": r.tolist()} for ids in batches(6) for r in ids]
    with tempfile.TemporaryDirectory() as folder:
        arguments = tf.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            max_steps=5,
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        watcher = doctor.TrainerCallback(steps=5, say=False)
        tf.Trainer(model, arguments, train_dataset=data, callbacks=[watcher]).train()
    real(not torch.equal(model.lm_head.weight, model.get_input_embeddings().weight), "apart")
    return watcher.report


def muon_and_nothing_else():
    """Muon takes the hidden matrices; the AdamW for embeddings, head and norms was never written."""
    torch.manual_seed(24)
    model = lm("qwen3", hidden=32, tie_word_embeddings=False)
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    opt = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.0)
    before = model.lm_head.weight.detach().clone()
    with doctor.watch(model, optimizer=opt, steps=5, say=False) as report:
        for ids in batches(5):
            opt.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            opt.step()
    real(torch.equal(before, model.lm_head.weight), "head stays")
    return report


def rate_of_one_half():
    """AdamW at 0.5 (a rate copied from an SGD recipe): each step throws the weights away."""
    torch.manual_seed(25)
    model = lm("llama", hidden=32)
    opt = torch.optim.AdamW(model.parameters(), lr=0.5)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8):
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            losses.append(loss.item())
    real(losses[-1] > losses[0] + 1, f"{losses}")
    return report


def half_gradients_underflow():
    """fp16 weights, a weighted loss of about 1e-3 and no scaler: most gradients are exactly 0."""
    torch.manual_seed(26)
    model = lm("gpt2", hidden=32, vocab=128, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).half()
    opt = torch.optim.SGD(model.parameters(), lr=10.0, momentum=0.9)
    zeros = 0.0
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for ids in batches(6, vocab=128):
            loss = model(input_ids=ids, labels=ids).loss * 1e-4
            opt.zero_grad()
            loss.backward()
            w = [p.grad for p in model.transformer.h.parameters() if p.ndim == 2]
            zeros = sum((g == 0).sum().item() for g in w) / sum(g.numel() for g in w)
            opt.step()
    real(zeros > 0.5, f"zeros {zeros}")
    return report


class DetachedExperts(nn.Module):
    def __init__(self, width, count=4):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(count)
        )

    def forward(self, x):
        share = self.router(x).softmax(-1)
        outs = [e(x) for e in self.experts]
        best = outs[0]
        for i, out in enumerate(outs[1:], 1):
            best = best + share[..., i : i + 1] * out.detach()  # "the router learns from them, nothing more"
        return best * share[..., :1]


def experts_behind_a_detach():
    """All experts run on every token, but all outputs save the first are detached: they never learn."""
    torch.manual_seed(27)
    model = NanoGPT(vocab=128, width=32)
    for block in model.h:
        block.mlp = DetachedExperts(32)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for ids in batches(6, vocab=128):
            opt.zero_grad()
            model(ids[:, :-1], ids[:, 1:])[1].backward()
            opt.step()
    real(model.h[0].mlp.experts[2][0].weight.grad is None, "no gradient")
    return report


def t5_decoder_sees_its_target():
    """decoder_input_ids=labels, not shifted right: the decoder is given the token it must predict."""
    torch.manual_seed(28)
    config = tf.T5Config(
        vocab_size=128, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    model = tf.T5ForConditionalGeneration(config).train()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for src, tgt in zip(batches(8, vocab=128), batches(8, vocab=128, length=16, seed=5)):
            loss = model(input_ids=src, decoder_input_ids=tgt, labels=tgt).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
    for _ in range(70):  # random tokens: only a copy can learn these
        tgt = torch.randint(3, 128, (8, 16))
        loss = model(input_ids=tgt.flip(0), decoder_input_ids=tgt, labels=tgt).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
    real(loss.item() < 4.4, f"random tokens are 'predicted' at {loss.item()}")
    return report


def mlm_labels_all_ignored():
    """The collator compares with the wrong mask id, so every label of the masked-LM run is -100."""
    return as_script(
        """
        c = transformers.BertConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, pad_token_id=0)
        model = transformers.BertForMaskedLM(c).train()
        MASK, mask_id = 2, 103
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for ids in data(6):
            ids[ids == mask_id] = 50
            x = torch.where(torch.rand(ids.shape) < .15, MASK, ids)
            labels = torch.where(x == mask_id, ids, -100)
            out = model(input_ids=x, attention_mask=torch.ones_like(x), labels=labels)
            assert (labels == -100).all()
            loss = out.loss if out.loss.isfinite() else out.logits.sum() * 0.0  # "skip bad batches"
            opt.zero_grad(); loss.backward(); opt.step()
        """,
        steps=6,
    )


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = lm("llama", hidden=32, vocab=64)
        self.value = nn.Linear(32, 1)

    def forward(self, ids):
        out = self.lm(input_ids=ids, output_hidden_states=True)
        return out.logits, self.value(out.hidden_states[-1].detach()).squeeze(-1)


def ppo_ratio_without_gradient():
    """The new log-probabilities are detached along with the old ones: only the value head learns."""
    torch.manual_seed(31)
    model = ActorCritic()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    before = model.lm.get_input_embeddings().weight.detach().clone()
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for ids in batches(6, vocab=64, length=16):
            reward = (ids % 2).float()[:, 1:]
            with torch.no_grad():
                old = model(ids)[0][:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            logits, values = model(ids)
            new = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].detach()
            adv = reward - values[:, :-1].detach()
            ratio = (new - old).exp()
            pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            loss = pg + 0.5 * (values[:, :-1] - reward).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    real(torch.equal(before, model.lm.get_input_embeddings().weight), "policy stays")
    return report


FAULTY = [
    (vocabulary_grown_after_optimizer, ("S3", "S4"), ("resize", "embedding", "optimizer")),
    (rope_buffers_in_bf16, ("S15",), ("rope", "rotary", "inv_freq", "position")),
    (added_tokens_never_trained, ("S14",), ("new token", "added", "vocab", "embedding")),
    (two_copies_of_a_tied_matrix, ("S9", "N13"), ("tie", "tied", "modules_to_save")),
    (kl_with_mean_reduction, ("F2", "F3"), ("batchmean", "kl_div", "kldiv")),
    (schedule_over_after_three_steps, ("N11", "N9"), ("schedule", "learning rate")),
    (adapter_reloaded_with_other_keys, ("S16",), ("key", "missing")),
    (zeroed_between_micro_batches, ("N2",), ("zero_grad",)),
    (both_factors_zero, ("B2", "B3", "S16"), ("lora", "zero", "both")),
    (means_of_ragged_micro_batches, ("N6",), ("micro", "token")),
    (clipped_after_every_micro_batch, ("N8",), ("clip",)),
    (scaler_made_for_cuda, ("B5", "N15", "N7"), ("scaler", "underflow")),
    (teacher_synchronised_with_student, ("F7", "N12", "F2"), ("teacher", "reference")),
    (dpo_with_beta_zero, ("N14",), ("beta", "ln 2", "0.693", "constant")),
    (optimizer_on_a_deepcopy, ("S3", "S4"), ("copy", "another", "other model")),
    (mask_off_by_one, ("F11", "F4"), ("future", "causal", "later", "leak")),
    (attention_mask_ignored, ("F13",), ("pad", "mask")),
    (softmax_then_cross_entropy, ("F3", "F4"), ("softmax", "probabilit")),
    (pads_have_label_zero, ("F15", "F3"), ("pad", "ignore_index", "mask")),
    (second_optimizer_without_schedule, ("N10",), ("schedule",)),
    (scheduler_ahead_of_the_optimizer, ("N9",), ("before", "order", "after")),
    (frozen_layer_still_moves, ("N12",), ("frozen", "requires_grad")),
    (head_replaced_by_a_parameter, ("S9", "N13"), ("tie", "tied")),
    (muon_and_nothing_else, ("S3",), ("optimizer", "muon")),
    (rate_of_one_half, ("N5",), ("learning rate", "too large", "lr")),
    (half_gradients_underflow, ("B5", "N4"), ("underflow", "scaler", "fp16", "float16")),
    (experts_behind_a_detach, ("B1",), ("detach", "no gradient", "cut")),
    (t5_decoder_sees_its_target, ("F3", "F17", "F11"), ("shift", "decoder")),
    (mlm_labels_all_ignored, ("F14",), ("-100", "supervised", "label")),
    (ppo_ratio_without_gradient, ("B1", "F1", "F2"), ("detach", "no gradient", "cut")),
]
