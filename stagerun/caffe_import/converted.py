"""What an import is asked for, and what it makes of a folder, before it is written. Values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stagerun.caffe_import.left import Findings
from stagerun.caffe_import.lines import Line, Setting
from stagerun.caffe_import.stages import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is told on the command line; None is: as the files say. `nets` is False where solver files are imported alone: what
    nets would have said is in the last five; None is asked for in the written files. Sources are absolute paths."""

    order: tuple[str, ...] = ()
    workers: int | None = None
    model: str | None = None
    images: int | None = None
    val_images: int | None = None
    nets: bool = True
    batch_size: int | None = None
    device_batch_size: int | None = None
    classes: int | None = None
    train_source: str | None = None
    val_source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """`settings` by stage, fields in no order; `seed` is that of the schedule, from all solvers alike. `nets`: the file of each
    stage's net, by stage; none where it stands in the solver, or was not read."""

    steps: tuple[Step, ...]
    settings: Mapping[str, Mapping[str, Setting]]
    model: tuple[Line, ...]
    data: tuple[Line, ...]
    seed: Line
    found: Findings
    nets: Mapping[str, str] = field(default_factory=dict)
