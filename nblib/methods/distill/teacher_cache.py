"""A teacher's answers on disk: its largest log-probabilities per token, and how much it gave to all
others.

A teacher that never changes gives the same answer to the same row in every epoch and every
experiment, so one forward pass will do. All logits would be 0.1 to 0.3 MB a token for real
vocabularies. Stored are the k largest as fp16 with their indices (uint16 where they fit). Beside
them stand the *tail bucket*, which is the log-sum-exp of the others, and its entropy, which the
value of a loss needs; and a few tokens drawn from it with their log-probabilities, by which a draw
counts at another temperature than its own. The teacher's mean probabilities are stored once for all
tokens. nblib/methods/distill/divergences.py computes a loss of that.

The tail depends on the temperature, and k values do not determine how. It and its entropy are
stored at a few; at infinite temperature both are log(V - k). Between these a polynomial in 1/T is
near, at the stored ones it is exact. The derivative of the tail by log(1/T) is the tail less its
entropy, so that of a learned T is exact too. A row is found by the hash of its token ids, in any
order, batch size and masking of labels.

The folder holds shards of rows and `manifest.json`. That names teacher, tokenizer, data, k,
temperatures and precision by value or hash, and every shard with its SHA-256. All of it is checked
on opening. A shard enters the manifest when it is whole and on disk. So the folder holds a true
prefix of the work at any instant, and a maker that was killed goes on after the last shard. What is
opened is mapped, not read: it costs no memory until its rows are asked for.

Footgun: `text.Batches` cuts its rows elsewhere in every epoch, so a second epoch asks for rows no
one has cached. Make the cache for all steps. And never edit a cache in place: its tensors are the
files.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nblib import checkpoint, files, losses, runtime
from nblib.losses import Batch

MANIFEST = "manifest.json"
# mean log-probability of each token (V,), over the rows of the first shard, where it stands
PRIOR = "prior"
VALUES, INDICES, TAILS, DRAWN = (
    "teacher_values",
    "teacher_indices",
    "teacher_tails",
    "teacher_drawn",
)
ENTROPIES, DRAWN_VALUES = "teacher_entropies", "teacher_drawn_values"
KEYS = (VALUES, INDICES, TAILS, DRAWN, ENTROPIES, DRAWN_VALUES)
# of what is stored beside the k largest: 1 had neither the tail's entropy nor the draws'
# log-probabilities
FORM = 2
POSITIONS = 512  # positions whose teacher logits exist at a time


class CacheError(RuntimeError):
    """The folder does not belong to this run, or is not what was written; the message says
    which.
    """


class Damaged(CacheError):
    """It is not what was written. `make` sets that part aside and makes it again."""


def source(teacher: nn.Module, tokenizer, data: Tensor) -> dict[str, str]:
    """Return what a cache is of: hashes of the teacher's weights and config, of the tokenizer and
    of the token stream.
    """
    config = {
        k: v
        for k, v in teacher.config.to_diff_dict().items()
        if k not in ("transformers_version", "dtype")
    }
    weights = checkpoint.fingerprint(teacher.state_dict(keep_vars=True).items())
    about = json.dumps([config, weights], sort_keys=True, default=str)
    words = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.all_special_tokens])
    return {
        "teacher": hashlib.sha256(about.encode()).hexdigest()[:16],
        "tokenizer": hashlib.sha256(words.encode()).hexdigest()[:16],
        "data": hashlib.sha256(data.cpu().contiguous().numpy()).hexdigest()[:16],
    }


def _check(
    teacher: nn.Module,
    vocabulary: int,
    k: int,
    steps: int,
    shard_rows: int,
    draws: int,
    temperatures: tuple[float, ...],
) -> None:
    """Raise ValueError for a teacher or a number of which no cache can be made."""
    if teacher.training:
        raise ValueError(
            "the teacher is in training mode, its dropout would be cached: "
            "models.as_teacher(teacher)"
        )
    if not 0 <= k < vocabulary:
        raise ValueError(f"k = {k}: must be from 0 (all) to below the vocabulary of {vocabulary}")
    if steps < 1 or shard_rows < 1 or draws < 0:
        raise ValueError(
            f"steps = {steps}, shard_rows = {shard_rows}, draws = {draws}: must be at least 1, "
            "1 and 0"
        )
    if not temperatures or min(temperatures) <= 0 or len(set(temperatures)) < len(temperatures):
        raise ValueError(f"temperatures = {temperatures}: must be different numbers above 0")


@torch.no_grad()
def make(
    folder: Path,
    teacher: nn.Module,
    batches: Iterator[Batch],
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
    """Cache the rows of the next `steps` micro-batches, or finish that after a kill, and open it.
    The batches are put back to where they stood, so that training can go over the same ones.

    k             log-probabilities stored per token, 0 for all (then without indices and tail)
    draws         tokens drawn from the tail; None is 4 where an index takes two bytes, else 1
    temperatures  at which the tail is exact; the first is that of the draws, so a learned
                  temperature should start there. The loss may use any from the lowest up
    exact         values in fp32: twice the size, to compare with the live teacher to the last
                  digits
    """
    machine = machine or runtime.pick()
    vocabulary = losses.backbone_and_head(teacher, needed=True)[1].shape[0]
    draws = (4 if vocabulary <= 2**16 else 1) if draws is None else draws
    _check(teacher, vocabulary, k, steps, shard_rows, draws, temperatures)
    about = {
        **source,
        "k": k,
        "draws": draws if k else 0,
        "temperatures": list(temperatures),
        "vocabulary": vocabulary,
    }
    about |= {"precision": machine.precision, "values": "fp32" if exact else "fp16"}
    about |= {"form": FORM} if k else {}
    start, mean = batches.state_dict(), torch.zeros(vocabulary if k else 0, dtype=torch.float64)
    waiting: list[dict[str, Tensor]] = []  # rows for the next shard

    def write() -> None:
        tensors = {name: torch.stack([row[name] for row in waiting]) for name in waiting[0]}
        if k and not shards.entries:
            tensors[PRIOR] = (mean / mean.sum()).log().float()
        shards.add(tensors, rows=len(waiting))
        waiting.clear()

    # one maker at a time; it goes with the process that holds it
    lock = files.claim(files.make_folder(Path(folder)))
    if lock is None:
        raise CacheError(f"{folder}: another process is making it; wait for it, then ask again")
    try:
        files.remove_partials(Path(folder))
        shards, known = _left(folder, about)
        # From the start, whatever is there: rows that are known are passed over.
        for batch in islice(batches, steps if shards.done < steps else 0):
            ids = batch["input_ids"]
            new = {key: i for i, key in enumerate(map(row_key, ids)) if key not in known}
            if not new:
                continue
            answers, total = _ask(
                teacher, ids.to(machine.device), k, draws, temperatures, machine, exact
            )
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
    finally:
        os.close(lock)
    batches.load_state_dict(start)
    return Cache(folder, source=source)


def row_key(ids: Tensor) -> bytes:
    """16 bytes for one row of token ids (T,)."""
    return hashlib.blake2b(ids.cpu().to(torch.int64).contiguous().numpy(), digest_size=16).digest()


def _keys(tensors: dict[str, Tensor]) -> list[bytes]:
    return [bytes(row) for row in tensors["keys"].numpy()]


def _ask(
    teacher: nn.Module, ids: Tensor, k: int, draws: int, temperatures, machine, exact: bool
) -> tuple:
    """Return the answers to rows (B, T), at T - 1 positions each: the last predicts a token that is
    not in the row. And the sum of all probabilities (V,).
    """
    with machine.autocast():
        hidden, weight = losses.hidden_states(teacher, {"input_ids": ids})
    B, T, D = hidden.shape
    dtype, weight = torch.float32 if exact else torch.float16, weight.to(hidden.dtype)
    index = torch.uint16 if len(weight) <= 2**16 else torch.int32
    total = torch.zeros(len(weight), dtype=torch.float64, device=ids.device)
    parts: list[tuple[Tensor, ...]] = []
    for row, states in zip(ids, hidden):
        # the same whenever this row is asked
        draw = torch.Generator().manual_seed(int.from_bytes(row_key(row)[:7]))
        for h in states[:-1].split(POSITIONS):
            log_p = (h @ weight.T).float().log_softmax(1)  # (n, V)
            if k == 0:
                parts.append((log_p.to(dtype),))
                continue
            total += log_p.exp().sum(0)
            top, indices = log_p.topk(k, dim=1)
            log_p.scatter_(1, indices, -torch.inf)
            # (n, temperatures)
            tails = torch.stack([(log_p / t).logsumexp(1) for t in temperatures], 1)
            sums = (log_p / temperatures[0] - tails[:, :1]).exp_().cumsum(1)
            # above 0
            spots = (1 - torch.rand(len(h), draws, generator=draw)).to(ids.device) * sums[:, -1:]
            drawn = torch.searchsorted(sums, spots).clamp_max_(len(weight) - 1)
            entropies = [
                torch.special.entr((log_p / t - tail[:, None]).exp_()).sum(1)
                for t, tail in zip(temperatures, tails.T)
            ]
            numbers = (top, tails, torch.stack(entropies, 1), log_p.gather(1, drawn))
            top, tails, entropies, values = (x.to(dtype) for x in numbers)
            parts.append((top, indices.to(index), tails, drawn.to(index), entropies, values))
    return {
        name: torch.cat(some).view(B, T - 1, some[0].shape[1])
        for name, some in zip(KEYS, zip(*parts))
    }, total


class _Shards:
    """The manifest of a folder: `about`, what the cache is of, in JSON types; an entry per shard;
    and `done`, the steps that are cached. `about` is what a new folder gets; without it the folder
    must exist.
    """

    def __init__(self, folder: Path, about: dict | None = None):
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).exists():
            if about is None:
                raise CacheError(f"{self.folder} holds no {MANIFEST}: nothing was made there")
            self.about, self.entries, self.done = about, [], 0
            return
        try:
            manifest = files.read_checked_json(self.folder / MANIFEST)
            self.about, self.entries, self.done = (
                manifest["about"],
                manifest["shards"],
                manifest["done"],
            )
            self.k, self.draws, self.vocabulary = (
                self.about[name] for name in ("k", "draws", "vocabulary")
            )
            self.temperatures = tuple(self.about["temperatures"])
            if self.k and self.about.get("form") != FORM:
                raise Damaged(
                    f"{self.folder} was made without the tail's entropy and the draws' "
                    "log-probabilities, so losses "
                    "and a learned temperature would be wrong: make sets it aside and makes it "
                    "again"
                )
            names = [_shard(number) for number in range(len(self.entries))]
            if (
                not isinstance(self.entries, list)
                or [entry["name"] for entry in self.entries] != names
            ):
                raise ValueError("it names files that are no shards of it")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(
                f"{self.folder / MANIFEST} is damaged: {type(error).__name__}: {error}"
            ) from None

    def expect(self, about: dict) -> None:
        """Refuse a folder that is about something else, with the first difference."""
        if wrong := [name for name, value in about.items() if self.about.get(name) != value]:
            name, others = wrong[0], f", and {len(wrong) - 1} more differ" if wrong[1:] else ""
            raise CacheError(
                f"{self.folder}: {name} is {self.about.get(name)!r} there and {about[name]!r} "
                f"in this run{others}; use "
                "another folder or make it anew"
            )

    def add(self, tensors: dict[str, Tensor], *, rows: int) -> None:
        name = _shard(len(self.entries))
        try:
            with files.replacing(self.folder / name) as partial:
                save_file(tensors, partial)
                entry = {"name": name, "sha256": files.sha256(partial), "rows": rows}
        except (OSError, SafetensorError) as error:
            raise CacheError(
                f"{name} not written: {error}. Intact: {len(self.entries)} shards, make goes on"
            ) from error
        self.entries.append(entry)
        self.note(self.done)

    def note(self, done: int) -> None:
        self.done = done
        files.write_checked_json(
            self.folder / MANIFEST, {"about": self.about, "shards": self.entries, "done": done}
        )

    def open(self, entry: dict) -> dict[str, Tensor]:
        """Return the tensors of a shard, memory-mapped, after its hash was checked."""
        path = self.folder / entry["name"]
        try:
            if files.sha256(path) != entry["sha256"]:
                raise Damaged(
                    f"{path} is damaged: it changed since it was written; make sets it aside "
                    "and makes it again"
                )
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise Damaged(f"{path} cannot be read: {error}") from error


def _left(folder: Path, about: dict) -> tuple[_Shards, set[bytes]]:
    """Return what the maker before us left, and the keys of its rows. The first damaged part is set
    aside, and from there on all is made again.
    """
    try:
        shards = _Shards(folder, about)
    except Damaged as error:
        files.set_aside(Path(folder) / MANIFEST, str(error))
        shards = _Shards(folder, about)
    shards.expect(about)
    known: set[bytes] = set()
    for number, entry in enumerate(shards.entries):
        try:
            known |= set(_keys(shards.open(entry)))
        except Damaged as error:
            files.set_aside(Path(folder) / entry["name"], str(error))
            shards.entries, shards.done = shards.entries[:number], 0
            break
    return shards, known


def _shard(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def widened(answer: Tensor) -> Tensor:
    """Return indices as torch wants them for indexing; values and tails as they are."""
    return answer if answer.is_floating_point() else answer.to(torch.int64)


class Cache:
    """An opened cache: verified, memory-mapped, and asked by rows of token ids.

    `source` may hold only some of the hashes: whoever trains from the cache alone has no teacher to
    hash.
    """

    def __init__(self, folder: Path, *, source: dict[str, str] | None = None):
        shards = _Shards(folder)
        shards.expect(source or {})
        if not shards.done:
            raise CacheError(
                f"{folder} is not finished: call make again with the same arguments, it goes on"
            )
        self.folder, self.about, self.temperatures = (
            shards.folder,
            shards.about,
            shards.temperatures,
        )
        self.k, self.draws, self.vocabulary = shards.k, shards.draws, shards.vocabulary
        # key -> its shard, its place there
        self._rows: dict[bytes, tuple[dict[str, Tensor], int]] = {}
        self.tokens, self.prior = 0, None
        for tensors in map(shards.open, shards.entries):
            self.prior = tensors.pop(PRIOR, self.prior)
            self._rows |= {key: (tensors, i) for i, key in enumerate(_keys(tensors))}
            self.tokens += tensors[VALUES].shape[:2].numel()
        self.bytes = sum((self.folder / entry["name"]).stat().st_size for entry in shards.entries)

    @property
    def bytes_per_token(self) -> float:
        """Per predicted token, besides the mean probabilities: 4 V bytes once."""
        return (self.bytes - (self.prior.nbytes if self.k else 0)) / self.tokens

    def __call__(self, ids: Tensor, *, narrow: bool = False) -> dict[str, Tensor]:
        """Return the teacher's answers to rows (B, T): values (B, T - 1, k), indices and tails
        beside them. `narrow` leaves the indices in the width they are stored in, a quarter of the
        bytes to copy to a card.
        """
        try:
            rows = [self._rows[row_key(row)] for row in ids]
        except KeyError:
            raise CacheError(
                f"a row of {ids.shape[1]} tokens is not among the {len(self._rows)} of "
                f"{self.folder}: it was made for "
                "fewer steps, another seed or another length (a new epoch cuts other rows: "
                "make it for all steps)"
            ) from None
        names = [name for name in KEYS if name in rows[0][0]]
        answers = {name: torch.stack([tensors[name][i] for tensors, i in rows]) for name in names}
        return answers if narrow else {name: widened(tensor) for name, tensor in answers.items()}

    def tail_weights(self, temperature: float | Tensor) -> list:
        """Return the tail's log-sum-exp at a temperature is sum_i w_i (tail at knot i), and so is
        its entropy: w.

        The knots are 1/T = 0, where both are log(V - k), and the stored ones; Lagrange's polynomial
        through them.
        """
        # on its device
        temperature = temperature.double() if isinstance(temperature, Tensor) else temperature
        knots, point = [0.0, *(1 / t for t in self.temperatures)], 1 / temperature
        beyond = point > max(knots) * (1 + 1e-6)
        # to ask a card would wait for it: a loss of nan, which the loop refuses
        if isinstance(point, Tensor):
            point = point.masked_fill(beyond, math.nan)
        elif beyond:
            raise ValueError(
                f"temperature = {temperature:.4g}: the cache knows its tail at "
                f"{self.temperatures}, and from the "
                f"lowest of these up; make it with temperatures=({temperature:.4g}, ...)"
            )
        return [
            math.prod((point - knot) / (own - knot) for j, knot in enumerate(knots) if j != i)
            for i, own in enumerate(knots)
        ]


class Cached:
    """Batches together with the teacher's answers to them, for an objective whose teacher is the
    cache.

    The position is that of the batches inside, so a run resumes as it does without a cache.
    """

    def __init__(self, batches: Iterator[Batch], cache: Cache):
        self.batches, self.cache = batches, cache
        self.state_dict, self.load_state_dict = batches.state_dict, batches.load_state_dict

    def __iter__(self) -> "Cached":
        return self

    def __next__(self) -> Batch:
        batch = next(self.batches)
        return batch | self.cache(batch["input_ids"], narrow=True)
