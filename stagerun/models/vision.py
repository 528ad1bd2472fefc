"""torchvision, imported so that it works with a torch build that its wheel was not made for; published weights: their preprocessing, and their
download, which `stagerun check --fetch` puts where `run` looks for them."""

import http.client
import importlib
import math
import os
import re
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import suppress
from email.message import Message
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from stagerun.base.errors import PeerError, Problems, RecipeError, UsageError, nearest
from stagerun.base.recipe import Schedule
from stagerun.base.text import size
from stagerun.base.weights import Kind, Preprocessing, place_of
from stagerun.data.weights import TENSORS, Found, digest_of, timm_cache, torchvision_cache
from stagerun.system.files import writing

# torchvision feeds their weights pixels of mean 0.5 and deviation 0.5, by `transform_input`, which stagerun's networks don't have.
_TRANSFORM_INPUT = ("googlenet", "inception_v3")
_HUB = "https://huggingface.co"
_TIMEOUT_S = 30
_RETRY = "the same command tries again; HTTPS_PROXY names a proxy"


def torchvision_models() -> ModuleType:
    """Return `torchvision.models`."""
    return torchvision_part("torchvision.models")


def torchvision_part(module: str) -> ModuleType:
    """Import a module of torchvision by its dotted name. With a CPU build of torch the extension in PyPI's wheel does
    not load, and the import fails when a Python file registers a fake for the operator `torchvision::nms`. After that
    error, define the operators, which neither models nor transforms need, and import again. Defining them first would
    break a matching pair, which defines them itself."""
    try:
        return importlib.import_module(module)
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in [m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module(module)


def fetched(schedule: Schedule) -> Iterator[str]:
    """Download the published weights that a schedule names, and yield a line for each. Each file must have the digest that its
    publisher states. RecipeError for names without weights, PeerError, StorageError, PermissionDenied."""
    problems, names = Problems(schedule.files), set[str]()
    for stage in schedule.stages:
        start = stage.solver.start
        origin = place_of(start.file) if start is not None and start.file not in names else None
        if start is None or origin is None or not origin.published:
            continue
        names.add(start.file)
        fetch = _fetch_torchvision if origin.kind is Kind.TORCHVISION else _fetch_timm
        try:
            yield f"{start.file}: {fetch(origin.name)}"
        except UsageError as error:
            problems.add(stage.origins[stage.solver.start_field].span or stage.span, error.message, error.hint)
    if problems:
        raise RecipeError(problems.all())
    if not names:
        yield "no stage names published weights: nothing to fetch"


def published(network: str) -> dict[str, str]:
    """Return the addresses of torchvision's weights for a network by the file's name, the default first."""
    try:
        kinds = torchvision_models().get_model_weights(network)
    except ValueError:
        return {}
    return {one.url.rpartition("/")[2].removesuffix(".pth"): one.url for one in (kinds.DEFAULT, *kinds)}


@lru_cache
def published_preprocessing(name: str) -> Preprocessing | None:
    """Return what timm or torchvision publishes for a network or its weights: `resnet50`, `torchvision/resnet50-0676ba61`, `timm/resnet50`,
    `timm/resnet50.a1_in1k`. None if they publish nothing, or timm is not installed. Imports torch and the library: seconds."""
    models = torchvision_models()
    source, _, bare = name.rpartition("/")
    with suppress(ImportError, RuntimeError, ValueError, StopIteration):  # no timm; no such network or weights
        if source == "timm":
            from timm.models import get_pretrained_cfg

            if (timms := get_pretrained_cfg(bare)) is None or not timms.has_weights:
                return None
            crop = timms.input_size[-1]
            return _preprocessing(timms.mean, timms.std, crop, math.floor(crop / timms.crop_pct))
        network = bare.partition("-")[0]
        kinds = models.get_model_weights(network)
        weights = next(one for one in (kinds.DEFAULT, *kinds) if bare == network or f"/{bare}.pth" in one.url)
        how = weights.transforms()
        mean, std = ((0.5,) * 3, (0.5,) * 3) if network in _TRANSFORM_INPUT else (how.mean, how.std)
        return _preprocessing(mean, std, how.crop_size[0], how.resize_size[0])
    return None


def _preprocessing(mean: Iterable[float], std: Iterable[float], crop: int, resize: int) -> Preprocessing:
    mean, std = (tuple(round(255 * value, 3) for value in values) for values in (mean, std))
    return Preprocessing(mean=mean, std=std, crop=crop, resize=resize)


def _fetch_torchvision(name: str) -> str:
    urls = published(name.partition("-")[0])
    stem = name if "-" in name else next(iter(urls), "")
    if stem not in urls:
        hint = nearest(name, urls) or f"torchvision has {', '.join(urls)}"
        raise UsageError(f"torchvision has no weights `{name}`", hint if urls else "name one of its classifiers")
    return _download(urls[stem], torchvision_cache() / f"{stem}.pth", stem.rpartition("-")[2])


def _fetch_timm(name: str) -> str:
    """Arrange files as the Hub's library arranges a repository."""
    url = f"{os.environ.get('HF_ENDPOINT') or _HUB}/timm/{name}/resolve/main/{TENSORS}"
    headers = _headers(url, name)
    digest = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").strip('"')
    commit = headers.get("X-Repo-Commit") or ""
    if not re.fullmatch("[0-9a-f]{64}", digest) or not re.fullmatch("[0-9a-f]{40}", commit):
        raise PeerError(f"{url}: the server states no digest or no revision", "download it yourself, and name the file")
    folder = timm_cache() / f"models--timm--{name}"
    blob, path = folder / "blobs" / digest, folder / "snapshots" / commit / TENSORS
    line = _download(url, blob, digest)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():
            path.symlink_to(os.path.relpath(blob, path.parent))
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return line


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The Hub states digest and revision in its first answer, before it redirects."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _headers(url: str, name: str) -> Message:
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_TIMEOUT_S) as reply:
            return reply.headers  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        if 300 <= error.code < 400:
            return error.headers
        if error.code in (401, 404):
            hint = "huggingface.co/timm lists them, `resnet50.a1_in1k` say"
            raise UsageError(f"timm has no weights `{name}`", hint) from None
        raise PeerError(f"{url}: {error.code} {error.reason}", _RETRY) from None
    except OSError as error:
        raise PeerError(f"{url}: {getattr(error, 'reason', error)}", _RETRY) from None


def _download(url: str, target: Path, digest: str) -> str:
    """Say what was done. `digest`: the sha256, or its first digits."""
    if target.exists() and digest_of(Found(target)).startswith(digest):
        return f"exists: {target}"
    socket.setdefaulttimeout(_TIMEOUT_S)  # torch.hub has no timeout
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(url, str(target), digest, progress=sys.stderr.isatty())
        except RuntimeError as error:
            text = f"{url}: {error}"
            raise PeerError(text, "it was changed on its way, or is not what was published") from None
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError) as error:
            raise PeerError(f"{url}: {getattr(error, 'reason', error)}", _RETRY) from None
    return f"{size(target.stat().st_size)}, digest as published: {target}"
