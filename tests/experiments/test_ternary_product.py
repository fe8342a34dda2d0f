"""The record of the packed product: every way is timed, nothing twice, and the table shows it."""

import torch

from experiments import ternary_product


def test_the_record_holds_every_way_and_the_table_shows_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ternary_product, "WIDTHS", (32, 64))
    record = ternary_product.measure(tmp_path / "record.json", torch.device("cpu"), (32, 64))
    assert len(record["lines"]) == 2 * 2 * 10 and all(
        line["seconds"] > 0 for line in record["lines"]
    )
    assert (
        ternary_product.measure(tmp_path / "record.json", torch.device("cpu"), (32, 64)) == record
    )  # nothing is repeated
    rows = ternary_product.table(record)
    assert [row["64 wide"] for row in rows if row["way"] == "float32"] == ["1.0 x"] * 2
    sizes = {row["way"]: float(row["of fp16"]) for row in rows}
    assert sizes["float32"] == 2 and sizes["int8, dynamic"] == 0.5 and sizes["bf16"] == 1
