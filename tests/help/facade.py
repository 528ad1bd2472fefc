"""The names of the package that tests may use besides its commands and its library.

Whoever moves one of them changes this file and no test. A name is listed where a promise is a formula or a value, and no command shows it:
values, numerics, and what reads and writes the package's formats. A name's module is imported when the name is first used.
"""

from importlib import import_module

_BY_MODULE = {
    # Values, and the machine
    "base": "order recipe units",
    "base.code": "Sources",
    "base.errors": "DataError Diverged ExitCode FolderInUseError Level PeerError PermissionDenied Problems RecipeError "
    "ResumeRefused Span StagerunError StorageError UsageError",
    "base.events": "Compressed CompressedItem CompressionChosen EnsembleTested Event Failed Iterated Note NotFinite "
    "PieceStarted Proof Retraced RunFinished RunStarted SnapshotDue SnapshotFailed SnapshotWritten "
    "StageFinished StageStarted Stopped Synchronised TestDue Tested",
    "base.recipe": "Cache ChannelOrder Compression Determinism InterpMode Memory Method Model Outer PadMode "
    "ParamKind ParamRule Precision RandomResize RandomResizedCrop Schedule Scope Solver Source Stage Sync "
    "SyncMethod Transform Weights",
    "base.shares": "shares",
    "base.snapshots": "Inventory same_set SnapshotRef",
    "base.text": "duration size",
    "base.weights": "is_caffes",
    "system.imports": "with_imports",
    "system.image_sets": "set_of SIDE_FILE",
    "system.process": "Identity this_process",
    "system.pulse": "Limits Pulse Section",
    "system.world": "World",
    # The language and its policies
    "language": "tree",
    "language.build": "completed",
    "caffe": "binary blob_names hdf5 layers map_layers names resolve",
    "caffe.functions": "FUNCTIONS",
    "caffe.resolve": "net_of",
    "language.networks": "NETWORKS",
    "language.parse": "parse",
    "base.proto": "stagerun_pb2",
    "language.proto": "caffe_pb2 tfexample_pb2",
    "language.proto.caffe_pb2": "Datum",
    "language.stored": "read_recipe",
    "language.tree": "SCHEDULE SOLVER",
    "schedule": "Knobs",
    "schedule.image_size": "crop_size",
    "schedule.plateau": "follow FRESH",
    # Plans and snapshots
    "plan.counting": "targets",
    "plan.hours": "cost_key",
    "tools.rehearse.schedule": "rehearsal",
    "plan.render": "render_json render_text",
    "train.transfer": "Origin transfer",
    "data.weights": "looked_at",
    # Images
    "data": "index jpeg pictures pixels transform",
    "data.importing": "engine odd",
    "data.jpeg": "read_header Rectangle",
    "data.loader": "Batch Loader Training",
    "data.loaders": "training_loader",
    "data.preflight": "preflight",
    "data.python_transform": "PythonTransform",
    "data.records": "LmdbSource",
    "data.scratch": "CopyStopped",
    # Numerics
    "caffe.export": "caffemodel",
    "caffe.solver_state": "remember",
    "wire.operators": "Draw",
    "wire.messages": "Kept operator",
    "comm": "spans",
    "comm.group": "peers",
    "wire.server": "Line open_lines",
    "engine": "augment evaluate losses mixing",
    "engine.averages": "BatchStatistics",
    "engine.codec": "combined decode encode",
    "engine.evaluate": "average_precision",
    "engine.images": "Normalise",
    "engine.loop": "StageLoop train",
    "engine.mixing": "Mixture",
    "engine.parameters": "kind_of Parameter",
    "engine.solvers": "make_update",
    "engine.state": "average Capture digests finite make_state momentum restore TrainState weights",
    "engine.update": "Arithmetic hopeless Outcome update",
    "engine.weights_file": "tensors_in",
    "models.vision": "torchvision_models torchvision_part",
    # A run
    "train.context": "Context StageRun Stopping",
    "train.exchange": "Exchange exchange_of",
    "train.environment": "environment_of other_machines",
    "train.starting_weights": "planned_transfer",
    "train.keeper": "Keeper Lineage Selection",
    "logs.log_file": "JsonLines Log read_last_life",
    "logs.console": "Console",
    "logs.tensorboard": "TensorBoard",
    "train.options": "RunOptions",
    "train.progress": "AVERAGE MOMENTUM Progress RECIPE STATE WEIGHTS",
    "train.restore": "restored",
    "train.run": "run",
    "train.snapshotter": "Snapshotter",
    "tools.weights.stored": "load_network open_snapshot Trust",
    "train.snapshot_sizes": "most_bytes",
    # Tools and pictures
    "drawing": "picture",
    "drawing.picture": "make_picture",
    "drawing.scale": "make_scale",
    "tools.data": "indexing",
    "tools.data.images": "ImportOptions ImportWork",
    "tools.data.new_lmdb": "write_lmdb",
    "tools.data.pictures": "ListRecords",
    "tools.data.sources": "open_source SourceOptions",
    "tools.fmt.style": "formatted",
    "tools.lint": "lint RULES",
    "tools.plan": "hours",
    "tools.plan.why": "explained",
    "tools.rehearse": "sweep",
    "tools.report.effects": "t95",
    "tools.report.replay": "Reader",
    "tools.view": "chart",
}

NAMES = {name: f"stagerun.{module}" for module, names in _BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in NAMES:
        raise AttributeError(f"no test may use {name!r}: it isn't listed in {__file__}")
    home = import_module(NAMES[name])
    globals()[name] = found = getattr(home, name, None) or import_module(f"{NAMES[name]}.{name}")
    return found
