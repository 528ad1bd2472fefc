"""The names of the package that tests may use besides its commands and its library.

Whoever moves one of them changes this file and no test. A name is listed where a promise is a formula or a value, and no command shows it:
values, numerics, and what reads and writes the package's formats. A name's module is imported when the name is first used.
"""

from importlib import import_module

_BY_MODULE = {
    "base.errors": "DataError Diverged ExitCode FolderInUseError Level PeerError PermissionDenied Problems RecipeError "
    "ResumeRefused Span StagerunError StorageError UsageError",
    "base.events": "EnsembleTested Event Iterated NotFinite Note PieceStarted Retraced RunFinished RunStarted SnapshotDue "
    "SnapshotFailed SnapshotWritten StageFinished StageStarted Stopped Synchronised Tested Compressed "
    "CompressedItem CompressionChosen Failed Proof TestDue",
    "base.knobs": "Knobs",
    "base.recipe": "Cache ChannelOrder Compression Determinism EnsembleRule InterpMode Memory Method Model Outer PadMode ParamKind "
    "ParamRule Precision RandomResize RandomResizedCrop Schedule Scope Solver Source Stage Sync SyncMethod "
    "Transform Weights",
    "base.snapshots": "Inventory SnapshotRef same_set",
    "base": "caffe_blobs caffe_file net order recipe spans caffe_h5 units",
    "system.world": "World",
    "system.process": "Identity this_process",
    "system.pulse": "Limits Pulse Section",
    "plan.rehearsal": "cost_key rehearsal",
    "plan.render": "render_json render_text",
    "tools.fmt.style": "formatted",
    "tools.lint": "RULES lint problems",
    "tools.plan.why": "explained",
    "language.proto": "caffe_pb2 stagerun_pb2 tfexample_pb2",
    "language.proto.caffe_pb2": "Datum",
    "language.stored": "read_recipe",
    "language.tree": "SCHEDULE SOLVER",
    "language.net": "net_of State read resolve",
    "data.write": "write_lmdb",
    "data.records": "ListRecords LmdbSource",
    "data.pictures": "Decoded make_memory",
    "data.jpeg": "Rectangle read_header",
    "data.loader": "Batch Loader",
    "data.loaders": "training_loader",
    "data.preflight": "preflight",
    "data.scratch": "CopyStopped",
    "data.importing.images": "ImportOptions ImportWork",
    "tools.data.sources": "SourceOptions open_source",
    "system.lmdb_file": "SIDE_FILE set_of",
    "train.log_file": "JsonLines Tail read_last_life",
    "tools.report.replay": "Reader",
    "comm.compression": "Draw make",
    "engine.codec": "combined decode encode",
    "engine.images": "Normalise",
    "engine.loop": "StageLoop train",
    "engine.mixing": "Mixed Mixture",
    "engine.parameters": "Parameter kind_of",
    "engine.solvers": "make_update",
    "engine.state": "Capture TrainState average digests make_state momentum restore weights",
    "engine.update": "Outcome update Arithmetic hopeless",
    "models.vision": "torchvision_models torchvision_part",
    "train.environment": "environment_of other_machines",
    "train.keeper": "Keeper Lineage Selection",
    "train.options": "RunOptions",
    "train.progress": "AVERAGE MOMENTUM Progress RECIPE STATE WEIGHTS",
    "train.stored": "load_network most_bytes open_snapshot Trust",
    "train.stage_start": "restored",
    "train.worker": "Context StageRun Stopping",
    "base.text": "duration size",
    "drawing.picture": "make_picture",
    "tools.report.effects": "t95",
    "train.logs.console": "Console",
    "comm.group": "peers",
    "schedule.plateau": "FRESH follow",
    "train": "walk",
    "system.imports": "with_imports",
    "engine.weights_file": "tensors_in",
    "plan.transfer": "Origin transfer",
    "store.given": "looked_at",
    "tools.weights.caffe": "caffemodel",
    "train.caffe_state": "remember",
    "train.given": "planned_transfer",
    "comm.line": "Line",
    "engine.apart": "update_replicas",
    "engine.compression": "reducer_of",
    "engine.evaluate": "evaluate average_precision",
    "train.walk": "run",
    "language.networks": "NETWORKS",
    "models.net.layers": "LAYERS",
    "engine": "losses augment mixing",
    "base.code": "Sources",
    "plan.counting": "targets",
    "engine.averages": "BatchStatistics",
    "train.snapshotter": "Snapshotter",
    "language": "tree",
    "language.build": "completed",
    "language.parse": "parse",
    "tools.rehearse": "sweep",
    "drawing": "picture",
    "train.logs.tensorboard": "TensorBoard",
    "drawing.scale": "make_scale",
    "tools.view": "chart",
    "data": "datum index indexing pixels transform jpeg lmdb_offsets",
    "base.shares": "shares",
    "schedule.image_size": "crop_size",
    "data.importing": "engine odd",
    "data.python_transform": "PythonTransform",
}

NAMES = {name: f"stagerun.{module}" for module, names in _BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in NAMES:
        raise AttributeError(f"no test may use {name!r}: it isn't listed in {__file__}")
    home = import_module(NAMES[name])
    globals()[name] = found = getattr(home, name, None) or import_module(f"{NAMES[name]}.{name}")
    return found
