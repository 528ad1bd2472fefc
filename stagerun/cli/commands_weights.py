"""`stagerun eval`, `predict` and `export`: what a snapshot is worth, what it says of pictures, its weights for other programs."""

from typing import Any

import click

from stagerun.cli.commands_data import resize_options
from stagerun.cli.ending import guarded, tell
from stagerun.cli.options import at_least
from stagerun.errors import UsageError

VIEWS = click.option(
    "--views",
    type=click.Choice(["one", "flip", "10crop"]),
    default="one",
    show_default=True,
    help="What is averaged for an image: nothing; it and its mirror; four corners, centre, and their mirrors.",
)
BATCH = click.option(
    "--device-batch", type=int, metavar="N", help="Images per forward pass.  [default: test_batch_size]"
)
THREADS = click.option(
    "--threads", type=int, metavar="N", help="Threads.  [default: OMP_NUM_THREADS, or one per processor]"
)
EMA = click.option("--ema", is_flag=True, help="The averaged weights (`ema_decay`) in place of the trained ones.")


@click.command("eval")
@click.argument("what", metavar="SNAPSHOT|DIR")
@click.option(
    "--out", metavar="FOLDER", help="Output folder of DIR, or of a SNAPSHOT's name.  [default of DIR: ./out/NAME]"
)
@click.option("--stage", metavar="STAGE", help="Of DIR, the end of this stage alone.")
@click.option(
    "--set", "overrides", metavar="STAGE.FIELD=VALUE", multiple=True, help="Change a field of DIR for this command."
)
@click.option("--data", metavar="LMDB", help="Evaluate on these images, all of them, in place of the recipe's.")
@VIEWS
@BATCH
@THREADS
@EMA
@click.option("--per-class", is_flag=True, help="Also the accuracy of each class, and what it is taken for.")
@click.option(
    "--output",
    metavar="FOLDER",
    help="With --per-class: the whole confusion matrix (.csv, .png) and the worst mistakes as a contact sheet.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@guarded
def eval_command(what: str, out: str | None, stage: str | None, overrides: tuple[str, ...], **given: Any) -> None:
    """Evaluates a snapshot: top-1, top-5 and loss over the validation images.

    SNAPSHOT is a snapshot's directory, or its name with --out. Images and transform are those of the recipe inside of it.
    Of DIR, a schedule's folder or an output folder, the end of every finished stage is evaluated; images and transform are
    then those that the schedule names now.

    With --views the softmax outputs of the views are averaged, and the loss is that of the average. The ten crops are
    taken from the image as it is before the centre crop. Without views, with as many threads and the same device batch,
    the numbers are those that `run` printed; a stage with `compile` may differ in the last digits. Rectangles are those of
    batches of test_batch_size with any --device-batch.

    With --per-class the names of classes are those of the side file of the images.
    """
    from stagerun.cli.choosing import choose
    from stagerun.cli.evaluating import EvalOptions, evaluate_all

    options = EvalOptions(**given)
    at_least(1, device_batch=options.device_batch, threads=options.threads)
    if options.output is not None and not options.per_class:
        raise UsageError("--output without --per-class", "add --per-class, or leave --output out")
    chosen = choose(what, overrides, out, stage)
    for note in chosen.notes:
        tell(f"note: {note}")
    evaluate_all(chosen, options)


@click.command()
@click.argument("snapshot", metavar="SNAPSHOT")
@click.argument("images", metavar="FOLDER|IMAGE...", nargs=-1, required=True)
@click.option("--out", metavar="FOLDER", help="Output folder, where SNAPSHOT is a name.")
@click.option("--top", type=click.IntRange(1), metavar="K", default=5, show_default=True, help="Answers per picture.")
@click.option("--classes", metavar="FILE", help="Names of the classes, one per line, by label.  [default: the LMDBs']")
@resize_options
@VIEWS
@BATCH
@THREADS
@EMA
@click.option("--csv", metavar="FILE", help="Also a row for each picture and answer, with all digits.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@guarded
def predict(
    snapshot: str,
    out: str | None,
    resize_shorter: int | None,
    resize_height: int | None,
    resize_width: int | None,
    background: str | None,
    **given: Any,
) -> None:
    """What a snapshot's network says of pictures: names of classes and probabilities.

    SNAPSHOT is a snapshot's directory, or its name with --out. Of a FOLDER every picture at any depth is taken. Files become
    records as by `data import`, and are cropped and normalised as in the stage's evaluations: a network that was trained on
    images resized by `data import` needs the same --resize options here, and the same --background.
    """
    from stagerun.cli.choosing import choose_snapshot
    from stagerun.cli.data_making import resizing
    from stagerun.cli.predict import PredictOptions, predict_images

    resize = resizing(resize_shorter, resize_height, resize_width, background)
    options = PredictOptions(resize=resize, **given)
    at_least(1, device_batch=options.device_batch, threads=options.threads)
    predict_images(choose_snapshot(snapshot, out), options)


@click.command()
@click.argument("snapshot", metavar="SNAPSHOT")
@click.option("--out", metavar="FOLDER", help="Output folder, where SNAPSHOT is a name.")
@click.option("--safetensors", is_flag=True, help="Weights by torchvision's names, and what must be known as metadata.")
@click.option("--torch", is_flag=True, help="A state_dict, for torch.load(FILE, weights_only=True).")
@click.option("--onnx", is_flag=True, help="The graph from bytes to logits, normalisation inside, for any batch.")
@click.option("--output", metavar="FILE", help="File to write.  [default: ./SNAPSHOT with .safetensors, .pth or .onnx]")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@EMA
@click.option("--rgb", is_flag=True, help="For images in R, G, B, of a network that was trained on B, G, R.")
@click.option("--size", type=int, metavar="N", help="Side of the images of --onnx, in pixels.  [default: crop_size]")
@guarded
def export(
    snapshot: str, out: str | None, safetensors: bool, torch: bool, onnx: bool, size: int | None, **given: Any
) -> None:
    """Writes a snapshot's network as a file for other programs, and says what it expects of images.

    SNAPSHOT is a snapshot's directory, or its name with --out. The networks are trained on (value - mean_value) * scale /
    std_value of values 0..255, with the channels in the channel_order of their transform: B, G, R unless it says RGB.
    --safetensors and --torch hold the weights as they are; whoever uses them must normalise as is printed. --rgb swaps the
    inputs of the first convolution, which changes nothing else, and nothing at all where the network was trained on R, G, B.
    Logits come out; softmax makes probabilities of them.
    """
    from stagerun.cli.choosing import choose_snapshot
    from stagerun.cli.exporting import ExportOptions, export_snapshot

    at_least(1, size=size)
    chosen = {"safetensors": safetensors, "torch": torch, "onnx": onnx}
    kinds = tuple(kind for kind, asked in chosen.items() if asked)
    export_snapshot(choose_snapshot(snapshot, out), ExportOptions(kinds=kinds, side=size, **given))
