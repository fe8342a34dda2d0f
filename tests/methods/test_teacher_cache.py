"""The teacher's cache: what is stored and what it costs, kills and damage, and training from it."""

import hashlib
import os
import signal
import time

import psutil
import pytest
import safetensors.torch
import torch
from bit_flips import flips
from conftest import FP32
from torch.nn import functional as F

from nblib import files, losses, models, text, train
from nblib.checkpoint import Checkpoints
from nblib.methods.distill import divergences, objective, teacher_cache
from nblib.methods.distill.objective import from_teacher
from nblib.methods.distill.teacher_cache import Cache, Cached, CacheError
from nblib.methods.distill.temperature import Adversarial, Learned
from nbworkbook import base_model

LENGTH, V, K = 32, 256, 16
NUMBERS = ("teacher_values", "teacher_tails", "teacher_entropies", "teacher_drawn_values")


@pytest.fixture(autouse=True)
def one_thread():
    """A forked child waits for ever for the threads that its parent had."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def numbers() -> torch.Tensor:
    steps = torch.randint(1, 12, (8_000,), generator=torch.Generator().manual_seed(1))
    return steps.cumsum(0) % V


@pytest.fixture(scope="module")
def teacher(numbers):
    """A teacher that has learned something, with a long tail beside it."""
    model = models.tiny(V, hidden=48, layers=2, heads=2, seed=9)
    train.fit(
        model,
        text.Batches(numbers, rows=8, length=LENGTH),
        train.adamw(model, lr=1e-2),
        total=60,
        machine=FP32,
        clip=1.0,
    )
    return models.as_teacher(model)


class Tokenizer:
    """What `source` asks of a tokenizer."""

    all_special_tokens = ["<eos>"]

    def __init__(self, *extra: str):
        self.words = [str(i) for i in range(V)] + list(extra)

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


@pytest.fixture
def source(teacher, numbers):
    return teacher_cache.source(teacher, Tokenizer(), numbers)


def _batches(numbers, rows: int = 4, **options) -> text.Batches:
    return text.Batches(numbers, rows=rows, length=LENGTH, **options)


def _make(folder, teacher, numbers, source, **options) -> Cache:
    options = dict(steps=6, k=K, machine=FP32, shard_rows=5) | options
    return teacher_cache.make(folder, teacher, _batches(numbers), source=source, **options)


def _student(seed: int = 0):
    return models.tiny(V, hidden=32, layers=2, heads=2, seed=seed)


def _fit(loss, batches, *, total: int, seed: int = 0, temperature=None, **options):
    model = _student(seed)
    optimizers = [train.adamw(model, lr=5e-3)]
    if temperature is not None:
        model.temperature = temperature
        optimizers.append(temperature.optimizer())
    return model, train.fit(
        model, batches, optimizers, total=total, loss=loss, machine=FP32, **options
    )


# ---------------------------------------------------------------- what is stored


def test_a_row_finds_what_the_teacher_said_about_it(tmp_path, teacher, numbers, source):
    """Against the plain model in float64: the largest, in order, and what is left for the
    others.
    """
    cache = _make(tmp_path, teacher, numbers, source, temperatures=(1.0, 3.0))
    batches = Cached(_batches(numbers), cache)
    later = [next(batches) for _ in range(6)][4]
    mixed = {"input_ids": later["input_ids"][[2, 0]]}  # other rows, other order, other batch size
    got = cache(mixed["input_ids"])
    with torch.no_grad():
        said = teacher(**mixed).logits[:, :-1].double().log_softmax(-1)  # (2, T - 1, V)
    top, at = said.topk(K, dim=-1)
    assert got["teacher_values"].dtype == torch.float16 and got["teacher_values"].shape == (
        2,
        LENGTH - 1,
        K,
    )
    torch.testing.assert_close(got["teacher_values"].double(), top, rtol=2**-10, atol=1e-6)
    # up to ties
    torch.testing.assert_close(said.gather(-1, got["teacher_indices"]), top, rtol=1e-5, atol=1e-5)
    others = said.scatter(-1, at, -torch.inf)
    tails = torch.stack([(others / t).logsumexp(-1) for t in (1.0, 3.0)], -1)
    torch.testing.assert_close(got["teacher_tails"].double(), tails, rtol=2**-10, atol=1e-3)
    shares = torch.stack([(others / t).softmax(-1) for t in (1.0, 3.0)], -2)
    torch.testing.assert_close(
        got["teacher_entropies"].double(), torch.special.entr(shares).sum(-1), rtol=1e-3, atol=1e-3
    )
    drawn = others.gather(-1, got["teacher_drawn"])
    torch.testing.assert_close(got["teacher_drawn_values"].double(), drawn, rtol=2**-10, atol=1e-3)


@pytest.mark.parametrize(
    "vocab,most,index", [(60_000, 150, torch.uint16), (70_000, 204, torch.int32)]
)
def test_bytes_per_token_at_the_32_largest(tmp_path, vocab, most, index):
    """All on disk but 4 V bytes of mean probabilities, per predicted token."""
    teacher = models.as_teacher(models.tiny(vocab, hidden=8, layers=1, heads=1))
    rows = text.Batches(torch.randint(vocab, (2000,)), rows=2, length=256)
    cache = teacher_cache.make(tmp_path, teacher, rows, steps=2, source={}, k=32, machine=FP32)
    on_disk = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert cache.tokens == 4 * 255 and cache.bytes == on_disk
    assert cache.bytes_per_token == (on_disk - 4 * vocab) / cache.tokens <= most
    print(
        f"\nvocabulary {vocab}: {cache.bytes_per_token:.1f} bytes a token; all logits as fp16 {2 * vocab}"
    )
    with teacher_cache.safe_open(next(tmp_path.glob("*.safetensors")), "pt") as file:
        assert file.get_tensor("teacher_indices").dtype == index
    ids = next(rows)["input_ids"]
    at = cache(ids)["teacher_indices"]
    with torch.no_grad():
        assert (
            torch.equal(at[..., 0], teacher(input_ids=ids).logits[:, :-1].argmax(-1))
            and at.max() > 50_000
        )


def test_opening_and_asking_reads_only_the_rows_that_are_asked_for(tmp_path):
    teacher = models.as_teacher(models.tiny(8192, hidden=8, layers=1, heads=1))
    rows = text.Batches(torch.randint(8192, (6000,)), rows=2, length=256)
    made = teacher_cache.make(tmp_path, teacher, rows, steps=8, source={}, k=0, machine=FP32)
    ids = next(rows)["input_ids"][:1]
    before = psutil.Process().memory_info().rss
    cache = Cache(tmp_path)
    row = cache(ids)["teacher_values"]
    grown = psutil.Process().memory_info().rss - before
    assert made.bytes > 60e6 and row.shape == (1, 255, 8192)
    assert grown < 0.35 * made.bytes  # a sixteenth of it, twice: mapped and copied


# ---------------------------------------------------------------- the loss on it


def _between(divergence, log_p, log_q):
    p, q = log_p.exp(), log_q.exp()
    middle = ((p + q) / 2).log()
    return {
        "forward": (p * (log_p - log_q)).sum(),
        "reverse": (q * (log_q - log_p)).sum(),
        "js": (p * (log_p - middle) + q * (log_q - middle)).sum() / 2,
        "soft_ce": -(p * log_q).sum(),
    }[divergence]


def _definition(cache, divergence, p, temperature, tail):
    """Plain autograd, token by token; polynomials in 1 / T by solving for their coefficients."""
    total = 0.0
    values, tails, entropies, drawn = (x.double() for x in (p["stored"][n] for n in NUMBERS))
    knots = torch.tensor([0.0, *(1 / t for t in cache.temperatures)], dtype=torch.float64)
    flat, beta = torch.tensor([V - cache.k]).double().log(), -temperature.log()
    for n in range(len(values)):
        s = p["w"] @ p["h"][0, n] / temperature
        top, tokens = (
            p["stored"]["teacher_indices"][n].long(),
            p["stored"]["teacher_drawn"][n].long(),
        )
        inside = torch.zeros(V, dtype=torch.bool).index_fill(0, top, True)
        theirs = values[n] / temperature

        def between(known):
            coefficients = torch.linalg.solve(
                torch.vander(knots, increasing=True), torch.cat([flat, known])
            )
            return sum(c / temperature**i for i, c in enumerate(coefficients))[None]

        last, mixed = between(tails[n]).detach(), between(entropies[n])
        # its derivative is the tail less its entropy
        last = last + (last - mixed.detach()) * (beta - beta.detach())
        if tail == "drawn":
            log_z = torch.cat([theirs, last]).logsumexp(0)
            some, mass = (theirs - log_z).exp(), (last - log_z).exp()
            entropy = (
                -(some * (theirs - log_z)).sum()
                - (mass * (last - log_z)).sum()
                + (mass * mixed).sum()
            )
            # the draws count by importance
            away = drawn[n] * (1 / temperature - 1 / cache.temperatures[0])
            shares = (away + tails[n, 0] - log_z).exp() / cache.draws
            cross = s.logsumexp(0) - (some * s[top]).sum() - (shares * s[tokens]).sum()
            total = total + temperature**2 * (cross - (entropy if divergence == "forward" else 0))
            continue
        if tail == "spread":
            shares = (cache.prior.double()[~inside] / temperature).log_softmax(0)
            ours = torch.cat([s[top], s[~inside]]).log_softmax(0)
            theirs = torch.cat([theirs, last + shares]).log_softmax(0)
        else:
            ours = torch.cat([s[top], s[~inside].logsumexp(0)[None]]).log_softmax(0)
            last = last if tail == "bucket" else last.new_tensor([-1e4])
            theirs = torch.cat([theirs, last]).log_softmax(0)
        total = total + temperature**2 * _between(divergence, theirs, ours)
    return total


@pytest.mark.parametrize("tail", divergences.TAILS)
@pytest.mark.parametrize("divergence", divergences.DIVERGENCES)
def test_the_loss_from_k_values_and_all_its_gradients_equal_the_definition(
    tmp_path, teacher, numbers, source, divergence, tail
):
    cache = _make(tmp_path, teacher, numbers, source, temperatures=(2.0, 1.0, 4.0))
    if tail in ("drawn", "none") and divergence in ("reverse", "js"):
        with pytest.raises(
            ValueError,
            match=f"tail = '{tail}': it excludes tokens, .* '{divergence}' cannot measure",
        ):
            from_teacher(cache, divergence=divergence, tail=tail)
        return
    got = cache(next(_batches(numbers))["input_ids"][:1, :])
    draw = torch.Generator().manual_seed(3)
    p = {"stored": {name: tensor[0] for name, tensor in got.items()}}
    p["h"] = torch.randn(1, LENGTH, 16, dtype=torch.float64, generator=draw).requires_grad_()
    p["w"] = torch.randn(V, 16, dtype=torch.float64, generator=draw).requires_grad_()
    T = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    plain = _definition(cache, divergence, p, T, tail)
    scores = divergences.stored(T.detach(), cache, tail=tail)
    labels = torch.zeros(1, LENGTH, dtype=torch.long)
    said = tuple(got[name] for name in teacher_cache.KEYS)
    ours, _ = objective.distillation(
        p["h"], p["w"], labels, said, scores, temperature=T, divergence=divergence, chunk=7
    )
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)
    # from draws, that of T is right in the mean: tested below
    of = [p["h"], p["w"]] + [T] * (tail != "drawn")
    for a, b in zip(*(torch.autograd.grad(x, of) for x in (ours, plain))):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_the_tail_is_exact_where_it_was_stored_and_near_between(tmp_path, teacher, numbers, source):
    cache = _make(tmp_path, teacher, numbers, source, temperatures=(1.0, 2.0, 4.0), exact=True)
    ids = next(_batches(numbers))["input_ids"]
    with torch.no_grad():
        said = teacher(input_ids=ids).logits[:, :-1].double().log_softmax(-1)
    others = said.scatter(-1, said.topk(K, dim=-1).indices, -torch.inf)
    tails = cache(ids)["teacher_tails"].double()
    known = torch.cat([torch.full_like(tails[..., :1], V - K).log(), tails], -1)

    def error(T: float) -> float:
        return float(
            (known @ known.new_tensor(cache.tail_weights(T)) - (others / T).logsumexp(-1))
            .abs()
            .max()
        )

    assert max(error(T) for T in (1.0, 2.0, 4.0)) < 1e-5
    assert max(error(T) for T in (1.4, 3.0, 10.0, 100.0)) < 0.05
    with pytest.raises(ValueError, match="temperature = 0.8: the cache knows its tail at"):
        cache.tail_weights(0.8)
    for T in (1.4, 3.0):  # as on a card, which is not asked
        on_device = torch.stack(cache.tail_weights(torch.tensor(T, dtype=torch.float64)))
        assert on_device.tolist() == pytest.approx(cache.tail_weights(T), abs=1e-15)
    assert torch.stack(cache.tail_weights(torch.tensor(0.8))).isnan().any()


def test_renormalising_is_the_trap_and_the_tail_mends_it(tmp_path, teacher, numbers, source):
    """Loss and gradient against the live teacher's, on an untrained student."""
    cache = _make(tmp_path, teacher, numbers, source, k=8)
    batch = next(Cached(_batches(numbers), cache))
    found = {}
    for name, loss in {
        "live": from_teacher(teacher, temperature=1.0),
        **{tail: from_teacher(cache, temperature=1.0, tail=tail) for tail in divergences.TAILS},
    }.items():
        model = _student()
        value = loss(model, batch)["distillation"]
        value.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found[name] = (float(value.detach()), gradient)
    error = {name: value / found["live"][0] - 1 for name, (value, _) in found.items()}
    cosine = {
        name: float(F.cosine_similarity(g, found["live"][1], dim=0))
        for name, (_, g) in found.items()
    }
    print("\nloss error", error, "\ncosine of the gradient", cosine)
    # a coarser look never sees more, who is sure of k is further away
    assert error["bucket"] < 0 < error["none"]
    assert abs(error["spread"]) < min(-error["bucket"], error["none"])
    assert min(cosine["spread"], cosine["bucket"]) > cosine["none"]


def test_what_is_drawn_from_the_tail_has_the_teachers_probabilities_in_the_mean(
    tmp_path, teacher, numbers, source
):
    """With many draws: never one of the k, each of the others as often as the teacher says, at the
    first temperature; and the gradient then is that of the live teacher.
    """
    cache = _make(
        tmp_path,
        teacher,
        numbers,
        source,
        k=4,
        draws=20_000,
        steps=1,
        temperatures=(2.0, 1.0),
        exact=True,
    )
    batch = next(Cached(_batches(numbers), cache))
    with torch.no_grad():
        said = teacher(batch["input_ids"]).logits[0, 0].double().log_softmax(-1)
    # stored in two bytes
    top, tokens = batch["teacher_indices"][0, 0].long(), batch["teacher_drawn"][0, 0].long()
    assert not torch.isin(tokens, top).any()
    wanted = (said.index_fill(0, top, -torch.inf) / 2).softmax(0)
    often = torch.bincount(tokens, minlength=V) / 20_000
    assert ((often - wanted).abs() < 5 * (wanted / 20_000).sqrt() + 1e-4).all()


def test_the_gradient_from_draws_is_the_live_teachers_in_the_mean(
    tmp_path, teacher, numbers, source
):
    batch, grads = next(_batches(numbers)), {}
    h = torch.randn(4, LENGTH, 16, requires_grad=True)
    w = torch.randn(V, 16)
    one = torch.tensor(1.0)

    def gradient(said, scores):
        loss, _ = objective.distillation(h, w, batch["labels"], said, scores, temperature=one)
        return torch.autograd.grad(loss, h)[0]

    with torch.no_grad():
        th = teacher.model(batch["input_ids"]).last_hidden_state
    live = gradient((th,), divergences.live(one, teacher.lm_head.weight.detach()))
    for tail, draws in (("drawn", 1), ("drawn", 200), ("bucket", 1)):
        cache = _make(tmp_path / f"{draws}", teacher, numbers, source, k=4, draws=draws, steps=1)
        got = cache(batch["input_ids"])
        said = tuple(got[name] for name in teacher_cache.KEYS)
        grads[tail, draws] = gradient(said, divergences.stored(one, cache, tail=tail))
    off = {name: float((g - live).norm() / live.norm()) for name, g in grads.items()}
    print("\nrelative error of the gradient", off)
    assert off["drawn", 200] < 0.3 * off["drawn", 1] and off["drawn", 200] < 0.3 * off["bucket", 1]


@pytest.mark.parametrize("T", [2.0, 1.5])
def test_from_draws_value_and_gradients_are_the_live_teachers_in_the_mean(
    tmp_path, teacher, numbers, source, T
):
    """Autograd on all logits in float64 against what is stored: where the draws were made, and at
    another temperature, where they count by importance. The bucket's derivative by T is that of the
    true tail at a stored temperature.
    """
    temperatures = (2.0, 1.5, 4.0)
    options = dict(k=8, draws=300, steps=1, temperatures=temperatures, exact=True)
    cache, batch = _make(tmp_path, teacher, numbers, source, **options), next(_batches(numbers))
    draw = torch.Generator().manual_seed(1)
    h = torch.randn(4, LENGTH, 16, dtype=torch.float64, generator=draw).requires_grad_()
    w, at = (
        torch.randn(V, 16, dtype=torch.float64, generator=draw),
        torch.tensor(T, dtype=torch.float64).requires_grad_(),
    )
    got = cache(batch["input_ids"])
    with torch.no_grad():
        t = teacher(batch["input_ids"]).logits[:, :-1].double()
    top, log_q, log_p = (
        got["teacher_indices"],
        (h[:, :-1] @ w.T / at).log_softmax(-1),
        (t / at).log_softmax(-1),
    )

    def classes(log_p: torch.Tensor) -> torch.Tensor:  # the k, and all others as one
        return torch.cat(
            [log_p.gather(-1, top), log_p.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)],
            -1,
        )

    told = {"drawn": at**2 * (log_p.exp() * (log_p - log_q)).sum()}
    few_p, few_q = classes(log_p), classes(log_q)
    told["bucket"] = at**2 * (few_p.exp() * (few_p - few_q)).sum()
    for tail, plain in told.items():
        scores = divergences.stored(at.detach(), cache, tail=tail)
        said = tuple(got[name] for name in teacher_cache.KEYS)
        ours, _ = objective.distillation(
            h, w, batch["labels"], said, scores, temperature=at, chunk=16
        )
        near = 0.01 if tail == "drawn" else 1e-4
        assert float((ours / plain).detach()) == pytest.approx(1.0, abs=near)
        (d_h, d_T), (true_h, true_T) = (
            torch.autograd.grad(x, [h, at], retain_graph=True) for x in (ours, plain)
        )
        assert float(d_T) == pytest.approx(
            float(true_T), rel=5 * near, abs=near * float(plain.detach())
        )
        assert float((d_h - true_h).norm() / true_h.norm()) < (0.1 if tail == "drawn" else 1e-4)


def test_a_learned_temperature_goes_the_same_way_from_disk(tmp_path, teacher, numbers, source):
    """And the log shows the same divergence."""
    steps, temperatures = 40, (2.0, 1.0, 8.0)
    top = _make(
        tmp_path / "top", teacher, numbers, source, steps=steps, k=64, temperatures=temperatures
    )
    whole = _make(tmp_path / "whole", teacher, numbers, source, steps=steps, k=0)
    ends, shown = {}, {}
    for name, answers in {"live": teacher, "all logits": whole, "drawn": top}.items():
        temperature = Learned(2.0, strength=1.0)
        loss = from_teacher(answers, temperature)
        batches = _batches(numbers) if answers is teacher else Cached(_batches(numbers), answers)
        model, _ = _fit(loss, batches, total=steps, temperature=temperature)
        ends[name], shown[name] = float(model.temperature().detach()), loss.seen()["logits"]
    print("\nends", ends, "shown", shown)
    assert abs(ends["live"] - 2.0) > 0.1
    for name in ("all logits", "drawn"):
        assert ends[name] == pytest.approx(ends["live"], rel=0.02)
        assert shown[name] == pytest.approx(shown["live"], rel=0.05)


def test_a_temperature_that_cannot_be_learned_soundly_is_refused_before_training(
    tmp_path, teacher, numbers, source
):
    one = _make(tmp_path / "one", teacher, numbers, source, temperatures=(2.0,))
    three = _make(tmp_path / "three", teacher, numbers, source, temperatures=(2.0, 1.0, 4.0))
    full = _make(tmp_path / "full", teacher, numbers, source, k=0)
    for cache, temperature, message in (
        (
            one,
            Learned(2.0),
            r"start = 2 .* \(2.0,\): make it with temperatures=\(start, lowest, highest\)",
        ),
        (three, Learned(5.0, anchor=2.0), "start = 5 of a learned one"),
        (three, Learned(2.0, anchor=0.5), "anchor = 0.5 of a learned one"),
        (three, Adversarial(2.0, total=9, low=0.5, high=4.0), "low = 0.5 of a learned one"),
        (three, Adversarial(2.0, total=9, low=1.0, high=8.0), "high = 8 of a learned one"),
    ):
        with pytest.raises(ValueError, match=message):
            from_teacher(cache, temperature)
        from_teacher(full, temperature)
    from_teacher(three, Adversarial(2.0, total=9, low=1.0, high=4.0))
    for tail in ("spread", "bucket", "none"):
        with pytest.raises(ValueError, match=f"tail = '{tail}': its shape is not the teacher's"):
            from_teacher(three, Learned(2.0), tail=tail)
    for answers in (teacher, three):
        with pytest.raises(ValueError, match="'soft_ce': it holds the teacher's entropy"):
            from_teacher(answers, Learned(2.0), divergence="soft_ce")


def test_a_cache_of_the_older_form_is_named_and_made_again(
    tmp_path, teacher, numbers, source, capsys
):
    _make(tmp_path / "new", teacher, numbers, source)
    old, full = tmp_path / "old", tmp_path / "full"
    for folder, k in ((old, K), (full, 0)):
        _make(folder, teacher, numbers, source, k=k)
        manifest = files.read_json(folder / "manifest.json")
        manifest["about"].pop("form", None)
        files.write_checked_json(
            folder / "manifest.json", {n: x for n, x in manifest.items() if n != "sha256"}
        )
    assert Cache(full).tokens  # all logits are what they were
    with pytest.raises(
        CacheError, match="without the tail's entropy .* make sets it aside and makes it again"
    ):
        Cache(old)
    _make(old, teacher, numbers, source)
    assert "is set aside as" in capsys.readouterr().out
    for aside in old.glob("damaged-*"):
        aside.unlink()
    assert _digest(old) == _digest(tmp_path / "new")


def test_the_mean_of_what_the_teacher_said(tmp_path, teacher, numbers, source):
    """Over the rows of the first shard's batches: the tail is spread by it."""
    cache = _make(tmp_path, teacher, numbers, source, shard_rows=8)
    batches = _batches(numbers)
    ids = torch.cat([next(batches)["input_ids"] for _ in range(2)])
    with torch.no_grad():
        mean = teacher(ids).logits[:, :-1].double().softmax(-1).mean((0, 1))
    torch.testing.assert_close(cache.prior.double().exp(), mean, rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------- what can go wrong on the way


def _digest(folder) -> dict:
    return {
        f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir() if f.suffix
    }


def test_a_maker_killed_anywhere_goes_on_and_ends_with_the_same_files(
    tmp_path, teacher, numbers, source
):
    straight = _make(tmp_path / "straight", teacher, numbers, source)
    # before, while and after a shard is written
    calls = [(files, "flush"), (files, "sha256"), (teacher_cache, "save_file")]
    for attempt in range(6):
        pid = os.fork()
        if pid == 0:
            left = [attempt % 4 + 1]
            module, name = calls[attempt % 3]
            real = getattr(module, name)

            def dying(*args, real=real, left=left):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args)

            setattr(module, name, dying)
            _make(tmp_path / "killed", teacher, numbers, source)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if attempt == 0:
            assert os.WIFSIGNALED(status)
            with pytest.raises(CacheError, match="not finished|nothing was made"):
                Cache(tmp_path / "killed")
    asked = []
    hook = teacher.register_forward_hook(lambda *_: asked.append(1))
    inner = teacher.model.register_forward_hook(lambda *_: asked.append(1))
    done = _make(tmp_path / "killed", teacher, numbers, source)
    again = len(asked)
    _make(tmp_path / "killed", teacher, numbers, source)
    hook.remove()
    inner.remove()
    assert len(asked) == again <= 3  # most was there; of a finished one nothing is asked again
    assert (
        _digest(tmp_path / "killed") == _digest(tmp_path / "straight")
        and done.tokens == straight.tokens
    )


def test_whatever_differs_is_refused_with_the_reason(tmp_path, teacher, numbers, source):
    cache = _make(tmp_path, teacher, numbers, source)
    other = models.as_teacher(models.tiny(V, hidden=48, layers=2, heads=2, seed=8))
    for part, changed in (
        ("teacher", teacher_cache.source(other, Tokenizer(), numbers)),
        ("tokenizer", teacher_cache.source(teacher, Tokenizer("more"), numbers)),
        ("data", teacher_cache.source(teacher, Tokenizer(), numbers + 1)),
    ):
        with pytest.raises(
            CacheError, match=f"{part} is '{source[part]}' there and '{changed[part]}' in this run"
        ):
            Cache(tmp_path, source=changed)
        with pytest.raises(CacheError, match=f"{part} is"):
            _make(tmp_path, teacher, numbers, changed)
    with pytest.raises(CacheError, match="k is 16 there and 8 in this run"):
        _make(tmp_path, teacher, numbers, source, k=8)
    # without the teacher at hand
    assert Cache(tmp_path, source={"tokenizer": source["tokenizer"]}).k == K
    with pytest.raises(CacheError, match="new epoch cuts other rows"):
        cache(next(_batches(numbers, seed=1))["input_ids"])
    with pytest.raises(CacheError, match="nothing was made there"):
        Cache(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
    one = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = one.read_bytes()
    one.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CacheError, match="shard-00001.safetensors is damaged"):
        Cache(tmp_path)
    one.unlink()
    with pytest.raises(CacheError, match="shard-00001.safetensors cannot be read"):
        Cache(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CacheError, match="manifest.json is damaged"):
        Cache(tmp_path)


@pytest.mark.parametrize(
    "file", ["shard-00000.safetensors", "shard-00001.safetensors", "manifest.json"]
)
@pytest.mark.parametrize("how", ["one bit", "half", "gone"])
def test_what_is_damaged_is_set_aside_and_made_again(
    tmp_path, teacher, numbers, source, file, how, capsys
):
    _make(tmp_path / "straight", teacher, numbers, source)
    _make(tmp_path / "hurt", teacher, numbers, source)
    path = tmp_path / "hurt" / file
    whole = path.read_bytes()
    middle = len(whole) // 2
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(
            whole[:middle]
            + (bytes([whole[middle] ^ 1]) + whole[middle + 1 :] if how == "one bit" else b"")
        )
    _make(tmp_path / "hurt", teacher, numbers, source)
    assert ("is set aside as" in capsys.readouterr().out) == (
        file != "manifest.json" or how != "gone"
    )
    for aside in (tmp_path / "hurt").glob("damaged-*"):
        aside.unlink()
    assert _digest(tmp_path / "hurt") == _digest(tmp_path / "straight")


def test_each_of_300_flipped_bits_is_noticed(tmp_path, teacher, numbers, source):
    _make(tmp_path, teacher, numbers, source)
    manifest = files.read_json(tmp_path / "manifest.json")
    for file in ("shard-00000.safetensors", "shard-00001.safetensors", "manifest.json"):
        for _ in flips(tmp_path / file):
            try:
                Cache(tmp_path, source=source)
                assert file == "manifest.json" and files.read_json(tmp_path / file) == manifest
            except CacheError:
                pass


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["shards"][0].update(name="../outside.safetensors"),
        lambda m: m["shards"][0].update(name="shard-00001.safetensors"),
        lambda m: m["shards"][0].pop("name"),
        lambda m: m.update(shards={}),
        lambda m: m.update(shards=[1]),
        lambda m: m.update(about=[]),
        lambda m: m.pop("about"),
        lambda m: m.pop("done"),
        lambda m: m["about"].pop("k"),
    ],
)
def test_a_manifest_that_says_nonsense_is_refused(tmp_path, teacher, numbers, source, change):
    _make(tmp_path, teacher, numbers, source)
    manifest = files.read_json(tmp_path / "manifest.json")
    del manifest["sha256"]
    change(manifest)
    files.write(
        tmp_path / "manifest.json", files.to_json(manifest | {"sha256": files.digest(manifest)})
    )
    with pytest.raises(CacheError, match="is damaged"):
        Cache(tmp_path)


def test_one_changed_weight_changes_the_hash(teacher, numbers, source):
    weight = teacher.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        kept = float(weight[-1, -1])
        weight[-1, -1] += 1e-6
        assert teacher_cache.source(teacher, Tokenizer(), numbers)["teacher"] != source["teacher"]
        weight[-1, -1] = kept
    assert teacher_cache.source(teacher, Tokenizer(), numbers) == source


def test_bad_arguments_are_refused(tmp_path, teacher, numbers, source):
    for wrong in (
        {"k": V},
        {"k": -1},
        {"steps": 0},
        {"temperatures": ()},
        {"temperatures": (1.0, 0.0)},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            _make(tmp_path, teacher, numbers, source, **wrong)
    with pytest.raises(ValueError, match="training mode"):
        _make(tmp_path, _student(), numbers, source)
    assert not list(tmp_path.iterdir())
    cache = _make(tmp_path, teacher, numbers, source)
    with pytest.raises(ValueError, match="train on teacher_cache.Cached"):
        from_teacher(cache)(_student(), next(_batches(numbers)))


def test_two_makers_do_not_meet(tmp_path, teacher, numbers, source):
    lock = files.claim(tmp_path)
    with pytest.raises(CacheError, match="another process is making it"):
        _make(tmp_path, teacher, numbers, source)
    os.close(lock)
    assert _make(tmp_path, teacher, numbers, source).k == K


def test_a_full_disk_leaves_whole_shards_and_one_sentence(
    tmp_path, teacher, numbers, source, monkeypatch
):
    written = []

    def full_disk(tensors, path):
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        safetensors.torch.save_file(tensors, path)

    with (
        monkeypatch.context() as broken,
        pytest.raises(CacheError, match="not written: .* Intact: 2 shards, make goes"),
    ):
        broken.setattr(teacher_cache, "save_file", full_disk)
        _make(tmp_path, teacher, numbers, source)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "manifest.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    assert _make(tmp_path, teacher, numbers, source).tokens == 6 * 4 * (LENGTH - 1)


# ---------------------------------------------------------------- training from it


@pytest.mark.parametrize("exact", [True, False])
def test_training_from_a_full_cache_equals_training_with_the_teacher(
    tmp_path, teacher, numbers, source, exact
):
    steps = 40
    cache = _make(tmp_path, teacher, numbers, source, k=0, exact=exact, steps=steps)
    options = dict(temperature=2.0, ce=0.3)
    _, live = _fit(from_teacher(teacher, **options), _batches(numbers), total=steps)
    _, ours = _fit(from_teacher(cache, **options), Cached(_batches(numbers), cache), total=steps)
    apart = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(live, ours)]
    kept = "fp32" if exact else "fp16"
    print(
        f"\nfull cache in {kept}: losses differ by {apart[0]:.1e} of their value at first, at most {max(apart):.1e}"
    )
    assert live[-1]["loss"] < 0.8 * live[0]["loss"]
    assert apart[0] < (1e-6 if exact else 1e-5) and max(apart) < (1e-6 if exact else 1e-3)


def test_a_run_from_the_cache_resumes_to_the_bit(tmp_path, teacher, numbers, source):
    """With a learned temperature, stopped in the middle of the rows."""
    cache = _make(
        tmp_path / "cache", teacher, numbers, source, steps=14, temperatures=(1.0, 2.0, 4.0)
    )

    def run(total, folder):
        made = Learned(3.0, anchor=2.0)
        batches = Cached(_batches(numbers), cache)
        loss = from_teacher(Cache(cache.folder, source=source), temperature=made, ce=0.2)
        return _fit(
            loss,
            batches,
            total=total,
            temperature=made,
            checkpoints=Checkpoints(folder),
            accumulate=2,
        )

    straight, records = run(7, None)
    run(4, tmp_path / "run")
    resumed, again = run(7, tmp_path / "run")
    assert [r["loss"] for r in again] == [r["loss"] for r in records]
    for (name, a), b in zip(straight.state_dict().items(), resumed.state_dict().values()):
        assert torch.equal(a, b), name
    assert abs(straight.temperature().item() - 3.0) > 0.01


def test_making_leaves_the_batches_where_they_stood(tmp_path, teacher, numbers, source):
    batches = _batches(numbers)
    next(batches)
    before = batches.state_dict()
    cache = teacher_cache.make(
        tmp_path, teacher, batches, steps=3, source=source, k=4, machine=FP32
    )
    assert batches.state_dict() == before
    Cached(batches, cache).__next__()


@pytest.mark.slow
@pytest.mark.base
def test_students_of_the_base_model(tmp_path):
    """The base model teaches one with a quarter of its parameters, at equal steps: speed from the
    cache, quality over three seeds and from what is kept. Run with -s for the table.
    """
    made, steps, rows, length = base_model.load(), 48, 4, 128
    teacher = models.as_teacher(made.model.to("cpu"))
    stream = text.encode(text.documents("prose"), made.tokenizer)
    kept_back = text.encode(text.documents("prose", "validation"), made.tokenizer)
    held_out = text.fixed_rows(kept_back, length=length, limit=32)

    def rows_of() -> text.Batches:
        return text.Batches(stream, rows=rows, length=length)

    options = dict(
        steps=steps, source=teacher_cache.source(teacher, made.tokenizer, stream), machine=FP32
    )
    full = teacher_cache.make(tmp_path / "full", teacher, rows_of(), k=0, **options)
    top = teacher_cache.make(tmp_path / "top", teacher, rows_of(), k=32, **options)
    print(
        f"\na token: all logits {full.bytes_per_token:.0f} bytes, the 32 largest {top.bytes_per_token:.1f}"
    )
    assert top.bytes_per_token < 150

    def student(loss, cache=None, seed: int = 0) -> dict:
        model = models.tiny(len(made.tokenizer), hidden=128, layers=2, heads=2, seed=seed)
        batches = Cached(rows_of(), cache) if cache else rows_of()
        started = time.process_time()
        schedule = train.cosine(steps, warmup=6)
        optimizer = train.adamw(model, lr=4e-3)
        records = train.fit(
            model, batches, optimizer, total=steps, loss=loss, machine=FP32, schedule=schedule
        )
        seconds = time.process_time() - started
        assert models.count(model)["all"] < 0.26 * models.count(teacher)["all"]
        result = train.evaluate(model, held_out, machine=FP32)["loss"]
        return {
            "loss": result,
            "ms": 1e3 * seconds / steps,
            "trained": [r["loss"] for r in records],
        }

    runs = {}
    for name, loss, cache in (
        ("live", from_teacher(teacher, 1.0), None),
        ("full", from_teacher(full, 1.0), full),
        ("drawn", from_teacher(top, 1.0), top),
        ("spread", from_teacher(top, 1.0, tail="spread"), top),
        ("bucket", from_teacher(top, 1.0, tail="bucket"), top),
        ("none", from_teacher(top, 1.0, tail="none"), top),
        ("live and labels", from_teacher(teacher, 1.0, ce=0.5), None),
        ("drawn and labels", from_teacher(top, 1.0, ce=0.5), top),
        *((f"labels, seed {seed}", losses.causal_lm, None) for seed in range(3)),
        *((f"full, seed {seed}", from_teacher(full, 1.0), full) for seed in (1, 2)),
    ):
        seed = int(name[-1]) if name[-1].isdigit() else 0
        runs[name] = student(loss, cache, seed)
        print(
            f"{name:20} held-out loss {runs[name]['loss']:.4f}   {runs[name]['ms']:.1f} ms a step"
        )
    runs["full, seed 0"] = runs["full"]
    for seed in range(3):
        assert runs[f"full, seed {seed}"]["loss"] < runs[f"labels, seed {seed}"]["loss"] - 0.05
    # rounding alone makes a percent
    assert runs["full"]["loss"] == pytest.approx(runs["live"]["loss"], rel=0.03)
    for drawn, live in (("drawn", "live"), ("drawn and labels", "live and labels")):
        assert runs[drawn]["loss"] < 1.02 * runs[live]["loss"]
    # which of the two is better depends on the base model
    worse = max(runs["drawn"]["loss"], runs["spread"]["loss"])
    assert worse < runs["bucket"]["loss"]
    assert runs["full"]["trained"][0] == pytest.approx(runs["live"]["trained"][0], rel=1e-5)  # fp16
    assert (
        runs["live"]["ms"] > 1.15 * runs["full"]["ms"]
        and runs["live"]["ms"] > 1.15 * runs["drawn"]["ms"]
    )
