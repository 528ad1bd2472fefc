"""Plants faults in the package, one at a time, and looks whether the suite finds them: `python tests/reliability/mutations.py [NAME...]`.

Each fault is one changed line in a copy of the repository, against which the tests named beside it run until the first fails. What none of
them finds is listed at the end, and the exit code is 1. A name is that of a folder of the package, or a part of a fault's text.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGE = "tests/fast/test_spec_* tests/fast/test_cases.py tests/fast/test_canonical.py tests/fast/test_lint.py"
PLAN = "tests/fast/test_schedule* tests/fast/test_plan* tests/fast/test_hours.py tests/fast/test_cli_golden.py tests/train/test_image_size.py tests/train/test_reference.py"
STORE = "tests/fast/test_store* tests/train/test_pins.py tests/train/test_stop.py tests/train/test_s[nt]* tests/train/test_store_away.py"
DATA = (
    "tests/fast/test_data_* tests/fast/test_order.py tests/fast/test_index.py tests/fast/test_sampling* tests/train/test_data_* tests/train/test_loader* "
    "tests/train/test_resident.py tests/train/test_ignored_labels.py tests/train/test_reference.py"
)
ENGINE = "tests/train/test_engine_* tests/train/test_comm.py tests/train/test_reference.py tests/train/test_golden_training.py"
RUN = "tests/train/test_run_* tests/train/test_stop.py tests/train/test_p[il]* tests/train/test_due_once.py tests/train/test_nan* tests/train/test_reference.py"


@dataclass(frozen=True, slots=True)
class Fault:
    """In stagerun/`file`, the only place that has `old` has `new`."""

    file: str
    old: str
    new: str
    tests: str


def faults(tests: str, *rows: tuple[str, str, str]) -> list[Fault]:
    return [Fault(*row, tests) for row in rows]


FAULTS = [
    *faults(
        LANGUAGE,
        ("language/layers.py", "for name in dict.fromkeys((*layer.entries, *sorted(layer.doubtful)))", "for name in layer.entries"),
        ("language/layers.py", "inner = None if entry.field.is_repeated else layer.block(name)", "inner = layer.block(name)"),
        ("language/layers.py", "_holding(entry, _merged(inherited, inner)) if inherited and inner else entry", "entry"),
        ("language/layers.py", "entries.pop(other, None)", "pass"),
        ("language/layers.py", '_without(base, str(value.value).split("."))', '_without(base, str(value.value).split(".")[:1])'),
        ("language/lexer.py", "match.group(), number, match.start() + 1)", "match.group(), number, match.start())"),
        ("language/lexer.py", "if code > 255:", "if code > 256:"),
        ("language/override.py", "if key in overrides:", "if False:"),
        ("language/override.py", "Span(SET, line, 1, len(name))", "Span(SET, 1, 1, len(name))"),
        ("base/errors.py", "RECIPE = 64", "RECIPE = 65"),
    ),
    *faults(
        PLAN,
        ("schedule/policies.py", "bisect.bisect_right(stepvalue, iter)", "bisect.bisect_left(stepvalue, iter)"),
        ("schedule/policies.py", "1.0 - iter / max_iter", "1.0 - (iter + 1) / max_iter"),
        ("schedule/policies.py", "math.pow(gamma, iter // stepsize)", "math.pow(gamma, iter / stepsize)"),
        ("schedule/improvement.py", "iter >= since + solver.plateau_winsize", "iter > since + solver.plateau_winsize"),
        ("schedule/improvement.py", "iter - before.at >= how.patience_iter", "iter - before.at > how.patience_iter"),
        ("schedule/image_size.py", "iter * solver.batch_size // epoch_images(solver)", "(iter + 1) * solver.batch_size // epoch_images(solver)"),
        ("plan/counting.py", "and not changed and ref.iter <= stage.solver.max_iter", "and not changed and ref.iter < stage.solver.max_iter"),
        ("plan/__init__.py", "else source.iter) * parent", "else source.iter + 1) * parent"),
        ("plan/counting.py", "decision.usable if ref.iter == iter)", "decision.usable if ref.iter >= iter)"),
        ("plan/__init__.py", "changes=changes,", "changes=(),"),
    ),
    *faults(
        STORE,
        ("store/write.py", "        if sync:\n            file.sync()", "        pass"),
        ("store/write.py", "        disk.sync_folder(temp)\n        require_held()", "        require_held()"),
        ("store/write.py", "if name in names:\n        raise StorageError(", "if False:\n        raise StorageError("),
        ("store/write.py", "digest.update(chunk)", "digest.update(chunk[1:])"),
        ("store/read.py", "refs[:-keep]", "refs[: -keep - 1]"),
        ("store/read.py", "if not ref.ends(max_iter) and ref.name not in pinned", "if ref.name not in pinned"),
        ("store/read.py", "            rename(disk, trash, root / name)\n            disk.sync_folder(root)\n            return False", "            return False"),
        ("store/read.py", "if size != entry.size:", "if size < entry.size:"),
        ("store/read.py", "(ref.attempt, ref.serial, ref.iter, ref.stage)", "(ref.iter, ref.attempt, ref.serial, ref.stage)"),
        ("store/manifest.py", "if stored_name != name:", "if False:"),
    ),
    *faults(
        DATA,
        ("base/order.py", "epoch, offset = np.divmod(np.arange(start, start + count, dtype=np.int64), self.images)\n        return", "epoch, offset = np.divmod(np.arange(start + 1, start + count + 1, dtype=np.int64), self.images)\n        return"),
        ("base/order.py", "_permuted(self.seed, Purpose.ORDER,", "_permuted(self.seed, Purpose.TRANSFORM,"),
        ("base/order.py", "turn = epoch * self._shares[label] + slot", "turn = slot"),
        ("data/transform.py", "transform.mirror and randint(numbers[MIRROR], 2) == 1", "transform.mirror and randint(numbers[MIRROR], 2) == 0"),
        ("data/transform.py", "_below(numbers[:, TOP], high - side + 1)", "_below(numbers[:, TOP], high - side)"),
        ("data/transform.py", "Rectangle((height - side) // 2, (width - side) // 2, side, side)", "Rectangle((height - side + 1) // 2, (width - side) // 2, side, side)"),
        ("data/transform.py", "choices = resize.max_size - resize.min_size + 1", "choices = resize.max_size - resize.min_size"),
        ("data/transform.py", "if randint(swap, 1001) < 500:", "if randint(swap, 1001) < 400:"),
        ("data/index.py", "return (lmdb.size, lmdb.meta.transaction) != (index.facts.file_size, index.facts.transaction)", "return False"),
        ("data/loaders.py", "labels = np.where(labels == ignored, -1, labels)", "pass"),
    ),
    *faults(
        ENGINE,
        ("engine/update.py", "reducer.add(loss / how.logical_workers, worker", "reducer.add(loss, worker"),
        ("engine/update.py", "torch.where(norm > limit, limit / norm,", "torch.where(norm > limit, limit / norm**2,"),
        ("engine/update.py", "sums.loss_sum / how.logical_workers", "sums.loss_sum"),
        ("engine/solvers.py", "torch._foreach_add_(g, term, alpha=decay)", "torch._foreach_add_(g, term, alpha=2 * decay)"),
        ("engine/solvers.py", "rate, decay = knobs.lr * group.lr_mult, knobs.weight_decay * group.decay_mult", "rate, decay = knobs.lr * group.lr_mult, knobs.weight_decay"),
        ("engine/solvers.py", "w / (gradient + decay * w + self.settings.delta)", "w / (gradient + self.settings.delta)"),
        ("engine/solvers.py", "torch._foreach_add_(w, v, alpha=-(1 + m))", "torch._foreach_add_(w, v, alpha=-m)"),
        ("engine/solvers.py", "-rate * math.sqrt(second) / first for", "-rate / first for"),
        ("engine/loop.py", "iter % every == 0 and iter != last", "iter % every == 0"),
        ("comm/elastic.py", "1 << ((high - low - 1).bit_length() - 1)", "(high - low) // 2"),
    ),
    *faults(
        RUN,
        ("train/restore.py", "begins = solver.carry_momentum or", "begins = not solver.carry_momentum or"),
        ("train/stage_loop.py", "order.dropout_seed(solver.random_seed, position)", "order.dropout_seed(solver.random_seed, 0)"),
        ("train/restore.py", "torch.manual_seed(solver.random_seed)", "torch.manual_seed(0)"),
        ("train/hooks/snapshots.py", "run.planned.position + run.planned.skipped + state.iter * solver.batch_size", "run.planned.position + state.iter * solver.batch_size"),
        ("train/hooks/snapshots.py", "plateau=state.plateau if", "plateau=None if"),
        ("train/hooks/snapshots.py", "if lacks_end or self.saved != state.iter:", "if lacks_end:"),
        ("train/hooks/evaluations.py", "self.state.tested = self.state.iter", "pass"),
        ("train/hooks/early_stop.py", "else 100 * score.top1\n", "else score.top1\n"),
        ("train/keeper.py", "if spared is None else 1", "if spared is None else 2"),
        ("train/keeper.py", "return not finished and bool(changed_fields(ref, training))", "return False"),
    ),
]  # fmt: skip


def found(fault: Fault, copy: Path) -> bool:
    file = copy / "stagerun" / fault.file
    text = file.read_text()
    assert text.count(fault.old) == 1, f"stagerun/{fault.file} has this {text.count(fault.old)} times: {fault.old}"
    file.write_text(text.replace(fault.old, fault.new))
    try:
        tests = [str(path.relative_to(copy)) for name in fault.tests.split() for path in sorted(copy.glob(name))]
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, cwd=copy, capture_output=True, env=environment(copy)).returncode == 1
    finally:
        file.write_text(text)


def environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def main(names: Sequence[str]) -> int:
    chosen = [one for one in FAULTS if not names or any(name in one.file or name in one.old for name in names)]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "stagerun"
        kept = shutil.ignore_patterns(".git", ".venv", "out", ".data", "__pycache__")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=kept)
        for number, fault in enumerate(chosen, 1):
            start = time.monotonic()
            seen = found(fault, copy)
            missed += [] if seen else [fault]
            seconds = time.monotonic() - start
            print(
                f"{number}/{len(chosen)} {'found' if seen else 'MISSED'} {seconds:.0f} s  {fault.file}: {fault.old!r}",
                flush=True,
            )
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
