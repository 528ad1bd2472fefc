"""Builds a recipe.Schedule from the texts of a folder, or reports every mistake in them. Pure, except for the readers passed in."""

import posixpath
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from google.protobuf.descriptor import Descriptor

from stagerun.base import recipe
from stagerun.base.errors import Problem, Problems, RecipeError, Span, StagerunError, UsageError
from stagerun.language import build, labels, layers, override, ranges, references, rules, stages
from stagerun.language.code import MISSING, LocalFiles, Reader, Text, Unreadable
from stagerun.language.identity import schedule_of
from stagerun.language.nets import Files, Images, nets_of, of_stage
from stagerun.language.override import Override
from stagerun.language.parse import parse
from stagerun.language.stages import Ends, Node
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, Block, Doubtful, Entry, Value, View, seen_by

SCHEDULE_FILE = "schedule.prototxt"
Records = Callable[[str], int]  # the folder of an LMDB -> its number of records; StagerunError


def read(
    texts: Mapping[str, Text],
    root: str,
    overrides: Sequence[str] = (),
    shown: str = "",
    records: Records | None = None,
    nets: Files | None = None,
) -> recipe.Schedule:
    """Return the schedule that the files describe. RecipeError with all mistakes of all files. `texts`:
    schedule.prototxt and the files it names, by their path below the folder; other files don't exist. `root`: the
    folder's absolute path, `shown`: as the user wrote it, for messages. `overrides`: the arguments of `--set`.
    `records` counts the LMDB of a Source without `images`. `nets` reads Caffe's nets and the files they name; None:
    they are in `texts`."""
    return Folder(lambda file: texts.get(file, MISSING), root, shown, records, nets).schedule(overrides)


class Folder:
    """A schedule while it is read. Mistakes go to `problems`. `text` reads a file below its folder, `labels` a file of labels, which may be
    large; `records` is None if LMDBs must not be read."""

    def __init__(
        self,
        text: Reader,
        root: str,
        shown: str,
        records: Records | None = None,
        nets: Files | None = None,
        labels: Reader | None = None,
    ) -> None:
        self.root, self.shown, self.path = root, shown, posixpath.join(shown, SCHEDULE_FILE)
        self.text, self.labels = text, labels or text
        self.records = cache(records) if records is not None else None
        self.problems = Problems()
        self.kept: dict[str, str] = {}  # the texts of the solver files, by their paths as in spans
        self.parsed = cache(self._parsed)
        self.nets = nets_of(nets or Files(text), shown, self.problems)
        self.python = LocalFiles(text, shown, self.problems)

    def schedule(self, overrides: Sequence[str]) -> recipe.Schedule:
        problems, written = self.problems, self.parsed(SCHEDULE_FILE, SCHEDULE)
        if isinstance(written, Unreadable):
            hint = "a schedule is a folder with a schedule.prototxt and a file per stage"
            raise RecipeError([Problem(written.reason, Span(self.path, 1, 1), hint)])
        names = stages.names_of(stages.nodes(written, Problems())) if overrides else []
        changes = override.read(overrides, names, problems)
        changes = [replace(change, leaf=ranges.sound(change.leaf, problems)) for change in changes]
        changed = _changed(written, changes)
        nodes = stages.nodes(changed, problems)
        files = {node.name: self._file(node) for node in nodes}
        schedule = self._counted(self.nets.moved(changed, files.values()))
        settings = self._settings(schedule, nodes, files, changes)
        schedule = self._with_networks(schedule, settings)

        lengths = {name: n for name, block in settings.items() if (n := View(block).known("max_iter"))}
        sure = {name: n for name, block in settings.items() if (n := build.earliest_end(View(block)))}
        ends = Ends(lengths, sure)
        nodes = references.with_teachers(stages.check_branches(nodes, ends, problems), settings, problems)
        order = stages.in_running_order(nodes, problems)
        rules.check(schedule, nodes, settings, posixpath.basename(self.root), problems)
        for block in settings.values():
            channels = View(seen_by(block, schedule)).known("model", "channels")
            self.nets.check_means(block, channels, partial(build.path_of, self.root))
        references.check_starts(schedule, nodes, settings, problems)
        references.check_ensembles(schedule, nodes, settings, ends, problems)
        references.check_teachers(nodes, schedule, settings, self.nets, partial(self._images, schedule), problems)
        digests = labels.check(View(schedule), settings, self.labels, partial(posixpath.join, self.shown), problems)
        named = [code for block in settings.values() for code in build.code_entries(block, schedule)]
        unique = {(id(block), id(entry)): (block, entry) for block, entry, _ in named}  # stages share entries
        sources = self.python.sources(rules.model.require_code(unique.values(), self.python, problems))
        if problems:
            raise RecipeError(problems.all())

        python = [(posixpath.join(self.shown, name), text) for name, text in sources.files]
        context = build.Context(self.root, self.path, sources, digests, self.nets.held)
        read = [*self.kept.items(), *python, *self.nets.kept.items()]
        return schedule_of(schedule, settings, order, lengths, context, self.python, read)

    def _parsed(self, file: str, kind: Descriptor) -> Block | Unreadable:
        text = self.text(file)
        if isinstance(text, Unreadable):
            return text
        path = posixpath.join(self.shown, file)
        self.kept[path] = text if isinstance(text, str) else text.decode(errors="replace")
        return ranges.sound(parse(path, text, kind, self.problems), self.problems)

    def _file(self, node: Node) -> Block:
        """Return the settings in a stage's file; an empty, broken Block if it can't be read."""
        if node.file is None:
            return node.solver or Block(SOLVER, node.file_place, broken=True)
        parsed = self.parsed(node.file, SOLVER)
        if isinstance(parsed, Block):
            return parsed
        needed = parsed != MISSING or not node.filled
        if needed:
            path = posixpath.join(self.shown, node.file)
            hint = "a stage's settings are in its file, which `solver:` names, or here in `solver_param { ... }`"
            self.problems.add(node.file_place, f"{path}: {parsed.reason}", hint)
        return Block(SOLVER, node.file_place, broken=needed)

    def _settings(
        self, schedule: Block, nodes: Sequence[Node], files: Mapping[str, Block], changes: Sequence[Override]
    ) -> dict[str, Block]:
        """Return the settings of each stage by its name, durations in iterations."""
        nothing = Block(SOLVER, schedule.place, broken="solver" in schedule.doubtful or schedule.broken)
        for_all = [change for change in changes if change.stage is None]
        shared = [change for change in for_all if change.path[:1] == ("solver",)]
        inside = [replace(change, path=change.path[1:]) for change in shared]
        base = [schedule.block("solver") or nothing]
        base += [block for change in for_all if not change.path for block in change.leaf.blocks("solver")]
        base += _as_layer(inside)
        layers.check_layers(base, self.problems)
        bottom = layers.merge(base)

        def merge_all(bottom: Block, above: Sequence[Block], overrides: Sequence[Sequence[Override]]) -> Block:
            merged = layers.merge([_deep(bottom, inside), *above])
            for changed in overrides:
                merged = _deep(layers.merge([merged, *_as_layer(changed)]), changed)
            return of_stage(merged, schedule.block("model"))

        written: dict[str, Block] = {}
        settings: dict[str, Block] = {}
        for node in nodes:
            file = files[node.name]
            above = [file] if node.sweep is None else [file, node.sweep]
            # If one block makes several stages: changes for all of them first, then changes for this one.
            names = (node.group, node.name)
            overrides = [[c for c in changes if c.stage == name] for name in names if name is not None]
            set_here = [layer for changed in overrides for layer in _as_layer(changed)]
            layers.check_layers([bottom, *above, *set_here], self.problems)
            merged = merge_all(bottom, above, overrides)
            net = self.nets.below(merged, layers.merge([bottom, *above]), schedule)
            if net is not None:  # a Caffe net is the lowest layer
                merged = merge_all(layers.merge([net, *base]), above, overrides)
            named = zip(above, ("stage", "sweep"), strict=False)
            spans = {entry.place: layer for block, layer in named for _, entry in block.walk()}
            merged = self._counted(replace(merged, place=file.place, layers=spans))
            written[node.name] = merged
            images = View(seen_by(merged, schedule)).known("data", "train", "images")
            settings[node.name] = layers.in_iterations(merged, images, self.problems)
        override.check_reached(shared, written, self.problems)
        return settings

    def _counted(self, holder: Block) -> Block:
        """Return a Schedule or Solver with `images` in every Source of its `data`."""

        def both(data: Block) -> Block:
            return data.changed("train", self._with_images).changed("val", self._with_images)

        return holder.changed("data", both)

    def _with_images(self, block: Block) -> Block:
        """Count the LMDB of a Source without `images`, if LMDBs may be read."""
        source = View(block)
        with suppress(Doubtful):
            folder = source.text("source")
            if source.has("images") or folder is None:
                return block
            message, hint = "Source lacks `images`", "write `images: N` with the number of its records"
            try:
                if self.records is not None:
                    number = self.records(build.path_of(self.root, folder))
                    value = Value(number, str(number), Span(layers.LMDB, 1, 1))
                    entry = Entry(SOURCE.fields_by_name["images"], value.span, (value,))
                    return replace(block, entries={**block.entries, "images": entry})
            except StagerunError as error:
                message += f", and its images can't be counted: {error.message}"
                hint = "check `source`; if the LMDB is on another machine, write `images: N` with the number of its records"
                if isinstance(error, UsageError):
                    hint = error.hint
            self.problems.add(block.place, message, hint)
        return block

    def _with_networks(self, schedule: Block, settings: dict[str, Block]) -> Block:
        """Return the schedule, and change the settings, with the classes, channels and multipliers of their nets."""
        images = {name: self._images(schedule, block) for name, block in settings.items()}
        sharing = [images[name] for name, block in settings.items() if "model" not in block.entries]
        sized = self.nets.sized(schedule.block("model"), sharing or list(images.values()))
        for name, block in settings.items():
            model = self.nets.sized(block.block("model"), [images[name]], sized)
            settings[name] = self.nets.with_rules(_with_model(block, model), model or sized)
        return _with_model(schedule, sized)

    def _images(self, schedule: Block, settings: Block) -> Images:
        source = View(seen_by(settings, schedule)).known("data", "train", "source")
        return Images(settings, build.path_of(self.root, source) if source else None)


def _with_model(holder: Block, model: Block | None) -> Block:
    return holder if model is None or model is holder.block("model") else holder.changed("model", lambda _: model)


def _changed(schedule: Block, changes: Sequence[Override]) -> Block:
    """Apply each `--set` that changes the Schedule rather than a Solver."""
    for change in changes:
        solver = change.path[:1] == ("solver",) or (not change.path and "solver" in change.leaf.entries)
        if change.stage is None and not solver:
            schedule = layers.edit(schedule, change.path, change.leaf)
    return schedule


def _as_layer(changes: Sequence[Override]) -> list[Block]:
    """Return the changes of whole fields as one layer."""
    whole = [c.leaf for c in changes if not c.path]
    if not whole:
        return []
    entries = {name: entry for leaf in whole for name, entry in leaf.entries.items()}
    return [Block(SOLVER, whole[0].place, entries, frozenset().union(*(leaf.doubtful for leaf in whole)))]


def _deep(block: Block, changes: Sequence[Override]) -> Block:
    """Apply the changes inside messages to the inherited settings."""
    for change in changes:
        if change.path:
            block = layers.edit(block, change.path, change.leaf)
    return block


# -- without reporting mistakes


def stage_nodes(text: Text) -> list[Node]:
    """Return the stages of a schedule.prototxt, as far as it can be read, without their references."""
    ignored = Problems()
    schedule = Block(SCHEDULE, Span(SCHEDULE_FILE, 1, 1))
    if not isinstance(text, Unreadable):
        schedule = parse(SCHEDULE_FILE, text, SCHEDULE, ignored)
    return stages.nodes(schedule, ignored)
