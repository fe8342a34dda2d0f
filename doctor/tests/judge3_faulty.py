"""Training programs with one fault each, by a third writer who had not seen the doctor's checks.

Each fault is measured in the program itself (`real(...)`) after, or before, the run."""

import contextlib
import copy
import math
import tempfile
from pathlib import Path

import peft
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as tf
from torch import nn

import train_doctor as doctor

from .bench import batches, lm
from .judge2_parts import real
from .judge_parts import LoRALinear, NanoGPT, sequence_logp

QV = ["q_proj", "v_proj"]


# ---------------------------------------------------------------- S: what is there before the first step


def helper_freezes_the_adapters():
    """A 'prepare for training' helper is called after get_peft_model: it freezes every parameter, adapters too."""
    torch.manual_seed(0)
    model = peft.get_peft_model(lm("llama"), peft.LoraConfig(r=4, target_modules=QV, init_lora_weights=False))

    def prepare(m):  # as prepare_model_for_kbit_training does
        for p in m.parameters():
            p.requires_grad = False
        m.enable_input_require_grads()
        return m

    model = prepare(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [p.clone() for p in model.parameters()]
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
    real(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "no weight moved")
    return report


def trainer_given_an_optimizer_of_before_the_resize():
    """Optimizer and schedule are handed to the Trainer; between the two the vocabulary was grown: the head is new."""
    torch.manual_seed(0)
    model = lm("qwen3", vocab=250, hidden=32, tie_word_embeddings=False)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.resize_token_embeddings(256, mean_resizing=False)
    rows = [dict(input_ids=row, labels=row) for ids in batches(8) for row in ids]
    before = model.lm_head.weight.detach().clone()
    with tempfile.TemporaryDirectory() as folder:
        args = tf.TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=8, report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        callback = doctor.TrainerCallback(say=False)
        schedule = torch.optim.lr_scheduler.ConstantLR(opt, 1.0)
        tf.Trainer(model, args, train_dataset=rows, optimizers=(opt, schedule), callbacks=[callback]).train()
    real(torch.equal(before, model.lm_head.weight), "the new head never moved")
    return callback.report


def groups_forget_the_norms():
    """Weight decay for matrices, none for names that end in 'bias': the LayerNorm weights are in neither group."""
    torch.manual_seed(0)
    model = NanoGPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for n, p in model.named_parameters() if n.endswith("bias")]
    opt = torch.optim.AdamW(
        [dict(params=decay, weight_decay=0.1), dict(params=no_decay, weight_decay=0.0)], lr=1e-3, betas=(0.9, 0.95)
    )
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8, length=33):
            _, loss = model(ids[:, :-1], ids[:, 1:])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
    real(bool((model.ln_f.weight == 1).all()), "the norms are where they were")
    return report


def both_ends_saved_of_a_tied_gpt2():
    """'To train the new tokens' wte and lm_head are in modules_to_save of a tied GPT-2: two copies from then on."""
    torch.manual_seed(0)
    model = lm("gpt2")
    config = peft.LoraConfig(r=8, target_modules=["c_attn"], modules_to_save=["wte", "lm_head"], fan_in_fan_out=True)
    model = peft.get_peft_model(model, config).train()
    opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for ids in batches(6):
            model(input_ids=ids, labels=ids).loss.backward()
            opt.step()
            opt.zero_grad()
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    real(not torch.equal(*ends), "the two ends differ")
    return report


def gpt2_from_disk_without_train():
    """A saved GPT-2 is loaded and fine-tuned with accumulation; from_pretrained left it in eval, dropout 0.1 is off."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        lm("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1).save_pretrained(folder)
        model = tf.GPT2LMHeadModel.from_pretrained(folder)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    data = iter(batches(12))
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for _ in range(6):
            for _ in range(2):
                ids = next(data)
                (model(input_ids=ids, labels=ids).loss / 2).backward()
            opt.step()
            opt.zero_grad()
    real(not model.training and model.config.resid_pdrop == 0.1, "eval mode with dropout in the config")
    return report


def new_tokens_under_hand_written_lora():
    """Six tokens added and in every row; the base, its embeddings among it, is frozen under hand-written LoRA."""
    torch.manual_seed(0)
    model = lm("llama", vocab=250)
    model.resize_token_embeddings(256)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRALinear(layer.self_attn.q_proj)
        layer.mlp.down_proj = LoRALinear(layer.mlp.down_proj)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    before = model.get_input_embeddings().weight[250:].clone()
    with doctor.watch(model, optimizer=opt, steps=8, say=False, orig_vocab=250) as report:
        for step, ids in enumerate(batches(8, vocab=250)):
            ids[:, ::8] = 250 + step % 6
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
    real(torch.equal(before, model.get_input_embeddings().weight[250:]), "the new rows never moved")
    return report


def weights_back_to_float_but_not_the_rope():
    """model.bfloat16() for a trial, then every parameter back to float: inv_freq is a buffer and stays bf16."""
    torch.manual_seed(0)
    model = lm("llama", hidden=32, max_position_embeddings=512)
    exact = model.model.rotary_emb.inv_freq.clone()
    model.bfloat16()
    for p in model.parameters():
        p.data = p.data.float()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with doctor.watch(model, optimizer=opt, steps=5, say=False) as report:
        for ids in batches(5, rows=2, length=400):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
    real(not torch.equal(exact, model.model.rotary_emb.inv_freq.float()), "the frequencies were rounded")
    return report


def adapter_of_the_trunk_loaded_on_the_whole():
    """Inside the block: an adapter saved from the model without its head goes onto the one with it; no key matches."""
    torch.manual_seed(0)
    base = lm("llama")
    with tempfile.TemporaryDirectory() as folder:
        trunk = peft.get_peft_model(copy.deepcopy(base.model), peft.LoraConfig(r=4, target_modules=QV))
        for name, p in trunk.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
        trunk.save_pretrained(folder)
        with doctor.watch(steps=6, say=False) as report:
            model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True).train()
            fresh = all(bool((p == 0).all()) for n, p in model.named_parameters() if "lora_B" in n)
            opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            for ids in batches(6):
                loss = model(input_ids=ids, labels=ids).loss
                opt.zero_grad()
                loss.backward()
                opt.step()
    real(fresh, "nothing of the file arrived")
    return report


def tied_matrix_in_two_optimizers():
    """One optimizer for the embeddings, one for the rest with the head; tied, so the matrix is updated twice."""
    torch.manual_seed(0)
    model = lm("qwen3")
    embeddings = torch.optim.Adam(model.get_input_embeddings().parameters(), lr=5e-4)
    rest = torch.optim.AdamW([*model.model.layers.parameters(), *model.model.norm.parameters(),
                              *model.lm_head.parameters()], lr=1e-3)  # fmt: skip
    with doctor.watch(model, optimizer=[embeddings, rest], steps=8, say=False) as report:
        for ids in batches(8):
            embeddings.zero_grad()
            rest.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            embeddings.step()
            rest.step()
    held = [{id(p) for g in o.param_groups for p in g["params"]} for o in (embeddings, rest)]
    real(held[0] & held[1], "one tensor is in both")
    return report


# ---------------------------------------------------------------- F: the batch and the forward pass


def losses_collected_as_numbers():
    """The rows' losses are collected with .item() and averaged in a new tensor that 'requires grad'."""
    torch.manual_seed(0)
    model = NanoGPT(width=32)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    before = model.wte.weight.detach().clone()
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for ids in batches(6, length=25):
            opt.zero_grad()
            each = [model(row[None, :-1], row[None, 1:])[1].item() for row in ids]
            loss = torch.tensor(each, requires_grad=True).mean()
            loss.backward()
            opt.step()
    real(torch.equal(before, model.wte.weight), "no weight moved")
    return report


def shifted_again_after_the_loader():
    """The loader gives y shifted by one; the loss cuts logits[:-1] and y[1:] once more, as in a HF loss."""
    torch.manual_seed(0)
    model = NanoGPT()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8, length=41):
            x, y = ids[:, :-1], ids[:, 1:]
            logits, _ = model(x)
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), y[:, 1:].reshape(-1))
            opt.zero_grad()
            loss.backward()
            opt.step()
    real(torch.equal(y[:, 1:], ids[:, 2:]), "position t learns token t + 2")
    return report


def fully_masked_queries_in_a_4d_mask():
    """A 4-D additive mask of -inf made by hand for left-padded rows: the pads' queries see nothing, and give nan."""
    torch.manual_seed(0)
    model = lm("llama", attn_implementation="eager")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for ids in batches(6, length=24):
            keep = torch.ones_like(ids)
            for row, pads in enumerate((0, 3, 5, 9)):
                ids[row, :pads], keep[row, :pads] = 0, 0
            seen = torch.ones(24, 24, dtype=torch.bool).tril() & keep[:, None, None, :].bool()
            mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
            labels = ids.masked_fill(keep == 0, -100)
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    real(any(math.isnan(x) for x in losses), "the loss is nan")
    return report


def teacher_inside_the_students_module():
    """Teacher and student sit in one module whose train() is called each epoch: the teacher's dropout is live."""
    torch.manual_seed(0)

    class Distiller(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher = lm("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1).requires_grad_(False).eval()
            self.student = lm("gpt2", hidden=32, layers=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

        def forward(self, ids, T=2.0):
            with torch.no_grad():
                soft = (self.teacher(input_ids=ids).logits / T).log_softmax(-1)
            out = self.student(input_ids=ids, labels=ids)
            kd = F.kl_div((out.logits / T).log_softmax(-1).flatten(0, 1), soft.flatten(0, 1),
                          log_target=True, reduction="batchmean")  # fmt: skip
            return 0.5 * out.loss + 0.5 * T * T * kd

    both = Distiller()
    opt = torch.optim.AdamW(both.student.parameters(), lr=1e-3)
    with doctor.watch(both.student, optimizer=opt, teacher=both.teacher, steps=6, say=False) as report:
        both.train()
        for ids in batches(6):
            opt.zero_grad()
            both(ids).backward()
            opt.step()
    with torch.no_grad():
        noise = both.teacher(input_ids=ids).logits - both.teacher(input_ids=ids).logits
    real(noise.abs().max() > 0.01, "the teacher contradicts itself")
    return report


def packed_with_the_cache_on():
    """Positions restart per document and no mask is given, as told; but use_cache is on, so documents are not apart."""
    torch.manual_seed(0)
    model = lm("llama", use_cache=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    places = torch.cat([torch.arange(12), torch.arange(20)])[None].expand(2, -1)
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for ids in batches(6, rows=2):
            labels = ids.clone()
            labels[:, 12] = -100
            out = model(input_ids=ids, position_ids=places, labels=labels)
            opt.zero_grad()
            out.loss.backward()
            opt.step()
    with torch.no_grad():
        other = ids.clone()
        other[:, :12] = 5
        leak = model(input_ids=ids, position_ids=places).logits - model(input_ids=other, position_ids=places).logits
    real(leak[:, 12:].abs().max() > 1e-3, "document two sees document one")
    return report


def two_begins_behind_left_padding():
    """Left-padded prompts whose text already begins with BOS before the tokenizer adds its own."""
    torch.manual_seed(0)
    model = lm("llama", bos_token_id=1, pad_token_id=0)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for step, ids in enumerate(batches(8, rows=6, length=28)):
            keep = torch.ones_like(ids)
            for row in range(6):
                pads = (row * 3 + step) % 9
                ids[row, :pads], keep[row, :pads] = 0, 0
                ids[row, pads : pads + 2] = 1
            places = (keep.cumsum(-1) - 1).clamp(min=0)
            out = model(
                input_ids=ids, attention_mask=keep, position_ids=places, labels=ids.masked_fill(keep == 0, -100)
            )
            opt.zero_grad()
            out.loss.backward()
            opt.step()
    real(bool(((ids == 1).sum(1) == 2).all()), "two BOS in each row")
    return report


def padding_mask_replaces_the_causal_one():
    """A 4-D mask built from the padding alone is handed to Llama: it is used as it is, and nobody masks the future."""
    torch.manual_seed(0)
    model = lm("llama")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def extended(keep):
        mask = (1.0 - keep[:, None, None, :].float()) * torch.finfo(torch.float32).min
        return mask.expand(-1, 1, keep.shape[1], -1).contiguous()

    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8):
            keep = torch.ones_like(ids)
            keep[1, 26:], keep[3, 20:] = 0, 0
            loss = model(input_ids=ids, attention_mask=extended(keep), labels=ids.masked_fill(keep == 0, -100)).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
    with torch.no_grad():
        other = ids.clone()
        other[:, 15] = 7
        moved = model(input_ids=ids, attention_mask=extended(keep)).logits
        moved = moved - model(input_ids=other, attention_mask=extended(keep)).logits
    real(moved[:, :15].abs().max() > 1e-3, "earlier tokens see later ones")
    return report


def kl_div_default_between_two_llamas():
    """F.kl_div without a reduction between two Llamas: 'mean' over every class too, 256 times less than meant."""
    torch.manual_seed(0)
    teacher, student = lm("llama").eval().requires_grad_(False), lm("llama", hidden=32, layers=1)
    opt = torch.optim.AdamW(student.parameters(), lr=1e-3)
    alpha, T = 0.7, 3.0
    with doctor.watch(student, optimizer=opt, teacher=teacher, steps=8, say=False) as report:
        for ids in batches(8):
            with torch.no_grad():
                target = F.softmax(teacher(input_ids=ids).logits / T, dim=-1)
            out = student(input_ids=ids, labels=ids)
            log_p = F.log_softmax(out.logits / T, dim=-1)
            kd = F.kl_div(log_p, target) * T**2
            loss = alpha * kd + (1 - alpha) * out.loss
            report.terms(kd=alpha * kd, ce=(1 - alpha) * out.loss)
            opt.zero_grad()
            loss.backward()
            opt.step()
    right = F.kl_div(log_p.flatten(0, 1), target.flatten(0, 1), reduction="batchmean") * T**2
    real(right / kd > 200, "the term is hundreds of times too small")
    return report


# ---------------------------------------------------------------- B: the first backward


def trunk_computed_as_features():
    """A full fine-tune by its optimizer, but the trunk runs under no_grad 'to save memory': only the head can learn."""
    torch.manual_seed(0)
    model = lm("llama", tie_word_embeddings=False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8):
            opt.zero_grad()
            with torch.no_grad():
                hidden = model.model(input_ids=ids).last_hidden_state
            logits = model.lm_head(hidden)
            F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            opt.step()
    real(torch.equal(before, model.model.layers[0].mlp.up_proj.weight), "the trunk never moved")
    return report


def lora_dropout_taken_for_a_keep_rate():
    """lora_dropout=1.0, meant as 'keep everything': the adapters' input is always zero."""
    torch.manual_seed(0)
    model = peft.get_peft_model(lm("qwen3"), peft.LoraConfig(r=8, target_modules=QV, lora_dropout=1.0)).train()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
    real(all(bool((p == 0).all()) for n, p in model.named_parameters() if "lora_B" in n), "every lora_B is still 0")
    return report


def square_root_of_nothing():
    """A penalty sqrt(sum (w - w0)^2) keeps the weights near their start, where it is 0 and its slope infinite."""
    torch.manual_seed(0)
    model = NanoGPT(tie=False)
    start = [p.detach().clone() for p in model.parameters()]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for step, ids in enumerate(batches(6, length=33)):
            _, loss = model(ids[:, :-1], ids[:, 1:])
            far = sum(((p - s) ** 2).sum() for p, s in zip(model.parameters(), start, strict=True)).sqrt()
            opt.zero_grad()
            (loss + 0.01 * far).backward()
            if step == 0:
                real(math.isfinite(loss.item()) and model.wte.weight.grad.isnan().any(), "finite loss, nan gradient")
            opt.step()
    return report


# ---------------------------------------------------------------- N: the first steps


def gradients_wiped_by_the_logger():
    """log_gradients(model) prints the norm and 'cleans up' with model.zero_grad(), between backward and step."""
    torch.manual_seed(0)
    model = lm("gpt2")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = model.transformer.h[0].attn.c_attn.weight.detach().clone()

    def log_gradients(m):
        norm = sum(p.grad.norm() ** 2 for p in m.parameters() if p.grad is not None) ** 0.5
        m.zero_grad()
        return float(norm)

    norms = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8):
            model(input_ids=ids, labels=ids).loss.backward()
            norms.append(log_gradients(model))
            opt.step()
    real(min(norms) > 0.01 and torch.equal(before, model.transformer.h[0].attn.c_attn.weight), "no weight moved")
    return report


def four_micro_batches_undivided():
    """Gradient accumulation over four micro-batches without dividing the loss by four."""
    torch.manual_seed(0)
    model = lm("mixtral", hidden=32, num_local_experts=4)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = tf.get_cosine_schedule_with_warmup(opt, 2, 20)
    data = batches(24)
    with doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        for i, ids in enumerate(data):
            model(input_ids=ids, labels=ids).loss.backward()
            if i == 3:
                four = model.lm_head.weight.grad.norm().item()
            if (i + 1) % 4 == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                opt.step()
                schedule.step()
                opt.zero_grad()
    fresh = lm("mixtral", hidden=32, num_local_experts=4)
    big = torch.cat(data[:4])
    fresh(input_ids=big, labels=big).loss.backward()
    real(four / fresh.lm_head.weight.grad.norm().item() > 3.5, "the gradient is four times the large batch's")
    return report


def clipped_before_there_is_anything():
    """clip_grad_norm_ stands in front of backward, right after zero_grad: nothing is ever clipped."""
    torch.manual_seed(0)
    model = lm("llama")
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8):
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad()
            seen = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            loss.backward()
            real(float(seen) == 0, "the norm that is clipped is 0")
            opt.step()
    return report


def schedule_as_long_as_an_epoch_count():
    """LambdaLR(1 - step / epochs) with epochs = 3, stepped for each batch: lr 0 from the fourth batch on."""
    torch.manual_seed(0)
    model = NanoGPT()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    epochs = 3
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: max(0.0, 1 - s / epochs))
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for ids in batches(10, length=33):
            opt.zero_grad()
            loss = model(ids[:, :-1], ids[:, 1:])[1]
            loss.backward()
            opt.step()
            schedule.step()
            if schedule.last_epoch == 3:
                stopped = model.wte.weight.detach().clone()
    real(torch.equal(stopped, model.wte.weight), "nothing moved after the third step")
    return report


def reference_refreshed_every_step():
    """DPO whose reference is 'synchronised' (load_state_dict) before each batch: the loss is ln 2 each time."""
    torch.manual_seed(0)
    policy = lm("llama")
    ref = copy.deepcopy(policy).eval().requires_grad_(False)
    opt = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    losses = []
    with doctor.watch(policy, optimizer=opt, teacher=ref, steps=8, say=False) as report:
        for good, bad in zip(batches(8, rows=2), batches(8, rows=2, seed=1), strict=True):
            bad[:, :10] = good[:, :10]
            ref.load_state_dict(policy.state_dict())
            with torch.no_grad():
                ref_gap = sequence_logp(ref, good, 10) - sequence_logp(ref, bad, 10)
            gap = sequence_logp(policy, good, 10) - sequence_logp(policy, bad, 10)
            loss = -F.logsigmoid(0.1 * (gap - ref_gap)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    real(max(abs(x - math.log(2)) for x in losses) < 1e-5, "ln 2 for ever")
    return report


@contextlib.contextmanager
def _group():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def wrapped_in_ddp_and_left_aside():
    """ddp = DistributedDataParallel(model), and the loop goes on with `model`: no gradient is ever averaged."""
    torch.manual_seed(0)
    with _group():
        model = lm("qwen3", hidden=32)
        ddp = nn.parallel.DistributedDataParallel(model)
        opt = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        through = []
        handle = ddp.register_forward_hook(lambda *_: through.append(1))
        with doctor.watch(ddp, optimizer=opt, steps=8, say=False) as report:
            ddp.train()
            for ids in batches(8):
                loss = model(input_ids=ids, labels=ids).loss
                opt.zero_grad()
                loss.backward()
                opt.step()
        handle.remove()
    real(not through, "the wrapper was never called")
    return report


# ---------------------------------------------------------------- a few more, of checks not touched above


def muon_at_the_rate_of_adamw():
    """torch.optim.Muon with adjust_lr_fn left at its default gets AdamW's 1e-5: for a matrix, next to nothing."""
    torch.manual_seed(0)
    model = lm("llama")
    inner = [p for p in model.model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is q for q in inner)]
    muon, adamw = torch.optim.Muon(inner, lr=1e-5, weight_decay=0.0), torch.optim.AdamW(rest, lr=1e-5)
    before = inner[0].detach().clone()
    with doctor.watch(model, optimizer=[muon, adamw], steps=10, say=False) as report:
        for ids in batches(10):
            loss = model(input_ids=ids, labels=ids).loss
            for o in (muon, adamw):
                o.zero_grad()
            loss.backward()
            for o in (muon, adamw):
                o.step()
    real((inner[0] - before).square().mean().sqrt() / 10 < 0.2e-5, "ten times below a usual AdamW update at 1e-5")
    return report


def answers_cut_off_by_the_window():
    """Prompts longer than the window: after the cut at 32 tokens, most rows hold no answer, every label is -100."""
    torch.manual_seed(0)
    model = lm("qwen3")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    empty = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8, length=48):
            labels = ids.clone()
            for row, prompt in enumerate((20, 36, 40, 33)):
                labels[row, :prompt] = -100
            ids, labels = ids[:, :32], labels[:, :32]
            empty.append((labels == -100).all(1).float().mean().item())
            opt.zero_grad()
            model(input_ids=ids, labels=labels).loss.backward()
            opt.step()
    real(min(empty) == 0.75, "three rows of four teach nothing")
    return report


def tied_start_of_width_one():
    """nn.Embedding's own start, std 1, left as it is and tied to the head: the first loss is far above ln V."""
    torch.manual_seed(0)
    model = NanoGPT(width=64)
    nn.init.normal_(model.wte.weight)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with doctor.watch(model, optimizer=opt, steps=6, say=False, from_scratch=True) as report:
        for ids in batches(6, length=33):
            _, loss = model(ids[:, :-1], ids[:, 1:])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    real(losses[0] > 1.6 * math.log(256), "worse than knowing nothing")
    return report


def zero_grad_without_its_parentheses():
    """`opt.zero_grad` is named but not called: each step uses the sum of all gradients so far."""
    torch.manual_seed(0)
    model = lm("llama")
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    norms = []
    with doctor.watch(model, optimizer=opt, steps=8, say=False) as report:
        for ids in batches(8):
            _ = opt.zero_grad
            model(input_ids=ids, labels=ids).loss.backward()
            norms.append(model.model.norm.weight.grad.norm().item())
            opt.step()
    real(norms[-1] > 3 * norms[0], "they pile up")
    return report


def sampling_helper_leaves_eval_on():
    """A helper prints a sample at step 2; it calls eval() and never train(): no dropout from there on."""
    torch.manual_seed(0)
    model = NanoGPT(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @torch.no_grad()
    def sample(m, n=5):
        m.eval()
        ids = torch.tensor([[5]])
        for _ in range(n):
            ids = torch.cat([ids, m(ids)[0][:, -1].softmax(-1).multinomial(1)], 1)
        return ids

    modes = []
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for step, ids in enumerate(batches(10, length=33)):
            modes.append(model.training)
            _, loss = model(ids[:, :-1], ids[:, 1:])
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step == 2:
                sample(model)
    real(modes == [True] * 3 + [False] * 7, "eval from the fourth step")
    return report


def default_dtype_of_the_whole_script():
    """NanoGPT cast to bf16 as a whole, RMS-like rates of 1e-5 with AdamW: most of each update is rounded away."""
    torch.manual_seed(0)
    model = NanoGPT(width=64).to(torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
    before = model.ln_f.weight.detach().clone()
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for ids in batches(10, length=33):
            logits, _ = model(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
    real(torch.equal(before, model.ln_f.weight), "the norm's weights are exactly where they were")
    return report


def reference_is_the_base_with_the_adapter_in_it():
    """ref = policy.get_base_model(): peft put its layers into that very module, so the reference has the adapter."""
    torch.manual_seed(0)
    policy = peft.get_peft_model(lm("llama"), peft.LoraConfig(r=8, target_modules=QV))
    ref = policy.get_base_model()
    opt = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    with doctor.watch(policy, optimizer=opt, steps=8, say=False) as report:
        for good, bad in zip(batches(8, rows=2), batches(8, rows=2, seed=1), strict=True):
            bad[:, :10] = good[:, :10]
            with torch.no_grad():
                ref_gap = sequence_logp(ref, good, 10) - sequence_logp(ref, bad, 10)
            gap = sequence_logp(policy, good, 10) - sequence_logp(policy, bad, 10)
            loss = -F.logsigmoid(0.1 * (gap - ref_gap)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    real(max(abs(x - math.log(2)) for x in losses) < 1e-5, "ln 2 for ever")
    return report


def teacher_trained_along_with_the_student():
    """The optimizer gets the parameters of student and teacher, and the teacher's pass is not under no_grad."""
    torch.manual_seed(0)
    teacher, student = lm("llama").eval(), lm("llama", hidden=32, layers=1)
    opt = torch.optim.AdamW([*student.parameters(), *teacher.parameters()], lr=1e-3)
    before = teacher.model.norm.weight.detach().clone()
    with doctor.watch(student, optimizer=opt, teacher=teacher, steps=8, say=False) as report:
        for ids in batches(8):
            soft = teacher(input_ids=ids).logits.softmax(-1)
            out = student(input_ids=ids, labels=ids)
            kd = F.kl_div(out.logits.log_softmax(-1).flatten(0, 1), soft.flatten(0, 1), reduction="batchmean")
            opt.zero_grad()
            (0.5 * kd + 0.5 * out.loss).backward()
            opt.step()
    real(not torch.equal(before, teacher.model.norm.weight), "the teacher moved")
    return report


def model_made_in_inference_mode():
    """The model is built under torch.inference_mode(): its weights can never be saved for a backward pass."""
    with torch.inference_mode():
        torch.manual_seed(0)
        model = NanoGPT()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    failed = None
    with contextlib.suppress(RuntimeError), doctor.watch(model, optimizer=opt, steps=6, say=False) as report:
        try:
            for ids in batches(6, length=33):
                _, loss = model(ids[:, :-1], ids[:, 1:])
                opt.zero_grad()
                loss.backward()
                opt.step()
        except RuntimeError as error:
            failed = error
            raise
    real(failed is not None, "it cannot train")
    return report


def learnable_temperature_on_inference_tensors():
    """The teacher runs under inference_mode, and a learnable temperature divides its logits: backward cannot work."""
    torch.manual_seed(0)
    teacher, student = lm("llama").eval().requires_grad_(False), lm("llama", hidden=32)
    log_t = nn.Parameter(torch.zeros(()))
    opt = torch.optim.AdamW([*student.parameters(), log_t], lr=1e-3)
    failed = None
    with contextlib.suppress(RuntimeError), doctor.watch(student, optimizer=opt, teacher=teacher, say=False) as report:
        try:
            for ids in batches(4):
                with torch.inference_mode():
                    logits = teacher(input_ids=ids).logits
                soft = (logits * log_t.exp()).softmax(-1)
                loss = -(soft * student(input_ids=ids).logits.log_softmax(-1)).sum(-1).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        except RuntimeError as error:
            failed = error
            raise
    real("nference tensors" in str(failed), "it ends in torch's own error")
    return report


def best_head_put_back_as_a_new_layer():
    """At step 3 the 'best head so far' is put back as a deepcopy of the layer: no tie any more, and not optimised."""
    torch.manual_seed(0)
    model = lm("llama")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    best = copy.deepcopy(model.lm_head)
    with doctor.watch(model, optimizer=opt, steps=10, say=False) as report:
        for step, ids in enumerate(batches(10)):
            loss = model(input_ids=ids, labels=ids).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step == 2:
                model.lm_head = best
    real(model.lm_head.weight is not model.model.embed_tokens.weight, "no longer one tensor")
    return report


def divided_by_the_wrong_count():
    """The loss is divided by accumulation = 2, but a step is made every 6 micro-batches: three times too large."""
    torch.manual_seed(0)
    model = lm("qwen3")
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    sums = []
    with doctor.watch(model, optimizer=opt, steps=5, say=False) as report:
        total = 0.0
        for i, ids in enumerate(batches(30, rows=2), 1):
            loss = model(input_ids=ids, labels=ids).loss / 2
            loss.backward()
            total += loss.item()
            if i % 6 == 0:
                sums.append(total)
                opt.step()
                opt.zero_grad()
                total = 0.0
    real(sums[0] > 2.8 * math.log(256), "three times a mean loss")
    return report


FAULTY = [
    (helper_freezes_the_adapters, ("S1", "S2"), ("trainable", "frozen", "freez")),
    (trainer_given_an_optimizer_of_before_the_resize, ("S3", "S4"), ("resize", "lm_head", "optimizer")),
    (groups_forget_the_norms, ("S3",), ("optimizer", "ln_", "norm")),
    (both_ends_saved_of_a_tied_gpt2, ("S9", "N13"), ("tie", "tied", "modules_to_save")),
    (gpt2_from_disk_without_train, ("S11", "N16"), ("eval", "dropout", "train()")),
    (new_tokens_under_hand_written_lora, ("S14",), ("new token", "added", "vocab", "new row", "embedding")),
    (weights_back_to_float_but_not_the_rope, ("S15",), ("rope", "rotary", "inv_freq")),
    (adapter_of_the_trunk_loaded_on_the_whole, ("S16",), ("key", "missing", "prefix")),
    (tied_matrix_in_two_optimizers, ("S17",), ("two optimizers", "both", "twice", "double")),
    (losses_collected_as_numbers, ("F1", "B1"), ("leaf", "graph", "torch.tensor", "cut", "item")),
    (shifted_again_after_the_loader, ("F3", "F17"), ("shift",)),
    (fully_masked_queries_in_a_4d_mask, ("F5", "N17"), ("pad", "masked", "mask")),
    (teacher_inside_the_students_module, ("S12", "F6"), ("teacher", "dropout", "train mode", "eval")),
    (packed_with_the_cache_on, ("F10", "F12"), ("cache", "pack", "document")),
    (two_begins_behind_left_padding, ("F18",), ("bos", "add_special_tokens")),
    (padding_mask_replaces_the_causal_one, ("F11",), ("future", "causal", "later")),
    (kl_div_default_between_two_llamas, ("F2", "F3"), ("batchmean", "kl_div", "kldiv")),
    (trunk_computed_as_features, ("B1", "F1"), ("no_grad", "detach", "gradient")),
    (lora_dropout_taken_for_a_keep_rate, ("B3", "B2", "S16"), ("dropout", "zero", "cut", "lora_b")),
    (square_root_of_nothing, ("B4", "F5", "N17"), ("nan", "finite", "sqrt")),
    (gradients_wiped_by_the_logger, ("N2",), ("zero_grad", "zeroed", "wiped", "cleared")),
    (four_micro_batches_undivided, ("N6",), ("divide", "micro", "accumul")),
    (clipped_before_there_is_anything, ("N8",), ("clip",)),
    (schedule_as_long_as_an_epoch_count, ("N9", "N11"), ("schedule", "lr", "learning rate")),
    (reference_refreshed_every_step, ("N14", "F7"), ("ln 2", "ln2", "0.693", "reference")),
    (wrapped_in_ddp_and_left_aside, ("N21",), ("ddp", "wrapper", "distributed")),
    (muon_at_the_rate_of_adamw, ("N5b", "N5"), ("muon", "rate", "small")),
    (answers_cut_off_by_the_window, ("F14", "F19"), ("no label", "-100", "masked", "truncat", "supervised")),
    (tied_start_of_width_one, ("F4",), ("init", "ln", "start")),
    (zero_grad_without_its_parentheses, ("N1",), ("zero_grad",)),
    (sampling_helper_leaves_eval_on, ("N16", "S11"), ("eval", "train()")),
    (default_dtype_of_the_whole_script, ("N4",), ("bf16", "bfloat16", "round", "16-bit")),
    (reference_is_the_base_with_the_adapter_in_it, ("N14", "F7"), ("ln 2", "ln2", "0.693", "reference", "adapter")),
    (teacher_trained_along_with_the_student, ("F8", "S4"), ("teacher",)),
    (model_made_in_inference_mode, ("S6",), ("inference",)),
    (learnable_temperature_on_inference_tensors, ("F9",), ("inference",)),
    (best_head_put_back_as_a_new_layer, ("S9", "N13", "S3"), ("tie", "tied", "replaced", "head")),
    (divided_by_the_wrong_count, ("N6", "F3"), ("divide", "divis", "micro", "accumul", "times")),
]
