"""What the servers cannot do, tried one after the other; the last of it is not caught."""

import torch
import torch.nn.functional as F

import rudra_zmq as rudra

with rudra.join() as learner:
    model = learner.attach(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        learner.optimizer(torch.optim.SGD(model[1].parameters(), lr=0.2))
    except Exception as error:
        print("second optimizer:", error)
    train = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
    for step, (x, y) in enumerate(learner.batches(train, batch_size=4)):
        if step == 1:
            model.to(torch.float64)
            try:
                learner.step(F.cross_entropy(model(x.double()), y))
            except Exception as error:
                print("another dtype:", error)
            model.to(torch.float32)
        if step == 2:
            model.to(torch.bfloat16)
        if step == 3:
            model.load_state_dict(start)
        opt.zero_grad()
        learner.step(F.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y))
        print("step", step, model[0].weight.dtype)
