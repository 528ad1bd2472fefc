"""`compress_param` applied to a network: the method of each parameter, and the reducer."""

from collections.abc import Generator, Iterator
from dataclasses import replace

from torch import Tensor

from stagerun.base.events import Compressed, Event, Iterated, Note
from stagerun.base.recipe import Compression, Determinism, Method, Scope, Solver
from stagerun.base.text import count
from stagerun.comm import Comm, Reducer, runs_of
from stagerun.engine.loop import StageLoop
from stagerun.engine.state import TrainState
from stagerun.train.agreement import rank0
from stagerun.train.context import Context, StageRun
from stagerun.train.exchange import Read
from stagerun.train.progress import RESIDUAL
from stagerun.wire.choosing import resolved
from stagerun.wire.holding import NEEDED, Holding, Tensors, require_alike
from stagerun.wire.messages import Kept, operator, remembers, rules_of
from stagerun.wire.reducer import CompressedReducer, Cut, From, Residual
from stagerun.wire.rules import applied

BASIS = "basis/"


class Compressing(Holding):
    """`compress_param`: every sender's message goes to every rank."""

    file, field = RESIDUAL, "compress_param"
    residual: Residual | None = None  # what this rank's senders have not sent yet, if they remember it

    def __init__(self, state: TrainState, solver: Solver, determinism: Determinism, comm: Comm) -> None:
        super().__init__(state, solver, determinism, comm)
        how = solver.compress
        assert how is not None
        self.kept = Kept()  # a trial of a method keeps nothing
        if {how.method, *(rule.method for rule in how.param)} == {Method.NONE}:
            self.dense_bytes = 0
        if how.method is not Method.AUTO:
            self._take_up(how)

    def _take_up(self, how: Compression) -> None:
        """Send gradients by `how` from now on, with empty residuals."""
        self.how, self.rules = how, rules_of(self.state, how)
        # The senders of each rank: its logical workers with ELASTIC, itself with FIXED.
        elastic, size = self.determinism is not Determinism.FIXED, self.comm.size
        self.runs = runs_of(self.solver.logical_workers if elastic else size, size)
        tensors = {p.name: p.tensor for p in self.state.solver.parameters}
        self.tensors = {name: tensors[name] for name in self.rules}
        if any(remembers(rule) for rule in self.rules.values()):
            bases = {name: operator(rule, tensors[name].shape).basis() for name, rule in self.rules.items()}
            shapes = {name: shape for name, shape in bases.items() if shape}
            self.residual = Residual(self.tensors, self.runs, self.comm.rank, shapes)
            self.owners = [rank for rank, run in enumerate(self.runs) for _ in run]
            self.file_bytes = sum(t.nbytes for t in self.in_file().values())

    def begin(self, run: StageRun, loop: StageLoop) -> Generator[Event, None, bool]:
        how, residual = self.solver.compress, self.residual
        assert how is not None
        self.kept = Kept(self.solver.display if self.comm.rank == 0 else 0)
        if how.method is Method.AUTO:
            if not (yield from resolved(run, self.state, self._trial_reducer)):
                return False
            how = applied(how, run.choice)
            self._take_up(how)
            residual = self.residual
        before = self._restore(run) if residual is not None and run.resumes else 0
        if how.method is Method.POWER_SGD and (residual is None or not residual.bases):
            text = (
                f"POWER_SGD of rank {how.rank} makes no layer of `{run.stage.model.name}` smaller: stage `{run.stage.name}` sends "
                "gradients as they are; make `rank` smaller"
            )
            yield Note(text=text, warning=True)
        if residual is not None and before not in (0, residual.senders):
            yield Note(text=f"the residuals of {count(before, 'sender')} are shared out evenly over {residual.senders}")
        return (yield from super().begin(run, loop))

    def _trial_reducer(self, state: TrainState, method: str) -> Reducer:
        assert self.solver.compress is not None
        solver = replace(self.solver, compress=applied(replace(self.solver.compress, start_iter=0), {"*": method}))
        return Compressing(state, solver, self.determinism, self.comm).make_reducer()

    def make_reducer(self) -> Reducer:
        how, rules, tensors = self.how, self.rules, self.tensors
        if all(rule.method is Method.NONE for rule in rules.values()):
            return super().make_reducer()
        together = [name for name, rule in rules.items() if rule == how] if how.scope is Scope.ENTIRE_MODEL else []
        everything = (sum(tensors[name].numel() for name in together),)
        shapes = {name: everything if name in together else tensor.shape for name, tensor in tensors.items()}
        operators = [operator(rule, shapes[name], self.runs[-1].stop) for name, rule in rules.items()]
        cut = Cut(seed=self.solver.random_seed, each=self.determinism is not Determinism.FIXED, whole=len(together))
        after = CompressedReducer(tensors, operators, self.comm, self.runs, cut, self.residual, self.kept)
        return From(how.start_iter, super().make_reducer(), after) if how.start_iter else after

    def train(self, worker: Context, read: Read) -> Generator[Event, None, None]:
        for event in super().train(worker, read):
            yield event
            if isinstance(event, Iterated) and (items := self.kept.take()):
                yield Compressed(stage=event.stage, iter=event.iter, items=items)

    def in_file(self, senders: int | None = None) -> Tensors:
        """NAME [senders, ...] for each parameter, and BASIS/NAME. `senders`: by default this job's."""
        residual = self.residual
        if residual is None:
            return {}
        one, many = residual.by_name(residual.empty), residual.senders if senders is None else senders
        return {name: part.expand(many, *part.shape) for name, part in one.items()} | self.common()

    def common(self) -> Tensors:
        bases = self.residual.bases if self.residual is not None else {}
        return {f"{BASIS}{name}": basis for name, basis in bases.items()}

    def vector(self, number: int) -> Tensor:
        return self._remembered().room(number)

    def parts(self, number: int, vector: Tensor, file: Tensors) -> Iterator[tuple[Tensor, Tensor]]:
        return ((part, file[name][number]) for name, part in self._remembered().by_name(vector).items())

    def _remembered(self) -> Residual:
        assert self.residual is not None
        return self.residual

    def _restore(self, run: StageRun) -> int:
        """Restore the residuals from the snapshot; return its number of senders. If it differs, share their sum evenly: the weights still get
        the same."""
        now, before = self._remembered().senders, 0

        def fitted(saved: Tensors) -> Tensors:
            nonlocal before
            numbers = {len(tensor) for name, tensor in saved.items() if not name.startswith(BASIS) and tensor.dim()}
            if len(numbers) != 1 or 0 in numbers:
                raise ValueError("its residuals have different numbers of senders")
            before = numbers.pop()
            require_alike(saved, self.in_file(before))
            if before == now:
                return saved
            bases = {name: t for name, t in saved.items() if name.startswith(BASIS)}
            shares = {name: t.sum(0) / now for name, t in saved.items() if name not in bases}
            return bases | {name: share.expand(now, *share.shape) for name, share in shares.items()}

        self.restore(run, fitted)
        return rank0(self.comm, lambda: before)

    def needs_others(self) -> str:
        return NEEDED if self.residual is not None and self.comm.size > 1 else ""
