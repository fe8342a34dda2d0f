"""What the teacher said, on disk: its largest log-probabilities per token, and how much it gave to all others.

A teacher that never changes says the same about the same row in every epoch and every experiment, so one forward
pass will do. All logits would be 0.1 to 0.3 MB a token for real vocabularies. Kept are the k largest as fp16 with their
indices (uint16 where they fit), the *tail bucket*, which is the log-sum-exp of the others, a few tokens drawn from it,
and once for all tokens the teacher's mean probabilities. nblib/methods/divergences.py says what is made of that.

The tail depends on the temperature, and k values do not say how. It is stored at a few; at infinite temperature it is
log(V - k) in any case. Between these a polynomial in 1/T is near, at the stored ones it is exact.

A row is found by the hash of its token ids, which is all that the teacher's answer depends on: shuffling, another
batch size, labels masked otherwise, all still find it. The manifest names teacher, tokenizer, data, k, temperatures
and precision by value or hash, and every shard with its SHA-256. It is checked on opening, each shard is written under
a temporary name and renamed, and a maker that was killed goes on after its last whole shard.

Footgun: `text.Batches` cuts its rows elsewhere in every epoch, so a second epoch asks for rows no one has cached. Make
the cache for all steps, or train on `Repeated(batches, n)`, the first n batches again and again.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from nblib import losses, runtime
from nblib.shards import ShardError, Shards

PRIOR = "prior"  # mean log-probability of each token (V,), over the rows of the first shard, where it stands
VALUES, INDICES, TAILS, DRAWN = KEYS = ("teacher_values", "teacher_indices", "teacher_tails", "teacher_drawn")
POSITIONS = 512  # positions whose teacher logits exist at a time


def source(teacher: nn.Module, tokenizer, data: Tensor) -> dict[str, str]:
    """What a cache is of: hashes of the teacher's weights and config, of the tokenizer and of the token stream."""
    config = {k: v for k, v in teacher.config.to_diff_dict().items() if k not in ("transformers_version", "dtype")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in teacher.state_dict().items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    words = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.all_special_tokens])
    return {
        "teacher": digest.hexdigest()[:16],
        "tokenizer": hashlib.sha256(words.encode()).hexdigest()[:16],
        "data": hashlib.sha256(data.cpu().contiguous().numpy()).hexdigest()[:16],
    }


@torch.no_grad()
def make(
    folder: Path,
    teacher: nn.Module,
    batches: Iterator[dict],
    *,
    steps: int,
    source: dict[str, str],
    k: int = 32,
    draws: int | None = None,
    temperatures: tuple[float, ...] = (1.0,),
    machine: runtime.Machine | None = None,
    shard_rows: int = 256,
    exact: bool = False,
) -> "Cache":
    """Cache the rows of the next `steps` micro-batches, or finish that after a kill, and open it. The batches are put
    back to where they stood, so that training can go over the same ones.

    k             log-probabilities kept per token, 0 for all (then without indices and tail)
    draws         tokens drawn from the tail; None is 4 where an index takes two bytes, else 1
    temperatures  at which the tail is exact, and drawn from at the first; the loss may use any from the lowest up
    exact         values in fp32: twice the size, to compare with the live teacher to the last digits
    """
    machine = machine or runtime.pick()
    vocabulary = losses.backbone_and_head(teacher)[1].shape[0]
    if teacher.training:
        raise ValueError("the teacher is in training mode, its dropout would be cached: models.as_teacher(teacher)")
    if not 0 <= k < vocabulary:
        raise ValueError(f"k = {k}: must be from 0 (all) to below the vocabulary of {vocabulary}")
    if steps < 1 or shard_rows < 1:
        raise ValueError(f"steps = {steps}, shard_rows = {shard_rows}: must be at least 1")
    if not temperatures or min(temperatures) <= 0 or len(set(temperatures)) < len(temperatures):
        raise ValueError(f"temperatures = {temperatures}: must be different numbers above 0")
    draws = (4 if vocabulary <= 2**16 else 1) if draws is None else draws
    if draws < 0:
        raise ValueError(f"draws = {draws}: must be at least 0")
    about = {**source, "k": k, "draws": draws if k else 0, "temperatures": list(temperatures), "vocabulary": vocabulary}
    about |= {"precision": machine.precision, "values": "fp32" if exact else "fp16"}
    first, waiting, mean = batches.state_dict(), [], torch.zeros(vocabulary if k else 0, dtype=torch.float64)

    def write() -> None:
        tensors = {name: torch.stack([row[name] for row in waiting]) for name in waiting[0]}
        if k and not shards.shards:
            tensors[PRIOR] = (mean / mean.sum()).log().float()
        shards.add(tensors, rows=len(waiting))
        waiting.clear()

    with Shards(folder, about).maker():
        shards = Shards(folder, about)  # as the maker before us left it
        shards.expect(about)
        known = {key for tensors in shards.opened() for key in _keys(tensors)}
        # From the start, whatever is there: rows that are known are passed over.
        for batch in islice(batches, steps if shards.done < steps else 0):
            ids = batch["input_ids"]
            new = {key: i for i, key in enumerate(map(row_key, ids)) if key not in known}
            if not new:
                continue
            answers, total = _ask(teacher, ids.to(machine.device), k, draws, temperatures, machine, exact)
            mean += total.cpu() if k else 0
            for key, i in new.items():
                row = {name: tensor[i].cpu() for name, tensor in answers.items()}
                waiting.append({"keys": torch.frombuffer(bytearray(key), dtype=torch.uint8)} | row)
                if len(waiting) == shard_rows:
                    write()
            known |= new.keys()
        if waiting:
            write()
        shards.note(max(steps, shards.done))
    batches.load_state_dict(first)
    return Cache(folder, source=source)


def row_key(ids: Tensor) -> bytes:
    """16 bytes for one row of token ids (T,)."""
    return hashlib.blake2b(ids.cpu().to(torch.int64).contiguous().numpy(), digest_size=16).digest()


def _ask(teacher: nn.Module, ids: Tensor, k: int, draws: int, temperatures, machine, exact: bool) -> tuple:
    """The answers to rows (B, T), at T - 1 positions each: the last predicts a token that is not in the row. And the
    sum of all probabilities (V,)."""
    with machine.autocast():
        hidden, weight = losses.hidden_states(teacher, {"input_ids": ids})
    B, T, D = hidden.shape
    kept, weight = torch.float32 if exact else torch.float16, weight.to(hidden.dtype)
    index = torch.uint16 if len(weight) <= 2**16 else torch.int32
    total = torch.zeros(len(weight), dtype=torch.float64, device=ids.device)
    parts: list[tuple[Tensor, ...]] = []
    for row, states in zip(ids, hidden):
        draw = torch.Generator().manual_seed(int.from_bytes(row_key(row)[:7]))  # the same whenever this row is asked
        for h in states[:-1].split(POSITIONS):
            said = (h @ weight.T).float().log_softmax(1)  # (n, V)
            if k == 0:
                parts.append((said.to(kept),))
                continue
            total += said.exp().sum(0)
            top, at = said.topk(k, dim=1)
            said.scatter_(1, at, -torch.inf)
            tails = torch.stack([(said / t).logsumexp(1) for t in temperatures], 1)  # (n, temperatures)
            sums = (said / temperatures[0] - tails[:, :1]).exp_().cumsum(1)
            spots = torch.rand(len(h), draws, generator=draw).to(ids.device) * sums[:, -1:]
            drawn = torch.searchsorted(sums, spots, right=True).clamp_max_(len(weight) - 1)
            parts.append((top.to(kept), at.to(index), tails.to(kept), drawn.to(index)))
    return {name: torch.cat(some).view(B, T - 1, some[0].shape[1]) for name, some in zip(KEYS, zip(*parts))}, total


class Cache:
    """An opened cache: verified, memory-mapped, and asked by rows of token ids.

    `source` may hold only some of the hashes: whoever trains from the cache alone has no teacher to hash.
    """

    def __init__(self, folder: Path, *, source: dict[str, str] | None = None):
        shards = Shards(folder)
        shards.expect(source or {})
        if not shards.done:
            raise ShardError(f"{folder} is not finished: call make again with the same arguments, it goes on")
        self.folder, self.about = shards.folder, shards.about
        self.k, self.draws, self.vocabulary = (self.about[name] for name in ("k", "draws", "vocabulary"))
        self.temperatures = tuple(self.about["temperatures"])
        self._found: dict[bytes, tuple[dict[str, Tensor], int]] = {}
        self.tokens, self.prior = 0, None
        for tensors in shards.opened():
            self.prior = tensors.pop(PRIOR, self.prior)
            self._found |= {key: (tensors, i) for i, key in enumerate(_keys(tensors))}
            self.tokens += tensors[VALUES].shape[:2].numel()
        self.bytes = shards.bytes()

    @property
    def bytes_per_token(self) -> float:
        """Per predicted token, besides the mean probabilities: 4 V bytes once."""
        return (self.bytes - (self.prior.nbytes if self.k else 0)) / self.tokens

    def __call__(self, ids: Tensor) -> dict[str, Tensor]:
        """What the teacher said about rows (B, T): values (B, T - 1, k), indices and tails beside them."""
        try:
            found = [self._found[row_key(row)] for row in ids]
        except KeyError:
            raise ShardError(
                f"a row of {ids.shape[1]} tokens is not among the {len(self._found)} of {self.folder}: it was made for "
                "fewer steps, another seed or another length (a new epoch cuts other rows: use Repeated)"
            ) from None
        names = [name for name in KEYS if name in found[0][0]]
        got = {name: torch.stack([tensors[name][i] for tensors, i in found]) for name in names}
        return {name: t.to(torch.int64) if name in (INDICES, DRAWN) else t for name, t in got.items()}

    def tail_weights(self, temperature: float) -> tuple[list[float], list[float]]:
        """The tail's log-sum-exp at a temperature is sum_i w_i (tail at knot i): w, and its derivative by log(1/T).

        The knots are 1/T = 0, where the tail is log(V - k), and the stored ones; Lagrange's polynomial through them.
        """
        knots, at = [0.0, *(1 / t for t in self.temperatures)], 1 / temperature
        if at > max(knots) * (1 + 1e-6):
            raise ValueError(
                f"temperature = {temperature:.4g}: the cache knows its tail at {self.temperatures}, and from the "
                f"lowest of these up; make it with temperatures=({temperature:.4g}, ...)"
            )
        weights, slopes = [], []
        for i, own in enumerate(knots):
            others = [knot for j, knot in enumerate(knots) if j != i]
            factors = [(at - knot) / (own - knot) for knot in others]
            weights.append(math.prod(factors))
            rest = [math.prod(factors[:m] + factors[m + 1 :]) / (own - knot) for m, knot in enumerate(others)]
            slopes.append(at * sum(rest))
        return weights, slopes


class Cached:
    """Batches together with what the teacher said about them, for `distill.Distillation(cache)`.

    The position is that of the batches inside, so a run resumes as it does without a cache.
    """

    def __init__(self, batches: Iterator[dict], cache: Cache):
        self.batches, self.cache = batches, cache

    def __iter__(self) -> "Cached":
        return self

    def __next__(self) -> dict[str, Tensor]:
        batch = next(self.batches)
        return batch | self.cache(batch["input_ids"])

    def state_dict(self) -> dict:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.batches.load_state_dict(state)


class Repeated:
    """The next n batches again and again, in the same order: the rows of a cache are those of one pass."""

    def __init__(self, batches: Iterator[dict], n: int):
        if n < 1:
            raise ValueError(f"n = {n}: must be at least 1")
        self.batches, self.n, self.at, self.first = batches, n, 0, batches.state_dict()

    def __iter__(self) -> "Repeated":
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self.at == self.n:
            self.at = 0
            self.batches.load_state_dict(self.first)
        self.at += 1
        return next(self.batches)

    def state_dict(self) -> dict:
        return {"at": self.at, "first": self.first, "inside": self.batches.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.at, self.first = state["at"], state["first"]
        self.batches.load_state_dict(state["inside"])


def _keys(tensors: dict[str, Tensor]) -> list[bytes]:
    return [bytes(row) for row in tensors["keys"].numpy()]
