"""`stagerun import caffe`: folders of Caffe's in, folders of stagerun's out; tests/cases/caffe_*.txt have whole ones, mistakes, starts and workers."""

import io
import re
import resource
import shutil
from pathlib import Path

import contract
import lmdb
import pytest
from facade import ExitCode, Schedule, Stage, caffe_pb2, write_lmdb
from PIL import Image

from stagerun.caffe.importer import settings
from stagerun.caffe.importer.folder import SOLVER
from stagerun.caffe.resolve import of_model
from stagerun.language import load
from stagerun.schedule import make_knobs

ROOT, GOLDEN = Path(__file__).parents[2], Path(__file__).parents[1] / "golden"
COUNTED = ("--images", "50000", "--val-images", "10000")

# -- folders of a few lines

DATA = """layer {
  name: "data" type: "Data" top: "data" top: "label" include { phase: %s }
  transform_param { crop_size: 8 mean_value: 1 mean_value: 2 mean_value: 3 }
  data_param { source: "/data/cifar10_lmdb" batch_size: 10 backend: LMDB }
}
"""
LAYERS = """layer {
  name: "conv1" type: "Convolution" bottom: "data" top: "conv1" param { lr_mult: 1 } param { lr_mult: 2 }
  convolution_param { num_output: 4 kernel_size: 3 }
}
layer { name: "ip" type: "InnerProduct" bottom: "conv1" top: "ip" inner_product_param { num_output: 10 } }
"""
LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }\n'
ACCURACY = 'layer { name: "top1" type: "Accuracy" bottom: "ip" bottom: "label" top: "top1" include { phase: TEST } }\n'
NET = 'name: "small"  # as published\n' + DATA % "TRAIN" + DATA % "TEST" + LAYERS + LOSS + ACCURACY
OF_NET = 'net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 20 test_interval: 10 test_iter: 1\n'


def write(folder: Path, **texts: str) -> Path:
    """`a` is a.prototxt, README itself."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / (name if name == "README" else f"{name}.prototxt")).write_text(text)
    return folder


def run(folder: Path, *words: str, told: tuple[str, ...] = COUNTED) -> tuple[int, str]:
    """Into the folder's out/."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    done = contract.stagerun(["import", "caffe", ".", "--out", "out", *told, *words], folder)
    return done.exit_code, " ".join(done.output.split())


def imported(folder: Path, *words: str, told: tuple[str, ...] = COUNTED) -> Schedule:
    code, said = run(folder, *words, told=told)
    assert code == 0, said
    return load(folder / "out")


def rates(stage: Stage) -> list[float]:
    knobs = make_knobs(stage.solver)
    return [knobs(i).lr for i in range(stage.solver.max_iter)]


# -- the five solvers of SURFsara's ResNet-50

FIVE = ("init", "cyc1", "cyc2", "cyc3", "collapse")
SOLVERS = GOLDEN / "lr" / "solvers"
IMAGENET = """layer {
  name: "data" type: "Data" top: "data" top: "label" include { phase: %s }
  transform_param { crop_size: 224 scale: 0.0078125 mean_value: 104 mean_value: 117 mean_value: 123 %s }
  data_param { source: "/tmp/ilsvrc12_%s_lmdb" batch_size: %d backend: LMDB %s }
}
"""
ASPECT = """random_aspect_ratio_param {
  min_area_ratio: 0.08 max_area_ratio: 1 aspect_ratio_change: 0.75 resize_param { interp_mode: CUBIC }
}"""
RESIZED = "random_resize_param { min_size: 256 max_size: 256 resize_param { interp_mode: CUBIC } }"
TESTED = IMAGENET % ("TEST", RESIZED, "val", 50, "")
NETS = {
    "train_val": IMAGENET % ("TRAIN", f"mirror: true {ASPECT}", "train", 32, "shuffle: true") + TESTED + LAYERS + LOSS,
    "train_val_noaug": IMAGENET % ("TRAIN", "mirror: true", "train", 32, "shuffle: true") + LAYERS + LOSS,
}


def is_resnet50_72ep(ours: Schedule, names: str) -> None:
    theirs = load(ROOT / "solvers" / "resnet50_72ep")
    for stage, other in zip(ours.stages, theirs.stages, strict=True):
        assert (stage.name, stage.parent, rates(stage)) == (other.name, other.parent, rates(other))  # to the last bit
        for name in names.split():
            assert getattr(stage.solver, name) == getattr(other.solver, name), (stage.name, name)


def test_the_published_folder_is_resnet50_72ep(tmp_path):
    """Two nets, order and workers from a README that breaks its lines without backslashes."""
    folder = write(tmp_path / "models" / "custom", **NETS)
    lines, before = ["## Five stages", "", "- warm-up", "- cycles", ""], ""
    for name in FIVE:
        text = (SOLVERS / f"custom_lr_{name}.prototxt").read_text()
        net = "train_val_noaug" if name == "collapse" else "train_val"
        text = text.replace("nets/tiny_lr_net", f"models/custom/{net}").replace('"lrsnap"', f'"/tmp/r50_{name}"')
        write(folder, **{f"solver_{name}": text.replace("snapshot_after_train: false\n", "")})
        lines += [
            "\tOMP_NUM_THREADS=22  mpiexec.hydra -PSM2 -l -n 128 -ppn 2 -f hostfile  ",
            f"\t-genv KMP 1 ./build/tools/caffe train --solver=models/custom/solver_{name}.prototxt ",
            *([f"\t--weights={before} ; '"] if before else []),
            "",
        ]
        length = re.search(r"max_iter: (\d+)", text)
        assert length
        before = f"r50_{name}_iter_{length[1]}.caffemodel"
    write(folder, README="\n".join(lines))
    made = imported(folder, told=("--images", "1281167", "--val-images", "50000"))
    is_resnet50_72ep(made, "batch_size device_batch_size momentum weight_decay type transform test_transform")
    assert sum(len(rates(stage)) for stage in made.stages) == 22610
    assert "# 25 epochs" in (folder / "out" / "init.prototxt").read_text()


# -- rates and commands

POLICIES = {
    "multistep": "gamma: 0.1 stepvalue: 300 stepvalue: 700 stepvalue: 900",
    "step": "gamma: 0.5 stepsize: 130",
    "poly": "power: 2",
    "poly_cyc": "power: 2 lr_iter: 1300",
    "inv": "gamma: 0.01 power: 0.75",
    "exp": "gamma: 0.999",
    "sigmoid": "gamma: -0.01 stepsize: 500",
}


@pytest.mark.parametrize("warm_up", [0, 400, 700])
@pytest.mark.parametrize("policy", POLICIES)
def test_rates_of_a_stage_from_a_snapshot_are_read_where_caffe_reads_them(policy, warm_up, tmp_path):
    said = f'net: "net.prototxt" base_lr: 0.1 lr_policy: "{policy}" {POLICIES[policy]} '
    said += f' snapshot: 200 snapshot_prefix: "a" warmup_iter: {warm_up} warmup_start_lr: 0.01 '
    train = "caffe train --solver"
    readme = f"{train} solver.prototxt\n{train} more.prototxt --snapshot a_iter_600.solverstate"
    write(tmp_path, net=NET, solver=said + "max_iter: 1000", more=said + "max_iter: 1200", README=readme)
    _, more = imported(tmp_path).stages
    (whole,) = imported(tmp_path, "--order", "more").stages  # the same solver from its iteration 0
    assert rates(more) == rates(whole)[600:]  # to the last bit


TWO = "mpirun -n 4 caffe train --solver=a.prototxt%smpirun -np 8 caffe train --solver b.prototxt --weights x/a_iter_5.caffemodel%s"
ONE = "mpirun -n 4 caffe train --solver a.prototxt\nRun (mpirun -n 8 caffe train --solver b.prototxt --weights a_iter_5.caffemodel"


@pytest.mark.parametrize(
    "text",
    [
        *(TWO % one for one in (("; ", ""), (" && ", ""), ("&&", " &"), (" || ", ""), (" 2>&1 | tee log; ", ""), ("`, then `", "."), ("`, and `", "`."))),
        *(ONE + end for end in (".", ",", ").", ";", "`.")),
        f'bash -c "{TWO % (" && ", chr(34))}',
    ],
)  # fmt: skip
def test_commands_within_a_line(text, tmp_path):
    solver = OF_NET.replace("max_iter: 20", 'max_iter: 5 snapshot_prefix: "x/a"')
    write(tmp_path, net=NET, a=solver, b=solver.replace("x/a", "b"), README=text)
    stages = imported(tmp_path).stages
    assert [(one.name, one.parent, one.solver.batch_size) for one in stages] == [("a", None, 40), ("b", "a", 80)]


def test_the_whole_prefix_says_which_solver_made_a_snapshot(tmp_path):
    solvers = {name: f'{OF_NET} snapshot: 5 snapshot_prefix: "{name}/snap"' for name in "abc"}
    start = "caffe train --solver a.prototxt\ncaffe train --solver b.prototxt --weights a/snap_iter_20.caffemodel\n"
    readme = f"{start}caffe train --solver c.prototxt --snapshot b/snap_iter_10.solverstate\n"
    write(tmp_path, net=NET, README=readme, **solvers)
    assert [(one.name, one.parent) for one in imported(tmp_path).stages] == [("a", None), ("b", "a"), ("c", "b")]


# -- images and means


def test_images_are_counted_where_they_are(tmp_path):
    contract.Case.read(contract.CASES / "caffe_folder_lenet.txt").write(tmp_path)
    folder = tmp_path / "lenet"
    for part, count in (("train", 7), ("test", 5)):
        path = folder / "examples" / "mnist" / f"mnist_{part}_lmdb"
        with lmdb.open(str(path), map_size=1 << 20) as db, db.begin(write=True) as writer:
            for i in range(count):
                datum = caffe_pb2.Datum(channels=1, height=28, width=28, data=bytes(784), label=i)
                writer.put(b"%08d" % i, datum.SerializeToString())
    schedule = imported(folder, told=())
    assert (schedule.data.train.images, schedule.model.channels, schedule.data.val[0].images) == (7, 1, 5)
    assert schedule.data.train.path == str(folder / "examples" / "mnist" / "mnist_train_lmdb")
    assert schedule.stages[0].solver.test_iter is None  # 100 passes of 100 are more than there are


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_encoded_images_say_their_channels(mode, channels, kind, tmp_path):
    """As Caffe, which decodes the first; no mean has as many numbers."""
    held = io.BytesIO()
    Image.new(mode, (12, 12)).save(held, kind)
    datum = caffe_pb2.Datum(data=held.getvalue(), encoded=True, label=1).SerializeToString()
    write_lmdb(str(tmp_path / "lmdb"), [datum] * 3)
    net = NET.replace("/data/cifar10_lmdb", str(tmp_path / "lmdb"))
    write(tmp_path, net=net.replace(" mean_value: 1 mean_value: 2 mean_value: 3", ""), solver=OF_NET)
    assert imported(tmp_path).stages[0].model.input_shape == (channels, 8, 8)


def test_a_mean_image_is_named_where_it_is(tmp_path):
    blob = caffe_pb2.BlobProto(num=1, channels=3, height=1, width=2, data=[1, 3, 10, 20, 7, 7])
    mean = tmp_path / "mean.binaryproto"
    mean.write_bytes(blob.SerializeToString())
    net = NET.replace("mean_value: 1 mean_value: 2 mean_value: 3", 'mean_file: "mean.binaryproto"')
    write(tmp_path, net=net, solver=OF_NET)
    run(tmp_path)
    assert load(tmp_path / "out", ["model.channels=3"]).stages[0].solver.transform.mean_path == str(mean)
    write(tmp_path, net=net.replace("crop_size: 8", "crop_size: 8 random_resize_param { min_size: 9 }"))
    solver = imported(tmp_path).stages[0].solver
    assert solver.transform.mean_value == (2, 15, 7)  # of each channel: pixels have no place in it


CUT = (
    "random_aspect_ratio_param { min_area_ratio: 0.1 max_area_ratio: 1 resize_param { height: 9 interp_mode: CUBIC } }"
)


@pytest.mark.parametrize(
    "said",
    [
        "mirror: true crop_size: 8 scale: 0.5 mean_value: 1 mean_value: 2 mean_value: 3",
        "crop_h: 8 crop_w: 8 scale: 1",
        "crop_size: 8 random_resize_param { min_size: 9 max_size: 9 resize_param { interp_mode: AREA } }",
        f"crop_size: 8 {CUT}",
        'crop_size: 8 mean_file: "mean.binaryproto"',
        f'crop_size: 8 mean_file: "mean.binaryproto" {CUT}',
    ],
)
def test_an_imported_transform_is_that_which_the_net_itself_means(said, tmp_path):
    mean = caffe_pb2.BlobProto(num=1, channels=3, height=2, width=2, data=[0.1, *[7] * 10, 8.5])
    (tmp_path / "mean.binaryproto").write_bytes(mean.SerializeToString())
    net = NET.replace("crop_size: 8 mean_value: 1 mean_value: 2 mean_value: 3", said)
    run(write(tmp_path, net=net, solver=OF_NET))
    (one,) = load(tmp_path / "out", ["model.channels=3"]).stages
    data = 'data { train { source: "lmdb" images: 10 } val { source: "lmdb" images: 10 } }'
    text = f'name: "itself" model {{ channels: 3 }} {data} stage {{ name: "itself" solver: "solver.prototxt" }}'
    (other,) = load(write(tmp_path, schedule=text)).stages
    assert one.solver.transform == other.solver.transform
    assert one.solver.test_transform == other.solver.test_transform


# -- nets that are kept whole


def test_a_net_is_copied_and_what_it_says_is_the_stages(tmp_path):
    stage = imported(write(tmp_path, net=NET, solver=OF_NET)).stages[0]
    assert (tmp_path / "out" / "net.prototxt").read_text() == NET
    assert (stage.model.name, stage.model.num_classes, stage.model.input_shape) == ("net.prototxt", 10, (3, 8, 8))
    assert [(rule.name, rule.lr_mult) for rule in stage.solver.param] == [("conv1.bias", 2.0)]


def test_nets_that_read_other_images_are_one_network_and_those_of_one_file_name_two(tmp_path):
    plain = NET.replace("crop_size: 8", "crop_size: 8 mirror: true")
    write(tmp_path, net=NET, plain=plain, a_solver=OF_NET, b_solver=OF_NET.replace("net.prototxt", "plain.prototxt"))
    write(tmp_path / "c", net=NET.replace("num_output: 4", "num_output: 7"))
    write(tmp_path, c_solver=OF_NET.replace("net.prototxt", "c/net.prototxt"))
    first, second, third = imported(tmp_path, "--order", "a_solver,b_solver,c_solver").stages
    assert first.model == second.model and second.solver.model is None
    assert (first.solver.transform.mirror, second.solver.transform.mirror) == (False, True)
    assert [of_model(one.model).train.layers[1].shapes[0][0] for one in (first, third)] == [4, 7]
    assert (first.model.name, third.model.name) == ("net.prototxt", "net_net.prototxt")


def test_each_stage_has_its_own_passes_of_a_batch_norm(tmp_path):
    norm = NET.replace(
        'layer { name: "ip"', 'layer { name: "bn" type: "BatchNorm" bottom: "conv1" top: "conv1" }\nlayer { name: "ip"'
    )
    other = OF_NET.replace("net.prototxt", "other.prototxt")
    write(tmp_path, net=norm, other=norm.replace("num_output: 4", "num_output: 7"))
    write(tmp_path, a=OF_NET, b=OF_NET + "iter_size: 2", c=other, d=other + "iter_size: 2")
    for workers, right in (("2", [1, 2, 1, 2]), ("1", [None] * 4)):
        stages = imported(tmp_path, "--order", "a,b,c,d", "--workers", workers).stages
        assert [stage.model.moving_average_passes for stage in stages] == right
        assert [stage.model.name for stage in stages] == ["net.prototxt"] * 2 + ["other.prototxt"] * 2


# -- what is written, and every field


def test_written_whole_or_not_at_all_and_the_same_from_any_place(tmp_path):
    folder = write(tmp_path / "five", net=NET, solver=OF_NET)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        code, said = run(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == ExitCode.STORAGE and "File too large" in said
    assert sorted(p.name for p in folder.iterdir()) == ["net.prototxt", "solver.prototxt"]
    imported(folder)
    (tmp_path / "b").mkdir()  # an empty folder is as good as none
    assert contract.stagerun(["import", "caffe", "five", "--out", "b", *COUNTED], tmp_path).exit_code == 0
    one, other = ((place / "main.prototxt").read_text() for place in (folder / "out", tmp_path / "b"))
    assert one == other


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("max_iter: 9", "`--snapshot` names `ls`"),
        *((f'max_iter: 9 {one}: ""', f"no `{one}`") for one in ("train_net", "lr_policy")),
        ('max_iter: 9 type: ""', "`type` has no value"),
        ("max_iter: 0", "`max_iter` must be at least 1"),
    ],
)
def test_what_a_solver_or_command_leaves_open_is_asked_for(given, message, tmp_path):
    solver = f"{'' if 'train_net' in given else OF_NET.partition('base_lr')[0]} base_lr: 1 {given}"
    solver += "" if "lr_policy" in given else ' lr_policy: "fixed"'
    write(tmp_path, net=NET, solver=solver)
    (tmp_path / "run.bash").write_text(
        "caffe train --solver=solver.prototxt --snapshot=`ls -t x/*.solverstate | head -1`"
    )
    code, said = run(tmp_path, "--overlap", "--workers", "2")
    assert code == ExitCode.RECIPE and message in said


def test_every_field_of_a_solver_is_thought_of():
    """A new one in protos/caffe.proto must be carried, or be said to be left out."""
    known = {*settings.OF_STAGE, *settings.UPDATE, *settings.LOOKING, *settings.NETS, *settings.NOT_CARRIED}
    read = "net train_net iter_size random_seed clip_gradients test_iter type solver_type snapshot_prefix"
    # Without these nothing is lost.
    idle = (
        "snapshot_after_train snapshot_diff snapshot_format solver_mode device_id test_initialization test_compute_loss"
    )
    idle += " debug_info engine ap_version show_per_class_result"
    assert set(SOLVER.fields_by_name) == known | {*read.split(), *idle.split()}
