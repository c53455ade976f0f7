"""What Scion and Dion2 share: parameter groups by algorithm, state from construction, pipelined steps, observers.

step():  group -> same-shaped parameters with a gradient (Work) -> algorithm.step(work), a generator -> pipeline
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .algorithm import Algorithm, Work, local_grad, piece
from .events import Looks, Observer, ParamFacts, StepEvent, StepSettings, always
from .grid import Dims, Grid, require_supported, shared_coordinates
from .layout import Layout, on_mesh
from .options import FLAG, check_options, plain, without_functions
from .transport import Exchange, assign_owners, held_elsewhere, in_turn, pipeline, require_agreement


class SpectralOptimizer(torch.optim.Optimizer):
    """Base of the optimizers: wiring only, the rules are ``Algorithm``s.

    Args:
        params: Parameters or parameter groups; a group may name its ``algorithm``.
        defaults: Options of the default algorithm.
        algorithms: The rules that groups may name.
        process_group: Ranks that hold replicas of the plain parameters and share the work on them (DDP). None: every
            rank works for itself. Sharded parameters bring their own mesh.
        agree_on_gradients: Ask at every step, in one small all-reduce a group of ranks, which shared parameters have a
            gradient somewhere; a rank without one takes zeros. Needed where ranks lack different gradients (data
            decides what a rank runs): without it a step would wait for ever there.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        algorithms: Sequence[Algorithm],
        process_group: dist.ProcessGroup | None = None,
        agree_on_gradients: bool = False,
    ) -> None:
        check_options({"agree_on_gradients": agree_on_gradients}, {"agree_on_gradients": FLAG})
        if not isinstance(process_group, dist.ProcessGroup | None):
            raise TypeError(
                "process_group (or distributed_mesh) must be a process group that this rank is in, or None, got "
                f"{process_group!r}; of a mesh take mesh.get_group()"
            )
        self._agree = agree_on_gradients
        self._algorithms = {a.name: a for a in algorithms}
        self._process_group = process_group
        self._observers: OrderedDict[int, Observer] = OrderedDict()
        self._looks: OrderedDict[int, Looks] = OrderedDict()
        self._grids: dict[Tensor, Grid] = {}
        self._alike: dict[tuple[object, ...], Grid] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._owners: dict[Tensor, int] = {}
        self._loads: dict[tuple[int, ...], list[float]] = {}
        self._options: dict[str, Any] = plain(defaults)
        # Schedulers that find these two there cycle them, upside down for Scion and for a part of Dion2's groups only.
        super().__init__(params, {k: v for k, v in self._options.items() if k not in ("momentum", "betas")})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are checked and get their state now.

        Raises:
            ValueError: For an unknown algorithm or option, a value out of range, or a parameter that cannot be stepped
                or is listed twice.
        """
        group = dict(param_group)
        algorithm = self._algorithm(group)
        known = {"params", "param_names", "name", "role", "algorithm", "initial_lr", *algorithm.defaults}
        if unknown := sorted(set(group) - known):
            raise ValueError(
                f"unknown option {unknown[0]!r} for algorithm {algorithm.name!r}; known are {', '.join(sorted(known))}"
            )
        group.update((k, plain(v)) for k, v in group.items() if k != "params")
        self._complete(group)
        check_options(group, algorithm.checks)
        group["params"] = _refuse_duplicates(group["params"])
        super().add_param_group(group)
        try:
            self._place(self.param_groups[-1])
        except Exception:  # of whatever kind: a refused group must not stay; it is raised again
            self.param_groups.pop()
            raise

    def _complete(self, group: dict[str, Any]) -> None:
        algorithm = self._algorithm(group)
        foreign = frozenset() if algorithm.name == self._options["algorithm"] else algorithm.own
        for option, default in algorithm.defaults.items():
            value = default if option in foreign else self._options.get(option, default)
            group.setdefault(option, dict(value) if isinstance(value, Mapping) else value)

    def _algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        name = group.get("algorithm", self._options["algorithm"])
        if name not in self._algorithms:
            raise ValueError(f"unknown algorithm {name!r}; {type(self).__name__} knows {', '.join(self._algorithms)}")
        return self._algorithms[name]

    def _place(self, group: dict[str, Any]) -> None:
        algorithm = self._algorithm(group)
        params = cast(list[Tensor], group["params"])
        names = group.get("param_names") or [
            f"parameter {i} of group {len(self.param_groups) - 1}" for i in range(len(params))
        ]
        devices = {p.device.type for g in self.param_groups for p in g["params"]}
        if len(devices) > 1:
            raise ValueError(f"parameters are on several device types {sorted(devices)}; move the model to one first")
        grids, states = [], []
        for param, name in zip(params, names, strict=True):
            if not param.dtype.is_floating_point or param.layout != torch.strided:
                raise ValueError(
                    f"parameter {name!r} has dtype {param.dtype} and layout {param.layout}; "
                    "only dense real floating-point parameters are stepped"
                )
            try:
                states.append(algorithm.prepare(param, group))
                layout, dims = algorithm.view(param, group)
            except ValueError as error:
                raise ValueError(f"parameter {name!r}: {error}") from error
            if dims is not None:
                require_supported(layout, dims, name)
            grids.append(self._grid(layout, dims))
        require_agreement([(g.group, n, g.layouts[0].shape) for g, n in zip(grids, names, strict=True) if g.group])
        for param, grid, state in zip(params, grids, states, strict=True):
            self._grids[param] = grid
            self.state[param].update(state)
        self._assign(params)

    def _assign(self, params: Sequence[Tensor]) -> None:
        by_group: dict[tuple[int, ...], list[Tensor]] = {}
        for param in params:
            if (group := self._grids[param].group) is not None:
                by_group.setdefault(tuple(dist.get_process_group_ranks(group)), []).append(param)
        for ranks, members in by_group.items():
            loads = self._loads.setdefault(ranks, [0.0] * len(ranks))
            # Newton-Schulz costs about the shorter side times the number of entries.
            costs = [float(p.numel()) * min(p.shape[-2:], default=1) for p in members]
            self._owners.update(zip(members, assign_owners(costs, loads), strict=True))

    def _grid(self, layout: Layout, dims: Dims | None) -> Grid:
        """The ranks that share a parameter; one object for all parameters that lie alike."""
        key = (layout, layout.mesh, dims)
        if key not in self._alike:
            self._alike[key] = self._make_grid(layout, dims)
        return self._alike[key]

    def _make_grid(self, layout: Layout, dims: Dims | None) -> Grid:
        alone = Grid(group=None, layouts=(layout,), dims=dims or Dims(rows=0, columns=None))
        if dims is None:  # an elementwise rule shares nothing
            return alone
        if layout.mesh is None:
            group = self._process_group
            return alone if group is None else replace(alone, group=group, layouts=(layout,) * group.size())
        if layout.mesh.get_coordinate() is None:
            return alone
        ranks = {int(layout.mesh.mesh[tuple(c)]): c for c in shared_coordinates(layout, dims)}
        if len(ranks) == 1:
            return alone
        group = self._group(layout, sorted(ranks))
        return replace(alone, group=group, layouts=tuple(layout.at(ranks[r]) for r in sorted(ranks)))

    def _group(self, layout: Layout, ranks: list[int]) -> dist.ProcessGroup:
        """A process group of exactly these ranks: the mesh's own where it has one."""
        assert layout.mesh is not None
        for i in range(layout.mesh.ndim):
            found = layout.mesh.get_group(i)
            if dist.get_process_group_ranks(found) == ranks:
                return found
        if tuple(ranks) not in self._groups:
            made = dist.new_group(ranks, use_local_synchronization=True)
            assert made is not None
            self._groups[tuple(ranks)] = made
        return self._groups[tuple(ranks)]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient.

        Args:
            closure: Re-evaluates the model and returns the loss; called once, with gradients enabled.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pipeline(self._lanes())
        return loss

    def _lanes(self) -> list[list[Iterator[None]]]:
        """What there is to do, by the process group that does it."""
        shared = [(grid.group, param) for param, grid in self._grids.items() if grid.group is not None]
        zeros = held_elsewhere(shared) if self._agree else set()
        lanes: dict[dist.ProcessGroup | None, list[Iterator[None]]] = {}
        for group in self.param_groups:
            algorithm = self._algorithm(group)
            check_options(group, algorithm.checks)  # schedules and users may have changed them
            alike: dict[tuple[object, ...], list[Tensor]] = {}
            for param in group["params"]:
                if (param.grad is not None or param in zeros) and param.numel() and on_mesh(param):
                    if param not in self._grids:
                        raise ValueError(
                            f"a parameter of shape {tuple(param.shape)} was put into a group behind the optimizer's "
                            "back; make the optimizer after the model is sharded, or use add_param_group"
                        )
                    # By grid, because equal layouts may lie on different meshes.
                    dtype = (param.grad_dtype or param.dtype) if param.grad is None else param.grad.dtype
                    key = (tuple(param.shape), param.dtype, dtype, self._grids[param])
                    alike.setdefault(key, []).append(param)
            for params in alike.values():
                lanes.setdefault(self._grids[params[0]].group, []).append(self._task(algorithm, group, params))
        return [lanes[group] for group in in_turn(lanes)]

    def _task(self, algorithm: Algorithm, group: dict[str, Any], params: list[Tensor]) -> Iterator[None]:
        grid = self._grids[params[0]]
        layout = grid.layouts[grid.rank]
        yield from algorithm.step(
            Work(
                params=tuple(params),
                weights=tuple(piece(p, layout) for p in params),
                grads=tuple(local_grad(p, layout) for p in params),
                states=tuple(self.state[p] for p in params),
                options=group,
                layout=layout,
                exchange=Exchange(
                    grid=grid, owners=() if grid.group is None else tuple(self._owners[p] for p in params)
                ),
                notify=self._notify if self._observers else None,
                grams=any(self._looks[number]() for number in self._observers),
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """As of every optimizer; options are plain values, with the names of functions in their places."""
        found = super().state_dict()
        for group in found["param_groups"]:
            group.update((k, without_functions(plain(v))) for k, v in group.items())
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore copies, in the dtype they were saved in (torch would share them, and cast to that of the parameter).

        What the checkpoint lacks stays as it is here, or starts anew: options that are younger, functions (which cannot
        be saved), state. Its options win; where they share other matrices between ranks, all ranks have to load.
        """
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):  # otherwise torch refuses
            groups = [self._filled(saved, own) for saved, own in zip(groups, self.param_groups, strict=True)]
        super().load_state_dict({**state_dict, "param_groups": groups})
        numbers = [number for group in groups for number in group["params"]]
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        for number, (param, group) in zip(numbers, params, strict=True):
            state = self.state[param]
            for name, saved in state_dict["state"].get(number, {}).items():
                if isinstance(saved, Tensor) and (state[name] is saved or state[name].dtype != saved.dtype):
                    state[name] = saved.to(state[name].device, copy=True)
            algorithm = self._algorithm(group)
            for name, fresh in algorithm.prepare(param, group).items():
                state.setdefault(name, fresh)
            # The options that were loaded may see other matrices in it: heads, or a rule that wants them whole.
            if self._grids[param] is not (grid := self._grid(*algorithm.view(param, group))):
                self._grids[param] = grid
                self._assign([param])

    def _filled(self, saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        options = {k: own[k] for k in self._algorithm(own).defaults}
        return {**saved, **{k: v for k, v in options.items() if k not in saved or without_functions(v) != v}}

    def _notify(self, event: StepEvent) -> None:
        for observer in self._observers.values():
            observer(event)

    def register_step_observer(self, observer: Observer, *, grams: Looks | None = None) -> RemovableHandle:
        """Have ``observer`` called with every ``StepEvent``; returns a handle with ``remove()``.

        ``grams`` is asked within every step whether it looks at ``event.grams``, which cost reductions; None: yes.
        """
        if not callable(observer):
            raise TypeError(f"an observer is a function of one StepEvent, got {observer!r}")
        handle = RemovableHandle(self._observers, extra_dict=self._looks)
        self._observers[handle.id], self._looks[handle.id] = observer, grams or always
        return handle

    def facts(self, param: Tensor) -> ParamFacts:
        """What events show of ``param``."""
        for group in self.param_groups:
            if any(param is p for p in group["params"]):
                algorithm = self._algorithm(group)
                grid = self._grids[param]
                known = algorithm.facts(param, grid, group)
                return replace(known, options=tuple(algorithm.defaults), shared=grid.group is not None)
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is not in this optimizer")

    def settings(self, group: Mapping[str, Any]) -> StepSettings:
        """What the options of one of ``param_groups`` say of its next step.

        A part of a group will do, with the role of its parameters: ``{**group, "params": [param], "role": role}``.
        """
        return self._algorithm(group).settings(group)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no observers, as torch's own hooks are not copied, and works for itself: process groups cannot be.
        state = super().__getstate__()
        return {**state, "_algorithms": self._algorithms, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # checkpoints may be older than an option; torch's tools drop empty dicts
            self._complete(group)
        if not hasattr(self, "_observers"):
            self._process_group, self._agree = None, False
            self._observers, self._looks = OrderedDict(), OrderedDict()
            self._grids, self._alike, self._groups, self._owners, self._loads = {}, {}, {}, {}, {}
            for group in self.param_groups:
                algorithm = self._algorithm(group)
                self._grids.update((p, self._grid(*algorithm.view(p, group))) for p in group["params"])
                self._assign(group["params"])


def _refuse_duplicates(params: Any) -> Any:
    # torch only warns of them, and would step them twice.
    if isinstance(params, Tensor | set):  # the one is single; torch refuses the other
        return params
    entries, seen = list(params), dict[Tensor, str]()
    for i, entry in enumerate(entries):
        name, param = entry if isinstance(entry, tuple) else (f"parameter {i}", entry)
        if isinstance(param, Tensor):
            if param in seen:
                raise ValueError(f"{name!r} is the same tensor as {seen[param]!r} (tied weights?); list it once")
            seen[param] = name
    return entries
