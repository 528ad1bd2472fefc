"""`--log-format caffe`: what Caffe would have printed, in glog's form, for the scripts that read Caffe's logs.

Caffe starts at iteration 0 in every solver file. Here one job runs several, and a script that reads one file wants one
axis: `Iteration N` counts through all stages in the order in which they run, branches too. A resumed run starts at the N it
resumes at, as Caffe's `--snapshot` does. As in Caffe N counts the updates done before the line: the loss of `Iteration 0` is
that of the first weights, a stage's `display` counts from its first iteration, and a test at N follows N updates.

The losses are means over the global batch. The learning rate comes before the loss, not after it: parse_log.py gives each
row the last rate it has read. Lines that Caffe doesn't have come from `stagerun:1`, and none of them looks like one of Caffe's.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime

from stagerun.base import events
from stagerun.base.text import to_nowhere
from stagerun.train.logs.course import Leg
from stagerun.train.logs.results import (
    ensemble_line,
    ensembles_table,
    failed_line,
    finished_line,
    ordered,
    piece_line,
    results_table,
)
from stagerun.train.results import Before

OURS = "stagerun:1"
# Where Caffe's lines come from; some scripts look for these.
SOLVING, LOSS, TRAIN_OUTPUT, RATE = "solver.cpp:279", "solver.cpp:228", "solver.cpp:244", "sgd_solver.cpp:106"
TESTING, TEST_OUTPUT, SNAPSHOT = "solver.cpp:337", "solver.cpp:404", "solver.cpp:454"
STOPPED, DONE = "solver.cpp:301", "caffe.cpp:254"


def glog(text: str, severity: str = "I", place: str = OURS) -> str:
    """Each line of the text with glog's prefix: severity, month and day, local time, process, `place`."""
    prefix = f"{severity}{datetime.now():%m%d %H:%M:%S.%f} {os.getpid():5d} {place}] "
    return "\n".join(prefix + line for line in text.splitlines())


class CaffeLog:
    """A sink for events, in place of Console. `display` maps a stage to the iterations between two lines (0: none);
    `results` and `ensembles` are those of stages and ensembles finished before."""

    def __init__(
        self,
        legs: Mapping[str, Leg],
        display: Mapping[str, int],
        parents: Mapping[str, Before],
        results: Sequence[events.StageFinished] = (),
        ensembles: Sequence[events.EnsembleTested] = (),
    ) -> None:
        self.legs, self.display, self.parents = legs, display, parents
        self.results = {result.stage: result for result in results}
        self.ensembles = {tested.name: tested for tested in ensembles}
        self.started: events.RunStarted | None = None

    def __enter__(self) -> "CaffeLog":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        """A line of ours; a warning where the text says so."""
        plain = text.removeprefix("warning: ")
        self._print(plain, "I" if plain == text else "W", OURS)

    def _print(self, text: str, severity: str, place: str) -> None:
        try:
            print(glog(text, severity, place), flush=True)
        except OSError:  # no one reads any more; training goes on, and log.jsonl has everything
            to_nowhere(sys.stdout)

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self.started = event
                self.say(
                    f"{event.iterations_left} of {event.iterations} iterations to do, workers: {event.workers} on "
                    f"{event.device}, threads each: {event.threads}, output in {event.out}"
                )
                self._print(f"Solving {event.schedule}", "I", SOLVING)
            case events.StageStarted():
                self.ensembles = {k: e for k, e in self.ensembles.items() if not e.undone_by(event.stage, event.iter)}
                leg = self.legs[event.stage]
                self.say(
                    f"stage {event.stage}: {event.iter} of {event.max_iter} iterations done, batch {event.batch_size}, "
                    f"from {event.start}; counted on from {leg.iterations_above + event.iter}"
                )
            case events.PieceStarted():
                # Its iterations have been printed, and would be a second curve on the same axis.
                self.say(piece_line(event))
            case events.Note():
                self._print(event.text, "W" if event.warning else "I", OURS)
            case events.NotFinite():
                self._print(failed_line(event), "W", OURS)
            case events.Iterated():
                self._iterated(event)
            case events.Tested():
                self._tested(event)
            case events.TestedBeside():  # in Caffe's form it would be a second row of the same iteration
                n = self.legs[event.stage].iterations_above + event.iter
                weights = "averaged weights on" * event.ema or "on"
                self.say(
                    f"{weights} {event.val} at {n}: top-1 {event.top1:g}, top-5 {event.top5:g}, loss {event.loss:g}"
                )
            case events.SnapshotWritten():
                file = f"{self.started.out if self.started else ''}/snapshots/{event.name}"
                self._print(f"Snapshotting to binary proto file {file}", "I", SNAPSHOT)
            case events.SnapshotFailed():
                self._print(f"no snapshot of {event.stage} at {event.iter}: {event.message}", "W", OURS)
            case events.StageFinished():
                self.results[event.stage] = event
            case events.EnsembleTested():
                # No line of Caffe's: that would be a row of the curve of some stage.
                self.ensembles[event.name] = event
                self.say(ensemble_line(event))
            case events.Stopped():
                self._print("Optimization stopped early.", "I", STOPPED)
                self.say(f"{event.reason}; everything is saved: run the same command again to go on")
            case events.RunFinished():
                done = [self.results[stage] for stage in self.legs if stage in self.results]
                self.say(results_table(done, self.parents, self.ensembles.values()))
                if self.ensembles:
                    self.say(ensembles_table(ordered(self.ensembles, self.started)))
                if event.not_chosen:
                    self.say(finished_line(event))
                self._print("Optimization Done.", "I", DONE)

    def _iterated(self, event: events.Iterated) -> None:
        done = event.iter - 1
        every = self.display.get(event.stage, 0)
        if not every or done % every:
            return
        n = self.legs[event.stage].iterations_above + done
        self._print(f"Iteration {n}, lr = {event.lr:g}", "I", RATE)
        self._print(f"Iteration {n}, loss = {event.loss:g}", "I", LOSS)
        self._print(f"    Train net output #0: loss = {event.loss:g} (* 1 = {event.loss:g} loss)", "I", TRAIN_OUTPUT)

    def _tested(self, event: events.Tested) -> None:
        n = self.legs[event.stage].iterations_above + event.iter
        if event.ema:
            # In Caffe's form it would be a second row of other columns, which breaks both parse_log scripts.
            self.say(f"averaged weights at {n}: top-1 {event.top1:g}, top-5 {event.top5:g}, loss {event.loss:g}")
            return
        self._print(f"Iteration {n}, Testing net (#0)", "I", TESTING)
        outputs = (
            # parse_log.sh takes #0 for the accuracy and #1 for the loss.
            f"accuracy = {event.top1:g}",
            f"loss = {event.loss:g} (* 1 = {event.loss:g} loss)",
            f"accuracy_top5 = {event.top5:g}",
        )
        for i, output in enumerate(outputs):
            self._print(f"    Test net output #{i}: {output}", "I", TEST_OUTPUT)
