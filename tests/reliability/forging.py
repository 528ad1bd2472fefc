"""Snapshots that somebody made by hand, or changed: what they may hold, and signing them anew."""

import hashlib
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "MANIFEST.json"
TENSORS = ("model.safetensors", "optim.safetensors")
MARK = "somebody-was-here"  # what code that is executed would leave behind
BIG = 100 * 10**9


class Forged:
    """A snapshot's folder that is being changed. `signed`: the manifest is made to fit the files afterwards, its own digest too."""

    def __init__(self, folder: Path, outside: Path, rng: random.Random, signed: bool = True) -> None:
        self.folder, self.outside, self.rng, self.signed = folder, outside, rng, signed
        self.body: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes()[:-65])

    def read(self, file: str) -> bytes:
        return (self.folder / file).read_bytes()

    def write(self, file: str, data: bytes) -> None:
        (self.folder / file).write_bytes(data)
        if self.signed and file != MANIFEST:
            self.body["files"][file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def state(self, **fields: object) -> None:
        self.write("state.json", json.dumps({**json.loads(self.read("state.json")), **fields}).encode())

    def finish(self) -> None:
        """Writes the manifest. The id is that of the files as they are stated."""
        if self.signed:
            self.sign(json.dumps(self.body | self._id(), indent=1, sort_keys=True).encode() + b"\n")

    def sign(self, text: bytes) -> None:
        (self.folder / MANIFEST).write_bytes(text + hashlib.sha256(text).hexdigest().encode() + b"\n")
        self.signed = False

    def _id(self) -> dict[str, str]:
        try:
            digests = [[name, self.body["files"][name]["sha256"]] for name in sorted(self.body["content"])]
            place = [self.body.get("id_stage") or self.body["stage"], self.body["iter"], digests]
            return {"id": hashlib.sha256(json.dumps(place).encode()).hexdigest()}
        except (KeyError, TypeError):
            return {}


Attack = Callable[[Forged], None]


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:end]), data[end:]


def tensors(header: dict[str, Any] | bytes, body: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


# ---- tensors


def _header(change: Callable[[dict[str, Any], random.Random], None]) -> Attack:
    def attack(forged: Forged) -> None:
        file = forged.rng.choice(TENSORS)
        header, body = header_of(forged.read(file))
        change(header, forged.rng)
        forged.write(file, tensors(header, body))

    return attack


def _entry(key: str, *values: object) -> Attack:
    """One of these as what the header says of a tensor."""

    def change(header: dict[str, Any], rng: random.Random) -> None:
        _some(header, rng)[0][key] = rng.choice(values)

    return _header(change)


def _some(header: dict[str, Any], rng: random.Random, count: int = 1) -> list[dict[str, Any]]:
    return [header[name] for name in rng.sample([name for name in header if name != "__metadata__"], count)]


def overlap(header: dict[str, Any], rng: random.Random) -> None:
    a, b = _some(header, rng, 2)
    a["data_offsets"] = b["data_offsets"]


def gap(header: dict[str, Any], rng: random.Random) -> None:
    start, end = _some(header, rng)[0]["data_offsets"]
    _some(header, rng)[0]["data_offsets"] = rng.choice([[start, end + 8], [end, start], [2**63, 2**64], [-8, 0], "x"])


def names_of_paths(header: dict[str, Any], rng: random.Random) -> None:
    header[rng.choice(["../../x", "/etc/passwd", "__class__", "a" * 10_000, "\x00", "x\x1b[2J"])] = _some(header, rng)[
        0
    ]


def huge_header(forged: Forged) -> None:
    length = forged.rng.choice([2**63, 2**64 - 1, 10**8 + 1, 5_000_000])
    forged.write(forged.rng.choice(TENSORS), tensors(b"{}", bytes(6_000_000), length))


def millions_of_tensors(forged: Forged) -> None:
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = b"{" + b",".join(entry % i for i in range(200_000)) + b"}"
    forged.write(forged.rng.choice(TENSORS), tensors(text, b""))


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {MARK}",)


def pickled(forged: Forged) -> None:
    """Where a loader that falls back to pickle would run it."""
    data = pickle.dumps(_Runs(), protocol=forged.rng.choice([0, 2, 4]))
    forged.write(forged.rng.choice([*TENSORS, "state.json", "recipe.prototxt"]), data)


def no_numbers(forged: Forged) -> None:
    header, body = header_of(forged.read(TENSORS[0]))
    forged.write(TENSORS[0], tensors(header, b"\xff\xff\xff\x7f" * (len(body) // 4) + body[len(body) // 4 * 4 :]))


# ---- files


def _in_place(put: Callable[[Path, Path], object]) -> Attack:
    """Something else where a file was; `put` has its path, and the folder outside."""

    def attack(forged: Forged) -> None:
        path = forged.folder / forged.rng.choice([*forged.body["files"], MANIFEST])
        if path.name == MANIFEST:
            forged.finish()
        same = forged.outside / path.name
        same.write_bytes(path.read_bytes())
        path.unlink()
        put(path, same)

    return attack


def sparse(forged: Forged) -> None:
    """A file that states 100 GB, and has it: in holes, which cost nothing."""
    file = forged.rng.choice([*forged.body["files"], "more.bin"])
    with open(forged.folder / file, "ab") as opened:
        opened.truncate(BIG)
    forged.body["files"][file] = {"size": BIG, "sha256": "0" * 64}


def linked_folder(forged: Forged) -> None:
    forged.finish()
    there = forged.outside / forged.folder.name
    os.rename(forged.folder, there)
    forged.folder.symlink_to(there)


def more_files(forged: Forged) -> None:
    for i in range(forged.rng.choice([65, 2000])):
        forged.body["files"][f"f{i}"] = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
        (forged.folder / f"f{i}").touch()


def paths(forged: Forged) -> None:
    (forged.outside / "secret").write_bytes(b"secret")
    inside = ("../../../outside/secret", "..", ".", "a/../b", "", "a\x00", "con\n", ".hidden")
    name = forged.rng.choice([str(forged.outside / "secret"), *inside])
    forged.body["files"][name] = {"size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    forged.body["content"] = sorted([*forged.body["content"], name])


# ---- the manifest, the state and the recipe


def _said(where: str | None, new: tuple[str, ...], *values: object, only: bool = False) -> Attack:
    """One of these in place of one of the fields of the manifest, or of its object `where`, or in one of the `new` ones, or of these `only`."""

    def attack(forged: Forged) -> None:
        held = forged.body[where] if where else forged.body
        held[forged.rng.choice(new if only else [*held, *new])] = forged.rng.choice(values)

    return attack


def _signed(*texts: bytes) -> Attack:
    return lambda forged: forged.sign(forged.rng.choice(texts))


def _file(name: str, *texts: bytes) -> Attack:
    return lambda forged: forged.write(name, forged.rng.choice(texts))


def strange_recipe(forged: Forged) -> None:
    old, new = forged.rng.choice([(old, new) for old, values in RECIPES.items() for new in values])
    text = forged.read("recipe.prototxt").decode()
    forged.write("recipe.prototxt", text.replace(old, old.partition(":")[0] + f": {new}").encode())


STATES = (
    None, -1, 10**400, "x", [], {}, [[]], [None], [["0", 0, ""]], {"drops": "x"}, True, [1e308, "a"], {"losses": []},
)  # fmt: skip
RECIPES = {
    "num_classes: 10": ("999999999999", "-1", "0"), 'name: "resnet_small"': ('"os.system"', '"regnet_y_128gf"'),
    "channels: 1": ("1000000000", "0"), "test_batch_size: 50": ("0", "9223372036854775807"), "crop_size: 28": ("-28", "2000000000"),
    "images: 100": ("-100",), "precision: FP32": ("FP64",), "max_iter: 5": ("-5",), "pad: 2": ("2000000000",), "scale: 0.0111": ("1e308",),
}  # fmt: skip


def drawn_bytes(forged: Forged) -> None:
    """A few bytes anywhere in one file, or a piece of it doubled, or the end missing."""
    file = forged.rng.choice([*forged.body["files"], MANIFEST])
    data = bytearray(forged.read(file))
    end = len(data)
    if file in TENSORS and forged.rng.random() < 0.7:  # where the header is
        end = min(end, 8 + struct.unpack("<Q", data[:8])[0])
    for _ in range(forged.rng.randint(1, 20)):
        data[forged.rng.randrange(end)] = forged.rng.randrange(256)
    if forged.rng.random() < 0.2:
        at = forged.rng.randrange(end)
        data[at:at] = data[at : at + forged.rng.randrange(5000)]
    if file == MANIFEST and forged.signed:
        forged.sign(bytes(data[:-65]))
    else:
        forged.write(file, bytes(data))


ATTACKS: dict[str, Attack] = {
    "a shape of huge dimensions": _entry("shape", [2**31, 2**31, 4], [2**62, 2], [10**12], [0, 2**63], [2**64 + 1], [-1]),
    "tensors that overlap": _header(overlap),
    "tensors with gaps": _header(gap),
    "a tensor of another type": _entry("dtype", "I32", "C64", "F8_E4M3", "BOOL", "OBJECT", "", None, {"F32": 1}),
    "tensors with the names of paths": _header(names_of_paths),
    "a header of gigabytes": huge_header,
    "a header of 200,000 tensors": millions_of_tensors,
    "a nested header": lambda forged: forged.write(forged.rng.choice(TENSORS), tensors(b'{"a":' + b"[" * 100_000, b"")),
    "a pickle": pickled,
    "weights that are no numbers": no_numbers,
    # Of the same bits: only that it is a link tells.
    "a link in place of a file": _in_place(lambda path, same: path.symlink_to(same)),
    "a pipe in place of a file": _in_place(lambda path, same: os.mkfifo(path)),
    "an endless file": _in_place(lambda path, same: path.symlink_to("/dev/zero")),
    "a folder in place of a file": _in_place(lambda path, same: path.mkdir()),
    "a file of 100 GB": sparse,
    "a link in place of the snapshot": linked_folder,
    "thousands of files": more_files,
    "names of files that are paths": paths,
    "strange values in the manifest": _said(
        None, ("serial", "skipped", "id_stage", "newer"),
        None, -1, 10**400, 1.5, True, "x", "x" * 10_000, [], {}, [[]], {"a": None}, 2**63, "\x1b[2J", "__import__('os')",
    ),
    "another place in the manifest": _said(None, ("stage", "id_stage"), "../x", "", "a/b", "\ud800", "a\n", "..", only=True),
    "strange values in the identity": _said(
        "identity", ("from_iter", "new.field"),
        "", "x", "-1", "9" * 5000, "1e999", "nan", "\x00", "[" * 5000, "٣", "\ud800", "\x1b[31mX\x07",
    ),
    "strange values in the environment": _said("environment", ("new",), "", "x" * 5000, "-1", "\x1b[2J", "9" * 5000),
    "a manifest that is no such JSON": _signed(
        b"[" * 900_000, b'{"a":' * 100_000, b"[" + b"[]," * 300_000 + b"[]]", b'{"format": 1, "format": 1}', b'{"format": NaN}',
        b'{"format": 1e999}', b"9" * 900_000, b'{"format": ' + b"9" * 4000 + b"}", b"\xff\xfe", b"", b'"' + b"\\ud800" * 1000 + b'"',
        b" " * 2_000_000,
    ),
    "a newer format": _said(None, ("format",), 2, 10**18, only=True),
    "strange values in the state": lambda forged: forged.state(
        **{forged.rng.choice("position train_seconds losses bad_records plateau newer".split()): forged.rng.choice(STATES)}
    ),
    "a state that is none": _file(
        "state.json", b"[" * 1_000_000, b"null", b"", b"[" + b"[]," * 3_000_000 + b"[]]", b"9" * 100_000, b"\xff"
    ),
    "a recipe that is none": _file(
        "recipe.prototxt", b"", b"a {" * 100_000, b"\xff" * 100, b'name: "' + b"x" * 3_000_000, b"a: 1\n" * 500_000
    ),
    "strange values in the recipe": strange_recipe,
    "bytes drawn at random": drawn_bytes,
}  # fmt: skip


def forge(name: str, folder: Path, outside: Path, rng: random.Random, signed: bool = True) -> None:
    """Does it to the snapshot in `folder`; `outside` is a folder of things that nobody may read or change through it."""
    forged = Forged(folder, outside, rng, signed)
    ATTACKS[name](forged)
    if folder.is_dir() and not folder.is_symlink():
        manifest = folder / MANIFEST
        if manifest.is_file() and not manifest.is_symlink():
            forged.finish()
