"""Folders as people have them for Caffe, written here: nets in text, solvers, READMEs."""

from pathlib import Path

FIVE = ("init", "cyc1", "cyc2", "cyc3", "collapse")
ASPECT = """
    random_aspect_ratio_param {
      min_area_ratio: 0.08
      max_area_ratio: 1
      aspect_ratio_change: 0.75
      resize_param { interp_mode: CUBIC }
    }"""
TRAIN = """layer {
  name: "data" type: "Data" top: "data" top: "label"
  include { phase: TRAIN }
  transform_param {
    mirror: true crop_size: 224 scale: 0.0078125
    mean_value: 104 mean_value: 117 mean_value: 123%s
  }
  data_param { source: "/tmp/ilsvrc12_train_lmdb" batch_size: 32 backend: LMDB prefetch: 2 shuffle: true }
}
"""
TEST = """layer {
  name: "data" type: "Data" top: "data" top: "label"
  include { phase: TEST }
  transform_param {
    mirror: false crop_size: 224 scale: 0.0078125
    mean_value: 104 mean_value: 117 mean_value: 123
    random_resize_param { min_size: 256 max_size: 256 resize_param { interp_mode: CUBIC } }
  }
  data_param { source: "/tmp/ilsvrc12_val_lmdb" batch_size: 50 backend: LMDB }
}
"""


def resnet50(aspect: bool = True, test: bool = True) -> str:
    """The ResNet-50 of Intel's recipes, for engines with and without a BatchNorm of their own."""
    text = 'name: "ResNet-50"\n' + TRAIN % (ASPECT if aspect else "") + (TEST if test else "")
    text += _unit(
        "conv1", "bn_conv1", "scale_conv1", 64, 7, 2, 3, bias=True, fan="variance_norm: FAN_OUT", bottom="data"
    )
    text += _layer("pool1", "Pooling", "pooling_param { pool: MAX kernel_size: 3 stride: 2 }", "conv1")
    above = "pool1"
    for group, blocks, width, out in ((2, 3, 64, 256), (3, 4, 128, 512), (4, 6, 256, 1024), (5, 3, 512, 2048)):
        for letter in "abcdef"[:blocks]:
            stride = 2 if letter == "a" and group > 2 else 1
            block = f"{group}{letter}"
            branches = [("2a", width, 1, 1, above), ("2b", width, 3, stride, f"res{block}_branch2a")]
            branches += [("2c", out, 1, 1, f"res{block}_branch2b")]
            for branch, size, kernel, step, below in (
                [("1", out, 1, stride, above)] if letter == "a" else []
            ) + branches:
                end = f"{block}_branch{branch}"
                gamma = 0 if branch == "2c" and letter == "abcdef"[blocks - 1] else 1
                names = f"res{end}", f"bn{end}", f"scale{end}"
                text += _unit(*names, size, kernel, step, kernel // 2, gamma=gamma, bottom=below)
            shortcut = f"res{block}_branch1" if letter == "a" else above
            above = f"res{block}"
            text += _layer(above, "Eltwise", "eltwise_param { }", shortcut, f"res{block}_branch2c")
    text += _layer("pool5", "Pooling", "pooling_param { pool: AVE global_pooling: true }", above)
    text += """layer {
  name: "fc1000" type: "InnerProduct" bottom: "pool5" top: "fc1000"
  param { lr_mult: 1 decay_mult: 1 }
  inner_product_param {
    num_output: 1000 weight_filler { type: "gaussian" std: 0.01 } bias_filler { type: "constant" value: 0 }
  }
}
layer { name: "prob" type: "SoftmaxWithLoss" bottom: "fc1000" bottom: "label" top: "loss" }
"""
    return text


def _layer(name: str, type: str, inside: str, *bottoms: str) -> str:
    below = " ".join(f'bottom: "{bottom}"' for bottom in bottoms)
    return f'layer {{ name: "{name}" type: "{type}" {below} top: "{name}" {inside} }}\n'


def _unit(
    name: str,
    norm: str,
    scale: str,
    out: int,
    kernel: int,
    stride: int,
    pad: int,
    bias: bool = False,
    gamma: int = 1,
    fan: str = "",
    bottom: str = "",
) -> str:
    here = f'bottom: "{name}" top: "{name}"'
    return f"""layer {{
  name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}"
  convolution_param {{
    num_output: {out} kernel_size: {kernel} pad: {pad} stride: {stride}{"" if bias else " bias_term: false"}
    weight_filler {{ type: "msra" {fan} }} bias_filler {{ type: "constant" value: 0 }}
  }}
}}
layer {{
  name: "{norm}" type: "BatchNorm" {here} param {{ lr_mult: 0 }} param {{ lr_mult: 0 }} param {{ lr_mult: 0 }}
  batch_norm_param {{ moving_average_fraction: 0.95 filler {{ value: {gamma} }} }}
}}
layer {{ name: "{scale}" type: "Scale" {here} param {{ decay_mult: 0 }} param {{ decay_mult: 0 }} scale_param {{ bias_term: true }} }}
layer {{ name: "{name}_relu" type: "ReLU" {here} relu_param {{ }} }}
"""


def real_folder(folder: Path, solvers: tuple[str, ...], golden: Path) -> Path:
    """Solver files of golden/lr in a folder, with a net where they name it."""
    (folder / "nets").mkdir(parents=True)
    for name in solvers:
        (folder / f"{name}.prototxt").write_bytes((golden / "lr" / "solvers" / f"{name}.prototxt").read_bytes())
    (folder / "nets" / "tiny_lr_net.prototxt").write_text(resnet50())
    return folder
