"""Files of weights: what is read and what is refused, what `fetch` downloads from a server on this machine."""

import hashlib
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from facade import DataError, encode, tensors_in
from torch import nn

from stagerun.cli import main
from stagerun.models import vision

HELD = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.zeros(2, dtype=torch.float16)}


def saved(held: object, path: Path) -> bytes:
    torch.save(held, path)
    return path.read_bytes()


@pytest.mark.parametrize("key", ["", "state_dict", "model", "model_state_dict", "safetensors"])
def test_a_state_dict_is_found_where_scripts_put_it(key, tmp_path):
    """And safetensors by their content."""
    data = encode(HELD) if key == "safetensors" else saved({key: HELD, "epoch": 3} if key else HELD, tmp_path / "x.pt")
    found = tensors_in(data, "x.pt")
    assert found.keys() == HELD.keys() and torch.equal(found["fc.weight"], HELD["fc.weight"])


def test_nothing_in_a_file_is_run_and_what_is_no_network_is_refused(tmp_path):
    whole = saved(HELD, tmp_path / "a.pt")
    cases = {
        "holds more than tensors": saved(nn.Linear(2, 2), tmp_path / "b.pt"),
        "is not a whole file of `torch.save`": whole[: len(whole) // 2],
        "has no state_dict: it holds `epoch` and `lr`": saved({"epoch": 1, "lr": 0.1}, tmp_path / "c.pt"),
        "not a safetensors file": b"hello, this is text",
    }
    for message, data in cases.items():
        with pytest.raises(DataError, match=message) as error:
            tensors_in(data, "x.pt")
        assert error.value.hint


# -- fetch, from a server on this machine: the real ones are not asked


class Server(BaseHTTPRequestHandler):
    def __init__(self, data: bytes, commit: str, *rest: object) -> None:
        self.data, self.commit = data, commit
        super().__init__(*rest)

    def _answer(self) -> None:
        if "missing" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.send_header("ETag", f'"{hashlib.sha256(encode(HELD)).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.data)

    do_GET = do_HEAD = _answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=["whole", "changed"])
def address(request, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    data = encode(HELD)
    sent = data if request.param == "whole" else data[:-1] + b"!"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, sent, "c" * 40)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", where)
        stem = f"resnet18-{hashlib.sha256(data).hexdigest()[:8]}"
        known = {"resnet18": {stem: f"{where}/{stem}.pth"}}
        monkeypatch.setattr(vision, "published", lambda name: known.get(name, {}))
        yield request.param
        server.shutdown()


def schedule(folder: Path, *files: str) -> Path:
    folder.mkdir(exist_ok=True)
    stages = "".join(
        f'stage {{ name: "s{n}" from: "" solver_param {{ weights {{ file: "{f}" }} }} }}\n' for n, f in enumerate(files)
    )
    (folder / "schedule.prototxt").write_text(
        'name: "x" model { name: "resnet18" num_classes: 2 } data { train { source: "/d" images: 9 } }\n'
        'solver { batch_size: 3 device_batch_size: 3 base_lr: 1 lr_policy: "fixed" max_iter: 1 }\n' + stages
    )
    return folder


def test_fetch_downloads_what_is_as_published(address, tmp_path):
    folder = schedule(tmp_path / "s", "torchvision/resnet18", "timm/resnet18.a1", "torchvision/resnet18")
    done = CliRunner().invoke(main, ["check", str(folder), "--fetch"])
    files = [path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents]
    kept = [path.read_bytes() for path in files if path.stat().st_size > 100]
    if address == "changed":
        assert done.exit_code == 69 and "invalid hash value" in done.output and not kept
        return
    assert done.output.count("digest as published") == 2, done.output
    assert len(kept) > 1 and set(kept) == {encode(HELD)}
    again = CliRunner().invoke(main, ["check", str(folder), "--fetch"])
    assert again.output.count("exists: ") == 2
    wrong = CliRunner().invoke(
        main, ["check", "--fetch", str(schedule(tmp_path / "s", "torchvision/resnet1", "timm/missing"))]
    )
    assert wrong.exit_code == 64 and "2 mistakes" in wrong.output and "schedule.prototxt:3:" in wrong.output, (
        wrong.output
    )
