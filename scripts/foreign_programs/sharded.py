"""FSDP2 of torch, with torch.distributed.checkpoint.

torchrun --nproc_per_node 2 sharded.py BASE OUT
"""

import argparse
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from common import MAX_NORM, RATE, STEPS, note_next, read_samples
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM


def main() -> None:
    """Train, save, and train one step more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    samples = read_samples(options.base)
    share = len(samples) // world
    ids = torch.tensor(samples)[rank * share : (rank + 1) * share]

    def step() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        return float(mean) / world

    for _ in range(STEPS):
        step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "step": STEPS}
    dcp.save(state, checkpoint_id=str(options.out / "checkpoint"))
    loss = step()
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    if rank == 0:
        note_next(options.out, loss, RATE, weights)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
