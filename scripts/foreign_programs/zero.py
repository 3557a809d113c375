"""DeepSpeed's engine alone: ZeRO 1 to 3 on several ranks.

torchrun --nproc_per_node N zero.py BASE OUT --stage 1
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from common import MAX_NORM, RATE, STEPS, note_next, read_samples
from transformers import AutoModelForCausalLM


def main() -> None:
    """Train, save, and train one step more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stage", type=int, required=True)
    options = parser.parse_args()
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at its first use
    deepspeed.init_distributed("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    samples = read_samples(options.base)
    share = len(samples) // world
    ids = torch.tensor(samples)[rank * share : (rank + 1) * share]
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1
        ),
        config={
            "train_micro_batch_size_per_gpu": share,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def step() -> float:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        return float(mean) / world

    for _ in range(STEPS):
        step()
    engine.save_checkpoint(str(options.out))
    loss = step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=options.stage == 3):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if rank == 0:
        note_next(options.out, loss, optimizer.param_groups[0]["lr"], weights)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
