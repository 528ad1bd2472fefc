"""A long-tailed part of Fashion-MNIST to measure `sampling` with: the first 1,000 images of class 0 down to the first 10 of class 9.

`.venv/bin/python scripts/long_tail.py .data` reads .data/fashion-mnist, which `scripts/quickstart` makes, and writes .data/fashion-longtail.
The numbers fall by the same factor from class to class, as in Cui et al., Class-Balanced Loss (arXiv:1901.05555). The test images are
1,000 of each class, so that top-1 is the mean accuracy of the classes.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stagerun.data.datum import parse
from stagerun.data.index import save
from stagerun.data.records import LmdbSource
from stagerun.tools.data.fashion import CLASSES
from stagerun.tools.data.indexing import build
from stagerun.tools.data.new_lmdb import write_lmdb

MOST, LEAST = 1000, 10
SIZES = [round(MOST * (LEAST / MOST) ** (label / 9)) for label in range(10)]


def chosen(source: LmdbSource) -> Iterator[bytes]:
    taken: Counter[int] = Counter()
    for i in range(len(source)):
        _, record = source.get(i)
        label = parse(record).label
        if taken[label] < SIZES[label]:
            taken[label] += 1
            yield record


def main(folder: Path) -> None:
    target = folder / "fashion-longtail" / "train_lmdb"
    print(
        f"{target}: {write_lmdb(str(target), chosen(LmdbSource(str(folder / 'fashion-mnist' / 'train_lmdb'))))} records"
    )
    save(build(str(target), classes=CLASSES).index, str(target))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
