"""`compress_param` and `sync_param` without torch: the settings of each method, the rules, what AUTO chose, and all that in words.

A method is a row of METHODS, and an operator in `wire.messages.BUILT`. AUTO's choice for a stage, with the times behind it, is in
OUT/choices/STAGE.json.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stagerun import store
from stagerun.base.errors import listing
from stagerun.base.recipe import Compression, CompressionRule, Memory, Method, ParamKind, Scope, Solver, Stage
from stagerun.base.text import count
from stagerun.base.units import epochs
from stagerun.language.rules.rule import Found, Message, Rule, excludes, needs, read_by, wrong
from stagerun.language.tree import View
from stagerun.language.values import build
from stagerun.store.layout import choices_folder
from stagerun.system.typed import json_object, read_as

Setting = float | int | None
SETTINGS = ("ratio", "threshold", "qstates", "rank")  # by their names in Compression


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """`reads`: the default of each setting that the method reads, None if the operator chooses it for each tensor. `memory` is the default.
    `exact`: nothing is lost, so a residual would stay 0."""

    reads: Mapping[str, Setting] = field(default_factory=dict)
    memory: Memory = Memory.NONE
    exact: bool = False


METHODS: dict[Method, Traits] = {
    Method.NONE: Traits(exact=True),
    Method.TOP_K: Traits(reads={"ratio": 0.01}, memory=Memory.RESIDUAL),
    Method.RANDOM_K: Traits(reads={"ratio": 0.01}, memory=Memory.RESIDUAL),
    Method.THRESHOLD: Traits(reads={"threshold": 0.001}, memory=Memory.RESIDUAL),
    Method.TERNGRAD: Traits(),
    Method.QSGD: Traits(reads={"qstates": 255}),
    Method.POWER_SGD: Traits(reads={"rank": 4}, memory=Memory.RESIDUAL),
    Method.BF16: Traits(),
    Method.AUTO: Traits(memory=Memory.RESIDUAL),
}
# AUTO chooses among these unless `allow` is written.
ALLOWED = (Method.TOP_K, Method.QSGD, Method.BF16)


def settings_read(method: Method, allow: Sequence[Method]) -> Mapping[str, Setting]:
    """Return the settings that a method reads, with their defaults. AUTO reads the settings of all methods that it may choose; None if their
    defaults differ."""
    if method is not Method.AUTO:
        return METHODS[method].reads
    settings: dict[str, Setting] = {}
    for one in allow or ALLOWED:
        for name, default in METHODS[one].reads.items():
            settings[name] = default if settings.get(name, default) == default else None
    return settings


def settings_of(
    method: Method, *stated: Compression | CompressionRule, allow: Sequence[Method] = ()
) -> dict[str, Setting]:
    """Return the settings that a method reads, each from the first of `stated` that has it, else the method's default."""
    settings = {}
    for name, default in settings_read(method, allow).items():
        values = (getattr(one, name) for one in stated)
        settings[name] = next((value for value in values if value is not None), default)
    return settings


# AUTO's choice by parameter, "*" for all others, as in snapshots and OUT/choices.
Choice = Mapping[str, str]


def applied(how: Compression, choice: Choice) -> Compression:
    """Return AUTO replaced by its choice; the rules in `param` still come first. ValueError for a choice that `how` doesn't allow. Each method
    gets its default memory, unless `how` has none: with a residual QSGD may diverge."""
    methods = {name: Method(value) for name, value in choice.items()}
    if "*" not in methods or not set(methods.values()) <= {Method.NONE, *how.allow}:
        raise ValueError("not a choice among the methods that `compress_param` allows")
    rules = [
        CompressionRule(name=name, method=method, **_settings(method, how))
        for name, method in methods.items()
        if name != "*"
    ]
    rest = methods["*"]
    unset: dict[str, Any] = dict.fromkeys(SETTINGS)
    return replace(how, method=rest, allow=(), param=(*how.param, *rules), **unset | _settings(rest, how))


def _settings(method: Method, how: Compression) -> dict[str, Any]:
    memory = METHODS[method].memory if how.memory is Memory.RESIDUAL else Memory.NONE
    return {**settings_of(method, how), "memory": memory}


# -- in words


def sending(solver: Solver, images: int) -> str:
    """Describe how a stage sends gradients: `TOP_K 1 %, layer-wise, with a residual, from epoch 2`; '' if as they are, at every iteration."""
    compress = solver.compress
    if solver.sync is not None:
        return f"{count(solver.sync.replicas, 'replica')} by {solver.sync.method.value}"
    if compress is None:
        return ""
    parts = [method_text(compress.method, compress)]
    if compress.method is Method.AUTO:
        chosen = ", ".join(method_text(method, compress) for method in compress.allow)
        parts = [f"AUTO of {chosen} or dense"]
    if compress.method is not Method.NONE:
        parts.append("layer-wise" if compress.scope is Scope.LAYERWISE else "entire model")
    parts += ["with a residual"] if compress.memory is Memory.RESIDUAL else []
    parts += [f"from epoch {epochs(compress.start_iter, images, solver.batch_size):g}"] if compress.start_iter else []
    for rule in compress.param:
        kind = "" if rule.kind is ParamKind.ANY else f"{rule.kind.value} "
        parts.append(f"{kind}{rule.name}: {method_text(rule.method, rule)}")
    parts += ["two runs may choose differently"] if compress.method is Method.AUTO else []
    return ", ".join(parts)


# Texts of settings, after the method's name.
_SETTINGS = {
    "ratio": lambda value: f"{100 * value:g} %",
    "threshold": "at {:g}".format,
    "qstates": "of {} states".format,
    "rank": "of rank {}".format,
}


def method_text(method: Method, stated: Compression | CompressionRule) -> str:
    """Describe a method with its settings; NONE is `dense`."""
    if method is Method.NONE:
        return "dense"
    settings = settings_of(method, stated)
    return " ".join([method.value, *(_SETTINGS[name](value) for name, value in settings.items() if value is not None)])


# -- what AUTO chose


DENSE = Method.NONE.value
_MOST = 16_000_000  # bytes of a file; of hundreds of layers it has some 10 kB


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A choice counts for the same `identity` of the stage and `parent`, the id of the snapshot that the stage started from, '' for the seed.
    `seconds`: of an iteration, by timed method."""

    stage: str
    identity: str
    parent: str
    workers: int
    choice: dict[str, str]
    seconds: dict[str, float]

    @property
    def words(self) -> str:
        """Describe the choice without the network's tensors: `dense, TOP_K for 16 tensors`."""
        named = [method for name, method in self.choice.items() if name != "*"]
        texts = (f"{m} for {count(named.count(m), 'tensor')}" for m in dict.fromkeys(named))
        return ", ".join([called(self.choice["*"]), *texts])


def called(method: str) -> str:
    return "dense" if method == DENSE else method


def identity_of(stage: Stage) -> str:
    return hashlib.sha256(json.dumps(dict(stage.identity), sort_keys=True).encode()).hexdigest()


def path_of(out: Path, stage: str) -> Path:
    return choices_folder(out) / f"{stage}.json"


def read_chosen(out: Path, stage: Stage) -> Chosen | None:
    """Return the choice; None if it is missing, unreadable, or was made for another definition of the stage."""
    path = path_of(out, stage.name)
    try:
        data = store.LocalDisk().read(Path(os.path.realpath(path.parent)) / path.name, _MOST)
        chosen = read_as(Chosen, json_object(data))
    except (OSError, ValueError):
        return None
    return chosen if chosen.identity == identity_of(stage) else None


def write_chosen(disk: store.Disk, out: Path, chosen: Chosen) -> None:
    """Rank 0 only. StorageError, PermissionDenied."""
    store.write_atomic(disk, path_of(out, chosen.stage), json.dumps(asdict(chosen)).encode())


def grouped(sizes: Mapping[str, int], choice: Choice) -> list[tuple[str, int, int, str]]:
    """Return (method, tensors, numbers, names in words) of each method. `sizes`: numbers of each parameter, in model order."""
    names: dict[str, list[str]] = {}
    for name in sizes:
        names.setdefault(choice.get(name, choice["*"]), []).append(name)
    groups = []
    for method, some in names.items():
        text = ", ".join(some) if len(some) <= 2 else f"{some[0]} to {some[-1]}"
        groups.append((method, len(some), sum(sizes[name] for name in some), text))
    return groups


# -- compress_param


def compression(view: View) -> Compression:
    """Return the value, with defaults that follow from the method: settings and memory, also of its rules."""
    written = build(Compression, view, memory=Memory.NONE, param=())
    method, memory = written.method, view.text("memory")
    allow = written.allow or (ALLOWED if method is Method.AUTO else ())

    def completed(one: Any, *around: Compression) -> Any:
        kept = Memory(memory) if memory else METHODS[one.method].memory
        settings: dict[str, Any] = settings_of(one.method, one, *around, allow=allow)
        return replace(one, **settings, memory=kept)

    param = tuple(completed(build(CompressionRule, rule), written) for rule in view.views("param"))
    return replace(completed(written), allow=allow, param=param)


def _unread_settings(m: Message) -> Found:
    """Report settings that the method doesn't read, in the message itself and in each entry of `param`."""
    auto = m.method == "AUTO"
    allow = tuple(map(Method, m.allow)) if auto and "allow" in m.view.block.entries else ()
    for name in SETTINGS:
        if name in m.view.block.entries and name not in settings_read(Method(m.method), allow):
            readers = listing([method.value for method, traits in METHODS.items() if name in traits.reads])
            chosen = " with what it may choose here" if auto else ""
            text = f"method `{m.method}` does not read `{name}`{chosen}"
            yield m.place(name), text, f"remove it, or write method {readers}"


def _allow(m: Message) -> Found:
    """`allow` names methods that AUTO can choose, each once."""
    seen = set()
    for value in m.view.block.entries["allow"].values if m.method == "AUTO" else ():
        if value.value == "AUTO":
            yield value.span, "`AUTO` can't choose `AUTO`", "name methods that it may choose, or leave `allow` out"
        elif value.value == "NONE":
            yield value.span, "`allow` names `NONE`, which is always allowed", "remove it"
        elif value.value in seen:
            yield value.span, f"`allow` names `{value.value}` twice", "remove one of them"
        seen.add(value.value)


def _entire_model(m: Message) -> Found:
    """Report methods that a vector of all parameters can't have."""
    hint = "write `scope: LAYERWISE`"
    why = "with `scope: ENTIRE_MODEL`: a vector of all parameters is not a matrix"
    if m.scope != "ENTIRE_MODEL":
        return
    if m.method == "POWER_SGD":
        yield m.place("method"), f"method `POWER_SGD` {why}", hint
    for value in m.view.block.entries["allow"].values if m.allow else ():
        if value.value == "POWER_SGD":
            yield value.span, f"`allow: POWER_SGD` {why}", hint
    for rule in m.param:
        if rule.method not in ("NONE", "AUTO"):
            text = f"method `{rule.method}` for some parameters with `scope: ENTIRE_MODEL`, which makes all of them one vector"
            yield rule.place("method"), text, f"write `method: NONE`, which leaves them out of it, or {hint[6:]}"


def _loses_nothing(m: Message) -> bool:
    """Return whether all methods are exact, so that a residual stays 0."""
    return all(METHODS[Method(one.method)].exact for one in (m, *m.param) if one is m or one.method != "AUTO")


# -- sync_param


def _replicas(m: Message) -> Found:
    """Require equally many device batches for each replica."""
    batch, device = m.settings.batch_size, m.settings.device_batch_size
    logical = batch // device
    if m.method != "ASYNC" and batch % device == 0 and logical % m.replicas:
        fits = [str(n) for n in range(2, logical + 1) if logical % n == 0]
        hint = f"`replicas` can be {listing(fits)}" if fits else "make device_batch_size smaller"
        text = f"{count(m.replicas, 'replica')} can't share out a batch evenly: batch_size / device_batch_size is {logical}"
        yield m.place("replicas"), text, f"{hint} (batch_size {batch}, device_batch_size {device})"


_ASYNC, _PLATEAU = "sync_param.method: ASYNC", 'Solver.lr_policy: "plateau"'
_LATE = "pushes after the one that failed are applied already"
_UNKNOWN = "the next learning rate is needed before the last losses"
_PROOF = "between synchronisations each replica has its state"
_AVERAGE = "an average follows every update, and replicas meet only at some"
RULES = (
    Rule("CompressionParameter", _unread_settings),
    Rule("CompressionRule", _unread_settings),
    wrong(
        "CompressionParameter.allow", "`allow` goes with method `AUTO`, not with `{method}`",
        "remove it, or write `method: AUTO`",
        lambda m: m.method != "AUTO",
    ),
    Rule("CompressionParameter.allow", _allow),
    wrong(
        "CompressionRule.method: AUTO", "method `AUTO` can't be for some parameters only",
        "write `method: AUTO` outside `param`",
    ),
    Rule("CompressionParameter.scope", _entire_model),
    wrong(
        "CompressionParameter.memory: RESIDUAL", "`memory: RESIDUAL` with method `{method}`, which loses nothing",
        "remove it", _loses_nothing,
    ),
    wrong(
        "CompressionParameter.start_iter",
        "compression would start at iteration {start_iter}, and the stage ends after {settings.max_iter}",
        lambda m: f"stage `{m.stage}`: {m.settings.view.origin('max_iter')}",
        lambda m: m.start_iter >= m.settings.max_iter,
    ),
    *read_by("SyncParameter", "method", {
        "rule": "LOCAL", "alpha": "LOCAL", "momentum": "LOCAL", "outer": "DILOCO", "period": "LOCAL DILOCO",
        "start": "LOCAL DILOCO",
        "max_staleness": "ASYNC",
    }),
    needs("SyncParameter.method: LOCAL", "period", "", "write `period: 8`, say"),
    needs("SyncParameter.method: DILOCO", "period", "", "write `period: 64`, say"),
    needs("SyncParameter.method: ASYNC", "max_staleness", "", "write `max_staleness: 4`, say"),
    wrong(
        "SyncParameter.rule: QSR", "`rule: QSR` without `alpha`", "write `alpha: 0.2`, say, of SGD",
        lambda m: m.method == "LOCAL" and "alpha" not in m,
    ),
    wrong(
        "SyncParameter.alpha", "`alpha` without `rule: QSR`, which alone reads it", "write `rule: QSR`, or remove it",
        lambda m: m.method == "LOCAL" and m.rule != "QSR",
    ),
    Rule("SyncParameter.replicas", _replicas),
    wrong(
        "Solver.sync_param.start: WARMUP_END",
        "the replicas would start at the end of the warm-up, and the stage ends with it, after {max_iter} iterations",
        "write `start: STAGE_START`, or remove `sync_param`",
        lambda m: m.sync_param.method != "ASYNC" and m.warmup_iter and m.warmup_iter >= m.max_iter + m.policy_start_iter,
    ),
    excludes(
        "SyncParameter.replicas: 1", "method: ASYNC", "one replica never waits",
        "write `replicas: 2` or more, or remove `sync_param`",
    ),
    excludes("Solver.on_nan: ROLLBACK", _ASYNC, _LATE, "write `on_nan: STOP`"),
    excludes("Solver.on_nan: SKIP", _ASYNC, _LATE, "write `on_nan: STOP`"),
    excludes(_PLATEAU, _ASYNC, _UNKNOWN, "take another lr_policy, or `method: LOCAL`"),
    excludes(
        _PLATEAU, "sync_param.rule: QSR", "its learning rates depend on losses",
        "write `rule: CONSTANT`, or another lr_policy",
    ),
    excludes(
        "Solver.audit_param", "sync_param", _PROOF,
        'remove it, or leave it out of this stage: `clear: "audit_param"`',
    ),
    wrong(
        "Solver.sync_param", "`sync_param` with `compress_param`: replicas send their weights as they are, and seldom",
        'remove one of them from stage `{stage}`: `clear: "compress_param"` leaves it out there',
        lambda m: "compress_param" in m,
    ),
    excludes("Solver.ema_decay", "sync_param", _AVERAGE),
)  # fmt: skip
