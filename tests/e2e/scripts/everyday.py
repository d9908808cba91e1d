"""A script with the habits of scripts that people have; it notes what each of its gradients was made of.

everyday.py FOLDER HABIT...: what is no habit is left alone, as any script does with arguments of others.
"""

import copy
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import rudra_zmq as rudra

SAMPLES, MU, POISONED = 101, 4, 17


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def data(samples: int = SAMPLES) -> torch.utils.data.TensorDataset:
    """Inputs, labels, and each sample's own index."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 8, generator=g)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long(), torch.arange(samples))


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)


def clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def main(folder: Path, habits: set[str]) -> None:
    with rudra.join() as learner:
        me = f"{learner.rank}-{learner.incarnation}"
        who = {"argv": sys.argv, "env": dict(os.environ), "threads": torch.get_num_threads(), "pid": os.getpid()}
        (folder / f"who-{me}.json").write_text(json.dumps(who))
        train = data(5) if "tiny" in habits else data()
        if "poison" in habits:
            train.tensors[0][POISONED] = math.nan
        model = learner.attach(net())
        average = copy.deepcopy(model)
        opt = learner.optimizer(optimizer(model))
        scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if "accumulate" in habits:
            learner.accumulate(3)
        steps = 0
        with open(folder / f"seen-{me}.jsonl", "w", buffering=1) as seen:
            for _ in learner.epochs():
                for x, y, i in learner.batches(train, batch_size=MU):
                    steps += 1
                    gid = [learner.rank, learner.incarnation, learner.seq]
                    note = {"id": gid, "indices": i.tolist(), "chief": learner.is_chief, "size": learner.size}
                    seen.write(json.dumps(note) + "\n")
                    once = learner.rank == 1 and steps == 3
                    if "slow" in habits:
                        time.sleep(0.05)
                    loss = F.cross_entropy(model(x), y)
                    if "amp" not in habits:
                        learner.step(loss * math.nan if once and "nan" in habits else loss)
                        continue
                    opt.zero_grad(set_to_none=steps % 2 == 0)
                    scaler.scale(loss * math.inf if once else loss).backward()
                    scaler.unscale_(opt)
                    clip(model)
                    scaler.step(opt)
                    scaler.update()
                    with torch.no_grad():
                        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                            mean.lerp_(p, 0.5)
                if "scheduler" in habits:
                    scheduler.step()
        if learner.is_chief and "amp" in habits:
            torch.save({"model": model.state_dict(), "average": average.state_dict()}, folder / "saved.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), set(sys.argv[2:]))
