"""The demo: its page needs no other file, and holds what was found in this run."""

import re

import torch

from lessons import demo


def test_the_page_holds_the_picture_the_canary_and_the_doctor(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path))
    threads = torch.get_num_threads()
    try:
        demo.main()
    finally:
        torch.set_num_threads(threads)
    path = tmp_path / "demo" / "index.html"
    page, printed = path.read_text(), " ".join(capsys.readouterr().out.split())
    assert printed.endswith(f"Open the page: {path}")
    assert page.count('<img src="data:image/png;base64,') == 1 and not re.search(
        r"https?://|<script|<link", page
    )
    for shown in (page, printed):
        assert (
            "But 0 of 16 adapter tensors moved" in shown
            and "of 8: as above 8, with the fix 0." in shown
        )
        assert (
            "16 of 17 trainable tensors are dead" in shown
            and "all 17 trainable tensors get a gradient" in shown
        )
        assert "F17 labels-already-shifted" in shown and "the doctor says: no fault found." in shown
        assert "make lab" in shown and "01_freeze_and_adapters" in shown and "05_doctor" in shown
    falls = re.findall(r"(?:fell|falls) from (\d\.\d\d) to (\d\.\d\d)", page)
    assert len(falls) == 2 and all(float(first) > float(last) for first, last in falls)
    assert len(demo.PROGRAM.splitlines()) - demo.PROGRAM.splitlines().count("") == 15 - 1
