"""Run every Hopper kernel once on small shapes, for compute-sanitizer (see docs/kernels.md)."""

import torch
import torch.nn.functional as F

from lorax_server.kernels.hopper.ops import HopperOps
from lorax_server.kernels.ops import Activation
from tests.kernels.batches import Adapter, LinearCase, draw_adapters, error


def main() -> None:
    ops = HopperOps(torch.device("cuda", 0))
    adapters = [Adapter([16, 8]), Adapter([24, 0], vectors=True), Adapter([1, 72])]
    world = LinearCase(320, (256, 136), adapters, bias=True)
    gated = LinearCase(320, (256, 256), adapters)
    norms = LinearCase(64, (320,), [Adapter([0], vectors=True)] * 3)
    eps, weight = torch.tensor(1e-5, device="cuda"), world.normal(320)
    for rows in (3, 20, 64, 70, 130, 300):
        x, indices = world.normal(rows, 320), draw_adapters(rows, 3, rows)
        batch = world.batch(indices)
        got = ops.linear(x, world.weights, batch, world.targets)
        assert error(got, world.expected(x, indices)) < 0.01
        ops.linear(x, world.weights, None, ())
        ops.gated_linear(x, gated.weights, Activation("silu", F.silu), gated.batch(indices), gated.targets)
        ops.rms_norm(x, x, weight, eps, norms.batch(indices), norms.targets)
        ops.refresh_lora_plan(batch, batch)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
