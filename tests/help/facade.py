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
    "base.units": "shares",
    "base.snapshots": "Inventory same_set SnapshotRef",
    "base.text": "duration size",
    "base.weights": "is_caffes",
    "system.image_sets": "set_of SIDE_FILE with_imports",
    "system.process": "Identity this_process",
    "system.pulse": "Limits Pulse Section",
    "system.world": "World",
    # The language and its policies
    "language": "tree",
    "language.build": "completed",
    "caffe": "binary layers map_layers resolve tensors",
    "caffe.network": "FUNCTIONS",
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
    "schedule.improvement": "follow_losses FRESH",
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
    "data.loader": "Batch Loader PythonTransform Training",
    "data.loaders": "training_loader preflight",
    "data.records": "LmdbSource",
    "data.write": "CopyStopped",
    # Numerics
    "caffe.tensors": "caffemodel remember",
    "wire.operators": "Draw",
    "wire.messages": "Kept operator",
    "comm": "spans",
    "comm.group": "peers",
    "wire.asynchronous": "open_lines",
    "engine": "augment evaluate losses",
    "engine.averages": "BatchStatistics",
    "engine.codec": "decode encode tensors_in",
    "engine.images": "Normalise",
    "engine.loop": "StageLoop train",
    "engine.losses": "Mixture",
    "engine.parameters": "kind_of Parameter",
    "engine.solvers": "make_update",
    "engine.state": "average Capture make_state momentum restore TrainState weights",
    "engine.update": "Arithmetic hopeless Outcome update",
    "models.vision": "torchvision_models torchvision_part",
    # A run
    "train.context": "Context StageRun Stopping",
    "train.exchange": "Exchange exchange_of",
    "train.environment": "environment_of other_machines",
    "train.starting_weights": "planned_transfer",
    "train.keeper": "Keeper Lineage Selection",
    "logs.log_file": "JsonLines Log read_last_life",
    "logs.console": "Console",
    "logs.table": "TensorBoard",
    "train.progress": "AVERAGE MOMENTUM Progress RECIPE STATE WEIGHTS most_bytes",
    "train.restore": "restored",
    "train.run": "run",
    "train.hooks.snapshots": "Snapshotter",
    "tools.weights.snapshot": "load_network open_snapshot",
    # Tools and pictures
    "look": "chart",
    "look.folders": "find_folders",
    "look.picture": "make_picture",
    "look.view": "Server",
    "look.tables": "t95",
    "look.results": "incidents_of",
    "look.history": "Reader",
    "tools": "forecast",
    "tools.data": "images",
    "tools.data.prepare": "prepare",
    "tools.data.importer": "open_source",
    "tools.data.records": "build ListRecords write_lmdb",
    "tools.data.files": "SourceOptions",
    "tools.fmt": "formatted",
    "tools.lint": "lint RULES",
    "tools.rehearse": "trials",
    "tools.why": "explained",
}

NAMES = {name: f"stagerun.{module}" for module, names in _BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in NAMES:
        raise AttributeError(f"no test may use {name!r}: it isn't listed in {__file__}")
    home = import_module(NAMES[name])
    globals()[name] = found = getattr(home, name, None) or import_module(f"{NAMES[name]}.{name}")
    return found
