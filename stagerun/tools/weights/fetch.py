"""`stagerun check --fetch`: downloads the published weights that a schedule names, into the caches of torch and of the Hugging Face Hub."""

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from stagerun.base.errors import PeerError, Problems, RecipeError, UsageError, nearest
from stagerun.base.recipe import Schedule
from stagerun.base.text import size
from stagerun.base.weights import Kind, Place, place_of
from stagerun.command.ending import show
from stagerun.data.weights import TENSORS, timm_cache, torchvision_cache
from stagerun.system.files import writing

_TIMEOUT_S = 30
_CHUNK = 1 << 20
_HUB = "https://huggingface.co"


def fetch(schedule: Schedule) -> None:
    """Download the published weights that a schedule names, `torchvision/NAME` and `timm/NAME`, to where `run` looks for them. RecipeError.

    Nothing else reaches into the network for weights, so that a job can't stop half way for want of one. Each file is checked
    against the digest that its publisher states.
    """
    problems, done = Problems(schedule.files), set()
    for stage, weights in [(s, s.solver.start) for s in schedule.stages if s.solver.start is not None]:
        place = place_of(weights.file)
        if place.kind not in (Kind.TORCHVISION, Kind.TIMM) or weights.file in done:
            continue
        done.add(weights.file)
        try:
            show(f"{weights.file}: {_fetched(place)}")
        except UsageError as error:
            problems.add(stage.origins[stage.solver.start_field].span or stage.span, error.message, error.hint)
    if problems:
        raise RecipeError(problems.all())
    if not done:
        show("no stage names published weights: there is nothing to fetch")


@dataclass(frozen=True, slots=True)
class Source:
    """`digest`: the sha256, or its first digits. `commit`: of the repository that it is a file of, '' where there is none."""

    url: str
    file: str
    digest: str
    commit: str = ""


def _fetched(place: Place) -> str:
    """What was done, in words."""
    source = _of_torchvision(place.name) if place.kind is Kind.TORCHVISION else _of_timm(place.name)
    folder = torchvision_cache() if place.kind is Kind.TORCHVISION else timm_cache() / f"models--timm--{place.name}"
    target = folder / source.file if not source.commit else folder / "blobs" / source.digest
    if target.exists() and _digest(target).startswith(source.digest):
        words = f"is there: {target}"
    else:
        words = f"{size(_download(source, target))}, digest as published: {target}"
    if source.commit:
        _link(folder, source, target)
    return words


def _link(folder: Path, source: Source, target: Path) -> None:
    """As the Hub's own library arranges a repository."""
    path = folder / "snapshots" / source.commit / source.file
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():
            path.symlink_to(os.path.relpath(target, path.parent))
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(source.commit)


def _of_torchvision(name: str) -> Source:
    urls = dict(published(name.partition("-")[0]))
    stem = name if "-" in name else next(iter(urls), "")
    if stem not in urls:
        hint = nearest(name, urls) or f"torchvision has {', '.join(urls)}"
        raise UsageError(f"torchvision has no weights `{name}`", hint if urls else "name one of its classifiers")
    return Source(urls[stem], f"{stem}.pth", stem.rpartition("-")[2])


def published(network: str) -> Iterator[tuple[str, str]]:
    """(name of the file, its address) of each set of weights that torchvision has for a network, its default first."""
    from stagerun.models.vision import torchvision_models

    try:
        kinds = torchvision_models().get_model_weights(network)
    except ValueError:
        return
    for one in [kinds.DEFAULT, *kinds]:
        yield one.url.rpartition("/")[2].removesuffix(".pth"), one.url


class _Here(urllib.request.HTTPRedirectHandler):
    """The Hub states digest and revision in its own answer, not in that of the place which it redirects to."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _of_timm(name: str) -> Source:
    url = f"{os.environ.get('HF_ENDPOINT') or _HUB}/timm/{name}/resolve/main/{TENSORS}"
    said = _headers(urllib.request.Request(url, method="HEAD"), name)
    digest, commit = (said.get("X-Linked-Etag") or said.get("ETag") or "").strip('"'), said.get("X-Repo-Commit") or ""
    if not re.fullmatch("[0-9a-f]{64}", digest) or not re.fullmatch("[0-9a-f]{40}", commit):
        raise PeerError(f"{url}: the server states no digest or no revision", "download it yourself, and name the file")
    return Source(url, TENSORS, digest, commit)


def _headers(request: urllib.request.Request, name: str) -> Message:
    try:
        with urllib.request.build_opener(_Here).open(request, timeout=_TIMEOUT_S) as reply:
            return reply.headers  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        if 300 <= error.code < 400:
            return error.headers
        if error.code in (401, 404):
            raise UsageError(
                f"timm has no weights `{name}`", "huggingface.co/timm lists them, `resnet50.a1_in1k` say"
            ) from None
        raise PeerError(f"{request.full_url}: {error.code} {error.reason}", _later()) from None
    except OSError as error:
        raise PeerError(f"{request.full_url}: {getattr(error, 'reason', error)}", _later()) from None


def _later() -> str:
    return "the same command tries again; HTTPS_PROXY names a proxy"


def _download(source: Source, target: Path) -> int:
    """Bytes. The file is there when it is whole, and has the digest. PeerError, StorageError, PermissionDenied."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    digest, count = hashlib.sha256(), 0
    try:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            file = open(partial, "wb")  # noqa: SIM115
        with file:
            for chunk in _chunks(source.url):
                digest.update(chunk)
                count += len(chunk)
                with writing(target):
                    file.write(chunk)
        if not digest.hexdigest().startswith(source.digest):
            message = f"{source.url}: what came has digest {digest.hexdigest()}, and not {source.digest}"
            raise PeerError(message, "it was changed on the way, or is not what was published")
        with writing(target):
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _chunks(url: str) -> Iterator[bytes]:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            while chunk := reply.read(_CHUNK):
                yield chunk
    except http.client.HTTPException as error:
        raise PeerError(f"{url}: the transfer broke off ({type(error).__name__})", _later()) from None
    except OSError as error:
        raise PeerError(f"{url}: {getattr(error, 'reason', error)}", _later()) from None


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
