"""A torch optimizer whose step is an exchange: the servers update, the script keeps its loop.

Owns: which optimizers of torch are rules of ours, their settings as groups of the flat vector, and the optimizer
object that schedulers and GradScaler see. Must not know: sockets, leases, how a gradient is gathered.

The object shares its groups with the optimizer that it was made from, so a scheduler may have been built on either.
Only `lr` may change once training runs: a step that finds another momentum or weight decay refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch

from rudra_zmq.errors import Rejected, UsageError
from rudra_zmq.learner.attach import AttachedModel
from rudra_zmq.learner.session import Session
from rudra_zmq.wire.messages.data import GroupRates, Rule

WHERE = "learner.optimizer()"
_FREE = {"lr", "foreach", "fused", "capturable"}  # may change while training runs, or change nothing


class _Kind:
    """One class of torch.optim: options that must have one value, and the rule with what it reads."""

    def __init__(self, fixed: Mapping[str, Any], rule: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.fixed = fixed
        self.rule = rule


def _sgd(group: dict[str, Any]) -> dict[str, Any]:
    if not group["momentum"]:
        return {"rule": "sgd"}
    return {"rule": "nesterov" if group["nesterov"] else "momentum", "momentum": float(group["momentum"])}


def _adam(rule: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def read(group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = (float(b) for b in group["betas"])
        decoupled = rule == "adamw" or bool(group.get("decoupled_weight_decay"))
        return {"rule": "adamw" if decoupled else "adam", "beta1": beta1, "beta2": beta2, "eps": float(group["eps"])}

    return read


_ADAM_FIXED = {"amsgrad": False, "maximize": False, "differentiable": False}
KINDS: Mapping[type[torch.optim.Optimizer], _Kind] = {
    torch.optim.SGD: _Kind({"dampening": 0, "maximize": False, "differentiable": False}, _sgd),
    torch.optim.Adagrad: _Kind(
        {"lr_decay": 0, "initial_accumulator_value": 0, "maximize": False, "differentiable": False},
        lambda g: {"rule": "adagrad", "eps": float(g["eps"])},
    ),
    torch.optim.RMSprop: _Kind(
        {"momentum": 0, "centered": False, "maximize": False, "differentiable": False},
        lambda g: {"rule": "rmsprop", "rho": float(g["alpha"]), "eps": float(g["eps"])},
    ),
    torch.optim.Adam: _Kind(_ADAM_FIXED, _adam("adam")),
    torch.optim.AdamW: _Kind(_ADAM_FIXED, _adam("adamw")),
}
"""By exact class: a subclass may do anything in its step."""


def settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The rule of `optimizer` and its constants. Rejected for a class or an option that no rule has."""
    kind = KINDS.get(type(optimizer))
    if kind is None:
        names = ", ".join(f"torch.optim.{cls.__name__}" for cls in KINDS)
        raise Rejected(f"{type(optimizer).__name__} has no rule on the servers", where=WHERE, fix=f"use {names}")
    found: dict[str, Any] | None = None
    for i, group in enumerate(optimizer.param_groups):
        for option, value in kind.fixed.items():
            if group.get(option, value) != value:
                message = f"{type(optimizer).__name__} with {option} = {group[option]} has no rule on the servers"
                raise Rejected(message, where=WHERE, fix=f"leave {option} at {value}")
        mine = kind.rule(group)
        if found is not None and mine != found:
            name = next(key for key in mine if mine.get(key) != found.get(key))
            raise Rejected(
                f"group {i} has {name} = {mine.get(name)}, group 0 has {found.get(name)}",
                where=WHERE,
                fix="groups may differ in lr and weight_decay alone",
            )
        found = mine
    assert found is not None  # torch refuses an optimizer without parameters
    return found


class Groups:
    """Spans of the flat vector, each of one group of the optimizer, or of none (frozen, left out): rate 0."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: AttachedModel) -> None:
        group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        ours = {id(p) for _, p in model.signature.params}
        for i, group in enumerate(optimizer.param_groups):
            if any(id(p) not in ours for p in group["params"]):
                fix = "give it model.parameters() of the module that learner.attach() returned, and nothing else"
                raise Rejected(f"group {i} has a parameter that is not the attached model's", where=WHERE, fix=fix)
        self.spans: list[tuple[int, int, int | None]] = []
        for (name, p), place in zip(model.signature.params, model.layout.params, strict=True):
            group_index = None if name in model.signature.frozen else group_of.get(id(p))
            if place.start == place.stop:
                continue
            if self.spans and self.spans[-1][2] == group_index:
                self.spans[-1] = (self.spans[-1][0], place.stop, group_index)
            else:
                self.spans.append((place.start, place.stop, group_index))

    def rates(self, groups: list[dict[str, Any]]) -> tuple[float, ...]:
        """The rate of each span now."""
        return tuple(0.0 if i is None else float(groups[i]["lr"]) for _, _, i in self.spans)

    def message(self, groups: list[dict[str, Any]]) -> list[GroupRates]:
        """The spans with rate and weight decay."""
        decays = [0.0 if i is None else float(groups[i]["weight_decay"]) for _, _, i in self.spans]
        rows = zip(self.spans, self.rates(groups), decays, strict=True)
        return [GroupRates(start, stop, lr, decay) for (start, stop, _), lr, decay in rows]


class RudraOptimizer(torch.optim.Optimizer):
    """What learner.optimizer() returns. Its state lives on the servers: state_dict() has the groups alone."""

    def __init__(self, optimizer: torch.optim.Optimizer, session: Session) -> None:
        self._ready = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self._inner = optimizer
        self._session = session
        self._kind = type(optimizer).__name__
        self.constants = settings(optimizer)
        self._spans = Groups(optimizer, session.model)
        self._watched = sorted(set(optimizer.defaults) - _FREE)
        self._agreed = self._options()
        self._ready = True
        self.rules = True  # whether the servers use it, or a rule of the job file
        self.loss: float | None = None  # of the step to come, where it is known

    def rule(self) -> Rule:
        """The optimizer as a rule of the servers."""
        return Rule(**self.constants, groups=self._spans.message(self.param_groups))

    @overload
    def step(self, closure: None = ...) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Exchange: push the gradients that are there, get weights. A closure is called once, before that.

        Raises UsageError and Rejected, one line with the fix, for a step that cannot be (see `Session.step`).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.loss = float(loss)
        if self.rules:
            self._check_options()
            self._session.rates = self._spans.rates(self.param_groups)
        known, self.loss = self.loss, None
        # A scheduler built on the inner one would warn that no step was made.
        self._inner._opt_called = True  # type: ignore[attr-defined]
        self._session.step(known)
        return loss

    def _check_options(self) -> None:
        for agreed, now in zip(self._agreed, self._options(), strict=True):
            for name, value in agreed.items():
                if now[name] != value:
                    raise Rejected(
                        f"{name} changed from {value} to {now[name]} after learner.optimizer()",
                        where="opt.step()",
                        fix="schedule lr alone (OneCycleLR: cycle_momentum=False)",
                    )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients of batches without a step are dropped with it, and their samples skipped."""
        super().zero_grad(set_to_none)
        self._session.dropped()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once made: the rule and its groups are agreed on with the servers."""
        if self._ready:
            fix = "give the optimizer all its groups before learner.optimizer()"
            raise UsageError("a group cannot be added to an optimizer of the servers", fix=fix)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Groups alone (rates, as schedulers keep them). Refused with state of a torch optimizer."""
        if state_dict.get("state"):
            fix = "resume the job with `rudra resume`; its snapshot has the state"
            raise UsageError("the optimizer's state lives on the servers and cannot be loaded here", fix=fix)
        shared = self.param_groups
        super().load_state_dict(state_dict)
        for old, new in zip(shared, self.param_groups, strict=True):
            old.update(new)
        self.param_groups = shared

    def _options(self) -> list[dict[str, Any]]:
        """What the rule was made from, rates apart."""
        return [{name: group[name] for name in self._watched} for group in self.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "an optimizer of the servers cannot be copied or saved whole", fix="save opt.state_dict() instead"
        )

    def __repr__(self) -> str:
        return f"Rudra{self._kind}({self.constants}, groups={len(self.param_groups)})"
