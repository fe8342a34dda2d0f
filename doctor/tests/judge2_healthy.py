"""Twenty more healthy training programs that look odd, by a second writer who had not seen the doctor's checks.

Each one must learn: `learnt(...)`, or an assertion of the script, looks at its own losses after the run."""

import copy
import math
import tempfile

import peft
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from torch.utils.checkpoint import checkpoint

import train_doctor as doctor

from .bench import batches, lm
from .judge2_parts import as_script, learnt
from .judge_parts import LoRALinear, NanoGPT, sequence_logp


def blobs_with_one_cycle():
    """A plain MLP on numbers, OneCycleLR per batch, weighted cross-entropy; no language anywhere."""
    return as_script(
        """
        net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        centres = torch.randn(4, 10) * 2
        opt = torch.optim.Adam(net.parameters(), lr=1e-3)
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=60)
        crit = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0]))
        losses = []
        for _ in range(60):
            y = torch.randint(0, 4, (32,))
            x = centres[y] + torch.randn(32, 10)
            opt.zero_grad()
            loss = crit(net(x), y)
            loss.backward(); opt.step(); sched.step()
            losses.append(loss.item())
        assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
        """
    )


def images_with_warm_restarts():
    """A small ConvNet with BatchNorm, SGD with Nesterov, label smoothing, CosineAnnealingWarmRestarts."""
    torch.manual_seed(202)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=5, T_mult=2)
    losses = []
    with doctor.watch(net, optimizer=opt, steps=10, say=False) as report:
        for _ in range(40):
            y = torch.randint(0, 3, (24,))
            x = torch.randn(24, 1, 8, 8) * 0.3
            for i, c in enumerate(y.tolist()):
                x[i, 0, :, c * 2 : c * 2 + 2] += 1
            loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def t5_with_sequential_schedule():
    """A small T5 with labels only (it shifts them itself), pads at -100, warm-up then cosine."""
    torch.manual_seed(203)
    config = tf.T5Config(
        vocab_size=128, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.1,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = tf.T5ForConditionalGeneration(config).train()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=3)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, rest], [3])
    losses = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(24, vocab=128, length=12):
            n = torch.tensor([12, 9, 11, 7])
            mask = (torch.arange(12) < n[:, None]).long()
            src = ids * mask
            src[torch.arange(4), n - 1] = 1
            labels = torch.where(mask.bool(), src, -100)
            loss = model(input_ids=src, attention_mask=mask, labels=labels).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
            losses.append(loss.item())
    learnt(losses)
    return report


def bert_masked_language_model():
    """15 % masked: labels are at the position itself, not shifted, and 85 % are -100."""
    return as_script(
        """
        c = transformers.BertConfig(vocab_size=128, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=96, pad_token_id=0)
        model = transformers.BertForMaskedLM(c).train()
        opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
        sched = transformers.get_linear_schedule_with_warmup(opt, 3, 60)
        losses = []
        for ids in data(40, rows=8):
            masked = torch.rand(ids.shape) < .15
            x, labels = ids.masked_fill(masked, 2), ids.masked_fill(~masked, -100)
            loss = model(input_ids=x, attention_mask=torch.ones_like(x), labels=labels).loss
            opt.zero_grad(); loss.backward(); opt.step(); sched.step()
            losses.append(loss.item())
        assert sum(losses[-8:]) < 0.98 * sum(losses[:8])
        """
    )


def grpo_with_value_head():
    """Sampling under no_grad in eval mode, one inner step (ratio exactly 1, loss near 0), a value head beside it."""
    torch.manual_seed(205)
    model = nn.ModuleDict({"lm": lm("gpt2", hidden=32, vocab=64), "v": nn.Linear(32, 1)})
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rewards = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(16, rows=1, length=4, vocab=64):
            model.eval()
            with torch.no_grad():
                seq = ids.repeat(16, 1)
                for _ in range(6):
                    p = model["lm"](input_ids=seq).logits[:, -1].softmax(-1)
                    seq = torch.cat([seq, torch.multinomial(p, 1)], 1)
            reward = (seq[:, 4:] < 32).float().mean(-1)
            model.train()
            out = model["lm"](input_ids=seq, output_hidden_states=True)
            logp = out.logits[:, 3:-1].log_softmax(-1).gather(-1, seq[:, 4:, None])[..., 0]
            value = model["v"](out.hidden_states[-1][:, 3]).squeeze(-1)
            adv = (reward - reward.mean()) / (reward.std() + 1e-4)
            ratio = (logp - logp.detach()).exp()
            loss = -(ratio * adv[:, None]).mean() + 0.1 * F.mse_loss(value, reward)
            opt.zero_grad()
            loss.backward()
            opt.step()
            rewards.append(-reward.mean().item())
    learnt(rewards)
    return report


def dpo_from_a_deepcopy():
    """The first loss is exactly ln 2; reference is a frozen copy; chosen and rejected in one batch; rmsprop."""
    torch.manual_seed(206)
    policy = lm("qwen3", hidden=32)
    ref = copy.deepcopy(policy).eval().requires_grad_(False)
    opt = torch.optim.RMSprop(policy.parameters(), lr=3e-4)
    losses = []
    pairs = list(zip(batches(3, rows=4, length=20), batches(3, rows=4, length=20, seed=7))) * 4
    with doctor.watch(policy, optimizer=opt, teacher=ref, steps=8, say=False) as report:
        for good, bad in pairs:
            both = torch.cat([good, bad])
            with torch.no_grad():
                r = sequence_logp(ref, both, 5)
            m = 0.1 * (sequence_logp(policy, both, 5) - r)
            loss = -F.logsigmoid(m[:4] - m[4:]).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert abs(losses[0] - math.log(2)) < 1e-4
    learnt(losses)
    return report


def two_adapters_one_in_use():
    """A finished adapter 'old' lies beside the active 'new'; only the latter is trained and in the optimizer."""
    torch.manual_seed(207)
    conf = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    base = lm("llama", hidden=32)
    first = torch.optim.AdamW(base.parameters(), lr=1e-2)
    for ids in batches(40):  # a base that was pretrained
        base(input_ids=ids, labels=ids).loss.backward()
        first.step()
        first.zero_grad()
    model = peft.get_peft_model(base, conf, adapter_name="old")
    model.add_adapter("new", conf)
    model.set_adapter("new")
    model.train()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(24, seed=4):
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def dora_in_the_trainer():
    """DoRA with rsLoRA and a trained head under the Trainer, checkpointing and accumulation with a leftover batch."""
    torch.manual_seed(208)
    conf = peft.LoraConfig(
        r=4,
        use_dora=True,
        use_rslora=True,
        target_modules="all-linear",
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(lm("llama", hidden=32, tie_word_embeddings=False), conf)
    data = [{"input_ids": r.tolist(), "labels": r.tolist()} for ids in batches(7, length=24) for r in ids]
    with tempfile.TemporaryDirectory() as folder:
        arguments = tf.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=2e-2,
            lr_scheduler_type="constant",
            gradient_checkpointing=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=True,
        )
        watcher = doctor.TrainerCallback(steps=6, say=False)
        trainer = tf.Trainer(model, arguments, train_dataset=data, callbacks=[watcher])
        trainer.remove_callback(tf.PrinterCallback)
        trainer.train()
    learnt([x["loss"] for x in trainer.state.log_history if "loss" in x])
    return watcher.report


def prompt_tuning_at_a_high_rate():
    """Eight virtual tokens at lr 0.3: a handful of parameters, the logits longer than the input, an enormous rate."""
    torch.manual_seed(209)
    conf = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8, token_dim=48)
    base = lm("gpt2", hidden=48, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    first = torch.optim.AdamW(base.parameters(), lr=5e-3)

    def pair(group):
        return torch.stack([torch.full_like(group, 2), 20 + 8 * group + torch.randint(0, 8, group.shape)], 1)

    for _ in range(80):  # a base that answers by the group named eight times before
        group = torch.randint(0, 8, (32,))
        ids = torch.cat([group[:, None].expand(-1, 8) + 5, pair(group)], 1)
        base(input_ids=ids, labels=ids).loss.backward()
        first.step()
        first.zero_grad()
    model = peft.get_peft_model(base, conf)
    model.train()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for _ in range(40):
            ids = pair(torch.full((40,), 3))
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    learnt(losses, by=0.01)
    return report


def mean_teacher():
    """A teacher that is the moving average of the student: frozen, in eval mode, and changed after every step."""
    torch.manual_seed(210)
    student = NanoGPT(vocab=128, width=32, dropout=0.1)
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    opt = torch.optim.AdamW(student.parameters(), lr=3e-3)
    losses = []
    with doctor.watch(student, optimizer=opt, teacher=teacher, steps=8, say=False) as report:
        for ids in batches(20, vocab=128):
            x, y = ids[:, :-1], ids[:, 1:]
            with torch.no_grad():
                soft, _ = teacher(x)
            logits, ce = student(x, y)
            loss = ce + 0.3 * F.mse_loss(logits.softmax(-1), soft.softmax(-1))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            with torch.no_grad():
                for a, b in zip(teacher.parameters(), student.parameters()):
                    a.mul_(0.95).add_(b, alpha=0.05)
            losses.append(ce.item())
    learnt(losses)
    return report


def layerwise_rates_and_a_leftover():
    """One group per layer, rates from 0 (the embeddings) up; ten micro-batches by four, the last two by two."""
    torch.manual_seed(211)
    model = lm("llama", hidden=32, layers=3, tie_word_embeddings=False)
    groups = [{"params": model.model.embed_tokens.parameters(), "lr": 0.0}]
    groups += [
        {"params": layer.parameters(), "lr": 5e-3 * 0.5 ** (2 - i)} for i, layer in enumerate(model.model.layers)
    ]
    groups += [{"params": [*model.lm_head.parameters(), *model.model.norm.parameters()], "lr": 5e-3}]
    opt = torch.optim.AdamW(groups)
    data, losses = batches(10, rows=2), []
    with doctor.watch(model, optimizer=opt, steps=9, say=False) as report:
        for _ in range(4):
            for start in range(0, 10, 4):
                chunk = data[start : start + 4]
                for ids in chunk:
                    loss = model(input_ids=ids, labels=ids).loss
                    (loss / len(chunk)).backward()
                    losses.append(loss.item())
                opt.step()
                opt.zero_grad()
    learnt(losses)
    return report


def lbfgs_with_closure():
    """Several forward and backward passes inside one step, from the optimizer's closure."""
    return as_script(
        """
        x = torch.randn(64, 5); y = (x @ torch.randn(5, 1) + 0.1 * torch.randn(64, 1))
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
        losses = []
        def closure():
            opt.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            losses.append(loss.item())
            return loss
        for _ in range(10):
            opt.step(closure)
        assert losses[-1] < 0.2 * losses[0]
        """
    )


def sharpness_aware():
    """SAM: weights are perturbed, a second backward is made there, and they are put back before the step."""
    torch.manual_seed(213)
    model = lm("gpt2", hidden=32, vocab=128, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(15, vocab=128):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                shift = [0.05 * p.grad / norm for p in model.parameters()]
                for p, e in zip(model.parameters(), shift):
                    p.add_(e)
            opt.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            with torch.no_grad():
                for p, e in zip(model.parameters(), shift):
                    p.sub_(e)
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    learnt(losses)
    return report


def small_gan():
    """Two optimizers in turn; the generator's loss also leaves gradients in the discriminator, zeroed later."""
    torch.manual_seed(214)
    gen = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    disc = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=5e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(disc.parameters(), lr=5e-3, betas=(0.5, 0.9))
    bce, off = nn.BCEWithLogitsLoss(), []
    with doctor.watch(steps=10, say=False) as report:
        for _ in range(150):
            true = torch.randn(64, 2) * 0.2 + torch.tensor([2.0, -1.0])
            fake = gen(torch.randn(64, 4))
            opt_d.zero_grad()
            d = bce(disc(true), torch.ones(64, 1)) + bce(disc(fake.detach()), torch.zeros(64, 1))
            d.backward()
            opt_d.step()
            opt_g.zero_grad()
            g = bce(disc(fake), torch.ones(64, 1))
            g.backward()
            opt_g.step()
            off.append((fake.mean(0) - torch.tensor([2.0, -1.0])).norm().item())
    learnt(off)
    return report


class ReentrantGPT(NanoGPT):
    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        x.requires_grad_()
        for i, block in enumerate(self.h):
            x = checkpoint(block, x, use_reentrant=bool(i % 2))
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def checkpointing_of_both_kinds_in_bf16():
    """Frozen embeddings whose output is made differentiable; reentrant and not; bf16 autocast; hand-written LoRA."""
    torch.manual_seed(215)
    model = ReentrantGPT(vocab=128, width=32, tie=False)
    model.requires_grad_(False)
    for block in model.h:
        block.c_attn = LoRALinear(block.c_attn)
    model.lm_head.requires_grad_(True)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(20, vocab=128):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def bf16_weights_with_fp32_master():
    """The optimizer holds fp32 copies that are in no model; gradients go over by hand and the weights come back."""
    torch.manual_seed(216)
    model = lm("llama", hidden=32).bfloat16()
    params = list(model.parameters())
    master = [p.detach().float().clone().requires_grad_() for p in params]
    opt = torch.optim.AdamW(master, lr=2e-3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for ids in batches(20):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            for m, p in zip(master, params):
                m.grad, p.grad = p.grad.float(), None
            nn.utils.clip_grad_norm_(master, 1.0)
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                for m, p in zip(master, params):
                    p.copy_(m)
            losses.append(loss.item())
    learnt(losses)
    return report


def smoothing_z_loss_and_focal():
    """Label smoothing, a z-loss on the logits and a focal factor: no plain cross-entropy fits this loss."""
    torch.manual_seed(217)
    model = lm("qwen3", hidden=32, vocab=128)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data, losses = iter(batches(80, vocab=128)), []

    def step():
        ids = next(data)
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        y = ids[:, 1:].flatten()
        ce = F.cross_entropy(logits, y, reduction="none", label_smoothing=0.1)
        p = logits.softmax(-1).gather(1, y[:, None])[:, 0]
        loss = ((1 - p) ** 2 * ce).mean() + 1e-3 * logits.logsumexp(-1).square().mean()
        losses.append(loss.item())
        return loss

    report = doctor.preflight(model, step, opt, say=False)
    losses.clear()
    for _ in range(20):
        loss = step()
        opt.zero_grad()
        loss.backward()
        opt.step()
    learnt(losses)
    return report


class AlibiWindow(nn.Module):
    """Sliding window, ALiBi, and documents kept apart by a block-diagonal mask."""

    def __init__(self, vocab=128, width=32, heads=2, window=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.n1, self.n2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)
        self.heads, self.window = heads, window

    def forward(self, input_ids, documents):
        n = input_ids.shape[1]
        x = self.emb(input_ids)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        far = torch.arange(n)[:, None] - torch.arange(n)
        keep = (far >= 0) & (far < self.window) & (documents[:, :, None] == documents[:, None])
        bias = -far.clamp(min=0) * torch.tensor([0.5, 0.125])[:, None, None]
        bias = bias[None].masked_fill(~keep[:, None], float("-inf"))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
        x = x + self.down(F.silu(self.up(self.n2(x))))
        return F.linear(x, self.emb.weight)


def packed_with_block_diagonal_mask():
    """Hand-written windowed ALiBi attention; no position ids at all; the first token of a document is not a target."""
    torch.manual_seed(218)
    model = AlibiWindow()
    nn.init.normal_(model.emb.weight, std=0.1)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    losses = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for i, ids in enumerate(batches(24, vocab=128)):
            cut = 10 + i % 8
            docs = (torch.arange(32) >= cut).long().expand(4, 32)
            labels = ids.clone()
            labels[:, cut] = -100
            logits = model(ids, docs)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


def recurrent_with_carried_state():
    """A GRU language model, truncated backpropagation: the hidden state goes on detached, targets come shifted."""
    return as_script(
        """
        class RNN(nn.Module):
            def __init__(self):
                super().__init__()
                self.e, self.g, self.o = nn.Embedding(128, 32), nn.GRU(32, 48, batch_first=True), nn.Linear(48, 128)
            def forward(self, x, h):
                y, h = self.g(self.e(x), h)
                return self.o(y), h
        net = RNN(); opt = torch.optim.Adam(net.parameters(), lr=1e-2); h = None
        stream = torch.cat([b.flatten() for b in data(40)]).view(4, -1)
        losses = []
        for i in range(0, 30 * 16, 16):
            x, y = stream[:, i:i + 16], stream[:, i + 1:i + 17]
            logits, h = net(x, None if h is None else h.detach())
            loss = F.cross_entropy(logits.transpose(1, 2), y)
            opt.zero_grad(); loss.backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.5)
            opt.step()
            losses.append(loss.item())
        assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
        """
    )


def contrastive_two_towers():
    """CLIP-like: two encoders, learnable temperature, soft labels by position; one tower's body frozen."""
    torch.manual_seed(220)
    one = tf.BertModel(
        tf.BertConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    )
    model = nn.ModuleDict({"text": one, "image": nn.Linear(20, 32), "p": nn.Linear(32, 32)})
    model.scale = nn.Parameter(torch.tensor(2.0))
    model["text"].encoder.requires_grad_(False)
    model["text"].pooler = None
    model.train()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    table, losses = torch.randn(128, 20), []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(40, rows=8, length=6, vocab=128):
            ids[:] = ids[:, :1] % 16 + 3
            image = table[ids[:, 0]] + 0.1 * torch.randn(8, 20)
            a = F.normalize(model["p"](model["text"](input_ids=ids).last_hidden_state.mean(1)), dim=-1)
            b = F.normalize(model["image"](image), dim=-1)
            same = (ids[:, :1] == ids[:, 0]).float()
            logits = a @ b.T * model.scale.exp()
            target = same / same.sum(1, keepdim=True)
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    learnt(losses)
    return report


HEALTHY = [
    blobs_with_one_cycle,
    images_with_warm_restarts,
    t5_with_sequential_schedule,
    bert_masked_language_model,
    grpo_with_value_head,
    dpo_from_a_deepcopy,
    two_adapters_one_in_use,
    dora_in_the_trainer,
    prompt_tuning_at_a_high_rate,
    mean_teacher,
    layerwise_rates_and_a_leftover,
    lbfgs_with_closure,
    sharpness_aware,
    small_gan,
    checkpointing_of_both_kinds_in_bf16,
    bf16_weights_with_fp32_master,
    smoothing_z_loss_and_focal,
    packed_with_block_diagonal_mask,
    recurrent_with_carried_state,
    contrastive_two_towers,
]
