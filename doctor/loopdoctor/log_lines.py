"""The numbers and the known messages in what a training run has printed.

Every program prints its loss in its own way, and nearly all of them write a name and a number
behind it: `{'loss': 2.31, 'grad_norm': 1.2}`, `iter 100: loss 3.21`, `Epoch [1/5], Step 10, Loss:
2.3`, `loss=2.3` at the end of a progress bar. So there is no parser for each form. A piece of text
is searched for the few names that matter, and a name that is met again begins the next entry.

    taken = log_lines.read(Path("train.log"))
    taken.entries[0].loss, taken.messages["inputs"].line

The file is read in blocks, and at most 2 * MOST entries are kept. When there are as many, every
second part of the text is left out from there on, with the entries that such parts have given, so a
log of any size takes the same memory and not much more time. A part where the first NaN stands is
read all the same, and so are the end of the file, where the last run may be, and all messages.

Footgun: steps that fall back to where they began are a second run in the same file, unless the
epoch rises with them: many programs count the steps of each epoch anew. A program that prints no
epoch looks like several runs, and only its last epoch is judged. The report says so.
"""

import codecs
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = 1 << 20  # bytes read at a time
LONGEST = 1 << 14  # characters of a line; a longer one is cut
PART = 1 << 12  # characters that are read or left out together
TAIL = 1 << 18  # bytes at the end of a file, of which nothing is left out
MOST = 4_000  # entries kept of a run, at most twice as many
TRIED = 2_000_000, 8_000_000  # characters searched, where many and where few entries were found
TURNS = 200  # parts that are read because numbers stop or begin to be finite in them
HISTORY = '"log_history"'  # the key of the entries in a trainer_state.json
WRAPPED = 2_000  # characters of a dict that goes on in the next lines

ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]")
NUMBER = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d*)?(?:e[-+]?\d+)?"
    r"|\.\d+(?:e[-+]?\d+)?|(?:nan|inf(?:inity)?)(?![a-z_]))"
)
NUMERIC = re.compile(NUMBER)
NAME = re.compile(
    r"loss|grad[ _]?norm|gradient[ _]?norm|gnorm|norm|learning[ "
    r"_]?rate|lr(?:-[a-z]+)?|step|iteration|iter|epoch"
    r"|num_updates"
)  # in lower case
KINDS = {"lo": "loss", "gr": "norm", "gn": "norm", "no": "norm", "le": "rate", "lr": "rate"}
KINDS |= {"st": "step", "it": "step", "nu": "step", "ep": "epoch"}
VALUE = re.compile(
    r"[\"'`*]{0,3}\s*[:=]?\s*[\"'`*(\[]{0,3}(?:tensor\(|array\(|np\.float\d+\()?\s*(" + NUMBER + ")"
)
BEFORE = re.compile(r"([a-z0-9]+)([_/. -])$")  # the word before a name, and what joins them
PLACE = re.compile(r"(\d+)/\d+ ?\[|\[ *(\d+)/\d+")  # 3/100 [00:01<...   of a bar, or [ 10/1000]
HEADING = re.compile(r"\W*(?:train(?:ing)?\s+)?epoch\b")
LEADING = re.compile(r"[^\w\"']*(?:train(?:ing)?\s+)?(?:epoch|(?:global[ _])?step|iter)")
HEADINGS = re.compile(r"(?m)^[^\w\n]*(?:train(?:ing)? +)?epoch[^\w\n]*(\d+)")
UNDEFINED = re.compile(r"\b(?:nan|inf|infinity)\b")
GRADIENTS = {"", "train", "training", "global", "total"}  # words before a norm of all gradients
CHECKED = {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout"}
WHOLE = {"train", "training", "lm", "total", "mean", "avg", "average", "running", "batch", "step"}
WHOLE |= {"epoch", "cur", "current", "full", "model", "smooth", "smoothed"}
PARTS = {"aux", "auxiliary", "kl", "kd", "ce", "reg", "regularization", "commit", "commitment"}
PARTS |= {"recon", "reconstruction", "adv", "policy", "value", "entropy", "balance", "router", "z"}
PARTS |= {"d", "g", "gen", "disc", "generator", "discriminator", "best", "min", "max", "previous"}


class Unreadable(ValueError):
    """The file is no log; the text is one sentence."""


class Entry(NamedTuple):
    """What a run said of one moment. None stands for what it did not say."""

    line: int
    step: float | None = None
    epoch: float | None = None
    loss: float | None = None
    norm: float | None = None
    rate: float | None = None
    part: int = 0  # of the text

    def where(self) -> str:
        """Return the moment as a person would name it."""
        if self.step is not None:
            counted = self.epoch is not None and self.epoch == int(self.epoch)
            return f"epoch {self.epoch:g}, step {self.step:g}" if counted else f"step {self.step:g}"
        if self.epoch is not None:
            return f"epoch {self.epoch:g} (line {self.line})"
        return f"line {self.line}"


class Message(NamedTuple):
    """Where a known message stands."""

    line: int
    text: str
    times: int
    entries: int  # that had been read before it
    last_line: int
    last_text: str


class Run:
    """The entries of one run."""

    def __init__(self, line: int):
        """Begin a run at a line of the file."""
        self.line = line
        self.entries: list[Entry] = []
        self.count = 0  # entries read
        self.first: dict[str, float] = {}  # step and epoch with which it began
        self.last: Entry | None = None
        self.high = 0.0  # the highest step of the epoch

    def begins_again(self, entry: Entry) -> bool:
        """Tell whether an entry is the first of another run."""
        last = self.last
        if last is None:
            return False
        epochs = last.epoch is not None and entry.epoch is not None
        if epochs and entry.epoch != last.epoch:
            return _falls_back(entry.epoch, self.first.get("epoch", 0.0), last.epoch)
        if entry.step is None or "step" not in self.first:
            return False
        return _falls_back(entry.step, self.first["step"], self.high)

    def add(self, entry: Entry, keyed: bool) -> None:
        """Take an entry; `keyed` is false for a step that was read off a progress bar."""
        self.count += 1
        # remember with what it began, and how far it is
        if entry.epoch is not None:
            if self.last is not None and entry.epoch != self.last.epoch:
                self.high = 0.0
            self.first.setdefault("epoch", entry.epoch)
        if keyed and entry.step is not None:
            self.first.setdefault("step", entry.step)
            self.high = max(self.high, entry.step)
        self.entries.append(entry)
        self.last = entry

    def thin(self, every: int) -> None:
        """Keep the entries of each `every`-th part, and those whose state is another than
        before.
        """
        turns = {n for n in range(1, len(self.entries)) if _turns(self.entries, n)}
        turns = turns if len(turns) < MOST // 2 else set()
        self.entries = [e for n, e in enumerate(self.entries) if e.part % every == 0 or n in turns]


class Log(NamedTuple):
    """What was read of a file."""

    entries: list[Entry]  # of the last run
    count: int  # entries of that run that were read
    every: int  # of how many parts of the text one was read, at the end
    runs: int  # in the file
    line: int  # where the last run begins
    messages: dict[str, Message]


Look = Callable[[str], Iterator[tuple[str, int, int]]]  # messages in a text: key, begin and end


def read(path: Path, look: Look = lambda text: iter(()), ends: frozenset[str] = frozenset()) -> Log:
    """Read a log. `look` finds the known messages in a text; those in `ends` end a run."""
    taken = _Taken(ends)
    lines = 0
    for text, cut, last in _blocks(path):
        # messages are found in the whole block at once, which is fast, and told in their turn
        seen = deque(sorted(look(text), key=lambda place: place[1]))
        at = 0
        for part in _parts(text, cut):
            pieces = [part] if taken.leaves_out(part, last) else cut(part)
            for piece in pieces:
                begin, at = at, at + len(piece)
                while seen and seen[0][1] < at:
                    key, start, end = seen.popleft()
                    number = lines + 1 + text.count("\n", begin, start)
                    taken.see(key, number, text[start:end])
                if not taken.out:
                    taken.line(piece, lines + 1)
                lines += piece.count("\n")
    taken.end()
    taken.even_out()
    # losses of evaluations alone, and parts of losses, are judged where nothing else is there
    runs = taken.main if taken.main.run.count else taken.aside
    run = runs.run
    return Log(run.entries, run.count, taken.every, runs.begun, run.line, taken.messages)


Cut = Callable[[str], list[str]]


def _blocks(path: Path) -> Iterator[tuple[str, Cut, bool]]:
    """Yield a file in blocks that end where a line or an object ends.

    With each comes what cuts it, and whether it is one of the last.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            block = file.read(BLOCK)
            decoder = codecs.getincrementaldecoder(_encoding(path, block))("replace")
            left = ""
            read = 0
            cut = _lines
            begun = False
            while block:
                text = left + decoder.decode(block)
                # a file of JSON ends its objects with a brace, any other its pieces with a line
                if not begun:
                    cut = _objects if _is_json(text) else _lines
                    text = _from_history(text)
                    begun = True
                # what follows the last end waits for the next block
                end = max(text.rfind(mark, 0, -1) for mark in MARKS[cut]) + 1
                end = end or len(text)
                left = text[end:]
                read += len(block)
                yield text[:end], cut, read >= size - TAIL
                block = file.read(BLOCK)
    except OSError as error:
        why = error.strerror or error
        raise Unreadable(f"--log {path} cannot be read: {why}; give a file of text.") from error
    left += decoder.decode(b"", final=True)
    if left:
        yield left, cut, True


def _is_json(text: str) -> bool:
    """Tell whether a text begins a trainer_state.json or a list of entries."""
    return re.match(r"\s*\[\s*\{", text) is not None or HISTORY in text[:BLOCK]


def _from_history(text: str) -> str:
    """Drop what a trainer_state.json says before its entries, but keep the count of its lines."""
    at = max(0, text[:BLOCK].find(HISTORY))
    return "\n" * text.count("\n", 0, at) + text[at:] if at else text


def _encoding(path: Path, block: bytes) -> str:
    """Return the encoding of a file by its first bytes; refuse what is no text."""
    if not block.strip():
        raise Unreadable(f"--log {path}: the file is empty; give a log with numbers in it.")
    if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"  # as PowerShell writes what it redirects
    if b"\0" in block:
        raise Unreadable(f"--log {path} is a binary file and no text; give a log that can be read.")
    return "utf-8-sig"


def _lines(text: str) -> list[str]:
    """Cut a text behind each line, and each that a progress bar has written over."""
    return text.splitlines(keepends=True)


def _objects(text: str) -> list[str]:
    """Cut a text behind each closing brace."""
    return re.split(r"(?<=\})", text)


MARKS = {_lines: "\n\r", _objects: "}"}  # at which a text may be cut


def _parts(text: str, cut: Cut) -> Iterator[str]:
    """Cut a text into parts that end where a line or an object ends."""
    begin = 0
    while begin < len(text):
        end = min(begin + PART, len(text))
        ends = [text.find(mark, end - 1, end + LONGEST) for mark in MARKS[cut]]
        end = min([place for place in ends if place >= 0], default=end - 1) + 1
        yield text[begin:end]
        begin = end


class _Runs:
    """The last of the runs in a file."""

    def __init__(self):
        """Begin with a run of nothing."""
        self.run = Run(1)
        self.begun = 1

    def add(self, entry: Entry, keyed: bool) -> bool:
        """Take an entry, and tell whether it begins another run than the one before."""
        again = self.run.begins_again(entry if keyed else entry._replace(step=None))
        if again:
            self.run = Run(entry.line)
            self.begun += 1
        elif not self.run.count:
            self.run.line = entry.line
        self.run.add(entry, keyed)
        return again


class _Taken:
    """What has been read so far, and the entry that is being read."""

    def __init__(self, ends: frozenset[str]):
        """Begin with nothing."""
        self.ends = ends  # messages that end a run
        self.main = _Runs()
        self.aside = _Runs()  # losses of evaluations, and parts of a loss
        self.messages: dict[str, Message] = {}
        self.values: dict[str, float] = {}  # of the entry that is being read
        self.flags: set[str] = set()
        self.at = 0  # its line
        self.epoch: float | None = None  # of the last heading or entry
        self.head: list[str] = []  # names of the columns of a table
        self.between = ","  # what stands between two of its columns
        self.open = ""  # a dict whose end has not been met
        self.part = 0  # of the text
        self.every = 1  # of how many parts one is read
        self.out = False  # this one is not
        self.tail = sys.maxsize  # from this part on nothing is left out
        self.tried = 0  # characters searched since `every` was changed
        self.turns = 0
        self.undefined = False  # NaN or infinity stood in the part before

    def leaves_out(self, text: str, last: bool) -> bool:
        """Tell whether a part of a long log is left out; none of the last ones is."""
        self.part += 1
        self.out = False
        if last:
            self.tail = min(self.tail, self.part)
            return False
        self._grow()
        if self.every == 1:
            return False
        low = text.lower()
        undefined = ("nan" in low or "inf" in low) and UNDEFINED.search(low) is not None
        turned = undefined != self.undefined and self.turns < TURNS
        self.undefined = undefined
        self.turns += turned
        if turned or self.part % self.every == 0:
            return False
        # of what is left out only the epoch is read, for steps may begin again with it
        self.out = True
        self.end()
        if "epoch" in low:
            for heading in HEADINGS.finditer(low):
                self.epoch = float(heading.group(1))
        return True

    def _grow(self) -> None:
        """Read fewer parts once there are many entries."""
        runs = [self.main.run, self.aside.run]
        kept = max(len(run.entries) for run in runs)
        if kept < 2 * MOST and self.tried < TRIED[kept < MOST // 10]:
            return
        self.every *= 2
        self.tried = 0
        for run in runs:
            run.thin(self.every)

    def see(self, key: str, line: int, text: str) -> None:
        """Note a known message."""
        old = self.messages.get(key)
        if old is None:
            read = self.main.run.count + bool(self.values)
            self.messages[key] = Message(line, text, 1, read, line, text)
        else:
            self.messages[key] = old._replace(times=old.times + 1, last_line=line, last_text=text)

    def line(self, text: str, number: int) -> None:
        """Read a line, or an object of a file of JSON."""
        if "\x1b" in text:
            text = ESCAPES.sub("", text)
        low = text.lower()
        named = "loss" in low or "norm" in low or "step" in low or "epoch" in low or "iter" in low
        if (
            named
            or "lr" in low
            or "rate" in low
            or ((self.head or self.open) and not low.isspace())
        ):
            low = low[:LONGEST]
            self.tried += len(low)
            self.piece(low, number)

    def end(self) -> None:
        """Read what was waiting for more."""
        if self.open:
            self.pairs(self.open, self.at)
            self.open = ""
        self.flush()

    def even_out(self) -> None:
        """Thin out the end of a long run as the rest of it was."""
        for run in (self.main.run, self.aside.run):
            if self.every > 1 and run.entries and run.entries[0].part < self.tail:
                run.thin(self.every)

    def piece(self, text: str, number: int) -> None:
        """Read a piece of a line, in lower case."""
        # a dict that is wrapped waits for its end
        if self.open:
            text = f"{self.open} {text}"
            self.open = ""
        brace = text.rfind("{")
        if brace > text.rfind("}") and len(text) < WRAPPED and "loss" in text[brace:]:
            self.open = text.rstrip("\n")
            return
        # a row of a table is read under the names of its columns
        if self.head:
            row = self._row(text)
            if row:
                text = row
        # several dicts in a piece are several entries
        if text.count("{") < 2:
            self.pairs(text, number)
            return
        for part in _dicts(text):
            self.pairs(part, number)

    def pairs(self, text: str, number: int) -> None:
        """Take the names and numbers of a piece into the entry that is being read."""
        found = _pairs(text)
        if found is None:
            return
        values, flags = found
        if self.head and "train" in text:
            flags.discard("checked")  # a table has both losses in a row
        if not values:
            if not self.head:
                self.between, self.head = _columns_of(text)
            return
        # a name that is met again, a line between, or a heading ends the entry before
        if self.values:
            apart = number > self.at + 1 or not self.values.keys().isdisjoint(values)
            headed = "loss" in self.values and "loss" not in values and LEADING.match(text)
            if apart or headed:
                self.flush()
        # a progress bar tells the step of what stands behind it
        if "loss" in values and "step" not in values | self.values and "{" not in text:
            place = PLACE.search(text)
            counted = float(place.group(1) or place.group(2)) if place is not None else None
            if counted is not None and counted != values.get("epoch"):
                values["step"] = counted
                flags.add("bar")
        self.values.update(values)
        self.flags |= flags
        self.at = number
        if values.keys() == {"epoch"} and not HEADING.match(text):
            del self.values["epoch"]  # a word about an epoch, and no heading

    def flush(self) -> None:
        """End the entry that is being read."""
        values, flags = self.values, self.flags
        self.values = {}
        self.flags = set()
        if "epoch" in values:
            if "loss" in values or "norm" in values or values.keys() == {"epoch"}:
                self.epoch = values["epoch"]
        if not ("loss" in values or "norm" in values):
            return
        runs = self.main if flags.isdisjoint({"checked", "part"}) else self.aside
        before = runs.run.last
        given = values.get("epoch")
        values["epoch"] = values.get("epoch", self.epoch)
        entry = Entry(self.at, part=self.part, **values)
        again = runs.add(entry, keyed="bar" not in flags)
        if not again:
            return
        # another run does not begin in the epoch in which the one before has ended
        if before.epoch == entry.epoch:
            self.epoch = given
        # and what was said of the one before is not said of it
        if runs is self.main:
            self.messages = {
                key: message
                for key, message in self.messages.items()
                if message.line > before.line and key not in self.ends
            }

    def _row(self, text: str) -> str:
        """Return a row of a table as names and numbers, or "" where the table has ended."""
        cells = _cells(text, self.between)
        named = [(name, cell) for name, cell in zip(self.head, cells) if _is_number(cell)]
        rule = not text.strip(" |-:+=\t\n")
        if len(cells) != len(self.head) or not named:
            self.head = self.head if rule else []
            return ""
        return ", ".join(f"{name}: {cell}" for name, cell in named)


def _pairs(text: str) -> tuple[dict[str, float], set[str]] | None:
    """Return numbers by name, and what the losses are; None for a piece without any name."""
    names = list(NAME.finditer(text))
    if not names or "train_runtime" in text:
        return None
    values: dict[str, float] = {}
    flags: set[str] = set()
    others: dict[str, float] = {}  # losses of an evaluation, and parts of a loss
    for name in names:
        value = VALUE.match(text, name.end())
        if value is None:
            continue
        start = name.start()
        kind = KINDS[name.group()[:2]]
        role = _role(kind, name.group(), text[max(0, start - 20) : start])
        number = float(value.group(1).replace(",", ""))
        if role in ("checked", "part"):
            others.setdefault(role, number)
        elif role == "whole" and kind not in values:
            if kind != "step" or number == number // 1:
                values[kind] = number
    # a line that has no loss of the training itself is kept apart, as is one of an evaluation
    if "loss" not in values and others:
        role = next(iter(others))
        values["loss"] = others[role]
        flags.add(role)
    elif "checked" in others:
        flags.add("checked")
    return values, flags


def _role(kind: str, name: str, before: str) -> str:
    """Return what a name means after the text before it: whole, part, checked, or "" for
    another.
    """
    if before and before[-1].isalnum():
        return ""
    match = BEFORE.search(before)
    word = match.group(1) if match is not None else ""
    joint = match.group(2) if match is not None else ""
    # a number that stands before the name is the value of another
    if joint == " " and any(letter.isdigit() for letter in word):
        word = ""
    if kind == "loss":
        if word in CHECKED:
            return "checked"
        if word in WHOLE or not word or (joint in " -" and word not in PARTS):
            return "whole"
        return "part"
    if kind == "norm":
        spaced = joint in " -" and name[0] == "g" and word not in {"max", "clip"}
        return "whole" if word in GRADIENTS or spaced else ""
    if kind == "step":
        named = word in {"train", "trainer", "training", "global"}
        return (
            "whole" if named or joint in ("", " ", "-", ".") and word not in {"per", "max"} else ""
        )
    if kind == "epoch":
        return "whole" if joint in ("", " ", "-") or word in {"train", "trainer"} else ""
    return "whole" if joint in ("", " ", "-", "/", ".") or word == "train" else ""


def _columns_of(text: str) -> tuple[str, list[str]]:
    """Return what stands between the columns of a table and their names, if a piece is its head."""
    between = next((mark for mark in "\t|," if mark in text), "")
    names = _cells(text, between)
    fit = len(names) > 1 and all(len(name) < 40 for name in names) and "loss" in text
    if not fit or not any((_pairs(f"{name}: 1") or [None])[0] for name in names):
        return "", []
    return between, names


def _cells(text: str, between: str) -> list[str]:
    """Return the cells of a row of a table."""
    text = text.rstrip("\r\n")
    if not between:
        return re.split(r"\s{2,}", text.strip())
    text = text.strip().strip("|") if between == "|" else text
    return [cell.strip() for cell in text.split(between)]


def _is_number(cell: str) -> bool:
    """Tell whether a cell of a table holds a number."""
    return NUMERIC.fullmatch(cell) is not None


def _dicts(text: str) -> list[str]:
    """Cut a piece behind each brace that closes an outermost dict."""
    parts = []
    depth = 0
    begin = 0
    for place in re.finditer(r"[{}]", text):
        depth = max(0, depth + (1 if place.group() == "{" else -1))
        if depth == 0:
            parts.append(text[begin : place.end()])
            begin = place.end()
    return [*parts, text[begin:]]


def _falls_back(value: float, first: float, high: float) -> bool:
    """Tell whether a count has gone back: to where it began, or to half of how far it was."""
    return value < high and (value <= first or value <= high / 2)


def _state(entry: Entry) -> tuple:
    """Return what is finite in an entry, and what is zero."""
    return tuple(v is None or (v - v == 0, v == 0) for v in (entry.loss, entry.norm))


def _turns(entries: list[Entry], n: int) -> bool:
    """Tell whether the numbers of an entry are of another state than those before it."""
    return _state(entries[n]) != _state(entries[n - 1])
