"""With every s = 1 the rules are torch's, to float32 rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rudra_zmq.update.rules import GroupSpan, RuleSpec, new_state, reference_step

torch = pytest.importorskip("torch", reason="parity with torch.optim needs the extra [torch]")

N = 2000
CUT = 700
STEPS = 12

OPTIMISERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
}


@pytest.mark.parametrize("rule", OPTIMISERS)
@pytest.mark.parametrize("clip", [None, 20.0])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_equals_torch(rule: str, clip: float | None, decay: float) -> None:
    """Two groups, one of them with twice the rate and no decay; the mean of two gradients; a moving rate."""
    rng = np.random.default_rng(7)
    w = rng.standard_normal(N, dtype=np.float32)
    start = w.copy()
    first, second = (torch.nn.Parameter(torch.from_numpy(part.copy())) for part in (w[:CUT], w[CUT:]))
    name, options = OPTIMISERS[rule]
    groups = [{"params": [first], "weight_decay": decay}, {"params": [second], "weight_decay": 0.0}]
    optimiser = getattr(torch.optim, name)(groups, lr=1.0, **options)
    spec = RuleSpec.of(rule, [GroupSpan(0, CUT, 1.0, decay), GroupSpan(CUT, N, 2.0, 0.0)], clip)
    state = new_state(spec, N)
    for step in range(STEPS):
        lr = 0.02 / (1 + step)
        a, b = (rng.standard_normal(N, dtype=np.float32) for _ in range(2))
        optimiser.param_groups[0]["lr"], optimiser.param_groups[1]["lr"] = lr, 2 * lr
        mean = torch.from_numpy((a + b) / 2)
        first.grad, second.grad = mean[:CUT].clone(), mean[CUT:].clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([first, second], clip)
        optimiser.step()
        w = reference_step(spec, state, w, [(0.5, a), (0.5, b)], None, 1.0, 1.0, lr)
    theirs = torch.cat([first, second]).detach().numpy()
    moved = np.abs(theirs - start)
    assert moved.mean() > 1e-3
    assert (np.abs(w - theirs) <= 2e-6 + 2e-5 * moved).all()
