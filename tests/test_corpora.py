"""A corpus on disk is the corpus in memory: the same documents, splits, ids and batches, through
kills and damage.
"""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bit_flips import flips
from hypothesis import given, settings
from hypothesis import strategies as st

from nblib import corpora, corpus_files, files, models, paths, text, train
from nblib.checkpoint import Checkpoints
from nbworkbook.setup import load_setup

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

WORDS = "the corpus of documents that one reads is split by the hash of each text, naïve or 漢字, and kept".split()


def documents(count: int, length: int = 60, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [
        f"{n}: " + " ".join(draw.choices(WORDS, k=draw.randint(length // 2, length)))
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return text.train_tokenizer(documents(200), vocab_size=400)


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch) -> Path:
    """A store of its own, and shards so small that a few hundred documents fill several."""
    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(corpora, "SHARD", 6000)
    monkeypatch.setattr(corpora, "BATCH", 2000)
    return tmp_path / "outputs" / "corpora"


def write_parquet(path: Path, texts: list, **columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"number": list(range(len(texts))), "text": texts, **columns})
    parquet.write_table(table, path, row_group_size=30)
    return path


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in texts)
    )
    return path


def hub(folder: Path) -> str:
    """`datasets` reads a folder under a name as well, and asks nobody about its commit."""
    return f"hf:{folder}?revision={'a' * 40}"


def in_memory(texts: list[str], tokenizer) -> dict[str, torch.Tensor]:
    split = {
        name: [t for t in texts if text._percentile(t) in rule]
        for name, rule in text.SPLITS.items()
    }
    return {name: text.encode(some, tokenizer) for name, some in split.items()}


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(some[name][:], others[name][:]) for name in others
    )


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def store(outputs: Path) -> Path:
    (folder,) = stores(outputs)
    return folder


def stored(folder: Path) -> int:
    """How many bytes of ids the manifest of a store promises."""
    return sum(
        files.read_json(folder / "manifest.json").get("state", {"sizes": {}})["sizes"].values()
    )


def stores(outputs: Path) -> list[Path]:
    return [
        each for each in outputs.iterdir() if each.is_dir() and not each.name.startswith("damaged")
    ]


# ---------------------------------------------------------------------------- the same as in memory


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "hf"])
def test_the_ids_are_those_of_the_documents_in_memory(kind, tokenizer, tmp_path, capsys):
    texts = documents(300)
    if kind == "jsonl":
        corpus = str(write_jsonl(tmp_path / "a.jsonl", texts))
    else:
        write_parquet(tmp_path / "set" / "a.parquet", texts[:170])
        write_parquet(tmp_path / "set" / "b.parquet", [None, "", " \n", *texts[170:]])
        corpus = hub(tmp_path / "set") if kind == "hf" else str(tmp_path / "set")
    streams = corpora.open(corpus, tokenizer)
    assert equal(streams, in_memory(texts, tokenizer))
    assert capsys.readouterr().out.count(f" M tokens of {corpus}\n") > 3


def test_files_of_a_folder_are_read_in_the_order_of_their_names_through_folders_and_links(tmp_path):
    for name in ("corpus/b/c.md", "corpus/a.txt", "corpus/b.txt", "corpus/no.bin", "other/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "corpus" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "loop").symlink_to(tmp_path / "corpus")
    expected = ["corpus/a.txt", "corpus/b/c.md", "corpus/b.txt", "other/d.py"]
    assert list(corpora._local(tmp_path / "corpus", "text", 0)) == expected
    assert list(corpora._local(tmp_path / "corpus", "text", 3)) == expected[3:]


def test_a_path_is_seen_from_the_working_directory_and_from_home(
    tokenizer, tmp_path, outputs, monkeypatch
):
    write_jsonl(tmp_path / "own.jsonl", texts := documents(200))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for corpus in ("own.jsonl", "~/own.jsonl"):
        assert equal(corpora.open(corpus, tokenizer), in_memory(texts, tokenizer))
    assert store(outputs)


def test_a_line_separator_inside_a_document_does_not_end_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one\u2028two\x85three"}\r\n\n{"text": "four"}')
    assert list(corpora._lines(tmp_path / "a.jsonl", "text")) == ["one\u2028two\x85three", "four"]


@pytest.mark.parametrize(
    "line", ['{"txt": 1}', '{"text": 1}', '["text"]', "no", '{"text": "\\ud800"}', "[" * 9999]
)
def test_a_line_without_a_text_is_named(line, tokenizer, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(
        ValueError, match="bad.jsonl line 2: expected a JSON object with a 'text' field"
    ):
        corpora.open(str(tmp_path), tokenizer)


@settings(max_examples=300, deadline=None)
@given(st.text("a\n ", max_size=60), st.integers(1, 12), st.integers(13, 30))
def test_a_file_is_cut_at_blank_lines_and_where_there_are_none(
    tmp_path_factory, written, size, longest
):
    file = tmp_path_factory.getbasetemp() / "pieces.txt"
    file.write_text(written)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "BATCH", longest)
        pieces = list(corpora._pieces(file, size))
    blank = "(\n\n)?"  # nothing is lost but one blank line after a piece
    assert re.fullmatch("".join(re.escape(piece) + blank for piece in pieces), written)
    assert "" not in pieces and all(size - 2 <= len(piece) < 2 * longest for piece in pieces[:-1])
    if "\n\n" not in written.lstrip("\n"):
        assert all(len(piece) >= longest for piece in pieces[:-1] if piece.strip())


def test_documents_are_whole_in_order_and_closed_and_no_split_holds_one_of_another(
    tokenizer, tmp_path
):
    texts = documents(300)
    streams = corpora.open(str(write_parquet(tmp_path / "a.parquet", texts)), tokenizer)
    read = {}
    for split, stream in streams.items():
        assert stream[-1] == tokenizer.eos_token_id
        read[split] = tokenizer.decode(stream[:]).split(text.EOS)[:-1]
        assert [int(each.split(":")[0]) for each in read[split]] == sorted(
            int(each.split(":")[0]) for each in read[split]
        )
        assert all(text._percentile(each) in text.SPLITS[split] for each in read[split])
    assert sorted(sum(read.values(), [])) == sorted(texts)


def test_a_number_of_tokens_is_a_prefix_of_whole_documents(tokenizer, tmp_path):
    corpus = str(write_parquet(tmp_path / "a.parquet", documents(300)))
    whole, part = (corpora.open(f"{corpus}{query}", tokenizer) for query in ("", "?tokens=5k"))
    total = sum(map(len, part.values()))
    assert 5000 <= total < 5000 + 200
    assert all(
        torch.equal(part[split][:], whole[split][: len(part[split])]) for split in text.SPLITS
    )
    assert all(part[split][-1] == tokenizer.eos_token_id for split in text.SPLITS)


def test_what_is_read_is_int64_and_of_its_own_and_the_rest_stays_on_disk(
    tokenizer, tmp_path, outputs
):
    stream = corpora.open(str(write_parquet(tmp_path / "a.parquet", documents(200))), tokenizer)[
        "train"
    ]
    assert (store(outputs) / "train").stat().st_size == 2 * len(stream)
    for taken in (stream[:10], stream[3], stream[torch.tensor([[1, 2], [3, 4]])], stream[5:2]):
        assert type(taken) is torch.Tensor and taken.dtype == torch.int64
    before = content(store(outputs))
    stream[:10].zero_()
    stream.zero_()  # a private map: this stays in the memory of this process
    assert content(store(outputs)) == before


def test_ids_above_65535_take_four_bytes(tmp_path, outputs):
    tokenizer = text.train_tokenizer(documents(200), vocab_size=400)
    tokenizer.add_tokens([f"<{n}>" for n in range(66_000)])
    texts = [f"{each} <65999>" for each in documents(100)]
    streams = corpora.open(str(write_jsonl(tmp_path / "a.jsonl", texts)), tokenizer)
    assert equal(streams, in_memory(texts, tokenizer)) and int(streams["train"][:].max()) > 2**16
    assert (store(outputs) / "train").stat().st_size == 4 * len(streams["train"])


@pytest.mark.parametrize("world", [1, 2])
def test_batches_are_the_same_bits_and_resume_at_their_position(world, tokenizer, tmp_path):
    texts = documents(300)
    mapped = corpora.open(str(write_parquet(tmp_path / "a.parquet", texts)), tokenizer)["train"]
    held = in_memory(texts, tokenizer)["train"]
    for rank in range(world):
        options = dict(rows=4, length=16, seed=3, rank=rank, world=world)
        one, two = text.Batches(mapped, **options), text.Batches(held, **options)
        for _ in range(one.per_epoch + 5):
            a, b = next(one), next(two)
            assert a["input_ids"].dtype == b["input_ids"].dtype and torch.equal(
                a["input_ids"], b["input_ids"]
            )
        again = text.Batches(mapped, **options)
        again.load_state_dict(one.state_dict())
        assert all(
            torch.equal(next(one)["input_ids"], next(again)["input_ids"])
            for _ in range(one.per_epoch)
        )


@pytest.mark.slow
def test_training_has_the_losses_of_memory_and_resumes_to_the_same_bits(
    tokenizer, tmp_path, machine
):
    texts = documents(300)
    mapped = corpora.open(str(write_parquet(tmp_path / "a.parquet", texts)), tokenizer)["train"]
    held = in_memory(texts, tokenizer)["train"]

    def trained(stream, total: int, **options) -> tuple[list[float], dict]:
        torch.manual_seed(0)
        model = models.tiny(len(tokenizer), hidden=32, layers=1, heads=2)
        batches = text.Batches(stream, rows=4, length=16)
        records = train.fit(
            model, batches, train.adamw(model, lr=1e-2), total=total, machine=machine, **options
        )
        return [record["loss"] for record in records], model.state_dict()

    straight, weights = trained(mapped, 12)
    assert trained(held, 12)[0] == straight
    saved = Checkpoints(tmp_path / "checkpoints")
    trained(mapped, 5, checkpoints=saved)
    resumed, others = trained(mapped, 12, checkpoints=saved)
    assert resumed == straight and all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_start_takes_its_rows_from_here(tokenizer, tiny, tmp_path, machine):
    tiny.resize_token_embeddings(len(tokenizer))
    tiny.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    corpus = str(write_jsonl(tmp_path / "a.jsonl", texts := documents(300)))
    begun = load_setup(str(tmp_path / "model"), corpus=corpus, length=16, rows=3, machine=machine)
    held = in_memory(texts, tokenizer)
    assert isinstance(begun.stream, corpora.Tokens) and torch.equal(begun.stream[:], held["train"])
    for name in ("validation", "held_out"):
        rows = getattr(begun, name)
        assert type(rows) is torch.Tensor and torch.equal(rows, held[name][:48].view(3, 16))


@pytest.mark.parametrize("corpus", corpus_files.EMBEDDED)
def test_the_embedded_corpora_stay_in_memory(corpus, tokenizer, outputs, monkeypatch):
    monkeypatch.setattr(text, "_embedded", lambda source: documents(300, seed=len(source)))
    streams = corpora.open(corpus, tokenizer)
    assert (
        equal(streams, in_memory(documents(300, seed=len(corpus)), tokenizer))
        and not outputs.exists()
    )
    assert all(type(stream) is torch.Tensor for stream in streams.values())


# ------------------------------------------------------------------------------------ kept for good


def test_a_second_opening_reads_no_document(tokenizer, tmp_path, monkeypatch):
    corpus = str(write_parquet(tmp_path / "a.parquet", documents(200)))
    first = corpora.open(corpus, tokenizer)
    monkeypatch.setattr(corpora, "_tokenise", None)
    assert equal(corpora.open(corpus, tokenizer), first)


def test_another_corpus_option_or_tokenizer_is_another_store(tokenizer, tmp_path, outputs):
    texts = documents(200)
    file = write_parquet(tmp_path / "a" / "a.parquet", texts, other=texts[::-1])
    other = text.train_tokenizer(documents(100, seed=1), vocab_size=401)
    for corpus, words in (
        (f"{file}", tokenizer),
        (f"{file}?column=other", tokenizer),
        (f"{file}?tokens=4k", tokenizer),
    ):
        corpora.open(corpus, words)
    corpora.open(f"{file}", other)
    corpora.open(hub(file.parent), tokenizer)
    before = stores(outputs)
    assert len(before) == 5
    # leaves its mark in the tokenizer
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)
    corpora.open(f"{file}?tokens=4000", tokenizer)
    corpora.open(str(file.parent.rename(tmp_path / "b") / "a.parquet"), tokenizer)
    assert stores(outputs) == before
    write_parquet(tmp_path / "b" / "a.parquet", texts[1:])
    corpora.open(str(tmp_path / "b" / "a.parquet"), tokenizer)
    assert len(stores(outputs)) == 6


def interrupted(corpus: str, tokenizer, monkeypatch, after: int) -> None:
    """Tokenise until `after` batches are done."""
    real = corpora._batches

    def some(*args):
        for number, batch in enumerate(real(*args)):
            if number == after:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(corpora, "_batches", some)
        corpora.open(corpus, tokenizer)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt", "hf"])
@pytest.mark.parametrize("after", [1, 7, 19])
def test_an_interrupted_making_goes_on_to_the_same_bytes(
    kind, after, tokenizer, tmp_path, outputs, monkeypatch, capsys
):
    texts = documents(400)
    if kind == "txt":
        monkeypatch.setattr(corpora._pieces, "__defaults__", (200,))
    for number in (0, 1):
        some, folder = texts[200 * number : 200 * number + 200], tmp_path / "corpus"
        if kind in ("parquet", "hf"):
            write_parquet(folder / f"{number}.parquet", some)
        else:
            folder.mkdir(exist_ok=True)
            (folder / f"{number}.txt").write_text(
                "\n\n".join(some)
            ) if kind == "txt" else write_jsonl(folder / f"{number}.jsonl", some)
    corpus = hub(folder) if kind == "hf" else str(folder)
    corpora.open(corpus, tokenizer)
    straight = content(store(outputs))
    store(outputs).rename(tmp_path / "straight")
    interrupted(corpus, tokenizer, monkeypatch, after)
    assert (stored(store(outputs)) > 0) == (after > 1)
    corpora.open(corpus, tokenizer)
    assert content(store(outputs)) == straight


def test_of_the_hub_what_is_stored_is_skipped(tokenizer, tmp_path, monkeypatch):
    from datasets import IterableDataset

    write_parquet(tmp_path / "set" / "a.parquet", documents(400))
    skipped, skip = [], IterableDataset.skip
    monkeypatch.setattr(IterableDataset, "skip", lambda self, n: skipped.append(n) or skip(self, n))
    interrupted(hub(tmp_path / "set"), tokenizer, monkeypatch, 19)
    corpora.open(hub(tmp_path / "set"), tokenizer)
    assert skipped[0] == 0 and skipped[1] > 100


def harm(folder: Path, how: str) -> None:
    if how == "a bit of the middle":
        raw = bytearray((folder / "train").read_bytes())
        raw[len(raw) // 2] ^= 4
        (folder / "train").write_bytes(raw)
    elif how == "cut short":
        os.truncate(folder / "held_out", 100)
    elif how == "a file gone":
        (folder / "validation").unlink()
    else:
        (folder / "manifest.json").write_text(how)


@pytest.mark.parametrize(
    "how",
    [
        "a bit of the middle",
        "cut short",
        "a file gone",
        "{",
        "[]",
        '{"shards": 3}',
        '{"about": 1, "shards": []}',
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_damage_is_noticed_and_made_again(
    how, finished, tokenizer, tmp_path, outputs, monkeypatch, capsys
):
    corpus = str(write_parquet(tmp_path / "a.parquet", documents(400)))
    mapped = corpora.open(corpus, tokenizer)
    straight, expected = content(store(outputs)), mapped["train"][:]
    if not finished:
        store(outputs).rename(tmp_path / "straight")
        interrupted(corpus, tokenizer, monkeypatch, 19)
    harm(store(outputs), how)
    capsys.readouterr()
    corpora.open(corpus, tokenizer)
    assert content(store(outputs)) == straight
    assert "is damaged: " in (said := capsys.readouterr().out) and "set aside as" in said
    if how != "a bit of the middle" and how != "cut short":
        assert torch.equal(mapped["train"][:], expected), (
            "a training that reads from the old one is not disturbed"
        )


def test_no_bit_of_a_manifest_can_change_what_is_read(tokenizer, tmp_path, outputs):
    corpus = str(write_jsonl(tmp_path / "a.jsonl", documents(120)))
    expected = {name: stream[:] for name, stream in corpora.open(corpus, tokenizer).items()}
    manifest = store(outputs) / "manifest.json"
    written = manifest.read_bytes()
    for _ in flips(manifest, count=20):
        assert equal(corpora.open(corpus, tokenizer), expected)
        assert manifest.read_bytes() == written
    assert len(list(outputs.glob("damaged-*"))) == 20


def forked(corpus: str, tokenizer, printed: str, killed_at: int | None = None) -> int:
    """A process of its own that opens the corpus; what it prints goes into a file. It gets SIGKILL
    at the n-th time that Python calls or returns: any place in the code, and the same one on a slow
    machine and on a fast one.
    """
    if pid := os.fork():
        return pid
    try:
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 1)
        if killed_at is not None:
            calls = itertools.count()
            sys.setprofile(
                lambda *_: next(calls) == killed_at and os.kill(os.getpid(), signal.SIGKILL)
            )
        streams = corpora.open(corpus, tokenizer)
        sys.setprofile(None)
        print({name: int(stream[:].sum()) for name, stream in streams.items()}, flush=True)
        os._exit(0)
    finally:
        os._exit(1)


def test_processes_at_once_make_one_store(tokenizer, tmp_path, outputs, monkeypatch, capfd):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # threads do not survive a fork
    corpus, names = (
        str(write_parquet(tmp_path / "a.parquet", documents(1500))),
        [tmp_path / n for n in "abc"],
    )
    with capfd.disabled():
        ends = [
            os.waitpid(pid, 0)[1]
            for pid in [forked(corpus, tokenizer, str(name)) for name in names]
        ]
    printed = [name.read_text().splitlines() for name in names]
    assert ends == [0, 0, 0] and len({lines[-1] for lines in printed}) == 1 and store(outputs)
    assert sum(any(line.startswith("tokenised") for line in lines) for lines in printed) == 1
    assert sum(any("waiting for it" in line for line in lines) for lines in printed) >= 1


@pytest.mark.slow
def test_killed_twenty_times_it_has_the_same_bytes(
    tokenizer, tmp_path, outputs, monkeypatch, capfd
):
    texts = documents(3000)
    corpus = str(write_parquet(tmp_path / "a.parquet", texts))
    calls = itertools.count()
    sys.setprofile(lambda *_: next(calls))
    corpora.open(corpus, tokenizer)
    sys.setprofile(None)
    straight, most = content(store(outputs)), next(calls)
    store(outputs).rename(tmp_path / "straight")
    draw = random.Random(0)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    promised = []  # bytes, after each kill
    with capfd.disabled():
        for _ in range(20):
            _, ended = os.waitpid(
                forked(corpus, tokenizer, os.devnull, killed_at=draw.randrange(most // 12)), 0
            )
            assert os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL, "it was at work"
            for folder in stores(outputs):
                promised.append(stored(folder))
                with (folder / draw.choice([*text.SPLITS])).open("ab") as file:
                    # half a page that went to the disk before a cut
                    file.write(draw.randbytes(draw.randrange(50)))
    assert promised == sorted(promised) and len(set(promised)) > 5
    assert 0 < promised[-1] < stored(tmp_path / "straight")
    assert equal(corpora.open(corpus, tokenizer), in_memory(texts, tokenizer))
    assert content(store(outputs)) == straight
    assert not list(outputs.glob("damaged-*"))


@pytest.mark.slow
def test_memory_stays_flat_and_reading_is_much_faster_than_training(tmp_path):
    """Five million tokens here; docs/log.md has fifty."""
    command = [sys.executable, Path(__file__).with_name("corpus_bench.py"), tmp_path, "5000000"]
    run = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(paths.root())}
    )
    facts = json.loads(run.stdout.splitlines()[-1])
    print(facts)
    tokenised = facts["tokenise"]
    assert tokenised["tokens"] > 4.9e6 and tokenised["peak MiB"] < 500
    assert tokenised["quarters"][3] < max(tokenised["quarters"][:3]) + 20
    assert facts["read"]["per s"] > 20 * facts["training"]["per s"]


# ------------------------------------------------------------------------------ what cannot be read


def big_parquet(path: Path, *, rows_in_group: int) -> Path:
    """96 MiB of text that is not compressed, of which one document in sixteen is not blank: soon
    tokenised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with parquet.ParquetWriter(
        path, pa.schema({"text": pa.string()}), compression="none", use_dictionary=False
    ) as file:
        for start in range(0, 12288, rows_in_group):
            numbers = range(start, min(start + rows_in_group, 12288))
            texts = [
                " " * 8192 if n % 16 else f"{n} {' '.join(400 * WORDS)}"[:8192] for n in numbers
            ]
            file.write(pa.table({"text": texts}), row_group_size=rows_in_group)
    return path


@pytest.mark.parametrize("rows_in_group", [256, 12288])
def test_a_parquet_file_is_read_in_pieces_whatever_its_row_groups(rows_in_group, tmp_path):
    before, most = pa.total_allocated_bytes(), 0
    for _ in corpora._parquet(
        big_parquet(tmp_path / "a.parquet", rows_in_group=rows_in_group), "text"
    ):
        most = max(most, pa.total_allocated_bytes() - before)
    assert 2**20 < most < 16 * 2**20


FLAT = """
import sys
from pathlib import Path
import pyarrow.parquet
from nblib import corpora, models

def resident() -> int:
    return sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS:")) // 1024

seen, batches = [], corpora._batches
def watched(*arguments):
    for batch in batches(*arguments):
        seen.append(resident())
        yield batch
corpora._batches = watched
corpora.open(sys.argv[1], models.load_tokenizer(sys.argv[2]))
print(len(seen), max(seen[: len(seen) // 2]), max(seen[len(seen) // 2 :]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="no /proc here, which says how much is resident"
)
def test_memory_does_not_rise_in_the_second_half_of_a_large_file(tokenizer, tmp_path):
    """While arrow fetched ahead, it kept 32 MiB more of the file from time to time: 60 MiB in this
    second half.
    """
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    big_parquet(tmp_path / "set" / "a.parquet", rows_in_group=256)
    command = [sys.executable, "-c", FLAT, tmp_path / "set", tmp_path / "tokenizer"]
    run = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(paths.root())}
    )
    assert run.returncode == 0, run.stderr
    count, first, second = map(int, run.stdout.split()[-3:])
    assert count > 20 and second < first + 20, (count, first, second)


def test_a_corpus_that_changes_while_it_is_read_is_refused(
    tokenizer, tmp_path, outputs, monkeypatch, capsys
):
    file = write_parquet(tmp_path / "a.parquet", documents(200))
    real = corpora._parquet

    def grows(*args, **options):
        yield from real(*args, **options)
        write_parquet(file, documents(201))

    with monkeypatch.context() as patch:
        patch.setattr(corpora, "_parquet", grows)
        with pytest.raises(ValueError, match="changed while it was read: start again"):
            corpora.open(str(file), tokenizer)
    assert stores(outputs) == []
    assert equal(corpora.open(str(file), tokenizer), in_memory(documents(201), tokenizer))


@pytest.mark.parametrize(
    "corpus, says",
    [
        (
            "a.parquet?colum=text",
            "corpus 'a.parquet?colum=text' has no option 'colum': allowed are column, tokens",
        ),
        ("a.parquet?split=train", "has no option 'split': allowed are column, tokens"),
        (
            "hf:some/set?subset=a",
            "has no option 'subset': allowed are column, tokens, name, split, revision",
        ),
        (
            "a.parquet?tokens=abc",
            "tokens = 'abc': must be a number above 0 like 500000, 200k, 1.5M or 10B",
        ),
        ("a.parquet?tokens=0", "tokens = '0': must be a number above 0"),
        (
            "a.parquet?column=body",
            "corpus 'a.parquet' cannot be read: no column 'body', it has number, text: choose with ?column=",
        ),
        ("a.parquet?column=number", "its column holds int, not text"),
        ("broken.parquet", "corpus 'broken.parquet' cannot be read: Parquet magic bytes not found"),
        ("cut.parquet", "corpus 'cut.parquet' cannot be read: Parquet magic bytes not found"),
        (
            "empty.parquet",
            "corpus 'empty.parquet' has no document in its held_out split: it needs more documents",
        ),
        ("nothing.txt?tokens=1k", "has no document in its held_out split"),
        ("few.jsonl?tokens=1k", "has no document in its "),
        ("few.jsonl?column=body", "few.jsonl line 1: expected a JSON object with a 'body' field"),
        ("not.parquet?x", "corpus 'not.parquet?x' has no option 'x'"),
        (
            "not.parquet",
            "corpus 'not.parquet' does not exist: use prose, code, a file, a folder or hf:<dataset>",
        ),
        (
            hub(Path("set")) + "&column=body",
            "&column=body' cannot be read: no column 'body', it has number, text: choose with ?column=",
        ),
        (hub(Path("set")) + "&split=test", "Bad split: test. Available splits: ['train']"),
        (
            hub(Path("set")) + "&name=other",
            "BuilderConfig 'other' not found. Available: ['default']",
        ),
        (
            "hf:some/set",
            "corpus 'hf:some/set' cannot be fetched (LocalEntryNotFoundError): start again with a network, it goes",
        ),
        (
            f"hf:some/set?revision={'a' * 40}",
            "or without one give a local parquet file or folder (corpus=/path/to/it) or corpus=prose",
        ),
        ("hf:a b/c", "corpus 'hf:a b/c' cannot be read: Repo id must use alphanumeric"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(corpus, says, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "a.parquet", documents(100))
    write_parquet(tmp_path / "set" / "a.parquet", documents(100))
    write_parquet(tmp_path / "empty.parquet", pa.array([], pa.string()))
    raw = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "broken.parquet").write_bytes(b"no parquet" * 100)
    (tmp_path / "cut.parquet").write_bytes(raw[: len(raw) // 2])
    (tmp_path / "nothing.txt").write_text(" \n\n \n")
    write_jsonl(tmp_path / "few.jsonl", ["one"])
    with pytest.raises((ValueError, LookupError, OSError), match=re.escape(says)) as raised:
        corpora.open(corpus, tokenizer)
    assert "\n" not in str(raised.value) and raised.value.__suppress_context__ | (
        raised.value.__context__ is None
    )


def test_a_damaged_page_of_a_parquet_file_is_one_sentence(tokenizer, tmp_path):
    file = write_parquet(tmp_path / "a.parquet", documents(100))
    raw = bytearray(file.read_bytes())
    raw[200:4000] = bytes(3800)
    file.write_bytes(raw)
    with pytest.raises(ValueError, match="corpus '.*a.parquet' cannot be read: "):
        corpora.open(str(file), tokenizer)


@pytest.mark.parametrize("package, corpus", [("datasets", hub(Path("set"))), ("pyarrow", "set")])
def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(
    package, corpus, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "set" / "a.parquet", documents(10))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"needs the package {package}: pip install datasets"):
        corpora.open(corpus, tokenizer)


def test_a_tokenizer_without_an_end_is_refused(tokenizer):
    other = text.train_tokenizer(documents(50), vocab_size=300)
    other.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        corpora.open("hf:some/set", other)
