"""Reports as files: nothing from outside, no script, everything escaped, and the numbers of the run
in the pictures.
"""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

import loopdoctor as doctor
from loopdoctor import ERROR, NOTE, WARN, reports, script
from tests.test_report import FULL, finding, made

EVIL = "<script>alert('a')</script> & \"b\" ]]> `c` | *d* \x00\x1b[0m 100%\n::error::e"
OPEN = {"meta", "polyline", "rect", "br"}


class Page(HTMLParser):
    """Tags, whether each is closed, attributes, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.stack, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in OPEN:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text += data


def trained(steps: int = 5):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with doctor.watch(model, optimizer=optimizer, steps=steps, say=False) as report:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
    return report


def evil():
    report = made(finding("N4", ERROR)._replace(observed=EVIL, diagnosis=EVIL, fix=EVIL, name=EVIL))
    report.ignored, report.faults, report.exception = (
        [(finding("S9", WARN), EVIL)],
        [EVIL],
        RuntimeError(EVIL),
    )
    report.record = {
        "curves": {EVIL: [1.0, float("nan"), float("inf"), 2.0]},
        "tensors": {EVIL: [0.0], "b": [1.0]},
    }
    return report


@pytest.mark.parametrize("make", [trained, evil, made, lambda: FULL])
def test_a_page_needs_nothing_and_runs_nothing(make):
    report = make()
    page = Page(report.html())
    assert not page.stack and not {"script", "link", "img", "iframe", "object", "a"} & set(
        page.tags
    )
    names = {name for name, _ in page.attributes}
    assert not {n for n in names if n.startswith("on")} | (names & {"src", "href"}), names
    assert all(f.fix in page.text for f in report.findings if not f.because)


def test_the_pictures_show_the_run():
    report = trained(5)
    text = report.html()
    for svg in re.findall("<svg.*?</svg>", text):
        ElementTree.fromstring(svg)
    points = re.search("points='([^']*)'", text).group(1).split()
    losses = report.record["curves"]["loss"]
    heights = [float(p.split(",")[1]) for p in points]
    assert len(points) == 5 and sorted(range(5), key=lambda i: -losses[i]) == sorted(
        range(5), key=lambda i: heights[i]
    )
    assert [len(v) for v in report.record["tensors"].values()] == [5] * 4 and "0.weight" in text


def test_markdown_means_nothing_but_itself():
    text = evil().markdown()
    assert "<script>" not in text and "\\`c\\`" in text and "\\|" in text and "\\*d\\*" in text
    assert len(re.findall("^## ", text, re.M)) == 1


def test_junit_fails_for_errors_alone():
    suite = ElementTree.fromstring(FULL.junit())
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert (
        failed == ["N4 name-N4"]
        and suite.get("failures") == "1"
        and suite.get("tests") == str(len(suite))
    )
    names = [case.get("name").split()[0] for case in suite]
    assert {"N5", "S9", "F6", "S2"} <= set(names), "what warned and what passed is there as well"
    broken = ElementTree.fromstring(evil().junit())
    assert broken.get("errors") == "1" and broken.get("skipped") == "1"
    nothing = doctor.Report()
    nothing.done = True
    assert ElementTree.fromstring(nothing.junit()).find("testcase/skipped") is not None


def test_annotations_are_one_line_each():
    lines = evil().annotations("a,b:c.py").splitlines()
    assert len(lines) == 3 and all(line.startswith(("::error ", "::notice ")) for line in lines)
    assert "file=a%2Cb%3Ac.py" in lines[0] and "%25" in lines[1] and "%0A::error" in lines[1]
    assert [line.split(" ")[0] for line in FULL.annotations().splitlines()] == [
        "::error",
        "::warning",
        "::notice",
    ]
    assert set(reports.LEVELS) == {ERROR, WARN, NOTE}


def test_the_command_writes_them(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch\nm = torch.nn.Linear(4, 4)\nm.weight.requires_grad_(False); m.bias.requires_grad_(False)\n"
        "o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "print('script speaks')\nm(torch.randn(8, 4)).square().mean().backward()\n"
    )
    line = ["train.py", "--html", "r.html", "--junit", "r.xml", "--format", "annotations"]
    assert script.command(line) == 1
    out, err = capfd.readouterr()
    assert out.startswith("::error ") and all(x.startswith("::") for x in out.splitlines())
    assert "script speaks" in err
    assert "S1" in Page((tmp_path / "r.html").read_text()).text
    assert ElementTree.parse(tmp_path / "r.xml").getroot().get("failures") != "0"
    assert script.command(["train.py", "--html", "none/r.html"]) == 2
    assert "a folder that exists" in capfd.readouterr().err
