"""The ten slowest tests and the seconds of each notebook, out of what pytest wrote (`--junit-xml`)."""

import sys
from collections import Counter
from xml.etree import ElementTree


def main(files: list[str]) -> None:
    tests, notebooks = Counter(), Counter()
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            where, name, seconds = case.get("classname", ""), case.get("name"), float(case.get("time"))
            counter, key = (notebooks, where) if name.startswith("Cell ") else (tests, f"{where}::{name}")
            counter[key] += seconds
    for title, counter in (("The ten slowest tests", tests), ("The notebooks", notebooks)):
        print(f"{title} (of {len(counter)}, {sum(counter.values()):.0f} s in all)")
        for key, seconds in counter.most_common(10):
            print(f"{seconds:8.1f} s  {key}")


if __name__ == "__main__":
    main(sys.argv[1:])
